"""The training tasks at tiny size, on made data: the loss falls, FOSI refreshes when it should, runs are repeatable."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax")

from fosi.experiments.tasks import PAPER, TASKS, optimizers, settings, training
from fosi.experiments.tasks.engine import CURVATURES
from fosi.experiments.tasks.jax_engine import JaxEngine
from fosi.experiments.tasks.task import epochs, mean_over

FOSI = {"k": 3, "num_matvecs": 12, "warmup": 6, "refresh_every": 7}


def trained(task, name, rounds, **options):
    problem = TASKS[task].build(None, False, 0, True)
    engine = JaxEngine(TASKS[task], problem, name, 0, **options)
    run = training.start(engine)
    return engine, run, list(training.train(engine, run, rounds))


@pytest.mark.parametrize("name", ["adam", "fosi-adam"])
# The other equations differ from the wave's in their residuals alone.
@pytest.mark.parametrize("task", [*PAPER, "wave", "deep-ae", "softmax-full"])
def test_loss_falls_and_estimates_are_made_when_due(task, name):
    engine, run, points = trained(task, name, 6, **(FOSI if name != "adam" else {}))
    steps = engine.steps_a_round
    assert [p.step for p in points] == [steps * (i + 1) for i in range(6)]
    assert points[-1].train_loss < points[0].train_loss and np.isfinite(points[-1].metric)
    due = len([t for t in range(6 * steps) if t >= 6 and (t - 6) % 7 == 0]) if name != "adam" else 0
    assert run.refreshes == points[-1].refreshes == due
    assert (len(points[-1].eigenvalues) > 0) == (name != "adam")
    assert 0 <= run.refresh_seconds <= run.seconds


@pytest.mark.parametrize("name", [name for name in optimizers.NAMES if name != "kfac"])
def test_every_optimizer_trains(name):
    options = FOSI if settings.with_fosi(name) else {}
    options = {**options, "switch_at": 10} if name in settings.RELAYS else options
    options = {"max_precond_dim": 64} if name == "soap" else options  # eigenvectors of 784 pixels take seconds
    factor = 3.0 if "adam" in name else 1.0 if name in settings.SECONDS else 0.1
    # Tiny data is ill-conditioned for the paper's rates.
    _, run, points = trained("lr", name, 5, rate_factor=factor, **options)
    assert points[-1].train_loss < points[0].train_loss and not run.diverged
    assert points[-1].lr_scale >= 1


def test_before_the_first_estimate_it_is_the_base():
    _, _, alone = trained("lm", "heavy-ball", 2)
    _, _, wrapped = trained("lm", "fosi-heavy-ball", 2, **{**FOSI, "warmup": 12})
    assert wrapped[0].train_loss == pytest.approx(alone[0].train_loss, rel=1e-6)
    assert wrapped[1].train_loss != pytest.approx(alone[1].train_loss, rel=1e-6)


def test_run_is_repeatable_and_depends_on_the_seed():
    _, _, first = trained("lr", "adam", 2)
    _, _, second = trained("lr", "adam", 2)
    assert [p.train_loss for p in first] == [p.train_loss for p in second]
    problem = TASKS["lr"].build(None, False, 0, True)
    other = JaxEngine(TASKS["lr"], problem, "adam", 1)
    assert next(training.train(other, training.start(other), 1)).train_loss != first[0].train_loss


@pytest.mark.parametrize("name", ["fosi-heavy-ball", "lbfgs"])
def test_run_goes_on_from_its_bytes(name):
    options = FOSI if name.startswith("fosi") else {}
    engine, whole, _ = trained("lm", name, 4, **options)
    half = training.start(engine)
    list(training.train(engine, half, 2))
    raw = engine.dump(half.run)
    list(training.train(engine, half, 3))  # writes over what was dumped
    again = training.Progress(engine.load(raw), half.curve[1].step, refreshes=half.curve[1].refreshes)
    again.curve = half.curve[:2]
    list(training.train(engine, again, 4))
    assert [p.train_loss for p in again.curve] == [p.train_loss for p in whole.curve]
    assert [p.metric for p in again.curve] == [p.metric for p in whole.curve]
    assert again.refreshes == whole.refreshes
    other, _, _ = trained("lr", "adam", 0)
    with pytest.raises(ValueError, match="of another model or another optimizer"):
        other.load(raw)


def softmax_largest(problem, rows):
    """The largest eigenvalue of softmax regression's Hessian, by power iteration on its formula in float64."""
    pixels = np.asarray(problem.data[0])[np.asarray(rows)].reshape(len(rows), -1) / 255
    inputs = np.concatenate([pixels, np.ones((len(rows), 1))], 1)
    weights = np.concatenate([np.asarray(problem.params["kernel"][...]), np.asarray(problem.params["bias"][...])[None]])
    scores = inputs @ weights.astype(np.float64)
    p = np.exp(scores - scores.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    v, value = np.random.default_rng(0).normal(size=weights.shape), 0.0
    for _ in range(300):
        along = inputs @ v
        v = inputs.T @ (p * (along - (p * along).sum(1, keepdims=True))) / len(rows)
        value = np.linalg.norm(v)
        v /= value
    return value


def test_estimates_are_made_on_the_batch_asked_for():
    problem = TASKS["lr"].build(None, False, 0, True)
    found = {}
    for name in CURVATURES:
        task = replace(TASKS["lr"], batch_size=40)  # its own batches are smaller than these
        engine = JaxEngine(task, problem, "fosi-adam", 0, curvature=name, **FOSI)
        order = engine.order(1)
        run = engine.refresh(engine.start(), order, 2)
        chosen = {"fixed": engine.first[:1], "current": order[2:3], "larger": engine.first[:4]}
        chosen |= {"part": engine.first[0, : engine.first.shape[1] // 4], "own": engine.first[0, :40]}
        rows = chosen.get(name, order[jnp.array([2, 3, 4, 0])]).reshape(-1)
        found[name] = engine.estimate(run).eigenvalues[0]
        assert found[name] == pytest.approx(softmax_largest(problem, rows), rel=1e-3)
    assert len({round(value, 5) for value in found.values()}) == 6
    with pytest.raises(ValueError, match="curvature is 'best'; give one of fixed, current, larger, average, part, own"):
        JaxEngine(TASKS["lr"], problem, "fosi-adam", 0, curvature="best")


@pytest.mark.parametrize("name", ["lbfgs", "heavy-ball"])
def test_nothing_is_compiled_on_the_clock(name):
    engine, _, _ = trained("lr", name, 0)
    engine.looped = True  # as on a GPU
    engine.compile()
    list(training.train(engine, training.start(engine), 2))
    assert [steps._cache_size() for steps in engine._steps] == [1]


def test_cost_of_a_gradient_is_measured():
    engine, _, _ = trained("lr", "adam", 0)
    assert 0 < engine.gradient_seconds() < 1


def test_divergence_ends_a_run():
    _, run, points = trained("lr", "gd", 50, rate_factor=3e39)
    assert run.diverged and len(points) < 50


def test_gradient_is_clipped_before_the_optimizer_sees_it():
    task = TASKS["ae"]
    made = optimizers.build("gd", task, lambda p, b: (jnp.sum(p), None), 1).legs[0].transform
    updates, _ = made.update(jnp.array([5.0, -0.5]), made.init(jnp.zeros(2)), jnp.zeros(2))
    np.testing.assert_allclose(updates, -task.heavy_ball_rate * np.array([1.0, -0.5]))


def test_paper_settings():
    assert {name: (t.rounds, t.batch_size, t.heavy_ball_rate, t.max_lr_scale, t.clip) for name, t in PAPER.items()} == {
        "lr": (100, 1024, 0.1, 3.0, None),
        "tl": (20, 128, 0.001, 3.0, None),
        "ae": (200, 256, 0.001, 1.0, 1.0),
        "lm": (100, 32, 0.1, 3.0, None),
        "ac": (100, 256, 0.1, 3.0, None),
    }
    assert [TASKS[name].warmup_rounds for name in ("lr", "tl", "ae", "lm")] == [1, 1, None, None]
    params = jnp.zeros(10_000)
    lr = optimizers.build("fosi-heavy-ball", TASKS["lr"], lambda p, b: (jnp.sum(p), None), 58)
    assert lr.legs[0].fosi.schedule(params)[:3] == (58, 800, 40)  # W one epoch, T, m
    lm = optimizers.build("fosi-adam", TASKS["lm"], lambda p, b: (jnp.sum(p), None), 100)
    assert lm.legs[0].fosi.schedule(params)[:3] == (800, 800, 40) and lm.rate == 1e-3
    with pytest.raises(ValueError, match="optimizer is 'sgd'; give one of gd, heavy-ball"):
        optimizers.build("sgd", TASKS["lr"], lambda p, b: (jnp.sum(p), None), 58)


def test_epoch_has_every_example_once():
    order = epochs(10, 3)(jax.random.key(0))
    assert order.shape == (3, 3) and len(set(order.ravel().tolist())) == 9
    with pytest.raises(ValueError, match="batch_size is 11, but there are only 10 examples"):
        epochs(10, 11)


def test_epoch_of_large_batches_is_filled_up_or_cut_to_the_nearest():
    order = np.asarray(epochs(80, 41, nearest=True)(jax.random.key(0)))
    assert order.shape == (2, 41) and len(set(order.ravel())) == 80
    assert all(len(set(batch)) == 41 for batch in order)
    assert epochs(10, 4, nearest=True)(jax.random.key(0)).shape == (2, 4)  # 2 of the 10 are left out
    problem = TASKS["ac"].build(None, False, 0, True, batch_size=48)
    assert problem.order(jax.random.key(0)).shape == (3, 48)  # of 128


def test_metric_is_over_every_example_once():
    data = jnp.arange(10.0)
    assert float(mean_over(lambda p, s, x: p * x, data, 4)(2.0, None)) == pytest.approx(9.0)
