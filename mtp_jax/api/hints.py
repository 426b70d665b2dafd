"""Calls and attributes as other engines have them: the error says ours."""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, get_args

from mtp_jax.engine.sampling_params import SamplingParams
from mtp_jax.foreign import attribute_advice
from mtp_jax.options import declared, refuse_positional, refuse_unknown

_T = TypeVar("_T")


def hinting(error: type[Exception], *methods: str) -> Callable[[type[_T]], type[_T]]:
    """Class decorator: an argument that these methods do not take is ``error``, and a missing attribute is
    AttributeError, both with a hint.
    """

    def decorate(cls: type[_T]) -> type[_T]:
        for name in methods:
            setattr(cls, name, _checked(getattr(cls, name), error))
        cls.__getattr__ = _missing  # type: ignore[attr-defined]
        return cls

    return decorate


def _checked(call: Callable[..., Any], error: type[Exception]) -> Callable[..., Any]:
    name, known, unnamed = call.__name__, set[str](), list[str]()
    for parameter in list(inspect.signature(call).parameters.values())[1:]:
        if parameter.kind is parameter.VAR_KEYWORD:  # **options: Unpack[Options]
            known |= get_args(parameter.annotation)[0].__annotations__.keys()
            continue
        known.add(parameter.name)
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
            unnamed.append(parameter.name)

    @wraps(call)
    def checked(self: object, *args: Any, **kwargs: Any) -> Any:
        refuse_positional(unnamed, known, len(args), error, name)
        for given in kwargs:
            if given not in known and given in declared(SamplingParams):
                raise error(f"{name} has no argument {given}; give SamplingParams({given}=...)")
        refuse_unknown(known, kwargs, error, name)
        return call(self, *args, **kwargs)

    return checked


def _missing(self: object, name: str) -> Any:
    hint = attribute_advice(name)
    message = f"{type(self).__name__} has no attribute {name}{hint and f'; {hint}'}"
    raise AttributeError(message, name=name, obj=self)
