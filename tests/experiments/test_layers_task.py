"""A search in coordinates of the layers on a task: the steps of ``in_layers`` by hand, and estimates when due."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

pytest.importorskip("flax")

from fosi.experiments.tasks import TASKS, training
from fosi.experiments.tasks.jax_engine import JaxEngine
from fosi.experiments.tasks.settings import AROUND_LBFGS
from fosi.jax import fosi_lbfgs, in_layers

LAYERS = {"memory_size": 4, "layers": 3}
FOSI = {"k": 2, "num_matvecs": 5, "accept": "all"}
GIVEN = {"fosi-lbfgs": {**LAYERS, **FOSI, "operator": "gauss_newton"}, "lbfgs": LAYERS}


def engine(name, **given):
    task = TASKS["deep-ae"]
    return JaxEngine(task, task.build(None, False, 0, True), name, 0, **given)


def by_hand(name, made, steps):
    """The parameters after so many steps, with the engine's own model and loss."""
    problem, model = made.problem, made._model_loss("optimizer", name, TASKS["deep-ae"].l2)
    batch = (problem.state, problem.part(problem.data))
    fosi = {**AROUND_LBFGS, **FOSI, "curvature": "gauss_newton", "refresh": "external"}
    never = {"k": 1, "num_matvecs": 2, "warmup": np.iinfo(np.int32).max, "refresh": "external", "scaling": "usual"}
    inside = fosi if name == "fosi-lbfgs" else never  # k = 1 pair that is never estimated
    opt = in_layers(lambda loss: fosi_lbfgs(loss, memory_size=4, **inside), model, every=3)

    def loss(params):
        return problem.loss(params, problem.state, problem.data)[0]

    @jax.jit
    def step(params, state):
        value, grad = optax.value_and_grad_from_state(loss)(params, state=state)
        updates, state = opt.update(grad, state, params, value=value, grad=grad, value_fn=loss)
        return optax.apply_updates(params, updates), state

    params, state = problem.params, opt.init(problem.params)
    for i in range(steps):
        if i % 3 == 0:
            state = opt.refresh(state, params, batch=batch)
        params, state = step(params, state)
    return params


@pytest.mark.parametrize("name", GIVEN)
def test_steps_are_those_by_hand(name):
    made = engine(name, curvature="part", **GIVEN[name])
    assert [step for step in range(10) if made.due(step)] == [0, 3, 6, 9]
    progress = training.start(made)
    points = list(training.train(made, progress, 2))
    params = by_hand(name, made, 10)
    assert points[-1].step == 10 and points[-1].refreshes == 4
    assert points[-1].train_loss < points[0].train_loss
    found, wanted = (jnp.concatenate([x.ravel() for x in jax.tree.leaves(p)]) for p in (progress.run.params, params))
    np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-3 * float(jnp.abs(wanted).max()))
    assert len(points[-1].eigenvalues) == (2 if name == "fosi-lbfgs" else 0)


def test_it_comes_after_another_and_goes_on_from_its_bytes():
    given = {**GIVEN["fosi-lbfgs"], "switch_at": 4}
    made, fresh = engine("soap-fosi-lbfgs", **given), engine("soap-fosi-lbfgs", **given)
    assert [step for step in range(12) if made.due(step)] == [4, 7, 10]
    progress = training.start(made)
    list(training.train(made, progress, 1))
    raw = made.dump(progress.run)
    whole = [point.train_loss for point in training.train(made, progress, 3)]
    again = training.Progress(fresh.load(raw), 5, refreshes=1)
    assert [point.train_loss for point in training.train(fresh, again, 2)] == whole[:2]


@pytest.mark.parametrize(
    ("task", "name", "given", "message"),
    [
        ("deep-ae", "fosi-lbfgs", {"layers": 3}, "layers is 3, with which FOSI estimates Gauss and Newton's matrix"),
        ("deep-ae", "lbfgs", {"layers": 0}, "layers is 0; give 1 or more steps"),
        ("deep-ae", "lbfgs", {"layers": 3, "warmup": 2}, "warmup is 2, but estimates are made as layers says"),
        ("lm", "lbfgs", {"layers": 3}, "layers is 3, but this task does not say what its loss is made of"),
    ],
)
def test_layers_that_there_are_not(task, name, given, message):
    with pytest.raises(ValueError, match=message):
        JaxEngine(TASKS[task], TASKS[task].build(None, False, 0, True), name, 0, **given)
