"""Checks: sizes that fit the model; prompts with options, which become requests."""

import itertools
import operator
from collections.abc import Callable, Iterable
from numbers import Real

from mtp_jax.decode.law import MARK
from mtp_jax.engine.config import EngineConfig
from mtp_jax.engine.dead_end import look_ahead, options_that_mask
from mtp_jax.engine.request import Request, Terms
from mtp_jax.engine.sampling_params import SamplingParams
from mtp_jax.errors import ConfigError, PromptTooLong, RequestError
from mtp_jax.model.config import ModelConfig
from mtp_jax.model.draft_vocab import check_ids
from mtp_jax.text.grammar import Grammars
from mtp_jax.text.rules import BadWords, Constraints, ThinkingBudget, TokenRule, bad_words
from mtp_jax.text.thoughts import Thoughts

_LONGEST_TIMEOUT = 10**9


def check_config(cfg: ModelConfig, config: EngineConfig, shards: int) -> None:
    """Raises ConfigError if a model over ``shards`` data shards cannot be served this way."""
    check_sizes(cfg, config, shards)
    if config.num_speculative_tokens and not cfg.drafts and not config.suffix_drafts:
        raise ConfigError(
            f"num_speculative_tokens = {config.num_speculative_tokens}, but the checkpoint has no NextN "
            "layer; give draft_model=, suffix_drafts=True, or num_speculative_tokens=0"
        )
    _check_drafts(cfg, config)
    if config.draft_vocab is not None:
        if config.num_speculative_tokens and not cfg.drafts:
            raise ConfigError("draft_vocab, but the model has nothing that drafts by it; leave it out")
        check_ids("draft_vocab", config.draft_vocab, cfg.vocab_size)


def check_sizes(cfg: ModelConfig, config: EngineConfig, shards: int) -> None:
    """Raises ConfigError for sizes that do not fit the model; its drafter does not matter."""
    if config.max_num_seqs % shards:
        raise ConfigError(
            f"max_num_seqs = {config.max_num_seqs} does not divide over a data axis of {shards}"
        )
    if config.micro_batches > 1 and config.max_num_seqs % (shards * config.micro_batches):
        raise ConfigError(
            f"max_num_seqs = {config.max_num_seqs} does not divide into micro_batches = "
            f"{config.micro_batches} of {shards} data shards each"
        )
    if config.page_size % (unit := cfg.attention.page_unit):
        nearest = -(-config.page_size // unit) * unit
        raise ConfigError(
            f"page_size = {config.page_size}; expected a multiple of {unit}, such as {nearest}: an "
            f"entry of compressed attention, of {unit} tokens at most, lies in one page"
        )
    if config.return_routed_experts and not cfg.moe_layers:
        raise ConfigError("return_routed_experts = True, but the model has no routed experts; leave it out")
    if config.kv_cache_dtype == "fp8" and cfg.row.e4m3 % 2:
        name = cfg.attention.fp8_size
        raise ConfigError(
            f"kv_cache_dtype = 'fp8' stores values in pairs, but {name} = {cfg.row.e4m3} is odd; use 'auto'"
        )


def _check_drafts(cfg: ModelConfig, config: EngineConfig) -> None:
    """Raises ConfigError for drafts that the model's drafter does not make."""
    head, tree, able = cfg.drafter, config.trees, cfg.trees
    deepest = tree.steps if tree else config.num_speculative_tokens
    if tree and cfg.attention.consecutive:
        raise ConfigError(
            f"tree = {config.tree!r:.80} with compressed attention; leave it out: an entry is made of "
            "consecutive tokens, which the nodes of a tree are not"
        )
    if tree and tree.kind != able:
        grown, given = "is grown by one NextN layer or an EAGLE-3 head", "lists ranks, which some heads take"
        other = {None: "", "grown": ", or give TOPKxSTEPSxNODES", "given": ", or give lists of ranks"}
        raise ConfigError(
            f"tree = {config.tree!r:.80} {grown if tree.kind == 'grown' else given}, and this model drafts "
            f"with {cfg.drafter_title}; leave it out{other[able]}"
        )
    if tree and tree.topk > cfg.vocab_size:
        raise ConfigError(
            f"tree = {config.tree!r:.80} has {tree.topk} children per node, but the model has "
            f"{cfg.vocab_size} tokens; give fewer"
        )
    most = head and head.most_drafts
    if head and most is not None and deepest > most:
        name = f"the steps of tree = {config.tree!r:.80} are" if tree else "num_speculative_tokens ="
        raise ConfigError(
            f"{name} {deepest}, but the {head.name} head makes {most} drafts; use {most} or less"
        )


class InputProcessor:
    """Makes the requests of one engine.

    Attributes:
        grammars: compiles grammars and rules that depend on the output so far; None refuses them.
    """

    def __init__(
        self,
        cfg: ModelConfig,
        config: EngineConfig,
        pages: int,
        grammars: Grammars | None,
        clock: Callable[[], float],
    ) -> None:
        """pages: number of pages of a data shard. clock: see ``Runner``."""
        self._clock = clock
        self.cfg, self.config, self.pages, self.grammars = cfg, config, pages, grammars
        self._ids = itertools.count()

    def requests(self, n: int, prompt: Iterable[int], params: SamplingParams, terms: Terms) -> list[Request]:
        """Requests for n completions of a prompt of token ids. Any thread may call it.

        Raises RequestError, and Overloaded while too many grammars are being compiled.
        """
        ids, config = checked_ids(prompt, self.cfg.vocab_size), self.config
        _check_ids("logit_bias", params.logit_bias, self.cfg.vocab_size)
        _check_ids("stop_token_ids", params.stop_token_ids, self.cfg.vocab_size)
        _check_ids("allowed_token_ids", params.allowed_token_ids or (), self.cfg.vocab_size)
        _check_terms(terms)
        if config.law:
            _check_forced(params)
        if params.routed_experts and not config.return_routed_experts:
            raise RequestError(
                "routed_experts = True, but the engine keeps no choices of experts; leave it out, or build "
                "the engine with return_routed_experts=True (--return-routed-experts)"
            )
        spare = terms.get("spare", 0)
        max_tokens = self._max_tokens(len(ids), params, spare)
        # The random numbers of a sampled token depend on where its step begins, so a seed fixes the depth and
        # leaves out other requests' texts, unless the verifier is "coupled".
        seeded = params.seed is not None and params.temperature > 0 and config.verifier != "coupled"
        asked = params.num_speculative_tokens is not None
        seed, arrived, timeout = terms.get("seed", params.seed), terms.get("arrived"), terms.get("timeout")
        now = self._clock() if arrived is None else arrived
        stops = self._stops(params)
        siblings: list[Request] = []
        for i in range(n):
            constraints = self._constraints(params, ids)
            if not i:
                self._check_begin(params, constraints, stops)
            request = Request(
                next(self._ids),
                ids,
                params,
                None if seed is None else (seed + i) % 2**32,
                max_tokens,
                self._depth(params),
                len(ids) + max_tokens + spare,
                suffix_drafts=self._suffix_drafts(params),
                other_texts=not seeded,
                spare=spare,
                stops=stops,
                constraints=constraints,
                fixed_depth=not config.adaptive_depth or seeded or asked,
                priority=terms.get("priority", 0),
                deadline=None if timeout is None else now + timeout,
                salt=terms.get("cache_salt", ""),
                arrived=arrived,
                holdable=terms.get("holdable", True),
                siblings=siblings,
            )
            siblings.append(request)
        return siblings

    def _max_tokens(self, length: int, params: SamplingParams, spare: int) -> int:
        """Most tokens of the output behind a prompt of ``length``. Raises RequestError if they do not fit."""
        config = self.config
        room = config.max_model_len - length
        if room < 1:
            change = f"shorten the prompt, or raise max_model_len = {config.max_model_len}"
            raise PromptTooLong(length, config.max_model_len - 1, change)
        if config.pages_for(length + 1 + spare) > self.pages:
            most = max(config.held(self.pages) - spare - 1, 0)
            raise PromptTooLong(length, most, f"shorten the prompt, or raise num_pages = {self.pages}")
        if params.max_tokens is None:  # the cache sets the limit
            held = self.pages * config.page_size - config.rows_of(config.num_speculative_tokens)
            room = max(min(room, held - length - spare), 1)
        max_tokens = min(params.max_tokens or room, room)
        needed = config.pages_for(length + max_tokens + spare)
        if needed > self.pages:
            raise RequestError(
                f"the request needs {needed} cache pages, the engine has {self.pages}; lower max_tokens or "
                "raise num_pages"
            )
        return max_tokens

    def _depth(self, params: SamplingParams) -> int:
        """Most drafts per step. Raises RequestError if it is above the engine's."""
        depth, asked = self.config.num_speculative_tokens, params.num_speculative_tokens
        if asked is not None and asked > depth:
            raise RequestError(f"num_speculative_tokens = {asked}; the engine's is {depth}")
        return depth if asked is None else asked

    def _suffix_drafts(self, params: SamplingParams) -> bool:
        """Whether drafts may come from suffix matches. Raises RequestError if the engine has none."""
        if params.suffix_drafts is None:
            # A match is one continuation: sampling keeps it as often as it would have drawn it. A NextN layer
            # draws its drafts from a distribution, which is kept as far as it overlaps with the model's own.
            drawn = params.temperature > 0 and self.cfg.drafts
            return self.config.suffix_drafts and not drawn
        if params.suffix_drafts and not self.config.suffix_drafts:
            raise RequestError(
                "suffix_drafts = True, but the engine was built without them; leave it out, or build the "
                "engine with suffix_drafts=True (--suffix-drafts)"
            )
        return params.suffix_drafts

    def _stops(self, p: SamplingParams) -> tuple[int, ...]:
        """The tokens that end an output."""
        stops = {*p.stop_token_ids, *(() if p.ignore_eos else self.cfg.eos_token_ids)}
        return tuple(t for t in stops if t < self.cfg.vocab_size)

    def _constraints(self, p: SamplingParams, prompt: tuple[int, ...]) -> Constraints | None:
        wanted = {"structured output": p.structured, "bad_words": p.bad_words}
        wanted["max_thinking_tokens"] = p.max_thinking_tokens is not None
        names = [name for name, value in wanted.items() if value]
        if not names:
            return None
        if self.grammars is None:
            raise RequestError(
                f"{names[0]} needs a tokenizer that fits the model and names its end-of-sequence token; "
                "this model has none"
            )
        rules: list[TokenRule] = []
        if p.bad_words:
            rules.append(BadWords(bad_words(p.bad_words, self.grammars.encode)))
        if p.max_thinking_tokens is not None:
            rules.append(self._thinking_budget(p, p.max_thinking_tokens, self.grammars, prompt))
        matcher = self.grammars.matcher(p.structured, self._stops(p), prompt) if p.structured else None
        return Constraints(matcher, rules)

    def _check_begin(
        self, p: SamplingParams, constraints: Constraints | None, stops: tuple[int, ...]
    ) -> None:
        """Raises RequestError for options that leave no first token."""
        names = options_that_mask(p)
        if len(names) < 2:
            return
        if look_ahead(self.grammars, constraints, p, stops, self.cfg.vocab_size) != "goes on":
            raise RequestError(
                f"{', '.join(names[:-1])} and {names[-1]} together leave no token to begin with; change one"
            )

    def _thinking_budget(
        self, p: SamplingParams, most: int, grammars: Grammars, prompt: tuple[int, ...]
    ) -> ThinkingBudget:
        closes, thoughts = grammars.backend.token_to_id(Thoughts.CLOSE), grammars.thoughts
        if closes is None:
            raise RequestError(
                f"max_thinking_tokens = {most}, but {Thoughts.CLOSE} is no token of this model; leave it out"
            )
        inside, only = grammars.thinks(prompt), p.allowed_token_ids
        thinks = inside or only is None or grammars.backend.token_to_id(Thoughts.OPEN) in only
        never = only is not None and closes not in only
        if thinks and (never or [closes] in bad_words(p.bad_words, grammars.encode)):
            raise RequestError(
                f"max_thinking_tokens = {most} forces {Thoughts.CLOSE}, token {closes}, which "
                f"{'allowed_token_ids' if never else 'bad_words'} leaves out; change one of them"
            )
        return ThinkingBudget(most, closes, thoughts, inside, grammars.text)


def checked_ids(prompt: Iterable[int], vocab: int) -> tuple[int, ...]:
    """The token ids of a prompt. Raises RequestError if it has none, or one that is not in the vocabulary."""
    try:
        given = tuple(prompt)
    except TypeError as e:
        raise RequestError(f"a prompt is a list of token ids, not {prompt!r}") from e
    ids = tuple(map(_token_id, given))
    _check_ids("the prompt", ids, vocab)
    if not ids:
        raise RequestError("the prompt is empty; give at least one token")
    return ids


def _token_id(token: object) -> int:
    try:
        return operator.index(token)  # pyright: ignore[reportArgumentType]
    except TypeError as e:
        raise RequestError(f"a prompt is a list of token ids, integers; {token!r} is among them") from e


def _check_forced(p: SamplingParams) -> None:
    """Raises RequestError for options that mean nothing where drafts are kept by a law."""
    wanted = {
        "logprobs": p.logprobs is not None,
        "structured output": p.structured is not None,
        "bad_words": bool(p.bad_words),
        "max_thinking_tokens": p.max_thinking_tokens is not None,
    }
    if names := [name for name, asked in wanted.items() if asked]:
        raise RequestError(
            f"{names[0]} means nothing here: acceptance is {MARK}, drafts are kept whatever the model says; "
            "leave it out, or start without synthetic_acceptance"
        )


def _check_terms(terms: Terms) -> None:
    """Raises RequestError."""
    timeout, priority = terms.get("timeout"), terms.get("priority", 0)
    if timeout is not None and not (isinstance(timeout, Real) and 0 < timeout <= _LONGEST_TIMEOUT):
        raise RequestError(f"timeout = {timeout!r}; expected seconds above 0, at most {_LONGEST_TIMEOUT}")
    if not isinstance(priority, int):
        raise RequestError(f"priority = {priority!r}; expected an integer, lower ones first")
    salt = terms.get("cache_salt", "")
    try:
        salt.encode()
    except (AttributeError, UnicodeEncodeError) as e:
        raise RequestError(f"cache_salt = {salt!r}; expected a string that UTF-8 can hold") from e


def _check_ids(what: str, ids: Iterable[int], vocab: int) -> None:
    wrong = next((t for t in ids if not 0 <= t < vocab), None)
    if wrong is not None:
        raise RequestError(f"{what} names token {wrong}; expected ids from 0 to {vocab - 1}")
