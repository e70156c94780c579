"""What an experiment leaves behind: numbers as JSON lines, machine and versions first, and a figure."""

import json
import math
import os
import platform
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from textwrap import fill
from typing import Any

import jax
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from fosi.experiments.results import Run

_COLOURS = {"heavy-ball": "#d95f02", "adam": "#1f78b4"}


def environment(**settings: Any) -> dict[str, Any]:
    """Returns the first record of a results file: the settings, the device and the versions."""
    device = jax.devices()[0]
    return {
        "kind": "environment",
        **settings,
        "device": device.device_kind,
        "backend": device.platform,
        "cpu_count": os.cpu_count(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        **{name: version(name) for name in ("fosi", "jax", "jaxlib", "optax", "numpy")},
    }


def run_record(run: Run, chosen: bool = True) -> dict[str, Any]:
    """Returns one run as a record; `chosen` is false for a learning rate that was tried and not kept."""
    return {
        "kind": "run" if chosen else "rejected_rate",
        "optimizer": run.optimizer,
        "learning_rate": run.learning_rate,
        "steps": run.steps,
        "train_loss": run.train_loss,
        "best_train_loss": run.best_train_loss,
        "validation_accuracy": run.validation_accuracy,
        "seconds": run.seconds,
        "seconds_per_step": run.seconds / run.steps,
        "refreshes": run.refreshes,
        "steps_to_base_best": run.steps_to_base_best,
        "curve": [list(point) for point in run.curve],
    }


def write_jsonl(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Writes one record a line; a number that is not finite becomes null, for JSON knows no NaN."""
    lines = (json.dumps(_finite(record), allow_nan=False) + "\n" for record in records)
    path.write_text("".join(lines), encoding="utf-8")


def write_figure(path: Path, runs: Iterable[Run], title: str, caption: str) -> None:
    """Draws training loss over steps: one colour a base optimizer, dashed alone and solid with FOSI."""
    figure = Figure(figsize=(7.5, 4.8), dpi=150, layout="tight")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for run in runs:
        base = run.optimizer.removeprefix("fosi-")
        with_fosi = base != run.optimizer
        axes.plot(
            [step for step, _ in run.curve],
            [loss for _, loss in run.curve],
            color=_COLOURS[base],
            linestyle="-" if with_fosi else "--",
            linewidth=2.0 if with_fosi else 1.6,
            label=f"{run.optimizer} (rate {run.learning_rate:g})",
        )
    axes.set_yscale("log")
    axes.set_xlabel(f"step\n\n{fill(caption, width=80, break_on_hyphens=False)}")
    axes.set_ylabel("training loss")
    axes.set_title(title)
    axes.margins(x=0.01)
    axes.grid(which="major", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
