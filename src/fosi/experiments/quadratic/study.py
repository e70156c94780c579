"""What the six studies have in common: units of work that write records, a file that can be gone on with, figures."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fosi.experiments import figures
from fosi.experiments.quadratic.descent import Method
from fosi.experiments.records import Journal, Record, number


@dataclass(frozen=True)
class Unit:
    """A piece of a study that is computed and written as a whole."""

    name: str
    run: Callable[[], Iterable[Record]]


class Progress(NamedTuple):
    """``done`` of ``total`` units; ``unit`` is the next one, empty at the end."""

    done: int
    total: int
    unit: str


class Table(NamedTuple):
    """What a study says in the terminal."""

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]


class Study(Protocol):
    """What the module of a study has.

    Attributes:
      NAME: as on the command line.
      CONSTANTS: what is set and cannot be chosen; recorded with the settings.
      Settings: what can be chosen, a dataclass whose defaults are the paper's.
    """

    NAME: str
    CONSTANTS: Mapping[str, Any]
    Settings: Any

    def units(self, settings: Any) -> list[Unit]:
        """The pieces it is made of."""

    def draw(self, records: Sequence[Record]) -> dict[str, Figure]:
        """Its figures by file name."""

    def table(self, records: Sequence[Record]) -> Table:
        """What it says in the terminal."""


def run(
    study: Study, settings: Any, out: Path, on_progress: Callable[[Progress], None] = lambda p: None
) -> Sequence[Record]:
    """Computes what ``out`` does not hold yet, and returns the study's measurements.

    Args:
      study: which.
      settings: the study's Settings.
      out: folder of the results, one file a study.
      on_progress: called before each unit and at the end.

    Raises:
      ValueError: if the file holds results of other settings, or something else.
    """
    units = study.units(settings)
    made_with = {"command": "quadratic", "study": study.NAME, **dataclasses.asdict(settings), **study.CONSTANTS}
    journal = Journal(out / f"{study.NAME}.jsonl", made_with, len(units))
    waiting = [unit for unit in units if unit.name not in journal.done]
    for index, unit in enumerate(waiting):
        on_progress(Progress(len(units) - len(waiting) + index, len(units), unit.name))
        journal.append(unit.name, unit.run)
    on_progress(Progress(len(units), len(units), ""))
    return journal.measured


def measurements(
    study: str,
    method: Method,
    curve: Iterable[tuple[int, float]],
    *,
    eta: float,
    momentum: float | None,
    seed: int,
    **function: Any,
) -> list[Record]:
    """One record for each (iteration, value) of one optimizer on one function."""
    scaled = method.with_fosi and method.base != "adam"
    what = {
        "study": study,
        "optimizer": method.optimizer,
        **function,
        "eta": digits(eta),
        "momentum": None if method.base == "gd" else momentum,
        "c": (float(method.c) if np.isfinite(method.c) else "inf") if scaled else None,
    }
    return [{**what, "iteration": int(i), "value": digits(v), "seed": seed} for i, v in curve]


def digits(value: Any) -> float:
    """A number as it is recorded: eight digits, or not finite."""
    return float(f"{float(value):.8g}")


def plot(ax: Axes, lines: Iterable[Record]) -> None:
    """Draws f over the iterations, a line for each optimizer."""
    for (name,), line in group(lines, "optimizer").items():
        points = [r["iteration"] for r in line], [number(r["value"]) for r in line]
        # Thin: momentum oscillates, and thick lines would run together.
        ax.plot(*points, **figures.look(name, len(line)) | {"linewidth": 1.1})
    ax.set_yscale("log")


def over(value: float, other: float) -> float:
    """How many times the one is the other: infinite where that is 0 and this is not."""
    return value / other if other else (np.inf if value else 1.0)


def select(records: Iterable[Record], **wanted: Any) -> list[Record]:
    """The records with these values."""
    return [r for r in records if all(r.get(name) == value for name, value in wanted.items())]


def ends(records: Iterable[Record], *by: str) -> dict[tuple[Any, ...], float]:
    """The value at the last iteration recorded for each combination of these fields; infinite where it diverged."""
    last: dict[tuple[Any, ...], Record] = {}
    for r in records:
        key = tuple(r.get(name) for name in by)
        if key not in last or r["iteration"] > last[key]["iteration"]:
            last[key] = r
    return {key: number(r["value"]) for key, r in last.items()}


def distinct(records: Iterable[Record], name: str) -> list[Any]:
    """The values of a field, each once, in order."""
    return sorted({r[name] for r in records})


def rates(base: str, largest: Any, smallest: Any) -> Any:
    """The paper's learning rates (§5.3): gradient descent's optimal one, half of Heavy-Ball's, 0.05 for Adam."""
    if base == "gd":
        return 2 / (largest + smallest)
    if base == "heavy-ball":
        return 2 / (np.sqrt(largest) + np.sqrt(smallest)) ** 2
    return np.full_like(largest, 0.05)


def at_least(least: int, **counts: int) -> None:
    """Raises where a count is below ``least``."""
    for name, count in counts.items():
        if count < least:
            raise ValueError(f"{name} is {count}; give {least} or more")


def not_empty(**lists: Sequence[Any]) -> None:
    """Raises where a list is empty."""
    for name, items in lists.items():
        if not items:
            raise ValueError(f"{name} is empty; give at least one value")


def group(records: Iterable[Record], *by: str) -> Mapping[tuple[Any, ...], list[Record]]:
    """The records by these fields."""
    found: dict[tuple[Any, ...], list[Record]] = {}
    for r in records:
        found.setdefault(tuple(r.get(name) for name in by), []).append(r)
    return found
