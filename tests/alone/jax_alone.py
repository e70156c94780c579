"""FOSI for JAX where PyTorch is not installed: `make test-backends` runs this in an environment of its own."""

from regression import LEARNING_RATE, MOMENTUM, OPTIONS, STEPS, assert_missing, check_and_report, data

assert_missing("torch", "lightning", "pytorch_lightning", "accelerate")

import jax
import jax.numpy as jnp
import optax

import fosi
from fosi.jax import fosi_sgd

BATCH = tuple(map(jnp.asarray, data()))


def loss_fn(weights, batch):
    x, y = batch
    return jnp.mean((x @ weights - y) ** 2)


def train(opt, **given):
    """Returns the last loss and the optimizer's last state; ``given`` is handed to every update."""
    weights = jnp.zeros(BATCH[0].shape[1])
    state = opt.init(weights)

    @jax.jit
    def step(weights, state):
        updates, state = opt.update(jax.grad(loss_fn)(weights, BATCH), state, weights, **given)
        return optax.apply_updates(weights, updates), state

    for _ in range(STEPS):
        weights, state = step(weights, state)
    return float(loss_fn(weights, BATCH)), state


base, _ = train(optax.sgd(LEARNING_RATE, momentum=MOMENTUM))
with_fosi, state = train(fosi_sgd(LEARNING_RATE, loss_fn, momentum=MOMENTUM, **OPTIONS), batch=BATCH)
assert fosi.schedule.num_matvecs(10, 0, 1000) == 40
check_and_report("jax", jax.__version__, base, with_fosi, int(state.refreshes))
