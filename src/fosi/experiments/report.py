"""Figures from results files alone: what a command drew, drawn again without computing anything."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from fosi.experiments import figures
from fosi.experiments.quadratic import STUDIES
from fosi.experiments.quickstart import draw as draw_quickstart
from fosi.experiments.records import Record, read_jsonl, values


def results(where: Path) -> list[Path]:
    """Returns the results files at this path: itself, or those in the folder and below."""
    if not where.exists():
        raise ValueError(f"{where} does not exist; give a results file or a folder with some")
    return [where] if where.is_file() else sorted(where.rglob("*.jsonl"))


def redraw(path: Path) -> Iterable[Path]:
    """Draws the figures of one results file beside it, and returns where; none for a file without figures.

    Raises:
      ValueError: if the file is not one that a command wrote, or holds no measurements yet.
    """
    records = read_jsonl(path)
    written: list[Path] = []
    for name, made in draw(records, path).items():
        written += figures.save(made, path.with_name(name))
    return written


def draw(records: Sequence[Record], path: Path) -> Mapping[str, Figure]:
    """Returns the figures of these records by file name; ``path`` is for what errors say."""
    first = records[0] if records else {}
    if first.get("kind") != "environment":
        return {}  # not an experiment's: benchmarks write JSON lines too
    if first.get("command") == "quickstart":
        return draw_quickstart(records)
    study = STUDIES.get(str(first.get("study")))
    if study is None:
        raise ValueError(f"{path} is of study {first.get('study')!r}, which is not known; known: {', '.join(STUDIES)}")
    measured = values(records)
    if not measured:
        raise ValueError(f"{path} holds no measurements yet; run the study that writes it")
    found: Mapping[str, Figure] = study.draw(measured)
    return found
