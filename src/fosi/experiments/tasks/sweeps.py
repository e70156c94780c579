"""Larger batches at as many epochs: how far the steps to a target keep falling, of each optimizer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from fosi.experiments.tasks import settings, standings
from fosi.experiments.tasks.runs import Curve
from fosi.experiments.tasks.summary import best, first
from fosi.experiments.tasks.task import Task
from fosi.experiments.tasks.training import Point

Runs = Mapping[int, Mapping[int, Curve]]
"""By batch size and seed."""


@dataclass(frozen=True)
class Sweep:
    """One optimizer with one setting in batches of several sizes.

    Attributes:
      optimizer: its name.
      settings: what is set otherwise than for the task, in words.
      steps: to the target, by batch size: the median over the seeds; None where half of them never reach it.
      seconds: likewise; None too where they are not known.
    """

    optimizer: str
    settings: str
    steps: Mapping[int, float | None]
    seconds: Mapping[int, float | None]


def sweeps(task: Task, curves: Iterable[Curve]) -> list[Sweep]:
    """Those among the finished runs of one task: in batches of two sizes or more, as many epochs as the task's own.

    Of runs on several devices or of several kinds, those of which there are most.
    """
    known = [curve for curve in curves if curve.done is not None and settings.is_wrappable(curve.plan.optimizer)]
    known = [curve for curve in known if curve.plan.length == task.rounds_in(curve.plan.batch_size)]
    kinds = Counter(standings.Kind.of(curve) for curve in known)
    found: dict[tuple[str, str], dict[int, dict[int, Curve]]] = {}
    for curve in known:
        plan = curve.plan
        if standings.Kind.of(curve) == max(kinds, key=lambda kind: (not kind.tiny, kinds[kind])):
            runs = found.setdefault((plan.optimizer, standings.words(curve, plan.length)), {})
            runs.setdefault(plan.batch_size or task.batch_size, {})[plan.seed] = curve
    wide = {names: runs for names, runs in found.items() if len(runs) > 1}
    bases = {name: wide[name, ""] for name in settings.BASES if (name, "") in wide}
    return [
        sweep(task, *names, runs, bases[base])
        for names, runs in wide.items()
        if (base := settings.without_fosi(names[0])) in bases
    ]


def sweep(task: Task, optimizer: str, words: str, runs: Runs, base: Runs) -> Sweep:
    """One optimizer's, to the target that its base sets with the same seed.

    That is the best validation of the base alone, at the task's own rate, in its largest batch: where the rate is not
    raised with the batch it is the easiest of its bests, which the smaller ones reach too.
    """
    targets = {seed: best(curve.points, "metric", task.sign) for seed, curve in base[max(base)].items()}
    steps: dict[int, float | None] = {}
    seconds: dict[int, float | None] = {}
    for size, seeds in sorted(runs.items()):
        reached = [
            reach(curve, target, task.sign)
            for seed, curve in seeds.items()
            if (target := targets.get(seed)) is not None
        ]
        steps[size] = standings.middle(None if point is None else point.step for point in reached)
        seconds[size] = standings.middle(None if point is None else point.seconds for point in reached)
    return Sweep(optimizer, words, steps, seconds)


def reach(curve: Curve, target: float, sign: int) -> Point | None:
    """The first round with a metric as good."""
    return first(curve.points, lambda point: sign * (point.metric - target) >= 0)
