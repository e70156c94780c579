"""The training tasks at tiny size, on made data: the loss falls, FOSI refreshes when it should, runs are repeatable."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax")

from fosi.experiments.tasks import TASKS, optimizers
from fosi.experiments.tasks.task import epochs, mean_over
from fosi.experiments.tasks.training import Trainer

FOSI = {"k": 3, "num_matvecs": 12, "warmup": 6, "refresh_every": 7}


def trained(task, name, rounds, **options):
    problem = TASKS[task].build(None, False, 0, True)
    trainer = Trainer(TASKS[task], problem, name, 0, **options)
    run = trainer.start()
    return trainer, run, list(trainer.rounds(run, rounds))


@pytest.mark.parametrize("name", ["adam", "fosi-adam"])
@pytest.mark.parametrize("task", TASKS)
def test_loss_falls_and_estimates_are_made_when_due(task, name):
    trainer, run, points = trained(task, name, 6, **(FOSI if name != "adam" else {}))
    steps = trainer.steps_a_round
    assert [p.step for p in points] == [steps * (i + 1) for i in range(6)]
    assert points[-1].train_loss < points[0].train_loss and np.isfinite(points[-1].metric)
    due = len([t for t in range(6 * steps) if t >= 6 and (t - 6) % 7 == 0]) if name != "adam" else 0
    assert run.refreshes == points[-1].refreshes == due
    assert (points[-1].accepted > 0) == (name != "adam")
    assert 0 <= run.refresh_seconds <= run.seconds


@pytest.mark.parametrize("name", optimizers.NAMES)
def test_every_optimizer_trains(name):
    options = FOSI if name.startswith("fosi-") else {}
    # Tiny data is ill-conditioned for the paper's rates.
    _, run, points = trained("lr", name, 5, rate_factor=0.1 if "adam" not in name else 3.0, **options)
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
    other = Trainer(TASKS["lr"], problem, "adam", 1)
    assert next(other.rounds(other.start(), 1)).train_loss != first[0].train_loss


def test_divergence_ends_a_run():
    _, run, points = trained("lr", "gd", 50, rate_factor=3e39)
    assert run.diverged and len(points) < 50


def test_gradient_is_clipped_before_the_optimizer_sees_it():
    task = TASKS["ae"]
    built = optimizers.build("gd", task, lambda p, b: (jnp.sum(p), None), 1)
    updates, _ = built.transform.update(jnp.array([5.0, -0.5]), built.transform.init(jnp.zeros(2)), jnp.zeros(2))
    np.testing.assert_allclose(updates, -task.heavy_ball_rate * np.array([1.0, -0.5]))


def test_paper_settings():
    assert {name: (t.rounds, t.batch_size, t.heavy_ball_rate, t.max_lr_scale, t.clip) for name, t in TASKS.items()} == {
        "lr": (100, 1024, 0.1, 3.0, None),
        "ae": (200, 256, 0.001, 1.0, 1.0),
        "lm": (100, 32, 0.1, 3.0, None),
    }
    params = jnp.zeros(10_000)
    lr = optimizers.build("fosi-heavy-ball", TASKS["lr"], lambda p, b: (jnp.sum(p), None), 58)
    assert lr.fosi.schedule(params)[:3] == (58, 800, 40)  # W one epoch, T, m
    lm = optimizers.build("fosi-adam", TASKS["lm"], lambda p, b: (jnp.sum(p), None), 100)
    assert lm.fosi.schedule(params)[:3] == (800, 800, 40) and lm.rate == 1e-3
    with pytest.raises(ValueError, match="optimizer is 'sgd'; give one of gd, heavy-ball"):
        optimizers.build("sgd", TASKS["lr"], lambda p, b: (jnp.sum(p), None), 58)


def test_epoch_has_every_example_once():
    order = epochs(10, 3)(jax.random.key(0))
    assert order.shape == (3, 3) and len(set(order.ravel().tolist())) == 9
    with pytest.raises(ValueError, match="batch_size is 11, but there are only 10 examples"):
        epochs(10, 11)


def test_metric_is_over_every_example_once():
    data = jnp.arange(10.0)
    assert float(mean_over(lambda p, s, x: p * x, data, 4)(2.0, None)) == pytest.approx(9.0)
