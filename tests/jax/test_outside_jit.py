"""What holds outside jit: nothing compiles twice, functions need no hash, and an optimizer can be copied."""

import copy
import logging

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fosi.jax import ModelLoss, estimate_spectrum, fosi, fosi_adam, fosi_sgd

SCALES = jnp.arange(1.0, 7.0)
START = jnp.ones(6)


def loss_fn(w, scales):
    return 0.5 * jnp.sum(scales * w**2)


class Held(eqx.Module):
    """A loss that holds an array, and so has no hash."""

    scales: jax.Array

    def __call__(self, w):
        return loss_fn(w, self.scales)


class Task:
    """A loss that is a method, and so another object at every look-up."""

    def loss(self, w, scales):
        return loss_fn(w, scales)


def compilations(caplog, run):
    caplog.clear()
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        run()
    return [r.getMessage() for r in caplog.records if "Finished XLA compilation" in r.getMessage()]


def test_an_eager_inline_update_compiles_its_refresh_once(caplog):
    opt = fosi_adam(0.1, loss_fn, k=2, warmup=0, refresh_every=2)
    state = opt.init(START)

    def two_steps():
        nonlocal state
        for _ in range(2):
            _, state = opt.update(jax.grad(loss_fn)(START, SCALES), state, START, batch=SCALES)

    assert compilations(caplog, two_steps)
    two_steps()
    assert compilations(caplog, two_steps) == []
    assert int(state.refreshes) == 3


def test_functions_without_a_hash_and_bound_methods(caplog):
    held, task = Held(SCALES), Task()
    with pytest.raises(TypeError):
        hash(held)
    spectrum = estimate_spectrum(None, START, value_fn=held, k=2)
    np.testing.assert_allclose(spectrum.eigenvalues, [6, 5], rtol=1e-5)
    opt = fosi_adam(0.1, task.loss, k=2)
    state = opt.refresh(opt.init(START), START, value_fn=held)
    np.testing.assert_allclose(state.eigenvalues, [6, 5], rtol=1e-5)

    def again():
        np.testing.assert_allclose(estimate_spectrum(task.loss, START, SCALES, k=2).eigenvalues, [6, 5], rtol=1e-5)

    assert compilations(caplog, again)
    assert compilations(caplog, again) == []


def test_copies():
    opt = fosi_adam(0.1, loss_fn, k=2, refresh_every=5)
    for made in (copy.copy(opt), copy.deepcopy(opt)):
        assert made.schedule(START) == opt.schedule(START)
        assert isinstance(made, type(opt))


def test_the_spectrum_in_use_is_found_inside_a_chain():
    ours = fosi_adam(0.1, loss_fn, k=2, refresh="external")
    opt = optax.chain(optax.clip(1.0), ours)
    state = ours.refresh(opt.init(START), START, batch=SCALES)
    np.testing.assert_allclose(ours.spectrum(state, START).eigenvalues, [6, 5], rtol=1e-5)


def test_decay_chained_after_fosi_as_advised_shrinks_the_weights(caplog):
    with caplog.at_level(logging.WARNING, logger="fosi"):
        fosi(optax.adamw(0.1), loss_fn, momentum=None)
    assert "add_decayed_weights(-learning_rate * strength)" in caplog.text
    opt = optax.chain(fosi(optax.sgd(0.1), loss_fn, k=1, momentum=None), optax.add_decayed_weights(-0.1 * 0.01))
    updates, _ = opt.update(jnp.zeros(6), opt.init(START), START, batch=SCALES)
    np.testing.assert_allclose(updates, -1e-3 * np.ones(6), rtol=1e-6)


def test_numpy_parameters_are_float32_while_x64_is_off():
    assert estimate_spectrum(loss_fn, np.ones(6), SCALES, k=2).eigenvalues.dtype == jnp.float32


@pytest.mark.parametrize(("momentum", "error"), [(1.0, ValueError), (-0.1, ValueError), ("0.9", TypeError)])
def test_sgds_momentum_is_checked(momentum, error):
    with pytest.raises(error, match="momentum"):
        fosi_sgd(0.1, loss_fn, momentum=momentum)


def test_a_model_loss_has_no_aux():
    with pytest.raises(ValueError, match="has_aux"):
        fosi_sgd(0.1, ModelLoss(lambda w, b: w, lambda o, b: o.sum()), has_aux=True, curvature="gauss_newton")
