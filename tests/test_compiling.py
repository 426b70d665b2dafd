"""Tests compile without optimisation, unless a program asks for it or all of them do."""

import os

import jax
import jax.numpy as jnp

from tests.compiling import AS_FOR_USERS, FAST


def test_every_program_but_one_of_whose_bits_matter_is_compiled_fast(pytestconfig):
    given = os.environ.get("XLA_FLAGS", "").split()
    assert all((flag in given) != pytestconfig.getoption("optimised") for flag in FAST)


def test_a_program_may_be_compiled_as_for_users():
    """XLA knows each of the options, and refuses others."""
    x = jnp.arange(7.0)
    assert jax.jit(jnp.sum, compiler_options=AS_FOR_USERS)(x) == 21
