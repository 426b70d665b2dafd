"""An option is declared once: a dataclass field that says its help, default, range or choices.

The check of its values and of its company, the command line (``commands/options.py``), the signature and help
of functions with options, the bounds of HTTP fields, and the tables of docs/options.md derive from the field.
"""

import inspect
import os
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import lru_cache, wraps
from pathlib import Path
from textwrap import wrap
from types import MappingProxyType
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

from mtp_jax.foreign import python_advice, value_meant

_P = ParamSpec("_P")
_S = TypeVar("_S")
_T = TypeVar("_T")
_O = TypeVar("_O")
_C = TypeVar("_C", bound=type)


@dataclass(frozen=True)
class Option:
    """Facts about an option, declared with its field.

    Attributes:
        help: a phrase.
        default: of the field.
        kind: bool, int and float are checked here; of others only the choices.
        low, high: the least and the greatest number; None: no bound.
        above: whether ``low`` itself is excluded.
        choices: the allowed strings; empty: any.
        unset: the meaning of None; empty where None is not allowed.
        metavar: name of the value on the command line.
        flag: flag of the command line, such as "--api-key"; empty: "--" and the field's name; None: it has
            none.
        off: a second flag of the command line that sets False or None, and its help.
        repeated: the flag may be repeated; the field is a tuple.
        subject: heading of the help that it stands under; empty: the command's own.
        needs: the value that another option must have where this one is in use, and the reason, by its name:
            a string, the least number, or True, which is any value in use of an option that is no switch.
            Otherwise None always serves: it means a default that does.
        excludes: the reason why another option must not be in use where this one is, by its name; one of the
            two says so.
        idle: the value of another option beside which this one has no effect, by its name. The command line
            refuses a flag that has none.
    """

    help: str
    default: Any
    kind: type
    low: float | None = None
    high: float | None = None
    above: bool = False
    choices: tuple[str, ...] = ()
    unset: str = ""
    metavar: str | None = None
    flag: str | None = ""
    off: tuple[str, str] | None = None
    repeated: bool = False
    subject: str = ""
    needs: Mapping[str, tuple[str | bool | int, str]] = field(default_factory=dict)
    excludes: Mapping[str, str] = field(default_factory=dict)
    idle: Mapping[str, object] = field(default_factory=dict)

    def in_use(self, value: object) -> bool:
        """Whether a value is another than the default, and does not turn the option off."""
        return value is not None and value is not False and value != self.default

    @property
    def company(self) -> list[tuple[str, str | bool | int | None, str]]:
        """Other options, their needed values or None where they are excluded, and the reasons."""
        excluded = [(other, None, why) for other, why in self.excludes.items()]
        return [*excluded, *((other, needed, why) for other, (needed, why) in self.needs.items())]

    def serves(self, value: Any, needed: str | bool | int | None) -> bool:
        """Whether a value of this option is the value that is needed, or as great. None: not in use."""
        if needed is None:
            return not self.in_use(value)
        if needed is True and self.kind is not bool:
            return self.in_use(value)
        if value is None:
            return True
        return value >= needed if type(needed) is int else value == needed

    def allows(self, value: object) -> bool:
        """Whether a value is in range."""
        if value is None:
            return bool(self.unset)
        if self.choices:
            return value in self.choices
        if self.kind is bool:
            return isinstance(value, bool)
        if self.kind is Path:
            return isinstance(value, str | os.PathLike)
        if self.kind not in (int, float):
            return True
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        if self.kind is int and not isinstance(value, int):
            return False
        if value != value or (self.above and value == self.low):
            return False
        return (self.low is None or value >= self.low) and (self.high is None or value <= self.high)

    @property
    def expected(self) -> str:
        """The range in words."""
        none = " or None" if self.unset else ""
        if self.choices:
            return f"one of {', '.join(map(repr, self.choices))}{none}"
        if self.kind is bool:
            return f"True or False{none}"
        if self.kind is Path:
            return f"a path{none}"
        what = "an integer" if self.kind is int else "a number"
        if self.above:
            return f"{what} above {_text(self.low)}, at most {_text(self.high)}{none}"
        if self.high is None:
            return f"{what} of {_text(self.low)} or more{none}"
        return f"{what} from {_text(self.low)} to {_text(self.high)}{none}"

    @property
    def shown_default(self) -> str:
        """The default as help and tables show it."""
        if self.default is MISSING:
            return "required"
        if self.default is None:
            return self.unset
        return _text(self.default) if self.default or self.default == 0 else "none"


def option(default: object, help: str, *, kind: type | None = None, **rest: Any) -> Any:
    """A field that is an option; ``rest``: of ``Option``. Without ``kind`` it is the type of the default.

    default: MISSING where there is none.
    """
    about = Option(help, default, kind or type(default), **rest)
    if isinstance(default, dict):
        return field(default_factory=dict, metadata={"option": about})
    return field(default=default, metadata={"option": about})


def narrowed(cls: type, name: str, default: object, **changes: Any) -> Any:
    """The field of a subclass whose option is that of ``cls`` but for the default and ``changes``."""
    about = replace(declared(cls)[name], default=default, **changes)
    return field(default=default, metadata={"option": about})


@lru_cache
def declared(cls: type) -> Mapping[str, Option]:
    """The options of a dataclass by name."""
    ordered = sorted(fields(cls), key=lambda f: f.kw_only is True)  # as in the signature
    return MappingProxyType({f.name: f.metadata["option"] for f in ordered if "option" in f.metadata})


def check(options: object, error: type[Exception]) -> None:
    """Raise ``error`` for the first option of an instance that is out of range, or for a ``Clash``."""
    for name, about in declared(type(options)).items():
        value = getattr(options, name)
        if not about.allows(value):
            close = value_meant(value, about.choices) if isinstance(value, str) and about.choices else None
            hint = f"; do you mean {close!r}?" if close else ""
            raise error(f"{name} = {value!r}; expected {about.expected}{hint}")
    check_company(error, options)


def check_company(error: type[Exception], *instances: object) -> None:
    """Raise ``error`` with a ``Clash`` for the first two options of these instances that exclude each other.

    Names that no instance has are ignored.
    """
    where = {name: one for one in instances for name in declared(type(one))}
    for one in instances:
        for name, about in _in_company(type(one)):
            if not about.in_use(value := getattr(one, name)):
                continue
            for other, needed, why in about.company:
                if other in where:
                    got, its = getattr(where[other], other), declared(type(where[other]))[other]
                    if not its.serves(got, needed):
                        raise error(Clash(name, _plain(value), other, _plain(got), needed, why))


@dataclass(frozen=True)
class Clash:
    """Two options that cannot stand together. Its string is a sentence in the words of the Python API.

    Attributes:
        option, value: the name and the value of an option in use.
        other, got: the name and the value of the option that it needs to be another, or excludes.
        needed: the value that ``other`` must have, or its least number; None: it must not be in use.
        why: the reason.
    """

    option: str
    value: object
    other: str
    got: object
    needed: str | bool | int | None
    why: str

    def __str__(self) -> str:
        return self.told(_in_python)

    def told(self, say: Callable[[str, object], str | None]) -> str:
        """The sentence. say: an option and its value in the caller's words; None: they have none for it."""
        any_value = self.needed is True and not isinstance(self.got, bool)
        better = None if self.needed is None or any_value else say(self.other, self.needed)
        more = " or more" if type(self.needed) is int else ""
        change = f"take {better}{more}, or leave the other out" if better else "leave one of them out"
        change = "give both, or neither" if any_value else change
        both = (self.option, self.value), (self.other, self.got)
        first, second = (say(*one) or _in_python(*one) for one in both)
        return f"{first} with {second}: {self.why}; {change}"


class Described(str):
    """The text of a value that is neither text nor a number."""

    __slots__ = ()
    __repr__ = str.__str__


def _in_python(name: str, value: object) -> str:
    return f"{name} = {value!r}"


def _plain(value: object) -> object:
    if isinstance(value, Path):
        return str(value)
    return value if value is None or isinstance(value, str | int | float) else Described(f"{value!r:.80}")


@lru_cache
def _in_company(cls: type) -> tuple[tuple[str, Option], ...]:
    """The options that need or exclude others."""
    return tuple((name, about) for name, about in declared(cls).items() if about.company)


def documented(cls: _C) -> _C:
    """Class decorator: the docstring lists the options."""
    cls.__doc__ = f"{inspect.cleandoc(cls.__doc__ or '')}\n\nAttributes:\n{_listed(cls)}"
    return cls


def refuse_unknown(known: Set[str], given: Iterable[str], error: type[Exception], name: str) -> None:
    """Raise ``error`` for the first argument that is not known; ``name``: of the call, for the message."""
    for unknown in given:
        if unknown not in known:
            instead = python_advice(unknown, known) or f"help({name}) has all arguments"
            raise error(f"{name} has no argument {unknown}; {instead}")


def refuse_positional(
    unnamed: Sequence[str], known: Set[str], given: int, error: type[Exception], name: str
) -> None:
    """Raise ``error`` for more values without a name than ``unnamed``, the arguments that may go without."""
    if given <= len(unnamed):
        return
    others = sorted(known - set(unnamed))
    names = ", ".join(others) if len(others) < 10 else f"help({name}) has them"
    wrong = f"{name} got {given} values without a name; only {', '.join(unnamed)} may have none"
    raise error(f"{wrong}; the others by name: {names}" if others else wrong)


@lru_cache
def _arguments(cls: type) -> frozenset[str]:
    return frozenset(f.name for f in fields(cls) if f.init)


def named(error: type[Exception]) -> Callable[[type[_T]], type[_T]]:
    """Class decorator of a dataclass: an argument that it does not have is ``error``, with a hint."""

    def decorate(cls: type[_T]) -> type[_T]:
        init = cls.__init__

        @wraps(init)
        def checked(self: _T, *args: Any, **kwargs: Any) -> None:
            refuse_unknown(_arguments(cls), kwargs, error, cls.__name__)
            init(self, *args, **kwargs)

        cls.__init__ = checked  # type: ignore[method-assign]
        return cls

    return decorate


def takes(
    cls: Callable[_P, _O],
    error: type[Exception],
) -> Callable[[Callable[[_S, _O], None]], Callable[Concatenate[_S, _P], None]]:
    """Decorator of an ``__init__`` that takes one ``cls``: its callers give the fields of ``cls`` instead.

    error: raised for another argument, with a hint.
    """

    def decorate(init: Callable[[_S, _O], None]) -> Callable[Concatenate[_S, _P], None]:
        @wraps(init)
        def taking(self: _S, *args: _P.args, **kwargs: _P.kwargs) -> None:
            name, known = type(self).__name__, _arguments(cast(type, cls))
            refuse_unknown(known, kwargs, error, name)
            refuse_positional(unnamed, known, len(args), error, name)
            init(self, cls(*args, **kwargs))

        own, *_ = inspect.signature(init).parameters.values()
        given = inspect.signature(cls)
        unnamed = [p.name for p in given.parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
        signature = given.replace(parameters=[own, *given.parameters.values()], return_annotation=None)
        taking.__signature__ = signature  # type: ignore[attr-defined]
        taking.__doc__ = f"{inspect.cleandoc(init.__doc__ or '')}\n\nArgs:\n{_listed(cls)}"
        return taking

    return decorate


def _listed(cls: Any) -> str:
    lines = []
    for name, about in declared(cls).items():
        none = f" None: {about.unset}." if about.unset else ""
        range_ = f" {about.expected.capitalize()}." if about.low is not None and not none else ""
        text = f"{name}: {about.help}.{none}{range_}"
        lines += wrap(text, 100, initial_indent=" " * 4, subsequent_indent=" " * 8)
    return "\n".join(lines)


def _text(value: object) -> str:
    return str(int(value)) if isinstance(value, float) and value == int(value) else str(value)
