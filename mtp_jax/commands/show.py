"""Output on the terminal: text, log-probabilities, JSON, and the line of figures after it."""

import os
import statistics
import sys
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from mtp_jax.engine.sampling_params import SamplingParams
from mtp_jax.engine.speculation import Speculation, TokenLogprobs
from mtp_jax.errors import amount
from mtp_jax.json_object import JsonObject

if TYPE_CHECKING:
    from mtp_jax.api.completions import Prompt
    from mtp_jax.api.llm import LLM
    from mtp_jax.api.outputs import CompletionOutput, RequestOutput

_GREEN, _PLAIN = "\x1b[32m", "\x1b[0m"
# A model's output must not drive a terminal: only line ends and tabs pass.
_CONTROL = dict.fromkeys((*range(9), *range(11, 32), *range(127, 160)), "�")


def write(text: str, marked: bool = False) -> None:
    """Write text to stdout, at once. marked: in green, where stdout shows colours."""
    text = text.translate(_CONTROL) if sys.stdout.isatty() else text
    sys.stdout.write(f"{_GREEN}{text}{_PLAIN}" if marked and text and colours() else text)
    sys.stdout.flush()


def colours() -> bool:
    """Whether stdout is a terminal that shows colours and NO_COLOR is not set (no-color.org)."""
    wanted = not os.environ.get("NO_COLOR") and os.environ.get("TERM", "dumb") != "dumb"
    return wanted and sys.stdout.isatty()


def note(text: str) -> None:
    """A line on stderr."""
    print(text, file=sys.stderr, flush=True)


def stream(
    llm: "LLM", prompt: "Prompt", params: SamplingParams, stopped: Callable[[], bool] = lambda: False
) -> "RequestOutput | None":
    """Print a completion as it grows, its token ids if there is no tokenizer, until it ends or ``stopped``.

    Drafted tokens are green on a terminal that shows colours. Returns the last output; None if stopped before
    the first.
    """
    output, tokens, shown = None, 0, ""
    updates = llm.stream(prompt, params)
    for output in updates:
        completion = output.outputs[0]
        texts = completion.token_texts if llm.tokenizer else [f"{t} " for t in completion.token_ids]
        for text, drafted in zip(texts[tokens:], completion.drafted[tokens:], strict=True):
            write(text, marked=drafted)
            shown += text
        tokens = len(texts)
        if stopped():
            break
    updates.close()
    if output is not None:  # text held back until the end has no token
        rest = visible(llm, output.outputs[0])[len(shown) :]
        write(rest)
        shown += rest
    if not shown.endswith("\n"):
        write("\n")
    return output


def visible(llm: "LLM", completion: "CompletionOutput") -> str:
    """A completion's text; its token ids if the model has no tokenizer."""
    return completion.text if llm.tokenizer else "".join(f"{t} " for t in completion.token_ids)


def logprob_table(llm: "LLM", rows: "list[TokenLogprobs | None]") -> str:
    """A line per token: its log-probability and rank, then the alternatives."""

    def name(token: int) -> str:
        return f"{token} {llm.tokenizer.decode([token], False)!r}" if llm.tokenizer else str(token)

    lines = []
    for row in rows:
        if row is None:  # the first token of a prompt has no score
            continue
        (token, chosen), *others = row.items()
        rest = "".join(f"  {name(t)} {p.logprob:.4f}" for t, p in others)
        lines.append(
            f"{chosen.logprob:9.4f}  rank {chosen.rank:<6} {name(token)}{'  |' if rest else ''}{rest}\n"
        )
    return "".join(lines)


def stats(output: "RequestOutput") -> str:
    """A line of tokens, time to first token, tokens per second after it, and the effect of speculation."""
    (completion,) = output.outputs
    count, first = len(completion.token_ids), output.timing.first_token
    parts = [f"{count} tokens ({completion.finish_reason or 'stopped'})"]
    if first is not None:
        parts.append(f"first after {first * 1000:.0f} ms")
    if rate := decode_rate(output):
        parts.append(f"then {rate:.0f} tokens/s")
    return ", ".join([*parts, *speculation(output.speculation)])


def totals(outputs: "list[RequestOutput]", seconds: float) -> str:
    """A line of figures for many completions that shared the engine for ``seconds``."""
    completions = [c for output in outputs for c in output.outputs]
    count = sum(len(c.token_ids) for c in completions)
    many = amount(len(completions), "completion")
    parts = [f"{count} tokens of {many} in {seconds:.2f} s: {count / seconds:.0f} tokens/s"]
    firsts = [f for output in outputs if (f := output.timing.first_token) is not None]
    if firsts:
        parts.append(f"median first token after {statistics.median(firsts) * 1000:.0f} ms")
    return ", ".join([*parts, *speculation(sum((o.speculation for o in outputs), Speculation()))])


def failed(outputs: "list[RequestOutput]") -> int:
    """Report the number of completions that ended with an error. Returns the exit status, 1 if any did."""
    ends = Counter(c.finish_reason for output in outputs for c in output.outputs)
    errors, stuck, many = ends["error"], ends["no_token"], amount(ends.total(), "completion")
    if stuck:
        note(
            f"error: {stuck} of {many} failed: structured output, --allowed-token-ids, "
            "--bad-word and --min-tokens together left no token to go on with"
        )
    if errors:
        note(
            f"error: {errors} of {many} failed: the model's "
            "numbers were not finite, or structured output grew too complex"
        )
    return 1 if errors or stuck else 0


def decode_rate(output: "RequestOutput") -> float:
    """Tokens per second after the first token; 0.0 with fewer than two tokens."""
    first, last = output.timing.first_token, output.timing.finished
    count = len(output.outputs[0].token_ids) - 1
    return count / (last - first) if count > 0 and first is not None and last is not None else 0.0


def speculation(s: Speculation) -> list[str]:
    """Acceptance length and acceptance at each position, as text; empty without drafts."""
    if not s.drafted:
        return []
    verified = [sum(d > i for d in s.drafted_per_step) for i in range(len(s.accepted_per_position))]
    rates = [f"{a / v:.0%}" for a, v in zip(s.accepted_per_position, verified, strict=True)]
    parts = [f"acceptance length {s.acceptance_length:.2f}", f"drafts accepted {' '.join(rates)} by position"]
    if off := s.drafted_per_step.count(0):
        parts.append(f"no drafts in {off} of {amount(s.steps, 'step')}")
    return parts


def as_json(output: "RequestOutput") -> JsonObject:
    """The outputs as JSON objects, one per prompt."""

    def entries(row: "TokenLogprobs | None") -> list[JsonObject] | None:
        if row is None:
            return None
        return [{"token_id": t, "logprob": p.logprob, "rank": p.rank} for t, p in row.items()]

    s = output.speculation
    result: JsonObject = {
        "prompt": output.prompt,
        "prompt_token_ids": output.prompt_token_ids,
        "outputs": [
            {"index": c.index, "text": c.text, "token_ids": c.token_ids}
            | {"finish_reason": c.finish_reason, "stop_reason": c.stop_reason}
            | ({} if c.logprobs is None else {"logprobs": [entries(row) for row in c.logprobs]})
            for c in output.outputs
        ],
        "speculation": {
            "steps": s.steps,
            "drafted": s.drafted,
            "accepted": s.accepted,
            "acceptance_length": s.acceptance_length,
            "accepted_per_position": s.accepted_per_position,
        },
        "seconds": {"first_token": output.timing.first_token, "finished": output.timing.finished},
    }
    if output.prompt_logprobs is not None:
        result["prompt_logprobs"] = [entries(row) for row in output.prompt_logprobs]
    return result
