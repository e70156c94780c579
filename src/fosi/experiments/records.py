"""Numbers on disk: JSON lines, machine and versions first, written as an experiment goes on, read back by reports."""

from __future__ import annotations

import json
import math
import os
import platform
import time
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

Record = Mapping[str, Any]

_PACKAGES = ("fosi", "jax", "jaxlib", "optax", "flax", "torch", "kfac-jax", "numpy")


def environment(**settings: Any) -> dict[str, Any]:
    """Returns the first record of a results file: the settings, the device and the versions."""
    import jax

    device = jax.devices()[0]
    return {
        "kind": "environment",
        **settings,
        "device": device.device_kind,
        "xla_platform": device.platform,
        "cpu": _cpu(),
        "cpu_count": os.cpu_count(),
        "platform": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        **{name: found for name in _PACKAGES if (found := _version(name)) is not None},
    }


def write_jsonl(path: Path, records: Iterable[Record]) -> None:
    """Writes one record a line; a number that is not finite becomes null, for JSON knows no NaN.

    The file is there in whole or as it was before, whatever happens meanwhile, also where several processes write it.
    """
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    part.write_text(_lines(records), encoding="utf-8")
    part.replace(path)


def read_jsonl(path: Path, cut: bool = False) -> list[dict[str, Any]]:
    """Returns the records of a file.

    Args:
      path: the file.
      cut: whether the last line may be one that was not written to its end; it is left out then.

    Raises:
      ValueError: if a line is not a JSON object; names file and line.
    """
    records = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(keepends=True), 1):
        if cut and not line.endswith("\n"):
            break
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number} is not JSON: {error}") from error
        if not isinstance(record, dict):
            raise ValueError(f"{path}, line {number} is not a JSON object: {line.strip()[:60]}")
        records.append(record)
    return records


class Journal:
    """A results file that an interrupted experiment goes on with.

    Records are written a unit of work at a time, each followed by a line that says which unit is done, with how many
    records: what comes after the last such line was cut off and is made again. A file is not touched before there is
    something to add to it.

    Attributes:
      path: the file.
      done: names of the units that it holds.
    """

    def __init__(self, path: Path, settings: Record | None = None, units: int | None = None) -> None:
        """Reads what is there.

        Args:
          path: the file.
          settings: what the results must have been made with; None to take any.
          units: how many there are in all.

        Raises:
          ValueError: if the file is not such a one, is damaged, or holds results of other settings.
        """
        self.path = path
        self._kept = _whole(path) if path.exists() else []
        self._environments = [r for r in self._kept if r.get("kind") == "environment"]
        self.done = {record["unit"] for record in self._kept if record.get("kind") == "done"}
        self._settings = {} if settings is None else json.loads(_lines([settings]))
        self._units, self._begun = units, False
        if self._environments:
            self._check(self._environments[0])

    @property
    def measured(self) -> list[Record]:
        """The measurements of the units that it holds."""
        return values(self._kept)

    @property
    def units(self) -> int:
        """How many there are in all, as the file says."""
        return int(self._environments[0].get("units", 0)) if self._environments else 0

    def append(self, unit: str, make: Callable[[], Iterable[Record]]) -> None:
        """Makes the records of one unit and adds them."""
        begin = time.perf_counter()
        records = list(make())
        seconds = round(time.perf_counter() - begin, 3)
        new: list[Record] = [*records, {"kind": "done", "unit": unit, "records": len(records), "seconds": seconds}]
        now = json.loads(_lines([environment(**self._settings, units=self._units)]))
        known = now in self._environments
        if not known:
            new.insert(0, now)
            self._environments.append(now)
        if self._begun and known:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(_lines(new))
        else:  # anew, without a tail that was cut off
            self._begun = True
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_jsonl(self.path, [*self._kept, *new])
        self._kept += json.loads(f"[{','.join(_lines(new).splitlines())}]")
        self.done.add(unit)

    def _check(self, old: Record) -> None:
        other = {name: old.get(name) for name, value in self._settings.items() if old.get(name) != value}
        if other:
            wanted = {name: self._settings[name] for name in other}
            raise ValueError(
                f"{self.path} holds results with {_named(other)}, not {_named(wanted)}: "
                "give another folder, or remove the file to start anew"
            )


def _whole(path: Path) -> list[Record]:
    """The records of the units that are there in whole, and those about them."""
    records: list[Record] = []
    waiting: list[Record] = []
    found = read_jsonl(path, cut=True)
    if found and found[0].get("kind") != "environment":
        raise ValueError(f"{path} is not a file of results: its first line does not say what they were made with")
    for record in found:
        waiting.append(record)
        if record.get("kind") == "environment":
            records.append(waiting.pop())
        elif record.get("kind") == "done":
            count = len(waiting) - 1
            if count != record.get("records", count):
                raise ValueError(
                    f"{path} is damaged: {record['unit']!r} has {count} records, it was written with "
                    f"{record['records']}; remove the file to start anew"
                )
            records += waiting
            waiting = []
    return records


def values(records: Iterable[Record]) -> list[Record]:
    """Returns the measurements among the records: without those that say how and when."""
    return [record for record in records if "kind" not in record]


def number(value: float | None) -> float:
    """Returns a recorded number; what was not finite is infinite again."""
    return math.inf if value is None else value


def line(record: Record) -> str:
    """Returns a record as one line of a results file; see ``write_jsonl``."""
    return json.dumps(_finite(record), allow_nan=False) + "\n"


def _lines(records: Iterable[Record]) -> str:
    return "".join(line(record) for record in records)


def _named(settings: Record) -> str:
    return ", ".join(f"{name} {value}" for name, value in settings.items())


def _cpu() -> str:
    """The processor's name, as Linux tells it; empty elsewhere."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


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
