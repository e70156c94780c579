"""The report on predictions: how well `fosi diagnose` foretold what runs took, with a race before and without."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from fosi import prediction
from fosi.experiments import figures
from fosi.experiments.tasks import drawing, markdown, report
from fosi.experiments.tasks.predictions import (
    FEWEST,
    RACE,
    Pair,
    begun,
    by_task,
    fitted,
    measured_ratios,
    pairs,
    predicted,
    raced,
    seeds,
    spread,
)
from fosi.experiments.tasks.race import SHARES
from fosi.experiments.tasks.ratios import MISS

NAME = "diagnosis.md"
TITLE = "# Predicted and measured"


def write(where: Path) -> list[Path]:
    """Writes diagnosis.md of the folder and its figure; returns where. Nothing where too few tasks have both."""
    found = pairs(where)
    if len({pair.task for pair in found}) < FEWEST:
        return []
    path = where / NAME
    report.check_mine(path, TITLE)
    apart = predicted(found)
    written = list(figures.save(drawn(found, apart), where / "diagnosis"))
    parts = text(found, apart)
    ran = raced(found)
    if len({pair.task for pair in ran}) >= FEWEST:
        parts += after_race(found)
        written += figures.save(drawn(ran, predicted(ran)), where / "diagnosis-raced")
    path.write_text("\n\n".join([TITLE, *parts]) + "\n", encoding="utf-8")
    return [path, *written]


def text(found: Sequence[Pair], apart: NDArray[np.float64]) -> list[str]:
    """What diagnosis.md says below its title."""
    reasoned = np.array([prediction.predict(pair.features, prediction.PHYSICAL) for pair in found])
    devices = ", ".join(sorted({pair.device for pair in found}))
    rows = [
        [
            pair.label,
            pair.base,
            "{} of {}".format(*pair.after),
            *(f"{pair.features[name]:.2f}" for name in prediction.NAMES[1:]),
            f"{guess:.2f}",
            f"**{one:.2f}**",
            *(markdown.ratio(ratio) for ratio in (pair.measured, pair.target, pair.validation)),
        ]
        for pair, guess, one in zip(found, reasoned, apart, strict=True)
    ]
    headings = ["task", "base", "after steps", *prediction.NAMES[1:], "by reasoning", "fitted without the task"]
    fit = fitted(found)
    return [
        f"Written by `fosi report` from the `diagnosis.jsonl` and the runs in this folder; runs on {devices}. A "
        "ratio is of FOSI's seconds over the base's, to the lowest training loss that both come to, with the task's "
        "own settings where no others are named: that of the base, wherever FOSI ever has it, and else FOSI's own. A "
        f"run that diverged is a miss and counts {MISS:g}. Each is predicted by a rule that was fitted to all other "
        "tasks.",
        f"Spearman's rank correlation of predicted and measured: {_ranked(found, apart)}. By reasoning alone, with "
        f"coefficients that were fitted to no task: {_ranked(found, reasoned)}. What the rule looks at, and the "
        "constant in what noise takes, were chosen with these tasks in view: neither is blind to the task left out.",
        *_by_device(found),
        markdown.table([*headings, "measured, training loss", "to the base's lowest", "to its best validation"], rows),
        "![predicted and measured](diagnosis.png)",
        "Fitted to all of them, the coefficients are "
        + ", ".join(f"{name} {value:.2f}" for name, value in fit.items())
        + ".",
    ]


def after_race(found: Sequence[Pair]) -> list[str]:
    """What diagnosis.md says of predictions that know of a race."""
    ran = raced(found)
    alone = np.array([prediction.predict(pair.features, prediction.TOLD) for pair in ran])
    rows = [_after([f"seed {seed} alone"], raced(found, seed)) for seed in seeds(ran)]
    begins = [
        _after([f"the first {share:.0%} of the runs themselves"], some)
        for share in SHARES
        for some in [begun(found, share)]
        if len({pair.task for pair in some}) >= FEWEST
    ]
    headings = ["race", "fitted without the task: tasks", "pairs", "by the race alone: tasks", "pairs", "of pairs"]
    return [
        "## After a race",
        f"The same where base and FOSI have been trained side by side for {RACE:.0%} of the run first, as `fosi "
        "diagnose TASK` does, with `--rounds` where the measured run is not as long as the task: races of their own, "
        "in `races/`, with seeds that none of the runs has which they are held against. Then the rule looks at the "
        "race, and at what reasoning makes of the rest, as it is in the table above; it is drawn towards the race "
        "alone.",
        f"Of the median of the races of a pair, fitted without the task: {_ranked(ran, predicted(ran))}. By the race "
        f"alone: {_ranked(ran, alone)}.",
        *_by_device(ran),
        markdown.table(
            ["task", "base", "race, median over seeds", "fitted without the task", "measured, training loss"],
            [
                [
                    pair.label,
                    pair.base,
                    _median(list(pair.held.values())),
                    f"**{one:.2f}**",
                    markdown.ratio(pair.measured),
                ]
                for pair, one in zip(ran, predicted(ran), strict=True)
            ],
        ),
        "How far that depends on the seed, as one race is what one would hold, and on how long it is. The last of "
        "these are the beginnings of the runs that they are held against, so they flatter.",
        markdown.table(headings, [*rows, *begins]),
        "![predicted after a race, and measured](diagnosis-raced.png)",
        "Fitted to all of them, the coefficients after a race are "
        + ", ".join(f"{name} {value:.2f}" for name, value in fitted(ran).items())
        + ".",
    ]


def _median(values: list[float]) -> str:
    """With all of which it is the median."""
    return f"{statistics.median(values):.2f} ({', '.join(f'{value:.2f}' for value in values)})"


def _after(name: list[str], ran: Sequence[Pair]) -> list[str]:
    """A row: ranks by a rule fitted without the task, and by the race alone."""
    alone = np.array([prediction.predict(pair.features, prediction.TOLD) for pair in ran])
    ranks = [
        rank
        for said in (predicted(ran), alone)
        for rank in (
            prediction.spearman(*(list(by_task(ran, some).values()) for some in (said, measured_ratios(ran)))),
            prediction.spearman(said, measured_ratios(ran)),
        )
    ]
    return [*name, *(f"{rank:.2f}" for rank in ranks), f"{len(ran)}"]


def drawn(found: Sequence[Pair], apart: NDArray[np.float64]) -> Figure:
    """Predicted without the task against measured, a mark a pair."""
    labels, bases = [pair.label for pair in found], [pair.base for pair in found]
    after = " after a race" if any(prediction.RACED in pair.features for pair in found) else ""
    off = math.exp(spread(found, apart))
    return drawing.predicted(labels, bases, apart.tolist(), measured_ratios(found), off, after)


def _by_device(found: Sequence[Pair]) -> list[str]:
    """The same of the runs on one device alone, where there are several and it has tasks enough."""
    said = []
    for device in sorted({pair.device for pair in found}):
        some = [pair for pair in found if pair.device == device]
        if len(some) < len(found) and len({pair.task for pair in some}) >= FEWEST:
            said.append(f"On {device} alone, fitted to those runs alone: {_ranked(some, predicted(some))}.")
    return said


def _ranked(found: Sequence[Pair], values: NDArray[np.float64]) -> str:
    """How well predictions rank the tasks and the pairs, and how far off they are."""
    by = [list(by_task(found, some).values()) for some in (values, measured_ratios(found))]
    off = spread(found, values)
    return (
        f"**{prediction.spearman(*by):.2f}** over {len(by[0])} tasks (the geometric mean over a task's bases and "
        f"modes), **{prediction.spearman(values, measured_ratios(found)):.2f}** over {len(found)} pairs of task and "
        f"base; the logarithms are {off:.2f} apart, root mean square, a factor of {math.exp(off):.2f}"
    )
