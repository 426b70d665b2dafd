"""Requests and schedulers without a device."""

import itertools

from mtp_jax.engine.config import EngineConfig
from mtp_jax.engine.request import Request
from mtp_jax.engine.sampling_params import SamplingParams
from mtp_jax.engine.scheduler import Scheduler

CONFIG = EngineConfig(num_speculative_tokens=3, max_num_seqs=4, max_model_len=64, page_size=16)
IDS = itertools.count()


def request(prompt: int = 5, max_tokens: int = 4, priority: int = 0) -> Request:
    """Prompts begin differently, so no two share pages."""
    number = next(IDS)
    ids = tuple(range(number * 100, number * 100 + prompt))
    return Request(number, ids, SamplingParams(), 0, max_tokens, 3, prompt + max_tokens, priority=priority)


def scheduler(shards: int = 1, **config) -> Scheduler:
    return Scheduler(EngineConfig(**{**vars(CONFIG), **config}), shards)


def submit(s: Scheduler, *requests: Request) -> list[Request]:
    for r in requests:
        s.enqueue(r)
    return s.admit()
