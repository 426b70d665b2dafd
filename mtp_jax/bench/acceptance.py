"""How many drafts come true on held-out text, greedy."""

from mtp_jax.bench.report import Report
from mtp_jax.bench.subject import DEMO, load, prompts_for
from mtp_jax.engine.request import SamplingParams, Speculation
from mtp_jax.llm import LLM


def run(model: str, depth: int, prompts: int, prompt_tokens: int, max_tokens: int, samples: int) -> Report:
    """Complete ``prompts`` prompts, eight at a time, up to end-of-text; quote the first few texts."""
    given = prompts_for(load(model), prompts, prompt_tokens)
    llm = LLM(
        None if model == DEMO else model,
        num_speculative_tokens=depth,
        max_num_seqs=8,
        max_model_len=prompt_tokens + max_tokens,
        compile_cache=None,
    )
    outputs = llm.generate(given.ids, SamplingParams(temperature=0, max_tokens=max_tokens))
    spec = sum((o.speculation for o in outputs), Speculation())
    accepted, steps = spec.accepted_per_position, max(spec.steps, 1)
    reached = (spec.steps, *accepted)
    rows = [
        (i + 1, f"{n / steps:.3f}", f"{n / max(before, 1):.3f}")
        for i, (n, before) in enumerate(zip(accepted, reached, strict=False))
    ]
    lengths = sorted(o.speculation.acceptance_length for o in outputs if o.speculation.steps)
    texts = [
        {
            "prompt": llm.tokenizer.decode(o.prompt_token_ids) if llm.tokenizer else o.prompt_token_ids,
            "completion": o.outputs[0].text or o.outputs[0].token_ids,
            "acceptance_length": o.speculation.acceptance_length,
        }
        for o in outputs[:samples]
    ]
    tokens = sum(len(o.outputs[0].token_ids) for o in outputs)
    summary = "every request ended with its first token."
    if lengths:
        summary = (
            f"acceptance length {spec.acceptance_length:.3f} at depth {depth}, per prompt {lengths[0]:.2f} "
            f"to {lengths[-1]:.2f}: {tokens} tokens in {spec.steps} steps."
        )
    notes = [
        summary,
        f"{prompts} prompts of {prompt_tokens} tokens ({given.source}), up to {max_tokens} tokens each, "
        "batch 8, greedy.",
        *(f"[{t['acceptance_length']:.2f}] {t['prompt']!r}\n  -> {t['completion']!r}" for t in texts),
    ]
    figures = {
        "acceptance_length": spec.acceptance_length,
        "acceptance_per_position": [n / steps for n in accepted],
        "per_prompt": lengths,
        "steps": spec.steps,
        "tokens": tokens,
        "samples": texts,
    }
    headers = ("draft", "accepted", "accepted if the ones before were")
    return Report(f"Acceptance: {model}", headers, rows, notes, figures)
