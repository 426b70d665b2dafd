"""The Python API: ``LLM`` loads a model and generates, scores and drafts.

generate -> Engine.step -> compiled step -> tokens -> StreamDecoder -> text
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import jax
from jax.sharding import Mesh

from mtp_jax import checkpoint
from mtp_jax.config import ModelConfig
from mtp_jax.decode.compiled import use_compile_cache
from mtp_jax.decode.draft import Drafting
from mtp_jax.decode.step import Verifier
from mtp_jax.engine.config import EngineConfig
from mtp_jax.engine.engine import Engine
from mtp_jax.engine.request import Request, SamplingParams, Speculation
from mtp_jax.errors import ConfigError, RequestError
from mtp_jax.outputs import CompletionOutput, Draft, RequestOutput, Timing
from mtp_jax.progress import Reporter, Silent
from mtp_jax.score import Scorer, Scores
from mtp_jax.tokenizer import StopStrings, StreamDecoder, Tokenizer

Prompt = str | Sequence[int]

_DEFAULT_MAX_MODEL_LEN = 8192


def demo_model() -> Path:
    """The directory of the embedded demo model."""
    inside, beside = Path(__file__).parent / "configs", Path(__file__).parent.parent / "configs"
    return (inside if inside.exists() else beside) / "demo"


class LLM:
    """A model ready to generate. Not thread-safe."""

    def __init__(
        self,
        model: str | Path | None = None,
        draft_model: str | Path | None = None,
        num_speculative_tokens: int = 3,
        dtype: str = "auto",
        max_num_seqs: int = 8,
        max_model_len: int | None = None,
        mesh: Mesh | None = None,
        *,
        num_nextn_layers: int | None = None,
        page_size: int = 64,
        num_pages: int | None = None,
        prefill_chunk: int = 256,
        drafting: Drafting = "sampled",
        verifier: Verifier = "block",
        seed: int = 0,
        compile_cache: str | Path | None = "~/.cache/mtp-jax/xla",
        reporter: Reporter | None = None,
    ) -> None:
        """Load a model; executables are compiled when first needed, before any token is generated.

        Args:
            model: directory with config.json and safetensors, or one that ``convert`` wrote; None: the demo model.
            draft_model: directory of separately exported NextN layers.
            num_speculative_tokens: depth K; 0 turns speculation off.
            dtype: "float32", "bfloat16", or "auto": float32 on a CPU, the checkpoint's elsewhere.
            max_num_seqs: slots.
            max_model_len: most tokens of prompt and output; None: the model's own, at most 8192.
            mesh: from ``make_mesh``; None for one device.
            num_nextn_layers: NextN layers to load; None: all there are.
            page_size: cache rows per page.
            num_pages: cache pages per data shard; None: enough for every slot at max_model_len.
            prefill_chunk: most prompt tokens per prefill launch.
            drafting: "sampled" or "greedy" drafts for sampling requests.
            verifier: "block" or "rejection"; both lossless.
            seed: seeds requests that give none.
            compile_cache: folder of compiled programs, trusted, so it must be yours alone; None: no cache.
            reporter: where start-up phases are shown.

        Raises:
            ConfigError, CheckpointError: say what to change.
        """
        self._report = reporter or Silent()
        if compile_cache is not None:
            use_compile_cache(compile_cache)
        directory = Path(model) if model is not None else demo_model()
        kind = dtype
        if dtype == "auto":
            on_cpu = jax.default_backend() == "cpu"
            kind = "float32" if on_cpu else ModelConfig.from_file(directory / "config.json").dtype
        with self._report.phase("read", "B") as update:
            loaded = checkpoint.load(
                directory,
                draft_model,
                dtype=kind,
                mesh=mesh,
                num_nextn_layers=num_nextn_layers,
                progress=update,
            )
        with self._report.phase("place"):
            jax.block_until_ready(loaded.params)
        self.config: ModelConfig = loaded.config
        limit = self.config.max_position_embeddings
        if max_model_len is not None and max_model_len > limit:
            raise ConfigError(f"max_model_len = {max_model_len}; the model's positions end at {limit}")
        engine_config = EngineConfig(
            num_speculative_tokens=num_speculative_tokens,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len or min(limit, _DEFAULT_MAX_MODEL_LEN),
            page_size=page_size,
            num_pages=num_pages,
            prefill_chunk=prefill_chunk,
            drafting=drafting,
            verifier=verifier,
            dtype=kind,
            seed=seed,
        )
        # Without speculation the NextN layers cost nothing: they are left out of the step altogether.
        speculative = num_speculative_tokens > 0
        cfg = self.config if speculative else self.config.with_nextn(())
        params = loaded.params if speculative else replace(loaded.params, nextn=())
        with self._report.phase("allocate cache"):
            self.engine = Engine(cfg, params, engine_config, mesh)
        self.tokenizer = Tokenizer.from_dir(directory)
        self._scorer = Scorer(self.config, loaded.params, mesh)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Complete one or many prompts; results keep their order.

        Args:
            prompts: a string, a list of token ids, or a list of either.
            sampling_params: one for all prompts, or one each.

        Raises:
            RequestError: a prompt or option that cannot be served; nothing has been generated then.
        """
        jobs = self._jobs(prompts, sampling_params)
        for _ in self._run(jobs):
            pass
        return [job.output() for job in jobs]

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Iterator[RequestOutput]:
        """Complete one prompt, yielding the output so far whenever it has grown. Closing the iterator aborts."""
        jobs = self._jobs([prompt], sampling_params)
        try:
            for job in self._run(jobs):
                yield job.output()
        finally:
            for part in jobs[0].parts:
                self.engine.abort(part.request)

    def score(self, token_ids: Sequence[int]) -> Scores:
        """Teacher-forced logits and hidden states of a sequence. Raises RequestError for bad ids."""
        ids = list(token_ids)
        self.engine.make_request(ids[:1], SamplingParams())
        limit = self.config.max_position_embeddings
        wrong = next((t for t in ids if not 0 <= t < self.config.vocab_size), None)
        if wrong is not None or len(ids) > limit:
            raise RequestError(
                f"score takes up to {limit} tokens from 0 to {self.config.vocab_size - 1}; got {len(ids)} tokens"
                + ("" if wrong is None else f", {wrong} among them")
            )
        return self._scorer.score(ids)

    def draft(self, token_ids: Sequence[int], num_tokens: int) -> Draft:
        """The greedy drafts after a prompt and the trunk's own greedy next token. Raises RequestError."""
        if not self.engine.config.num_speculative_tokens:
            raise RequestError("draft needs num_speculative_tokens of 1 or more; the engine was made with 0")
        if num_tokens < 1:
            raise RequestError(f"num_tokens = {num_tokens}; expected at least 1")
        token, ids, logits = self.engine.draft(token_ids, num_tokens)
        return Draft(token, ids.tolist(), logits)

    def _jobs(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> "list[_Job]":
        many = _as_prompts(prompts)
        params = sampling_params or SamplingParams()
        each = [params] * len(many) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(many):
            raise RequestError(f"{len(many)} prompts with {len(each)} sampling_params; give one, or one each")
        jobs = []
        for i, (prompt, p) in enumerate(zip(many, each, strict=True)):
            try:
                jobs.append(_Job(self, prompt, p))
            except RequestError as e:
                raise RequestError(f"prompt {i}: {e}" if len(many) > 1 else str(e)) from e
        return jobs

    def _run(self, jobs: "list[_Job]") -> "Iterator[_Job]":
        parts = {part.request.id: (job, part) for job in jobs for part in job.parts}
        requests = [part.request for _, part in parts.values()]
        with self._report.phase("compile", "executables") as update:
            self.engine.prepare(requests, update)
        for request in requests:
            self.engine.submit(request)
        while any(not r.finished for r in requests):
            for request in self.engine.step():
                if request.id in parts:
                    job, part = parts[request.id]
                    part.advance(self.engine)
                    yield job


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    items = list(prompts)
    if items and not isinstance(items[0], str | Sequence):
        return [items]  # type: ignore[list-item]
    return items  # type: ignore[return-value]


class _Part:
    """One completion: a request and its text."""

    def __init__(self, request: Request, tokenizer: Tokenizer | None) -> None:
        self.request, self.text, self.seen = request, "", 0
        p = request.params
        self._decoder = tokenizer and StreamDecoder(tokenizer, p.skip_special_tokens)
        self._stops = StopStrings(p.stop_strings, p.include_stop_str_in_output)

    def advance(self, engine: Engine) -> None:
        """Detokenise what is new; a stop string cuts the tokens that follow it."""
        request = self.request
        if self._decoder is None:
            return
        while self.seen < len(request.output):
            self.seen += 1
            visible, stopped = self._stops.push(self._decoder.push([request.output[self.seen - 1]]))
            self.text += visible
            if stopped:
                del request.output[self.seen :], request.logprobs[self.seen :]
                engine.abort(request, "stop")
                request.finish_reason = "stop"
                return
        if request.finished:
            visible, stopped = self._stops.push(self._decoder.flush())
            self.text += visible + ("" if stopped else self._stops.flush())


class _Job:
    """One prompt and its n completions."""

    def __init__(self, llm: LLM, prompt: Prompt, params: SamplingParams) -> None:
        tokenizer = llm.tokenizer
        if isinstance(prompt, str) or params.stop_strings:
            if tokenizer is None:
                raise RequestError(
                    "the model directory has no tokenizer.json; give token ids and no stop strings"
                )
        ids = tokenizer.encode(prompt) if isinstance(prompt, str) and tokenizer else list(prompt)
        self.prompt = prompt if isinstance(prompt, str) else None
        self.params = params
        seeds = [None if params.seed is None else (params.seed + i) % 2**32 for i in range(params.n)]
        make = llm.engine.make_request
        self.parts = [_Part(make(ids, params, seed), tokenizer) for seed in seeds]  # type: ignore[arg-type]

    def output(self) -> RequestOutput:
        """The output so far."""
        first = self.parts[0].request
        outputs = [
            CompletionOutput(
                index=i,
                text=part.text,
                token_ids=list(part.request.output),
                finish_reason=part.request.finish_reason,
                logprobs=list(part.request.logprobs) if self.params.logprobs is not None else None,
            )
            for i, part in enumerate(self.parts)
        ]
        since = lambda at: None if at is None else at - first.arrived  # noqa: E731
        return RequestOutput(
            prompt=self.prompt,
            prompt_token_ids=list(first.prompt),
            outputs=outputs,
            speculation=sum((part.request.speculation for part in self.parts), Speculation()),
            prompt_logprobs=list(first.prompt_logprobs) if self.params.prompt_logprobs is not None else None,
            timing=Timing(since(first.first_token_at), since(first.finished_at)),
        )
