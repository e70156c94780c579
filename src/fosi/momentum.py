"""The linear combinations of past gradients that base optimizers use, for the Newton part to use as well.

Section 3.4 of the paper: the Newton part and the base optimizer must apply the same combination to g₁ and
g₂, so that ḡ = ḡ₁ + ḡ₂ and the two stay orthogonal.
"""

from dataclasses import dataclass
from numbers import Real
from typing import Any


@dataclass(frozen=True)
class Trace:
    """Heavy-Ball or Nesterov momentum, as in ``optax.trace`` and as in PyTorch's SGD with dampening 0.

    m ← g + β m; the step uses m, or with ``nesterov`` g + β m with the new m.

    Args:
      decay: the factor β on the past, 0 ≤ β < 1; a float, or a traced value, which is not checked.
      nesterov: look one step ahead.

    Raises:
      ValueError: if ``decay`` is a number outside [0, 1).

    Example:
      >>> rule = Trace(0.5)
      >>> m = rule.update(0.0, 1.0)
      >>> m = rule.update(m, 1.0)
      >>> rule.read(m, 1.0, count=2)
      1.5

    References:
      Section 3.4 of the paper.
    """

    decay: float
    nesterov: bool = False

    def __post_init__(self) -> None:
        _check_decay(self)

    def update(self, momentum: Any, value: Any) -> Any:
        """Take one more gradient in: g + β m.

        Args:
          momentum: the momentum so far, 0 at the start; a number or an array of any framework.
          value: the new gradient, likewise.

        Returns:
          The new momentum.

        Example:
          >>> Trace(0.5).update(1.0, 1.0)
          1.5
        """
        return value + self.decay * momentum

    def read(self, momentum: Any, value: Any, count: Any) -> Any:
        """Give what the step uses: m, or g + β m with ``nesterov``.

        Args:
          momentum: the momentum after `update`.
          value: the gradient `update` was given last.
          count: not used; the same call works for `Ema`.

        Returns:
          The combined gradient.

        Example:
          >>> Trace(0.5, nesterov=True).read(1.5, 1.0, count=2)
          1.75
        """
        return value + self.decay * momentum if self.nesterov else momentum


@dataclass(frozen=True)
class Ema:
    """Exponential moving average with bias correction, the first moment of Adam and its family.

    m ← β m + (1 − β) g; the step uses m / (1 − βᵗ) after t updates.

    Args:
      decay: the factor β on the past, 0 ≤ β < 1; a float, or a traced value, which is not checked.

    Raises:
      ValueError: if ``decay`` is a number outside [0, 1).

    Example:
      >>> rule = Ema(0.5)
      >>> m = rule.update(0.0, 3.0)
      >>> rule.read(m, 3.0, count=1)
      3.0

    References:
      Section 3.4 of the paper; Kingma and Ba, Adam: A Method for Stochastic Optimization, 2015.
    """

    decay: float

    def __post_init__(self) -> None:
        _check_decay(self)

    def update(self, momentum: Any, value: Any) -> Any:
        """Take one more gradient in: β m + (1 − β) g.

        Args:
          momentum: the momentum so far, 0 at the start; a number or an array of any framework.
          value: the new gradient, likewise.

        Returns:
          The new momentum.

        Example:
          >>> Ema(0.5).update(1.0, 3.0)
          2.0
        """
        return self.decay * momentum + (1 - self.decay) * value

    def read(self, momentum: Any, value: Any, count: Any) -> Any:
        """Give what the step uses: m / (1 − βᵗ).

        Args:
          momentum: the momentum after `update`.
          value: not used; the same call works for `Trace`.
          count: how many updates were done, this one included (t ≥ 1).

        Returns:
          The combined gradient.

        Example:
          >>> Ema(0.5).read(1.5, 3.0, count=1)
          3.0
        """
        return momentum / (1 - self.decay**count)


def _check_decay(rule: Trace | Ema) -> None:
    if not isinstance(rule.decay, Real):  # perhaps traced: its value is not known yet
        return
    decay = float(rule.decay)  # a NumPy float64 would widen float32 gradients
    if not 0 <= decay < 1:
        raise ValueError(f"decay={decay} is out of range; it must be at least 0 and below 1")
    object.__setattr__(rule, "decay", decay)
