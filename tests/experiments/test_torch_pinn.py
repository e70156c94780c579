"""The PINNs in PyTorch: residuals, losses and curvature of those in JAX with the same weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax")
pytest.importorskip("torch")

import torch
from flax import nnx

from fosi.experiments.tasks import TASKS, pinn, torch_pinn, torch_tasks, training
from fosi.experiments.tasks.equations import EQUATIONS
from fosi.experiments.tasks.torch_engine import TorchEngine
from tests.torch.dense import by_differences, jacobian

torch.set_num_threads(1)


def copy(params, model):
    """Gives a network in PyTorch the weights of one in flax."""
    with torch.no_grad():
        for index, layer in params["layers"].items():
            model.layers[int(index)].weight.copy_(torch.tensor(np.asarray(layer["kernel"][...]).T))
            model.layers[int(index)].bias.copy_(torch.tensor(np.asarray(layer["bias"][...])))


def pair(task):
    ours = TASKS[task].build(None, False, 0, True)
    theirs = torch_tasks.build(task, None, False, 0, True)
    copy(ours.params, theirs.model)
    return ours, theirs


@pytest.mark.parametrize("name", EQUATIONS)
def test_residuals_are_those_of_jax_in_float64(name):
    rng = np.random.default_rng(0)
    left, right = EQUATIONS[name].left, EQUATIONS[name].right
    points = rng.uniform(left, right, 20), rng.uniform(0, 1, 20), np.linspace(left, right, 7), np.linspace(0, 1, 6)
    model = torch_pinn.Network(8, torch.Generator().manual_seed(0)).double()
    with jax.enable_x64(True):
        graph, params, rest = nnx.split(pinn.Network(pinn.SIZES["tiny"], nnx.Rngs(0)), nnx.Param, ...)
        params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64) + 0.1, params)  # biases too
        copy(params, model)
        at = pinn.Points(*(jnp.asarray(a) for a in points))
        residuals = jax.jit(lambda params: pinn.residuals(EQUATIONS[name], nnx.merge(graph, params, rest), at))
        wanted = [np.asarray(a) for a in residuals(params)]
    found = pinn.residuals(torch_pinn.EQUATIONS[name], model, pinn.Points(*(torch.tensor(a) for a in points)))
    assert len(found) == len(wanted) and all(a.dtype == torch.float64 for a in found)
    for ours, theirs in zip(wanted, found, strict=True):
        assert ours.dtype == np.float64 and np.max(np.abs(ours)) > 1e-3
        np.testing.assert_allclose(theirs.detach(), ours, rtol=1e-8, atol=1e-8)


def test_loss_points_gradient_and_metric_are_those_of_jax():
    ours, theirs = pair("wave")
    for mine, its in zip(ours.data, theirs.data, strict=True):
        np.testing.assert_array_equal(mine, its)
    assert theirs.facts == ours.facts
    value, grads = jax.jit(jax.value_and_grad(lambda p: ours.loss(p, ours.state, ours.data)[0]))(ours.params)
    loss = theirs.loss(theirs.model, theirs.batch(theirs.data, theirs.order(torch.Generator())[0]))
    loss.backward()
    assert loss.item() == pytest.approx(float(value), rel=1e-5)
    for index, layer in grads["layers"].items():
        wanted, got = np.asarray(layer["kernel"][...]).T, theirs.model.layers[int(index)].weight.grad
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-4 * np.abs(wanted).max())
    metric = float(ours.validate(ours.params, ours.state))
    assert float(theirs.validate(theirs.model)) == pytest.approx(metric, rel=1e-5)


@pytest.mark.parametrize("curvature", ["fixed", "part"])
@pytest.mark.parametrize("operator", ["hessian", "gauss_newton"])
@pytest.mark.parametrize("name", ["fosi-adam", "fosi-lbfgs"])
def test_estimates_are_of_the_matrix_by_differences(name, operator, curvature):
    problem = torch_tasks.build("burgers", None, False, 0, True)
    model = problem.model.double()
    problem = problem._replace(data=pinn.Points(*(a.double() for a in problem.data)))
    weights = list(model.parameters())
    points = problem.data  # 30 inside, of which a quarter are 8
    if curvature == "part":
        points = points._replace(x=points.x[:8], t=points.t[:8])

    def residuals():  # so that the sum of their squares is the loss
        parts = pinn.residuals(torch_pinn.EQUATIONS["burgers"], model, points)
        return torch.cat([part / len(part) ** 0.5 for part in parts])

    if operator == "hessian":
        matrix = by_differences(lambda: residuals().square().sum(), weights)
    else:
        J = jacobian(residuals, weights)
        matrix = 2 * J.T @ J
    given = {"k": 3, "num_matvecs": 40, "curvature": curvature, "operator": operator}
    engine = TorchEngine(TASKS["burgers"], problem, name, 0, **given)
    found = engine.estimate(engine.refresh(engine.start(), engine.first, 0)).eigenvalues
    np.testing.assert_allclose(found, np.linalg.eigvalsh(matrix)[:-4:-1], rtol=1e-5)


def test_gauss_newtons_matrix_of_softmax_regression_is_its_hessian():
    problem = torch_tasks.build("lr", None, False, 0, True)
    spectra = []
    for operator in ("hessian", "gauss_newton"):
        engine = TorchEngine(TASKS["lr"], problem, "fosi-adam", 0, k=3, num_matvecs=30, operator=operator)
        assert engine.start().optimizer.options.curvature == operator
        spectra.append(engine.estimate(engine.refresh(engine.start(), engine.first, 0)).eigenvalues)
    np.testing.assert_allclose(*spectra, rtol=1e-5)


@pytest.mark.parametrize(
    ("task", "name", "operator", "message"),
    [
        ("wave", "fosi-adam", "fisher", "operator is 'fisher'; give hessian or gauss_newton"),
        ("wave", "adam-lbfgs", "gauss_newton", "a setting of FOSI; adam-lbfgs has none"),
        ("lm", "fosi-adam", "gauss_newton", "does not say what its loss is made of"),
    ],
)
def test_operators_that_there_are_not(task, name, operator, message):
    problem = torch_tasks.build(task, None, False, 0, True)
    given = {"switch_at": 3} if "-lbfgs" in name else {}
    with pytest.raises(ValueError, match=message):
        TorchEngine(TASKS[task], problem, name, 0, operator=operator, **given)


@pytest.mark.parametrize("name", ["adam", "fosi-adam"])
def test_loss_falls(name):
    options = {"k": 3, "num_matvecs": 12, "warmup": 6, "refresh_every": 7} if name != "adam" else {}
    engine = TorchEngine(TASKS["wave"], torch_tasks.build("wave", None, False, 0, True), name, 0, **options)
    points = list(training.train(engine, training.start(engine), 4))
    assert points[-1].train_loss < 0.9 * points[0].train_loss and points[-1].step == 20
    assert points[-1].refreshes == (2 if options else 0)


def test_weights_start_as_in_flax():
    problem = torch_tasks.build("wave", None, False, 0, False)
    shapes = [tuple(layer.weight.shape) for layer in problem.model.layers]
    assert shapes == [(200, 2), (200, 200), (200, 200), (1, 200)]
    weight = problem.model.layers[1].weight.detach()
    assert float(weight.std()) == pytest.approx((2 / 400) ** 0.5, rel=0.02)
    assert float(weight.abs().max()) == pytest.approx(2 / 0.8796 * (2 / 400) ** 0.5, rel=0.01)
    assert not any(layer.bias.any() for layer in problem.model.layers)
    quick = torch_tasks.build("wave", None, False, 0, False, mode="quick")
    assert quick.facts["residuals"] == len(quick.data.x) == 1000
