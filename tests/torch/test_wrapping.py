"""What others do to an optimizer they were handed: move its model afterwards, or put it into wrappers of their own."""

import copy

import pytest
import torch

from fosi.torch import FOSI


def problem(dtype=torch.float64):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 1)).to(dtype)
    x = torch.randn(32, 5, dtype=dtype) * torch.tensor([10.0, 3.0, 1.0, 1.0, 0.1], dtype=dtype)
    return model, lambda: (model(x) - 1).square().mean()


def train(opt, loss_fn, steps):
    for _ in range(steps):
        opt.zero_grad()
        loss_fn().backward()
        if opt.refresh_due:
            opt.refresh(loss_fn)
        opt.step()
    return [p.detach().clone() for group in opt.param_groups for p in group["params"]]


@pytest.mark.parametrize("by", ["refresh", "load_state_dict"])
def test_a_model_cast_after_the_optimizer_was_built(by):
    # Accelerate moves the model to its device in prepare(), the optimizer long built; a dtype shows the same on a CPU.
    options = {"k": 2, "warmup": 0, "refresh_every": 3}
    model, loss_fn = problem()
    expected = train(FOSI(torch.optim.Adam(model.parameters(), lr=0.01), **options), loss_fn, 5)

    model, loss_fn = problem()
    opt = FOSI(torch.optim.Adam(model.float().parameters(), lr=0.01), **options)
    fresh = problem()[0]
    with torch.no_grad():
        for p, q in zip(model.double().parameters(), fresh.parameters(), strict=True):
            p.copy_(q)
    if by == "load_state_dict":
        opt.load_state_dict(copy.deepcopy(opt.state_dict()))
    for p, q in zip(train(opt, loss_fn, 5), expected, strict=True):
        assert torch.equal(p, q)
    assert all(v.dtype == torch.float64 for v in opt.spectrum.eigenvectors)


def wrapped(opt, model, by):
    lightning = pytest.importorskip("lightning")
    if by == "fabric":
        return lightning.Fabric(accelerator="cpu", devices=1).setup(model, opt)[1]
    return lightning.pytorch.core.optimizer.LightningOptimizer(opt)


@pytest.mark.parametrize("by", ["lightning", "fabric"])
def test_wrappers_that_inherit_from_what_they_wrap(by):
    model, loss_fn = problem()
    opt = FOSI(torch.optim.Adam(model.parameters(), lr=0.01), k=2, warmup=0)
    wrapper = wrapped(opt, model, by)
    loss_fn().backward()
    assert wrapper.refresh_due
    wrapper.refresh(loss_fn)
    assert not wrapper.refresh_due and not opt.refresh_due
    assert torch.equal(wrapper.spectrum.eigenvalues, opt.spectrum.eigenvalues)

    saved = copy.deepcopy(opt.state_dict())
    opt.step()
    wrapper.load_state_dict(saved)
    assert opt.state_dict()["state"][0]["fosi_step"] == 0
    wrapper.add_param_group({"params": [torch.ones(3, dtype=torch.float64, requires_grad=True)]})
    assert len(opt.spectrum.eigenvectors) == len(opt.param_groups[0]["params"]) + 1
    assert not vars(opt).keys() & vars(wrapper).keys()
