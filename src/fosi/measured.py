"""What a backend measures for a diagnosis, in plain numbers and NumPy's arrays."""

from __future__ import annotations

import math
import numbers
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fosi import schedule
from fosi.options import Options


class Seconds(NamedTuple):
    """Times measured on the spot, compiled and warm.

    Attributes:
      gradient: of one batch.
      refresh: of one estimate on one batch.
      projections: of all products with V that one step of FOSI adds.
      step: of one whole step of the base where it trains, batches and all; None where it is not known, and then a
        gradient stands in.
    """

    gradient: float
    refresh: float
    projections: float
    step: float | None = None


def check_times(step_seconds: float | None, timed: bool, raced: float | None = None, **steps: int | None) -> None:
    """Raises where what a step takes is no time, or nothing is timed beside it, or steps cannot be so many.

    And where what a race said is no ratio of times.
    """
    if raced is not None and not (isinstance(raced, numbers.Real) and raced > 0):
        raise ValueError(f"raced must be a number > 0, FOSI's seconds over the base's, got {raced!r}")
    for name, count in steps.items():
        if count is not None and not (isinstance(count, numbers.Integral) and count >= 1):
            raise ValueError(f"{name} must be a whole number ≥ 1, or None for many, got {count!r}")
    if step_seconds is None:
        return
    if not (isinstance(step_seconds, numbers.Real) and math.isfinite(step_seconds) and step_seconds > 0):
        raise ValueError(f"step_seconds must be a finite number > 0, the seconds of one step, got {step_seconds!r}")
    if not timed:
        raise ValueError(f"step_seconds={step_seconds} needs timed=True: else an estimate is counted in gradients")


class Measured(NamedTuple):
    """What a backend finds out; the arrays are NumPy's.

    Attributes:
      n: number of parameters.
      k: pairs asked for, of the largest.
      ell: pairs asked for, of the smallest.
      num_matvecs: Hessian-vector products of one estimate, m.
      eigenvalues: (k + ell,), the k largest and then the ell smallest, descending.
      residuals: (k + ell,).
      accepted: (k + ell,) bools.
      beyond: the Ritz value after the k largest; None where there is none.
      extremes: the largest and the smallest Ritz value.
      sharpness: with Adam, the largest eigenvalue of P^(−½) H P^(−½); None for the others, to whom H is what it is.
      sharpness_left: with Adam, the same once the accepted eigenvectors are taken out of H.
      inside: (batches, k + ell), the batches' gradients along the accepted eigenvectors; 0 for the other pairs.
      outside: (batches, batches), inner products of what of the gradients lies outside their span. Not of the whole
        gradients: where next to all of a gradient is inside, the difference would be rounding.
      growth: with Adam, what ``Base.growth`` makes of its second moments and of the gradients' squares.
      seconds: where times were asked for.
    """

    n: int
    k: int
    ell: int
    num_matvecs: int
    eigenvalues: NDArray[Any]
    residuals: NDArray[Any]
    accepted: NDArray[Any]
    beyond: float | None
    extremes: NDArray[Any]
    sharpness: float | None
    sharpness_left: float | None
    inside: NDArray[Any]
    outside: NDArray[Any]
    growth: tuple[float, ...] | None = None
    seconds: Seconds | None = None


def signal_and_noise(gram: NDArray[Any]) -> tuple[float, float | None]:
    """|E g|² and the trace of the covariance of one batch's gradient, both unbiased.

    E (g_a · g_b) is |E g|² for two batches, and |E g|² + trace for one and itself.

    Args:
      gram: the inner products g_a · g_b of the gradients of B batches.

    Returns:
      The signal, which may come out negative where noise is all there is, and the noise; of one batch |g|² and None.

    Example:
      >>> signal_and_noise(np.array([[2.0, 1.0], [1.0, 4.0]]))
      (1.0, 2.0)
    """
    count, own = len(gram), float(np.trace(gram))
    if count == 1:
        return own, None
    signal = (float(np.sum(gram)) - own) / (count * (count - 1))
    return signal, max(own / count - signal, 0.0)


def refresh_cost(measured: Measured, options: Options) -> tuple[float, int | None, float]:
    """A refresh in gradients, T as it is given or by the budget, and the overhead with that T."""
    matvecs, seconds = measured.num_matvecs, measured.seconds
    given = None if options.refresh_every is None else options.schedule(measured.n).every
    counted = schedule.refresh_interval(matvecs, options.overhead) if given is None else given
    if seconds is None:
        return 2.0 * matvecs, counted, 2 * matvecs / counted
    alone = seconds.step or seconds.gradient
    every: int | None = given
    if given is None:
        try:
            with_ours = alone + seconds.projections
            every = schedule.measured_refresh_interval(alone, with_ours, seconds.refresh, options.overhead)
        except ValueError:  # the products with V alone use it up
            every = None
    extra = (seconds.projections + seconds.refresh / (every or counted)) / alone
    return seconds.refresh / seconds.gradient, every, extra
