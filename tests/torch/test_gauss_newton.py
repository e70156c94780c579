"""Gauss–Newton's matrix against Jᵀ ∇²ℓ J, with J by differences of the outputs and ∇²ℓ written down in NumPy."""

import functools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fosi.torch import FOSI, FosiLBFGS, ModelLoss, diagnose, estimate_spectrum
from tests.problems import network
from tests.torch.dense import assert_pairs, extreme, jacobian, rows_of
from tests.torch.models import MODELS, batch_of, made
from tests.torch.running import as_params
from tests.torch.training import values

ALL = {"k": 2, "num_matvecs": 26, "precision": "float64", "curvature": "gauss_newton"}


def model_of(params, batch):
    """The network of tests/problems.py."""
    b1, w1, b2, w2 = params
    return torch.tanh(batch["x"] @ w1 + b1) @ w2 + b2


def squares(outputs, batch):
    return (outputs - batch["y"]).square().sum() / len(batch["y"])


def cross_entropy(outputs, batch):
    return F.cross_entropy(outputs, (batch["x"][:, 0] > 0).long())


def curvature_of(loss, outputs):
    """∇² of a loss by outputs of two columns, dense: in NumPy."""
    rows = len(outputs)
    if loss is squares:
        return 2 * np.eye(outputs.size) / rows
    p = np.exp(outputs - outputs.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    blocks = [np.diag(row) - np.outer(row, row) for row in p]
    whole = np.zeros((outputs.size, outputs.size))
    for i, block in enumerate(blocks):
        whole[2 * i : 2 * i + 2, 2 * i : 2 * i + 2] = block / rows
    return whole


def problem_of(loss, dtype=torch.float64, **how):
    """Parameters, batch, the loss as model and loss of outputs, and the dense matrix."""
    problem = network(**how)
    params = as_params(problem, problem.start, dtype)
    batch = {name: torch.tensor(x, dtype=dtype) for name, x in problem.batch.items()}
    exact = as_params(problem, problem.start, torch.float64)
    held = {name: torch.tensor(x) for name, x in problem.batch.items()}
    J = jacobian(lambda: model_of(exact, held), exact)
    G = J.T @ curvature_of(loss, model_of(exact, held).detach().numpy()) @ J
    return params, batch, split(params, batch, loss), G


def split(params, batch, loss=squares):
    return ModelLoss(lambda: model_of(params, batch), lambda outputs: loss(outputs, batch))


@pytest.mark.parametrize("loss", [squares, cross_entropy])
def test_it_is_the_matrix_of_that_name(loss):
    params, _, found, G = problem_of(loss)
    assert found() == found.loss_fn(found.model_fn())
    spectrum = estimate_spectrum(found, params, **ALL)
    assert_pairs(spectrum, G, 2, 0, 1e-8)
    # Positive semi-definite, where the Hessian is not.
    scale = np.linalg.norm(G, 2)
    np.testing.assert_allclose(spectrum.extremes[1], np.linalg.eigvalsh(G)[0], atol=1e-8 * scale)
    hessian = estimate_spectrum(found, params, **ALL | {"curvature": "hessian"})
    assert hessian.extremes[1] < -1e-3 * scale


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 3e-2)])
def test_in_the_dtype_of_the_parameters(dtype, tolerance):
    params, _, found, G = problem_of(squares, dtype)
    values = estimate_spectrum(found, params, **ALL | {"precision": "float32"}).eigenvalues
    assert values.dtype == torch.float32
    np.testing.assert_allclose(values, extreme(G, 2, 0)[0], rtol=tolerance)


def test_several_batches_are_one_large_batch():
    params, batch, _, G = problem_of(squares)
    for count in (2, 4):
        size = len(batch["y"]) // count
        pieces = [{name: x[i * size : (i + 1) * size] for name, x in batch.items()} for i in range(count)]
        spectrum = estimate_spectrum([split(params, piece) for piece in pieces], params, **ALL)
        assert_pairs(spectrum, G, 2, 0, 1e-8)
    alone = estimate_spectrum(split(params, pieces[0]), params, **ALL)
    assert np.abs(alone.eigenvalues.numpy() - extreme(G, 2, 0)[0]).max() > 1e-2 * np.linalg.norm(G, 2)


def test_the_model_is_called_once():
    params, batch, _, _ = problem_of(squares)
    calls = []

    def model():
        calls.append("model")
        return model_of(params, batch)

    def loss(outputs):
        calls.append("loss")
        return squares(outputs, batch)

    estimate_spectrum(ModelLoss(model, loss), params, **ALL)
    assert calls == ["model", "loss"]


def test_outputs_of_any_shape_with_constants_and_a_penalty_among_them():
    """A dict of tuples: residuals that are derivatives, a parameter itself, what is no tensor or has no graph."""
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    params, x = list(net.parameters()), torch.linspace(0, 2, 9, dtype=torch.float64)[:, None]

    def residuals():
        at = x.clone().requires_grad_()
        (du,) = torch.autograd.grad(net(at).sum(), at, create_graph=True)
        return du - x.cos()

    def model():
        return {"pde": (residuals(), x), "start": net(x[:1]), "decay": [params[0], 0.3], "unused": net(x[3:])}

    def loss(outputs):
        (inside, places), (weight, strength) = outputs["pde"], outputs["decay"]
        assert not places.requires_grad and strength == 0.3
        return inside.square().mean() + 5 * outputs["start"].square().sum() + strength * weight.square().sum()

    J, S = jacobian(residuals, params), jacobian(lambda: net(x[:1]), params)
    decayed = np.r_[np.ones(params[0].numel()), np.zeros(len(J[0]) - params[0].numel())]
    G = 2 * J.T @ J / len(x) + 2 * 5 * S.T @ S + 2 * 0.3 * np.diag(decayed)
    spectrum = estimate_spectrum(ModelLoss(model, loss), params, **ALL | {"k": 5})
    assert_pairs(spectrum, G, 5, 0, 1e-7)

    # Frozen ones take no part; nor does what the outputs do not depend on.
    params[1].requires_grad_(False)
    unused = torch.ones(2, dtype=torch.float64, requires_grad=True)
    where = np.r_[0:4, 8 : len(G)]
    rest = estimate_spectrum(ModelLoss(model, loss), [unused, *params], **ALL | {"k": 4})
    np.testing.assert_allclose(rest.eigenvalues, extreme(G[np.ix_(where, where)], 4, 0)[0], rtol=1e-6)
    assert rest.eigenvectors[0].abs().max() < 1e-12 and (rest.eigenvectors[2] == 0).all()


@pytest.mark.parametrize("name", MODELS)
def test_layers_of_every_kind(name):
    """Of ½ c² with one output c the matrix is g gᵀ, with g the gradient of c: whatever the layers are."""
    twin, its_loss = made(name)  # a pass may write over buffers
    torch.manual_seed(11)
    its_loss().backward()
    g = torch.cat([torch.zeros(p.numel()) if p.grad is None else p.grad.reshape(-1) for p in twin.parameters()]).numpy()
    model, loss = made(name)
    torch.manual_seed(11)
    split = ModelLoss(loss, lambda c: 0.5 * c**2)
    spectrum = estimate_spectrum(split, list(model.parameters()), k=1, num_matvecs=3, curvature="gauss_newton")
    np.testing.assert_allclose(spectrum.eigenvalues[0], g @ g, rtol=1e-6)
    np.testing.assert_allclose(abs(rows_of(spectrum)[0] @ g), np.linalg.norm(g), rtol=1e-6)


def test_dropout_in_a_sequence_of_closures_is_one_symmetric_operator():
    """Every product sees the masks that the closures drew for the first, one after the other."""
    model, _ = made("dropout")
    params, (x, _) = list(model.parameters()), batch_of("dropout")
    whole = ModelLoss(lambda: model(x), lambda outputs: outputs.square().mean())

    def both():
        torch.manual_seed(11)
        return torch.cat([model(x), model(x)])

    J = jacobian(both, params)
    torch.manual_seed(11)
    spectrum = estimate_spectrum([whole, whole], params, **ALL | {"num_matvecs": len(J[0])})
    assert_pairs(spectrum, 2 * J.T @ J / len(J), 2, 0, 1e-8)


def test_a_loss_that_is_linear_in_the_outputs_has_none():
    params, batch, _, _ = problem_of(squares)
    loss = ModelLoss(lambda: model_of(params, batch), lambda outputs: outputs.sum())
    for closure in (loss, [loss, loss]):
        found = estimate_spectrum(closure, params, **ALL)
        assert not found.accepted.any() and (found.eigenvalues == 0).all()


@pytest.mark.parametrize("by_itself", [True, False])
@pytest.mark.parametrize("kind", ["fosi", "lbfgs"])
def test_optimizers_estimate_it(kind, by_itself):
    params, _, found, G = problem_of(squares)
    given = {**ALL, "warmup": 0, "refresh_every": 100, "curvature_loss": found if by_itself else None}
    make = {"fosi": lambda p: FOSI(torch.optim.SGD(p, lr=0.01), **given), "lbfgs": lambda p: FosiLBFGS(p, **given)}
    opt = make[kind](params)

    def closure():
        opt.zero_grad()
        value = found()
        value.backward()
        return value

    if not by_itself:
        closure()
        before = [p.grad.clone() for p in params]
        opt.refresh(found)
        assert all(torch.equal(p.grad, g) for p, g in zip(params, before, strict=True))
    value = opt.step(closure)
    assert_pairs(opt.spectrum, G, 2, 0, 1e-8)
    assert found() < value
    assert "curvature='gauss_newton'" in repr(opt)


def test_one_newton_step_with_it_solves_least_squares():
    """Linear outputs: the matrix is the Hessian, and one step of α = 1 in its whole range is at the minimum."""
    torch.manual_seed(0)
    x, y = torch.randn(20, 4, dtype=torch.float64), torch.randn(20, dtype=torch.float64)
    w = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    loss = ModelLoss(lambda: x @ w, lambda outputs: (outputs - y).square().mean())
    given = {"k": 4, "num_matvecs": 4, "alpha": 1.0, "warmup": 0, "precision": "float64", "curvature": "gauss_newton"}
    opt = FOSI(torch.optim.SGD([w], lr=0.1), curvature_loss=loss, **given)
    loss().backward()
    opt.step()
    np.testing.assert_allclose(w.detach(), np.linalg.lstsq(x.numpy(), y.numpy(), rcond=None)[0], atol=1e-12)


def test_a_diagnosis_of_it():
    """From closures of its own kind, or from batches of which a function makes one each."""
    params, batch, _, _ = problem_of(squares)
    halves = [{name: x[i::2] for name, x in batch.items()} for i in range(2)]
    given = {"learning_rate": 0.01, "base": "heavy-ball", **ALL}
    closures = [split(params, half) for half in halves]
    listed = diagnose(closures, params, **given)
    made_of = diagnose(functools.partial(split, params), params, halves, **given)
    expected = estimate_spectrum(closures, params, **ALL)
    hessian = diagnose(closures, params, **given | {"curvature": "hessian"})
    for found in (listed, made_of):
        np.testing.assert_allclose(found.eigenvalues, expected.eigenvalues, rtol=1e-9)
        assert found.smallest > -1e-9 > 1e3 * hessian.smallest
    with pytest.raises(ValueError, match=r"'gauss_newton' needs closure\(batch\)=fosi\.torch\.ModelLoss"):
        diagnose(lambda half: split(params, half)(), params, halves, **given)


class Once(torch.autograd.Function):
    """x², whose backward pass must not be differentiated."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**2

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, ct):
        return 2 * ct * ctx.saved_tensors[0]


def _backwards(w):
    loss = (w**2).sum()
    loss.backward()
    return loss


def _square(outputs):
    return outputs.square().sum()


# What model_fn makes of w, loss_fn, the error, and what it says.
WRONG = {
    "detached": (lambda w: w.detach(), _square, ValueError, "model_fn returned nothing that has a graph"),
    "no tensor": (lambda w: 3.0, lambda outputs: outputs, ValueError, "model_fn returned nothing that has a graph"),
    "complex": (lambda w: w * 1j, lambda o: o.abs().sum(), ValueError, r"real numbers, got \[torch.complex64\]"),
    "once": (Once.apply, _square, ValueError, "once_differentiable"),
    "backward": (_backwards, _square, ValueError, "without calling backward"),
    "other outputs": (lambda w: w + 1, lambda outputs: torch.ones(()), ValueError, "loss_fn returned a loss without a"),
    "once, in the loss": (
        lambda w: w + 1,
        lambda o: Once.apply(o).sum() + o.sum() ** 2,
        ValueError,
        "marked @once_diff",
    ),
    "many numbers": (lambda w: w + 1, lambda outputs: outputs**2, ValueError, r"loss_fn must return one real number"),
    "a number": (lambda w: w + 1, lambda outputs: 3.0, TypeError, "loss_fn must return the loss as a tensor"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_loss_that_will_not_do_is_named(name):
    model, loss, error, message = WRONG[name]
    w = torch.ones(3, requires_grad=True)
    with pytest.raises(error, match=message):
        estimate_spectrum(ModelLoss(lambda: model(w), loss), [w], k=1, curvature="gauss_newton")


def test_a_loss_that_passes_its_outputs_by_is_named():
    w = torch.ones(3, requires_grad=True)
    with pytest.raises(ValueError, match="does not depend on what model_fn returned"):
        estimate_spectrum(ModelLoss(lambda: w + 1, lambda outputs: _square(w)), [w], k=1, curvature="gauss_newton")


def test_losses_that_write_over_their_outputs_or_hand_them_on():
    params, batch, found, G = problem_of(squares)

    def in_place(outputs):
        return outputs.sub_(batch["y"]).square_().sum() / len(batch["y"])

    assert_pairs(estimate_spectrum(ModelLoss(found.model_fn, in_place), params, **ALL), G, 2, 0, 1e-8)
    handed_on = estimate_spectrum(ModelLoss(found, lambda outputs: outputs), params, **ALL)  # linear: no curvature
    assert not handed_on.accepted.any()


def test_outputs_that_do_not_move_with_a_parameter():
    w, v = (torch.ones(3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    loss = ModelLoss(lambda: (w * torch.arange(1.0, 4), torch.round(v)), lambda o: _square(o[0]) + _square(o[1]))
    found = estimate_spectrum(loss, [w, v], k=3, num_matvecs=6, curvature="gauss_newton")
    np.testing.assert_allclose(found.eigenvalues, [18, 8, 2], rtol=1e-5)
    assert found.eigenvectors[1].abs().max() < 1e-6
    still = ModelLoss(lambda: torch.round(v), _square)
    assert not estimate_spectrum(still, [v], k=1, curvature="gauss_newton").accepted.any()


def test_parameters_of_another_model_are_named():
    w, other = torch.ones(3, requires_grad=True), torch.ones(2, requires_grad=True)
    with pytest.raises(ValueError, match="does not depend on any of the parameters"):
        estimate_spectrum(ModelLoss(lambda: w + 1, _square), [other], k=1, curvature="gauss_newton")


@pytest.mark.parametrize("make", [lambda w, **given: FOSI(torch.optim.SGD([w], lr=0.1), **given), FosiLBFGS])
def test_a_plain_closure_is_refused_and_nothing_changes(make):
    w = torch.ones(3, requires_grad=True)
    given = [w] if make is FosiLBFGS else w
    needs = r"'gauss_newton' needs {}=fosi.torch.ModelLoss\(model_fn, loss_fn\)"
    with pytest.raises(ValueError, match=needs.format("curvature_loss")):
        make(given, curvature="gauss_newton", k=1, curvature_loss=lambda: _square(w))
    with pytest.raises(ValueError, match="curvature must be one of 'hessian', 'gauss_newton', got 'fisher'"):
        make(given, curvature="fisher", k=1)
    opt = make(given, curvature="gauss_newton", k=1, warmup=0)
    before = values([w])
    with pytest.raises(ValueError, match=needs.format("closure")):
        opt.refresh([lambda: _square(w)])
    assert opt.spectrum is None and torch.equal(w, before[0])
