"""What the runs of a task say together: medians over seeds, ratios to the base, what a miss counts."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from fosi import prediction, schedule
from fosi.experiments.tasks import TASKS, settings

Line = Mapping[str, Any]
_ALIKE = ("backend", "rounds", "tiny", "device", "backbone")
_ROUNDS = 1 + _ALIKE.index("rounds")

MISS = prediction.MOST
"""What a target that was never reached enters a mean of ratios as."""
BASES = ("heavy-ball", "adam")
"""Those of the paper's tables."""

PAPER = {
    "ac": {"heavy-ball": (3822, 1850, 6845, 3599), "adam": (5042, 3911, 6042, 6825)},
    "lm": {"heavy-ball": (269, 207, 255, 177), "adam": (270, 219, 255, 233)},
    "ae": {"heavy-ball": (354, 267, 372, 322), "adam": (375, 313, 375, 338)},
    "tl": {"heavy-ball": (93, 53, 103, 58), "adam": (68, 33, 104, 71)},
    "lr": {"heavy-ball": (16, 8, 18, 10), "adam": (12, 18, 19, 19)},
}
"""The paper's Tables 1 and 2, seconds on an A40: base and FOSI to the validation target, then to the training one."""


class Ratio(NamedTuple):
    """Of a run to its base, the same seed against the same seed.

    Attributes:
      median: over the seeds, with misses in it.
      misses: how many seeds never reached the target.
      seeds: how many there are.
      least: of those that reached it; infinite where none did.
      largest: of all, infinite with a miss.
    """

    median: float
    misses: int
    seeds: int
    least: float
    largest: float

    @classmethod
    def of(cls, reached: Sequence[float], misses: int, miss: float) -> Ratio | None:
        """Of the seeds that reached the target, and how many did not, which count ``miss`` in the median."""
        every = [*reached, *[miss] * misses]
        if not every:
            return None
        largest = math.inf if misses else max(reached)
        return cls(statistics.median(every), misses, len(every), min(reached, default=math.inf), largest)


class Overhead(NamedTuple):
    """What FOSI costs beside its base, in the paper's words of its section 3.5.

    Attributes:
      base_ms: τ₁, a step of the base.
      fosi_ms: τ₂, a step of FOSI.
      refresh_ms: τ₃, an estimate.
      measured: what FOSI's run took over as many steps of the base, less one.
      every: T as it was, by the formula.
      measured_every: T by the three times; None where no T meets the budget.
    """

    base_ms: float
    fosi_ms: float
    refresh_ms: float
    measured: float
    every: int
    measured_every: int | None


@dataclass(frozen=True)
class Group:
    """The runs of one task that can be compared: one backend, mode, length and device.

    K-FAC and L-BFGS may have been given fewer rounds, since theirs take longer.
    """

    task: str
    lines: Sequence[Line]

    @property
    def length(self) -> int:
        """How many rounds its runs have."""
        return max(line["rounds"] for line in self.lines)

    def pick(
        self,
        optimizer: str,
        rate_factor: float = 1.0,
        curvature: str = "fixed",
        options: Mapping[str, Any] | None = None,
    ) -> dict[int, Line]:
        """The runs with these settings by seed."""
        wanted = (optimizer, rate_factor, curvature, dict(options or {}))
        keys = ("optimizer", "rate_factor", "curvature", "options")
        return {line["seed"]: line for line in self.lines if tuple(line[key] for key in keys) == wanted}

    def median(self, picked: Mapping[int, Line], name: str) -> float | None:
        """The median of a field over the seeds; None where it is unknown, or never reached by half of them."""
        found = [line[name] for line in picked.values()]
        if sum(x is None for x in found) * 2 >= len(found):
            return None
        return statistics.median(float("inf") if x is None else x for x in found)

    def ratio(self, picked: Mapping[int, Line], base: str, name: str = "seconds_to_target") -> Ratio | None:
        """The ratio of a field to the base's; None where no seed has both."""
        against = self.pick(base)
        ratios, misses = [], 0
        for seed, line in picked.items():
            if seed not in against or not against[seed][name]:
                continue
            if missed(line, name):
                misses += 1
            elif line[name] is not None:  # else reached, at a time that is not known
                ratios.append(line[name] / against[seed][name])
        return Ratio.of(ratios, misses, MISS)

    def best_against_best(self, name: str = "seconds_to_target") -> float | None:
        """The sooner of the FOSI runs over the sooner of the bases, each to its own target, as the paper has it.

        Infinite where neither FOSI run reaches its target; None where a run is missing.
        """
        ours, bases = [self.pick(f"fosi-{base}") for base in BASES], [self.pick(base) for base in BASES]
        if not all(ours) or not all(bases):
            return None
        times = [
            [float("inf") if (x := self.median(picked, name)) is None else x for picked in some]
            for some in (ours, bases)
        ]
        return min(times[0]) / min(times[1]) if min(times[1]) < float("inf") else None

    def overhead(self, base: str, budget: float = 0.1) -> Overhead | None:
        """What FOSI costs on this base; None where a run is missing or made no estimate."""
        ours, against = self.pick(f"fosi-{base}"), self.pick(base)
        values = [self.median(against, "ms_per_step")]
        values += [self.median(ours, name) for name in ("ms_per_step", "ms_per_refresh", "overhead_measured")]
        if None in values:
            return None
        tau1, tau2, tau3, measured = (float(x) for x in values if x is not None)
        try:
            every = schedule.measured_refresh_interval(tau1, tau2, tau3, budget)
        except ValueError:  # a step alone takes longer than the budget allows
            every = None
        planned = next(iter(ours.values()))["refresh_every"]
        return Overhead(tau1, tau2, tau3, measured, planned, every)


def missed(line: Line, name: str) -> bool:
    """Whether the run had a target and never reached it; ``name`` is a field of the one target or of the other."""
    train = "train_target" in name
    target, steps = ("target_train", "steps_to_train_target") if train else ("target_val", "steps_to_target")
    return line[target] is not None and line[steps] is None


def groups(lines: Iterable[Line]) -> dict[str, Group]:
    """The runs of each task that go together.

    Where there are several such sets, the paper's: real data, its length, its mode, in JAX; then the largest. Runs in
    batches of another size are in none: what a step is there, and how many there are, is not the paper's. Nor are those
    that the clock ended, each after rounds of its own.
    """
    sets: dict[str, Counter[tuple[Any, ...]]] = {}
    known = [line for line in lines if line.get("batch_size") is None and line.get("seconds_given") is None]
    for line in known:
        sets.setdefault(line["task"], Counter())[_setting(line)] += 1
    chosen = {task: max(counts, key=lambda s: (*_papers(task, s), counts[s])) for task, counts in sets.items()}
    return {
        task: Group(task, [line for line in known if line["task"] == task and _belongs(line, setting)])
        for task, setting in chosen.items()
    }


def paper_ratio(task: str, base: str, train: bool = False) -> float:
    """The paper's."""
    numbers = PAPER[task][base][2 * train : 2 * train + 2]
    return numbers[1] / numbers[0]


def paper_best_against_best(task: str) -> float:
    """The paper's."""
    return min(PAPER[task][base][1] for base in BASES) / min(PAPER[task][base][0] for base in BASES)


def _setting(line: Line) -> tuple[Any, ...]:
    modes = TASKS[line["task"]].modes
    mode = line["mode"] or (modes[0] if modes else None)
    return mode, *(line[name] for name in _ALIKE)


def _belongs(line: Line, setting: tuple[Any, ...]) -> bool:
    if not settings.is_first_order(line["optimizer"]) and line["rounds"] < setting[_ROUNDS]:
        line = {**line, "rounds": setting[_ROUNDS]}
    return _setting(line) == setting


def _papers(task: str, setting: tuple[Any, ...]) -> tuple[bool, ...]:
    mode, backend, rounds, tiny, *_ = setting
    return not tiny, rounds == TASKS[task].rounds, mode in (None, *TASKS[task].modes[:1]), backend == "jax"
