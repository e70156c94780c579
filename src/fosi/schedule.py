"""When the spectrum is estimated, and with how many Lanczos products (sections 3.1 and 3.7, appendix A.8)."""

import math
from fractions import Fraction
from numbers import Integral, Real
from typing import Any, NamedTuple

NEVER_AGAIN = 2**31 - 1
"""The longest interval a schedule holds: the largest int32, so that step counters of 32 bits can meet it."""

# Quotients this close to an integer are that integer: 0.7 - 0.6 as an overhead must not cost one more step.
_ROUNDING = Fraction(1, 10**12)


class Schedule(NamedTuple):
    """The plain numbers that say when an estimate is due.

    An estimate precedes the update of step t, counted from 0, exactly when t ≥ W and (t − W) mod T = 0
    with W = ``warmup`` and T = ``every``.

    Attributes:
      warmup: steps before the first estimate (W).
      every: steps between two estimates (T).
      num_matvecs: Hessian-vector products of one estimate (m).

    Example:
      >>> schedule = Schedule(warmup=2, every=3, num_matvecs=40)
      >>> [step for step in range(10) if schedule.due(step)]
      [2, 5, 8]

    References:
      Algorithm 2 of the paper (appendix A.2).
    """

    warmup: int
    every: int
    num_matvecs: int

    def due(self, step: Any) -> Any:
        """Say whether an estimate precedes the update of ``step``.

        (step ≥ W) and ((step − W) mod T = 0), in operators alone, so that arrays and traced values work too.

        Args:
          step: steps done so far; an int or an integer array of any framework.

        Returns:
          A bool for an int, a boolean array of the same shape for an array.

        Example:
          >>> Schedule(warmup=0, every=800, num_matvecs=40).due(0)
          True
        """
        return (step >= self.warmup) & ((step - self.warmup) % self.every == 0)


def num_matvecs(k: int, ell: int, n: int) -> int:
    """Number of Lanczos iterations by the paper's heuristic, never more than the space has dimensions.

    m = min(max(4 (k + ℓ), ⌈2 ln n⌉), n)

    Args:
      k: how many of the largest eigenpairs are wanted.
      ell: how many of the smallest eigenpairs are wanted.
      n: number of parameters.

    Returns:
      The number of Hessian-vector products, m.

    Raises:
      ValueError: if ``k`` or ``ell`` is negative or ``n`` is below 1.
      TypeError: if one of them is not an int.

    Example:
      >>> num_matvecs(k=10, ell=0, n=1_000_000)
      40

    References:
      Section 3.1 of the paper.
    """
    k, ell, n = _integer("k", k, 0), _integer("ell", ell, 0), _integer("n", n, 1)
    return min(max(4 * (k + ell), math.ceil(2 * math.log(n))), n)


_default_num_matvecs = num_matvecs  # plan() has an argument of the same name


def refresh_interval(num_matvecs: int, overhead: float) -> int:
    """Steps between two estimates such that estimating costs at most ``overhead`` of the base's run time.

    T = ⌈2 m / (ρ − 1)⌉: a Hessian-vector product costs about two gradients, other work is neglected.

    Args:
      num_matvecs: Hessian-vector products of one estimate (m).
      overhead: the run-time budget ρ − 1; 0.1 allows 10 % more time than the base optimizer alone.

    Returns:
      The interval T, at least 1.

    Raises:
      ValueError: if ``num_matvecs`` is below 1, or ``overhead`` is not positive and finite.
      TypeError: if ``num_matvecs`` is not an int or ``overhead`` not a number.

    Example:
      >>> refresh_interval(40, overhead=0.1)
      800

    References:
      Section 3.7 of the paper.
    """
    return _ceil(Fraction(2 * _integer("num_matvecs", num_matvecs, 1)) / _positive("overhead", overhead))


def measured_refresh_interval(base_step: float, fosi_step: float, refresh: float, overhead: float) -> int:
    """Steps between two estimates from measured times, for functions whose gradient is cheap.

    The smallest T with ρ T τ₁ ≥ T τ₂ + τ₃, that is T = ⌈τ₃ / (ρ τ₁ − τ₂)⌉ with ρ = 1 + ``overhead``.

    Args:
      base_step: time of one step of the base optimizer (τ₁), in any unit.
      fosi_step: time of one FOSI step without an estimate (τ₂), in the same unit.
      refresh: time of one estimate (τ₃), in the same unit.
      overhead: the run-time budget ρ − 1.

    Returns:
      The interval T, at least 1.

    Raises:
      ValueError: if a value is not positive and finite, or if FOSI's own step already uses up the budget,
        so that no T can meet it.
      TypeError: if a value is not a number.

    Example:
      >>> measured_refresh_interval(base_step=1.0, fosi_step=1.05, refresh=80.0, overhead=0.1)
      1600

    References:
      Appendix A.8 of the paper.
    """
    tau1, tau2 = _positive("base_step", base_step), _positive("fosi_step", fosi_step)
    tau3, rho = _positive("refresh", refresh), 1 + _positive("overhead", overhead)
    left_per_step = rho * tau1 - tau2
    if left_per_step <= _ROUNDING * tau2:
        raise ValueError(
            f"no refresh interval can meet overhead={overhead}: a FOSI step without an estimate takes "
            f"fosi_step={fosi_step}, and the budget for a step is (1 + overhead) * base_step = "
            f"{float(rho * tau1):.6g} with base_step={base_step}; allow an overhead above "
            f"{float(tau2 / tau1 - 1):.6g}"
        )
    return _ceil(tau3 / left_per_step)


def check_pairs(k: int, ell: int, n: int) -> tuple[int, int, int]:
    """Check that k largest and ell smallest eigenpairs can be taken from n: 1 ≤ k + ℓ ≤ n.

    Args:
      k: how many of the largest eigenpairs.
      ell: how many of the smallest eigenpairs.
      n: number of parameters.

    Returns:
      The three as Python ints.

    Raises:
      ValueError: if ``k`` or ``ell`` is negative, ``n`` is below 1, or their sum is outside 1 … n.
      TypeError: if one of them is not an int.

    Example:
      >>> check_pairs(10, 0, 7850)
      (10, 0, 7850)
    """
    k, ell, n = _integer("k", k, 0), _integer("ell", ell, 0), _integer("n", n, 1)
    if not 1 <= k + ell <= n:
        raise ValueError(f"k={k} and ell={ell} ask for {k + ell} eigenpairs; k + ell must be from 1 to n={n}")
    return k, ell, n


def plan(
    k: int,
    ell: int,
    n: int,
    *,
    num_matvecs: int | None = None,
    refresh_every: float | None = None,
    overhead: float = 0.1,
    warmup: int | None = None,
) -> Schedule:
    """Fill in what the user left open and check the rest.

    m = num_matvecs(k, ℓ, n), T = ⌈2 m / overhead⌉ and W = T, each where it was not given.

    Args:
      k: how many of the largest eigenpairs.
      ell: how many of the smallest eigenpairs.
      n: number of parameters.
      num_matvecs: Hessian-vector products of one estimate; at least k + ell, taken as n where above n.
      refresh_every: steps between two estimates; ``math.inf`` for one estimate only.
      overhead: the run-time budget that sets ``refresh_every`` where it is ``None``.
      warmup: steps before the first estimate; ``None``: ``refresh_every``, or where that is ``math.inf``, the
        interval ``overhead`` gives.

    Returns:
      The schedule, in plain ints none of which exceeds `NEVER_AGAIN`.

    Raises:
      ValueError: if a value is out of its range.
      TypeError: if a value has the wrong type.

    Example:
      >>> plan(10, 0, 1_000_000)
      Schedule(warmup=800, every=800, num_matvecs=40)
      >>> plan(10, 0, 1_000_000, refresh_every=100, warmup=0)
      Schedule(warmup=0, every=100, num_matvecs=40)

    References:
      Sections 3.1, 3.2 and 3.7 of the paper.
    """
    k, ell, n = check_pairs(k, ell, n)
    if num_matvecs is None:
        matvecs = _default_num_matvecs(k, ell, n)
    else:
        matvecs = min(_integer("num_matvecs", num_matvecs, 1), n)
        if matvecs < k + ell:
            raise ValueError(
                f"num_matvecs={num_matvecs} is too few for k={k} and ell={ell}; it must be at least "
                f"k + ell = {k + ell}, and {_default_num_matvecs(k, ell, n)} is the default"
            )
    budgeted = refresh_interval(matvecs, overhead)
    once = isinstance(refresh_every, Real) and refresh_every == math.inf
    if refresh_every is None:
        every = budgeted
    elif once:
        every = NEVER_AGAIN
    else:
        every = _integer("refresh_every", refresh_every, 1, or_else=" or math.inf for one estimate only")
    default = budgeted if once else every
    first = default if warmup is None else _integer("warmup", warmup, 0)
    return Schedule(min(first, NEVER_AGAIN), min(every, NEVER_AGAIN), matvecs)


def _ceil(value: Fraction) -> int:
    """Round up to an int of at least 1, taking what is an integer up to rounding as that integer."""
    return max(math.ceil(value * (1 - _ROUNDING)), 1)


def _integer(name: str, value: Any, low: int, or_else: str = "") -> int:
    right = f"it must be an int of at least {low}{or_else}"
    if isinstance(value, bool) or not isinstance(value, Integral):
        if isinstance(value, Real) and not math.isfinite(value):
            raise ValueError(f"{name}={value!r} is out of range; {right}")
        raise TypeError(f"{name}={value!r} is a {type(value).__name__}; {right}")
    if value < low:
        raise ValueError(f"{name}={value} is out of range; {right}")
    return int(value)


def _positive(name: str, value: Any) -> Fraction:
    """The value as an exact fraction, so that neither overflow nor cancellation can spoil an interval."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name}={value!r} is a {type(value).__name__}; it must be a positive, finite number")
    number = float(value)
    if not (math.isfinite(number) and number > 0):
        raise ValueError(f"{name}={value} is out of range; it must be a positive, finite number")
    return Fraction(number)
