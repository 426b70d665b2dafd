"""An option is declared once: a dataclass field that says its help, default, range or choices.

The check of its values, the command line (``commands/options.py``), the signature and help of functions with
options, the bounds of HTTP fields, and the tables of docs/options.md derive from the field.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import lru_cache, wraps
from textwrap import wrap
from types import MappingProxyType
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

from mtp_jax.foreign import python_advice

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

    def allows(self, value: object) -> bool:
        """Whether a value is in range."""
        if value is None:
            return bool(self.unset)
        if self.choices:
            return value in self.choices
        if self.kind is bool:
            return isinstance(value, bool)
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
    """Raise ``error`` for the first option of an instance that is out of range."""
    for name, about in declared(type(options)).items():
        value = getattr(options, name)
        if not about.allows(value):
            raise error(f"{name} = {value!r}; expected {about.expected}")


def documented(cls: _C) -> _C:
    """Class decorator: the docstring lists the options."""
    cls.__doc__ = f"{inspect.cleandoc(cls.__doc__ or '')}\n\nAttributes:\n{_listed(cls)}"
    return cls


def refuse_unknown(cls: type, given: Iterable[str], error: type[Exception], name: str) -> None:
    """Raise ``error`` for the first argument that no field of a dataclass has; ``name``: for the message."""
    known = _arguments(cls)
    for unknown in given:
        if unknown not in known:
            instead = python_advice(unknown, known) or f"help({name}) has all arguments"
            raise error(f"{name} has no argument {unknown}; {instead}")


@lru_cache
def _arguments(cls: type) -> frozenset[str]:
    return frozenset(f.name for f in fields(cls) if f.init)


def named(error: type[Exception]) -> Callable[[type[_T]], type[_T]]:
    """Class decorator of a dataclass: an argument that it does not have is ``error``, with a hint."""

    def decorate(cls: type[_T]) -> type[_T]:
        init = cls.__init__

        @wraps(init)
        def checked(self: _T, *args: Any, **kwargs: Any) -> None:
            refuse_unknown(cls, kwargs, error, cls.__name__)
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
            refuse_unknown(cast(type, cls), kwargs, error, type(self).__name__)
            init(self, cls(*args, **kwargs))

        own, *_ = inspect.signature(init).parameters.values()
        given = inspect.signature(cls)
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
