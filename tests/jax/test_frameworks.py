"""flax nnx, flax linen and equinox each train a small model with FOSI, the spectrum refreshed on the way."""

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training import train_state

import fosi.jax as fj
from fosi.jax.flax import TrainState, refresh_nnx, value_fn_nnx

STEPS = 30
OPTIONS = {"k": 3, "alpha": 0.1, "warmup": 5, "refresh_every": 10}
REFRESHES = 3  # before the updates of steps 5, 15 and 25


@pytest.fixture(scope="module")
def data():
    """A regression whose inputs differ in scale: what a first-order method is slow on."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(64, 3)) * np.array([4.0, 1.0, 0.25])
    y = np.sin(x[:, :1]) + x[:, 1:2] - 2 * x[:, 2:]
    return jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.float32)


def error(out, y):
    return jnp.mean((out - y) ** 2)


def assert_trained(losses, state):
    assert int(state.count) == STEPS
    assert int(state.refreshes) == REFRESHES
    assert bool(state.accepted.any())
    assert float(state.eigenvalues[0]) > 0
    assert losses[-1] < 0.2 * losses[0]


class Nnx(nnx.Module):
    """Parameters, and a count of the training steps, which an estimate must not move."""

    def __init__(self, rngs):
        self.first, self.second = nnx.Linear(3, 8, rngs=rngs), nnx.Linear(8, 1, rngs=rngs)
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x):
        self.calls[...] += 1
        return self.second(jnp.tanh(self.first(x)))


def nnx_opt_state(optimizer):
    return nnx.as_pure(optimizer.opt_state)


def test_nnx_trains_with_the_inline_refresh(data):
    model = Nnx(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, fj.fosi_adam(0.05, **OPTIONS), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, batch):
        loss, grads = nnx.value_and_grad(lambda m: error(m(batch[0]), batch[1]))(model)
        optimizer.update(model, grads, value_fn=value_fn_nnx(lambda m: error(m(batch[0]), batch[1]), model))
        return loss

    losses = [float(step(model, optimizer, data)) for _ in range(STEPS)]
    assert_trained(losses, nnx_opt_state(optimizer))
    assert int(model.calls[...]) == STEPS


def test_nnx_trains_with_the_external_refresh(data):
    model = Nnx(nnx.Rngs(0))
    opt = fj.fosi_sgd(0.02, momentum=0.9, refresh="external", **OPTIONS)
    optimizer = nnx.Optimizer(model, optax.chain(optax.clip_by_global_norm(10.0), opt), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, batch):
        loss, grads = nnx.value_and_grad(lambda m: error(m(batch[0]), batch[1]))(model)
        optimizer.update(model, grads)
        return loss

    @nnx.jit
    def refresh(model, optimizer, batch):
        refresh_nnx(optimizer, model, value_fn=value_fn_nnx(lambda m: error(m(batch[0]), batch[1]), model), fosi=opt)

    schedule, losses = opt.schedule(nnx.state(model, nnx.Param)), []
    for i in range(STEPS):
        if schedule.due(i):
            refresh(model, optimizer, data)
        losses.append(float(step(model, optimizer, data)))
    assert_trained(losses, nnx_opt_state(optimizer)[1])


def test_nnx_refreshes_outside_jit_from_a_batch(data):
    model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    graph, _ = nnx.split(model)
    x, _ = data
    opt = fj.fosi_sgd(
        0.1,
        lambda params, batch: error(nnx.merge(graph, params)(batch[0]), batch[1]),
        k=1,
        refresh="external",
    )
    optimizer = nnx.Optimizer(model, opt, wrt=nnx.Param)
    refresh_nnx(optimizer, model, batch=data)
    state = nnx_opt_state(optimizer)
    features = np.concatenate([np.ones((64, 1)), x], axis=1)
    np.testing.assert_allclose(state.eigenvalues[0], np.linalg.eigvalsh(2 * features.T @ features / 64)[-1], rtol=1e-4)
    assert int(state.refreshes) == 1 and bool(state.accepted.all())


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(1)(jnp.tanh(nn.Dense(8)(x)))


def linen(data, opt_of_loss, cls=TrainState):
    model = Linen()
    params = model.init(jax.random.key(0), data[0])["params"]

    def loss_fn(params, batch):
        return error(model.apply({"params": params}, batch[0]), batch[1])

    return loss_fn, cls.create(apply_fn=model.apply, params=params, tx=opt_of_loss(loss_fn))


def test_linen_trains_with_the_inline_refresh(data):
    loss_fn, state = linen(data, lambda loss_fn: fj.fosi_adamw(0.05, loss_fn, **OPTIONS))

    @jax.jit
    def step(state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(state.params, batch)
        return state.apply_gradients(grads=grads, batch=batch), loss

    tx, losses = state.tx, []
    for _ in range(STEPS):
        state, loss = step(state, data)
        losses.append(float(loss))
    assert int(state.step) == STEPS and state.tx is tx
    assert_trained(losses, state.opt_state)


def test_linen_trains_with_the_external_refresh(data):
    loss_fn, state = linen(
        data, lambda loss_fn: fj.fosi_sgd(0.02, loss_fn, momentum=0.9, refresh="external", **OPTIONS)
    )

    @jax.jit
    def step(state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(state.params, batch)
        return state.apply_gradients(grads=grads), loss

    schedule, losses = state.tx.schedule(state.params), []
    refresh = jax.jit(lambda state, batch: state.refresh(batch=batch))
    for i in range(STEPS):
        if schedule.due(i):
            state = refresh(state, data)
        state, loss = step(state, data)
        losses.append(float(loss))
    assert_trained(losses, state.opt_state)


def test_our_train_state_is_flaxs_where_nothing_more_is_asked(data):
    loss_fn, ours = linen(data, lambda _: optax.adam(0.1))
    _, flaxs = linen(data, lambda _: optax.adam(0.1), train_state.TrainState)
    grads = jax.grad(loss_fn)(ours.params, data)
    ours, flaxs = (
        ours.apply_gradients(grads=grads, apply_fn=abs),
        flaxs.apply_gradients(grads=grads, apply_fn=abs),
    )
    assert ours.apply_fn is flaxs.apply_fn is abs
    assert ours.step == flaxs.step == 1
    jax.tree.map(np.testing.assert_array_equal, (ours.params, ours.opt_state), (flaxs.params, flaxs.opt_state))


def test_a_refresh_of_another_optimizer_says_what_is_wrong(data):
    _, state = linen(data, lambda _: optax.adam(0.1))
    with pytest.raises(TypeError, match="fosi="):
        state.refresh(batch=data)


def test_equinox_trains(data):
    model = eqx.nn.MLP(3, 1, 8, 1, activation=jnp.tanh, key=jax.random.key(0))

    def loss_fn(model, batch):
        return error(jax.vmap(model)(batch[0]), batch[1])

    opt = fj.fosi_adam(0.05, **OPTIONS)
    state = opt.init(eqx.filter(model, eqx.is_inexact_array))

    @eqx.filter_jit
    def step(model, state, batch):
        loss, grads = eqx.filter_value_and_grad(loss_fn)(model, batch)
        params, static = eqx.partition(model, eqx.is_inexact_array)
        updates, state = opt.update(
            grads, state, params, value_fn=lambda params: loss_fn(eqx.combine(params, static), batch)
        )
        return eqx.apply_updates(model, updates), state, loss

    losses = []
    for _ in range(STEPS):
        model, state, loss = step(model, state, data)
        losses.append(float(loss))
    assert_trained(losses, state)


def test_equinox_trains_with_the_external_refresh(data):
    model = eqx.nn.MLP(3, 1, 8, 1, activation=jnp.tanh, key=jax.random.key(0))
    params, static = eqx.partition(model, eqx.is_inexact_array)

    def loss_fn(params, batch):
        return error(jax.vmap(eqx.combine(params, static))(batch[0]), batch[1])

    opt = fj.fosi_sgd(0.02, loss_fn, momentum=0.9, refresh="external", **OPTIONS)
    state, schedule = opt.init(params), opt.schedule(params)

    @eqx.filter_jit
    def step(params, state, batch):
        loss, grads = eqx.filter_value_and_grad(loss_fn)(params, batch)
        updates, state = opt.update(grads, state, params)
        return eqx.apply_updates(params, updates), state, loss

    refresh, losses = eqx.filter_jit(opt.refresh), []
    for i in range(STEPS):
        if schedule.due(i):
            state = refresh(state, params, batch=data)
        params, state, loss = step(params, state, data)
        losses.append(float(loss))
    assert_trained(losses, state)
