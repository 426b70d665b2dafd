"""The engine as an actor of Ray Data, for `mtp-jax batch --ray` and for users' pipelines. No Ray here."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mtp_jax import LLM, AsyncLLM, EngineStopped, JsonMapping, JsonObject
from mtp_jax.cluster.on_ray.engine import llm_options
from serve.base.settings import Settings
from serve.http.app import make_app
from serve.http.in_process import Answer, post

_COMPLETIONS = "/v1/completions"


class BatchEngine:
    """One engine per actor, made once, for ``ray.data.Dataset.map_batches``.

    Takes columns ``body``, the JSON text of a request to the server, and, if there is one, ``url``, else
    /v1/completions. Gives them back, and all other columns, with these beside them:

    ``status``       the HTTP status: 200, or another for a refused request; no row ends the job. ``answer``
    the JSON text of the server's answer, or of its error object. ``request_id``   the server's. ``warning``
    names the fields that were ignored; or empty.

    If its process or host is lost, Ray makes a new one and computes the batch again. So a row may be computed
    more than once (with a seed or at temperature 0 to the same text), and comes out once. If the engine
    fails, the job fails with EngineStopped, as another engine would fail again.

        requests.map_batches(BatchEngine, fn_constructor_kwargs={"model": "/srv/model", "max_num_seqs": 32},
                             batch_size=256, compute=ActorPoolStrategy(size=4), num_gpus=1)
    """

    def __init__(
        self,
        model: str | Path,
        *,
        model_name: str | tuple[str, ...] | None = None,
        strict: bool = False,
        max_body_bytes: int = Settings.max_body_bytes,
        **options: Any,
    ) -> None:
        """Load the model and compile its programs.

        Args:
            model: the model's folder.
            model_name: one name or several that requests may give as ``model``; None: the folder's.
            strict: refuse unknown fields instead of warning of them.
            max_body_bytes: most bytes of a request.
            options: options of ``LLM``; ``mesh`` is its shape, (data, model).

        Raises:
            ConfigError, CheckpointError: the model cannot be served.
        """
        settings = Settings(
            model_name or Path(model).resolve().name, strict=strict, max_body_bytes=max_body_bytes
        )
        llm = LLM(model, **{"adaptive_depth": True, **llm_options(options)})
        # The batch bounds the requests in memory, so the queue need not be bounded.
        self._allm = AsyncLLM(llm, max_queued_requests=2**31, max_queued_tokens=2**40)
        self._app = make_app(self._allm, settings)
        self._loop = asyncio.new_event_loop()
        self._loop.run_until_complete(self._allm.start())

    def __call__(self, batch: JsonMapping) -> JsonObject:
        """Answer a batch of rows: columns of one length, as numpy arrays or lists."""
        bodies = [str(body) for body in batch["body"]]
        urls = [str(url) for url in batch["url"]] if "url" in batch else [_COMPLETIONS] * len(bodies)
        answers = self._loop.run_until_complete(self._answer(urls, bodies))
        if self._allm.error is not None:
            raise EngineStopped(f"the engine failed: {self._allm.error}")
        return {
            **batch,
            "status": [a.status for a in answers],
            "answer": [json.dumps(a.body) for a in answers],
            "request_id": [a.request_id for a in answers],
            "warning": [a.warning for a in answers],
        }

    async def _answer(self, urls: Sequence[str], bodies: Sequence[str]) -> list[Answer]:
        return await asyncio.gather(
            *(post(self._app, url, body.encode()) for url, body in zip(urls, bodies, strict=True))
        )
