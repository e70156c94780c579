"""Numbers on disk: JSON lines, machine and versions first, written as an experiment goes on, read back by reports."""

from __future__ import annotations

import json
import math
import os
import platform
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

Record = Mapping[str, Any]

_PACKAGES = ("fosi", "jax", "jaxlib", "optax", "torch", "numpy")


def environment(**settings: Any) -> dict[str, Any]:
    """Returns the first record of a results file: the settings, the device and the versions."""
    import jax

    device = jax.devices()[0]
    return {
        "kind": "environment",
        **settings,
        "device": device.device_kind,
        "xla_platform": device.platform,
        "cpu_count": os.cpu_count(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        **{name: found for name in _PACKAGES if (found := _version(name)) is not None},
    }


def write_jsonl(path: Path, records: Iterable[Record]) -> None:
    """Writes one record a line; a number that is not finite becomes null, for JSON knows no NaN."""
    path.write_text(_lines(records), encoding="utf-8")


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Returns the records of a file.

    Raises:
      ValueError: if a line is not a JSON object; names file and line.
    """
    records = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number} is not JSON: {error}") from error
        if not isinstance(record, dict):
            raise ValueError(f"{path}, line {number} is not a JSON object: {line[:60]}")
        records.append(record)
    return records


class Journal:
    """A results file that an interrupted experiment goes on with.

    Records are written a unit of work at a time, each followed by a line that says the unit is done: what comes after
    the last such line was cut off and is made again.

    Attributes:
      path: the file.
      done: names of the units that it holds.
    """

    def __init__(self, path: Path, settings: Record) -> None:
        """Opens the file, or starts it.

        Raises:
          ValueError: if it holds results of other settings.
        """
        self.path = path
        self.done: set[str] = set()
        now = environment(**settings)
        kept = self._whole()
        environments = [r for r in kept if r.get("kind") == "environment"]
        for old in environments[:1]:
            wanted = json.loads(_lines([settings]))
            other = {name: old.get(name) for name, value in wanted.items() if old.get(name) != value}
            if other:
                raise ValueError(
                    f"{path} holds results with {_named(other)}, not {_named({k: wanted[k] for k in other})}: "
                    "give another folder, or remove the file to start anew"
                )
        if json.loads(_lines([now])) not in environments:
            kept.append(now)
        self.done = {record["unit"] for record in kept if record.get("kind") == "done"}
        path.parent.mkdir(parents=True, exist_ok=True)
        write_jsonl(path, kept)

    def append(self, unit: str, records: Iterable[Record]) -> None:
        """Adds the records of one unit."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(_lines([*records, {"kind": "done", "unit": unit}]))
        self.done.add(unit)

    def _whole(self) -> list[Record]:
        if not self.path.exists():
            return []
        lines = self.path.read_text(encoding="utf-8").splitlines(keepends=True)
        records: list[Record] = []
        last = 0
        for line in lines:
            if not line.endswith("\n"):
                break
            records.append(json.loads(line))
            if records[-1].get("kind") in ("done", "environment"):
                last = len(records)
        return records[:last]


def values(records: Iterable[Record]) -> list[Record]:
    """Returns the measurements among the records: without those that say how and when."""
    return [record for record in records if "kind" not in record]


def number(value: float | None) -> float:
    """Returns a recorded number; what was not finite is infinite again."""
    return math.inf if value is None else value


def _lines(records: Iterable[Record]) -> str:
    return "".join(json.dumps(_finite(record), allow_nan=False) + "\n" for record in records)


def _named(settings: Record) -> str:
    return ", ".join(f"{name} {value}" for name, value in settings.items())


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
