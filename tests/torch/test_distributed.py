"""Two processes, each with half of the batch, train as one with the whole of it."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fosi.torch import FOSI, ModelLoss, estimate_spectrum
from tests.torch.processes import two_processes

STEPS, REFRESHING = 12, {"warmup": 2, "refresh_every": 4}


def _model(normalised):
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(6) if normalised else nn.Identity()
    return nn.Sequential(nn.Linear(4, 6), norm, nn.Tanh(), nn.Linear(6, 2)).double()


def _data():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(16, 4, generator=generator, dtype=torch.float64)
    return x, torch.stack([x[:, 0] * x[:, 1], x.sin().sum(1)], dim=1)


def _train(model, x, y, base, wrapped=None, **given):
    """The parameters after training, flat, and the spectrum's eigenvalues."""
    loss = ModelLoss(lambda: model(x), lambda outputs: nn.functional.mse_loss(outputs, y))
    given = {"k": 3, "num_matvecs": 20, "precision": "float64", **REFRESHING, **given}
    make = {
        "heavy-ball": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
        "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    }[base]
    opt = FOSI(make(model.parameters()), model=wrapped, **given)
    for _ in range(STEPS):
        opt.zero_grad()
        loss().backward()
        if opt.refresh_due:
            buffers = [b.clone() for b in model.buffers()]
            opt.refresh(loss)
            assert all(torch.equal(a, b) for a, b in zip(buffers, model.buffers(), strict=True))
        opt.step()
    flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    return torch.cat([flat, opt.spectrum.eigenvalues]).numpy()


def _train_half(folder, base, named, normalised, curvature):
    rank = dist.get_rank()
    x, y = (half.chunk(2)[rank] for half in _data())
    model = DistributedDataParallel(_model(normalised))
    if rank == 0:  # one process may look at a spectrum by itself
        estimate_spectrum(lambda: model.module(x).square().mean(), model.module, k=1, num_matvecs=3)
    np.save(folder / f"{rank}.npy", _train(model, x, y, base, model if named else None, curvature=curvature))


def _in_two_processes(folder, *args):
    two_processes(_train_half, folder, *args)
    return [np.load(folder / f"{rank}.npy") for rank in range(2)]


@pytest.mark.parametrize(
    ("base", "named", "curvature"),
    [("heavy-ball", True, "hessian"), ("adam", False, "hessian"), ("heavy-ball", True, "gauss_newton")],
)
def test_replicas_train_as_one(tmp_path, base, named, curvature):
    first, second = _in_two_processes(tmp_path, base, named, False, curvature)
    np.testing.assert_array_equal(first, second)
    np.testing.assert_allclose(first, _train(_model(False), *_data(), base, curvature=curvature), rtol=1e-8, atol=1e-10)


def test_buffers_are_not_broadcast_by_a_refresh(tmp_path):
    first, second = _in_two_processes(tmp_path, "heavy-ball", True, True, "hessian")
    np.testing.assert_array_equal(first, second)
