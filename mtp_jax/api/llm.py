"""The Python API: ``LLM`` loads a model and generates, scores and drafts.

generate -> Session.step -> Engine.step -> compiled step -> tokens -> CompletionState.advance -> text
"""

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Unpack

import numpy as np

from mtp_jax.api import probe as probing
from mtp_jax.api.about import shown
from mtp_jax.api.completions import Prompt, PromptState, as_prompts
from mtp_jax.api.device_memory import DeviceMemory, NoWeights, Tag, WeightUpdate
from mtp_jax.api.hints import hinting
from mtp_jax.api.identity import Identity, NewWeights, identified
from mtp_jax.api.load import DescribedModel, LoadedModel, describe_simulated, load_model
from mtp_jax.api.local import make_runner
from mtp_jax.api.memory import return_free_memory
from mtp_jax.api.options import LLMOptions
from mtp_jax.api.outputs import Draft, RequestOutput
from mtp_jax.api.progress import Silent
from mtp_jax.api.propose import propose
from mtp_jax.api.score import Scorer, Scores
from mtp_jax.api.session import Session
from mtp_jax.api.simulated import simulated_engine, simulated_language
from mtp_jax.checkpoint.update import WeightSource
from mtp_jax.decode.keys import MAX_DRAFTS
from mtp_jax.decode.law import MARK
from mtp_jax.engine.engine import Engine
from mtp_jax.engine.request import Terms
from mtp_jax.engine.sampling_params import SamplingParams
from mtp_jax.engine.speculation import Speculation
from mtp_jax.errors import ConfigError, RequestError
from mtp_jax.hosts.group import lead
from mtp_jax.json_object import JsonMapping, JsonObject
from mtp_jax.model.narrow import nbytes
from mtp_jax.options import takes
from mtp_jax.text.grammar import Grammars
from mtp_jax.text.messages import conversations

ChatMessages = Sequence[JsonMapping]


@hinting(RequestError, "generate", "chat", "stream")
class LLM:
    """A model ready to generate. Not thread-safe.

    Attributes:
        built: the folder of programs that were compiled before; None: there is none.
        group: the processes that run the engine together; None: this one alone.
        random_weights: whether the weights are random numbers, and ``weight_version`` is "SYNTHETIC".
        await_files: waits until pages may come from ``file_cache``.
    """

    @takes(LLMOptions, ConfigError)
    def __init__(self, options: LLMOptions) -> None:
        """Load a model; executables are compiled when first needed, before any token is generated.

        Raises:
            ConfigError, CheckpointError: the message names the option or file to change.
        """
        self._report = options.reporter or Silent()
        self.group = options.group
        if self.group and not self.group.leads:
            raise ConfigError(
                f"rank {self.group.hosts.rank} follows: call follow() with the same options; rank 0 makes "
                "the LLM"
            )
        self._rates, self.random_weights = options.simulate, options.random_weights
        model: DescribedModel
        if self._rates is None:
            model = load_model(options, self._report)
            self._memory, self._decoding = DeviceMemory(model.params), model.decoding
            self.built = model.built
        else:
            model, self._memory, self._decoding = describe_simulated(options), NoWeights(), None
            self.built = None
        self.tokenizer, self.config = model.tokenizer, model.config
        self.folders, self.size = model.folders, model.size
        self.sampling_defaults = model.sampling
        self._grammars = self.tokenizer and Grammars.of(
            self.tokenizer, self.config.vocab_size, self.config.eos_token_ids
        )
        self.engine = self._make_engine(model, options.simulated_step)
        self._session = Session(self.engine)
        self._scorer = Scorer(self.config, self.engine.runner)
        self.await_files = identified(self.engine, self.identify, self._decoding and self._decoding.model.on)

    def __repr__(self) -> str:
        return f"LLM({shown(self.folders[0], self.engine.cfg, self.engine.config)})"

    def _make_engine(self, model: DescribedModel, seconds: float) -> Engine:
        """seconds: time of a simulated step."""
        config = model.engine
        if not isinstance(model, LoadedModel):
            language = simulated_language(self.config, self._rates or (), self.tokenizer)
            return simulated_engine(self.config, config, language, seconds, self._grammars)
        with self._report.phase("allocate cache"):
            runner = make_runner(model.decoding, model.params, config, kept=model.kept, built=model.built)
            version, built = MARK if self.random_weights else "0", model.built is not None
            cfg = model.decoding.model.cfg
            return Engine(cfg, config, lead(runner, self.group), self._grammars, version, built)

    @property
    def default_sampling_params(self) -> SamplingParams:
        """Parameters of a prompt given alone: the model's own, where ``sampling_defaults`` is "model"."""
        return SamplingParams(**self.sampling_defaults)

    @property
    def simulated(self) -> bool:
        """Whether no model computes: tokens are hashes, and ``weight_version`` is "SIMULATED"."""
        return self._rates is not None

    @property
    def weight_bytes(self) -> int:
        """Bytes of the parameters that the engine runs with, on all devices together."""
        return nbytes(self._decoding.read(self._memory.shapes)) if self._decoding else 0

    def _check_weights(self, what: str) -> None:
        """Raises ConfigError with experts that move, and without weights."""
        if self.simulated:
            raise ConfigError(f"{what} needs weights, but the model is simulated; leave out simulate")
        if self.engine.config.redundant_experts:
            raise ConfigError(
                f"{what} needs the weights as they were loaded, but redundant_experts = "
                f"{self.engine.config.redundant_experts} moves experts; set it to 0"
            )

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Complete one or many prompts; results keep their order.

        Args:
            prompts: a string, a list of token ids, or a list of either.
            sampling_params: one for all prompts, or one each; None: ``default_sampling_params``.

        Raises:
            RequestError: a prompt or option that cannot be served; nothing has been generated then.
        """
        self.check_memory()
        states = self._states(prompts, sampling_params)
        self._prepare(states)
        self._complete(states)
        return [state.output() for state in states]

    def chat(
        self,
        messages: ChatMessages | Sequence[ChatMessages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        chat_template_kwargs: JsonObject | None = None,
    ) -> list[RequestOutput]:
        """Answer one or many conversations, rendered by the model's chat template.

        Args:
            messages: a list of objects with ``role`` and ``content``, which is a string or a list of text
                parts, or a list of such lists.
            sampling_params: one for all conversations, or one each.
            tools: functions that the model may call, in OpenAI's form; the outputs hold calls as the model
                writes them. ``SamplingParams(skip_special_tokens=False)`` shows their tags where these are
                special tokens.
            chat_template_kwargs: variables for the template, for example ``{"thinking": True}``.

        Raises:
            RequestError: the model has no tokenizer or no template, messages have another form, or as
                ``generate``.
        """
        if self.tokenizer is None:
            raise RequestError("the model directory has no tokenizer; use generate with token ids")
        if not isinstance(chat_template_kwargs, Mapping | None):
            raise RequestError(f"chat_template_kwargs = {chat_template_kwargs!r:.80}; expected a dictionary")
        render, more = self.tokenizer.apply_chat_template, chat_template_kwargs or {}
        texts = (render(c, tools, **more) for c in conversations(messages))
        prompts = [self.tokenizer.encode(text, add_special_tokens=False) for text in texts]
        return self.generate(prompts, sampling_params)

    def warm_up(
        self,
        prompts: Prompt | Sequence[Prompt] | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> None:
        """Compile the programs that ``generate`` with the same arguments will need. Raises RequestError
        likewise.

        prompts: None: any prompt, one at a time.
        """
        self.check_memory()
        if prompts is not None:
            self._prepare(self._states(prompts, sampling_params))
            return
        longest = self.engine.config.max_model_len - 1
        for size in (*self.engine.buckets.chunk_sizes, longest):
            self._prepare(self._states([[0] * min(size, longest)], sampling_params))

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Generator[RequestOutput, None, None]:
        """Complete one prompt, yielding the output whenever it has grown. Closing the iterator aborts.

        ``output_kind`` of the parameters says the contents of each output: by default everything so far.

        Several streams may be open at once, and ``generate`` called meanwhile.

        Raises:
            RequestError: at the call, not at the first output.
        """
        self.check_memory()
        (state,) = self._states([prompt], sampling_params)
        return self._outputs(state)

    def score(self, token_ids: Sequence[int]) -> Scores:
        """Teacher-forced logits and hidden states of a sequence. Raises RequestError for bad ids."""
        return self._scoring().score(token_ids)

    def _scoring(self) -> Scorer:
        self._check_weights("scoring")
        self.check_memory()
        return self._scorer

    def hidden_states(
        self,
        token_ids: Sequence[int],
        positions: Sequence[int] | None = None,
        layers: Sequence[int] | None = None,
    ) -> np.ndarray:
        """The trunk's hidden states after its final norm, float32 [n, D], to train heads with.

        positions: tokens to look at, from 0 on, or from the end where negative; None: all. layers: numbers
        of taps, 0 the embedding, in the place of final states: float32 [layers, n, D], before any norm.
        Raises RequestError for bad ids, positions and layers.
        """
        return self._scoring().hidden_states(token_ids, positions, layers)

    def features(
        self, sequences: Sequence[Sequence[int]], taps: Sequence[int] = ()
    ) -> list[tuple[np.ndarray, ...]]:
        """``hidden_states`` of each sequence, computed together, in the dtype of the engine; and its taps."""
        return self._scoring().features(sequences, tuple(taps))

    def draft(self, token_ids: Sequence[int], num_tokens: int) -> Draft:
        """The greedy drafts after a prompt and the trunk's own greedy next token. Raises RequestError."""
        self.check_memory()
        if not self.engine.config.num_speculative_tokens:
            raise RequestError("draft needs num_speculative_tokens of 1 or more; the engine was made with 0")
        if not self.engine.cfg.drafts:
            raise RequestError(
                "draft needs NextN layers or a head; this model has neither, its drafts are suffix matches"
            )
        if not isinstance(num_tokens, int) or not 1 <= num_tokens <= MAX_DRAFTS:
            raise RequestError(f"num_tokens = {num_tokens}; expected an integer from 1 to {MAX_DRAFTS}")
        token, ids, logits = propose(self.engine, token_ids, num_tokens)
        return Draft(token, ids.tolist(), logits)

    # Weights and memory

    @property
    def weight_version(self) -> str:
        """The name of the weights; "0" until they are updated."""
        return self.engine.weight_version

    def identify(self) -> Identity:
        """Digests of the weights from now on, of every byte. Raises ConfigError after an update."""
        return self._memory.identify(self.folders)

    @property
    def released(self) -> tuple[Tag, ...]:
        """The parts of memory that are released; no request can be served while any part is."""
        return tuple(self._memory.released)

    def check_memory(self) -> None:
        """Raises EngineStopped while memory is released."""
        self._memory.check()

    def update_weights(
        self,
        source: WeightSource,
        draft_model: str | Path | None = None,
        *,
        keep_draft: bool = False,
        weight_version: str | None = None,
        probe: Sequence[Prompt] | None = None,
    ) -> WeightUpdate:
        """Replace the model's weights, all or none; cached prefixes are forgotten.

        Args:
            source: a folder of safetensors files, or arrays by the names that such files use.
            draft_model: a folder with the NextN layers or the draft head; None: they are in ``source``.
            keep_draft: the drafter stays; ``source`` need not have it.
            weight_version: name of these weights in outputs; None: the count of updates.
            probe: prompts to complete before and after, for the acceptance length with the old weights and
                the new weights; None: a few of our own, if the model has a tokenizer.

        Raises:
            CheckpointError, ConfigError: a tensor is missing, would not be read, or does not fit, or files
                are damaged. Nothing has changed.
            RequestError: streams are open, or a prompt of the probe cannot be served. Nothing has changed.
        """
        self._check_idle()
        new = self.read_weights(source, draft_model, keep_draft=keep_draft)
        return self.replace_weights(new, weight_version, probe)

    def read_weights(
        self, source: WeightSource, draft_model: str | Path | None = None, *, keep_draft: bool = False
    ) -> NewWeights:
        """The first half of ``update_weights``: read and check them. The model may serve meanwhile."""
        self._check_weights("an update of the weights")
        if self.random_weights:
            raise ConfigError(
                "an update of random weights (load_format = 'dummy'), whose answers stay marked SYNTHETIC; "
                "load a checkpoint's weights first"
            )
        return self._memory.read(self.config, self.engine.config.dtype, source, draft_model, keep_draft)

    def replace_weights(
        self,
        new: NewWeights,
        weight_version: str | None = None,
        probe: Sequence[Prompt] | None = None,
        prepare: bool = True,
    ) -> WeightUpdate:
        """The second half: put the new weights in place. prepare: compile the probe's programs."""
        self._check_idle()
        probe = () if probe is None and self.tokenizer is None else probe
        before = self.probe_drafts(probe, prepare)
        self._memory.replace(self.engine, new, weight_version)
        after = self.probe_drafts(probe, prepare)
        version = self.engine.weight_version
        return WeightUpdate(version, before and before.acceptance_length, after and after.acceptance_length)

    def release_memory(self, tags: Sequence[Tag] | None = None, *, backup: bool = True) -> None:
        """Release device memory of these parts: "weights", "draft" (NextN layers), "cache".

        Args:
            tags: the parts to release; None: all parts.
            backup: keep released weights in the host's memory, for ``resume_memory``. Without a copy only
                ``update_weights`` brings them back. On a CPU the copy is the same memory: it frees nothing.

        Raises ConfigError for a tag that this model does not have, RequestError while streams are open.
        """
        wanted = self._memory.tags(tags)
        if wanted != ["cache"]:
            self._check_weights("a release of weights")
        self._check_idle()
        self._memory.release(self.engine, wanted, backup)

    def resume_memory(self, tags: Sequence[Tag] | None = None) -> None:
        """Restore the memory that ``release_memory`` gave up: the weights as they were, an empty cache.

        Raises ConfigError for a tag that it does not have, RequestError for weights without a backup.
        """
        self._memory.resume(self.engine, self._memory.tags(tags))

    def _check_idle(self) -> None:
        if self.engine.busy:
            raise RequestError("streams are open; read them to their end, or close them, first")

    def probe_drafts(
        self, prompts: Sequence[Prompt] | None = None, prepare: bool = True
    ) -> Speculation | None:
        """Results of drafting over a few greedy completions, with the most drafts of every step.

        prompts: None: a few of our own. prepare: compile their programs. Returns None without drafts, under a
        law, or while memory is released; counts of nothing if a completion failed. Raises RequestError.
        """
        depth = self.engine.config.num_speculative_tokens
        if prompts is None:
            prompts = probing.PROMPTS if self.tokenizer else probing.IDS
        # ``Engine.hold`` does not hold these prompts; all other requests stay in the queue while they run.
        states = self._states(prompts, probing.params_of(depth), holdable=False)
        if not states or not depth or self.released or self.engine.config.law:
            return None
        if prepare:
            self._prepare(states)
        self._complete(states)
        return probing.acceptance(states)

    # From prompts to outputs

    def _complete(self, states: list[PromptState]) -> None:
        with self._serving(states):
            for state in states:
                while not state.done:
                    self._session.step()

    def _states(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        **terms: Unpack[Terms],
    ) -> list[PromptState]:
        many = as_prompts(prompts)
        params = self.default_sampling_params if sampling_params is None else sampling_params
        if not isinstance(params, SamplingParams | Sequence):
            raise RequestError(
                f"sampling_params = {params!r:.80}; expected SamplingParams, or a list of them"
            )
        each = [params] * len(many) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(many):
            raise RequestError(f"{len(many)} prompts with {len(each)} sampling_params; give one, or one each")
        states = []
        for i, (prompt, p) in enumerate(zip(many, each, strict=True), start=1):
            try:
                states.append(PromptState(self.engine, self.tokenizer, prompt, p, terms))
            except RequestError as e:
                raise RequestError(f"prompt {i} of {len(many)}: {e}" if len(many) > 1 else str(e)) from e
        return states

    def _prepare(self, states: list[PromptState]) -> None:
        """Compile the programs of these prompts together with the running prompts."""
        requests = [c.request for state in states for c in state.completions]
        compiled = len(self.engine.runner.keys)
        with self._report.phase("programs", "executable") as update:
            self.engine.prepare(requests, update)
        self.await_files()
        if len(self.engine.runner.keys) > compiled:
            return_free_memory()

    def _outputs(self, state: PromptState) -> Generator[RequestOutput, None, None]:
        self._prepare([state])
        with self._serving([state]):
            shown = 0
            while True:
                grown = sum(c.seen + c.done for c in state.completions)
                if grown > shown:
                    shown = grown
                    if output := state.poll():
                        yield output
                elif state.done:
                    return
                else:
                    self._session.step()  # the texts of other streams advance too

    @contextmanager
    def _serving(self, states: list[PromptState]) -> Iterator[None]:
        """Submit prompts; abort requests that are unfinished at the end of the block."""
        try:
            for state in states:
                self._session.submit(state)
            yield
        finally:
            for state in states:
                self._session.abort(state)
            self._session.rest()
