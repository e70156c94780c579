"""Timing as ratios within one run, and what every result carries: the device and the versions."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jaxlib
import numpy as np
import optax

import fosi

Run = Callable[[], Any]


def machine() -> dict[str, str]:
    """Where and with what a figure was measured."""
    device = jax.devices()[0]
    return {
        "device": device.device_kind if device.platform != "cpu" else f"CPU, {cores()} cores ({platform.machine()})",
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "optax": optax.__version__,
        "numpy": np.__version__,
        "fosi": fosi.__version__,
    }


def cores() -> int:
    """How many this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS
        return os.cpu_count() or 1


def interleaved(
    runs: Mapping[str, Run],
    repeats: int,
    calls: Mapping[str, int] | None = None,
    outputs: dict[str, Any] | None = None,
) -> dict[str, float]:
    """Median seconds of each run, taken in turns so that a slow moment of the machine hits all of them alike.

    ``calls`` queues some runs several times before waiting, as a training loop does: the launch of one then hides
    behind the work of the last. ``outputs`` is filled with what each run returns.
    """
    calls = calls or {}
    outputs = {} if outputs is None else outputs
    for name, run in runs.items():
        outputs[name] = jax.block_until_ready(run())
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            count = calls.get(name, 1)
            begin = time.perf_counter()
            jax.block_until_ready([run() for _ in range(count)])
            seconds[name].append((time.perf_counter() - begin) / count)
    return {name: statistics.median(values) for name, values in seconds.items()}


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Prints rows under a title."""
    text = [[_cell(value) for value in row] for row in rows]
    widths = [max(len(line[i]) for line in [list(columns), *text]) for i in range(len(columns))]
    print(f"\n{title}")
    print("  ".join(name.ljust(width) for name, width in zip(columns, widths, strict=True)))
    print("  ".join("-" * width for width in widths))
    for line in text:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)))


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def parser(question: str) -> argparse.ArgumentParser:
    """The options every benchmark takes."""
    made = argparse.ArgumentParser(description=question)
    made.add_argument("--out", type=Path, default=None, help="append the numbers to this JSON-lines file")
    made.add_argument("--repeats", type=int, default=None, help="timed repeats (default: enough for a steady median)")
    return made


def record(
    out: Path | None, benchmark: str, rows: Sequence[Mapping[str, Any]], where: Mapping[str, str] | None = None
) -> None:
    """Appends rows to ``out``, each with the machine and the versions (JAX's where not told)."""
    if out is None:
        return
    where = machine() if where is None else where
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("a") as lines:
        for row in rows:
            lines.write(json.dumps({"benchmark": benchmark, **row, **where}) + "\n")
    print(f"numbers appended to {out}")
