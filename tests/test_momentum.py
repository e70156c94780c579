"""Momentum as the explicit sums of past gradients it stands for, and as the frameworks compute it."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fosi.momentum import Ema, Trace

decays = st.floats(0, 0.99)
gradients = st.lists(st.floats(-10, 10), min_size=1, max_size=20)


def run(rule, values):
    """What the rule's steps use, gradient after gradient."""
    momentum, used = 0.0 * values[0], []
    for count, value in enumerate(values, 1):
        momentum = rule.update(momentum, value)
        used.append(rule.read(momentum, value, count))
    return used


@given(decay=decays, g=gradients)
def test_trace_is_the_sum_of_decayed_gradients(decay, g):
    wanted = [sum(decay ** (t - i) * g[i] for i in range(t + 1)) for t in range(len(g))]
    np.testing.assert_allclose(run(Trace(decay), g), wanted, rtol=1e-9, atol=1e-9)


@given(decay=decays, g=gradients)
def test_nesterov_adds_the_decayed_sum_once_more(decay, g):
    wanted = [g[t] + sum(decay ** (t - i + 1) * g[i] for i in range(t + 1)) for t in range(len(g))]
    np.testing.assert_allclose(run(Trace(decay, nesterov=True), g), wanted, rtol=1e-9, atol=1e-9)


@given(decay=decays, g=gradients)
def test_ema_is_the_weighted_mean_of_the_gradients(decay, g):
    wanted = []
    for t in range(len(g)):
        weights = np.array([decay ** (t - i) for i in range(t + 1)])
        wanted.append(weights @ g[: t + 1] / weights.sum())
    np.testing.assert_allclose(run(Ema(decay), g), wanted, rtol=1e-7, atol=1e-7)


@given(decay=decays, value=st.floats(-10, 10), length=st.integers(1, 30))
def test_ema_of_a_constant_is_that_constant(decay, value, length):
    np.testing.assert_allclose(run(Ema(decay), [value] * length), value, rtol=1e-9, atol=1e-300)


@pytest.mark.parametrize("rule", [Trace(0.9), Trace(0.9, nesterov=True), Ema(0.9)])
def test_a_split_gradient_stays_split(rule):
    # Section 3.4: the combination is linear, so that the parts' momenta add up and stay in their subspaces.
    rng = np.random.default_rng(0)
    V, _ = np.linalg.qr(rng.standard_normal((6, 2)))
    g = rng.standard_normal((8, 6))
    g1 = g @ V @ V.T
    whole, first, second = run(rule, g), run(rule, g1), run(rule, g - g1)
    np.testing.assert_allclose(np.add(first, second), whole, atol=1e-12)
    np.testing.assert_allclose(np.sum(np.multiply(first, second), axis=1), 0, atol=1e-12)


@pytest.mark.parametrize("decay", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("nesterov", [False, True])
def test_trace_is_optax_trace(decay, nesterov):
    g = list(jnp.asarray(np.random.default_rng(0).standard_normal((6, 4)), dtype=jnp.float32))
    transform = optax.trace(decay, nesterov)
    state = transform.init(g[0])
    for value, used in zip(g, run(Trace(decay, nesterov), g), strict=True):
        wanted, state = transform.update(value, state)
        assert used.dtype == jnp.float32
        np.testing.assert_allclose(used, wanted, rtol=1e-6)


@pytest.mark.parametrize("decay", [0.0, 0.5, 0.9])
def test_ema_is_the_first_moment_of_optax_adam(decay):
    g = list(jnp.asarray(np.random.default_rng(0).standard_normal((6, 4)), dtype=jnp.float32))
    # b2 = 0 makes Adam's second moment the square of the current gradient: m̂ / |g|.
    transform = optax.scale_by_adam(b1=decay, b2=0.0, eps=0.0)
    state = transform.init(g[0])
    for value, used in zip(g, run(Ema(np.float64(decay)), g), strict=True):
        wanted, state = transform.update(value, state)
        assert used.dtype == jnp.float32
        np.testing.assert_allclose(used / abs(value), wanted, rtol=1e-5)


@pytest.mark.parametrize("rule", [Trace, Ema])
def test_decay_may_be_traced(rule):
    def read(decay, value, count):
        one = rule(decay)
        return one.read(one.update(value, value), value, count)

    eager = read(0.5, jax.numpy.float32(3.0), 2)
    np.testing.assert_allclose(jax.jit(read)(0.5, jax.numpy.float32(3.0), 2), eager)


@pytest.mark.parametrize("rule", [Trace, Ema])
@pytest.mark.parametrize("decay", [1.0, 1.5, -0.1, math.nan, np.float32(1.0), np.int64(2)])
def test_decay_out_of_range_is_named(rule, decay):
    with pytest.raises(ValueError, match=f"decay={float(decay)}.*at least 0 and below 1"):
        rule(decay)


def test_rules_are_values():
    assert Trace(0.9) == Trace(np.float64(0.9), nesterov=False) != Trace(0.9, nesterov=True)
    assert len({Ema(0.9), Ema(np.float64(0.9)), Trace(0.9)}) == 2
    assert type(Ema(np.float32(0.5)).decay) is float
    with pytest.raises(AttributeError):
        Ema(0.9).decay = 0.5
