"""How much further the base optimizer may step on what FOSI leaves to it (section 3.6, appendix A.6).

Each formula is written once over an array namespace ``xp`` (NumPy or jax.numpy) without branching on
values, so that a compiled step runs the same lines as the plain numbers here.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from numbers import Real
from types import MappingProxyType
from typing import Any

import numpy as np

Rule = str | Callable[[Any, Any], Any]
"""A name in `RULES`, or a callable (lam_max, lam_min) that gives the optimal learning rate."""


def _gd(lam_max: Any, lam_min: Any, xp: Any) -> Any:
    return 2 / (lam_max + lam_min)


def _heavy_ball(lam_max: Any, lam_min: Any, xp: Any) -> Any:
    return 4 / (xp.sqrt(lam_max) + xp.sqrt(lam_min)) ** 2


def _nesterov(lam_max: Any, lam_min: Any, xp: Any) -> Any:
    return 4 / (3 * lam_max + lam_min)


RULES: Mapping[str, Callable[[Any, Any, Any], Any]] = MappingProxyType(
    {"gd": _gd, "heavy_ball": _heavy_ball, "nesterov": _nesterov}
)
"""The closed forms by name; each takes (lam_max, lam_min, xp) with curvature that is not negative."""


def optimal_lr(rule: Rule, lam_max: Any, lam_min: Any, xp: Any = np) -> Any:
    """Learning rate that makes a base optimizer fastest on a quadratic with this extreme curvature.

    With L = max(λ_max, 0) and μ = max(λ_min, 0):

      - ``"gd"``: 2 / (L + μ)
      - ``"heavy_ball"``: 4 / (√L + √μ)²
      - ``"nesterov"``: 4 / (3 L + μ)

    Args:
      rule: one of these names, or a callable that is given L and μ.
      lam_max: the largest eigenvalue; a number or an array.
      lam_min: the smallest eigenvalue, likewise.
      xp: the array namespace of the values, ``numpy`` or ``jax.numpy``.

    Returns:
      The rate; a float for numbers, otherwise an array of the values' dtype. It is infinite where there is no
      curvature at all.

    Raises:
      ValueError: if ``rule`` is an unknown name.
      TypeError: if ``rule`` is neither a name nor callable.

    Example:
      >>> optimal_lr("gd", 3.0, 1.0)
      0.5
      >>> optimal_lr("heavy_ball", 9.0, 1.0)
      0.25

    References:
      Section 3.6 of the paper; Lessard, Recht and Packard, Analysis and Design of Optimization Algorithms via
      Integral Quadratic Constraints, 2016, proposition 1.
    """
    formula = _formula(rule, xp)
    with _quiet(xp):
        return _plain(formula(xp.maximum(lam_max, 0), xp.maximum(lam_min, 0)), xp)


def lr_scale(
    rule: Rule | None,
    whole_max: Any,
    whole_min: Any,
    rest_max: Any,
    rest_min: Any,
    cap: Any,
    xp: Any = np,
) -> Any:
    """Factor on the base's learning rate now that the extreme curvature is taken from it.

    min(max(η₂* / η*, 1), c) with η* the optimal rate for the whole quadratic and η₂* that for the rest f₂.

    Args:
      rule: closed form of the base's optimal rate, as in `optimal_lr`; ``None``: no scaling.
      whole_max: the largest eigenvalue of the whole; a number or an array.
      whole_min: the smallest eigenvalue of the whole, likewise.
      rest_max: the largest eigenvalue of the rest, likewise.
      rest_min: the smallest eigenvalue of the rest, likewise.
      cap: the bound c ≥ 1; 1 turns the scaling off, ``math.inf`` lifts the bound.
      xp: the array namespace of the values, ``numpy`` or ``jax.numpy``.

    Returns:
      The factor; a float for numbers, otherwise an array of the values' dtype. Where the rest has no positive
      curvature it is ``cap`` if that is finite, else 1; where the whole has none, or any value is NaN or
      infinite, it is 1.

    Raises:
      ValueError: if ``rule`` is an unknown name, or ``cap`` is a number that is NaN or below 1.
      TypeError: if ``rule`` is neither a name, nor callable, nor ``None``.

    Example:
      >>> lr_scale("gd", 10.0, 0.0, 4.0, 0.0, cap=3.0)
      2.5
      >>> lr_scale("gd", 10.0, 0.0, 1.0, 0.0, cap=3.0)
      3.0

    References:
      Section 3.6 and appendix A.6 of the paper.
    """
    if isinstance(cap, Real):
        cap = float(cap)  # a NumPy float64 would widen float32 arrays; a Python float does not
        if not cap >= 1:
            raise ValueError(f"cap={cap} is out of range; it must be at least 1 (1: no scaling, inf: no cap)")
    if rule is None:
        return _plain(xp.ones_like(whole_max), xp)
    formula = _formula(rule, xp)
    with _quiet(xp):
        usable = whole_max > 0
        for value in (whole_max, whole_min, rest_max, rest_min):
            usable = usable & xp.isfinite(value)
        # The stand-in keeps ∞ / ∞, a NaN that debuggers trap, out of a result that is not used anyway.
        whole = formula(xp.where(whole_max > 0, whole_max, 1), xp.maximum(whole_min, 0))
        rest = formula(xp.maximum(rest_max, 0), xp.maximum(rest_min, 0))
        scale = xp.clip(rest / whole, 1, cap)
        return _plain(xp.where(usable & xp.isfinite(scale), scale, 1), xp)


def _formula(rule: Any, xp: Any) -> Callable[[Any, Any], Any]:
    right = f"it must be one of {', '.join(map(repr, RULES))}, or a callable (lam_max, lam_min)"
    if isinstance(rule, str):
        if rule not in RULES:
            raise ValueError(f"rule={rule!r} is unknown; {right}")
        return lambda lam_max, lam_min: RULES[rule](lam_max, lam_min, xp)
    if not callable(rule):
        raise TypeError(f"rule={rule!r} is a {type(rule).__name__}; {right}")
    return rule


def _quiet(xp: Any) -> AbstractContextManager[Any]:
    """Dividing by no curvature is meant: the result is infinite, and NumPy need not warn."""
    return np.errstate(all="ignore") if xp is np else nullcontext()


def _plain(value: Any, xp: Any) -> Any:
    return float(value) if xp is np and np.ndim(value) == 0 else value
