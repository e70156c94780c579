"""The report's tables of optimizers that were tuned: the best of each beside FOSI, and all that were tried."""

from __future__ import annotations

from fosi.experiments.tasks import TASKS, markdown
from fosi.experiments.tasks.markdown import Groups
from fosi.experiments.tasks.ratios import Group, Line
from fosi.experiments.tasks.settings import PEERS


def beside_fosi(groups: Groups) -> str:
    """K-FAC, L-BFGS and the other peers beside FOSI on Heavy-Ball, each at its best settings."""
    headings = ["task", "optimizer", "settings", "rounds", "best validation", "best training loss", "seconds in all"]
    headings += ["ms per step", "seconds to HB's best validation"]
    rows = []
    for task, group in groups.items():
        chosen = list(group.pick("fosi-heavy-ball").values())[:1]
        chosen += [x for name in PEERS if (x := best_of(group, name)) is not None]
        for line in chosen:
            times = ["-" if line[x] is None else f"{line[x]:.4g}" for x in ("seconds", "ms_per_step")]
            to_target = markdown.seconds(line["seconds_to_target"], {0: line}, "seconds_to_target")
            rows.append([*_row(task, line), *times, to_target])
    return markdown.table(headings, rows)


def tried(groups: Groups) -> str:
    """All settings of those that were tried with more than one, the best in bold; empty where none were."""
    headings = ["task", "optimizer", "settings", "rounds", "best validation", "best training loss"]
    headings.append("steps to HB's best validation")
    rows = []
    for task, group in groups.items():
        for name in PEERS:
            best = best_of(group, name)
            lines = [line for line in group.lines if line["optimizer"] == name]
            for line in lines if len(lines) > 1 else []:
                steps = line["steps_to_target"]
                reached = str(steps) if steps else markdown.seconds(None, {0: line}, "steps_to_target")
                row = [*_row(task, line), reached]
                row[3] += ", diverged" if line["diverged"] else ""
                row[4] = markdown.bold(row[4]) if line is best else row[4]
                rows.append(row)
    return markdown.table(headings, rows) if rows else ""


def best_of(group: Group, optimizer: str) -> Line | None:
    """The run of an optimizer that was tuned, with the best validation; one that diverged only where all did."""
    sign = TASKS[group.task].sign
    found = [line for line in group.lines if line["optimizer"] == optimizer and line["best_val"] is not None]
    return max(found, key=lambda line: (not line["diverged"], sign * line["best_val"]), default=None)


def _row(task: str, line: Line) -> list[str]:
    trained = "-" if line["best_train"] is None else f"{line['best_train']:.4g}"
    best = markdown.metric(task, line["best_val"])
    return [task.upper(), line["optimizer"], markdown.settings(line), str(line["rounds"]), best, trained]
