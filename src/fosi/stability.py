"""How much curvature a base optimizer can bear at its learning rate."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

BaseName = Literal["gd", "heavy-ball", "nesterov", "adam", "adamw"]
_BEARABLE, _LEAST_SIGNAL = 50.0, 0.01
"""Of `Base.noise_share`, where both are explained."""
_B2 = 0.999
"""Of Adam's second moments. Nobody is asked for it: it is optax's and torch's default, and hardly ever changed."""
SINCE = (0.0, 1e-3, 0.01, 0.03, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.97, 0.99, 0.999, 1.0)
"""Parts of ν that may be of gradients since FOSI began: `Base.growth` is known at these. Close to both ends, since ν
may be many times what gradients now are, or a small part of it."""
_POINTS = 1000
"""At which a mean over the steps to come is taken: those may be millions."""
_RULES = {"gd": "gd", "heavy-ball": "heavy_ball", "nesterov": "nesterov"}


@dataclass(frozen=True)
class Base:
    """The optimizer that FOSI would be put around.

    Args:
      name: ``"gd"``, ``"heavy-ball"``, ``"nesterov"``, ``"adam"`` or ``"adamw"``.
      learning_rate: η.
      momentum: β of Heavy-Ball and Nesterov, b1 of Adam and AdamW; gradient descent has none.
      eps: Adam's ε.

    Raises:
      ValueError: if one of them is unknown or out of its range.
      TypeError: if a number is none.

    Example:
      >>> round(Base("adam", 1e-3).limit), round(Base("heavy-ball", 0.1).limit)
      (38000, 38)
    """

    name: str
    learning_rate: float
    momentum: float = 0.9
    eps: float = 1e-8

    def __post_init__(self) -> None:
        if self.name not in get_args(BaseName):
            raise ValueError(f"base must be one of {', '.join(map(repr, get_args(BaseName)))}, got {self.name!r}")
        _number("learning_rate", self.learning_rate, "a finite number > 0", lambda x: x > 0)
        _number("momentum", self.momentum, "at least 0 and below 1", lambda x: 0 <= x < 1)
        _number("adam_eps", self.eps, "a finite number > 0", lambda x: x > 0)

    @property
    def adaptive(self) -> bool:
        """Whether it divides each entry of the gradient by √ν + ε, so that its limit is for the divided Hessian."""
        return self.name.startswith("adam")

    @property
    def rule(self) -> str | None:
        """The closed form of its best rate, as `fosi.scaling` names it; None for Adam, whose rate is not scaled."""
        return _RULES.get(self.name)

    @property
    def limit(self) -> float:
        """The curvature above which its steps grow instead of shrinking, on a quadratic function.

        Along an eigenvector of curvature λ the error follows a recurrence of two terms; its roots leave the unit circle
        at λ = 2/η for gradient descent, 2 (1 + β)/η for Heavy-Ball and 2 (1 + β)/((1 + 2β) η) for Nesterov. Adam's
        first moment is Heavy-Ball at the rate (1 − b1) η: 2 (1 + b1)/((1 − b1) η), 38/η for 0.9, for the curvature of
        P^(−½) H P^(−½) with P = diag(√ν + ε).
        """
        eta, beta = self.learning_rate, self.momentum
        if self.name == "gd":
            return 2 / eta
        if self.name == "heavy-ball":
            return 2 * (1 + beta) / eta
        if self.name == "nesterov":
            return 2 * (1 + beta) / ((1 + 2 * beta) * eta)
        return 2 * (1 + beta) / ((1 - beta) * eta)

    def noise_share(self, sharpness: float, signal: float, noise: float) -> float:
        """How much of what longer steps would gain the noise takes, from 0 to 1.

        Steps of rate η lower a quadratic function by η |g|² and raise it by ½ η² tr(H Σ), at most ½ η² λ₁ tr Σ. With
        c = η λ₁ tr Σ / |g|² it is c / (c + 50): noise spreads over directions that are mostly far less sharp than the
        sharpest, so c must be well above 1 before steps are as long as noise allows. The 50 was chosen with measured
        trainings in view. η is that of many steps together, η/(1 − β) where momentum sums; for Adam η itself with its
        own λ₁, and tr Σ / |g|² undivided in the place of tr(P⁻¹ Σ) / gᵀ P⁻¹ g.

        Args:
          sharpness: λ₁ of what the base is left with.
          signal: |g|² of the expected gradient there; counts no less than a hundredth of the noise, since a few batches
            do not tell less from nothing.
          noise: tr Σ of one batch's gradient there.
        """
        if noise <= 0:
            return 0.0
        sums = self.name in ("heavy-ball", "nesterov")
        rate = self.learning_rate / (1 - self.momentum) if sums else self.learning_rate
        cost = rate * sharpness * noise / max(signal, _LEAST_SIGNAL * noise)
        return cost / (cost + _BEARABLE)

    def growth(self, nu: Sequence[Any], whole: Sequence[Any], left: Sequence[Any]) -> tuple[float, ...]:
        """How many times as far Adam goes outside the subspace with FOSI, as ν comes to be of gradients since.

        Its steps lower the loss there by η Σ r²/(√ν + ε), with r what of the gradient g is outside. Where the part c of
        ν is new, that is (1 − c) ν + c r² with FOSI, and (1 − c) ν + c g² without: a coordinate gains by as much as
        the subspace had of its square, and hardly where ν still is of far larger gradients.

        Args:
          nu: second moments, bias-corrected, arrays of any framework.
          whole: mean squares of g, arrays alike.
          left: mean squares of r.

        Returns:
          That for each c of ``SINCE``; 1 where nothing is outside.
        """

        def progress(since: float, squares: Sequence[Any]) -> float:
            mixed = ((1 - since) * old + since * new for old, new in zip(nu, squares, strict=True))
            return sum(float((r * self.inverse_root(x) ** 2).sum()) for r, x in zip(left, mixed, strict=True))

        each = [(progress(since, left), progress(since, whole)) for since in SINCE]
        return tuple(1.0 if alone == 0 else ours / alone for ours, alone in each)

    def longer(self, most: float, growth: Sequence[float], steps: int | None, before: int | None = None) -> float:
        """How many times as long its steps outside the subspace become with FOSI: the mean over the steps to come.

        Adam's steps grow because inside FOSI ν is of what FOSI leaves to it, and as ν forgets: after t steps what was
        in it counts b2ᵗ (1 − b2ⁿ) and what has come since 1 − b2ᵗ, n the steps before, if gradients stay as large as
        they are. Growth below 1 counts 1: it comes of entries of g that are small by chance, which ν would not divide
        by for long. A base that does not divide takes all that it may.

        Args:
          most: what its limit allows, at least 1.
          growth: as `growth` returns it.
          steps: to come; None for so many that forgetting does not count.
          before: n, steps that the base has taken; None for many.
        """
        if not self.adaptive:
            return most
        if steps is None:
            return min(most, max(growth[-1], 1.0))
        later = _B2 ** np.linspace(0.0, steps, _POINTS)
        old = later * (1.0 if before is None else 1 - _B2**before)
        new = 1 - later
        whole = old + new
        since = np.divide(new, whole, out=np.ones_like(new), where=whole > 0)  # at t = 0 of one that has taken no step
        return float(np.mean(np.clip(np.interp(since, SINCE, growth), 1.0, most)))

    def inverse_root(self, nu: Any) -> Any:
        """(√ν + ε)^(−½), which stands on both sides of the Hessian; for arrays of any framework."""
        return (nu**0.5 + self.eps) ** -0.5


def _number(name: str, value: Any, right: str, good: Any) -> None:
    single = getattr(value, "ndim", None) == 0 and not callable(value)  # what a schedule returns, a capturable rate
    if isinstance(value, bool) or not (single or isinstance(value, numbers.Real)):
        raise TypeError(f"{name} must be {right}, got {value!r}; of a schedule, its value at this point")
    value = float(value)
    if not (math.isfinite(value) and good(float(value))):
        raise ValueError(f"{name} must be {right}, got {value!r}")


def evenly(taken: float) -> tuple[float, ...]:
    """What `Base.growth` would return if FOSI took this part of every entry of g², and g² were what ν is.

    Example:
      >>> evenly(0.75)[-1]
      2.0
    """
    return tuple(max(1 - since * taken, np.finfo(float).tiny) ** -0.5 for since in SINCE)
