"""One line a run: how far it got, and how soon it reached what its base reached at best."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fosi.experiments import records
from fosi.experiments.tasks import runs, settings
from fosi.experiments.tasks.plan import Plan
from fosi.experiments.tasks.runs import Curve
from fosi.experiments.tasks.training import Point

_FOSIS = ("alpha", "eps", "max_lr_scale", "accept", "warmup", "refresh_every", "overhead")
_PEERS = ("b1", "b2", "shampoo_beta", "beta", "gamma", "initial_damping", "min_damping")
FREE = (*_FOSIS, *_PEERS)
"""Settings of FOSI and of its peers that change neither what a step costs nor what a refresh does."""
ADAPTED = ("learning_rate", "momentum")
"""Of K-FAC: to find one anew each step costs products with its matrix, None or not given; its value costs nothing."""
VERSIONS = ("fosi", "jax", "jaxlib", "optax", "flax", "torch", "kfac-jax", "numpy", "python")


def write(folder: Path) -> list[dict[str, Any]]:
    """Writes runs.jsonl of the finished runs of one task, with their targets, and returns its lines."""
    lines = summarise(curves(folder))
    if lines:
        records.write_jsonl(folder / "runs.jsonl", lines)
    return lines


def curves(folder: Path) -> list[Curve]:
    """The finished runs of one task's folder, by name."""
    found = (runs.read(path) for path in sorted((folder / "curves").glob("*.jsonl")))
    return [curve for curve in found if curve.done is not None]


def summarise(finished: Iterable[Curve]) -> list[dict[str, Any]]:
    """A line for each of the runs; what sets a target must be among them."""
    known = {curve.plan.name: curve for curve in retimed(finished)}
    return [summary(curve, _reference(curve, known)) for curve in known.values()]


def _reference(curve: Curve, known: Mapping[str, Curve]) -> Curve | None:
    """The run that sets the target, if it was made on the same device and with the same frozen network.

    Peers such as K-FAC and L-BFGS may be given fewer rounds, since theirs take longer: for them it is the longest that
    there is.
    """
    wanted = curve.plan.reference
    same = [found for found in known.values() if _where(found) == _where(curve)]
    if curve.plan.base is not None:
        return next((found for found in same if found.plan == wanted), None)
    same = [found for found in same if replace(found.plan, rounds=wanted.rounds) == wanted]
    return max(same, key=lambda found: found.plan.length, default=None)


def _where(curve: Curve) -> tuple[Any, ...]:
    return curve.environment["device"], curve.environment.get("backbone")


def retimed(finished: Iterable[Curve]) -> list[Curve]:
    """The runs, those that shared their device with the times of runs that had it alone.

    A step and a refresh take as long with one seed as with another, at one rate as at another, and in a short run as in
    a long one, so the seconds of such a run are its steps and its refreshes times the medians over the longest that
    were alone; of what the clock ended no two are as long, so those count where there are no others. Where there is
    none the seconds are not known, nor where a step has a search, which takes as long as it takes.
    """
    known = list(finished)
    alone: dict[tuple[Any, ...], list[Curve]] = {}
    for curve in known:
        if not curve.environment.get("shared"):
            alone.setdefault(_costs(curve), []).append(curve)
    return [_with_times(curve, alone.get(_costs(curve), [])) for curve in known]


def _costs(curve: Curve) -> tuple[Any, ...]:
    """The same for runs whose steps and refreshes take equally long."""
    options = {name: value for name, value in curve.plan.options.items() if name not in FREE}
    if curve.plan.optimizer == "kfac":
        given = {name: value for name, value in options.items() if value is not None}
        options = {name: name in ADAPTED or value for name, value in given.items()}
    alike = replace(curve.plan, seed=0, rounds=None, seconds=None, rate_factor=1.0, options=options)
    return alike.name, *_where(curve)


def _with_times(curve: Curve, alone: Sequence[Curve]) -> Curve:
    if not curve.environment.get("shared"):
        return curve
    if not alone or settings.second_of(curve.plan.optimizer) is not None:
        unknown = (point._replace(seconds=math.nan, refresh_seconds=math.nan) for point in curve.points)
        return replace(curve, points=tuple(unknown))
    alone = [one for one in alone if one.plan.seconds is None] or alone
    longest = max(one.points[-1].step for one in alone)
    alone = [one for one in alone if one.points[-1].step == longest]
    ends = [one.points[-1] for one in alone]
    a_step = statistics.median(_stepping(last) / last.step for last in ends)
    refreshes = [last.refresh_seconds / last.refreshes for last in ends if last.refreshes]
    a_refresh = statistics.median(refreshes) if refreshes else 0.0
    points = []
    for point in curve.points:
        refreshing = point.refreshes * a_refresh
        points.append(point._replace(seconds=point.step * a_step + refreshing, refresh_seconds=refreshing))
    assert curve.done is not None
    gradient = statistics.median(one.done["gradient_seconds"] for one in alone if one.done is not None)
    done = {**curve.done, "gradient_seconds": gradient}
    return replace(curve, points=tuple(points), done=done)


def summary(curve: Curve, reference: Curve | None) -> dict[str, Any]:
    """The line of one run.

    Args:
      curve: the run.
      reference: the run whose best is the target: the base of the same seed at the paper's rate, itself for such a one.
        None where it is not there: then there are no targets.
    """
    plan, points, done = curve.plan, curve.points, curve.done
    assert done is not None
    last, sign = points[-1], plan.of.sign
    ms_per_step = 1000 * _stepping(last) / last.step
    ms_per_refresh = 1000 * last.refresh_seconds / last.refreshes if last.refreshes else None
    gradient = done["gradient_seconds"]
    target = None if reference is None else best(reference.points, "metric", sign)
    train_target = None if reference is None else best(reference.points, "train_loss", -1)
    reached = first(points, lambda p: target is not None and sign * p.metric >= sign * target)
    trained = first(points, lambda p: train_target is not None and p.train_loss <= train_target)
    overhead = None
    if reference is not None and settings.with_fosi(plan.optimizer):
        then = reference.points[-1]
        overhead = (last.seconds / last.step) / (_stepping(then) / then.step) - 1
    gradients = None
    if reached is not None:  # a step of K-FAC, L-BFGS or newton-cg is more, and one need not be as the next
        steps = reached.step if settings.is_first_order(plan.optimizer) else _stepping(reached) / gradient
        gradients = steps + reached.refresh_seconds / gradient
    line = {
        "task": plan.task,
        "protocol": _protocol(plan),
        "backend": plan.backend,
        "optimizer": plan.optimizer,
        "base": plan.base,
        "seed": plan.seed,
        "device": curve.environment["device"],
        "steps": last.step,
        "seconds": last.seconds,
        "best_val": best(points, "metric", sign),
        "best_val_round": best_round(points, sign),
        "best_train": best(points, "train_loss", -1),
        "target_val": target,
        "seconds_to_target": None if reached is None else reached.seconds,
        "steps_to_target": None if reached is None else reached.step,
        "gradients_to_target": gradients,
        "target_train": train_target,
        "seconds_to_train_target": None if trained is None else trained.seconds,
        "steps_to_train_target": None if trained is None else trained.step,
        "ms_per_step": ms_per_step,
        "ms_per_refresh": ms_per_refresh,
        "ms_per_gradient": 1000 * gradient,
        "refreshes": last.refreshes,
        "refresh_every": (curve.environment.get("schedule") or {}).get("every"),
        "overhead_measured": overhead,
        "peak_memory": done["peak_memory"],
        "diverged": done["diverged"],
        "compile_seconds": done["compile_seconds"],
        "rate": curve.environment["rate"],
        "rate_factor": plan.rate_factor,
        "curvature": plan.curvature,
        "mode": plan.mode,
        "rounds": plan.length if plan.seconds is None else len(points),
        "seconds_given": plan.seconds,
        "batch_size": plan.batch_size,
        "tiny": plan.tiny,
        "shared_device": bool(curve.environment.get("shared")),
        "options": dict(plan.options),
        "curve": f"curves/{curve.path.name}",
        "backbone": curve.environment.get("backbone"),
        "versions": {name: curve.environment[name] for name in VERSIONS if name in curve.environment},
    }
    return {name: None if isinstance(value, float) and math.isnan(value) else value for name, value in line.items()}


def _protocol(plan: Plan) -> str:
    """``"paper"`` with the paper's settings, whose peers are tuned; ``"own"`` where the paper has none."""
    if plan.of.fosi is not None or plan.batch_size is not None:
        return "own"
    if plan.optimizer in ("kfac", "lbfgs"):
        return "paper"
    if not settings.is_wrappable(plan.optimizer):
        return "own"
    if plan.rate_factor == 1 and plan.curvature == "fixed" and not plan.options:
        return "paper"
    return "ablation" if settings.with_fosi(plan.optimizer) else "control"


def _stepping(point: Point) -> float:
    """The seconds without those of refreshes."""
    return point.seconds - point.refresh_seconds


def best(points: Sequence[Point], name: str, sign: int) -> float | None:
    """The best value of a curve, the highest for a sign of +1; None where none is a number."""
    found = [value for point in points if math.isfinite(value := getattr(point, name))]
    return sign * max(sign * value for value in found) if found else None


def best_round(points: Sequence[Point], sign: int) -> int | None:
    """The round, counted from 1, with the best metric."""
    top = best(points, "metric", sign)
    return None if top is None else 1 + next(index for index, point in enumerate(points) if point.metric == top)


def first(points: Iterable[Point], holds: Callable[[Point], bool]) -> Point | None:
    """The first point of which it holds."""
    return next((point for point in points if holds(point)), None)
