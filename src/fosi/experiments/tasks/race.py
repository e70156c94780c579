"""How long base and FOSI must be trained side by side until it shows which is sooner: a measure for any prediction."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from fosi.experiments.tasks import runs, settings
from fosi.experiments.tasks.engine import Engine
from fosi.experiments.tasks.plan import Plan
from fosi.experiments.tasks.ratios import MISS, Ratio
from fosi.experiments.tasks.runs import Curve
from fosi.experiments.tasks.standings import Entry
from fosi.experiments.tasks.task import Problem
from fosi.experiments.tasks.training import Point

SHARES = (0.03, 0.1, 0.2, 0.5)
"""Of the seconds of the base's whole run, that a race is given."""


def hold(
    plan: Plan,
    problem: Problem,
    out: Path,
    share: float,
    on_point: Callable[[Point, Engine], None] = lambda point, engine: None,
) -> float:
    """Trains the base and FOSI around it for a part of the base's rounds, and says who was sooner.

    Both runs are on disk then, as all runs are, and one that was killed goes on.

    Args:
      plan: of the training, as long as all of it is.
      problem: of ``plan.build``; where a step sees all data, FOSI's estimates are on a part of them.
      out: folder for the results.
      share: of the rounds, above 0 and at most 1.
      on_point: called after every round of either.

    Returns:
      FOSI's seconds over the base's from the first estimate on, to the lowest loss that both came to; 2 where FOSI
      diverged.

    Raises:
      ValueError: if the share is out of its range, or no round comes after an estimate of FOSI's in there.
    """
    if not 0 < share <= 1:
        raise ValueError(f"race is {share:g}; give a part of the run, above 0 and at most 1, such as 0.2")
    base = settings.without_fosi(plan.optimizer)  # a checkpoint may be of either
    whole = replace(plan, optimizer=base, curvature="fixed", seconds=None, options={})
    short = replace(whole, rounds=max(1, math.ceil(share * whole.length)))
    around = replace(short, optimizer=f"fosi-{base}")
    if problem.part is not None:
        around = replace(around, curvature="part")
    alone, ours = (
        Entry(one.optimizer, "", {one.seed: runs.run(one, problem, out, on_point=on_point)}) for one in (short, around)
    )
    found = race(ours, alone, math.inf)
    if found is None:
        raise ValueError(
            f"race is {share:g}, which is {short.length} rounds: FOSI has no round after an estimate in there, or the "
            "base diverged; give more"
        )
    return found.median if math.isfinite(found.median) else MISS


def race(ours: Entry, alone: Entry, share: float) -> Ratio | None:
    """FOSI's seconds over the base's from the first estimate on, to the lowest loss that both come to in so long.

    Args:
      ours: FOSI's runs.
      alone: those of its base.
      share: of the seconds of the base's whole run, after which the race is over.

    Returns:
      The ratio over the seeds that both have; None where no seed has a round of both in there.
    """
    both = [seed for seed in ours.runs if seed in alone.runs]
    known = {seed: cut for seed in both if (cut := _cut(ours.runs[seed], alone.runs[seed], share))}
    first = replace(ours, runs={seed: cut[0] for seed, cut in known.items()})
    return first.ratio_to_both(replace(alone, runs={seed: cut[1] for seed, cut in known.items()}))


def _cut(ours: Curve, alone: Curve, share: float) -> tuple[Curve, Curve] | None:
    """The two runs between the last round before an estimate and the race's end, on a clock that starts there."""
    before = [point for point in ours.points if point.refreshes == 0]
    if len(before) == len(ours.points):
        return None
    step, length = before[-1].step if before else 0, share * alone.points[-1].seconds
    # That one of them diverges later is not known by then, and so neither is how it was done.
    cut = [replace(curve, points=_between(curve.points, step, length), done=None) for curve in (ours, alone)]
    return (cut[0], cut[1]) if all(curve.points for curve in cut) else None


def _between(points: tuple[Point, ...], step: int, length: float) -> tuple[Point, ...]:
    start = max((point.seconds for point in points if point.step <= step), default=0.0)
    later = (point._replace(seconds=point.seconds - start) for point in points if point.step > step)
    return tuple(point for point in later if point.seconds <= length)
