"""How soon FOSI is likely to be there: a rule with few coefficients, and how they are fitted and judged."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Features = Mapping[str, float]

NAMES = ("constant", "overhead", "rate", "relief", "noisy", "inside")
"""What the rule looks at; `Diagnosis.features` says what each one is."""
RACED, POINT = "raced", "point"
"""What it looks at instead where base and FOSI were trained side by side for a while: the logarithm of what that said,
and that of what `PHYSICAL` makes of all the others. A race holds what each of those is about, and of few measured tasks
few coefficients can be learnt."""
AFTER_RACE = ("constant", RACED, POINT)
MOST = 2.0
"""What a race counts at the most, and a training that diverged: beyond all ratios that the rule has been fitted to."""

PHYSICAL: Mapping[str, float] = {
    "constant": 0.0,
    "overhead": 1.0,  # time is time
    "rate": -1.0,  # slow directions go as fast as the rate that they are given
    "relief": -1.0,
    "noisy": 1.0,  # where steps are as long as the noise allows, longer ones gain nothing
    "inside": 0.0,
}
"""What one would expect without having measured anything; where few ratios are known, a fit stays close to it."""

TOLD: Mapping[str, float] = {"constant": 0.0, RACED: 1.0, POINT: 0.0}
"""The same after a race: that it will go on as it began."""

COEFFICIENTS: Mapping[str, float] = {
    "constant": -0.12,
    "overhead": 0.77,
    "rate": -0.73,
    "relief": -1.17,
    "noisy": 1.1,
    "inside": 0.03,
}
"""The coefficients in use: fitted to what is in ``results/diagnosis.md``, where a task that is left out is predicted a
little better so than by ``PHYSICAL``, from which they are not far."""

COEFFICIENTS_RACED: Mapping[str, float] = {
    "constant": -0.08,
    RACED: 0.79,
    POINT: 0.03,
}
"""Those after a race, fitted likewise."""

SPREAD = 0.4
"""Of the logarithm of a measured ratio around the predicted one: wider than the 0.22, root mean square, over tasks that
were left out of a fit but seen when the rule was shaped, since a new one will be further off. After a race likewise."""


def predict(features: Features, coefficients: Features | None = None) -> float:
    """The ratio of FOSI's seconds to the base's, to the same target: exp(Σ coefficient × feature).

    Args:
      features: a number for each of `NAMES`, and for `RACED` after a race; the constant is 1 and need not be given.
      coefficients: a number for each of them; None for those in use, with a race or without.

    Returns:
      The ratio; below 1 where FOSI is sooner.

    Raises:
      ValueError: if a feature or a coefficient is missing or not finite.

    Example:
      >>> three_times = {"overhead": 0.0, "rate": math.log(3), "relief": 0.0, "noisy": 0.0, "inside": 0.2}
      >>> round(predict(three_times), 3), round(predict(three_times, PHYSICAL), 3)
      (0.4, 0.333)
    """
    names = _names([features])
    if coefficients is None:
        coefficients = COEFFICIENTS_RACED if RACED in names else COEFFICIENTS
    return float(np.exp(_row(features, names) @ _vector("coefficients", coefficients, names)))


def fit(
    features: Sequence[Features], ratios: ArrayLike, *, ridge: float = 1.0, prior: Features | None = None
) -> dict[str, float]:
    """Coefficients by ridge least squares on the logarithm of measured ratios.

    They minimise Σ (log ratio − coefficients · features)² + ridge · |coefficients − prior|².

    Args:
      features: those of each measured pair of trainings, all after a race or none.
      ratios: FOSI's seconds over the base's, one for each.
      ridge: how much the prior counts; each unit as much as one measurement with a feature of 1.
      prior: the coefficients that no measurement at all would leave; None for `PHYSICAL`, or `TOLD` after a race.

    Returns:
      A coefficient for each of `NAMES`, or of `AFTER_RACE`.

    Raises:
      ValueError: if lengths differ, a ratio is not positive and finite, some have run a race and others not, or
        ``ridge`` is not above 0.

    Example:
      >>> seen = [{"overhead": 0.0, "rate": 1.0, "relief": 0.0, "noisy": 0.0, "inside": 0.0}] * 100
      >>> round(fit(seen, [math.exp(-0.5)] * 100, prior=dict.fromkeys(NAMES, 0.0))["rate"], 2)
      -0.25
    """
    rows, logs, names = _rows(features, ratios)
    return dict(zip(names, _solve(rows, logs, ridge, _prior(prior, names)).tolist(), strict=True))


def leave_one_out(
    features: Sequence[Features],
    ratios: ArrayLike,
    *,
    groups: Sequence[Hashable] | None = None,
    ridge: float = 1.0,
    prior: Features | None = None,
) -> NDArray[np.float64]:
    """Each ratio as a fit without it predicts it.

    Args:
      features: as for `fit`.
      ratios: as for `fit`.
      groups: one name for each: all that bear the same one are left out together, as two optimizers on one task
        should be; None leaves out one at a time.
      ridge: as for `fit`.
      prior: as for `fit`.

    Returns:
      The predicted ratios, in order.

    Raises:
      ValueError: as `fit` does, and if there are not as many groups as ratios.

    Example:
      >>> nothing = {"overhead": 0.0, "rate": 0.0, "relief": 0.0, "noisy": 0.0, "inside": 0.0}
      >>> leave_one_out([nothing, nothing], [1.0, 4.0]).round(3).tolist()
      [2.0, 1.0]
    """
    rows, logs, looked_at = _rows(features, ratios)
    names = list(range(len(logs))) if groups is None else list(groups)
    if len(names) != len(logs):
        raise ValueError(f"groups has {len(names)} names, but there are {len(logs)} ratios; give one for each")
    start, predicted = _prior(prior, looked_at), np.zeros(len(logs))
    for name in set(names):
        out = np.array([other == name for other in names])
        predicted[out] = np.exp(rows[out] @ _solve(rows[~out], logs[~out], ridge, start))
    return predicted


def spearman(a: ArrayLike, b: ArrayLike) -> float:
    """Spearman's rank correlation; equal values share the mean of their ranks.

    Args:
      a: at least two numbers.
      b: as many.

    Returns:
      From −1 to 1; NaN where all values of one are equal.

    Raises:
      ValueError: if lengths differ, or there are fewer than two.

    Example:
      >>> spearman([0.5, 0.6, 1.2], [0.7, 0.9, 0.8])
      0.5
    """
    first, second = np.asarray(a, float).ravel(), np.asarray(b, float).ravel()
    if len(first) != len(second) or len(first) < 2:
        raise ValueError(f"a has {len(first)} numbers and b {len(second)}; give as many of each, at least 2")
    for name, values in (("a", first), ("b", second)):
        if not np.isfinite(values).all():
            raise ValueError(f"{name}={values.tolist()} must be finite; count one that diverged as 2")
    x, y = (ranks - ranks.mean() for ranks in (_ranks(first), _ranks(second)))
    size = math.sqrt(float((x @ x) * (y @ y)))
    return float(x @ y) / size if size else math.nan


def _solve(
    rows: NDArray[np.float64], logs: NDArray[np.float64], ridge: float, prior: NDArray[np.float64]
) -> NDArray[np.float64]:
    if not (math.isfinite(ridge) and ridge > 0):
        raise ValueError(f"ridge={ridge} is out of range; it must be finite and above 0")
    normal = rows.T @ rows + ridge * np.eye(rows.shape[1])
    return np.asarray(np.linalg.solve(normal, rows.T @ logs + ridge * prior), np.float64)


def _rows(
    features: Sequence[Features], ratios: ArrayLike
) -> tuple[NDArray[np.float64], NDArray[np.float64], tuple[str, ...]]:
    values = np.asarray(ratios, float)
    if values.ndim != 1 or len(values) != len(features) or not len(values):
        raise ValueError(f"ratios has shape {values.shape}, but features has {len(features)}; give one ratio for each")
    if not (np.isfinite(values).all() and (values > 0).all()):
        raise ValueError(f"ratios={values.tolist()} must be positive and finite; count one that diverged as 2")
    names = _names(features)
    return np.stack([_row(one, names) for one in features]), np.log(values), names


def _names(features: Sequence[Features]) -> tuple[str, ...]:
    return AFTER_RACE if any(RACED in one for one in features) else NAMES


def _prior(prior: Features | None, names: tuple[str, ...]) -> NDArray[np.float64]:
    return _vector("prior", (TOLD if RACED in names else PHYSICAL) if prior is None else prior, names)


def _row(features: Features, names: tuple[str, ...]) -> NDArray[np.float64]:
    row = {"constant": 1.0, **features}
    if RACED in row:
        row[RACED] = min(row[RACED], math.log(MOST))
    if POINT in names:
        row[POINT] = float(_vector("features", row, NAMES) @ _vector("coefficients", PHYSICAL, NAMES))
    return _vector("features", row, names)


def _vector(what: str, values: Mapping[str, Any], names: tuple[str, ...]) -> NDArray[np.float64]:
    missing = [name for name in names if not math.isfinite(values.get(name, math.nan))]
    if missing:
        raise ValueError(f"{what} has no finite {missing[0]!r}; it must have {', '.join(names)}, got {dict(values)}")
    return np.array([float(values[name]) for name in names])


def _ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    _, where, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    means: NDArray[np.float64] = (last - (counts - 1) / 2)[where]
    return means
