"""FOSI as the optimizer of a DeepXDE model on its PyTorch backend, with no change to DeepXDE."""

import copy
import functools
import os

import numpy as np
import pytest
import torch
from torch import nn

from fosi.torch import FOSI, FosiLBFGS, estimate_spectrum
from fosi.torch.deepxde import curvature_loss
from tests.torch.dense import jacobian

SETTINGS = {"k": 3, "alpha": 0.1, "eps": 1.0, "warmup": 2, "refresh_every": 4}


@pytest.fixture(scope="module")
def dde():
    """DeepXDE on its PyTorch backend, which it chooses once a process, and without the default device it sets."""
    before = os.environ.get("DDE_BACKEND")
    os.environ["DDE_BACKEND"] = "pytorch"
    try:
        deepxde = pytest.importorskip("deepxde", reason="DeepXDE is not installed: pip install deepxde")
    finally:
        os.environ.pop("DDE_BACKEND") if before is None else os.environ.update(DDE_BACKEND=before)
    torch.set_default_device(None)
    return deepxde


def residual(x, y):
    """Of u″ = −π² sin(πx)."""
    (dy,) = torch.autograd.grad(y, x, torch.ones_like(y), create_graph=True)
    (d2y,) = torch.autograd.grad(dy, x, torch.ones_like(dy), create_graph=True)
    return d2y + np.pi**2 * torch.sin(np.pi * x)


class Problem:
    """u″ = −c π² sin(πx) on [0, 1] with u(0) = u(1) = 0, as DeepXDE's users write it."""

    def __init__(self, dde, variable=None, **options):
        dde.config.set_random_seed(0)
        # Not symmetric around 0: a gradient would be 0 there but for rounding, which Adam makes whole steps of.
        geometry = dde.geometry.Interval(0, 1)

        def pde(x, y, auxiliary=1.0):
            force = auxiliary if variable is None else variable
            second = dde.grad.hessian(y, x)
            second = second[0] if isinstance(second, tuple) else second  # in forward mode a function comes with it
            return second + force * np.pi**2 * torch.sin(np.pi * x)

        boundary = dde.icbc.DirichletBC(geometry, lambda x: 0, lambda x, on: on)
        if "auxiliary_var_function" not in options:
            self.pde = lambda x, y: pde(x, y)
        else:
            self.pde = lambda x, y, auxiliary: pde(x, y, auxiliary)
        settings = {"train_distribution": "pseudo", "solution": lambda x: np.sin(np.pi * x), "num_test": 5} | options
        self.data = dde.data.PDE(geometry, self.pde, boundary, 10, 2, **settings)
        self.net = dde.nn.FNN([1, 8, 8, 1], "tanh", "Glorot uniform")
        self.model = dde.Model(self.data, self.net)

    def optimizer(self, *variables, loss=None, **settings):
        base = torch.optim.Adam([*self.net.parameters(), *variables], lr=1e-2)
        loss = curvature_loss(self.model) if loss is None else loss
        return FOSI(base, model=self.net, curvature_loss=loss, **SETTINGS | settings)


def recorder(dde, optimizer):
    """What DeepXDE's step left behind, and which points it saw."""

    class Recorder(dde.callbacks.Callback):
        def init(self):
            self.values, self.points, self.rates = [], [], []

        def on_batch_end(self):
            self.values.append(flat(p for group in optimizer.param_groups for p in group["params"]))
            self.points.append(self.model.train_state.X_train)
            self.rates.append(optimizer.param_groups[0]["lr"])

    return Recorder()


def flat(params):
    return torch.cat([p.detach().reshape(-1).clone() for p in params])


def by_hand(net, points, weights=(1.0, 1.0)):
    """The losses as anyone would write them without DeepXDE; the first two points are the boundary's."""

    def loss(i):
        x = torch.as_tensor(points[i]).requires_grad_()
        y = net(x)
        return weights[0] * residual(x, y)[2:].square().mean() + weights[1] * y[:2].square().mean()

    return loss


def loop(net, optimizer, loss, steps):
    values = []
    for i in range(steps):
        optimizer.zero_grad()
        loss(i).backward()
        if getattr(optimizer, "refresh_due", False):  # a bare optimizer never has one
            optimizer.refresh(lambda i=i: loss(i))
        optimizer.step()
        values.append(flat(net.parameters()))
    return values


def same(ours, theirs):
    torch.testing.assert_close(torch.stack(ours), torch.stack(theirs), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("resampled", [False, True], ids=["fixed points", "points drawn anew"])
def test_it_trains_as_a_loop_written_by_hand(dde, resampled):
    problem, weights = Problem(dde), [1.0, 25.0]
    net = copy.deepcopy(problem.net)
    optimizer = problem.optimizer()
    record = recorder(dde, optimizer)
    callbacks = [record, dde.callbacks.PDEPointResampler(period=3)] if resampled else [record]
    problem.model.compile(optimizer, loss_weights=weights, verbose=0)
    problem.model.train(iterations=12, callbacks=callbacks, verbose=0)
    assert len({x.tobytes() for x in record.points}) == (4 if resampled else 1)

    base = torch.optim.Adam(net.parameters(), lr=1e-2)
    alone, hand = copy.deepcopy((net, base)), FOSI(base, model=net, **SETTINGS)
    same(record.values, loop(net, hand, by_hand(net, record.points, weights), 12))
    assert optimizer.spectrum.accepted.all()
    torch.testing.assert_close(optimizer.spectrum.eigenvalues, hand.spectrum.eigenvalues, rtol=1e-3, atol=1e-3)
    # Not that all would agree: the base by itself goes elsewhere once there is a spectrum.
    adam = loop(*alone, by_hand(alone[0], record.points, weights), 12)
    same(record.values[:2], adam[:2])
    assert (record.values[-1] - adam[-1]).abs().max() > 1e-2


def test_the_loss_is_the_one_deepxde_reports(dde):
    problem = Problem(dde, auxiliary_var_function=lambda x: 1 + x**2, anchors=np.array([[0.25]]))
    loss, model = curvature_loss(problem.model), problem.model
    model.compile("adam", lr=1e-2, loss="MAE", loss_weights=[2.0, 30.0], verbose=0)
    model.train(iterations=2, verbose=0)
    before = loss().item()
    assert before == pytest.approx(model.train_state.loss_train.sum(), rel=1e-6)

    problem.data.add_anchors(np.linspace(0.1, 0.9, 7)[:, None])
    model.train(iterations=0, verbose=0)
    after = loss().item()
    assert after == pytest.approx(np.sum(model.train_state.loss_train), rel=1e-6) != before

    model.compile("adam", lr=1e-2, verbose=0)  # another loss, no weights: the same function sees them
    model.train(iterations=0, verbose=0)
    assert loss().item() == pytest.approx(np.sum(model.train_state.loss_train), rel=1e-6) != after


def test_external_variables_are_trained_with_the_net(dde, caplog):
    variable = dde.Variable(3.0)
    problem = Problem(dde, variable)
    size = flat(problem.net.parameters()).numel()
    optimizer = problem.optimizer(variable)
    problem.model.compile(optimizer, external_trainable_variables=[variable], verbose=0)
    problem.model.train(iterations=8, verbose=0)
    assert variable.item() != 3.0
    vectors = optimizer.spectrum.eigenvectors
    assert sum(v[0].numel() for v in vectors) == size + 1
    assert vectors[-1].abs().max() > 1e-3  # the residual depends on it
    assert not caplog.records


def test_what_deepxde_leaves_out_without_a_word_is_said_once(dde, caplog):
    variable = dde.Variable(3.0)
    problem = Problem(dde, variable)
    problem.net.regularizer = ("l2", 1e-4)
    problem.model.compile(problem.optimizer(), external_trainable_variables=[variable], verbose=0)
    problem.model.train(iterations=8, verbose=0)
    assert variable.item() == 3.0
    about_variables, about_decay = (record.getMessage() for record in caplog.records)
    assert "external_trainable_variables [0]" in about_variables
    assert "weight_decay=0.0001" in about_decay


def test_the_decay_of_compile_reaches_the_base(dde):
    problem = Problem(dde)
    optimizer = problem.optimizer()
    record = recorder(dde, optimizer)
    problem.model.compile(optimizer, decay=("step", 4, 0.5), verbose=0)
    problem.model.train(iterations=9, callbacks=[record], verbose=0)
    assert record.rates == pytest.approx([0.01] * 3 + [0.005] * 4 + [0.0025] * 2)
    assert optimizer.spectrum is not None


def test_lbfgs_afterwards_and_back(dde, monkeypatch):
    problem = Problem(dde)
    model, optimizer = problem.model, problem.optimizer()
    model.compile(optimizer, verbose=0)
    model.train(iterations=8, verbose=0)
    first = model.train_state.loss_train.sum()
    # Its set_LBFGS_options(maxiter=30) would still take 1000, as many as one of DeepXDE's own steps.
    monkeypatch.setitem(dde.optimizers.LBFGS_options, "iter_per_step", 30)
    monkeypatch.setitem(dde.optimizers.LBFGS_options, "maxiter", 30)
    model.compile("L-BFGS", verbose=0)
    model.train(verbose=0)
    second = model.train_state.loss_train.sum()
    assert second < 0.1 * first
    model.compile(optimizer, verbose=0)
    model.train(iterations=4, verbose=0)
    assert model.opt is optimizer and np.isfinite(model.train_state.loss_train).all()


def test_fosi_around_lbfgs_afterwards(dde, caplog):
    """A closure of DeepXDE's is called once a trial; estimates are of the loss on the points of the iteration."""
    problem = Problem(dde)
    model = problem.model
    model.compile(torch.optim.Adam(problem.net.parameters(), lr=1e-2), loss_weights=[1.0, 25.0], verbose=0)
    model.train(iterations=8, verbose=0)
    net = copy.deepcopy(problem.net)
    settings = {"k": 3, "warmup": 2, "refresh_every": 5, "max_iter": 6, "history_size": 8}
    variable = torch.nn.Parameter(torch.ones(1))
    model.compile(
        FosiLBFGS(problem.net.parameters(), model=problem.net, curvature_loss=curvature_loss(model), **settings),
        loss_weights=[1.0, 25.0],
        external_trainable_variables=[variable],
        verbose=0,
    )
    model.train(iterations=3, verbose=0)
    assert model.opt._count == 18 and model.opt._refreshes == 4
    assert "external_trainable_variables [0]" in caplog.text

    loss = by_hand(net, [model.train_state.X_train], (1.0, 25.0))
    hand = FosiLBFGS(net.parameters(), model=net, curvature_loss=lambda: loss(0), **settings)

    def closure():
        hand.zero_grad()
        value = loss(0)
        value.backward()
        return value

    before = loss(0).item()
    for _ in range(3):
        hand.step(closure)
    same([flat(problem.net.parameters())], [flat(net.parameters())])
    torch.testing.assert_close(model.opt.spectrum.eigenvalues, hand.spectrum.eigenvalues, rtol=1e-2, atol=1e-2)
    assert loss(0).item() < 0.05 * before


def test_gauss_newtons_matrix_is_of_the_residuals(dde):
    """Dense, from the residuals written by hand; the points, weights and loss functions of now."""
    dde.config.set_default_float("float64")
    try:
        problem = Problem(dde)
        model, params = problem.model, list(problem.net.parameters())
        model.compile(problem.optimizer(curvature="gauss_newton", warmup=0), loss_weights=[2.0, 25.0], verbose=0)
        model.train(iterations=1, verbose=0)
        x = torch.as_tensor(model.train_state.X_train)

        def inside():
            at = x.clone().requires_grad_()
            return residual(at, problem.net(at))[2:]

        def ends():
            return problem.net(x[:2])

        estimate = functools.partial(estimate_spectrum, curvature_loss(model), params, k=3, num_matvecs=30)
        found = estimate(precision="float64", curvature="gauss_newton")
        J, B = (torch.tensor(jacobian(outputs, params)) for outputs in (inside, ends))
        G = 2 * 2.0 * J.T @ J / len(J) + 2 * 25.0 * B.T @ B / len(B)
        torch.testing.assert_close(found.eigenvalues, torch.linalg.eigvalsh(G)[-3:].flip(0), rtol=1e-6, atol=0)
        assert model.opt.spectrum.accepted.any()
        assert "losses_train" not in vars(problem.data)
        hessian = estimate(precision="float64")
        assert (hessian.eigenvalues - found.eigenvalues).abs().max() > 1e-3 * found.eigenvalues[0]
        # Two loss functions, the second of them written by the user, and no weights.
        model.compile("adam", lr=1e-3, loss=["MSE", lambda wanted, y: (y - wanted).pow(2).sum()], verbose=0)
        found = estimate(curvature="gauss_newton")
        top = torch.linalg.eigvalsh(2 * J.T @ J / len(J) + 2 * B.T @ B)[-1]
        torch.testing.assert_close(found.eigenvalues[0].double(), top, rtol=1e-5, atol=0)
    finally:
        dde.config.set_default_float("float32")


def test_a_loss_that_is_not_of_residuals_is_refused(dde):
    problem = Problem(dde)
    original = problem.data.losses

    def losses(*args, **kwargs):
        return [*original(*args, **kwargs), 1e-3 * sum(p.square().sum() for p in problem.net.parameters())]

    problem.data.losses = losses
    settings = {"curvature": "gauss_newton", "warmup": 0}
    problem.model.compile(problem.optimizer(**settings), verbose=0)
    with pytest.raises(ValueError, match="of the 3 terms of PDE some are not; take curvature='hessian'"):
        problem.model.train(iterations=1, verbose=0)
    assert "losses_train" not in vars(problem.data)
    problem.model.compile(problem.optimizer(warmup=0), verbose=0)
    problem.model.train(iterations=1, verbose=0)
    assert problem.model.opt.spectrum.accepted.any()


def test_a_restored_checkpoint_goes_on_as_if_there_had_been_no_break(dde, tmp_path):
    whole = Problem(dde)
    whole.model.compile(whole.optimizer(), verbose=0)
    whole.model.train(iterations=7, verbose=0)
    path = whole.model.save(str(tmp_path / "model"))
    whole.model.train(iterations=8, verbose=0)

    again = Problem(dde)
    again.model.compile(again.optimizer(), verbose=0)
    again.model.train(iterations=8, model_restore_path=path, verbose=0)
    assert torch.equal(flat(again.net.parameters()), flat(whole.net.parameters()))


def test_inputs_of_two_parts(dde):
    # A DeepONet on a Cartesian product: a tuple of arrays, and a batch of its own for every iteration.
    dde.config.set_random_seed(0)
    functions, places = np.random.rand(12, 4).astype(np.float32), np.linspace(0, 1, 5, dtype=np.float32)[:, None]
    outputs = (functions.sum(axis=1, keepdims=True) * np.sin(places.T)).astype(np.float32)
    data = dde.data.TripleCartesianProd((functions, places), outputs, (functions, places), outputs)
    net = dde.nn.DeepONetCartesianProd([4, 8, 8], [1, 8, 8], "tanh", "Glorot normal")
    model = dde.Model(data, net)
    optimizer = FOSI(torch.optim.Adam(net.parameters(), lr=1e-2), curvature_loss=curvature_loss(model), **SETTINGS)
    model.compile(optimizer, verbose=0)
    model.train(iterations=7, batch_size=4, verbose=0)
    assert model.train_state.X_train[0].shape == (4, 4)
    found = estimate_spectrum(curvature_loss(model), net, k=3)
    assert found.accepted.any() and optimizer.spectrum.accepted.any()


def test_forward_mode_differentiation(dde, monkeypatch):
    spectra = []
    for mode in ("reverse", "forward"):
        monkeypatch.setattr(dde.config, "autodiff", mode)
        problem = Problem(dde)
        optimizer = problem.optimizer()
        problem.model.compile(optimizer, verbose=0)
        problem.model.train(iterations=3, verbose=0)
        spectra.append(optimizer.spectrum.eigenvalues)
    torch.testing.assert_close(*spectra, rtol=1e-3, atol=1e-3)


# What needs no DeepXDE.


class State:
    X_train = y_train = train_aux_vars = None


class Model:
    """What a deepxde.Model has that the adapter reads."""

    def __init__(self):
        self.net = nn.Linear(2, 1)
        self.train_state, self.opt, self.outputs_losses_train = State(), None, None
        self.external_trainable_variables = []

    def compile(self, optimizer):
        self.opt = optimizer

        def losses(x, y, aux):
            return None, torch.stack([((self.net(x) - y) * aux).square().mean()] * 2)

        self.outputs_losses_train = losses


def test_all_is_read_when_the_loss_is_asked_for():
    model = Model()
    loss = curvature_loss(model)
    with pytest.raises(RuntimeError, match=r"model\.compile\(optimizer\)"):
        loss()
    model.compile(FOSI(torch.optim.SGD(model.net.parameters(), lr=0.1), curvature_loss=loss, k=1, warmup=0))
    with pytest.raises(RuntimeError, match=r"model\.train\(\) sets them"):
        loss()
    for aux in (1.0, 2.0):
        model.train_state.X_train, model.train_state.y_train = torch.ones(3, 2), torch.zeros(3, 1)
        model.train_state.train_aux_vars = aux
        expected = 2 * (aux * model.net(torch.ones(1, 2))).square()
        assert loss().item() == pytest.approx(expected.item(), rel=1e-6)
    loss().backward()
    model.opt.step()
    assert model.opt.spectrum.eigenvalues[0].item() == pytest.approx(2 * 2 * 4 * 3, rel=1e-4)  # 2 aux² Σ over (x, 1)


def test_other_things_than_a_model_are_named():
    with pytest.raises(TypeError, match=r"deepxde\.Model, got Linear"):
        curvature_loss(nn.Linear(2, 1))
    model = Model()
    model.net = object()
    with pytest.raises(TypeError, match=r"got object; choose DeepXDE's backend with DDE_BACKEND=pytorch"):
        curvature_loss(model)
