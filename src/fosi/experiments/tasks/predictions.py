"""Diagnoses held against measurements: what `fosi diagnose` foretold of each task, and what its runs then took."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fosi import diagnosis, prediction
from fosi.experiments import records
from fosi.experiments.tasks import PAPER, TASKS, ratios, standings, summary
from fosi.experiments.tasks.plan import Plan
from fosi.experiments.tasks.race import FOLDER, SHARES, race
from fosi.experiments.tasks.ratios import MISS, Ratio
from fosi.experiments.tasks.runs import Curve
from fosi.experiments.tasks.standings import Entry

FEWEST = 4
"""Tasks, for a rule that is fitted without one of them."""
RACE = 0.2
"""The race that predictions are shown with: of the base's seconds, those after which a diagnosis is best made."""


class Pair(NamedTuple):
    """A base on a task, diagnosed and measured.

    Attributes:
      task: its name.
      mode: of the task; empty for its first.
      base: the base's name.
      settings: of FOSI, where they are not the task's own.
      features: of the diagnosis.
      measured: FOSI's seconds over the base's, to the lowest training loss that both come to.
      target: the same to the base's lowest, which FOSI may never have.
      validation: the same to its best validation; None where that is not the paper's task.
      races: what `race` says of the beginnings of the same runs, after each of its shares; empty where there is no
        round that early.
      after: steps of the base before the diagnosis, and of its whole run.
      device: the runs are of.
      held: by seed, what races said that were held apart from these runs, with seeds that none of them has.
    """

    task: str
    mode: str
    base: str
    settings: str
    features: Mapping[str, float]
    measured: Ratio
    target: Ratio
    validation: Ratio | None
    races: Mapping[float, float]
    after: tuple[int, int]
    device: str
    held: Mapping[int, float] = MappingProxyType({})

    @property
    def label(self) -> str:
        """The task, and the mode and the settings where they are not its own."""
        return ", ".join(word for word in (self.task, self.mode, self.settings) if word)

    @property
    def ratio(self) -> float:
        """What is measured, as a number: 2 for a miss, which is a run that diverged."""
        return _number(self.measured)


def pairs(where: Path) -> list[Pair]:
    """All bases that were diagnosed on a task and trained there alone and with FOSI, on the same device.

    Each with the task's own rate and batches, and as it was diagnosed last, with estimates on the same data. And with
    the task's own settings of FOSI, but where a line has others as ``fosi_settings``: what was its own before.
    Where the cost of an estimate was counted, not timed, nothing in a diagnosis is of the device: then it is held
    against the runs of the device with most of them.

    Args:
      where: the results folder.
    """
    found: dict[tuple[str, str, str, str], Pair] = {}
    for task in TASKS:
        path = where / task / "diagnosis.jsonl"
        if not path.exists():
            continue
        curves, raced = summary.retimed(summary.curves(where / task)), summary.curves(where / FOLDER / task)
        devices = Counter(curve.environment["device"] for curve in curves).most_common(1)
        for line in records.read_jsonl(path):
            plan = Plan(**line["plan"])
            if plan.tiny or plan.rate_factor != 1 or plan.batch_size is not None:
                continue
            try:
                seen = diagnosis.from_record(line)
            except ValueError as error:
                raise ValueError(f"{path}: {error}; diagnose it again") from error
            device = devices[0][0] if devices and seen.seconds is None else line["device"]
            there = [curve for curve in curves if curve.environment["device"] == device]
            options = line.get("fosi_settings", {})
            alone, ours = _entries(there, plan, options)
            if alone is None or ours is None:
                continue
            measured, target = ours.ratio_to_both(alone), ours.ratio(alone)
            if measured is None or target is None:
                continue
            said = ", ".join(f"{name} {value}" for name, value in sorted(options.items()))
            key = (task, plan.other_mode, plan.optimizer, said)
            after = line["step"], max(curve.points[-1].step for curve in alone.runs.values())
            # How long one trains one knows.
            seen = replace(seen, steps_left=max(after[1] - after[0], 1), steps_taken=max(after[0], 1))
            seen = replace(seen, raced=None)  # which the runs say
            races = {share: _number(known) for share in SHARES if (known := race(ours, alone, share))}
            validation, held = _validation(there, plan), _held(raced, ours, alone)
            found[key] = Pair(*key, seen.features, measured, target, validation, races, after, device, held)
    return list(found.values())


def _held(raced: Sequence[Curve], ours: Entry, alone: Entry) -> dict[int, float]:
    """By seed, what races of the same two say; those whose seed either was measured with are left out.

    Of those that are about as long as a race is shown for, part of the measured base's rounds, the one that is most so.
    """
    found: dict[int, tuple[float, int, float]] = {}
    runs = {_like(curve, curve.plan.seed, curve.plan.rounds): curve for curve in raced}
    first, second = next(iter(ours.runs.values())), next(iter(alone.runs.values()))
    whole = statistics.median(len(curve.points) for curve in alone.runs.values())
    for curve in raced:
        plan = curve.plan
        base = runs.get(_like(second, plan.seed, plan.rounds))
        if curve is not runs.get(_like(first, plan.seed, plan.rounds)) or base is None or plan.rounds is None:
            continue
        known = race(Entry(plan.optimizer, "", {plan.seed: curve}), Entry(base.plan.optimizer, "", {plan.seed: base}))
        length = plan.rounds - sum(point.refreshes == 0 for point in curve.points)
        off = abs(length - math.ceil(RACE * whole))
        if known is None or plan.seed in (*ours.runs, *alone.runs) or off > max(1.0, RACE / 4 * whole):
            continue
        if (off, -length) < found.get(plan.seed, (math.inf, 0, 0.0))[:2]:  # of two as far off the longer one
            found[plan.seed] = off, -length, _number(known)
    return {seed: ratio for seed, (_, _, ratio) in found.items()}


def _like(curve: Curve, seed: int, rounds: int | None) -> tuple[str, str]:
    """The device and the name of the same run with another seed and so many rounds, which a race of it would have."""
    alike = replace(curve.plan, seed=seed, rounds=rounds, seconds=None, mode=curve.plan.other_mode or None)
    return curve.environment["device"], alike.name


def raced(found: Sequence[Pair], seed: int | None = None) -> list[Pair]:
    """Those that have been raced apart from their runs, which their features then know of: with a seed, or the median.

    One that has no race of the seed is left out.
    """
    said = {
        index: statistics.median(pair.held.values()) if seed is None else pair.held.get(seed)
        for index, pair in enumerate(found)
        if pair.held
    }
    return [_told(found[index], ratio) for index, ratio in said.items() if ratio is not None]


def begun(found: Sequence[Pair], share: float = RACE) -> list[Pair]:
    """The same with the beginnings of the very runs as races: what a race of another length would be worth."""
    return [_told(pair, pair.races[share]) for pair in found if share in pair.races]


def seeds(found: Sequence[Pair]) -> list[int]:
    """Of the races that all of them have."""
    return sorted(set.intersection(*(set(pair.held) for pair in found))) if found else []


def _told(pair: Pair, ratio: float) -> Pair:
    return pair._replace(features={**pair.features, prediction.RACED: math.log(ratio)})


def predicted(found: Sequence[Pair]) -> NDArray[np.float64]:
    """Each pair's ratio by a rule that was fitted without any pair of its task."""
    names = [pair.task for pair in found]
    return prediction.leave_one_out([pair.features for pair in found], measured_ratios(found), groups=names)


def fitted(found: Sequence[Pair]) -> dict[str, float]:
    """The coefficients that all pairs together give."""
    return prediction.fit([pair.features for pair in found], measured_ratios(found))


def by_task(found: Sequence[Pair], values: Sequence[float] | NDArray[np.float64]) -> dict[str, float]:
    """The geometric mean over a task's bases and modes."""
    logs: dict[str, list[float]] = {}
    for pair, value in zip(found, values, strict=True):
        logs.setdefault(pair.task, []).append(math.log(value))
    return {task: math.exp(sum(some) / len(some)) for task, some in logs.items()}


def spread(found: Sequence[Pair], apart: NDArray[np.float64]) -> float:
    """How far the logarithm of a measured ratio is from that of a prediction: root mean square."""
    return float(np.sqrt(np.mean((np.log(measured_ratios(found)) - np.log(apart)) ** 2)))


def measured_ratios(found: Sequence[Pair]) -> list[float]:
    """What was measured of each, as numbers."""
    return [pair.ratio for pair in found]


def _number(ratio: Ratio) -> float:
    return ratio.median if math.isfinite(ratio.median) else MISS


def _entries(curves: Sequence[Curve], plan: Plan, options: Mapping[str, Any]) -> tuple[Entry | None, Entry | None]:
    """The base alone and FOSI around it, with these settings, and estimates on what they were diagnosed on.

    The paper's tasks as long as the paper has them; of the others the longest runs that there are of both.
    """
    names = plan.optimizer, f"fosi-{plan.optimizer}"
    if plan.task in PAPER:
        alike = [replace(plan, optimizer=name, curvature="fixed", mode=None) for name in names]
        known = [curve for curve in curves if curve.plan.other_mode == plan.other_mode]
        every = [{c.plan.seed: c for c in known if replace(c.plan, seed=plan.seed, mode=None) == one} for one in alike]
        alone, ours = (Entry(name, "", some) if some else None for name, some in zip(names, every, strict=True))
        return alone, ours
    found: list[tuple[float, Entry, Entry]] = []
    for kind, known_entries in standings.kinds(curves).items():
        alone = _with(known_entries, names[0], "fixed", {})
        ours = _with(known_entries, names[1], plan.curvature, options)
        right = not kind.tiny and kind.mode == plan.other_mode and kind.backend == plan.backend
        if right and alone is not None and ours is not None:
            found.append((alone.seconds or 0.0, alone, ours))
    return max(found, key=lambda some: some[0])[1:] if found else (None, None)


def _validation(curves: Sequence[Curve], plan: Plan) -> Ratio | None:
    """To the best validation of the base, where the task is the paper's."""
    if plan.task not in PAPER or plan.other_mode:  # the group is of the first mode
        return None
    group = ratios.groups(summary.summarise(curves)).get(plan.task)
    return None if group is None else group.ratio(group.pick(f"fosi-{plan.optimizer}"), plan.optimizer)


def _with(known: Sequence[Entry], optimizer: str, curvature: str, options: Mapping[str, Any]) -> Entry | None:
    """The runs with the task's own rate and these settings."""
    for entry in known:
        plan = next(iter(entry.runs.values())).plan
        if (plan.optimizer, plan.rate_factor, plan.curvature, plan.options) == (optimizer, 1, curvature, options):
            return entry
    return None
