"""The pairs of L-BFGS that starts from FOSI's metric: steps, changes of the gradient along them, and H of them.

As ``fosi.jax.pairs`` has it: H₀ = V diag(α/|λ|) Vᵀ + γ(I − V Vᵀ), which the pairs correct. What says yes or no
is read on the host, where the line search is as well.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fosi.quasi_newton import CUT, LEAST_SCALE, LEAST_SHARE, LEAST_TRUST, LONG, REGROWTH, RESOLVED, SHORT, Scaling
from fosi.torch import checkpoint
from fosi.torch import space as sp


class Metric(NamedTuple):
    """FOSI's step around gradient descent, but for the rate outside.

    Attributes:
      basis: V, a row for each pair that is used.
      columns: Vᵀ, on the same memory.
      newton: α/|λ| for each row.
      flattest: the longest of those of the largest eigenvalues, of which none is rounding's; 0 where there is none.
    """

    basis: Tensor
    columns: Tensor
    newton: Tensor
    flattest: float

    def outside(self, vector: Tensor) -> Tensor:
        """What of a vector is not in the subspace."""
        return sp.subtract(vector.clone(), self.columns, sp.products(self.basis, vector))


def flattest(lengths: list[float]) -> float:
    """The longest, less those that only rounding makes so long."""
    shortest = min(lengths, default=math.inf)
    return max((length for length in lengths if length <= RESOLVED * shortest), default=0.0)


class Pairs:
    """The last steps s and the changes y of the gradient along them: the rows of a ring, scaled so that s · y = 1.

    Attributes:
      steps: s, a row each.
      changes: y, a row each.
      inverse: of R, the matrix of all s_i · y_j where j is not older than i, and of 0 where it is.
      used: how many rows hold a pair.
      next: the row that is written next.
      scale: γ as measured; trust · scale multiplies what lies outside the subspace.
      trust: 1, or less after searches that ended far below 1.
    """

    def __init__(self, space: sp.Space, memory_size: int) -> None:
        """Holds none yet."""
        self.steps = torch.zeros(memory_size, space.size, dtype=space.dtype, device=space.device)
        self.changes = torch.zeros_like(self.steps)
        self.inverse = torch.zeros(memory_size, memory_size, dtype=space.dtype, device=space.device)
        self.used = self.next = 0
        self.scale = self.trust = 1.0

    def saved(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """For a checkpoint: what is a vector a row, and what is small."""
        scales = {name: torch.tensor(getattr(self, name), dtype=torch.float64) for name in ("scale", "trust")}
        small = {"inverse": self.inverse, "used": self.used, "next": self.next, **scales}
        return {"steps": self.steps, "changes": self.changes}, small

    @classmethod
    def loaded(cls, space: sp.Space, pieces: checkpoint.Pieces, small: Mapping[str, Tensor]) -> Pairs:
        """Of such a checkpoint."""
        pairs = cls(space, len(small["inverse"]))
        for name in ("steps", "changes"):
            setattr(pairs, name, checkpoint.matrix(space, name, pieces[name], len(pairs.inverse)))
        pairs.inverse.copy_(small["inverse"])
        pairs.used, pairs.next = int(small["used"]), int(small["next"])
        pairs.scale, pairs.trust = float(small["scale"]), float(small.get("trust", 1.0))  # older ones have none
        return pairs

    def forget(self) -> None:
        """Leaves no pair; γ stays, and how far it is trusted."""
        self.used = self.next = 0

    def add(self, step: Tensor, change: Tensor, metric: Metric | None, scaling: Scaling) -> None:
        """Takes a pair, and γ off it, if the curvature along it is positive."""
        products = torch.stack([torch.dot(step, change), torch.dot(step, step), torch.dot(change, change)])
        curvature, of_step, of_change = products.tolist()
        if not curvature > torch.finfo(step.dtype).eps * math.sqrt(of_step * of_change):
            return
        to_one = curvature**-0.5
        step, change = step * to_one, change * to_one
        at, self.used = self.next, max(self.used, self.next + 1)
        self.steps[at], self.changes[at] = step, change
        # The pair that was here is R's first row and column, and what is left of R⁻¹ without them is the inverse of
        # what is left of R. The new one is the last: R gains a column, and R⁻¹ minus itself times that.
        inverse = self.inverse[: self.used, : self.used]
        inverse[at], inverse[:, at] = 0, 0
        column = sp.products(inverse, sp.products(self.steps[: self.used], change)).neg_()
        column[at] = 1
        inverse[:, at] = column
        self.next = (at + 1) % len(self.steps)
        self.scale = self._scale(step, change, metric, scaling)

    def _scale(self, step: Tensor, change: Tensor, metric: Metric | None, scaling: Scaling) -> float:
        """γ, of a pair with s · y = 1."""
        if metric is not None:
            step, change = metric.outside(step), metric.outside(change)
        products = torch.stack([torch.dot(step, change), torch.dot(change, change), torch.dot(step, step)])
        share, of_change, of_step = products.tolist()
        floor = 0.0 if metric is None else metric.flattest
        # A step inside the subspace says nothing of the rest, but that it is flatter than the largest in there.
        if not (share > LEAST_SHARE and of_change > 0):
            return max(self.scale, floor)
        if scaling == "usual":
            return share / of_change
        return max(math.sqrt(of_step / of_change), LEAST_SCALE * floor)

    def after(self, size: float) -> None:
        """Trusts γ less where a search ended far below 1 or, with 0, found no lower loss, and more where it did not."""
        change = CUT if size < SHORT else REGROWTH if size > LONG else 1.0
        self.trust = min(1.0, max(LEAST_TRUST, change * self.trust))

    def times(self, metric: Metric | None, vector: Tensor) -> Tensor:
        """H times a vector: the two loops of L-BFGS as two products, a = R⁻¹Sᵀg and b = R⁻ᵀ(a − YᵀH₀(g − Y a)).

        Whatever rounding makes of R⁻¹, it is (I − Y R⁻¹ Sᵀ)ᵀ H₀ (I − Y R⁻¹ Sᵀ) + (R⁻¹ Sᵀ)ᵀ R⁻¹ Sᵀ: never a way up.
        """
        steps, changes = self.steps[: self.used], self.changes[: self.used]
        inverse = self.inverse[: self.used, : self.used]
        first = sp.products(inverse, sp.products(steps, vector))
        rest = sp.subtract(vector.clone(), changes.t(), first)
        scale = self.trust * self.scale
        if metric is None:
            start = scale * rest
        else:
            inside = (metric.newton - scale) * sp.products(metric.basis, rest)
            start = sp.add_to_multiple(scale, rest, metric.columns, inside)
        second = sp.products(inverse.t(), first - sp.products(changes, start))
        return sp.add_to_multiple(1.0, start, steps.t(), second)
