"""The report's tables: ours beside the paper's, the control beside every ratio."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence

from fosi.experiments.tasks import TASKS, ratios
from fosi.experiments.tasks.engine import CURVATURES
from fosi.experiments.tasks.plan import CONTROL
from fosi.experiments.tasks.ratios import BASES, Group, Line, Ratio
from fosi.experiments.tasks.settings import with_fosi

Groups = Mapping[str, Group]
_SHORT = {"heavy-ball": "HB", "adam": "Adam"}
NEVER = "never"


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table, numbers to the right."""
    lines = [headings, ["---", *["---:"] * (len(headings) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def time_to_target(groups: Groups, train: bool = False) -> str:
    """The paper's Table 1, or Table 2: medians of seconds, ratios, the paper's ratios, the control."""
    name = "seconds_to_train_target" if train else "seconds_to_target"
    headings = ["task"]
    for base in BASES:
        short = _SHORT[base]
        target = [] if train else [f"target of {short}"]
        headings += [
            *target,
            f"{short}, s",
            f"FOSI-{short}, s",
            "ratio",
            "paper, s and ratio",
            f"{short} at {CONTROL:g}× rate",
        ]
    rows = []
    for task, group in groups.items():
        row = [task.upper()]
        for base in BASES:
            alone, ours = group.pick(base), group.pick(f"fosi-{base}")
            if not train:
                row.append(metric(task, group.median(alone, "target_val")))
            row += [seconds(group.median(picked, name), picked, name) for picked in (alone, ours)]
            row.append(bold(ratio(group.ratio(ours, base, name))))
            paper = ratios.PAPER[task][base][2 * train : 2 * train + 2]
            row.append(f"{paper[0]} → {paper[1]}, {ratios.paper_ratio(task, base, train):.2f}")
            control = group.pick(base, CONTROL)
            few = f", {len(control)} seed{'s' if len(control) > 1 else ''}" if 0 < len(control) < len(ours) else ""
            row.append(ratio(group.ratio(control, base, name)) + few)
        rows.append(row)
    return table(headings, rows)


def shorter(groups: Groups) -> str:
    """Which tasks were not trained as long as in the paper, or not in its mode; nothing where all were."""
    found = []
    for task, group in groups.items():
        line, paper = group.lines[0], TASKS[task]
        if group.length != paper.rounds:
            found.append(f"{task.upper()} for {group.length} rounds of the paper's {paper.rounds}")
        if line["mode"] not in (None, *paper.modes[:1]):
            found.append(f"{task.upper()} in the mode {line['mode']}")
    return f"**Not as in the paper: {', '.join(found)}.**" if found else ""


def summary(groups: Groups) -> str:
    """The means over tasks and bases, as the paper has them, and the best against the best."""
    rows = []
    for name, label, paper in (
        ("seconds_to_target", "seconds to the validation target", "0.75"),
        ("steps_to_target", "steps to it", ""),
        ("gradients_to_target", "gradients to it, a Hessian product counting what it costs", ""),
        ("seconds_to_train_target", "seconds to the training target", "0.78"),
    ):
        ours = _all(groups, name, 1.0)
        control = _all(groups, name, CONTROL)
        rows.append([label, *means(ours), str(len(ours)), paper, *means(control), str(len(control))])
    headings = ["", "mean", "geometric mean", "of", "paper's mean of 10"]
    return table([*headings, f"base at {CONTROL:g}×: mean", "geometric mean", "of"], rows)


def best_against_best(groups: Groups) -> str:
    """The sooner FOSI over the sooner base, each to its own target."""
    rows = []
    for task, group in groups.items():
        found = group.best_against_best()
        paper = ratios.paper_best_against_best(task)
        shown = "-" if found is None else NEVER if math.isinf(found) else f"{found:.2f}"
        rows.append([task.upper(), bold(shown), f"{paper:.2f}"])
    return table(["task", "best FOSI / best base", "paper"], rows)


def cost(groups: Groups) -> str:
    """τ₁, τ₂, τ₃, and the overhead they make, against the budget."""
    headings = ["task", "base", "base step τ₁, ms", "FOSI step τ₂, ms", "refresh τ₃, ms", "refresh in gradients"]
    headings += ["T used", "overhead, budget 10%", "T that meets the budget"]
    rows = []
    for task, group in groups.items():
        for base in BASES:
            found = group.overhead(base)
            if found is None:
                continue
            gradient = group.median(group.pick(f"fosi-{base}"), "ms_per_gradient")
            every = "none" if found.measured_every is None else str(found.measured_every)
            rows.append([task.upper(), _SHORT[base], *(f"{x:.3g}" for x in found[:3])])
            rows[-1] += [f"{found.refresh_ms / gradient:.0f}" if gradient else "-", str(found.every)]
            rows[-1] += [f"{found.measured:.1%}", every]
    return table(headings, rows)


def generalisation(groups: Groups) -> str:
    """The best validation of each, when it came, and where the run ended."""
    headings = ["task", "base", "best validation, base", "FOSI", "in round, base", "FOSI", f"base at {CONTROL:g}× rate"]
    rows = []
    for task, group in groups.items():
        for base in BASES:
            alone, ours = group.pick(base), group.pick(f"fosi-{base}")
            control = group.pick(base, CONTROL)
            row = [metric(task, group.median(picked, "best_val")) for picked in (alone, ours)]
            row += [count(group.median(picked, "best_val_round")) for picked in (alone, ours)]
            rows.append([task.upper(), _SHORT[base], *row, metric(task, group.median(control, "best_val"))])
    return table(headings, rows)


def curvature(groups: Groups) -> str:
    """What the estimates are made on, over the seeds that all of them have."""
    headings = [
        "task",
        "base",
        "estimates on",
        "ratio, seconds to target",
        "best validation",
        "ms per refresh",
        "seeds",
    ]
    rows = []
    for task, group in groups.items():
        for base in BASES:
            variants = {name: group.pick(f"fosi-{base}", curvature=name) for name in CURVATURES}
            variants = {name: picked for name, picked in variants.items() if picked}
            if len(variants) < 2:
                continue
            common = set.intersection(*(set(picked) for picked in variants.values()))
            for name, whole in variants.items():
                if picked := {seed: line for seed, line in whole.items() if seed in common}:
                    row = [task.upper(), _SHORT[base], name, ratio(group.ratio(picked, base))]
                    refresh = group.median(picked, "ms_per_refresh")
                    row += [metric(task, group.median(picked, "best_val")), f"{refresh:.0f}" if refresh else "-"]
                    rows.append([*row, str(len(picked))])
    return table(headings, rows)


def ablations(groups: Groups) -> str:
    """FOSI with other settings than the paper's, beside the control of the same seeds."""
    headings = ["task", "optimizer", "settings", "ratio, seconds to target", "ratio, steps"]
    headings += [f"base at {CONTROL:g}× rate, seconds", "steps", "best validation", "seeds"]
    rows = []
    for task, group in groups.items():
        seen: list[tuple[str, float, str, dict[str, object]]] = []
        for line in group.lines:
            key = (line["optimizer"], line["rate_factor"], line["curvature"], line["options"])
            changed = line["options"] or line["rate_factor"] != 1
            if not with_fosi(line["optimizer"]) or not changed or key in seen:
                continue
            seen.append(key)
            picked = group.pick(*key)
            row = [task.upper(), line["optimizer"], settings(line), ratio(group.ratio(picked, line["base"]))]
            row += [ratio(group.ratio(picked, line["base"], "steps_to_target"))]
            control = {s: x for s, x in group.pick(line["base"], CONTROL).items() if s in picked}
            row += [ratio(group.ratio(control, line["base"], x)) for x in ("seconds_to_target", "steps_to_target")]
            rows.append([*row, metric(task, group.median(picked, "best_val")), str(len(picked))])
    return table(headings, rows) if rows else ""


def settings(line: Line) -> str:
    """What a run has in the place of the task's own settings."""
    said = [f"{name} {value}" for name, value in sorted(line["options"].items())]
    said += [f"{line['rate_factor']:g}× rate"] if line["rate_factor"] != 1 else []
    said += [f"estimates on {line['curvature']}"] if line["curvature"] != "fixed" else []
    return ", ".join(said)


def means(found: Sequence[float]) -> tuple[str, str]:
    """Arithmetic and geometric mean."""
    if not found:
        return "-", "-"
    return f"{statistics.mean(found):.2f}", f"{math.exp(statistics.mean(math.log(x) for x in found)):.2f}"


def ratio(found: Ratio | None) -> str:
    """A ratio, its least and largest over the seeds, and how many missed."""
    if found is None:
        return "-"
    if found.misses == found.seeds:
        return NEVER
    if math.isinf(found.median):
        return f"{NEVER} ({found.misses} of {found.seeds})"
    missed = f", {found.misses} of {found.seeds} never" if found.misses else f" to {found.largest:.2f}"
    return f"{found.median:.2f}" + (f" ({found.least:.2f}{missed})" if found.seeds > 1 else "")


def metric(task: str, value: float | None) -> str:
    """A metric as the task has it."""
    if value is None:
        return "-"
    return f"{value:.1%}" if TASKS[task].metric == "accuracy" else f"{value:.4g}"


def seconds(value: float | None, picked: Mapping[int, Line], name: str) -> str:
    """Seconds; that a target was never reached differs from there being no run, no target or no clock."""
    if value is not None:
        return f"{value:.3g}"
    return NEVER if picked and 2 * sum(ratios.missed(x, name) for x in picked.values()) >= len(picked) else "-"


def number(value: float | None, digits: int = 3) -> str:
    """A number with so many digits."""
    return "-" if value is None else f"{value:.{digits}g}"


def count(value: float | None) -> str:
    """A whole number."""
    return "-" if value is None else f"{value:.0f}"


def bold(text: str) -> str:
    """What to look at."""
    return f"**{text}**"


def _all(groups: Groups, name: str, factor: float) -> list[float]:
    """A ratio for each base and task that was trained as long as in the paper: of FOSI, or of the control."""
    found = []
    whole = [group for group in groups.values() if group.length == TASKS[group.task].rounds]
    for group in whole or groups.values():
        for base in BASES:
            picked = group.pick(f"fosi-{base}") if factor == 1 else group.pick(base, factor)
            if (value := group.ratio(picked, base, name)) is not None:
                found.append(value.median)
    return found
