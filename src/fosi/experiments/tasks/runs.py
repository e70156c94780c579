"""A run on disk: its curve as it goes on, checkpoints to go on from after a kill, events for TensorBoard."""

from __future__ import annotations

import json
import logging
import math
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any
from zipfile import BadZipFile

import numpy as np

from fosi.experiments import records
from fosi.experiments.tasks import settings, training
from fosi.experiments.tasks.engine import Engine
from fosi.experiments.tasks.plan import Plan
from fosi.experiments.tasks.training import Point, Progress
from fosi.experiments.tensorboard import EventWriter

_log = logging.getLogger(__name__)
_BROKEN = (AttributeError, EOFError, KeyError, RuntimeError, TypeError, ValueError, BadZipFile, UnpicklingError)
"""What reading half a file, or one of something else, may end with in either framework."""


@dataclass(frozen=True)
class Curve:
    """A run as its file has it.

    Attributes:
      path: the file.
      plan: which run.
      environment: settings, device and versions.
      points: one a round.
      done: what is known only at the end; None for a run that is not there yet.
    """

    path: Path
    plan: Plan
    environment: dict[str, Any]
    points: tuple[Point, ...]
    done: dict[str, Any] | None


@dataclass(frozen=True)
class Files:
    """Where the files of a run lie, below one folder a task."""

    curve: Path
    checkpoint: Path
    events: Path
    solution: Path

    @classmethod
    def of(cls, plan: Plan, out: Path) -> Files:
        """Those of this run."""
        where = out / plan.task
        return cls(
            where / "curves" / f"{plan.name}.jsonl",
            where / "checkpoints" / plan.name,
            where / "tensorboard" / plan.name,
            where / "solutions" / f"{plan.name}.npz",
        )


def read(path: Path) -> Curve:
    """Returns the run of a curve file; a last line that was not written to its end is left out.

    Raises:
      ValueError: if it is not such a file.
    """
    found = records.read_jsonl(path, cut=True)
    if not found or found[0].get("command") != "train":
        raise ValueError(f"{path} is not the curve of a run: its first line does not say so")
    plan = Plan(**found[0]["plan"])
    points = tuple(Point(**_as_point(record)) for record in records.values(found))
    done = next((record for record in found if record.get("kind") == "done"), None)
    return Curve(path, plan, found[0], points, done)


def is_done(plan: Plan, out: Path) -> bool:
    """Whether the folder holds the run, made to its end."""
    path = Files.of(plan, out).curve
    return path.exists() and read(path).done is not None


def run(
    plan: Plan,
    problem: Any,
    out: Path,
    on_point: Callable[[Point, Engine], None] = lambda point, engine: None,
    checkpoint_seconds: float = 30.0,
    shared: bool = False,
    engine: Engine | None = None,
    keep: bool = False,
) -> Curve:
    """Makes a run, or goes on with it, or finds that it is there.

    Args:
      plan: which.
      problem: of ``plan.build``, so that runs can share it; a run that is there needs none.
      out: the folder for results.
      on_point: called after every round.
      checkpoint_seconds: how long to train before what is there is saved.
      shared: whether other work shares the device, so that the run's own clock is not to be believed.
      engine: of ``plan.engine``, or one of another seed that has taken this problem, and compiles nothing then.
      keep: whether a checkpoint of its end is left, if it did not diverge.

    Raises:
      ValueError: if the folder holds such a run of other settings, or one begun on another device, or if its clock is
        to end it and is not to be believed.
    """
    if shared and plan.seconds is not None:
        raise ValueError(f"seconds is {plan.seconds:g}, but the device is shared: give rounds, which end it as well")
    files = Files.of(plan, out)
    if files.curve.exists() and (old := read(files.curve)).done is not None:
        _same(old, plan, None)
        return old
    engine = plan.engine(problem) if engine is None else engine
    rounds = plan.length * engine.looks
    _check_switch(plan, rounds * engine.steps_a_round)
    environment = _environment(plan, problem, engine, shared)
    progress = _resumed(files, plan, environment, engine)
    before = engine.peak_memory()
    begin = time.perf_counter()
    engine.compile()
    compiling = time.perf_counter() - begin
    gradient = engine.gradient_seconds()
    if progress is None:
        progress = training.start(engine)
    files.curve.parent.mkdir(parents=True, exist_ok=True)
    records.write_jsonl(files.curve, [environment, *(point._asdict() for point in progress.curve)])
    shutil.rmtree(files.events, ignore_errors=True)  # written anew from the points
    with EventWriter(files.events) as events, files.curve.open("a", encoding="utf-8") as curve:
        for point in progress.curve:
            events.scalars(point.step, scalars(plan, point))
        saved = time.monotonic()
        seconds = math.inf if plan.seconds is None else plan.seconds
        for point in training.train(engine, progress, rounds, seconds):
            curve.write(records.line(point._asdict()))
            curve.flush()
            events.scalars(point.step, scalars(plan, point))
            on_point(point, engine)
            if time.monotonic() - saved >= checkpoint_seconds and not point.diverged:
                _save(files.checkpoint, engine, progress)
                saved = time.monotonic()
        peak = engine.peak_memory()
        done = {
            "kind": "done",
            "compile_seconds": compiling,
            "gradient_seconds": gradient,
            # What an earlier run of the process held is held against this one: unknown where that was more.
            "peak_memory": None if peak == before else peak,
            "diverged": progress.diverged,
        }
        if (at := plan.options.get("switch_at")) is not None and progress.step <= at and not progress.diverged:
            _log.warning(
                "%s ended after %d steps, before switch_at, %d: all are the first's", plan.name, progress.step, at
            )
        _draw(files.solution, engine, progress)
        if keep and not progress.diverged:  # before the run is done, lest an older one be taken for its end
            _save(files.checkpoint, engine, progress)
        curve.write(records.line(done))
    if not keep or progress.diverged:
        files.checkpoint.unlink(missing_ok=True)
    return read(files.curve)


def _draw(path: Path, engine: Engine, progress: Progress) -> None:
    """Writes what the model has found at its end, where there is something to draw."""
    if (found := engine.solution(progress.run)) is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        arrays: dict[str, Any] = {name: np.asarray(x, np.float32) for name, x in found.items()}
        np.savez_compressed(path, **arrays)


def _check_switch(plan: Plan, steps: int) -> None:
    at = settings.of_relay(plan.optimizer, plan.options).get("switch_at")
    if at is not None and at >= steps:
        raise ValueError(f"switch_at is {at}, but the run has {steps} steps: the second would never go on; give less")


def scalars(plan: Plan, point: Point) -> dict[str, float]:
    """What TensorBoard shows of a point."""
    steps = max(1, point.step)
    shown = {
        "loss/train": point.train_loss,
        f"{plan.of.metric}/validation": point.metric,
        "time/seconds": point.seconds,
        "time/ms per step": 1000 * (point.seconds - point.refresh_seconds) / steps,
    }
    if settings.with_fosi(plan.optimizer):
        shown |= {
            "fosi/learning-rate scale": point.lr_scale,
            "fosi/accepted pairs": len(point.eigenvalues),
            "fosi/refreshes": point.refreshes,
            "time/ms per refresh": 1000 * point.refresh_seconds / max(1, point.refreshes),
        }
        shown |= {f"eigenvalues/{index:02d}": value for index, value in enumerate(point.eigenvalues, 1)}
    return shown


def _environment(plan: Plan, problem: Any, engine: Engine, shared: bool) -> dict[str, Any]:
    schedule = engine.schedule
    made = records.environment(
        command="train",
        plan=plan.record(),
        shared=shared,
        rate=engine.rate,
        steps_a_round=engine.steps_a_round,
        schedule=None if schedule is None else schedule._asdict(),
        **{"batch_size": plan.batch_size or plan.of.batch_size, **getattr(problem, "facts", {})},
    )
    return {**made, "device": engine.device_name}  # PyTorch's need not be JAX's


def _resumed(files: Files, plan: Plan, environment: dict[str, Any], engine: Engine) -> Progress | None:
    """The run as it was saved; None to begin at its beginning."""
    if not files.curve.exists():
        files.checkpoint.unlink(missing_ok=True)  # of a run whose curve was removed: what begins anew is not that
        return None
    _same(read(files.curve), plan, environment)
    return load_checkpoint(files.checkpoint, engine) if files.checkpoint.exists() else None


def load_checkpoint(path: Path, engine: Engine) -> Progress:
    """Returns a run as it was saved.

    Raises:
      ValueError: if it is no whole checkpoint, or of another model or another optimizer than the engine's.
    """
    try:
        head, _, raw = path.read_bytes().partition(b"\n")
        saved = json.loads(head)
        curve = [Point(**_as_point(point)) for point in saved.pop("curve")]
        return Progress(engine.load(raw), **saved, curve=curve)
    except _BROKEN as error:
        raise ValueError(f"{path} cannot be gone on from: {error}") from error


def _save(path: Path, engine: Engine, progress: Progress) -> None:
    """Writes all that the run needs to go on: first how far it has come, on a line, then what the engine trains."""
    head = {
        "step": progress.step,
        "seconds": progress.seconds,
        "refreshes": progress.refreshes,
        "refresh_seconds": progress.refresh_seconds,
        "curve": [point._asdict() for point in progress.curve],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_bytes(records.line(head).encode() + engine.dump(progress.run))
    part.replace(path)


def _same(old: Curve, plan: Plan, environment: dict[str, Any] | None) -> None:
    """Checks that what is there is of this run, and, to go on with it, of this device."""
    wanted = json.loads(json.dumps(plan.record()))
    found = old.environment["plan"]
    other = {name: value for name, value in found.items() if wanted.get(name) != value}
    if other:
        raise ValueError(
            f"{old.path} is a run with {other}, not { ({name: wanted.get(name) for name in other}) }: "
            "give another folder with --out, or remove the file"
        )
    if environment is None:
        return
    for name in ("device", "shared"):
        if old.environment[name] != environment[name]:
            raise ValueError(
                f"{old.path} was begun with {name} {old.environment[name]!r}, this is {environment[name]!r}: seconds "
                "of the two do not add up. Give another folder with --out, or remove the file"
            )


def _as_point(record: records.Record) -> dict[str, Any]:
    """A point as it was before JSON, which knows no NaN and no tuples."""
    numbers = {name: float("nan") if value is None else value for name, value in record.items()}
    return {**numbers, "eigenvalues": tuple(record["eigenvalues"])}
