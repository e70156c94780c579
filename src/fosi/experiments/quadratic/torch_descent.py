"""Minimising quadratic functions with PyTorch, one after the other: the other backend's answer to the same question."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from fosi.experiments.quadratic.descent import Method
from fosi.experiments.quadratic.functions import Array, Functions
from fosi.torch import FOSI


def minimise(method: Method, of: Functions, eta: Any, momentum: Any, iterations: int) -> Array:
    """As ``descent.minimise``."""
    shape = of.eigenvalues.shape[:2]
    eta, momentum = (np.broadcast_to(np.asarray(x, float), shape) for x in (eta, momentum))
    values = np.empty((*shape, iterations + 1))
    for cell in np.ndindex(shape):
        args = (of.bases[cell[0]], of.eigenvalues[cell], of.starts[cell], float(eta[cell]), float(momentum[cell]))
        values[cell] = _one(method, *args, iterations)
    return values


def _one(
    method: Method, basis: Array, eigenvalues: Array, start: Array, eta: float, momentum: float, iterations: int
) -> list[float]:
    vectors, lam = torch.tensor(basis), torch.tensor(eigenvalues)
    theta = torch.nn.Parameter(torch.tensor(basis @ start))

    def value() -> torch.Tensor:
        return 0.5 * (lam * (theta @ vectors) ** 2).sum()

    base: torch.optim.Optimizer
    if method.base == "adam":
        base = torch.optim.Adam([theta], lr=eta, betas=(momentum, 0.999))
    else:
        base = torch.optim.SGD([theta], lr=eta, momentum=momentum if method.base == "heavy-ball" else 0.0)
    opt = FOSI(base, **method.settings) if method.with_fosi else base
    if isinstance(opt, FOSI):
        opt.refresh(value)
    values = []
    for _ in range(iterations):
        opt.zero_grad()
        loss = value()
        loss.backward()
        values.append(loss.item())
        opt.step()
    return [*values, value().item()]
