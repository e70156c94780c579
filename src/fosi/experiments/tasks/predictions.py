"""Diagnoses held against measurements: what `fosi diagnose` foretold of each task, and what its runs then took."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from fosi import prediction
from fosi.experiments import figures, records
from fosi.experiments.tasks import PAPER, TASKS, markdown, ratios, report, standings, summary
from fosi.experiments.tasks.plan import Plan
from fosi.experiments.tasks.ratios import MISS, Ratio
from fosi.experiments.tasks.runs import Curve

NAME = "diagnosis.md"
TITLE = "# Predicted and measured"
FEWEST = 4
"""Tasks, for a rule that is fitted without one of them."""


class Pair(NamedTuple):
    """A base on a task, diagnosed and measured.

    Attributes:
      task: its name.
      mode: of the task; empty for its first.
      base: the base's name.
      features: of the diagnosis.
      measured: FOSI's seconds over the base's, to the base's lowest training loss.
      validation: the same to its best validation; None where that is not the paper's task.
      device: it was diagnosed on.
    """

    task: str
    mode: str
    base: str
    features: Mapping[str, float]
    measured: Ratio
    validation: Ratio | None
    device: str

    @property
    def label(self) -> str:
        """The task, and the mode where it is not the first."""
        return f"{self.task}, {self.mode}" if self.mode else self.task

    @property
    def ratio(self) -> float:
        """What is measured, as a number: 2 where that is never or takes longer."""
        return min(self.measured.median, MISS)


def write(where: Path) -> list[Path]:
    """Writes diagnosis.md of the folder and its figure; returns where. Nothing where too few tasks have both."""
    found = pairs(where)
    if len({pair.task for pair in found}) < FEWEST:
        return []
    path = where / NAME
    report.check_mine(path, TITLE)
    apart = predicted(found)
    written = list(figures.save(draw(found, apart), where / "diagnosis"))
    path.write_text("\n\n".join([TITLE, *text(found, apart)]) + "\n", encoding="utf-8")
    return [path, *written]


def pairs(where: Path) -> list[Pair]:
    """All bases that were diagnosed on a task and trained there alone and with FOSI, on the same device.

    Each with the task's own rate, batches and settings, and as it was diagnosed last.
    """
    found: dict[tuple[str, str, str], Pair] = {}
    for task in TASKS:
        path = where / task / "diagnosis.jsonl"
        if not path.exists():
            continue
        curves = summary.retimed(summary.curves(where / task))
        for line in records.read_jsonl(path):
            plan = Plan(**line["plan"])
            if plan.tiny or plan.rate_factor != 1 or plan.batch_size is not None:
                continue
            there = [curve for curve in curves if curve.environment["device"] == line["device"]]
            measured, validation = _measured(there, plan)
            if measured is not None:
                key = (task, plan.other_mode, plan.optimizer)
                found[key] = Pair(*key, line["features"], measured, validation, line["device"])
    return list(found.values())


def predicted(found: Sequence[Pair]) -> NDArray[np.float64]:
    """Each pair's ratio by a rule that was fitted without any pair of its task."""
    names = [pair.task for pair in found]
    return prediction.leave_one_out([pair.features for pair in found], _ratios(found), groups=names)


def fitted(found: Sequence[Pair]) -> dict[str, float]:
    """The coefficients that all pairs together give."""
    return prediction.fit([pair.features for pair in found], _ratios(found))


def by_task(found: Sequence[Pair], values: Sequence[float] | NDArray[np.float64]) -> dict[str, float]:
    """The geometric mean over a task's bases and modes."""
    logs: dict[str, list[float]] = {}
    for pair, value in zip(found, values, strict=True):
        logs.setdefault(pair.task, []).append(math.log(value))
    return {task: math.exp(sum(some) / len(some)) for task, some in logs.items()}


def spread(found: Sequence[Pair], apart: NDArray[np.float64]) -> float:
    """How far the logarithm of a measured ratio is from that of a prediction without its task: root mean square."""
    return float(np.sqrt(np.mean((np.log(_ratios(found)) - np.log(apart)) ** 2)))


def text(found: Sequence[Pair], apart: NDArray[np.float64]) -> list[str]:
    """What diagnosis.md says below its title."""
    measured = _ratios(found)
    tasks = by_task(found, measured)
    rank = prediction.spearman(list(by_task(found, apart).values()), list(tasks.values()))
    each = prediction.spearman(apart, measured)
    devices = ", ".join(sorted({pair.device for pair in found}))
    rows = [
        [
            pair.label,
            pair.base,
            *(f"{pair.features[name]:.2f}" for name in prediction.NAMES[1:]),
            f"{prediction.predict(pair.features, prediction.PHYSICAL):.2f}",
            f"**{one:.2f}**",
            markdown.ratio(pair.measured),
            markdown.ratio(pair.validation),
        ]
        for pair, one in zip(found, apart, strict=True)
    ]
    headings = ["task", "base", *prediction.NAMES[1:], "by reasoning", "fitted without the task"]
    fit = fitted(found)
    return [
        f"Written by `fosi report` from the `diagnosis.jsonl` and the runs in this folder; diagnosed on {devices}. A "
        "ratio is of FOSI's seconds over the base's, to the base's lowest training loss, both with the task's own "
        f"settings; what is never reached counts {MISS:g}, and so does what takes longer. Each is predicted by a rule "
        "that was fitted to all other tasks.",
        f"Spearman's rank correlation of predicted and measured is **{rank:.2f}** over {len(tasks)} tasks (the "
        f"geometric mean over a task's bases and modes) and **{each:.2f}** over {len(found)} pairs of task and base. "
        f"The logarithms are {spread(found, apart):.2f} apart, root mean square: a factor of "
        f"{math.exp(spread(found, apart)):.2f}.",
        markdown.table([*headings, "measured, training loss", "measured, validation"], rows),
        "![predicted and measured](diagnosis.png)",
        "Fitted to all of them, the coefficients are "
        + ", ".join(f"{name} {value:.2f}" for name, value in fit.items())
        + ".",
    ]


def draw(found: Sequence[Pair], apart: NDArray[np.float64]) -> Figure:
    """Predicted without the task against measured, a mark a pair."""
    made, axis = figures.figure(width=6.0, height=5.2)
    measured = _ratios(found)
    ends = np.array([0.8 * min(*apart, *measured), 1.25 * max(*apart, *measured)])
    off = math.exp(spread(found, apart))
    axis.fill_between(ends, ends / off, ends * off, color="#7F7F7F", alpha=0.15, linewidth=0)
    axis.plot(ends, ends, color="#7F7F7F", linewidth=1)
    for base in dict.fromkeys(pair.base for pair in found):
        mine = [index for index, pair in enumerate(found) if pair.base == base]
        style = figures.look(f"fosi-{base}", 1) | {"linestyle": "none", "label": base, "markevery": None}
        axis.plot(apart[mine], [measured[index] for index in mine], **style)
    for pair, x, y in zip(found, apart, measured, strict=True):
        axis.annotate(pair.label, (x, y), xytext=(4, 3), textcoords="offset points", fontsize=7)
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlim(*ends)
    axis.set_ylim(*ends)
    ticks = [tick for tick in (0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0) if ends[0] <= tick <= ends[1]]
    for set_ticks in (axis.set_xticks, axis.set_yticks):
        set_ticks(ticks, [f"{tick:g}" for tick in ticks])
        set_ticks([], minor=True)
    axis.set_xlabel("predicted by a rule fitted without the task: FOSI's seconds over the base's")
    axis.set_ylabel("measured")
    figures.legend(made, axis)
    return made


def _ratios(found: Sequence[Pair]) -> list[float]:
    return [pair.ratio for pair in found]


def _measured(curves: Sequence[Curve], plan: Plan) -> tuple[Ratio | None, Ratio | None]:
    """To the training target, and to that of the validation where the task is the paper's."""
    base = plan.optimizer
    if plan.task in PAPER:
        group = ratios.groups(summary.summarise(curves)).get(plan.task)
        if group is None or plan.other_mode:  # the group is of the first mode
            return None, None
        picked = group.pick(f"fosi-{base}")
        return group.ratio(picked, base, "seconds_to_train_target"), group.ratio(picked, base)
    found: list[tuple[float, Ratio]] = []
    for kind, known in standings.kinds(curves).items():
        alone, ours = (_own(known, name) for name in (base, f"fosi-{base}"))
        if kind.tiny or kind.mode != plan.other_mode or kind.backend != plan.backend or alone is None or ours is None:
            continue
        if (ratio := ours.ratio(alone)) is not None:
            found.append((alone.seconds or 0.0, ratio))
    return (max(found, key=lambda pair: pair[0])[1] if found else None), None  # the longest


def _own(known: Sequence[standings.Entry], optimizer: str) -> standings.Entry | None:
    """The runs with the task's own settings; where estimates are on a part of a full batch, those."""
    able = {}
    for entry in known:
        plan = next(iter(entry.runs.values())).plan
        if plan.optimizer == optimizer and plan.rate_factor == 1 and not plan.options:
            able[plan.curvature] = entry
    return able.get("part", able.get("fixed"))
