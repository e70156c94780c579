"""FOSI's settings: the same words, defaults and checks in both backends."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import math
import numbers
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar, get_args

from fosi.momentum import Ema, Trace
from fosi.scaling import RULES
from fosi.schedule import Schedule, plan

Accept = Literal["converged", "all"]
Precision = Literal["float32", "float64"]
Curvature = Literal["hessian", "gauss_newton"]
Momentum = Trace | Ema | None
Factory = TypeVar("Factory", bound=Callable[..., Any])
Settings = TypeVar("Settings", bound="Options")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """How FOSI estimates the spectrum and what it does with it.

    Attributes:
      k: how many of the largest eigenpairs to use at most.
      ell: how many of the smallest, ℓ in the paper.
      alpha: learning rate of the Newton part, a number or a schedule (a function of the step).
      eps: floor on |λ| before it is inverted (§3.2).
      lr_rule: closed form of the base's optimal learning rate, by which it is scaled (§3.6): ``"gd"``,
        ``"heavy_ball"``, ``"nesterov"``, a callable of (lam_max, lam_min), or None for no scaling.
      max_lr_scale: cap on that scaling, c in the paper; 1 turns it off, ``inf`` lifts it.
      refresh_every: steps between two estimates, T; None takes it from ``overhead``, ``inf`` estimates once.
      overhead: run-time budget, ρ − 1: T = ⌈2 m / overhead⌉ (§3.7).
      warmup: steps before the first estimate, W; None takes ``refresh_every``.
      num_matvecs: Hessian–vector products in an estimate, m; None takes max(4 (k + ell), ⌈2 ln n⌉).
      accept: ``"converged"`` uses the pairs whose residual is at most 0.1 |λ| and whose |λ| the estimate can
        resolve; ``"all"`` uses every pair, the paper to the letter.
      precision: dtype of the Lanczos basis.
      momentum: the linear combination of past gradients that the Newton part sees too (§3.4).
      seed: start vectors are a function of it and of the count of refreshes.
      curvature: the matrix whose eigenpairs are estimated: ``"hessian"``, or ``"gauss_newton"`` for a ``ModelLoss``.
    """

    k: int = 10
    ell: int = 0
    alpha: float | Callable[[Any], Any] = 0.01
    eps: float = 1e-8
    lr_rule: str | Callable[[Any, Any], Any] | None = None
    max_lr_scale: float = 3.0
    refresh_every: int | float | None = None
    overhead: float = 0.1
    warmup: int | None = None
    num_matvecs: int | None = None
    accept: Accept = "converged"
    precision: Precision = "float32"
    momentum: Momentum | Literal["auto"] = "auto"
    seed: int = 0
    curvature: Curvature = "hessian"

    def __post_init__(self) -> None:
        # n is not known yet: a space as large as need be leaves only the checks that do not depend on it.
        self.schedule(n=max(_whole(self.k), 0) + max(_whole(self.ell), 0) + 2**40)
        _check_number("alpha", self.alpha, lambda x: math.isfinite(x) and x >= 0, "a finite number ≥ 0 or a schedule")
        _check_number("eps", self.eps, lambda x: math.isfinite(x) and x > 0, "a finite number > 0")
        _check_number("max_lr_scale", self.max_lr_scale, lambda x: x >= 1, "a number ≥ 1 (inf lifts the cap)")
        check_choice("accept", self.accept, get_args(Accept))
        check_choice("precision", self.precision, get_args(Precision))
        check_choice("curvature", self.curvature, get_args(Curvature))
        if not (self.lr_rule is None or callable(self.lr_rule) or self.lr_rule in RULES):
            names = ", ".join(repr(name) for name in RULES)
            raise ValueError(
                f"lr_rule must be one of {names}, a callable (lam_max, lam_min) or None, got {self.lr_rule!r}"
            )
        if not (self.momentum in ("auto", None) or isinstance(self.momentum, (Trace, Ema))):
            raise ValueError(
                f"momentum must be fosi.Trace(decay), fosi.Ema(decay), None or 'auto', got {self.momentum!r}"
            )
        if not isinstance(self.seed, numbers.Integral):
            raise TypeError(f"seed must be an int from 0 to 2³² − 1, got {self.seed!r}")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed must be an int from 0 to 2³² − 1, got {self.seed!r}")

    @property
    def rank(self) -> int:
        """How many pairs are kept: k + ell."""
        return self.k + self.ell

    def schedule(self, n: int) -> Schedule:
        """The plain numbers W, T and m for a space of n dimensions."""
        return plan(
            self.k,
            self.ell,
            n,
            num_matvecs=self.num_matvecs,
            refresh_every=self.refresh_every,
            overhead=self.overhead,
            warmup=self.warmup,
        )


def settle(kind: type[Settings], given: Mapping[str, Any]) -> Settings:
    """The settings ``kind`` out of keywords, with an error that helps where one is not known."""
    names = [f.name for f in dataclasses.fields(kind)]
    for name in given:
        if name not in names:
            close = difflib.get_close_matches(name.lower(), names, n=1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            raise TypeError(f"{name}={given[name]!r} is not a setting of FOSI; {hint}There are {', '.join(names)}")
    return kind(**given)


def takes(options: type[Options]) -> Callable[[Factory], Factory]:
    """Shows the fields of ``options`` in the signature of a function that takes them as ``**options``.

    One list of settings serves every optimizer, and ``help``, editors and ``optax.inject_hyperparams`` (which
    reads the signature) still see each of them by name.
    """

    def decorate(factory: Factory) -> Factory:
        signature = inspect.signature(factory)
        own = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
        names = {p.name for p in own}
        added = [
            inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=f.type)
            for f in dataclasses.fields(options)
            if f.name not in names
        ]
        factory.__signature__ = signature.replace(parameters=own + added)  # type: ignore[attr-defined]
        return factory

    return decorate


def check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    """Raises where a value is none of the choices."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")


def _whole(value: Any) -> int:
    return int(value) if isinstance(value, numbers.Integral) else 0


def _check_number(name: str, value: Any, good: Callable[[float], bool], wanted: str) -> None:
    # Anything but a plain number may be a schedule or a traced value, which cannot be looked at here.
    if isinstance(value, numbers.Real) and not good(float(value)):
        raise ValueError(f"{name} must be {wanted}, got {value!r}")
    if isinstance(value, str) or value is None:
        raise TypeError(f"{name} must be {wanted}, got {value!r}")
