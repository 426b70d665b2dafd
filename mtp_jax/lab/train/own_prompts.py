"""Prompts that a model writes itself: it goes on from the beginning of a user's turn (arXiv 2406.08464)."""

import json
import os
from pathlib import Path

from mtp_jax.api.llm import LLM
from mtp_jax.api.progress import Reporter
from mtp_jax.engine.sampling_params import SamplingParams
from mtp_jax.errors import RequestError
from mtp_jax.json_object import JsonObject

LONGEST = 128
"""Tokens of a prompt at most: a text that has not ended there is no prompt. A question is a few sentences."""

# Below 0.7 the same questions come again, above 1 a small model writes no language.
_TEMPERATURES = (0.7, 0.85, 1.0)
# Temperatures of answers: a head is used greedily and with sampling.
_ANSWERS = (0.0, 0.7, 1.0)
_WAVES = 4  # of requests in a round, which is written as a whole
_FEWEST = 0.05  # share of a round that must be new prompts
# Texts do not depend on the head that is there, and many slots at a time leave drafts little to gain.
_DRAFTS = 0
_MARK = "\ue000user\ue000"  # characters for private use, which no template has


def write_own_prompts(
    llm: LLM, count: int, seed: int, sampling: JsonObject, path: Path, report: Reporter, phase: str
) -> None:
    """Write ``count`` different prompts, JSON lines as ``read_prompts`` reads them, unless they are there.

    Rounds that an interrupted run has written, beside ``path``, are kept.

    sampling: options of answers; each line has a temperature, in turn from several, unless one is given.
    phase: the name that ``report`` shows. Raises RequestError for a model that writes too few new prompts.
    """
    if path.exists():
        return
    start, folder, found = _beginning(llm), path.with_suffix(".rounds"), dict[str, None]()
    folder.mkdir(parents=True, exist_ok=True)
    size, number = _WAVES * llm.engine.config.max_num_seqs, 0
    with report.phase(phase, "prompt") as update:
        while len(found) < count:
            kept = folder / f"{number:06d}.json"
            if not kept.exists():
                _replace(kept, json.dumps(_round(llm, start, size, seed, number)))
            before = len(found)
            found |= dict.fromkeys(json.loads(kept.read_text(encoding="utf-8")))
            if len(found) < before + _FEWEST * size and len(found) < count:
                raise RequestError(
                    f"of {size} texts that the model wrote as a user {len(found) - before} were new prompts "
                    f"of at most {LONGEST} tokens, after {before}; ask for fewer, or give a file"
                )
            number += 1
            update(min(len(found), count), count)
    lines = list[JsonObject]()
    for i, text in enumerate([*found][:count]):
        own: JsonObject = {} if "temperature" in sampling else {"temperature": _ANSWERS[i % len(_ANSWERS)]}
        own["num_speculative_tokens"] = _DRAFTS
        lines.append({"messages": [{"role": "user", "content": text}], **own})
    _replace(path, "".join(json.dumps(line) + "\n" for line in lines))


def _beginning(llm: LLM) -> tuple[int, ...]:
    """The ids of a conversation up to the text of its first user.

    Raises RequestError for a model without a tokenizer or a chat template.
    """
    if llm.tokenizer is None:
        raise RequestError("tuning a head needs the model's tokenizer, which its folder lacks")
    text = llm.tokenizer.apply_chat_template([{"role": "user", "content": _MARK}])
    return tuple(llm.tokenizer.encode(text.partition(_MARK)[0], add_special_tokens=False))


def _round(llm: LLM, start: tuple[int, ...], size: int, seed: int, number: int) -> list[str]:
    """The prompts of a round: texts that ended by themselves."""
    params = [
        SamplingParams(
            temperature=_TEMPERATURES[i % len(_TEMPERATURES)],
            max_tokens=LONGEST,
            seed=(seed + 1) * 1_000_003 + number * size + i,
            num_speculative_tokens=_DRAFTS,
        )
        for i in range(size)
    ]
    outputs = llm.generate([start] * size, params)
    texts = [o.outputs[0].text.strip() for o in outputs if o.outputs[0].finish_reason == "stop"]
    return [text for text in texts if text]


def _replace(path: Path, text: str) -> None:
    part = path.with_name(f"{path.name}.part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)
