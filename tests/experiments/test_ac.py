"""What is special about audio classification: BatchNorm, its curvature, and labels of two kinds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

pytest.importorskip("flax")

from flax import nnx

from fosi.experiments.data import audioset, esc50
from fosi.experiments.data.files import DataError
from fosi.experiments.tasks import TASKS, ac, training
from fosi.experiments.tasks.jax_engine import JaxEngine
from fosi.experiments.tasks.task import split_model


def tiny(mode=None):
    return ac.build(None, False, 0, True, mode)


def some(problem, count=16):
    return problem.batch(problem.data, jnp.arange(count))


def shapes(labels):
    model = nnx.eval_shape(lambda: ac.MobileNet(ac.FIRST, ac.BLOCKS, labels, nnx.Rngs(0)))
    return split_model(model)


def test_it_is_mobilenet_v1():
    # The published network has 3,206,976 trained numbers before its last layer; the first convolution of three
    # channels has 864 of them, that of one has 288. BatchNorm keeps two statistics a channel, 10,944 channels.
    for labels in (50, 527):
        _, params, state = shapes(labels)
        sizes = [sum(leaf.size for leaf in jax.tree.leaves(tree)) for tree in (params, state)]
        assert sizes == [3_206_976 - 864 + 288 + 1025 * labels, 2 * 10_944]


def test_second_of_sound_is_six_places_at_the_end():
    graph, params, state = shapes(50)

    def before_the_mean(params, state, pieces):
        x = pieces[..., None]
        for layer in nnx.merge(graph, params, state, copy=True).layers:
            x = layer(x, True)
        return x

    pieces = jax.ShapeDtypeStruct((2, 96, 64), jnp.float32)
    assert jax.eval_shape(before_the_mean, params, state, pieces).shape == (2, 3, 2, 1024)


def to64(tree):
    return jax.tree.map(lambda x: x.astype(jnp.float64) if x.dtype == jnp.float32 else x, tree)


def test_batch_statistics_are_those_of_the_batch_and_the_running_ones_follow():
    problem = tiny()
    batch = some(problem)
    _, after = jax.jit(problem.loss)(problem.params, problem.state, batch)
    assert jax.tree.structure(after) == jax.tree.structure(problem.state)
    # The first layer by hand: convolution, then its mean and variance over the batch and all places.
    mean, deviation = (float(f(problem.data[0])) for f in (jnp.mean, jnp.std))
    x = np.asarray((batch[0] - mean) / deviation)[..., None]
    kernel = problem.params["layers"][0]["conv"]["kernel"].get_value()
    out = np.asarray(
        jax.lax.conv_general_dilated(x, kernel, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    )
    norm = after["layers"][0]["norm"]
    np.testing.assert_allclose(norm["mean"].get_value(), 0.1 * out.mean((0, 1, 2)), rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(norm["var"].get_value(), 0.9 + 0.1 * out.var((0, 1, 2)), rtol=1e-4)


def trained(problem):
    engine = JaxEngine(TASKS["ac"], problem, "adam", 0, rate_factor=10)
    progress = training.start(engine)
    points = list(training.train(engine, progress, 5))
    return progress.run, points


def test_statistics_given_do_not_change_the_loss_but_the_metric():
    problem = tiny()
    batch = some(problem)
    moved = jax.tree.map(lambda x: 2 * x + 1, problem.state)
    loss = jax.jit(problem.loss)
    first, other = (loss(problem.params, state, batch)[0] for state in (problem.state, moved))
    assert float(first) == float(other)
    run, points = trained(problem)
    point = points[-1]
    # Learnt, and measured with the statistics that training left; with those of the start it would be another number.
    assert point.metric > 0.9
    assert float(problem.validate(run.params, run.state)) == pytest.approx(point.metric)
    assert float(problem.validate(run.params, problem.state)) < point.metric


@pytest.mark.parametrize("mode", ac.MODES)
def test_hessian_products_are_right_and_symmetric(mode):
    with jax.enable_x64(True):
        problem = tiny(mode)
        params, state, batch = to64(problem.params), to64(problem.state), to64(some(problem))
        # A few steps away from the start: there, scales are 1 and biases 0.
        theta, back = ravel_pytree(params)
        theta = theta + 0.1 * jax.random.normal(jax.random.key(0), theta.shape)
        loss = jax.jit(lambda theta: problem.loss(back(theta), state, batch)[0])
        gradient = jax.jit(jax.grad(loss))
        product = jax.jit(lambda v: jax.jvp(gradient, (theta,), (v,))[1])
        # Short steps, so that none of the ReLUs between the two points turns on or off.
        u, v = (x / jnp.linalg.norm(x) for x in jax.random.normal(jax.random.key(1), (2, theta.size)))
        hu, hv = product(u), product(v)
        assert hv.dtype == jnp.float64
        step = 1e-6
        for exact, along in ((hu, u), (hv, v)):
            slope = (loss(theta + step * along) - loss(theta - step * along)) / (2 * step)
            assert float(gradient(theta) @ along) == pytest.approx(float(slope), rel=1e-6)
            differences = (gradient(theta + step * along) - gradient(theta - step * along)) / (2 * step)
            assert float(jnp.linalg.norm(exact - differences)) < 1e-6 * float(jnp.linalg.norm(exact))
        assert float(u @ hv) == pytest.approx(float(v @ hu), rel=1e-10)


def test_several_labels():
    problem = tiny("audioset")
    pieces, labels = some(problem)
    assert labels.dtype == bool and set(labels.sum(1).tolist()) == {2}
    # With all logits 0 each label costs log 2: the mean is over pieces and labels.
    nothing = jax.tree.map(jnp.zeros_like, problem.params)
    loss = jax.jit(problem.loss)
    assert float(loss(nothing, problem.state, (pieces, labels))[0]) == pytest.approx(np.log(2), rel=1e-6)
    # Logits that are the bias: the first label wins for every piece.
    nothing["out"]["bias"] = jax.tree.map(lambda x: jnp.array([1.0, 0, 0, 0]), nothing["out"]["bias"])
    validation = ac._made("audioset")[1]
    assert float(problem.validate(nothing, problem.state)) == pytest.approx(validation.labels[:, 0].mean())
    _, points = trained(problem)
    assert points[-1].train_loss < points[0].train_loss and points[-1].metric > 0.9


def test_modes():
    assert TASKS["ac"].modes == ("esc50", "audioset") and TASKS["lr"].modes == ()
    with pytest.raises(ValueError, match="mode is 'esc-50'; give one of esc50, audioset"):
        tiny("esc-50")


def test_real_data_is_asked_for_by_mode(tmp_path, monkeypatch):
    with pytest.raises(DataError, match=r"ESC-50-master\.zip is missing"):
        ac.build(tmp_path, False, 0, False)
    with pytest.raises(DataError, match=r"audioset/class_labels_indices\.csv is missing"):
        ac.build(tmp_path, False, 0, False, mode="audioset")
    # Twelve clips of noise through the whole way, on a small network.
    monkeypatch.setattr(ac, "FIRST", 8)
    monkeypatch.setattr(ac, "BLOCKS", ((8, 2), (8, 2)))
    monkeypatch.setattr(ac, "BATCH_SIZE", 10)
    rng = np.random.default_rng(0)
    pieces = rng.normal(2, 3, (60, 96, 64)).astype(np.float32)
    clips = np.repeat(np.arange(12, dtype=np.int32), 5)
    found = esc50.Esc50(pieces, (clips % 3).astype(np.uint8), (clips % 5 + 1).astype(np.uint8), clips)
    monkeypatch.setattr(esc50, "load", lambda data_dir, download: found)
    problem = ac.build(tmp_path, False, 0, False)
    assert problem.data[0].shape == (50, 96, 64)  # fold 5: clips 4 and 9
    assert problem.order(jax.random.key(0)).shape == (5, 10)
    part = audioset.Part(pieces, rng.random((60, 7)) < 0.3, clips, 0, 0)
    monkeypatch.setattr(audioset, "load", lambda data_dir: audioset.AudioSet(part, part))
    problem = ac.build(tmp_path, False, 0, False, mode="audioset")
    assert problem.data[1].shape == (60, 7) and problem.params["out"]["bias"].get_value().shape == (7,)


def test_moments_are_of_all_values():
    pieces = np.random.default_rng(0).normal(-2, 3, (25, 4, 4)).astype(np.float32)
    assert ac.moments(pieces, chunk=7) == pytest.approx((pieces.mean(), pieces.std()), rel=1e-5)
