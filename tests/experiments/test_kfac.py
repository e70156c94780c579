"""K-FAC on the training tasks: what it is told of the loss, what it makes of it, and that a run can go on later."""

import importlib.util
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

pytest.importorskip("flax")

from flax import nnx

from fosi.experiments.tasks import TASKS, kfac_compat, optimizers, training
from fosi.experiments.tasks.kfac_engine import KfacEngine, register
from fosi.experiments.tasks.task import Outputs, Problem, cross_entropy, epochs, rows, split_model

# Not importorskip: with JAX 0.11 it cannot be imported before kfac_compat has been there.
installed = pytest.mark.skipif(importlib.util.find_spec("kfac_jax") is None, reason="kfac-jax is not installed")
# One program instead of three: compiling is what takes time here.
ONE_PROGRAM = {"num_burnin_steps": 0, "damping_adaptation_interval": 1000}


@pytest.fixture(autouse=True)
def allow_rank_promotion():
    """kfac-jax adds arrays of different ranks."""
    with jax.numpy_rank_promotion("allow"):
        yield


def built(task):
    return TASKS[task].build(None, False, 0, True)


@installed
def test_it_trains_and_goes_on_from_its_bytes():
    engine = KfacEngine(TASKS["lr"], built("lr"), "kfac", 0)
    engine.compile()
    whole = training.start(engine)
    points = list(training.train(engine, whole, 4))
    assert points[-1].train_loss < 0.5 * points[0].train_loss
    assert [(p.step, p.refreshes, p.lr_scale, p.eigenvalues) for p in points] == [
        (5 * i, 0, 1, ()) for i in (1, 2, 3, 4)
    ]
    assert engine.rate == 0 and engine.schedule is None
    half = training.start(engine)
    list(training.train(engine, half, 2))
    raw = engine.dump(half.run)
    list(training.train(engine, half, 3))  # writes over what was dumped
    again = training.Progress(engine.load(raw), half.curve[1].step, curve=half.curve[:2])
    list(training.train(engine, again, 4))
    assert [(p.train_loss, p.metric) for p in again.curve] == [(p.train_loss, p.metric) for p in whole.curve]
    # In parts it is the same: no second burn-in, the same random numbers.
    run, order = engine.start(), engine.order(0)
    for start, stop in ((0, 2), (2, 5)):
        run, _ = engine.advance(run, order, start, stop)
    assert engine.advance(run, engine.order(1), 0, 5)[1] / 5 == pytest.approx(points[1].train_loss, rel=1e-6)
    assert 0 < engine.gradient_seconds() < 1
    # Damping falls while the model predicts the loss, as it does here, and stops at a tenth of where it began.
    list(training.train(engine, whole, 12))
    assert float(whole.run.opt_state.damping) == pytest.approx(0.1)


def sounds(several):
    """A depthwise convolution, BatchNorm and one layer: what audio classification is made of."""

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.conv = nnx.Conv(2, 2, (3, 3), feature_group_count=2, use_bias=False, rngs=rngs)
            self.norm = nnx.BatchNorm(2, rngs=rngs)
            self.out = nnx.Linear(2, 3, rngs=rngs)

        def __call__(self, x):
            return self.out(nnx.relu(self.norm(self.conv(x))).mean((1, 2)))

    rng = np.random.default_rng(0)
    labels = rng.integers(0, 3, 32)
    images = rng.normal(size=(32, 5, 5, 2)) + labels[:, None, None, None]
    known = np.eye(3)[labels] if several else labels
    graph, params, state = split_model(Model(nnx.Rngs(0)))

    def apply(params, state, images):
        model = nnx.merge(graph, params, state, copy=True)
        return model(images), split_model(model)[2]

    def loss(params, state, batch):
        logits, state = apply(params, state, batch[0])
        if several:
            return jnp.mean(jnp.logaddexp(0, logits) - batch[1] * logits), state
        return cross_entropy(logits, batch[1]), state

    def outputs(params, state, batch):
        return Outputs("sigmoid" if several else "softmax", apply(params, state, batch[0])[0], batch[1])

    data = (jnp.asarray(images, jnp.float32), jnp.asarray(known))
    return Problem(params, state, loss, data, rows, epochs(32, 8), lambda p, s: jnp.zeros(()), outputs=outputs)


@installed
def test_state_of_the_model_moves_as_in_its_loss():
    problem = sounds(several=False)
    engine = KfacEngine(TASKS["lr"], problem, "kfac", 0, 0.5, learning_rate=0.2, momentum=0.9, **ONE_PROGRAM)
    assert engine.rate == pytest.approx(0.1)
    run, order = engine.start(), engine.order(0)
    for index in range(2):
        value, state = problem.loss(run.params, run.state, problem.batch(problem.data, order[index]))
        run, total = engine.advance(run, order, index, index + 1)
        assert total == pytest.approx(float(value), rel=1e-5)
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5), run.state, state)
    for index in range(1, 20):
        run, last = engine.advance(run, engine.order(index), 0, 4)
    assert last < 0.8 * 4 * total


@installed
@pytest.mark.parametrize("name", ["lr", "ae", "deep-ae", "softmax", "sigmoid"])
def test_registered_loss_is_the_loss(name):
    problem = built(name) if name in TASKS else sounds(name == "sigmoid")
    kfac = kfac_compat.load()
    batch = problem.batch(problem.data, problem.order(jax.random.key(0))[0])

    def value(params, batch):
        register(kfac, problem.outputs(params, problem.state, batch))
        return jnp.zeros(())

    estimator = kfac.BlockDiagonalCurvature(value)
    size = len(jax.tree.leaves(batch)[0])
    found = estimator.compute_func_from_registered((problem.params, batch), size)
    l2 = TASKS[name].l2 / 2 * optax.tree.norm(problem.params, squared=True) if name in TASKS else 0.0
    loss = float(problem.loss(problem.params, problem.state, batch)[0] - l2)
    assert float(found) == pytest.approx(loss, rel=1e-5)


@installed
def test_curvature_of_a_transposed_convolution():
    kfac = kfac_compat.load()
    graph, params, rest = split_model(nnx.ConvTranspose(2, 1, (3, 3), strides=(2, 2), rngs=nnx.Rngs(0)))
    images = jax.random.normal(jax.random.key(0), (4, 3, 3, 2))

    def apply(params, images):
        return nnx.merge(graph, params, rest)(images)

    def value(params, images):
        out = apply(params, images)
        register(kfac, Outputs("squared", out, jnp.zeros_like(out)))
        return jnp.zeros(())

    blocks = {"conv2d": kfac_compat.convolution_block(kfac)}
    estimator = kfac.BlockDiagonalCurvature(value, layer_tag_to_block_ctor=blocks)
    key, args = jax.random.key(1), (params, images)
    state = estimator.init(key, args, None, -1.0, False)
    state = estimator.update_curvature_matrix_estimate(
        state, ema_old=0.0, ema_new=1.0, identity_weight=0.0, batch_size=4, rng=key, func_args=args
    )
    # What a place of the output sees of the inputs is its derivative by the kernel; and it sees the bias.
    seen = jax.jacobian(apply)(params, images)
    seen = np.concatenate([np.reshape(seen["kernel"][...], (4 * 6 * 6, 18)), np.ones((4 * 6 * 6, 1))], 1)
    np.testing.assert_allclose(state.blocks_states[0].factors[0].value, seen.T @ seen / len(seen), atol=1e-5)


@installed
def test_it_knows_of_the_losses_l2_term():
    problem = built("deep-ae")
    assert KfacEngine(TASKS["deep-ae"], problem, "kfac", 0).optimizer._l2_reg == 1e-5
    assert KfacEngine(TASKS["deep-ae"], problem, "kfac", 0, l2_reg=0.0).optimizer._l2_reg == 0


def test_what_it_does_not_do():
    with pytest.raises(ValueError, match=r"task 'lm' has no outputs .* paper's authors did not get it to work"):
        KfacEngine(TASKS["lm"], built("lm"), "kfac", 0)
    wave = KfacEngine(TASKS["wave"], built("wave"), "kfac", 0)
    with pytest.raises(ValueError, match="a residual of a differential equation goes through all of them"):
        wave.compile()
    problem = built("lr")
    with pytest.raises(ValueError, match="optimizer is 'adam'; this engine has kfac alone"):
        KfacEngine(TASKS["lr"], problem, "adam", 0)
    with pytest.raises(ValueError, match="rate_factor is 3, but K-FAC finds its rate itself"):
        KfacEngine(TASKS["lr"], problem, "kfac", 0, 3.0)
    with pytest.raises(ValueError, match="train with a KfacEngine"):
        optimizers.build("kfac", TASKS["lr"], problem.loss, 5)
    with pytest.raises(ValueError, match="kind of the outputs is 'hinge'; give softmax, sigmoid, pixels or squared"):
        register(None, Outputs("hinge", jnp.zeros((1, 1)), jnp.zeros(1)))


def test_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"needs kfac-jax: pip install 'fosi\[kfac\]'"):
        kfac_compat.load.__wrapped__()
