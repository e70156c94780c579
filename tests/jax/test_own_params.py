"""``without_params``: a caller who passes only gradients and state gets the steps of one who passes the parameters."""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fosi.jax import fosi_adamw, fosi_sgd, without_params

SETTINGS = {"k": 3, "alpha": 0.1, "warmup": 2, "refresh_every": 4}


def loss_fn(params, batch):
    x, y = batch
    return jnp.mean((jnp.tanh(x @ params["w"]) @ params["v"] - y) ** 2)


@pytest.fixture
def problem():
    keys = jax.random.split(jax.random.key(0), 4)
    params = {"w": jax.random.normal(keys[0], (3, 5)), "v": jax.random.normal(keys[1], (5,))}
    return params, (jax.random.normal(keys[2], (20, 3)), jax.random.normal(keys[3], (20,)))


def run(opt, params, batch, passes, steps=12):
    """The parameters after every step; ``passes`` is what ``update`` is given besides gradients and state."""

    @jax.jit
    def step(params, state):
        updates, state = opt.update(jax.grad(loss_fn)(params, batch), state, **passes(params))
        return optax.apply_updates(params, updates), state

    seen, state = [], opt.init(params)
    for _ in range(steps):
        params, state = step(params, state)
        seen.append(params)
    return seen, state


def same(ours, theirs):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-6, atol=2e-6), ours, theirs)


def test_steps_equal_those_with_parameters(problem):
    # AdamW: besides the curvature, the decay needs the parameters too.
    params, batch = problem
    plain = fosi_adamw(0.05, loss_fn, weight_decay=0.1, **SETTINGS)
    expected, expected_state = run(plain, params, batch, lambda params: {"params": params, "batch": batch})
    bound, state = run(without_params(plain, batch=batch), params, batch, lambda params: {})
    same(bound, expected)
    same(state.params, bound[-1])
    assert int(state.inner.refreshes) == int(expected_state.refreshes) == 3
    np.testing.assert_allclose(state.inner.eigenvalues, expected_state.eigenvalues, rtol=1e-4, atol=1e-5)


def test_refreshed_from_outside_as_in_a_chain(problem):
    params, batch = problem
    inside = fosi_sgd(0.05, loss_fn, refresh="external", **SETTINGS)
    opt = without_params(optax.chain(optax.clip_by_global_norm(0.1), inside))
    state = inside.refresh(opt.init(params), params, batch=batch)
    assert int(state.inner[1].refreshes) == 1
    same(state.params, params)


def towards_zero():
    """A transformation that goes ``rate`` of the way from the parameters to 0."""

    def update(updates, state, params, *, rate=1.0):
        return jax.tree.map(lambda p: -rate * p, params), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def test_what_update_is_given_wins():
    params = jnp.ones(3)
    opt = without_params(towards_zero(), rate=0.5)
    updates, state = opt.update(params, opt.init(params))
    np.testing.assert_array_equal(updates, np.full(3, -0.5))
    updates, state = opt.update(params, state, rate=0.2)
    np.testing.assert_allclose(updates, np.full(3, -0.1))
    # Parameters set to other values: passed once, they are taken over.
    updates, state = opt.update(params, state, jnp.full(3, 8.0))
    np.testing.assert_array_equal(updates, np.full(3, -4.0))
    updates, state = opt.update(params, state)
    np.testing.assert_array_equal(updates, np.full(3, -2.0))


def test_parameters_and_state_can_be_donated():
    opt = without_params(towards_zero(), rate=0.5)

    def step(params, state):
        updates, state = opt.update(params, state)
        return optax.apply_updates(params, updates), state

    params = jnp.ones(3)
    params, state = jax.jit(step, donate_argnums=(0, 1))(params, opt.init(params))
    np.testing.assert_array_equal(state.params, params)


def test_a_copy_is_the_same_and_other_things_are_named():
    opt = copy.deepcopy(without_params(towards_zero(), rate=0.5))
    updates, _ = opt.update(jnp.ones(3), opt.init(jnp.ones(3)))
    np.testing.assert_array_equal(updates, np.full(3, -0.5))
    with pytest.raises(TypeError, match=r"opt must be an optax transformation .*, got 0\.1"):
        without_params(0.1)
