"""The deep autoencoder and softmax regression on full batches: sizes, losses by hand, the condition number."""

import functools
import itertools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax")

from flax import nnx

from fosi.experiments.tasks import TASKS, deep_ae, inputs, softmax_full
from fosi.experiments.tasks.jax_engine import JaxEngine

TINY = inputs.lr(None, False, True)


@functools.cache
def conditioned():
    return softmax_full.conditioned(TINY.train[0])


def pixels(images):
    return images.reshape(len(images), -1) / 255


def test_autoencoder_has_the_classic_layers():
    model = nnx.eval_shape(lambda: deep_ae.DeepAutoencoder(deep_ae.FULL.encoder, nnx.Rngs(0)))
    widths = [784, 1000, 500, 250, 30, 250, 500, 1000, 784]
    shapes = [layer.kernel.shape for layer in model.layers]
    assert shapes == list(itertools.pairwise(widths))
    assert sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param))) == 2_837_314


def reconstruct(layers, wanted):
    x = wanted
    for index, (kernel, bias) in enumerate(layers):
        x = x @ kernel + bias
        if index not in (2, 5):  # the code and the logits; the layers are 784-16-8-4-8-16-784
            x = np.tanh(x)
    return x


def by_hand(layers, wanted):
    """The loss, literally: log-probabilities of pixels, and every square."""
    p = 1 / (1 + np.exp(-reconstruct(layers, wanted)))
    entropy = -np.sum(wanted * np.log(p) + (1 - wanted) * np.log(1 - p), axis=1)
    return np.mean(entropy) + 1e-5 / 2 * sum(np.sum(a**2) for layer in layers for a in layer)


def test_autoencoders_loss_gradient_and_metric_are_the_formulas():
    problem = TASKS["deep-ae"].build(None, False, 0, True)
    leaves, tree = jax.tree.flatten(problem.params)
    rng = np.random.default_rng(0)  # biases of zero would hide what is wrong with them
    params = jax.tree.unflatten(tree, [leaf + rng.normal(0, 0.3, leaf.shape).astype(np.float32) for leaf in leaves])
    along = jax.tree.unflatten(tree, [rng.normal(size=leaf.shape).astype(np.float32) for leaf in leaves])

    def arrays(tree):
        return [
            [np.asarray(layer[name][...], np.float64) for name in ("kernel", "bias")]
            for layer in tree["layers"].values()
        ]

    batch = problem.batch(problem.data, problem.order(jax.random.key(0))[0])
    assert len(batch) == 320  # all of them
    here, there = arrays(params), arrays(along)

    @jax.jit
    def derivative(params, along):
        value, slope = jax.jvp(lambda p: problem.loss(p, problem.state, batch)[0], (params,), (along,))
        return value, slope, problem.outputs(params, problem.state, batch).loss()

    found, slope, outputs = derivative(params, along)
    assert float(found) == pytest.approx(by_hand(here, pixels(TINY.train[0])), rel=1e-5)

    def moved(h):
        return [[a + h * b for a, b in zip(*pair, strict=True)] for pair in zip(here, there, strict=True)]

    wanted = (by_hand(moved(1e-4), pixels(TINY.train[0])) - by_hand(moved(-1e-4), pixels(TINY.train[0]))) / 2e-4
    assert float(slope) == pytest.approx(wanted, rel=1e-4)
    test = pixels(TINY.validation[0])
    error = np.mean(np.sum((1 / (1 + np.exp(-reconstruct(here, test))) - test) ** 2, axis=1))
    assert float(problem.validate(params, problem.state)) == pytest.approx(error, rel=1e-5)
    # The outputs are all of the loss but its l2 term, which is not small with these weights.
    squares = sum(np.sum(a**2) for layer in here for a in layer)
    assert float(found - outputs) == pytest.approx(1e-5 / 2 * squares, abs=2e-4) and squares > 1000


def test_autoencoder_in_batches():
    problem = TASKS["deep-ae"].build(None, False, 0, True, mode="batch")
    order = problem.order(jax.random.key(0))
    assert order.shape == (5, 64) and len(problem.batch(problem.data, order[0])) == 64
    assert problem.facts["batch_size"] == 64
    with pytest.raises(ValueError, match="mode is 'half'; give one of full, batch"):
        TASKS["deep-ae"].build(None, False, 0, True, mode="half")


def test_a_quick_autoencoder_sees_all_of_less(monkeypatch):
    assert deep_ae.size_of(False, "quick") == deep_ae.QUICK and deep_ae.QUICK.examples == 2000
    assert {deep_ae.size_of(False, mode) for mode in (None, "full", "batch")} == {deep_ae.FULL}
    monkeypatch.setattr(deep_ae, "TINY", deep_ae.TINY._replace(examples=100))
    problem = TASKS["deep-ae"].build(None, False, 0, True, mode="quick")
    assert len(problem.batch(problem.data, problem.order(jax.random.key(0))[0])) == 100
    assert problem.facts["batch_size"] == 100 and len(problem.part(problem.data)) == 25


def test_gauss_newtons_matrix_has_the_l2_term():
    problem = TASKS["lr"].build(None, False, 0, True)
    task = replace(TASKS["lr"], l2=1000.0)
    engine = JaxEngine(task, problem, "fosi-adam", 0, operator="gauss_newton", k=3, num_matvecs=8)
    found = engine.estimate(engine.refresh(engine.start(), engine.first, 0)).eigenvalues
    assert len(found) == 3 and all(1000 < value < 1050 for value in found)  # of the data's own, some twenty


def test_features_have_the_condition_number():
    images = TINY.train[0]
    see = conditioned()
    features = see(images).astype(np.float64)
    covariance = np.cov(features.T, bias=True)
    values = np.linalg.eigvalsh(covariance)
    assert values[-1] / values[0] == pytest.approx(1e6, rel=1e-3)
    steps = np.diff(np.log(values))
    np.testing.assert_allclose(steps, np.log(1e6) / (len(values) - 1), rtol=0.05)
    assert values[-1] == pytest.approx(np.linalg.eigvalsh(np.cov(pixels(images).T, bias=True))[-1], rel=1e-5)
    np.testing.assert_allclose(features.mean(0), 0, atol=1e-6)
    # Not diagonal, so that Adam cannot undo it; and the same every time.
    scaled = covariance / np.sqrt(np.outer(np.diag(covariance), np.diag(covariance)))
    assert np.mean(np.abs(scaled - np.eye(len(scaled)))) > 0.02
    assert np.array_equal(softmax_full.conditioned(images).matrix, see.matrix)
    # Other images go through the same map.
    np.testing.assert_allclose(see(images[:3] // 2), (pixels(images[:3] // 2) - see.mean) @ see.matrix, atol=1e-5)


@pytest.mark.parametrize("mode", softmax_full.MODES)
def test_regression_is_on_all_examples(mode):
    problem = TASKS["softmax-full"].build(None, False, 0, True, mode=mode)
    see = pixels if mode == "full" else conditioned()
    kernel = np.asarray(problem.params["kernel"][...], np.float64)

    def loss(part):
        scores = see(part[0]) @ kernel  # biases are zero at the start
        chosen = scores[np.arange(len(scores)), part[1]]
        return np.mean(np.log(np.exp(scores).sum(1)) - chosen)

    batch = problem.batch(problem.data, jnp.zeros(1, jnp.int32))
    found = jax.jit(lambda p: problem.loss(p, problem.state, batch)[0])(problem.params)
    assert float(found) == pytest.approx(loss(TINY.train), rel=1e-5)
    assert float(problem.validate(problem.params, problem.state)) == pytest.approx(loss(TINY.validation), rel=1e-5)
    assert problem.facts == {"batch_size": 320, "features": 784 if mode == "full" else 319}
    with pytest.raises(ValueError, match="mode is 'quick'; give one of full, conditioned"):
        TASKS["softmax-full"].build(None, False, 0, True, mode="quick")


def test_a_part_is_a_quarter_of_all_images():
    full = TASKS["deep-ae"].build(None, False, 0, True)
    np.testing.assert_array_equal(full.part(full.data), TINY.train[0][:80])
    assert TASKS["deep-ae"].build(None, False, 0, True, mode="batch").part is None
    softmax = TASKS["softmax-full"].build(None, False, 0, True)
    for found, wanted in zip(softmax.part(softmax.data), TINY.train, strict=True):
        np.testing.assert_array_equal(found, wanted[:80])
