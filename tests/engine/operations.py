"""Counts the multiplications and additions of a program's products, those of loops as often as they run."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.extend import core


def operations(function: Callable[..., Any], *args: Any) -> float:
    """Two for each pair of numbers that a product of matrices multiplies and adds, over one call.

    args: arrays or their shapes, as only what ``function`` closes over may say how often a loop runs. What is
    not counted is not computed. The count is exact to seven digits.
    """
    closed = jax.make_jaxpr(function)(*args)
    empty = [np.zeros(a.shape, a.dtype) for a in jax.tree.leaves(args)]
    return float(jax.jit(lambda *args: _run(closed.jaxpr, closed.consts, args)[0])(*empty))


def _run(jaxpr: Any, consts: Any, args: Any) -> tuple[Any, list[Any]]:
    """(operations, results)."""
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))
    counted = np.float32(0)

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, core.Literal) else values[atom]

    def call(closed: Any, args: Any) -> tuple[Any, list[Any]]:
        return _run(closed.jaxpr, closed.consts, args)

    for eqn in jaxpr.eqns:
        given, name, params = [read(a) for a in eqn.invars], eqn.primitive.name, eqn.params
        if name == "while":
            of_cond, of_body = params["cond_nconsts"], params["body_nconsts"]
            cond, body, carry = (
                given[:of_cond],
                given[of_cond : of_cond + of_body],
                given[of_cond + of_body :],
            )

            def once(state: Any, body: Any = body, params: Any = params) -> tuple[Any, list[Any]]:
                more, carry = call(params["body_jaxpr"], [*body, *state[1]])
                return state[0] + more, carry

            def go_on(state: Any, cond: Any = cond, params: Any = params) -> Any:
                return call(params["cond_jaxpr"], [*cond, *state[1]])[1][0]

            more, out = jax.lax.while_loop(go_on, once, (np.float32(0), carry))
            counted += more
        elif name == "cond":
            branches = [functools.partial(call, closed) for closed in params["branches"]]
            more, out = jax.lax.switch(given[0], branches, given[1:])
            counted += more
        elif name in ("jit", "pjit", "custom_jvp_call"):
            more, out = call(params["call_jaxpr" if name == "custom_jvp_call" else "jaxpr"], given)
            counted += more
        elif name in ("scan", "custom_vjp_call", "shard_map"):
            raise NotImplementedError(f"{name} is not counted; what is measured here has none")
        else:
            if name == "dot_general":
                (contracted, _), _ = params["dimension_numbers"]
                terms = math.prod(given[0].shape[i] for i in contracted)
                counted += np.float32(2 * terms * math.prod(eqn.outvars[0].aval.shape))
            out = eqn.primitive.bind(*given, **params)
            out = out if eqn.primitive.multiple_results else [out]
        values.update(zip(eqn.outvars, out, strict=True))
    return counted, [read(a) for a in jaxpr.outvars]
