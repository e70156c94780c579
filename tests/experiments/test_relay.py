"""One optimizer after another: each step is the one's or the other's, and FOSI is not refreshed when it is over."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax")

from fosi.experiments.tasks import TASKS, optimizers, runs, settings, training
from fosi.experiments.tasks.jax_engine import JaxEngine
from fosi.experiments.tasks.on_device import JaxRun
from fosi.experiments.tasks.plan import Plan


def wave(name, **options):
    task = TASKS["wave"]
    return JaxEngine(task, task.build(None, False, 0, True), name, 0, **options)


@pytest.mark.parametrize("at", [5, 7])
@pytest.mark.parametrize("looped", [False, True])
def test_steps_are_the_firsts_and_then_the_seconds(at, looped):
    """At the end of a round of five, and in the middle of one: as if they had been trained one after the other."""
    engine, first, second = wave("adam-lbfgs", switch_at=at, memory_size=4), wave("adam"), wave("lbfgs", memory_size=4)
    engine.looped = looped
    ended = wave_steps(first, first.start(), at)
    wanted = wave_steps(second, second.start()._replace(params=ended.params), 12 - at)
    found = training.start(engine)
    *_, last = training.train(engine, found, 2)
    run = wave_steps(engine, found.run, 2)
    assert last.step == 10 and run.step == 12
    np.testing.assert_allclose(flat(run.params), flat(wanted.params), rtol=1e-4, atol=1e-6)
    assert not np.allclose(flat(run.params), flat(wave_steps(first, ended, 12 - at).params), rtol=1e-2, atol=1e-2)
    # Adam's state is gone, and what L-BFGS knows is of its own steps alone.
    assert jax.tree.structure(run.opt_state) == jax.tree.structure(wanted.opt_state)
    assert int(run.opt_state.count) == 12 - at


def wave_steps(engine, run, count):
    run = JaxRun(*jax.tree.map(jnp.array, run[:-1]), run.step)  # steps write over what they are given
    for _ in range(count):
        run, _ = engine.advance(run, engine.first, 0, 1)
    return run


def flat(params):
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(params)])


@pytest.mark.parametrize("rounds", [1, 3])
def test_a_checkpoint_of_either(rounds):
    engine = wave("adam-lbfgs", switch_at=7, memory_size=4)
    progress = training.start(engine)
    list(training.train(engine, progress, rounds))
    kept = engine.load(engine.dump(progress.run))
    assert kept.step == 5 * rounds and type(kept.opt_state) is type(progress.run.opt_state)
    jax.tree.map(np.testing.assert_array_equal, kept, progress.run)
    with pytest.raises(ValueError, match="another model or another optimizer"):
        wave("adam-lbfgs", switch_at=(3 if rounds == 1 else 20), memory_size=4).load(engine.dump(progress.run))


def test_engine_switches_and_estimates_no_more():
    task = TASKS["reaction"]
    problem = task.build(None, False, 0, True)
    given = {"k": 3, "num_matvecs": 12, "warmup": 2, "refresh_every": 4, "eps": 1.0}
    engine = JaxEngine(task, problem, "fosi-adam-lbfgs", 0, switch_at=8, **given)
    run = training.start(engine)
    losses = [p.train_loss for p in training.train(engine, run, 5)]
    # Before steps 2 and 6; FOSI alone would have estimated before 10, 14, 18 and 22 too.
    assert run.refreshes == 2 and [step for step in range(25) if engine.due(step)] == [2, 6]
    assert run.curve[0].eigenvalues and run.curve[2].eigenvalues == () and run.curve[2].lr_scale == 1
    assert losses[0] > losses[2] > losses[3] > losses[4]  # steps of a line search never lead up


@pytest.mark.parametrize(
    ("name", "warmup", "due"),
    [
        ("adam-fosi-lbfgs", 1, [9, 13, 17, 21]),
        ("adam-fosi-lbfgs", 0, [8, 12, 16, 20, 24]),
        ("fosi-adam-fosi-lbfgs", 1, [1, 5, 9, 13, 17, 21]),
    ],
)
def test_fosi_goes_on_around_lbfgs(name, warmup, due):
    task = TASKS["reaction"]
    problem = task.build(None, False, 0, True)
    given = {"k": 3, "num_matvecs": 12, "warmup": warmup, "refresh_every": 4, "eps": 1.0, "alpha": 0.1}
    given["memory_size"] = 5
    engine = JaxEngine(task, problem, name, 0, switch_at=8, **(given if name != "adam-fosi-lbfgs" else _less(given)))
    engine.compile()
    run = training.start(engine)
    losses = [p.train_loss for p in training.train(engine, run, 5)]
    # Before its steps warmup, warmup + 4, ..., counted from where it begins.
    assert run.refreshes == len(due) and [step for step in range(25) if engine.due(step)] == due
    assert bool(run.curve[0].eigenvalues) == (due[0] == 1) and run.curve[1].eigenvalues and run.curve[4].eigenvalues
    assert losses[1] > losses[2] > losses[3] > losses[4]
    second = run.run.opt_state
    assert second.base.pairs.used.sum() == 5 and float(second.count) == 17
    # Newton's own step, whatever FOSI around Adam takes.
    assert engine.built.legs[-1].fosi._core.options.alpha == 1


def _less(given):
    return {key: value for key, value in given.items() if key != "alpha"}


def test_a_line_search_on_the_full_batch_is_followed_by_no_other_gradient():
    """Where all steps have one loss the engine takes value and gradient from the search: the same run, to rounding."""
    task = TASKS["reaction"]
    problem = task.build(None, False, 0, True)

    def trained(still):
        engine = JaxEngine(task, problem, "lbfgs", 0)
        engine.still = still
        run = training.start(engine)
        losses = [p.train_loss for p in training.train(engine, run, 2)]
        leg = engine.built.legs[0]
        steps = jax.make_jaxpr(partial(engine._one, leg))(run.run[:-1], jnp.zeros(()), problem.data, engine.first[0])
        return losses, str(steps).count("cond[")

    assert JaxEngine(task, problem, "lbfgs", 0).still
    (ours, branches), (theirs, plain) = trained(True), trained(False)
    np.testing.assert_allclose(ours, theirs, rtol=1e-3)
    assert branches == plain + 1


def test_settings_of_a_relay():
    loss = lambda p, b: (jnp.sum(p), None)  # noqa: E731
    built = optimizers.build("adam-lbfgs", TASKS["wave"], loss, 100, switch_at=7)
    first, second = built.legs
    assert (built.name, built.rate, first.since, second.since) == ("adam-lbfgs", 1e-3, 0, 7)
    assert (first.fosi, first.searches, second.fosi, second.searches) == (None, False, None, True)
    assert any(leaf.shape == (100, 4) for leaf in jax.tree.leaves(second.transform.init(jnp.zeros(4))))
    with pytest.raises(ValueError, match="adam-lbfgs wants switch_at: after how many steps"):
        optimizers.build("adam-lbfgs", TASKS["wave"], loss, 100)
    _, second = optimizers.build("adam-lbfgs", TASKS["wave"], loss, 100, memory_size=7, switch_at=5).legs
    assert any(leaf.shape == (7, 4) for leaf in jax.tree.leaves(second.transform.init(jnp.zeros(4))))
    with pytest.raises(ValueError, match="switch_at is 0; give 1 or more steps"):
        optimizers.build("adam-lbfgs", TASKS["wave"], loss, 100, switch_at=0)


def test_target_is_of_the_same_relay_without_fosi():
    plan = Plan("wave", "fosi-adam-lbfgs", options={"switch_at": 50, "k": 3})
    assert plan.reference == Plan("wave", "adam-lbfgs", options={"switch_at": 50}) and plan.base == "adam-lbfgs"
    assert not settings.is_first_order("fosi-adam-lbfgs") and settings.is_first_order("fosi-adam")
    assert settings.of_relay("adam", {"switch_at": 5}) == {}
    given = {"switch_at": 5, "k": 3}
    names = ("adam", "fosi-adam", "adam-lbfgs", "fosi-adam-lbfgs", "lbfgs")
    wanted = [{}, {"k": 3}, {"switch_at": 5}, given, {}]
    assert [settings.for_one(name, given) for name in names] == wanted
    # What is of another second optimizer is not of this one, and not of FOSI either.
    more = {**given, "max_cg": 9}
    assert settings.for_one("fosi-adam-lbfgs", more) == given and settings.for_one("fosi-adam", more) == {"k": 3}
    assert settings.for_one("adam-newton-cg", more) == {"switch_at": 5, "max_cg": 9}


def test_settings_of_fosi_around_lbfgs():
    loss = lambda p, b: (jnp.sum(p), None)  # noqa: E731

    def alphas(name, **given):
        legs = optimizers.build(name, TASKS["wave"], loss, 100, alpha=0.25, **given).legs
        return [leg.fosi._core.options.alpha for leg in legs if leg.fosi is not None]

    assert alphas("fosi-lbfgs") == [0.25] and alphas("adam-fosi-lbfgs", switch_at=5) == [0.25]
    assert alphas("fosi-adam-fosi-lbfgs", switch_at=5) == [0.25, 1.0]
    plan = Plan("wave", "fosi-lbfgs", options={"memory_size": 20, "k": 3})
    assert plan.reference == Plan("wave", "lbfgs", options={"memory_size": 20})


def test_switch_after_the_end(tmp_path):
    plan = Plan("reaction", "adam-lbfgs", tiny=True, rounds=2, options={"switch_at": 10})
    with pytest.raises(ValueError, match="switch_at is 10, but the run has 10 steps"):
        runs.run(plan, plan.build(None, False), tmp_path)
