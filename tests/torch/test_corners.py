"""Corners of training scripts in which a step or a refresh once went wrong without a word."""

import logging

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.nn import functional as F

from fosi.torch import FOSI, estimate_spectrum
from tests import oracle
from tests.cases import BETA


def _grouped(x):
    return nn.Sequential(nn.Conv2d(4, 4, 3, groups=2), nn.Tanh(), nn.Conv2d(4, 4, 3, groups=4)).to(x.dtype)


def _images(dtype=torch.float64):
    return torch.randn(2, 4, 8, 8, dtype=dtype, generator=torch.Generator().manual_seed(0))


def _largest(loss, params):
    """The largest eigenvalue of the dense Hessian, by torch's own second derivatives."""
    grads = torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss(), params, create_graph=True)])
    rows = [torch.autograd.grad(g, params, retain_graph=True, materialize_grads=True) for g in grads]
    dense = torch.stack([torch.cat([r.reshape(-1) for r in row]) for row in rows])
    return torch.linalg.eigvalsh((dense + dense.T) / 2)[-1]


def test_every_checkpoint_of_an_optimizer_without_state_is_harmless():
    """SGD without momentum never has any, and distributed checkpoints then take a step to have it made."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    loss = lambda: (model(torch.ones(4, 3)) ** 2).mean()  # noqa: E731
    refreshed = []

    def curvature():
        refreshed.append(True)
        return loss()

    opt = FOSI(
        torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1),
        k=2,
        warmup=0,
        refresh_every=2,
        curvature_loss=curvature,
    )
    for _ in range(2):
        opt.zero_grad()
        loss().backward()
        opt.step()
    opt.zero_grad()
    before = [p.detach().clone() for p in model.parameters()]
    saved = get_optimizer_state_dict(model, opt)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert len(refreshed) == 1 and opt.refresh_due
    assert int(opt.state_dict()["state"][0]["fosi_step"]) == 2
    assert "fosi_basis" in saved["state"]["weight"]


def test_convolutions_called_by_keyword():
    weight = torch.randn(4, 1, 3, 3, dtype=torch.float64, requires_grad=True)
    loss = lambda: (F.conv2d(input=_images(), weight=weight, groups=4).tanh() ** 2).sum()  # noqa: E731
    found = estimate_spectrum(loss, [weight], k=1, num_matvecs=36, precision="float64")
    torch.testing.assert_close(found.eigenvalues[0], _largest(loss, [weight]), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("inner", ["penalty", "vmap"])
def test_convolutions_in_a_loss_that_takes_derivatives_itself(inner):
    torch.manual_seed(0)
    x = _images()
    model = _grouped(x)
    params = list(model.parameters())

    def loss():
        if inner == "vmap":
            return torch.func.vmap(lambda one: model(one[None]).square().mean())(x).mean()
        inputs = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(inputs).square().sum(), inputs, create_graph=True)
        return slope.square().mean()

    found = estimate_spectrum(loss, params, k=1, num_matvecs=40, precision="float64")
    torch.testing.assert_close(found.eigenvalues[0], _largest(loss, params), rtol=1e-6, atol=1e-8)


def test_convolutions_under_an_autocast_of_the_models_own():
    torch.manual_seed(0)
    x = _images(torch.float32)
    model = nn.Sequential(nn.Linear(8, 8), *_grouped(x))

    def loss():
        with torch.autocast("cpu", torch.bfloat16):
            out = model(x)
        return out.float().square().mean()

    assert torch.isfinite(estimate_spectrum(loss, model, k=1).eigenvalues).all()


def test_modules_that_share_a_buffer_go_on_sharing_it():
    class Gain(nn.Module):
        def __init__(self, gain):
            super().__init__()
            self.register_buffer("gain", gain)

    gain = torch.ones(())
    writer, reader = Gain(gain), Gain(gain)
    w = torch.ones(2, requires_grad=True)

    def loss():
        writer.gain.mul_(2)
        return (reader.gain * w**2).sum()

    found = estimate_spectrum(loss, [w], k=1, model=nn.ModuleList([writer, reader]))
    assert found.eigenvalues[0].item() == pytest.approx(4.0)
    assert gain.item() == 1.0


def test_a_function_with_vjp_for_a_backward_pass_is_welcome():
    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x**3

        @staticmethod
        def vjp(ctx, grad):
            return 3 * grad * ctx.saved_tensors[0] ** 2

    w = torch.tensor([2.0], requires_grad=True)
    assert estimate_spectrum(lambda: Cube.apply(w).sum(), [w], k=1).eigenvalues.item() == pytest.approx(12.0)


def test_each_group_has_its_own_kind_of_weight_decay():
    """At a gradient of zero nothing but the decay moves: by lr w θ where it is apart, by lr where Adam divides it."""
    coupled, apart = torch.tensor([2.0], requires_grad=True), torch.tensor([2.0], requires_grad=True)
    scales = torch.tensor([5.0])
    groups = [{"params": [coupled]}, {"params": [apart], "decoupled_weight_decay": True}]
    other = torch.tensor([1.0], requires_grad=True)
    # eps keeps Adam from making steps of rounding errors.
    base = torch.optim.Adam([*groups, {"params": [other]}], lr=0.1, weight_decay=1.0, eps=1e-4)
    opt = FOSI(base, k=1, accept="all")
    opt.refresh(lambda: 0.5 * (scales * other**2).sum() + 0 * (coupled + apart).sum())
    for p in (coupled, apart, other):
        p.grad = torch.zeros(1)
    opt.step()
    assert apart.item() == pytest.approx(1.8, abs=1e-3)
    assert coupled.item() == pytest.approx(1.9, abs=1e-3)


def test_learning_rates_of_groups_that_part_on_the_way_keep_the_momentum():
    """From one momentum of the whole gradient to one in each part: the paper's step before and after."""
    scales = np.array([100.0, 40.0, 3.0, 1.0])
    first, second = (torch.tensor([1.0, -2.0, 1.5, 0.5][i : i + 2], dtype=torch.float64) for i in (0, 2))
    params = [first.requires_grad_(), second.requires_grad_()]
    curvature = torch.tensor(scales)
    loss = lambda: 0.5 * (curvature * torch.cat(params) ** 2).sum()  # noqa: E731
    base = torch.optim.SGD([{"params": [p]} for p in params], lr=0.004, momentum=BETA)
    opt = FOSI(base, k=2, alpha=0.02, warmup=0, refresh_every=10**6, accept="all", lr_rule=None, precision="float64")

    rates = [np.full(4, 0.004) if t < 5 else np.array([0.004, 0.004, 0.001, 0.001]) for t in range(12)]
    paper = oracle.Linear(lambda t: rates[t], oracle.HeavyBallMomentum(BETA))
    expected = oracle.Fosi(paper, k=2, alpha=0.02, newton=oracle.HeavyBallMomentum(BETA))
    path = expected.optimize(
        [1.0, -2.0, 1.5, 0.5], lambda t, theta: scales * theta, lambda t, theta: np.diag(scales), 12
    )
    for t in range(12):
        base.param_groups[1]["lr"] = rates[t][2]
        opt.zero_grad()
        loss().backward()
        if opt.refresh_due:
            opt.refresh(loss)
        opt.step()
        np.testing.assert_allclose(torch.cat(params).detach(), path[t + 1], rtol=1e-9, atol=1e-12)


def test_the_rule_for_the_learning_rate_follows_a_loaded_checkpoint():
    def made(momentum):
        w = torch.tensor([1.0, 1.0, 1.0], requires_grad=True)
        opt = FOSI(torch.optim.SGD([w], lr=0.01, momentum=momentum), k=2, max_lr_scale=np.inf)
        return w, opt

    scales = torch.tensor([9.0, 4.0, 1.0])
    w, opt = made(0.0)
    opt.load_state_dict(made(0.9)[1].base.state_dict())
    opt.refresh(lambda: 0.5 * (scales * w**2).sum())
    assert opt.lr_scale == pytest.approx(16 / 9, rel=1e-4)  # Heavy-Ball's; gradient descent's would be 2


def test_sparse_gradients_are_named_also_where_there_is_a_spectrum():
    table = nn.Embedding(4, 2, sparse=True)
    opt = FOSI(torch.optim.SGD(table.parameters(), lr=0.1), k=1, warmup=0, accept="all")
    dense = table.weight
    opt.refresh(lambda: (dense**2).sum())
    table(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(ValueError, match="sparse"):
        opt.step()


def test_hooks_on_parameters_are_warned_of(caplog):
    w = torch.ones(3, requires_grad=True)
    w.register_hook(lambda grad: grad.clamp(-1, 1))
    opt = FOSI(torch.optim.SGD([w], lr=0.1), k=1, warmup=0)
    with caplog.at_level(logging.WARNING, "fosi"):
        opt.refresh(lambda: (w**2).sum())
    assert "hooks" in caplog.text
