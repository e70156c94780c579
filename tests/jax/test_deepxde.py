"""FOSI as the optimizer of a DeepXDE model on its JAX backend, with no change to DeepXDE."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fosi.jax import fosi_sgd, without_params
from fosi.jax.deepxde import RefreshCallback


@pytest.mark.skipif(
    not (importlib.util.find_spec("deepxde") and importlib.util.find_spec("flax")),
    reason="DeepXDE, or the flax that its JAX backend needs, is not installed: pip install deepxde flax",
)
def test_it_trains_as_a_loop_written_by_hand():
    script = Path(__file__).with_name("deepxde_training.py")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "agrees 9"


# What needs no DeepXDE.


class Model:
    """What a deepxde.Model has that the callback reads, and the loop around it."""

    class State:
        X_train, y_train = np.array([3.0, 2.0, 1.0], np.float32), None

    def __init__(self, opt, weight=1.0):
        self.params, self.opt, self.train_state = jnp.ones(3), opt, self.State()
        self.opt_state = opt.init(self.params)
        self.compile(weight)

    def compile(self, weight):
        self.outputs_losses_train = jax.jit(lambda w, x, y: (None, weight * x * w**2 / 2))

    def train(self, iterations, callback):
        callback.set_model(self)
        callback.on_train_begin()
        for _ in range(iterations):
            callback.on_epoch_begin()
            callback.on_batch_begin()
            _, self.opt_state = self.opt.update(jnp.zeros(3), self.opt_state)
            callback.on_batch_end()
            callback.on_epoch_end()
        callback.on_train_end()


def optimizer(**settings):
    return fosi_sgd(0.1, k=1, warmup=1, refresh_every=2, **{"refresh": "external"} | settings)


def test_it_refreshes_when_due_and_the_loss_is_that_of_the_last_compile():
    model, callback = Model(without_params(optimizer())), RefreshCallback()
    seen = []
    for iterations in (1, 1, 2):
        model.train(iterations, callback)
        seen.append(int(model.opt_state.inner.refreshes))
    assert seen == [0, 1, 2]
    assert float(model.opt_state.inner.eigenvalues[0]) == pytest.approx(3, rel=1e-5)
    model.compile(weight=10.0)
    model.train(2, callback)
    assert float(model.opt_state.inner.eigenvalues[0]) == pytest.approx(30, rel=1e-5)


def test_a_fosi_inside_a_chain_is_named():
    inside = optimizer()
    model = Model(without_params(optax.chain(optax.clip_by_global_norm(1.0), inside)))
    with pytest.raises(TypeError, match=r"name the FOSI optimizer with RefreshCallback\(fosi=\.\.\.\)"):
        model.train(1, RefreshCallback())
    model.train(2, RefreshCallback(fosi=inside))
    assert int(model.opt_state.inner[1].refreshes) == 1


def test_what_cannot_work_is_said_before_the_first_step():
    with pytest.raises(ValueError, match=r"needs an optimizer with refresh='external', got refresh='inline'"):
        Model(without_params(optimizer(refresh="inline"))).train(1, RefreshCallback())
    with pytest.raises(TypeError, match=r"DDE_BACKEND=jax\), got object; .*fosi\.torch\.deepxde"):
        RefreshCallback().set_model(object())
    with pytest.raises(TypeError, match=r"fosi must be an optimizer of fosi\.jax or None, got float"):
        RefreshCallback(fosi=0.1)
