"""Figures of the training tasks: learning curves over epochs and over seconds, and spectra over time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from fosi.experiments import figures
from fosi.experiments.tasks.runs import Curve
from fosi.experiments.tasks.standings import Entry
from fosi.experiments.tasks.sweeps import Sweep
from fosi.experiments.tasks.task import Task

Seeds = Sequence[Curve]
"""Runs that differ in nothing but their seed."""


def learning_curves(task: Task, runs: Mapping[str, Seeds], control: str = "", whole: bool = False) -> Figure:
    """Training loss and validation metric over epochs and, where they are known, over seconds.

    Args:
      task: whose.
      runs: by label, an optimizer's name; what comes after a comma says how it was run otherwise. The second of an
        optimizer is thin and dotted.
      control: axes are not made for labels that end with this.
      whole: whether every run must be seen at its best, however far that is from the others'.
    """
    timed = any(math.isfinite(curve.points[-1].seconds) for seeds in runs.values() for curve in seeds)
    columns = 2 if timed else 1
    made, axes = figures.figure(2, columns, width=5.0 * columns, height=6.6, sharey="row", sharex="col", squeeze=False)
    drawn: set[str] = set()
    for label, seeds in runs.items():
        optimizer = label.partition(",")[0]
        look = figures.look(optimizer) | {"label": label}
        if optimizer in drawn or (control and label.endswith(control)):
            look |= {"linestyle": ":", "linewidth": 1.2}
        drawn.add(optimizer)
        for row, name in enumerate(("train_loss", "metric")):
            rounds = np.arange(1, max(len(curve.points) for curve in seeds) + 1)
            middle, low, high = _band([[getattr(p, name) for p in curve.points] for curve in seeds])
            seconds, _, _ = _band([[p.seconds for p in curve.points] for curve in seeds])
            for column, x in enumerate((rounds, seconds)[:columns]):
                axes[row, column].plot(x, middle, **look)
                axes[row, column].fill_between(x, low, high, color=look["color"], alpha=0.15, linewidth=0)
    # What the control does matters where it is as good as the others: at three times its rate a base may diverge.
    shown = {label: seeds for label, seeds in runs.items() if not (control and label.endswith(control))}
    _axes(task, axes, runs, shown or runs, whole)
    figures.legend(made, axes[0, 0], columns=3 if timed else 2)
    made.suptitle(task.title)
    return made


def standings(task: Task, shown: Sequence[Entry], kind: str = "") -> Figure:
    """Loss and metric over seconds, both logarithmic, an optimizer each at its best setting: the median over seeds.

    Args:
      task: which.
      shown: the optimizers.
      kind: of the runs, in words, for the title.
    """
    made, axes = figures.figure(1, 2, width=10, height=4.2, sharex=True)
    for entry in shown:
        timed = [curve for curve in entry.runs.values() if math.isfinite(curve.points[-1].seconds)]
        if not timed:
            continue
        seconds = _common_seconds(timed)
        look = figures.look(entry.optimizer) | {"label": entry.name}
        look |= {"linestyle": ":"} if entry.control else {}
        for axis, name in zip(axes, ("train_loss", "metric"), strict=True):
            middle, low, high = _band([_at(seconds, curve, name) for curve in timed])
            axis.plot(seconds, middle, **look)
            axis.fill_between(seconds, low, high, color=look["color"], alpha=0.12, linewidth=0)
    for axis, name in zip(axes, ("training loss", task.measured), strict=True):
        figures.log_seconds(axis)
        axis.set_yscale("linear" if name == "accuracy" else "log")
        axis.set_xlabel("seconds on the clock")
        axis.set_ylabel(name)
    figures.legend(made, axes[0], columns=4)
    made.suptitle(_title(task, kind))
    return made


def batches(task: Task, found: Mapping[str, Sequence[Sweep]]) -> Figure:
    """Steps, and where they are known seconds, to a target over the size of a batch, both logarithmic.

    A thin line is as many examples as the base needs in its smallest batch: steps that fall as batches grow.

    Args:
      task: which.
      found: by what the target is of, in words.
    """
    best = [cell for swept in found.values() for one in swept for cell in one.best.values()]
    names = ("steps", "seconds") if any(cell.seconds is not None for cell in best) else ("steps",)
    made, axes = figures.figure(len(found), len(names), width=5.0 * len(names), height=3.6 * len(found), squeeze=False)
    for row, (words, swept) in zip(axes, found.items(), strict=True):
        for axis, name in zip(row, names, strict=True):
            for one in swept:
                known = {size: value for size, cell in one.best.items() if (value := getattr(cell, name)) is not None}
                axis.plot(
                    list(known), list(known.values()), **figures.look(one.optimizer, len(known)) | {"markevery": 1}
                )
                if name == "steps" and known and "fosi" not in one.optimizer:
                    least = min(known)
                    ideal = [known[least] * least / size for size in one.best if size >= least]
                    axis.plot([size for size in one.best if size >= least], ideal, color="#BBBBBB", linewidth=0.8)
            sizes = sorted({size for one in swept for size in one.best})
            axis.set_xscale("log", base=2)
            axis.set_xticks(sizes, [str(size) for size in sizes])
            axis.set_yscale("log")
            axis.set_ylabel(f"{name} to the base's {words}")
    for axis in axes[-1]:
        axis.set_xlabel("examples in a batch")
    figures.legend(made, axes[0, 0], columns=4)
    made.suptitle(task.title)
    return made


def solutions(task: Task, found: Mapping[str, Mapping[str, Any]], kind: str = "") -> Figure:
    """The exact solution and what each optimizer has found, over place and time; below, how far off that is.

    Args:
      task: an equation.
      found: by optimizer: ``x``, ``t``, ``exact`` and ``found`` on one grid.
      kind: of the runs, in words, for the title.
    """
    made, axes = figures.figure(2, 1 + len(found), width=3.1 * (1 + len(found)), height=5, sharex=True, sharey=True)
    first = next(iter(found.values()))
    x, t, exact = (np.asarray(first[name], float) for name in ("x", "t", "exact"))
    offs = {name: np.abs(np.asarray(one["found"], float) - exact) for name, one in found.items()}
    most, worst = np.max(np.abs(exact)), max(np.quantile(off, 0.999) for off in offs.values())
    kinds = {"vmin": -most, "vmax": most, "cmap": "RdBu_r"}, {"vmin": 0, "vmax": worst, "cmap": "magma_r"}
    shown = [("exact", exact), *((name, np.asarray(one["found"], float)) for name, one in found.items())]
    for axis, (name, field) in zip(axes[0], shown, strict=True):
        upper = axis.pcolormesh(t, x, field, shading="nearest", rasterized=True, **kinds[0])
        axis.set_title(name)
    for axis, off in zip(axes[1, 1:], offs.values(), strict=True):
        axis.set_title(f"off by {np.linalg.norm(off) / np.linalg.norm(exact):.2g}")
        lower = axis.pcolormesh(t, x, off, shading="nearest", rasterized=True, **kinds[1])
        axis.set_xlabel("t")
    axes[1, 0].set_axis_off()
    axes[0, 0].tick_params(labelbottom=True)
    axes[1, 1].tick_params(labelleft=True)
    for axis in axes.flat:
        axis.grid(visible=False)
    axes[0, 0].set_ylabel("x")
    axes[1, 1].set_ylabel("x")
    made.colorbar(upper, ax=list(axes[0]), label="u")
    made.colorbar(lower, ax=list(axes[1]), label="|error|")
    made.suptitle(_title(task, kind))
    return made


def spectra(task: Task, runs: Mapping[str, Curve]) -> Figure:
    """The eigenvalues in use as training goes on, of one run each."""
    made, axes = figures.figure(1, len(runs), width=5 * len(runs), height=3.8, squeeze=False)
    for axis, (label, curve) in zip(axes[0], runs.items(), strict=True):
        points = [p for p in curve.points if p.eigenvalues]
        colour = figures.look(label)["color"]
        for index in range(max((len(p.eigenvalues) for p in points), default=0)):
            has = [p for p in points if len(p.eigenvalues) > index]
            values = [p.eigenvalues[index] for p in has]
            axis.plot([p.step for p in has], values, color=colour, linewidth=1, drawstyle="steps-post")
        values = [x for p in points for x in p.eigenvalues if x]
        if values and min(values) > 0:
            axis.set_yscale("log")
        elif values:  # logarithmic on both sides of zero
            sizes = np.abs(values)
            axis.set_yscale("symlog", linthresh=max(np.max(sizes) * 1e-4, np.min(sizes)))
        axis.set_title(label)
        axis.set_xlabel("step")
    axes[0, 0].set_ylabel("eigenvalues in use")
    made.suptitle(task.title)
    return made


def _band(curves: Iterable[Sequence[float]]) -> Any:
    """Median, least and largest over seeds at each round; a run that ended early is not a number from there on."""
    known = list(curves)
    longest = max(len(curve) for curve in known)
    table = np.array([[*curve, *[math.nan] * (longest - len(curve))] for curve in known])
    with np.errstate(invalid="ignore"):
        return np.median(table, axis=0), np.min(table, axis=0), np.max(table, axis=0)


def _common_seconds(curves: Iterable[Curve]) -> NDArray[np.float64]:
    """When any of the runs was looked at, from where all have been once to where the first of them ends."""
    known = [[p.seconds for p in curve.points] for curve in curves]
    every = np.unique(np.concatenate(known))
    begin, end = max(seconds[0] for seconds in known), min(seconds[-1] for seconds in known)
    return np.asarray(every[(every >= begin) & (every <= end)], np.float64)


def _at(seconds: NDArray[np.float64], curve: Curve, name: str) -> Sequence[float]:
    """What a run had then, between two looks on a straight line: runs of as many seconds differ in rounds."""
    looked, found = ([getattr(p, what) for p in curve.points] for what in ("seconds", name))
    return [float(value) for value in np.interp(seconds, looked, found)]


def _axes(task: Task, axes: Any, runs: Mapping[str, Seeds], shown: Mapping[str, Seeds], whole: bool) -> None:
    def values(some: Iterable[Seeds], name: str) -> list[float]:
        return [x for seeds in some for curve in seeds for p in curve.points if math.isfinite(x := getattr(p, name))]

    for axis, name, sign in ((axes[0, 0], "train_loss", -1), (axes[1, 0], "metric", task.sign)):
        typical, every = values(shown.values(), name), values(runs.values(), name)
        bests = [max(known, key=lambda x: sign * x) for seeds in runs.values() if (known := values([seeds], name))]
        if typical:
            if whole and sign < 0 and max(bests) > 2 * min(bests) > 0 and min(every) > 0:
                axis.set_yscale("log")
            _limits(axis, typical, max(every, key=lambda x: sign * x), bests if whole else [], sign > 0)
    axes[0, 0].set_ylabel("training loss")
    axes[1, 0].set_ylabel(f"validation {task.metric}")
    steps = task.extra.get("steps_a_round")
    axes[1, 0].set_xlabel(f"rounds of {steps} steps" if steps else "epochs")
    if axes.shape[1] > 1:
        axes[1, 1].set_xlabel("seconds on the clock")


def _limits(axis: Axes, typical: Sequence[float], best: float, bests: Sequence[float], rising: bool) -> None:
    """Shows where curves differ: the steep beginning, and what diverged, may leave the picture; the best may not."""
    worst = float(np.quantile(typical, 0.1 if rising else 0.9))
    low, high = min(worst, best, *bests), max(worst, best, *bests)
    if axis.get_yscale() == "log":
        axis.set_ylim(low * (low / high) ** 0.05, high * (high / low) ** 0.05)
        return
    space = 0.05 * (high - low) or 1.0
    axis.set_ylim(low - space, high + space)


def predicted(
    labels: Sequence[str],
    bases: Sequence[str],
    apart: Sequence[float],
    measured: Sequence[float],
    off: float,
    after: str = "",
) -> Figure:
    """Ratios as predicted against those measured, a mark each.

    Args:
      labels: of the marks.
      bases: the base of each, which says how it looks.
      apart: what was predicted, without the task.
      measured: what was measured.
      off: the factor by which predictions are typically off, shaded.
      after: what, if anything, was tried before, in words.
    """
    made, axis = figures.figure(width=6.0, height=5.2)
    ends = np.array([0.8 * min(*apart, *measured), 1.25 * max(*apart, *measured)])
    axis.fill_between(ends, ends / off, ends * off, color="#7F7F7F", alpha=0.15, linewidth=0)
    axis.plot(ends, ends, color="#7F7F7F", linewidth=1)
    for base in dict.fromkeys(bases):
        mine = [index for index, name in enumerate(bases) if name == base]
        style = figures.look(f"fosi-{base}", 1) | {"linestyle": "none", "label": base, "markevery": None}
        axis.plot([apart[index] for index in mine], [measured[index] for index in mine], **style)
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlim(*ends)
    axis.set_ylim(*ends)
    ticks = [tick for tick in (0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0) if ends[0] <= tick <= ends[1]]
    for set_ticks in (axis.set_xticks, axis.set_yticks):
        set_ticks(ticks, [f"{tick:g}" for tick in ticks])
        set_ticks([], minor=True)
    axis.set_xlabel(f"predicted{after}, by a rule fitted without the task")
    axis.set_ylabel("measured: FOSI's seconds over the base's")
    figures.legend(made, axis)
    figures.name_points(axis, labels, apart, measured)
    return made


def _title(task: Task, kind: str) -> str:
    return f"{task.title}, {kind}" if kind else task.title
