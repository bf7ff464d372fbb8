"""Compiled programs are kept, but not without end: each takes memory maps of the process."""

import gc
import weakref

import jax.numpy as jnp
import pytest

from spd_jax import program
from spd_jax.program import Program


@pytest.fixture
def double(monkeypatch) -> Program:
    """A program of which two compiled forms are kept."""
    monkeypatch.setattr(program, "MAX_PROGRAMS", 2)
    return Program(lambda x, *, times: x * times)


def test_a_program_is_compiled_once(double):
    for value in (1.0, 2.0):
        assert double(jnp.full(3, value), times=2).tolist() == [2 * value] * 3
    assert double.n_compiled == 1
    assert double(jnp.ones(3), times=5).tolist() == [5, 5, 5]
    assert double(jnp.ones(4), times=2).tolist() == [2, 2, 2, 2]
    assert double.n_compiled == 3


def test_the_programs_used_last_are_kept(double):
    first = weakref.ref(double.compile(jnp.ones(1), times=2))
    second = weakref.ref(double.compile(jnp.ones(2), times=2))
    double(jnp.ones(1), times=2)  # used again: the other is now the older one
    double(jnp.ones(3), times=2)
    gc.collect()
    assert first() is not None and second() is None
    double(jnp.ones(1), times=2)
    assert double.n_compiled == 3
    assert double(jnp.ones(2), times=2).tolist() == [2, 2]  # compiled anew
    assert double.n_compiled == 4
