"""Compiled programs are kept, but not without end: each takes memory maps of the process."""

import gc
import weakref
from collections import OrderedDict

import jax.numpy as jnp
import pytest

from spd_jax import program
from spd_jax.program import Program


@pytest.fixture(autouse=True)
def two_are_kept(monkeypatch):
    monkeypatch.setattr(program, "MAX_PROGRAMS", 2)
    monkeypatch.setattr(program, "_KEPT", OrderedDict())


@pytest.fixture
def scale() -> Program:
    return Program(lambda x, *, times: x * times)


def test_a_program_is_compiled_once(scale):
    for value in (1.0, 2.0):
        assert scale(jnp.full(3, value), times=2).tolist() == [2 * value] * 3
    assert scale.n_compiled == 1
    assert scale(jnp.ones(3), times=5).tolist() == [5, 5, 5]
    assert scale(jnp.ones(4), times=2).tolist() == [2, 2, 2, 2]
    assert scale.n_compiled == 3


def test_the_programs_used_last_are_kept_of_all_functions_together(scale):
    negate = Program(lambda x: -x)
    first = weakref.ref(scale.compile(jnp.ones(1), times=2))
    second = weakref.ref(scale.compile(jnp.ones(2), times=2))
    scale(jnp.ones(1), times=2)  # used again: the other is now the older one
    assert negate(jnp.ones(2)).tolist() == [-1, -1]
    gc.collect()
    assert first() is not None and second() is None
    scale(jnp.ones(1), times=2)
    assert (scale.n_compiled, negate.n_compiled) == (2, 1)
    assert scale(jnp.ones(2), times=2).tolist() == [2, 2]  # compiled anew
    assert scale.n_compiled == 3
