"""Base and FOSI trained side by side for a while: who is sooner, and how long it takes until that shows."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from fosi.experiments.tasks import runs, settings
from fosi.experiments.tasks.engine import Engine
from fosi.experiments.tasks.plan import Plan
from fosi.experiments.tasks.ratios import Ratio
from fosi.experiments.tasks.runs import Curve
from fosi.experiments.tasks.standings import Entry
from fosi.experiments.tasks.task import Problem
from fosi.experiments.tasks.training import Point

SHARES = (0.03, 0.1, 0.2, 0.5)
"""Of the seconds of the base's whole run, that a race is given."""


def check(share: float) -> None:
    """Raises where it is no part of a run."""
    if not 0 < share <= 1:
        raise ValueError(f"race is {share:g}; give a part of the run, above 0 and at most 1, such as 0.2")


def hold(
    plan: Plan,
    problem: Problem,
    out: Path,
    share: float,
    on_point: Callable[[Point, Engine], None] = lambda point, engine: None,
) -> Ratio:
    """Trains a base and FOSI around it, with the task's own settings, and says who was sooner.

    Both for as many rounds as FOSI has before its first estimate, and then a part of the whole run, however long FOSI
    takes for them. The runs are on disk then, as all runs are, and one that was killed goes on.

    Args:
      plan: of the training, as long as all of it is; of the base or of FOSI around it.
      problem: of ``plan.build``; where a step sees all data, FOSI's estimates are on a part of them.
      out: folder for the results.
      share: of the whole run's rounds, above 0 and at most 1.
      on_point: called after every round of either.

    Returns:
      FOSI's seconds over the base's from the first estimate on, to the lowest loss that both came to; infinite where
      FOSI diverged.

    Raises:
      ValueError: if the share is out of its range, the base diverged, or one of the runs was there and was made on
        another device, or on one that it shared.
    """
    check(share)
    base = settings.without_fosi(plan.optimizer)
    whole = replace(plan, optimizer=base, curvature="fixed", seconds=None, options={})
    around = replace(whole, optimizer=f"fosi-{base}", curvature="fixed" if problem.part is None else "part")
    engine = around.engine(problem)
    assert engine.schedule is not None  # FOSI's has one
    before = engine.schedule.warmup // engine.steps_a_round
    rounds = before + math.ceil(share * whole.length)
    alone, ours = (runs.run(replace(one, rounds=rounds), problem, out, on_point=on_point) for one in (whole, around))
    for name in ("device", "shared"):
        if alone.environment[name] != ours.environment[name]:
            raise ValueError(
                f"{alone.path} has {name} {alone.environment[name]} and {ours.path} {ours.environment[name]}: they do "
                "not race; remove the older one"
            )
    if alone.points[-1].diverged:
        raise ValueError(f"{base} diverged in the race, after {alone.points[-1].step} steps: there is none to race")
    found = race(Entry(around.optimizer, "", {plan.seed: ours}), Entry(base, "", {plan.seed: alone}))
    assert found is not None  # there is a round after the first estimate
    return found


def race(ours: Entry, alone: Entry, share: float | None = None) -> Ratio | None:
    """FOSI's seconds over the base's from the first estimate on, to the lowest loss that both come to in so long.

    Args:
      ours: FOSI's runs.
      alone: those of its base.
      share: of the seconds of the base's whole run, after which the race is over; None for all of both.

    Returns:
      The ratio over the seeds that both have; None where no seed has a round of both in there.
    """
    both = [seed for seed in ours.runs if seed in alone.runs]
    known = {seed: cut for seed in both if (cut := _cut(ours.runs[seed], alone.runs[seed], share))}
    first = replace(ours, runs={seed: cut[0] for seed, cut in known.items()})
    return first.ratio_to_both(replace(alone, runs={seed: cut[1] for seed, cut in known.items()}))


def _cut(ours: Curve, alone: Curve, share: float | None) -> tuple[Curve, Curve] | None:
    """The two runs between the last round before an estimate and the race's end, on a clock that starts there."""
    before = [point for point in ours.points if point.refreshes == 0]
    if len(before) == len(ours.points):
        return None
    step = before[-1].step if before else 0
    length = math.inf if share is None else share * alone.points[-1].seconds
    cut = [replace(curve, points=_between(curve.points, step, length)) for curve in (ours, alone)]
    # That one of them diverges later is not known by then, and so neither is how it was done.
    first, second = (
        replace(one, done=None if not one.points else {"diverged": one.points[-1].diverged}) for one in cut
    )
    return (first, second) if first.points and second.points else None


def _between(points: tuple[Point, ...], step: int, length: float) -> tuple[Point, ...]:
    start = max((point.seconds for point in points if point.step <= step), default=0.0)
    later = (point._replace(seconds=point.seconds - start) for point in points if point.step > step)
    return tuple(point for point in later if point.seconds <= length)
