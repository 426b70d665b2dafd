"""Conversion of requests to the arrays that programs take. No jax here."""

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import DTypeLike

from mtp_jax.decode.arrays import Chunk, SamplingState, SlotRow
from mtp_jax.engine.request import Request


def page_row(pages: list[int], columns: int, spare: int) -> np.ndarray:
    """A row [1, columns] of the page table, with the spare page where the request has none."""
    row = np.full((1, columns), spare, np.int32)
    row[0, : len(pages)] = pages
    return row


def slot_row(
    request: Request, vocab: int, page_table: np.ndarray, texts: np.ndarray | None = None
) -> SlotRow:
    """The request's row [1, ...] of every per-slot array, before its prompt is prefilled."""
    p = request.params
    bias = np.zeros((1, vocab), np.float32)
    if p.allowed_token_ids is not None:
        bias[:] = -np.inf
        bias[0, list(p.allowed_token_ids)] = 0
    bias[0, list(p.logit_bias)] += list(p.logit_bias.values())

    def one(value: float, dtype: DTypeLike = np.int32) -> np.ndarray:
        return np.full(1, value, dtype)

    return SlotRow(
        remaining=one(request.max_tokens - len(request.progress.output)),
        generated=one(len(request.progress.output)),
        depth=one(request.depth),
        suffix=one(request.suffix_drafts, bool),
        page_table=page_table,
        texts=texts,
        sampling=SamplingState(
            temperature=one(p.temperature, np.float32),
            top_k=one(max(p.top_k, 0)),
            top_p=one(p.top_p, np.float32),
            min_p=one(p.min_p, np.float32),
            presence=one(p.presence_penalty, np.float32),
            frequency=one(p.frequency_penalty, np.float32),
            repetition=one(p.repetition_penalty, np.float32),
            min_tokens=one(p.min_tokens),
            seed=one(request.progress.seed, np.uint32),
            logit_bias=bias,
            stop_mask=_mask(request.stops, vocab),
            prompt_mask=_mask(request.prompt, vocab),
            counts=np.bincount(request.progress.output, minlength=vocab)[None].astype(np.int32),
        ),
    )


def _mask(ids: Iterable[int], vocab: int) -> np.ndarray:
    """A bool [1, V] row that is True at ``ids``."""
    row = np.zeros((1, vocab), bool)
    row[0, list(ids)] = True
    return row


def next_chunk(
    chosen: Sequence[Request | None], limit: int, width: int, idle_slot: int, allowed: np.ndarray
) -> Chunk:
    """The next ``limit`` tokens of each prompt, padded to ``width``."""
    shape = (len(chosen), width)
    tokens, targets = np.zeros(shape, np.int32), np.full(shape, -1, np.int32)
    slot = np.full(len(chosen), idle_slot, np.int32)
    start, count = np.zeros(len(chosen), np.int32), np.zeros(len(chosen), np.int32)
    final, follows = np.zeros(len(chosen), bool), np.full(len(chosen), -1, np.int32)
    for g, r in enumerate(chosen):
        if r is None:
            continue
        own = r.residence
        begin, end = own.prefilled, own.prefilled_after(limit)
        slot[g], start[g], count[g], final[g] = own.slot, begin, end - begin, end == len(own.tokens)
        tokens[g, : end - begin] = own.tokens[begin:end]
        if r.params.prompt_logprobs is not None:
            following = own.tokens[begin + 1 : end + 1]
            targets[g, : len(following)] = following
        follows[g] = own.follows
    return Chunk(slot, start, count, final, tokens, targets, follows, allowed)
