"""What a backend measures for a diagnosis, in plain numbers and NumPy's arrays."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray


class Seconds(NamedTuple):
    """Times measured on the spot, compiled and warm.

    Attributes:
      gradient: of one batch.
      refresh: of one estimate on one batch.
      projections: of all products with V that one step of FOSI adds.
    """

    gradient: float
    refresh: float
    projections: float


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
