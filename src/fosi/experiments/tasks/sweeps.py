"""Larger batches at as many epochs: how far the steps to a target keep falling, of each optimizer at its best rate."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from fosi.experiments.tasks import settings, standings
from fosi.experiments.tasks.runs import Curve
from fosi.experiments.tasks.standings import middle
from fosi.experiments.tasks.summary import best, first
from fosi.experiments.tasks.task import Task
from fosi.experiments.tasks.training import Point

Seeds = Mapping[int, Curve]
"""The runs of one optimizer with one setting in batches of one size."""
Tried = Mapping[str, Seeds]
"""Those of one optimizer in batches of one size, by setting in words."""
GOALS = {"metric": "validation", "train_loss": "training loss"}
"""What a target is of, as a point of a curve has it, and in words."""


@dataclass(frozen=True)
class Cell:
    """One optimizer with one setting in batches of one size.

    Attributes:
      settings: what is set otherwise than for the task, in words.
      steps: to the target, the median over the seeds; None where half of them never reach it.
      seconds: likewise; None too where they are not known.
      best: the best of a run, the median over the seeds; None where half of them have none.
      seeds: how many runs.
    """

    settings: str
    steps: float | None
    seconds: float | None
    best: float | None
    seeds: int


@dataclass(frozen=True)
class Sweep:
    """One optimizer in batches of several sizes.

    Attributes:
      optimizer: its name.
      tried: by size, every setting.
      best: by size, the one with the fewest steps to the target; where none reaches it, the one that comes nearest.
    """

    optimizer: str
    tried: Mapping[int, tuple[Cell, ...]]
    best: Mapping[int, Cell]


def sweeps(task: Task, curves: Iterable[Curve], goal: str = "metric") -> list[Sweep]:
    """Those among the finished runs of one task: in batches of two sizes or more, as many epochs as the task's own.

    The target is of ``GOALS``, one for each base and seed: the best that the base has alone in its largest batch, at
    the best of its rates. Of runs on several devices or of several kinds, those of which there are most.
    """
    known = [curve for curve in curves if curve.done is not None and settings.is_wrappable(curve.plan.optimizer)]
    known = [curve for curve in known if curve.plan.length == task.rounds_in(curve.plan.batch_size)]
    kinds = Counter(standings.Kind.of(curve) for curve in known)
    found: dict[str, dict[int, dict[str, dict[int, Curve]]]] = {}
    for curve in known:
        plan = curve.plan
        if standings.Kind.of(curve) == max(kinds, key=lambda kind: (not kind.tiny, kinds[kind])):
            tried = found.setdefault(plan.optimizer, {}).setdefault(plan.batch_size or task.batch_size, {})
            tried.setdefault(standings.words(curve, plan.length), {})[plan.seed] = curve
    wide = {name: sizes for name, sizes in found.items() if len(sizes) > 1}
    sign = task.sign if goal == "metric" else -1
    made = []
    for name, sizes in wide.items():
        if (base := wide.get(settings.without_fosi(name))) is not None:
            targets = _targets(base[max(base)], goal, sign)
            tries = {size: tuple(_cells(tried, targets, goal, sign)) for size, tried in sorted(sizes.items())}
            made.append(Sweep(name, tries, {size: _fewest(cells, sign) for size, cells in tries.items() if cells}))
    return made


def _targets(tried: Tried, goal: str, sign: int) -> dict[int, float]:
    """The best of each seed at the setting whose median is best, among those with as many seeds as any."""
    most = max(len(seeds) for seeds in tried.values())
    bests = [_bests(seeds, goal, sign) for seeds in tried.values() if len(seeds) == most]
    chosen = max(bests, key=lambda found: _worth(middle(found.values()), sign))
    return {seed: value for seed, value in chosen.items() if value is not None}


def _bests(seeds: Seeds, goal: str, sign: int) -> dict[int, float | None]:
    return {seed: best(curve.points, goal, sign) for seed, curve in seeds.items()}


def _worth(value: float | None, sign: int) -> float:
    return -math.inf if value is None else sign * value


def _cells(tried: Tried, targets: Mapping[int, float], goal: str, sign: int) -> Iterable[Cell]:
    for words, seeds in tried.items():
        mine = {seed: curve for seed, curve in seeds.items() if seed in targets}
        if mine:
            reached = [reach(curve, targets[seed], goal, sign) for seed, curve in mine.items()]
            steps = middle(None if point is None else point.step for point in reached)
            seconds = middle(None if point is None else point.seconds for point in reached)
            yield Cell(words, steps, seconds, middle(_bests(mine, goal, sign).values()), len(mine))


def _fewest(cells: tuple[Cell, ...], sign: int) -> Cell:
    """Among those with as many seeds as any: one seed may be lucky."""
    most = max(cell.seeds for cell in cells)

    def order(cell: Cell) -> tuple[float, float]:
        return (math.inf if cell.steps is None else cell.steps), -_worth(cell.best, sign)

    return min((cell for cell in cells if cell.seeds == most), key=order)


def reach(curve: Curve, target: float, goal: str, sign: int) -> Point | None:
    """The first round as good."""
    return first(curve.points, lambda point: sign * (getattr(point, goal) - target) >= 0)
