"""Random histories of an engine on a simulated device; what must hold after every launch and at the end."""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from mtp_jax.decode.arrays import MaskMaker
from mtp_jax.decode.launches import ON_CPU, UNROLLED, Launch, Move, Traits
from mtp_jax.engine.config import EngineConfig
from mtp_jax.engine.engine import Engine
from mtp_jax.engine.request import Request
from mtp_jax.engine.sampling_params import SamplingParams
from mtp_jax.simulate.device import Simulated
from mtp_jax.simulate.language import Language, mix
from mtp_jax.simulate.memory import SlotMemory
from mtp_jax.text.grammar import Grammars, StructuredOutput
from tests.models import TINY
from tests.simulate.oracle import Told, prefix

HISTORIES, LAUNCHES = 50, 420
HEADER = 84  # bytes of a file besides its page
EOS, BROKEN, VOCAB = 1, 3, 112
ROUTING = 2, 3, 200
"""Layers, experts of a token, experts."""
CFG = replace(TINY, vocab_size=VOCAB, eos_token_ids=(EOS,))
REGEXES = ("[a-m ]{6,16}[x-z]", "(yes|no|perhaps not)", "[0-9]{3}-[0-9]{2,5}", r"a{20}b")


class History:
    """One engine, and requests that come, go and end at random. ``run`` raises AssertionError.

    Attributes:
        seen: how often what happened.
        kept, offered: of each position, drafts that were kept, and drafts before which all were.
    """

    def __init__(
        self, seed: int, grammars: Grammars | None = None, folder: Path | None = None, files: int = 40
    ) -> None:
        """folder: where pages are kept in files, of which ``files`` have room."""
        self.random, self.seed = random.Random(seed), seed
        r = self.random
        self.shards = r.choice([1, 1, 2])
        depth = r.choice([0, 1, 3, 3, 4])
        rates = tuple(r.choice([0.2, 0.6, 0.9, 1.0]) for _ in range(depth))
        size, slots = r.choice([4, 8, 16]), self.shards * r.choice([1, 2, 3])
        longest = 96
        most = -(-(longest + depth) // size)
        tier = r.random() < 0.5 or folder is not None
        page_bytes = (2 * size + 1) * 8
        self.config = EngineConfig(
            max_num_seqs=slots,
            max_model_len=longest,
            page_size=size,
            prefill_chunk=r.choice([16, 32]),
            num_speculative_tokens=depth,
            adaptive_depth=r.random() < 0.7,
            num_pages=most + r.choice([0, 1, most]),
            host_cache_gib=r.choice([8, 64, 512]) * page_bytes / 2**30 if tier else 0.0,
            return_routed_experts=True,
        )
        if folder:
            room = files * (page_bytes + HEADER) / 2**30
            self.config = replace(self.config, file_cache=folder, file_cache_gib=room, file_cache_seconds=600)
        ranked = self.config.adaptive_depth and depth > 1 and slots > 1 and seed % 3 == 0
        self.config = replace(self.config, adaptive_verification=ranked)
        ends = r.choice([0.0, 0.02])
        self.language = Language(VOCAB, rates, seed, None, (EOS,), ends, frozenset({BROKEN}))
        self.languages = {"0": self.language}
        memory = SlotMemory(slots, self.config.pages_per_shard(self.shards), size, self.shards)
        self.device = Watched(self.language, memory, margins=ranked, routing=ROUTING)
        self.device.traits = (ON_CPU, UNROLLED, Traits(by_rows=False), UNROLLED)[seed % 4]
        self.engine = Engine(CFG, self.config, self.device, grammars)
        # Measured time must decide nothing: a seed is one history.
        self.engine.depth.choose = lambda keys, *rest: r.choice(list(keys))  # type: ignore[method-assign]
        if self.engine.tier and self.engine.tier.files:
            self.engine.tier.files.identity = lambda: repr(self.device.language)
        self.grammars = grammars
        self.all, self.turns = list[Request](), 0
        self.stems = [[r.randrange(4, VOCAB) for _ in range(r.randrange(1, 60))] for _ in range(4)]
        self.seen: Counter[str] = Counter()
        self.kept, self.offered = [0] * depth, [0] * depth

    # What happens

    def run(self, launches: int) -> None:
        """Serve for so many launches, then to the end."""
        first, rest = self.engine.warm_up_keys()
        self.device.compile([*first, *rest] if self.random.random() < 0.5 else first)
        while self.engine.launches < launches:
            self._happen()
            self.step()
        while self.engine.busy:
            self.step()
        assert self.engine.stats().pages_used == 0, "free pages return"
        for request in self.all:
            self.check_text(request)
        self.seen["launches"] += self.engine.launches
        self.seen["preempted"] += self.engine.scheduler.preemptions
        stats = self.engine.stats()
        self.seen["hits"] += stats.prefix_hits
        self.seen["fetched"] += stats.hits_by_tier["file"]
        self.seen["restored"] += self.engine.tier.restored if self.engine.tier else 0
        self.seen["moved"] += self.device.moved

    def step(self) -> None:
        """One turn, and what must hold after it."""
        self.engine.step()
        self.turns += 1
        assert self.turns < 20 * self.engine.launches + 1000, "nothing goes on"
        self.check_pages()

    def _happen(self) -> None:
        r, live = self.random, self.engine.scheduler.live()
        if len(live) < 2 * self.config.max_num_seqs and r.random() < (0.7 if not live else 0.25):
            self._submit()
        if live and r.random() < 0.01:
            self.engine.abort(r.choice(live))
            self.seen["aborted"] += 1
        if live and r.random() < 0.01:
            object.__setattr__(r.choice(live), "deadline", 0.0)  # a clock would be no part of a seed
            self.seen["late"] += 1
        if r.random() < 0.002:
            self._other_weights()

    def _other_weights(self) -> None:
        """As ``AsyncLLM`` changes them: requests that have not begun wait, the others end."""
        self.engine.hold()
        while self.engine.busy:
            self.step()
        self.language = self.device.language = replace(self.language, seed=self.random.randrange(2**32))
        self.engine.new_weights(str(len(self.languages)))
        self.languages[self.engine.weight_version] = self.language
        self.engine.resume()
        self.seen["weights"] += 1

    def _submit(self) -> None:
        r = self.random
        stem = r.choice(self.stems)
        prompt = [*stem[: r.choice([len(stem), r.randrange(len(stem) + 1)])]]
        prompt += [r.randrange(4, VOCAB) for _ in range(r.randrange(0 if prompt else 1, 12))]
        if r.random() < 0.03:
            prompt.insert(r.randrange(len(prompt)), BROKEN)
        if r.random() < 0.3 and self.all:  # the next turn of a conversation
            before = r.choice(self.all)
            prompt = [*before.prompt, *before.progress.output, *prompt][:80]
        request = self.engine.make_request(prompt, self._params(), priority=r.choice([0, 0, 0, 1]))
        self.engine.submit(request)
        self.all.append(request)

    def _params(self) -> SamplingParams:
        r, depth = self.random, self.config.num_speculative_tokens
        given: dict[str, Any] = {"temperature": 0, "max_tokens": r.choice([1, 2, 7, 20, 40])}
        kind = r.choice(["plain"] * 6 + ["sampled", "sampled", "adjusted", "structured", "scored"])
        if kind == "sampled":
            given |= {"temperature": 0.8, "seed": r.choice([None, 5])}
        if kind == "adjusted":
            given |= r.choice(
                [
                    {"logit_bias": {7: 40.0, 9: -100.0}},
                    {"allowed_token_ids": [5, 6, 7, 8, EOS]},
                    {"presence_penalty": 1.5, "repetition_penalty": 2.0},
                    {"min_tokens": 1, "stop_token_ids": list(range(4, 40))},
                    {"logit_bias": {BROKEN: 100.0}},
                ]
            )
        if kind == "scored":
            given |= {"logprobs": r.choice([0, 3]), "prompt_logprobs": r.choice([None, 2])}
        if kind == "structured" and self.grammars:
            given |= {"structured": StructuredOutput(regex=r.choice(REGEXES))}
            self.seen["structured"] += 1
        if r.random() < 0.2:
            given["num_speculative_tokens"] = r.randrange(depth + 1)
        return SamplingParams(routed_experts=len(self.all) % 2 > 0, **given)

    # What must hold

    def check_pages(self) -> None:
        """Every page is free, kept by the prefix cache, or held by as many requests as the pool counts."""
        scheduler = self.engine.scheduler
        for shard, pool in enumerate(scheduler.pools):
            held = Counter(p for r in scheduler._in_shard(shard) for p in r.residence.pages)
            assert [held[p] for p in range(pool.pages)] == pool._users
            known = {*pool._digest_of}
            unused = {p for p in range(pool.pages) if not held[p]}
            assert sorted([*pool._free, *pool._idle]) == sorted(unused), "each page once"
            assert {*pool._idle} == unused & known
            assert {p for p, n in held.items() if n > 1} <= known | self._private(shard), "who shares"
        for slot, request in enumerate(scheduler.slots):
            assert request is None or (
                request.residence.slot == slot
                and len({*request.residence.pages}) == len(request.residence.pages)
            )

    def _private(self, shard: int) -> set[int]:
        """Pages that were shared before somebody had them forgotten."""
        return {
            p
            for r in self.engine.scheduler._in_shard(shard)
            for p in r.residence.pages[: r.residence.registered]
        }

    def check_text(self, request: Request) -> None:
        """A request ended with the language's own text, and with as many drafts as were right."""
        assert request.finished
        where, own = f"request {request.id}: {request.params}", request.progress
        if own.weight_version is None:
            assert not own.output, where
            return
        told = Told(self.languages[own.weight_version], request)
        self._check_experts(request, told)
        reason = own.finish_reason
        if reason in ("abort", "timeout"):
            assert prefix(own.output, told.output), where
        else:
            assert (own.output, reason) == (told.output, told.reason), where
        self.seen[str(reason)] += 1
        speculation, kept = own.speculation, told.accepted()
        assert len(speculation.accepted_per_step) >= bool(len(own.output) > 1), where
        if request.params.structured:
            self.seen["structured drafts kept"] += speculation.accepted
            return
        if told.reason != "error":
            assert speculation.accepted_per_step == kept, where
        if reason == "error":
            return
        for drafted, accepted in zip(speculation.drafted_per_step, kept, strict=True):
            for k in range(min(accepted + 1, drafted)):
                self.offered[k] += 1
                self.kept[k] += accepted > k
        self._check_scores(request, told)

    def _check_experts(self, request: Request, told: Told) -> None:
        """Experts are those of all rows that the request had when it ended; a row chooses by its number."""
        read, (layers, chosen, experts) = request.progress.routed_experts, ROUTING
        assert (read is None) == (not request.params.routed_experts)
        if read is None:
            return
        tokens = [*request.prompt, *request.progress.output][:-1]
        found, cut = read()[: len(tokens)], request.progress.finish_reason in ("abort", "timeout")
        assert len(found) == len(tokens) or cut or not request.progress.output
        rows = [told.language.row(token, i) for i, token in enumerate(tokens[: len(found)])]
        each = np.array(rows, np.uint64)[:, None] + np.arange(layers * chosen, dtype=np.uint64)
        np.testing.assert_array_equal(found.reshape(each.shape), mix(each) % np.uint64(experts))
        self.seen["experts"] += 1

    def _check_scores(self, request: Request, told: Told) -> None:
        p, own = request.params, request.progress
        if p.logprobs is None:
            return
        assert len(own.logprobs) == len(own.output)
        for token, hidden, scores in zip(own.output, told.hidden, own.logprobs, strict=False):
            rank = told.language.rank(hidden, token)
            assert scores[token].rank == rank + 1
            assert abs(scores[token].logprob - told.language.logprob(rank)) < 1e-5
        if p.prompt_logprobs is not None and own.output:
            assert len(own.prompt_logprobs) == len(request.prompt)


class Watched(Simulated):
    """Counts requests that moved."""

    moved = 0

    def _launch(self, launch: Launch[Any], masks: MaskMaker | None) -> Callable[[], Any]:
        self.moved += isinstance(launch, Move)
        return super()._launch(launch, masks)
