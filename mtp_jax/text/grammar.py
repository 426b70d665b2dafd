"""Structured output: masks of the tokens that may follow under a JSON schema, an expression or a choice.

llguidance parses the output so far on the host and computes the tokens that may follow. It bounds the work of
most grammars and of every mask, more tightly here than by default; a grammar that exceeds the bounds is
refused, or ends its own request. Further bounds are checked before: multiples (``text/json_schema.py``), and
the time and memory that a grammar takes to compile (``text/trial.py``).

After a prompt that ends inside a think block the output begins with a thought, of any text: the grammar
begins behind it.
"""

import functools
import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from llguidance import LLExecutor, LLMatcher
from llguidance.numpy import (
    fill_next_token_bitmask,
    fill_next_token_bitmask_par,
    fill_next_token_bitmask_par_with_draft_tokens,
)

from mtp_jax.errors import Overloaded, RequestError, SchemaError
from mtp_jax.json_object import JsonMapping, JsonObject
from mtp_jax.text.compile_grammar import CompiledGrammar, TokenTable
from mtp_jax.text.dialects import is_lark, of_ebnf, token_ids
from mtp_jax.text.enforceable import enforceable
from mtp_jax.text.json_schema import check_schema, in_full
from mtp_jax.text.plain_text import token_table
from mtp_jax.text.structural_tags import tag_grammar
from mtp_jax.text.thoughts import Thoughts
from mtp_jax.text.tokenizer import Tokenizer
from mtp_jax.text.tools.rules import Vocabulary
from mtp_jax.text.trial import MEMORY, SECONDS, TURN_SECONDS, Trials

MAX_GRAMMAR_LENGTH = 2**16
"""Characters of a schema, an expression or all choices together."""

WORD = 32
"""Tokens per word of a packed mask: token t is bit t % 32 of word t // 32."""

_FORMS = ("json_schema", "regex", "choice", "lark", "ebnf", "structural_tag")
_LONGEST_TEXT = 4 * MAX_GRAMMAR_LENGTH  # of a schema with its indents, before it is parsed
_CACHED_GRAMMARS = 64
_CACHED_BYTES = 2 * MEMORY  # so that the largest allowed grammar does not empty the cache
_NO_GRAMMAR = (TypeError, ValueError, OverflowError, RecursionError)  # errors that odd schemas raise
_ALONE_SECONDS = 0.1  # skip the second build of a grammar whose first one took longer
# A space, or a line break and its indent, is how models write JSON; without a limit, a weak one goes on with
# white space for ever. A schema may say otherwise in its key "x-guidance", but not that keywords which
# llguidance does not implement be ignored; nor that a character be written in two ways, as \u0061 for a: a
# key so written would escape the schema's rules for it.
_JSON_DEFAULTS: Any = {"whitespace_pattern": r" |\r?\n[ \t]{0,20}"}
_JSON_OVERRIDES: Any = {"lenient": False, "json_allowed_escapes": 'nrbtf\\"'}


@dataclass(frozen=True)
class StructuredOutput:
    """The form that the output must have. Exactly one field is given.

    Attributes:
        json_schema: JSON that fits this JSON Schema, an object or its text.
        json_object: any JSON object.
        regex: text that the expression matches from beginning to end (Rust's syntax: no look-around).
        choice: one of these strings.
        lark: a grammar in llguidance's Lark syntax, with a rule "start"; schemas embedded with %json are not
            checked here. It gives tokens by their ids (<[7]>), which must be added tokens, such as special
            tokens. Or a function that writes one: the thread that compiles it calls it with whether the
            output begins inside a thought, which the grammar then has to allow.
        ebnf: a grammar in the EBNF of llama.cpp (GBNF), with a rule "root".
        structural_tag: text in which tags hold JSON or expressions (``text/structural_tags.py``): an object,
            or its text.
        strict: whether a JSON schema is refused if a part of it cannot be enforced; else that part is left
            out (``text/enforceable.py``).
        widened: the parts left out, also of tools, once the grammar has been written.
    """

    json_schema: JsonMapping | str | None = None
    json_object: bool = False
    regex: str | None = None
    choice: Sequence[str] | None = None
    lark: str | Callable[[bool], str] | None = None
    ebnf: str | None = None
    structural_tag: JsonMapping | str | None = None
    strict: bool = True
    widened: list[SchemaError] = field(default_factory=list, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.json_object, bool):
            raise RequestError(f"json_object = {self.json_object!r}; expected True or False")
        given = [name for name in _FORMS if getattr(self, name) is not None]
        given += ["json_object"] if self.json_object else []
        if len(given) != 1:
            raise RequestError(
                f"a structured output names {given or 'nothing'}; give exactly one of {', '.join(_FORMS)}, "
                "json_object=True"
            )
        if self.ebnf is not None:  # converted where it is compiled
            _check_length("the form", len(_text(self.ebnf)))
        elif self.structural_tag is not None:
            _ = self._tags
        elif not callable(self.lark):
            _check_length("the form" if self.lark else given[0], len(self.grammar))

    @classmethod
    def of_grammar(cls, text: str) -> "StructuredOutput":
        """The form that a grammar describes, in Lark's syntax or in EBNF."""
        return cls(lark=text) if is_lark(text) else cls(ebnf=text)

    def behind(self, thinking: bool, close: int | None, added: Callable[[str], int | None]) -> str:
        """The grammar, in llguidance's form, of an output that begins inside a thought, or not.

        close: the token that ends thoughts, or None where that is text. added: the id of a tag that is a
        token of its own. Raises RequestError.
        """
        if callable(self.lark):
            return self.lark(thinking)
        lark = self.lark
        if self.ebnf is not None:
            lark = of_ebnf(self.ebnf)
        elif self.structural_tag is not None:
            lark = tag_grammar(self._tags, Vocabulary(added, embedded, MAX_GRAMMAR_LENGTH))
        if not thinking:
            return self.grammar if lark is None else lark
        return _behind_thought(self.grammar if lark is None else lark, lark is None, close)

    @property
    def _tags(self) -> JsonMapping:
        given = self.structural_tag
        try:
            found = json.loads(given) if isinstance(given, str) else given
            length = len(json.dumps(found))
        except _NO_GRAMMAR as error:
            raise RequestError(f"structural_tag is not JSON: {error}") from error
        _check_length("structural_tag", length)
        if not isinstance(found, Mapping):
            raise RequestError(f"structural_tag is a {type(found).__name__}; expected an object")
        return found

    @functools.cached_property
    def grammar(self) -> str:
        """The grammar in llguidance's form. Raises RequestError where the text alone shows a fault."""
        try:
            if self.json_object or self.json_schema is not None:
                return _of_json(self.enforced)
            if self.lark is not None:
                return _text(self.lark)
            return LLMatcher.grammar_from_regex(_text(self.regex) if self.choice is None else self._choices())
        except SchemaError:
            raise
        except _NO_GRAMMAR as e:
            raise RequestError(f"the structured output is not valid: {e}") from e

    @functools.cached_property
    def enforced(self) -> JsonObject:
        """The schema that the output is held to, of a form that is JSON."""
        if self.json_schema is None:
            return {"type": "object"}
        return _schema(self.json_schema, None if self.strict else self.widened)

    def _choices(self) -> str:
        choices = self.choice if isinstance(self.choice, list | tuple) else []
        if not choices or any(not isinstance(c, str) or not c for c in choices):
            raise RequestError(f"choice = {choices!r:.80}; expected a list of non-empty strings")
        _check_length("choice", sum(map(len, choices)))
        return "|".join("".join(map(_literal, choice)) for choice in choices)


def embedded(schema: JsonMapping) -> str:
    """A schema as text for %json inside a grammar, with the checks of ``json_schema``.

    Raises RequestError.
    """
    try:
        whole = json.loads(_of_json(_schema(schema)))
    except RequestError:
        raise
    except _NO_GRAMMAR as e:
        raise RequestError(f"the schema is not valid: {e}") from e
    return json.dumps(whole["grammars"][0]["json_schema"])


def _of_json(schema: JsonObject) -> str:
    return LLMatcher.grammar_from_json_schema(
        json.dumps(schema), defaults=_JSON_DEFAULTS, overrides=_JSON_OVERRIDES
    )


def _schema(schema: object, widened: list[SchemaError] | None = None) -> JsonObject:
    """The schema as llguidance is to have it. widened: gets the parts that have been left out.

    Raises SchemaError for such a part where there is no such list.
    """
    if isinstance(schema, str) and len(schema) > _LONGEST_TEXT:
        raise RequestError(
            f"json_schema is a text of {len(schema)} characters; at most {_LONGEST_TEXT} are allowed"
        )
    value = json.loads(_text(schema)) if isinstance(schema, str) else schema
    if not isinstance(value, Mapping):
        raise RequestError(f"json_schema is a {type(value).__name__}; expected an object")
    text = json.dumps(value, allow_nan=False)
    _check_length("json_schema", len(text))  # check_schema computes with the schema's numbers
    copy = json.loads(text)
    faults = [SchemaError(*fault) for fault in enforceable(copy)]
    if faults and widened is None:
        raise faults[0]
    if widened is not None:
        widened += faults
    check_schema(copy)
    return in_full(copy)


def _check_length(what: str, length: int) -> None:
    if length > MAX_GRAMMAR_LENGTH:
        raise RequestError(
            f"{what} makes a grammar of {length} characters; at most {MAX_GRAMMAR_LENGTH} are allowed"
        )


def _text(text: object) -> str:
    if not isinstance(text, str):
        raise RequestError(f"{text!r} is a {type(text).__name__}; expected a string")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RequestError(f"{text!a:.80} holds half of a character; remove lone surrogates") from None
    return text


def _behind_thought(grammar: str, is_json: bool, close: int | None) -> str:
    """The grammar of any text that ends its thought and then fits ``grammar``, in Lark's syntax or JSON."""
    expression, answer = grammar, ""
    if is_json:
        (inner,) = json.loads(grammar)["grammars"]
        expression, answer = inner["lark_grammar"], f"answer: %json {json.dumps(inner['json_schema'])}"
    if expression:
        answer = re.sub(r"^start(?=\s*:)", "answer", expression, count=1, flags=re.MULTILINE)
    end = Thoughts.CLOSE
    thought = f'thought[suffix="{end}"]: /(.|\\n)*/' if close is None else f"thought: THOUGHT <[{close}]>"
    return f"start: thought answer\n{thought}\n{answer}\n" + (
        "" if close is None else f"THOUGHT: {Thoughts.terminal()}\n"
    )


def _literal(character: str) -> str:
    plain = character.isascii() and character.isalnum()
    return character if plain else f"\\x{{{ord(_text(character)):x}}}"


class Matcher:
    """The position of one output in its grammar.

    Attributes:
        inner: llguidance's matcher. stops: packed mask of the tokens that may end the output once it is
        complete.
        compiled: the grammar that it began with.
        taken: tokens of the output so far.
        alone: whether it has a lexer of its own, not shared with other outputs (see ``Grammars.masks``).
    """

    def __init__(self, compiled: CompiledGrammar, stops: np.ndarray) -> None:
        self.inner, self.compiled, self.stops = compiled.matcher.deep_copy(), compiled, stops
        self.taken: list[int] = []
        self.alone = False

    def advance(self, tokens: Sequence[int]) -> None:
        """Take emitted tokens, without a token that ended the output."""
        self.taken += tokens
        self.inner.consume_tokens(list(tokens))

    def forced(self) -> list[int]:
        """The next tokens, as far as the grammar leaves no choice."""
        return self.inner.compute_ff_tokens()

    @property
    def failed(self) -> bool:
        """Whether the grammar exceeded llguidance's bounds, so that no token can follow."""
        return self.inner.is_error()


class MaskWindow(NamedTuple):
    """The row for the masks of an output, and the drafts that the masks follow."""

    row: int
    matcher: Matcher
    drafts: Sequence[int]


class Grammars:
    """Compiles grammars for one vocabulary and computes masks. Threads may share it.

    Attributes:
        backend: the tokenizer.
        thoughts: the borders of the model's thoughts.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Sequence[int]) -> None:
        """vocab_size: the model's; ids without a token are never allowed. eos_ids: one id or more."""
        self.words = -(-vocab_size // WORD)
        self._eos, self.backend, self.thoughts = eos_ids[0], tokenizer.backend, tokenizer.thoughts
        self._table, self._added = token_table(tokenizer, vocab_size, eos_ids), tokenizer.added_id
        self._executor, self._trials = LLExecutor(), Trials(self._table)
        self._preparing = threading.Lock()
        # Every request starts from a copy of the compiled grammar; the most recently used is at the end.
        self._cached: OrderedDict[str, CompiledGrammar] = OrderedDict()
        self._compiling: dict[str, Future[CompiledGrammar]] = {}  # grammars that threads wait for
        self._caching = threading.Lock()

    @classmethod
    def of(cls, tokenizer: Tokenizer, vocab_size: int, eos_ids: Iterable[int]) -> "Grammars | None":
        """The grammars of a tokenizer; None if it has more tokens than the model, or no eos_ids."""
        eos = [t for t in eos_ids if t < tokenizer.vocab_size]
        fits = eos and tokenizer.vocab_size <= vocab_size
        return cls(tokenizer, vocab_size, eos) if fits else None

    def matcher(
        self, wanted: StructuredOutput, stop_ids: Iterable[int], prompt: Sequence[int] = ()
    ) -> Matcher:
        """A matcher for the output that follows ``prompt``. stop_ids: tokens that may end it.

        Raises RequestError, and Overloaded while too many other grammars are being compiled.
        """
        stops = np.zeros(self.words, np.uint32)
        for token in stop_ids:
            stops[token // WORD] |= np.uint32(1 << token % WORD)
        close = self.backend.token_to_id(Thoughts.CLOSE)
        if isinstance(wanted.lark, str):
            self._check_tokens(wanted.lark)
        return Matcher(self._compiled(wanted.behind(self.thinks(prompt), close, self._added)), stops)

    def _check_tokens(self, lark: str) -> None:
        """Raise RequestError for tokens that have text, which a draft could not name."""
        for token in token_ids(lark):
            if token >= len(self._table.tokens) or self._table.tokens[token] != TokenTable.tag(token):
                raise RequestError(f"the grammar names <[{token}]>, no special token; write its text")

    def thinks(self, prompt: Sequence[int]) -> bool:
        """Whether a prompt ends inside a thought, which the output begins with."""
        return self.thoughts.open_after(prompt, self._decode)

    def text(self, token: int) -> str:
        """The text of a token, which may be a special token."""
        return self._decode([token])

    def _decode(self, ids: list[int]) -> str:
        return self.backend.decode(ids, skip_special_tokens=False)

    def encode(self, text: str) -> list[int]:
        """Tokens of a piece of text."""
        return self.backend.encode(text, add_special_tokens=False).ids

    def prepare(self) -> None:
        """Make the table that all grammars need, unless it is made: no other thread runs meanwhile."""
        with self._preparing:
            _ = self._table.compiled

    def _compiled(self, grammar: str) -> CompiledGrammar:
        """The grammar, compiled once for all who ask for it, with the errors of ``matcher``."""
        with self._caching:
            if found := self._cached.get(grammar):
                self._cached.move_to_end(grammar)
                return found
            first, future = grammar not in self._compiling, self._compiling.setdefault(grammar, Future())
        if not first:
            self.prepare()  # or wait until it is
            try:
                return future.result(TURN_SECONDS)  # as long as a trial waits for its turn
            except TimeoutError:
                raise Overloaded("the same structured output is being compiled; try again", SECONDS) from None
        try:
            future.set_result(made := self._compile(grammar))
        except BaseException as error:
            future.set_exception(error)
            raise
        finally:
            with self._caching:
                del self._compiling[grammar]
        return made

    def _compile(self, grammar: str) -> CompiledGrammar:
        self._trials.start()  # and have its own table made meanwhile
        self.prepare()
        made = CompiledGrammar.of(self._table, grammar, self._trials.run(grammar))
        if made.fault is not None:
            raise RequestError(f"the structured output cannot be compiled: {made.fault}; change it")
        with self._caching:
            self._cached[grammar] = made
            while len(self._cached) > _CACHED_GRAMMARS or self._held() > _CACHED_BYTES:
                self._cached.popitem(last=False)
        return made

    def _held(self) -> int:
        return sum(compiled.held for compiled in self._cached.values())

    def masks(self, windows: Sequence[MaskWindow], rows: int, width: int) -> np.ndarray:
        """Allowed tokens at every position of every window, uint32 [rows, width, words].

        Position i is for the tokens after i drafts. Rows that are not named, and positions after a draft that
        is not allowed, which is never kept, have every bit set. Outputs of one grammar share a lexer, which
        none of them can use once the text, or a draft, of one exceeds its bounds: the rest go on alone.
        """
        masks = np.full((rows * width, self.words), -1, np.int32)
        work = [(w.matcher.inner, w.row * width, list(w.drafts)) for w in windows]
        # llguidance has a function of its own for no drafts, and both refuse an empty list.
        if plain := [(inner, at) for inner, at, drafts in work if not drafts]:
            fill_next_token_bitmask_par(self._executor, plain, masks)
        if drafted := [w for w in work if w[2]]:
            fill_next_token_bitmask_par_with_draft_tokens(self._executor, drafted, masks)
        for w in windows:
            if w.matcher.failed and not w.matcher.alone and w.matcher.compiled.seconds < _ALONE_SECONDS:
                masks[w.row * width : (w.row + 1) * width] = self._alone(w.matcher, list(w.drafts), width)
        bits = masks.view(np.uint32).reshape(rows, width, self.words)
        word, bit = self._eos // WORD, np.uint32(self._eos % WORD)
        for w in windows:
            row = bits[w.row]
            row[(row[:, word] >> bit & 1).astype(bool)] |= w.matcher.stops
        return bits

    def _alone(self, matcher: Matcher, drafts: Sequence[int], width: int) -> np.ndarray:
        """Masks along the drafts by a lexer of the output's own; where it fails, too, nothing may follow."""
        with self._caching:
            if self._cached.get(matcher.compiled.grammar) is matcher.compiled:
                del self._cached[matcher.compiled.grammar]
        matcher.alone, matcher.inner = True, self._anew(matcher)
        masks, ahead = np.full((width, self.words), -1, np.int32), matcher.inner.deep_copy()
        for i, draft in enumerate([*drafts, None]):
            fill_next_token_bitmask(ahead, masks, i)
            if ahead.is_error():
                masks[i:] = 0
                matcher.inner = self._anew(matcher) if i else ahead
                break
            if draft is None or not ahead.try_consume_tokens([draft]):
                break
        return masks

    def _anew(self, matcher: Matcher) -> LLMatcher:
        inner = self._table.build(matcher.compiled.grammar)
        if matcher.taken:
            inner.consume_tokens(matcher.taken)
        return inner
