"""The report's tables of optimizers that were tuned: the best of each beside FOSI, and all that were tried."""

from __future__ import annotations

from fosi.experiments.tasks import TASKS, markdown
from fosi.experiments.tasks.markdown import Groups
from fosi.experiments.tasks.ratios import Group, Line
from fosi.experiments.tasks.settings import PEERS

_HEADINGS = ("task", "optimizer", "settings", "rounds", "best validation", "best training loss")
_MEASURED = ("kfac", "lbfgs")
_TO_TARGET = "to HB's best validation"


def beside_fosi(groups: Groups) -> str:
    """K-FAC, L-BFGS and the other peers beside FOSI on Heavy-Ball, with the first seed."""
    headings = [*_HEADINGS, "seconds in all", "ms per step", f"seconds {_TO_TARGET}"]
    rows = []
    for group in groups.values():
        ours = list(group.pick("fosi-heavy-ball").values())[:1]
        for line in [*ours, *(line for name in PEERS for line in shown(group, name))]:
            times = [markdown.number(line[name]) for name in ("seconds", "ms_per_step")]
            rows.append([*_row(line), *times, _reached(group, line, "seconds_to_target")])
    return markdown.table(headings, rows)


def tried(groups: Groups) -> str:
    """All settings of the peers that have several, the best in bold; empty where none has."""
    headings = [*_HEADINGS, f"steps {_TO_TARGET}", "seconds to it"]
    rows = []
    for group in groups.values():
        for name in PEERS:
            best, lines = best_of(group, name), searched(group, name)
            for line in lines if len(lines) > 1 else []:
                reached = [_reached(group, line, x) for x in ("steps_to_target", "seconds_to_target")]
                rows.append([*_row(line, line is best), *reached])
    return markdown.table(headings, rows) if rows else ""


def memory(groups: Groups) -> str:
    """The most memory held on the device."""
    ours, rows = ("heavy-ball", "fosi-heavy-ball", "adam", "fosi-adam"), []
    for task, group in groups.items():
        held = {name: [line["peak_memory"] for line in group.pick(name).values()] for name in ours}
        for name in _MEASURED:
            held[name] = [line["peak_memory"] for line in group.lines if line["optimizer"] == name]
        known = ([x for x in held[name] if x] for name in (*ours, *_MEASURED))
        rows.append([task.upper(), *(f"{min(found) / 2**20:.0f}" if found else "-" for found in known)])
    return markdown.table(["task, MiB", *ours, *_MEASURED], rows)


def shown(group: Group, optimizer: str) -> list[Line]:
    """The best run of an optimizer that was tuned and, where its seconds are not known, the best of which they are."""
    lines = searched(group, optimizer)
    timed = [line for line in lines if line["seconds"] is not None]
    found = [x for x in (_best(group, lines), _best(group, timed)) if x is not None]
    return found[:1] if found and found[0] is found[-1] else found


def best_of(group: Group, optimizer: str) -> Line | None:
    """The run of an optimizer that was tuned, with the best validation; one that diverged only where all did."""
    return _best(group, searched(group, optimizer))


def searched(group: Group, optimizer: str) -> list[Line]:
    """A run for each of the settings that were tried, of the first seed: the longest, as beside a short, timed one."""
    found: dict[str, Line] = {}
    for line in sorted(group.lines, key=lambda line: (line["seed"], line["diverged"], -line["rounds"])):
        if line["optimizer"] == optimizer:
            found.setdefault(markdown.settings(line), line)
    return [found[settings] for settings in sorted(found)]


def _best(group: Group, lines: list[Line]) -> Line | None:
    sign = TASKS[group.task].sign
    found = [line for line in lines if line["best_val"] is not None]
    return max(found, key=lambda line: (not line["diverged"], sign * line["best_val"]), default=None)


def _row(line: Line, marked: bool = False) -> list[str]:
    task, best = line["task"], markdown.metric(line["task"], line["best_val"])
    rounds = f"diverged in step {line['steps']}" if line["diverged"] else str(line["rounds"])
    best = markdown.bold(best) if marked else best
    return [
        task.upper(),
        line["optimizer"],
        markdown.settings(line),
        rounds,
        best,
        markdown.number(line["best_train"], 4),
    ]


def _reached(group: Group, line: Line, name: str) -> str:
    """When the target was reached, if it was: a run that was given fewer rounds than the target's might have yet."""
    if line[name] is not None:
        return str(line[name]) if isinstance(line[name], int) else markdown.number(line[name])
    said = markdown.seconds(None, {0: line}, name)
    short = line["rounds"] < group.length and not line["diverged"]
    return f"not in {line['rounds']}" if said == markdown.NEVER and short else said
