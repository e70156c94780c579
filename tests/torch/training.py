"""A small network, loops that train it, and comparisons bit for bit, for tests of FOSI as a torch optimizer."""

import torch
from torch import nn


def network(dtype=torch.float32, seed=0):
    """26 parameters in two layers."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(dtype)


def batch(step, rows=12, dtype=torch.float32):
    """Data of its own for every step."""
    x = torch.randn(rows, 3, generator=torch.Generator().manual_seed(1000 + step))
    y = torch.stack([torch.sin(2 * x[:, 0]), x[:, 1] * x[:, 2]], dim=1)
    return x.to(dtype), y.to(dtype)


def loss_of(model, data):
    """The mean squared error as a closure."""
    return lambda: nn.functional.mse_loss(model(data[0]), data[1])


def train(model, opt, steps, after=None):
    """Trains for the numbers in ``steps``, each with its own batch; a bare optimizer never has a refresh due."""
    dtype = next(model.parameters()).dtype
    for t in steps:
        loss = loss_of(model, batch(t, dtype=dtype))
        opt.zero_grad()
        loss().backward()
        if getattr(opt, "refresh_due", False):
            opt.refresh(loss)
        opt.step()
        if after is not None:
            after(t)


def values(model):
    """Copies of all parameters."""
    params = model.parameters() if isinstance(model, nn.Module) else model
    return [p.detach().clone() for p in params]


def assert_same_bits(found, expected):
    """Nested dicts, lists and tensors, equal in every bit and dtype."""
    assert type(found) is type(expected)
    if isinstance(found, dict):
        assert list(found) == list(expected)
        assert_same_bits(list(found.values()), list(expected.values()))
    elif isinstance(found, (list, tuple)):
        assert len(found) == len(expected)
        for a, b in zip(found, expected, strict=True):
            assert_same_bits(a, b)
    elif isinstance(found, torch.Tensor):
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    else:
        assert found == expected


def differs(found, expected):
    """Whether any of the tensors differ."""
    return any(not torch.equal(a, b) for a, b in zip(found, expected, strict=True))
