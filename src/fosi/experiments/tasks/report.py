"""The report on the training tasks: README.md and figures, from the results' files alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from fosi.experiments import figures
from fosi.experiments.tasks import TASKS, drawing, markdown, peers, ratios, summary
from fosi.experiments.tasks.plan import CONTROL
from fosi.experiments.tasks.ratios import BASES, Group
from fosi.experiments.tasks.runs import Curve
from fosi.experiments.tasks.settings import PEERS, with_fosi

TITLE = "# The paper's training tasks, measured"
ORDER = ("ac", "lm", "ae", "tl", "lr")
"""The paper's."""

Groups = Mapping[str, Group]


def write(where: Path) -> list[Path]:
    """Writes README.md of the folder and the figures of its tasks; returns where. Nothing where no run is for it."""
    lines, curves = [], {}
    for task in ORDER:
        found = summary.retimed(summary.curves(where / task))
        curves[task] = {f"curves/{curve.path.name}": curve for curve in found}
        lines += summary.write(where / task) if found else []
    if not lines:
        return []
    found_groups = ratios.groups(lines)
    groups = {task: found_groups[task] for task in ORDER if task in found_groups}
    if not groups:
        return []
    readme = where / "README.md"
    check_mine(readme, TITLE)
    written: list[Path] = []
    for task, group in groups.items():
        written += draw(group, curves[task], where / task)
    readme.write_text(text(groups, where, len(lines)), encoding="utf-8")
    return [readme, *written]


def check_mine(path: Path, title: str) -> None:
    """Raises where the file is there and is not a report with this title, which would overwrite it."""
    if path.exists() and not path.read_text(encoding="utf-8").startswith(title):
        raise ValueError(f"{path} is not a report, and a report would overwrite it: move the results to another folder")


def draw(group: Group, curves: Mapping[str, Curve], folder: Path) -> Iterable[Path]:
    """The figures of one task."""
    task = TASKS[group.task]

    def seeds(optimizer: str, factor: float = 1.0) -> list[Curve]:
        return [curves[line["curve"]] for line in group.pick(optimizer, factor).values()]

    control = f"{CONTROL:g}× rate"
    runs: dict[str, list[Curve]] = {}
    for base in BASES:
        runs |= {base: seeds(base), f"fosi-{base}": seeds(f"fosi-{base}")}
        runs |= {f"{base}, {control}": seeds(base, CONTROL)}
    runs = {label: found for label, found in runs.items() if found}
    written: list[Path] = []
    if runs:
        written += figures.save(drawing.learning_curves(task, runs, control), folder / "learning-curves")
    ours = {name: found[0] for name, found in runs.items() if with_fosi(name)}
    if any(point.eigenvalues for curve in ours.values() for point in curve.points):
        written += figures.save(drawing.spectra(task, ours), folder / "spectra")
    tuned = [line for name in PEERS for line in peers.shown(group, name)]
    if tuned:
        beside: dict[str, list[Curve]] = {
            name: runs[name] for name in ("heavy-ball", "fosi-heavy-ball") if name in runs
        }
        beside |= {_said(line): [curves[line["curve"]]] for line in tuned}
        written += figures.save(drawing.learning_curves(task, beside, whole=True), folder / "second-order")
    return written


def _said(line: ratios.Line) -> str:
    """A peer and its settings, for a legend."""
    return ", ".join(part for part in (line["optimizer"], markdown.settings(line)) if part)


def text(groups: Groups, where: Path, known: int) -> str:
    """README.md, on the runs of the groups, of those that are known."""
    lines = [line for group in groups.values() for line in group.lines]
    devices = sorted({line["device"] for line in lines})
    versions = sorted({f"{name} {version}" for line in lines for name, version in line["versions"].items()})
    seeds = max(len({line["seed"] for line in group.lines}) for group in groups.values())
    parts = [
        TITLE,
        f"Written by `fosi report` from the files in this folder; {len(lines)} runs, up to {seeds} seeds, on "
        f"{', '.join(devices)}; {known - len(lines)} others, such as short ones that were timed alone, are not in the "
        f"tables. Versions: {', '.join(versions)}.",
        "This is the *paper's protocol*: each optimizer with the paper's settings. The target of a seed is what the "
        "base alone reached at best with the same seed; the seconds are those of steps and refreshes, evaluation and "
        "compiling left out. The base is not tuned beyond the paper's own grid, so a ratio here is not what a tuned "
        f"base would leave: beside every ratio stands the base alone at {CONTROL:g} times its rate, the most that "
        "FOSI's scaling of the rate gives. Where that column is as good as FOSI's, the gain is the rate's, not the "
        f"curvature's. Medians over seeds; a target that is never reached counts {ratios.MISS:g} in a mean.",
        *([short] if (short := markdown.shorter(groups)) else []),
        "## Seconds to the base's best validation (the paper's Table 1)",
        markdown.time_to_target(groups),
        "## Seconds to the base's best training loss (Table 2)",
        markdown.time_to_target(groups, train=True),
        "## All together",
        markdown.summary(groups),
        "The mean is of the medians over seeds, over the tasks that were trained as long as in the paper and the two "
        "bases: of so many.",
        markdown.best_against_best(groups),
        "The sooner of FOSI-HB and FOSI-Adam over the sooner of HB and Adam, each to its own target, as in the paper.",
        "## Learning curves",
        *(
            f"![{task}]({task}/learning-curves.png)"
            for task in groups
            if (where / task / "learning-curves.png").exists()
        ),
        "Median over seeds, the band from the least to the largest.",
    ]
    if other := markdown.ablations(groups):
        parts += ["## Other settings of FOSI", other]
    if any(line["curvature"] != "fixed" for line in lines):
        parts += [
            "## What the curvature is estimated on",
            markdown.curvature(groups),
            "fixed: one batch for the whole run, as in the paper; current: the batch about to be trained on; larger: "
            "one fixed batch of four times the size; average: the mean over the batch about to be trained on and the "
            "next three; part: a quarter of the fixed one.",
        ]
    if others := {line["optimizer"] for line in lines} & {*PEERS}:
        shown = (task for task in groups if (where / task / "second-order.png").exists())
        parts += [
            "## K-FAC and L-BFGS" if others <= {"kfac", "lbfgs"} else "## Other optimizers",
            peers.beside_fosi(groups),
            "Each with the first seed and the settings whose best validation is best, whatever the rounds; where the "
            "seconds of those are not known, with the best of which they are too. What they are not known of is drawn "
            "over epochs alone.",
            *(f"![{task}]({task}/second-order.png)" for task in shown),
        ]
        if all_of_them := peers.tried(groups):
            parts += [
                "All settings that were tried, the best in bold. Where none are given, L-BFGS has 10 pairs, and K-FAC "
                "an adaptive rate and momentum, a damping of 1 at first and a tenth of that at least:",
                all_of_them,
            ]
    spectra = [task for task in groups if (where / task / "spectra.png").exists()]
    parts += [
        "## What FOSI costs",
        markdown.cost(groups),
        "T used is the formula's, 2m / 0.1 = 800; the last column is T = τ₃ / (1.1 τ₁ − τ₂) by the measured times.",
        "## Memory",
        peers.memory(groups),
        "The least, over the runs, of the most that a process held on the device: data, evaluation and what compiling "
        "tries out included; a further pair of L-BFGS's holds two vectors more. - where it is not known: another run "
        "of the same process had held as much.",
        "## Generalisation",
        markdown.generalisation(groups),
        "The round of the best validation is where overfitting starts, if it does.",
        "## Spectra",
        *(f"![{task}]({task}/spectra.png)" for task in spectra),
    ]
    return "\n\n".join(parts) + "\n"
