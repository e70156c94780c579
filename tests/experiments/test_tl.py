"""Transfer learning at tiny size: the same training whether the frozen network is in the loop or was used before."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax")

from fosi.experiments.data import cifar10, imagenet
from fosi.experiments.tasks import TASKS, backbones, tl, training
from fosi.experiments.tasks.jax_engine import JaxEngine
from fosi.jax import estimate_spectrum

TASK = TASKS["tl"]


def built(mode, seed=0):
    return TASK.build(None, False, seed, True, mode)


def batch(problem):
    return problem.batch(problem.data, problem.order(jax.random.key(5))[1])


def test_both_modes_have_one_loss_gradient_and_hessian():
    found = []
    for mode in ("loop", "cached"):
        problem = built(mode)
        params = jax.tree.map(lambda x: x + 0.1, problem.params)

        def value(p, b, problem=problem):
            return problem.loss(p, *b)[0]

        on = (problem.state, batch(problem))
        spectrum = estimate_spectrum(value, params, on, k=5, num_matvecs=20)
        loss, grads = jax.jit(jax.value_and_grad(value))(params, on)
        metric = problem.validate(params, problem.state)
        found.append((loss, *jax.tree.leaves(grads), metric, spectrum.eigenvalues))
    for loop, cached in zip(*found, strict=True):
        np.testing.assert_allclose(loop, cached, rtol=1e-4, atol=1e-6)
    eigenvalues = found[0][-1]
    assert eigenvalues[0] > eigenvalues[-1] > 0.1


def test_both_modes_train_alike():
    curves = []
    for mode in ("loop", "cached"):
        engine = JaxEngine(TASK, built(mode), "fosi-heavy-ball", 0, k=3, num_matvecs=12, warmup=3, refresh_every=5)
        curves.append(list(training.train(engine, training.start(engine), 3)))
    for loop, cached in zip(*curves, strict=True):
        assert loop.train_loss == pytest.approx(cached.train_loss, rel=1e-4)
        assert loop.metric == pytest.approx(cached.metric, abs=1 / 32 + 1e-6)
        assert loop.refreshes == cached.refreshes and loop.eigenvalues == pytest.approx(cached.eigenvalues, rel=1e-3)
    assert curves[0][-1].refreshes == 2 and curves[0][-1].eigenvalues


def test_network_is_an_argument_in_the_loop_and_stays_as_it_is():
    problem = built("loop")
    held = jax.make_jaxpr(problem.loss)(problem.params, problem.state, batch(problem)).consts
    weights = sum(leaf.size for leaf in jax.tree.leaves(problem.state))
    assert weights > 1000 and sum(np.size(const) for const in held) < 100
    loss = jax.jit(problem.loss)
    before, after = loss(problem.params, problem.state, batch(problem))
    assert jax.tree.all(jax.tree.map(lambda a, b: bool(jnp.all(a == b)), after, problem.state))
    other, _ = loss(problem.params, jax.tree.map(lambda x: 2 * x, problem.state), batch(problem))
    assert other != before
    assert problem.data[0].dtype == jnp.uint8
    cached = built("cached")
    assert jax.tree.leaves(cached.state) == [] and cached.data[0].shape == (64, 24)


def test_features_are_those_of_the_images_one_by_one(monkeypatch):
    monkeypatch.setattr(tl, "FEATURES_BATCH", 5)  # the last batch is not full
    images = np.random.default_rng(0).integers(0, 256, (12, 8, 8, 3), dtype=np.uint8)
    stages = (backbones.Stage(2, 3, 2, 6, 1),)
    backbone = backbones.efficientnet_lite(backbones.untrained(stages, 4, 7, 0), stages)
    found = tl.features(backbone, 16, images)
    assert found.shape == (12, 7) and found.dtype == jnp.float32
    larger = np.stack([np.asarray(jax.image.resize(image, (16, 16, 3), "bilinear")) for image in images * 1.0])
    np.testing.assert_allclose(found[7:9], jax.jit(backbone.apply)(backbone.weights, larger[7:9]), rtol=1e-4)


def test_modes_and_what_was_built():
    assert TASK.modes == ("loop", "cached")
    assert built("loop").facts == built("cached").facts == {"backbone": "efficientnet_lite0"}
    assert built(None).data[0].dtype == jnp.uint8  # the paper's is the default
    with pytest.raises(ValueError, match="mode is 'disk'; give one of loop, cached"):
        built("disk")


def test_on_images_of_cifars_shape(monkeypatch):
    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 256, (140, 32, 32, 3), dtype=np.uint8), np.arange(140, dtype=np.uint8) % 10
    made = imagenet.Pretrained("efficientnet_lite0", backbones.untrained(backbones.LITE0, 4, 6, 0))
    monkeypatch.setattr(
        cifar10, "load", lambda *args: cifar10.Cifar10(images[:130], labels[:130], images[130:], labels[130:])
    )
    monkeypatch.setattr(imagenet, "load", lambda *args: made)
    problem = tl.build(None, False, 0, False)
    assert problem.order(jax.random.key(0)).shape == (1, 128) and problem.data[0].shape == (130, 32, 32, 3)
    batch = problem.batch(problem.data, jnp.arange(128))
    value, _ = jax.eval_shape(problem.loss, problem.params, problem.state, batch)
    assert value.shape == () and sum(x.size for x in jax.tree.leaves(problem.params)) == 70
