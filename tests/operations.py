"""Counts the multiplications and additions of a program's products, those of loops as often as they run."""

import math
from collections.abc import Callable
from typing import Any

import jax
from jax.extend import core


def operations(function: Callable[..., Any], *args: Any) -> int:
    """Two for each pair of numbers that a product of matrices multiplies and adds, over one call."""
    closed = jax.make_jaxpr(function)(*args)
    counted = [0]
    _run(closed.jaxpr, closed.consts, jax.tree.leaves(args), counted)
    return counted[0]


def _run(jaxpr: Any, consts: Any, args: Any, counted: list[int]) -> list[Any]:
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, core.Literal) else values[atom]

    def call(closed: Any, args: Any) -> list[Any]:
        return _run(closed.jaxpr, closed.consts, args, counted)

    for eqn in jaxpr.eqns:
        given, name, params = [read(a) for a in eqn.invars], eqn.primitive.name, eqn.params
        if name == "while":
            of_cond, of_body = params["cond_nconsts"], params["body_nconsts"]
            cond, body, carry = (
                given[:of_cond],
                given[of_cond : of_cond + of_body],
                given[of_cond + of_body :],
            )
            while call(params["cond_jaxpr"], [*cond, *carry])[0]:
                carry = call(params["body_jaxpr"], [*body, *carry])
            out = carry
        elif name == "cond":
            out = call(params["branches"][int(given[0])], given[1:])
        elif name in ("jit", "pjit"):
            out = call(params["jaxpr"], given)
        elif name == "custom_jvp_call":
            out = call(params["call_jaxpr"], given)
        elif name in ("scan", "custom_vjp_call", "shard_map"):
            raise NotImplementedError(f"{name} is not counted; what is measured here has none")
        else:
            if name == "dot_general":
                (contracted, _), _ = params["dimension_numbers"]
                terms = math.prod(given[0].shape[i] for i in contracted)
                counted[0] += 2 * terms * math.prod(eqn.outvars[0].aval.shape)
            out = eqn.primitive.bind(*given, **params)
            out = out if eqn.primitive.multiple_results else [out]
        values.update(zip(eqn.outvars, out, strict=True))
    return [read(a) for a in jaxpr.outvars]
