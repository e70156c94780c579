"""Timing of torch code as ratios within one run; table, options and records are those of the other benchmarks."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

import fosi
from benchmarks.common import cores, parser, record, table

__all__ = ["device", "interleaved", "machine", "parser", "record", "table"]


def device() -> torch.device:
    """The accelerator where there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def machine() -> dict[str, str]:
    """Where and with what a figure was measured."""
    name = torch.cuda.get_device_name() if device().type == "cuda" else f"CPU, {cores()} cores ({platform.machine()})"
    return {
        "device": name,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "fosi": fosi.__version__,
    }


def wait() -> None:
    """Until the device has done what was queued."""
    if device().type == "cuda":
        torch.cuda.synchronize()


def interleaved(runs: Mapping[str, Callable[[], Any]], repeats: int, calls: int = 1) -> dict[str, float]:
    """Median seconds of each run, taken in turns so that a slow moment of the machine hits all of them alike.

    ``calls`` of a run are queued before waiting, as a training loop does.
    """
    for run in runs.values():
        for _ in range(3):
            run()
    wait()
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            begin = time.perf_counter()
            for _ in range(calls):
                run()
            wait()
            seconds[name].append((time.perf_counter() - begin) / calls)
    return {name: statistics.median(values) for name, values in seconds.items()}
