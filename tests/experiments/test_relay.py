"""One optimizer after another: each step is the one's or the other's, and FOSI is not refreshed when it is over."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

pytest.importorskip("flax")

from fosi.experiments.tasks import TASKS, optimizers, runs, settings, training
from fosi.experiments.tasks.jax_engine import JaxEngine
from fosi.experiments.tasks.plan import Plan
from fosi.experiments.tasks.relay import relay


def steps(opt, params, count, state=None):
    """A quadratic that is steep in one direction, with all that a line search wants."""
    scale = jnp.array([1.0, 30.0, 4.0])
    state = opt.init(params) if state is None else state
    opt, path = optax.with_extra_args_support(opt), []

    def loss(params):
        return jnp.sum(scale * params**4 + params**2)

    @jax.jit
    def step(params, state):
        value, grads = jax.value_and_grad(loss)(params)
        updates, state = opt.update(grads, state, params, value=value, grad=grads, value_fn=loss)
        return optax.apply_updates(params, updates), state

    for _ in range(count):
        params, state = step(params, state)
        path.append(np.asarray(params))
    return path


HOME = optax.GradientTransformation(lambda p: p, lambda u, s, p=None: (-0.1 * u + 0.5 * (s - p), s))
"""Is drawn to where it started."""


@pytest.mark.parametrize("second", [optax.adam(0.2), optax.lbfgs(memory_size=3), HOME])
def test_steps_are_the_firsts_and_then_the_seconds(second):
    start = jnp.array([1.0, -0.5, 0.5])
    found = steps(relay(optax.sgd(0.003, momentum=0.9), second, 4), start, 9)
    wanted = steps(optax.sgd(0.003, momentum=0.9), start, 4)
    wanted += steps(second, jnp.asarray(wanted[-1]), 5)
    np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-6)
    assert not np.allclose(found[4], steps(optax.sgd(0.003, momentum=0.9), start, 5)[4], rtol=1e-3)


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
    ("name", "due"), [("adam-fosi-lbfgs", [9, 13, 17, 21]), ("fosi-adam-fosi-lbfgs", [1, 5, 9, 13, 17, 21])]
)
def test_fosi_goes_on_around_lbfgs(name, due):
    task = TASKS["reaction"]
    problem = task.build(None, False, 0, True)
    given = {"k": 3, "num_matvecs": 12, "warmup": 1, "refresh_every": 4, "eps": 1.0, "alpha": 0.1, "memory_size": 5}
    engine = JaxEngine(task, problem, name, 0, switch_at=8, **(given if name != "adam-fosi-lbfgs" else _less(given)))
    engine.compile()
    run = training.start(engine)
    losses = [p.train_loss for p in training.train(engine, run, 5)]
    # Before its steps 1, 5, 9 ..., counted from where it begins.
    assert run.refreshes == len(due) and [step for step in range(25) if engine.due(step)] == due
    assert bool(run.curve[0].eigenvalues) == (due[0] == 1) and run.curve[1].eigenvalues and run.curve[4].eigenvalues
    assert losses[1] > losses[2] > losses[3] > losses[4]
    second = run.run.opt_state.second
    assert second.base.pairs.used.sum() == 5 and float(second.count) == 17
    # Newton's own step, whatever FOSI around Adam takes.
    assert engine.built.phases[-1].fosi._core.options.alpha == 1


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
        steps = jax.make_jaxpr(engine._one)(run.run, jnp.zeros(()), problem.data, engine.first[0])
        return losses, str(steps).count("cond[")

    assert JaxEngine(task, problem, "lbfgs", 0).still
    (ours, branches), (theirs, plain) = trained(True), trained(False)
    np.testing.assert_allclose(ours, theirs, rtol=1e-3)
    assert branches == plain + 1


def test_settings_of_a_relay():
    loss = lambda p, b: (jnp.sum(p), None)  # noqa: E731
    built = optimizers.build("adam-lbfgs", TASKS["wave"], loss, 100, switch_at=7)
    assert (built.name, built.phases, built.searches, built.rate) == ("adam-lbfgs", (), True, 1e-3)
    assert any(leaf.shape == (100, 4) for leaf in jax.tree.leaves(built.transform.init(jnp.zeros(4))))
    with pytest.raises(ValueError, match="adam-lbfgs wants switch_at: after how many steps"):
        optimizers.build("adam-lbfgs", TASKS["wave"], loss, 100)
    state = optimizers.build("adam-lbfgs", TASKS["wave"], loss, 100, memory_size=7, switch_at=5).transform.init(
        jnp.zeros(4)
    )
    assert any(leaf.shape == (7, 4) for leaf in jax.tree.leaves(state))
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
        phases = optimizers.build(name, TASKS["wave"], loss, 100, alpha=0.25, **given).phases
        return [phase.fosi._core.options.alpha for phase in phases]

    assert alphas("fosi-lbfgs") == [0.25] and alphas("adam-fosi-lbfgs", switch_at=5) == [0.25]
    assert alphas("fosi-adam-fosi-lbfgs", switch_at=5) == [0.25, 1.0]
    with pytest.raises(ValueError, match="warmup is 0, but fosi-lbfgs begins anew at the switch: give 1 or more"):
        optimizers.build("adam-fosi-lbfgs", TASKS["wave"], loss, 100, switch_at=5, warmup=0)
    plan = Plan("wave", "fosi-lbfgs", options={"memory_size": 20, "k": 3})
    assert plan.reference == Plan("wave", "lbfgs", options={"memory_size": 20})


def test_switch_after_the_end(tmp_path):
    plan = Plan("reaction", "adam-lbfgs", tiny=True, rounds=2, options={"switch_at": 10})
    with pytest.raises(ValueError, match="switch_at is 10, but the run has 10 steps"):
        runs.run(plan, plan.build(None, False), tmp_path)
