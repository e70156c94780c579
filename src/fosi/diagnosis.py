"""Whether FOSI is likely to help, by how much and with which settings: from what a backend measured, in plain numbers.

``fosi.jax.diagnose`` and ``fosi.torch.diagnose`` measure what is in `fosi.measured`. The formulas are here, in
`fosi.stability` (the base's limit), `fosi.prediction` (the expected ratio) and `fosi.verdict` (the words).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fosi import scaling, verdict
from fosi.measured import Measured, Seconds, refresh_cost, signal_and_noise
from fosi.options import Options
from fosi.prediction import MOST, RACED, fit, leave_one_out, predict, spearman
from fosi.racing import race
from fosi.stability import Base, BaseName, evenly

__all__ = [
    "Base",
    "BaseName",
    "Diagnosis",
    "Measured",
    "Seconds",
    "fit",
    "from_record",
    "leave_one_out",
    "predict",
    "race",
    "spearman",
]


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """What was measured at one point of a training, and what it means for FOSI there.

    Attributes:
      base: the base optimizer's name.
      learning_rate: its rate, η.
      momentum: its momentum.
      n: number of parameters.
      k: how many of the largest eigenpairs were asked for.
      ell: how many of the smallest.
      num_matvecs: Hessian–vector products of one estimate, m.
      eigenvalues: the k largest and the ell smallest, descending.
      residuals: ‖H v − λ v‖ of each.
      accepted: whether FOSI would use it.
      largest: the largest Ritz value.
      smallest: the smallest Ritz value.
      bulk_edge: the largest Ritz value that FOSI would leave to the base; None where nothing is left.
      sharpness: the largest eigenvalue of the Hessian, with Adam of the Hessian divided by √ν + ε.
      sharpness_left: the same of what FOSI would leave to the base, at the base's own rate.
      limit: the curvature above which the base's steps grow.
      lr_scale: FOSI's factor on the base's rate; 1 with Adam.
      max_lr_scale: the cap on it, c.
      batches: how many the gradients were taken on.
      gradient_inside: share of |mean gradient|² that lies in the subspace of the accepted pairs.
      signal_inside: |expected gradient|² in the subspace; unbiased, and so it may be negative.
      signal_outside: the same in its complement.
      noise_inside: trace of the covariance of one batch's gradient, in the subspace; None with one batch.
      noise_outside: the same in its complement.
      refresh_gradients: what an estimate costs, in gradients; 2m where it was not measured.
      budget: FOSI's run-time budget.
      accept: which pairs count as accepted.
      precision: dtype of the Lanczos basis.
      refresh_every: T, as it was given or by the run-time budget; None where no T can meet that.
      overhead: of FOSI's time over the base's with that T; at T = 2m / budget where none meets the budget.
      seconds: measured times, where they were asked for.
      steps_left: that the training has yet to take; None for many.
      steps_taken: that the base has taken; None for many.
      growth: with Adam, how many times as far it goes outside the subspace with FOSI, by how much of ν is new: at each
        of ``fosi.stability.SINCE``; None where it was not measured, and then all coordinates count as `taken` alike.
      raced: FOSI's seconds over the base's in a race, where there was one.
    """

    base: str
    learning_rate: float
    momentum: float
    n: int
    k: int
    ell: int
    num_matvecs: int
    eigenvalues: tuple[float, ...]
    residuals: tuple[float, ...]
    accepted: tuple[bool, ...]
    largest: float
    smallest: float
    bulk_edge: float | None
    sharpness: float
    sharpness_left: float | None
    limit: float
    lr_scale: float
    max_lr_scale: float
    batches: int
    gradient_inside: float
    signal_inside: float
    signal_outside: float
    noise_inside: float | None
    noise_outside: float | None
    refresh_gradients: float
    budget: float
    accept: str
    precision: str
    refresh_every: int | None
    overhead: float
    seconds: Seconds | None = None
    steps_left: int | None = None
    steps_taken: int | None = None
    growth: tuple[float, ...] | None = None
    raced: float | None = None

    @classmethod
    def of(
        cls,
        base: Base,
        measured: Measured,
        options: Options | None = None,
        raced: float | None = None,
        **steps: int | None,
    ) -> Diagnosis:
        """Works out a diagnosis.

        Args:
          base: the optimizer FOSI would be put around.
          measured: what a backend measured.
          options: of the FOSI that it was measured for: its budget, the cap on the scaling of the base's rate, and how
            pairs were estimated and accepted; None for the defaults.
          raced: what a race of base and FOSI has said, if there was one; infinite where FOSI diverged, which counts 2.
          **steps: ``steps_left`` and ``steps_taken``.

        Returns:
          The diagnosis, in Python's own numbers.

        Raises:
          ValueError: if what was measured is not finite.
        """
        m, k, options = measured, measured.k, options or Options()
        seen = [
            m.extremes,
            m.inside,
            m.outside,
            *(x for x in (m.sharpness, m.sharpness_left, m.growth) if x is not None),
        ]
        if not all(np.isfinite(np.asarray(x, float)).all() for x in seen):
            raise ValueError("the loss, its gradient or its curvature is not finite at params or on path, or nu is not")
        values, used = np.asarray(m.eigenvalues, float), np.asarray(m.accepted, bool)
        top, bottom = values[:k][used[:k]], values[k:][used[k:]]
        rest = [*values[:k][~used[:k]].tolist(), *([] if m.beyond is None else [m.beyond])]
        edge = max(rest, default=None)
        whole = [float(x) for x in m.extremes]
        scale = 1.0
        if len(top):
            lowest = float(bottom[0]) if len(bottom) else whole[1]
            scale = scaling.lr_scale(base.rule, whole[0], whole[1], float(top[-1]), lowest, options.max_lr_scale)
        within = np.asarray(m.inside, float) @ np.asarray(m.inside, float).T
        without = np.asarray(m.outside, float)
        signal, noise = signal_and_noise(within)
        signal_out, noise_out = signal_and_noise(without)
        whole_square = float(np.sum(within) + np.sum(without))  # of the sum over batches
        cost, every, extra = refresh_cost(m, options)
        return cls(
            base=base.name,
            learning_rate=float(base.learning_rate),
            momentum=0.0 if base.name == "gd" else float(base.momentum),
            n=m.n,
            k=k,
            ell=m.ell,
            num_matvecs=m.num_matvecs,
            eigenvalues=tuple(values.tolist()),
            residuals=tuple(np.asarray(m.residuals, float).tolist()),
            accepted=tuple(used.tolist()),
            largest=whole[0],
            smallest=whole[1],
            bulk_edge=edge,
            sharpness=whole[0] if m.sharpness is None else m.sharpness,
            sharpness_left=edge if m.sharpness is None else m.sharpness_left,
            limit=base.limit,
            lr_scale=float(scale),
            max_lr_scale=float(options.max_lr_scale),
            batches=len(within),
            gradient_inside=float(np.sum(within)) / whole_square if whole_square > 0 else 0.0,
            signal_inside=signal,
            signal_outside=signal_out,
            noise_inside=noise,
            noise_outside=noise_out,
            refresh_gradients=cost,
            budget=float(options.overhead),
            accept=options.accept,
            precision=options.precision,
            refresh_every=every,
            overhead=extra,
            seconds=m.seconds,
            growth=m.growth,
            raced=None if raced is None else MOST if math.isinf(raced) else float(raced),
            **{name: None if count is None else int(count) for name, count in steps.items()},
        )

    @property
    def used(self) -> int:
        """How many pairs FOSI would use."""
        return sum(self.accepted)

    @property
    def gap(self) -> float | None:
        """λ₁ over the last accepted of the k largest; None where none is."""
        top = [value for value, used in zip(self.eigenvalues[: self.k], self.accepted, strict=False) if used]
        return _over(top[0], top[-1]) if top else None

    @property
    def bulk_gap(self) -> float | None:
        """λ₁ over the bulk's edge; None where the bulk is not there or not positive."""
        return None if self.bulk_edge is None else _over(self.largest, self.bulk_edge)

    @property
    def of_limit(self) -> float:
        """The sharpness as a fraction of the base's limit; about 1 is the edge of stability."""
        return self.sharpness / self.limit

    @property
    def of_limit_left(self) -> float:
        """The same of what FOSI would leave to the base, at the rate that it would have then."""
        return max(self.sharpness_left or 0.0, 0.0) * self.lr_scale / self.limit

    @property
    def noise_share(self) -> float:
        """How much of what longer steps would gain noise takes, by `Base.noise_share`; half for one batch: unknown."""
        if self.noise_outside is None:
            return 0.5
        return self._base.noise_share(max(self.sharpness_left or 0.0, 0.0), self.signal_outside, self.noise_outside)

    @property
    def taken(self) -> float:
        """The part of a batch's squared gradient that lies in the subspace; `gradient_inside` is of their mean."""
        inside = self.signal_inside + (self.noise_inside or 0.0)  # the two are the square, also where one is negative
        whole = inside + self.signal_outside + (self.noise_outside or 0.0)
        return min(max(inside / whole, 0.0), 1.0) if whole > 0 else 0.0

    @property
    def features(self) -> dict[str, float]:
        """What the prediction looks at, in logarithms of how many times.

        ``overhead``: log (1 + overhead). ``rate``: log of FOSI's factor on the base's rate. ``relief``: how much nearer
        to its limit the base is with the sharp directions than without, log ((1 + s/limit) / (1 + s_left/limit)), next
        to nothing far below the limit; s/limit counts 1 at the most, since a training that goes on beyond its limit is
        held there by something else, and s_left/limit too where the rate is not scaled; of Adam what `Base.longer`
        makes of it; and only what is more than ``rate``, which is made of the same distance. ``noisy``: their sum times
        `noise_share`. ``inside``: `gradient_inside`. ``raced``: log of what a race said, where there was one.
        """
        rate = math.log(self.lr_scale)
        left = self.of_limit_left if self.lr_scale > 1 else min(self.of_limit_left, 1.0)
        relief = math.log1p(min(max(self.of_limit, 0.0), 1.0)) - math.log1p(left)
        if relief > 0:
            growth = evenly(self.taken) if self.growth is None else self.growth
            relief = math.log(self._base.longer(math.exp(relief), growth, self.steps_left, self.steps_taken))
        relief -= min(rate, max(relief, 0.0))
        return {
            "overhead": math.log1p(self.overhead),
            "rate": rate,
            "relief": relief,
            "noisy": (rate + relief) * self.noise_share,
            "inside": self.gradient_inside,
            **({} if self.raced is None else {RACED: math.log(self.raced)}),
        }

    @property
    def _base(self) -> Base:
        return Base(self.base, self.learning_rate, self.momentum)

    @property
    def ratio(self) -> float:
        """FOSI's seconds over the base's to the same target, as predicted; below 1 where FOSI is sooner."""
        return predict(self.features)

    def settings(self) -> dict[str, Any]:
        """Keyword arguments for FOSI that suit what was found, see `fosi.verdict.settings`."""
        return verdict.settings(self)

    def explain(self) -> str:
        """A few plain sentences: what was found, what to expect, and what to set."""
        return verdict.explain(self)

    def record(self) -> dict[str, Any]:
        """All of it, the prediction included, for a results file."""
        seconds = None if self.seconds is None else self.seconds._asdict()
        return {
            **dataclasses.asdict(self),
            "seconds": seconds,
            "gap": self.gap,
            "bulk_gap": self.bulk_gap,
            "of_limit": self.of_limit,
            "of_limit_left": self.of_limit_left,
            "features": self.features,
            "ratio": self.ratio,
            "settings": self.settings(),
        }


def from_record(record: Mapping[str, Any]) -> Diagnosis:
    """A diagnosis out of a results file, as `Diagnosis.record` wrote it; what follows from it is worked out anew.

    Args:
      record: may hold more than a diagnosis.

    Raises:
      ValueError: if something is missing.
    """
    given: dict[str, Any] = dict.fromkeys(("steps_left", "steps_taken", "growth", "raced"))  # which older ones have not
    for field in dataclasses.fields(Diagnosis):
        if field.name not in record and field.name not in given:
            raise ValueError(f"record has no {field.name!r}: it is not of a diagnosis, or of an older one")
        given[field.name] = record.get(field.name)
    given |= {name: tuple(value) for name, value in given.items() if isinstance(value, list)}
    seconds = given.pop("seconds")
    return Diagnosis(**given, seconds=None if seconds is None else Seconds(**seconds))


def _over(largest: float, other: float) -> float | None:
    return largest / other if other > 0 else None
