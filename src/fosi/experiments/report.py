"""Figures from results files alone: what a command drew, drawn again without computing anything."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from matplotlib.figure import Figure

from fosi.experiments import figures
from fosi.experiments.quadratic import STUDIES
from fosi.experiments.quickstart import draw as draw_quickstart
from fosi.experiments.records import Journal, read_jsonl

_NOT_DRAWN = ('{"benchmark"', '{"command": "diagnose"', '{"command": "spectrum"', '{"command": "limits"')


def results(where: Path) -> list[Path]:
    """Returns the results files at this path: itself, or those in the folder and below.

    Runs of training tasks, which ``tasks`` reports on together, benchmarks, which have no figures, and diagnoses and
    spectra, which are drawn when they are made, are left out.

    Raises:
      ValueError: if there is none, of these or those.
    """
    if not where.exists():
        raise ValueError(f"{where} does not exist; give a results file or a folder with some")
    if where.is_file():
        return [where]
    found = sorted(where.rglob("*.jsonl"))
    if not found:
        raise ValueError(f"{where} holds no results (*.jsonl); give a folder that a command wrote to")
    drawn = [path for path in found if not _elsewhere(path)]
    if not drawn and not any(where.glob("*/curves/*.jsonl")):
        raise ValueError(f"{where} holds runs of a task at most: give the folder above it")
    return drawn


def tasks(where: Path) -> list[Path]:
    """Writes the reports and the figures of the training tasks whose runs are in this folder, and returns where."""
    if not where.is_dir() or not any(where.glob("*/curves/*.jsonl")):
        return []
    # Here because the tasks need flax, which drawing a quadratic study does not.
    from fosi.experiments.tasks import prediction_report, report, suite_report

    written = [*report.write(where), *suite_report.write(where), *prediction_report.write(where)]
    if not written:
        raise ValueError(
            f"{where} holds no finished run to report on: the same commands go on with those that are not finished, "
            "and runs in batches of another size are not reported on yet"
        )
    return written


def _elsewhere(path: Path) -> bool:
    if path.parent.name == "curves" or path.name == "runs.jsonl":
        return True
    with path.open(encoding="utf-8") as stream:
        return stream.readline().startswith(_NOT_DRAWN)


def redraw(path: Path) -> Iterable[Path]:
    """Draws the figures of one results file beside it, and returns where.

    Raises:
      ValueError: if the file is not one that a command wrote, is damaged, or its study is not finished.
    """
    written: list[Path] = []
    for name, made in draw(path).items():
        written += figures.save(made, path.with_name(name))
    return written


def draw(path: Path) -> Mapping[str, Figure]:
    """Returns the figures of a results file by file name; see ``redraw``."""
    first = next(iter(read_jsonl(path, cut=True)), {})
    if first.get("command") == "quickstart":
        return draw_quickstart(read_jsonl(path))
    if first.get("command") != "quadratic":
        raise ValueError(f"{path} has no figures: it was not written by fosi quickstart or fosi quadratic")
    study = STUDIES.get(str(first.get("study")))
    if study is None:
        raise ValueError(f"{path} is of study {first.get('study')!r}, which is not known; known: {', '.join(STUDIES)}")
    journal = Journal(path)
    if len(journal.done) < journal.units:
        raise ValueError(
            f"{path} is unfinished, {len(journal.done)} of {journal.units} units: the same command goes on with it"
        )
    return study.draw(journal.measured)
