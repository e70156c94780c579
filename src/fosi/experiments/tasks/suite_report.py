"""The report on the tasks that are not the paper's: who is first where curvature rules, from the files alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fosi.experiments import figures
from fosi.experiments.tasks import PAPER, TASKS, drawing, limits, markdown, report, settings, standings, summary, sweeps
from fosi.experiments.tasks.pinn import TASKS as PINNS
from fosi.experiments.tasks.standings import ASIDE, PUBLISHED, Entry, Kind, Published
from fosi.experiments.tasks.summary import VERSIONS
from fosi.experiments.tasks.sweeps import Cell, Sweep

NAME = "curvature.md"
TITLE = "# Where curvature rules, measured"
IN_BATCHES = (
    "Steps to the best of the base alone in its largest batch at the best of its rates, the same seed against the "
    "same; medians over seeds, in brackets seconds and what is set otherwise than for the task. In batches of each "
    "size every optimizer is at the setting with the fewest steps, of those with as many seeds as any. All have seen "
    "as many examples at their end. In the figure a thin line is of as many examples in every size as the base alone "
    "has seen in its smallest batches."
)
CURVATURE = ("kfac", "newton-cg")
"""Peers that are neither first-order nor quasi-Newton: by how much FOSI is sooner than the best of the others is said
too."""
MARKS = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6)
"""Losses to which seconds are given, where someone got so far."""


def write(where: Path) -> list[Path]:
    """Writes curvature.md of the folder and the figures of its tasks; returns where. Nothing where no run is for it."""
    parts: list[str] = []
    written: list[Path] = []
    found: list[Entry] = []
    for task in (name for name in TASKS if name not in PAPER):
        for kind, known in standings.kinds(summary.retimed(summary.curves(where / task))).items():
            found += known
            shown = list(standings.tuned(known).values())
            end, peer = kind.ending, standings.best_peer(known, aside(task))
            written += figures.save(drawing.standings(TASKS[task], shown, kind.words), where / task / f"standings{end}")
            drawn = solutions(where / task, shown, peer)
            if drawn:
                written += figures.save(
                    drawing.solutions(TASKS[task], drawn, kind.words), where / task / f"solutions{end}"
                )
            parts += section(task, kind, known)
            parts += [f"![{task}](./{task}/standings{end}.png)"]
            parts += [f"![{task}, solutions](./{task}/solutions{end}.png)"] if drawn else []
        if (where / task / "curves").exists():
            summary.write(where / task)
    environments = [curve.environment for entry in found for curve in entry.runs.values()]
    for made in (made for made in TASKS.values() if made.resizes):
        curves = summary.retimed(summary.curves(where / made.name))
        swept = {words: sweeps.sweeps(made, curves, goal) for goal, words in sweeps.GOALS.items()}
        if all(swept.values()):
            environments += [curve.environment for curve in curves if curve.plan.batch_size is not None]
            written += figures.save(drawing.batches(made, swept), where / made.name / "batches")
            parts += [f"## {made.title}, larger batches", IN_BATCHES]
            for words, found_there in swept.items():
                parts += [f"To its best {words}:", in_batches(found_there)]
            parts += [f"![{made.name}](./{made.name}/batches.png)", "Every setting:", every_batch(swept)]
    crowded, drawn_there = limits.section(where)
    parts, written = parts + crowded, written + drawn_there
    if not parts:
        return []
    path = where / NAME
    report.check_mine(path, TITLE)
    path.write_text("\n\n".join([TITLE, *preface(environments), *parts]) + "\n", encoding="utf-8")
    return [path, *written]


def preface(environments: Sequence[Mapping[str, Any]]) -> list[str]:
    """Where and how it was measured."""
    devices = sorted({environment["device"] for environment in environments})
    versions = sorted({f"{name} {e[name]}" for e in environments for name in VERSIONS if name in e})
    return [
        f"Written by `fosi report` from the files in this folder; {len(environments)} runs on {', '.join(devices)}. "
        f"Versions: {', '.join(versions)}.",
        "Every optimizer at the best of the settings that it was given, by its lowest training loss; medians over "
        "seeds. The ratio is of the seconds to the lowest loss of the best peer, the same seed against the same seed; "
        "what never gets there counts as later than whatever does. Seconds are those of steps and refreshes. On the "
        "PINNs the peers are first-order and quasi-Newton optimizers; where newton-cg stands is shown beside them. "
        "Published figures are of Rathore et al. (ICML 2024), the best of their sweeps over 41,000 steps; beside "
        "newton-cg stands their NysNewton-CG, after Adam and L-BFGS. Where FOSI has many settings and its peers one, "
        "the best of many is in the first table: an ablation, not a comparison.",
    ]


def section(task: str, kind: Kind, known: Sequence[Entry]) -> list[str]:
    """What is known of one task, of runs of one kind."""
    peer = standings.best_peer(known, aside(task))
    heading = [TASKS[task].title, *([kind.words] if kind.words else []), kind.device]
    parts = [f"## {', '.join(heading)}"]
    best = standings.tuned(known)
    published = {} if kind.tiny or kind.mode else PUBLISHED.get(task, {})
    if peer is not None:
        ours = [entry for name, entry in best.items() if settings.with_fosi(name)]
        precision = digits([entry.loss for entry in best.values()], 2)
        words = against("peer", peer, ours, precision)
        first = standings.best_peer(known, CURVATURE) or peer
        if first != peer:
            words += f" {against('first-order or quasi-Newton peer', first, ours, precision)}"
        if control := standings.best_control(known):
            said = "; ".join(f"{entry.optimizer} {ratio(entry, control)}" for entry in ours)
            layered = any("layers" in curve.plan.options for curve in control.runs.values())
            with_scaling, in_layers = "with the scaling that FOSI has and no estimates", "in coordinates of the layers"
            how = f"{in_layers}, without FOSI's estimates" if layered else with_scaling
            words += (
                f" The control is {control.optimizer} {how}, loss "
                f"{markdown.number(control.loss, precision)}, {ratio(control, first)} to that of {first.optimizer}; "
                "seconds to the control's, of its own: "
                f"{said}."
            )
        parts.append(words)
    parts.append(table(task, list(best.values()), peer, published))
    if len(known) > len(best):
        every = sorted(known, key=lambda entry: (entry.optimizer, entry.loss or float("inf")))
        parts += ["Every setting:", table(task, every, peer)]
    return parts


def against(what: str, peer: Entry, ours: Sequence[Entry], precision: int) -> str:
    """How soon FOSI has the lowest loss of a peer."""
    said = "; ".join(f"{entry.optimizer} {ratio(entry, peer)}" for entry in ours)
    loss = markdown.number(peer.loss, precision)
    return f"The best {what} is {peer.optimizer}, loss {loss}. Seconds to it, of its own: {said or '-'}."


def digits(values: Sequence[float | None], least: int = 3) -> int:
    """As many digits as tell those apart that are within 1% of the lowest, six at the most."""
    given = {value for value in values if value is not None}
    known = {value for value in given if value <= 1.01 * min(given)}
    enough = (count for count in range(least, 6) if len({f"{value:.{count}g}" for value in known}) == len(known))
    return next(enough, 6)


def in_batches(swept: Sequence[Sweep]) -> str:
    """A line an optimizer: steps to the target in batches of every size, with seconds and the setting."""
    sizes = sorted({size for one in swept for size in one.best})
    rows = []
    for one in swept:
        cells = [one.best.get(size) for size in sizes]
        rows.append([one.optimizer, *("-" if cell is None else in_batch(cell) for cell in cells)])
    return markdown.table(["optimizer", *(f"batches of {size}" for size in sizes)], rows)


def in_batch(cell: Cell) -> str:
    """Steps, seconds where they are known, and the setting where it is not the task's own."""
    said = markdown.NEVER if cell.steps is None else f"{cell.steps:g}"
    more = [*([] if cell.seconds is None else [f"{cell.seconds:.3g} s"]), *([cell.settings] if cell.settings else [])]
    return f"{said} ({'; '.join(more)})" if more else said


def every_batch(swept: Mapping[str, Sequence[Sweep]]) -> str:
    """A line a setting and size: the best that it comes to, and steps to the target, of either goal."""
    headings = ["optimizer", "batches of", "settings", "seeds"]
    for words in swept:
        headings += [f"best {words}", "steps to the target"]
    rows: dict[tuple[str, int, str], list[str]] = {}
    for goal in swept.values():
        for one in goal:
            for size, cells in one.tried.items():
                for cell in cells:
                    row = rows.setdefault((one.optimizer, size, cell.settings), [str(cell.seeds)])
                    row += [markdown.number(cell.best), markdown.NEVER if cell.steps is None else f"{cell.steps:g}"]
    return markdown.table(headings, [[name, str(size), words, *row] for (name, size, words), row in rows.items()])


def ratio(entry: Entry, peer: Entry | None) -> str:
    """Its seconds to the peer's lowest loss over the peer's own."""
    return markdown.ratio(None if peer is None else entry.ratio(peer))


def table(task: str, shown: Sequence[Entry], peer: Entry | None, published: Published | None = None) -> str:
    """A line a setting, with others' loss and error beside it where they are given."""
    marks = [loss for loss in MARKS if any(entry.seconds_to(loss) is not None for entry in shown)]
    precision = digits([entry.loss for entry in shown])
    headings = ["optimizer", "settings", "training loss", TASKS[task].measured]
    headings += ["seconds", "ratio to the best peer"]
    headings += [f"s to {loss:.0e}" for loss in marks]
    headings += [*(["published loss, error"] if published else []), "seeds"]
    lines = []
    for entry in shown:
        line = [
            entry.name,
            entry.settings,
            markdown.number(entry.loss, precision),
            *(markdown.number(x) for x in (entry.metric, entry.seconds)),
        ]
        line.append(ratio(entry, peer))
        line += [markdown.number(entry.seconds_to(loss)) for loss in marks]
        if published:
            line.append(", ".join(f"{x:.1e}" for x in published.get(entry.name, ())) or "-")
        lines.append([*line, str(len(entry.runs))])
    return markdown.table(headings, lines)


def aside(task: str) -> tuple[str, ...]:
    """Ends of names that set no target on a task."""
    return ASIDE if task in PINNS else ()


def solutions(folder: Path, shown: Sequence[Entry], peer: Entry | None) -> dict[str, Mapping[str, Any]]:
    """What Adam, the best peer and FOSI found at their best settings, with a typical seed, or another that is there.

    Args:
      folder: of the task.
      shown: an optimizer each, the lowest loss first.
      peer: the best of them.
    """
    ours = next((entry for entry in shown if settings.with_fosi(entry.optimizer)), None)
    adam = next((entry for entry in shown if entry.optimizer == "adam"), None)
    found: dict[str, Mapping[str, Any]] = {}
    for entry in (adam, peer, ours):
        curves = [] if entry is None else [entry.typical, *entry.runs.values()]
        paths = [folder / "solutions" / curve.path.with_suffix(".npz").name for curve in curves]
        if entry is not None and (path := next((path for path in paths if path.exists()), None)):
            with np.load(path) as arrays:
                found[entry.optimizer] = dict(arrays)
    return found
