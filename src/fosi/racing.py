"""Base and FOSI trained side by side for a while: what that says of a longer training."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

_FACTOR = 2.0
"""How far the second half of a race may differ from all of it: of a few rounds each is off by luck."""


def race(base: Iterable[tuple[float, float]], fosi: Iterable[tuple[float, float]]) -> float:
    """FOSI's seconds over the base's, as far as so short a race tells of a long training: ``diagnose(..., raced=)``.

    That is the geometric mean of two ratios: to the lowest loss that both come to, which is how it stands, and from
    the loss that the base had in half the time to it, which is how it goes on. A training sharpens, and what FOSI gains
    grows; the second half alone would be too little to go by, and counts from half of how it stands to twice that.
    Where there is no second half, of one round or after a first round of FOSI's that has it all, it is how it stands.

    Args:
      base: (seconds, loss) of the base's training after each of its rounds, the loss a mean over the many steps of the
        round; from the step on before which FOSI makes its first estimate.
      fosi: the same of FOSI's, from that step on, its estimates in the seconds.

    Returns:
      The ratio; below 1 where FOSI is sooner, infinite where its last loss is not finite.

    Raises:
      ValueError: if one of them is empty, its seconds do not rise from above 0, or the base's last loss is not finite.

    Example:
      >>> base = [(1.0, 4.0), (2.0, 3.0), (3.0, 2.0), (4.0, 1.0)]
      >>> race(base, [(1.1, 3.0), (2.2, 1.0), (3.3, 0.5)])
      0.55
    """
    its, mine = _Lows("base", base), _Lows("fosi", fosi)
    if not its.finite:
        raise ValueError("base has a last loss that is not finite: there is nothing to be sooner than")
    if not mine.finite:
        return math.inf
    lowest = max(mine.losses[-1], its.losses[-1])
    took, whole = mine.seconds_to(lowest), its.seconds_to(lowest)
    midway = its.loss_after(whole / 2)
    if not lowest < midway <= mine.losses[0]:  # the base has one round to go by, or FOSI's first was lower already
        return took / whole
    second = (took - mine.seconds_to(midway)) / (whole - its.seconds_to(midway))
    return math.sqrt(took / whole * float(np.clip(second, took / whole / _FACTOR, took / whole * _FACTOR)))


class _Lows:
    """The rounds of a training that were lower than all before, and straight lines between them."""

    def __init__(self, name: str, rounds: Iterable[tuple[float, float]]) -> None:
        points = np.array(list(rounds), float)
        if points.ndim != 2 or points.shape[1] != 2:
            raise ValueError(f"{name} has shape {points.shape}; give (seconds, loss) of one round or more")
        seconds, losses = points.T
        if not (np.isfinite(seconds).all() and (np.diff(seconds, prepend=0.0) > 0).all()):
            raise ValueError(f"{name} has seconds {seconds.tolist()}; they must rise, from above 0")
        self.finite = bool(np.isfinite(losses[-1]))
        before = np.fmin.accumulate(np.append(np.inf, losses[:-1]))
        self.losses: NDArray[np.float64] = losses[losses < before]
        self.seconds: NDArray[np.float64] = seconds[losses < before]

    def seconds_to(self, loss: float) -> float:
        """When the loss was as low; the end of the first round at the soonest."""
        return float(np.interp(-loss, -self.losses, self.seconds))

    def loss_after(self, seconds: float) -> float:
        """The lowest loss by then; the first round's at the most."""
        return float(np.interp(seconds, self.seconds, self.losses))
