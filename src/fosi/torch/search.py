"""A line search for Wolfe's conditions, which bears a loss that is off by a little."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from fosi.quasi_newton import LOSS_NOISE, MAX_TRIALS

_DECREASE, _CURVATURE = 1e-4, 0.9
_INSIDE = 0.1
"""A trial is no nearer to an end of the interval than this part of it, and not in its second half where that was too
far: a cubic through a place far off, where the loss is flat again, would come back from there in small steps."""


_REFINED = 4
"""How often an interval is cut in which a lower place is known. What is left then is noise, not curvature."""


class Trial(NamedTuple):
    """A place along a direction.

    Attributes:
      size: how far along.
      value: the loss there.
      slope: of the loss along the direction.
      gradient: what the loss came with, whatever its form.
    """

    size: float
    value: float
    slope: float
    gradient: Any = None


def search(at: Callable[[float], Trial], start: Trial, begin: float) -> Trial | None:
    """The place where the loss is lower by enough and its slope is flatter.

    Sufficient decrease is Armijo's, or what Hager and Zhang (2005) put in its place where a difference of losses is
    mostly rounding: the loss is no higher but for noise, and the slope at the end says that it fell.

    Args:
      at: tries a size.
      start: size 0; its slope is negative.
      begin: the first size to try.

    Returns:
      The place; where none is flat enough the lowest that is lower by enough; None where none is lower, of 20.
    """
    low, high, safe = start, None, None
    size, cuts = begin, 0
    for _ in range(MAX_TRIALS):
        trial = at(size)
        lower = _lower(trial, start)
        if lower and (safe is None or trial.value <= safe.value):
            safe = trial
        if lower and abs(trial.slope) <= -_CURVATURE * start.slope:
            return trial
        if lower and trial.slope < 0:
            low = trial
        else:
            high = trial
        size = 2 * size if high is None else _between(low, high, 1 - _INSIDE if lower else 0.5)
        cuts += high is not None and safe is not None
        if cuts > _REFINED:
            break
    return safe


def _lower(trial: Trial, start: Trial) -> bool:
    if not (math.isfinite(trial.value) and math.isfinite(trial.slope)):
        return False
    if trial.value <= start.value + _DECREASE * trial.size * start.slope:
        return True
    noise = LOSS_NOISE * abs(start.value)
    return trial.value <= start.value + noise and trial.slope <= (2 * _DECREASE - 1) * start.slope


def _between(low: Trial, high: Trial, most: float) -> float:
    """Where the cubic through both is least, or the middle; inside the interval, and of it no more than so much."""
    width = high.size - low.size
    place = 0.5
    if math.isfinite(high.value) and math.isfinite(high.slope):
        # On [0, 1], with the slopes in its units.
        a, b = low.slope * width, high.slope * width
        drop = high.value - low.value
        bend = a + b - 3 * drop
        root = bend * bend - a * b
        if root >= 0 and (down := b - a + 2 * math.sqrt(root)) != 0:
            place = 1 - (b + math.sqrt(root) - bend) / down
    place = place if math.isfinite(place) else 0.5
    return low.size + width * min(max(place, _INSIDE), most)
