"""Base and FOSI trained side by side for a while: who is sooner, and by how much in the end."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fosi import racing
from fosi.experiments.tasks import runs, settings
from fosi.experiments.tasks.engine import Engine
from fosi.experiments.tasks.plan import Plan
from fosi.experiments.tasks.ratios import Ratio
from fosi.experiments.tasks.runs import Curve, Files
from fosi.experiments.tasks.standings import Entry
from fosi.experiments.tasks.task import Problem
from fosi.experiments.tasks.training import Point

SHARES = (0.03, 0.1, 0.2, 0.5)
"""Of the seconds of the base's whole run, that a race is given."""
FOLDER = "races"
"""Where its runs lie, in the folder for results: short ones, which are not held against whole ones."""


@dataclass(frozen=True)
class Held:
    """A race that was run.

    Attributes:
      ratio: what it says; see `race`.
      alone: the base's run.
      checkpoint: of the base where the race ended; not there where its run was made without.
      engine: of the base, for as long a training as was asked about.
    """

    ratio: Ratio
    alone: Curve
    checkpoint: Path
    engine: Engine


def check(share: float) -> None:
    """Raises where it is no part of a run."""
    if not 0 < share <= 1:
        raise ValueError(f"race is {share:g}; give a part of the run, above 0 and at most 1, such as 0.2")


def hold(
    plan: Plan,
    problem: Problem,
    out: Path,
    share: float,
    on_point: Callable[[Point, Engine, int], None] = lambda point, engine, steps: None,
) -> Held:
    """Trains a base and FOSI around it, with the task's own settings, and says who was sooner.

    Both for as many rounds as FOSI has before its first estimate, and then a part of the whole run, however long FOSI
    takes for them. The runs are on disk then, as all runs are but in a folder of their own, and one that was killed
    goes on.

    Args:
      plan: of the training, as long as all of it is; of the base or of FOSI around it.
      problem: of ``plan.build``; where a step sees all data, FOSI's estimates are on a part of them.
      out: folder for the results.
      share: of the whole run's rounds, above 0 and at most 1.
      on_point: called after every round of either, with how many steps each is to take.

    Returns:
      What `race` says of the two, infinite where FOSI diverged, and where the base is now.

    Raises:
      ValueError: if the share is out of its range, the run is over before FOSI's first estimate, the base diverged, or
        one of the runs was there and was made on another device, or on one that it shared.
    """
    check(share)
    base = settings.without_fosi(plan.optimizer)
    whole = replace(plan, optimizer=base, curvature="fixed", seconds=None, options={})
    around = replace(whole, optimizer=f"fosi-{base}", curvature="fixed" if problem.part is None else "part")
    engine, ours_engine = whole.engine(problem), around.engine(problem)
    assert ours_engine.schedule is not None  # FOSI's has one
    before = ours_engine.schedule.warmup // engine.steps_a_round
    if before >= whole.length:
        raise ValueError(
            f"FOSI makes its first estimate after {before} rounds, and the whole run has {whole.length}: there is "
            "nothing to race; give more with --rounds, or look at one point alone with --race 0"
        )
    rounds, where = before + math.ceil(share * whole.length), out / FOLDER

    def told(point: Point, engine: Engine) -> None:
        on_point(point, engine, rounds * engine.steps_a_round)

    def run(one: Plan, engine: Engine, keep: bool) -> Curve:
        curve = runs.run(replace(one, rounds=rounds), problem, where, told, engine=engine, keep=keep)
        for name, here in (("device", engine.device_name), ("shared", False)):
            if (there := curve.environment[name]) != here:
                raise ValueError(f"{curve.path} has {name} {there}, and here it is {here}: remove it to race anew")
        return curve

    alone = run(whole, engine, True)
    if alone.points[-1].diverged:
        raise ValueError(f"{base} diverged in the race, after {alone.points[-1].step} steps: there is none to race")
    ours = run(around, ours_engine, False)
    found = race(Entry(around.optimizer, "", {plan.seed: ours}), Entry(base, "", {plan.seed: alone}))
    assert found is not None  # there is a round after the first estimate
    return Held(found, alone, Files.of(alone.plan, where).checkpoint, engine)


def race(ours: Entry, alone: Entry, share: float | None = None) -> Ratio | None:
    """What `fosi.racing.race` makes of two optimizers' runs, from FOSI's first estimate on.

    Args:
      ours: FOSI's runs.
      alone: those of its base.
      share: of the seconds of the base's whole run, after which the race is over; None for all of both.

    Returns:
      The ratio over the seeds that both have; None where no seed has a round of both in there.
    """
    cuts = [_cut(ours.runs[seed], alone.runs[seed], share) for seed in ours.runs if seed in alone.runs]
    # A base that has diverged by then is no base to be sooner than.
    known = [cut for cut in cuts if cut is not None and not cut[1][-1].diverged]
    found = [racing.race(_rounds(alone), _rounds(ours)) for ours, alone in known]
    reached = [ratio for ratio in found if math.isfinite(ratio)]
    return Ratio.of(reached, len(found) - len(reached), math.inf)


def _rounds(points: Sequence[Point]) -> list[tuple[float, float]]:
    return [(point.seconds, point.train_loss) for point in points]


def _cut(ours: Curve, alone: Curve, share: float | None) -> tuple[tuple[Point, ...], tuple[Point, ...]] | None:
    """The two runs between the last round before an estimate and the race's end, on a clock that starts there."""
    before = [point for point in ours.points if point.refreshes == 0]
    if len(before) == len(ours.points):
        return None
    step = before[-1].step if before else 0
    length = math.inf if share is None else share * alone.points[-1].seconds
    first, second = _between(ours.points, step, length), _between(alone.points, step, length)
    return (first, second) if first and second else None


def _between(points: tuple[Point, ...], step: int, length: float) -> tuple[Point, ...]:
    start = max((point.seconds for point in points if point.step <= step), default=0.0)
    later = (point._replace(seconds=point.seconds - start) for point in points if point.step > step)
    return tuple(point for point in later if point.seconds <= length)
