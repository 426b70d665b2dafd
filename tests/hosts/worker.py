"""One rank of a group that completes prompts: ``python -m tests.hosts.worker HOSTS RANK COORDINATOR JSON``.

JSON: ``mesh``, ``llm`` (options), ``jobs`` (prompts and sampling parameters), ``out`` (a file for what rank 0
got), ``draft`` (a prompt to draft after), ``other`` (a folder of other weights), ``loop`` (go on until it is
ended).

WORKER_MEMORY in the environment: bytes that each of its devices seems to have.
"""

import gc
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mtp_jax import LLM, Group, Hosts, SamplingParams, StructuredOutput, follow, join, make_mesh
from mtp_jax.api import cache_size
from mtp_jax.decode import weights
from mtp_jax.decode.runner import LocalRunner
from mtp_jax.hosts.channel import Channel
from mtp_jax.model.room import Room

LOOPED = [[5, 9, 11, 7], [8, 3]]


def params_of(given: dict[str, Any]) -> SamplingParams:
    """Sampling parameters, from JSON."""
    regex = given.pop("regex", None)
    return SamplingParams(**given, structured=regex and StructuredOutput(regex=regex))


def complete(llm: LLM, jobs: list[dict[str, Any]]) -> list[Any]:
    """[(token ids of each prompt, then experts where they are asked for; accepted drafts of all)] of each."""
    found = []
    for job in jobs:
        began = time.perf_counter()
        llm.warm_up(job["prompts"], [params_of(dict(p)) for p in job["params"]])
        compiled = time.perf_counter()
        outputs = llm.generate(job["prompts"], [params_of(dict(p)) for p in job["params"]])
        ids, accepted = (
            [o.outputs[0].token_ids for o in outputs],
            sum(o.speculation.accepted for o in outputs),
        )
        experts = [o.outputs[0].routed_experts for o in outputs]
        ids += [chosen.tolist() for chosen in experts if chosen is not None]
        ranks = [[p.rank for t in o.prompt_logprobs or () for p in (t or {}).values()] for o in outputs]
        found.append([ids + [r for r in ranks if r], accepted])
        seconds, programs = time.perf_counter() - compiled, len(llm.engine.runner.keys)
        print(
            f"{programs} programs: {compiled - began:.1f} s; {llm.engine.launches} launches: {seconds:.1f} s"
        )
    return found


def draft_and_again(llm: LLM, prompt: list[int], jobs: list[dict[str, Any]]) -> list[Any]:
    """The drafts after a prompt, as if all were accepted; and the first job with a cache allocated anew."""
    drafts = llm.draft(prompt, 2)
    llm.release_memory(["cache"])
    llm.resume_memory()
    return [[[drafts.token_ids], len(drafts.token_ids)], *complete(llm, jobs[:1])]


def scored_and_updated(llm: LLM, prompt: list[int], jobs: list[dict[str, Any]], other: str) -> list[Any]:
    """Scores, hidden states; with other weights too, and the first job, again after these were released.

    Arrays of several rows travel in pieces.
    """

    def scored() -> list[Any]:
        scores = llm.score(prompt)
        best = [a.argmax(axis=-1).tolist() for a in (scores.logits, *scores.mtp_logits)]
        (last,) = llm.hidden_states(prompt, [-1])
        assert np.abs(last - scores.hidden[-1]).max() < 1e-4 * np.abs(last).max()
        return [best, len(prompt)]

    found = [scored()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weights, "_PIECE", 1000)
        llm.update_weights(other, weight_version="other", probe=())
    found += [scored(), *complete(llm, jobs[:1])]
    llm.release_memory(["weights", "draft"])
    llm.resume_memory()
    return [*found, *complete(llm, jobs[:1])]


def _breakable() -> None:
    """SIGUSR1: the next launch raises. SIGUSR2: the connections of the launch log end."""

    def broken(*_: Any) -> Any:
        raise RuntimeError("a bug")

    def cut() -> None:
        for channel in [c for c in gc.get_objects() if isinstance(c, Channel)]:
            channel.signed.connection.close()

    signal.signal(signal.SIGUSR1, lambda *_: setattr(LocalRunner, "_do", broken))
    signal.signal(signal.SIGUSR2, lambda *_: cut())


def _pretend(memory: int, group: Group) -> None:
    """Let devices have ``memory`` bytes, all free; print numbers on which the ranks agree."""
    agree = group.least

    def least(mine: int) -> int:
        found = agree(mine)
        print(f"offered {mine}, agreed {found}")
        return found

    cache_size._memory = lambda mesh, fraction, asked: Room(memory, fraction, 0.0, 0.0)
    cache_size._programs = lambda runner, config, structured: 0.0
    group.least = least


def main(hosts: str, rank: str, coordinator: str, given: str) -> None:
    """Run to the end."""
    plan = json.loads(given)
    options = {**plan["llm"], "compile_cache": None}
    place = Hosts(int(hosts), int(rank), coordinator, join_seconds=plan.get("join_seconds", 60))
    options |= json.loads(os.environ.get("WORKER_OPTIONS", "{}"))
    with join(place) as group:
        _breakable()
        if memory := os.environ.get("WORKER_MEMORY"):
            _pretend(int(memory), group)
        options |= {"mesh": make_mesh(*plan["mesh"]), "group": group}
        if not group.leads:
            print("replayed", follow(**options))
            return
        llm = LLM(**options)
        found = complete(llm, plan.get("jobs", []))
        if "draft" in plan:
            found += draft_and_again(llm, plan["draft"], plan["jobs"])
        if plan.get("other"):
            found += scored_and_updated(llm, plan["draft"], plan["jobs"], plan["other"])
        if "out" in plan:
            Path(plan["out"]).write_text(json.dumps(found))
        while plan.get("loop"):
            outputs = llm.generate(LOOPED, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
            print("said", [o.outputs[0].token_ids for o in outputs])
            print("looping")


if __name__ == "__main__":
    main(*sys.argv[1:])
