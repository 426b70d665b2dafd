"""Acceptance of drafts on held-out text, greedy and sampled, and the quality of the model's text.

Greedy text of a small model runs into loops, and loops are easy to predict: the share of repeated text stands
beside every acceptance length, and sampled text shows the acceptance without loops. Bits per byte measure how
well the model predicts text that it did not write.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from mtp_jax.api.demo import path_of
from mtp_jax.api.llm import LLM
from mtp_jax.api.local import local_runner
from mtp_jax.api.outputs import RequestOutput
from mtp_jax.engine.sampling_params import SamplingParams
from mtp_jax.engine.speculation import Speculation
from mtp_jax.errors import ConfigError
from mtp_jax.json_object import JsonObject
from mtp_jax.lab.bench import bits, cost
from mtp_jax.lab.bench.report import Report
from mtp_jax.lab.bench.subject import EqualPrompts, Subject, prompts_for
from mtp_jax.lab.planning.work import expected_experts

_GRAM = 8


def repeated(tokens: Sequence[int], gram: int = _GRAM) -> float:
    """The share of runs of ``gram`` tokens that came before in the same text; 0 for a text too short."""
    grams = [tuple(tokens[i : i + gram]) for i in range(len(tokens) - gram + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


@dataclass(frozen=True)
class AcceptanceLoad:
    """The completions that acceptance is measured over: every prompt at every temperature.

    Attributes:
        depth: number of drafts per step.
        prompts: number of prompts.
        prompt_tokens: number of tokens of each prompt.
        max_tokens: largest number of tokens of a completion.
        samples: number of completions to show at each temperature.
        pieces: number of held-out texts to score.
        draft_vocab: numbers of tokens that drafts choose among, each of them measured; 0: all; none: as the
            model's list says.
    """

    temperatures: Sequence[float]
    depth: int
    prompts: int
    prompt_tokens: int
    max_tokens: int
    samples: int
    pieces: int
    draft_vocab: Sequence[int] = ()


def run(model: str, load: AcceptanceLoad) -> Report:
    """Complete the prompts eight at a time, up to end-of-text; show the first texts. Raises ConfigError."""
    depth = load.depth
    if depth < 1:
        raise ConfigError(f"depth = {depth}; expected at least 1: without drafts there is nothing to accept")
    directory = path_of(model)
    levels, text, source = [], None, ""
    for number, tokens in enumerate(load.draft_vocab or [None]):
        llm = LLM(
            directory,
            num_speculative_tokens=depth,
            max_num_seqs=8,
            max_model_len=load.prompt_tokens + load.max_tokens,
            draft_vocab=tokens,
            compile_cache=None,
        )
        params, config = local_runner(llm.engine).params, llm.engine.config
        subject = Subject(model, directory, llm.config, params, config.dtype)
        given = prompts_for(subject, load.prompts, load.prompt_tokens)
        if not number:
            text, source = bits.held_out(llm, load.pieces), given.source
        about = {
            "draft_vocab": len(config.draft_vocab) if config.draft_vocab else llm.config.vocab_size,
            "draft_bytes": cost.of_draft(params).touched(expected_experts(llm.config, 1)),
        }
        levels += [about | _level(llm, given, load, temperature) for temperature in load.temperatures]
    rows = [_row(f, text) for f in levels]
    headers = (
        "temperature",
        "drafted tokens",
        "MB per draft",
        "acceptance length",
        *(f"draft {i + 1}" for i in range(depth)),
        f"repeated {_GRAM}-grams",
        "completions that repeat one",
        "bits per byte",
    )
    note = (
        f"{load.prompts} prompts of {load.prompt_tokens} tokens ({source}), up to {load.max_tokens} "
        f"tokens each, depth {depth}, batch 8. draft i: share of steps in which drafts 1 to i were all "
        "accepted. Drafted tokens: tokens that drafts choose among. MB per draft: weights that a draft reads."
    )
    quotes = [quote for f in levels for quote in _quotes(f)]
    figures = {"temperatures": levels, "held_out_text": _held_out(text)}
    return Report(f"Acceptance: {model}", headers, rows, [note, _about(text), *quotes], figures)


def _level(llm: LLM, given: EqualPrompts, load: AcceptanceLoad, temperature: float) -> JsonObject:
    """All completions at one temperature."""
    params = [
        SamplingParams(temperature=temperature, max_tokens=load.max_tokens, seed=i)
        for i in range(load.prompts)
    ]
    outputs = llm.generate(given.ids, params)
    found = {"temperature": temperature, **figures_of(outputs, load.depth)}
    return found | {"samples": [_sample(llm, o) for o in outputs[: load.samples]]}


def _row(f: JsonObject, text: bits.Bits | None) -> tuple[str, ...]:
    return (
        f"{f['temperature']:g}",
        f"{f['draft_vocab']:,}",
        f"{f['draft_bytes'] / 1e6:.2f}",
        f"{f['acceptance_length']:.3f}",
        *(f"{p:.3f}" for p in f["acceptance_per_position"]),
        f"{f['repeated']:.0%}",
        f"{f['completions_that_repeat']:.0%}",
        f"{text.per_byte:.3f}" if text else "-",
    )


def _quotes(f: JsonObject) -> list[str]:
    """The first completions at one temperature."""
    label = f"temperature {f['temperature']:g}, acceptance length"
    return [
        f"[{label} {t['acceptance_length']:.2f}] {t['prompt']!r}\n  -> {t['completion']!r}"
        for t in f["samples"]
    ]


def _held_out(text: bits.Bits | None) -> JsonObject | None:
    return None if text is None else {"bits_per_byte": text.per_byte, **asdict(text)}


def _about(text: bits.Bits | None) -> str:
    """A note on the column of bits per byte."""
    if text is None:
        return "bits per byte: not measured, the model has no tokenizer."
    return (
        f"bits per byte: of the model, at every temperature the same: -log2 p of {text.tokens:,} tokens over "
        f"their {sum(text.bytes):,} UTF-8 bytes, teacher-forced, in {len(text.bits)} pieces of "
        f"{text.context} tokens from standard library files held out of the embedded model's training; a "
        "piece's first token is given, and no token sees another piece."
    )


def figures_of(outputs: Sequence[RequestOutput], depth: int) -> JsonObject:
    """Figures at one temperature: acceptance and repetition of completions of this depth."""
    spec = sum((o.speculation for o in outputs), Speculation())
    accepted = [*spec.accepted_per_position, *[0] * depth][:depth]
    tokens = [o.outputs[0].token_ids for o in outputs]
    return {
        "acceptance_length": spec.acceptance_length,
        "acceptance_per_position": [n / max(spec.steps, 1) for n in accepted],
        "per_prompt": [o.speculation.acceptance_length for o in outputs],
        "repeated": sum(map(repeated, tokens)) / len(tokens),
        "completions_that_repeat": sum(repeated(t) > 0 for t in tokens) / len(tokens),
        "steps": spec.steps,
        "tokens": sum(map(len, tokens)),
    }


def _sample(llm: LLM, output: RequestOutput) -> JsonObject:
    done = output.outputs[0]
    return {
        "prompt": llm.tokenizer.decode(output.prompt_token_ids) if llm.tokenizer else output.prompt_token_ids,
        "completion": done.text if llm.tokenizer else done.token_ids,
        "acceptance_length": output.speculation.acceptance_length,
    }
