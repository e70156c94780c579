"""Lanczos with full re-orthogonalisation: an operator and a start vector become a basis and a tridiagonal matrix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fosi.torch import space as sp

Matvec = Callable[[Tensor], Tensor]


class Krylov(NamedTuple):
    """H Q = Q T + r eᵀ, where the first ``steps`` rows of ``basis`` are the columns of Q.

    Attributes:
      basis: m rows, orthonormal up to ``steps``.
      alphas: (steps,), the diagonal of T, on the host in float64, as everything below.
      betas: (steps,), the off-diagonal of T, and at the end the norm of the remainder r.
      asymmetry: the largest part of a product that a symmetric operator could not have had. Rounding, TF32 or
        noise in the operator show here, and nothing below this level can be believed.
    """

    basis: Tensor
    alphas: np.ndarray
    betas: np.ndarray
    asymmetry: float

    @property
    def steps(self) -> int:
        """How many rows count; less than m where Lanczos found an invariant subspace."""
        return len(self.alphas)


def lanczos(
    matvec: Matvec, start: Tensor, num_matvecs: int, dtype: torch.dtype, *, breakdown: float, group: Any = None
) -> Krylov:
    """Runs ``num_matvecs`` Lanczos steps.

    Args:
      matvec: the symmetric operator, on vectors of ``dtype``.
      start: the start vector; its length does not matter.
      num_matvecs: how many products.
      dtype: of the basis and of the computation.
      breakdown: ends the iteration when the remainder falls below this fraction of the largest entry of T.
      group: the processes that hold parts of every vector; None where each holds all of it.

    Returns:
      The decomposition.
    """
    tiny = torch.finfo(dtype).tiny
    basis = torch.zeros(num_matvecs, start.numel(), dtype=dtype, device=start.device)
    vector = start.to(dtype)
    vector = vector / sp.norm(vector, group).clamp_min(tiny)
    # What a step learns stays on the device, so that the host can queue the next product: one row a step of
    # (alpha, beta, strangeness), and the end of the iteration is found out afterwards.
    learned = torch.zeros(num_matvecs, 3, dtype=dtype, device=start.device)
    going = torch.ones((), dtype=torch.bool, device=start.device)
    scale = torch.zeros((), dtype=dtype, device=start.device)
    beta = scale
    ended = torch.full((), num_matvecs, dtype=torch.int64, device=start.device)
    for j in range(num_matvecs):
        basis[j] = vector
        rows = basis[: j + 1]
        # Orthogonalised twice against all rows so far: one pass leaves an error that grows with the cancellation in
        # it, the second brings it down to rounding ("twice is enough"), in float32 as in float64.
        w = matvec(vector)
        h = sp.products(rows, w, group)
        sp.subtract(w, rows.t(), h)
        correction = sp.products(rows, w, group)
        sp.subtract(w, rows.t(), correction)

        alpha = h[j] + correction[j]
        strange = h.clone()
        strange[j] = 0
        if j > 0:
            strange[j - 1] -= beta
        beta = sp.norm(w, group)
        learned[j] = torch.stack([alpha, beta, torch.linalg.vector_norm(strange)])
        scale = torch.maximum(scale, torch.maximum(alpha.abs(), beta))
        # A NaN must go on, to be seen in T; so "not small" rather than "large".
        small = beta <= breakdown * scale
        ended = torch.where(going & small, j + 1, ended)
        going = going & ~small
        if start.device.type == "cpu" and not going:  # nobody waits for a look at a CPU's numbers
            break
        vector = w * torch.where(going, 1 / beta.clamp_min(tiny), 0.0)
    steps = int(ended)
    host = learned[:steps].to("cpu", torch.float64).numpy()
    return Krylov(basis, host[:, 0], host[:, 1], float(host[:, 2].max()))
