"""Drafts after a prompt, made by the engine's own draft program on one request."""

from collections.abc import Iterable

import numpy as np

from mtp_jax.api.session import Session
from mtp_jax.decode.keys import DraftKey
from mtp_jax.decode.launches import DraftLaunch
from mtp_jax.engine.engine import Engine
from mtp_jax.engine.sampling_params import SamplingParams
from mtp_jax.errors import RequestError


def propose(engine: Engine, prompt: Iterable[int], depth: int) -> tuple[int, np.ndarray, np.ndarray]:
    """The token that greedily follows a prompt, and the drafts after it: (token, ids [K], logits [K, V]).

    The engine must be idle. Raises RequestError.
    """
    if engine.busy:
        raise RequestError("the engine is serving requests; draft needs it idle")
    head = engine.cfg.drafter
    if head and head.most_drafts is not None and depth > head.most_drafts:
        raise RequestError(f"{depth} drafts; the {head.name} head makes {head.most_drafts} at most")
    one = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, suffix_drafts=False)
    request = engine.make_request(prompt, one, spare=depth)
    most = engine.config.max_model_len
    if len(request.prompt) + depth >= most:
        raise RequestError(
            f"{len(request.prompt)} prompt tokens and {depth} drafts do not fit in max_model_len = {most}"
        )
    key = DraftKey(depth, engine.config.columns)
    engine.prepare([request])
    engine.runner.compile([key])
    for _ in Session(engine).run([request]):
        pass
    if not request.progress.output:
        raise RequestError("the model's numbers are not finite for this prompt: nothing to draft on")
    tokens, logits = engine.runner.do(DraftLaunch(key, request.residence.slot)).read()
    return request.progress.output[0], tokens, logits
