"""Diagnoses and spectra of the training tasks: measured, on disk, and drawn."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fosi import schedule
from fosi.diagnosis import Diagnosis
from fosi.experiments import figures, records
from fosi.experiments.tasks import settings
from fosi.experiments.tasks.jax_engine import JaxEngine
from fosi.experiments.tasks.plan import Plan
from fosi.experiments.tasks.probing import Probe
from fosi.experiments.tasks.settings import MOMENTUM
from fosi.experiments.tasks.task import Problem
from fosi.jax import Batches, Spectrum, estimate_spectrum
from fosi.jax import diagnose as measure


def diagnose(probe: Probe, batches: int, **given: Any) -> Diagnosis:
    """Whether FOSI would help from here on.

    Args:
      probe: where training stands.
      batches: how many of the next batches to look at; where one is all of the data, the plan's ``curvature`` may be
        ``"part"`` of it.
      **given: more arguments of ``fosi.jax.diagnose``.
    """
    task, problem = probe.plan.of, probe.engine.problem
    if probe.plan.curvature == "part" and problem.part is not None:
        given["curvature_batches"] = [(probe.run.state, problem.part(problem.data))]
    if given.get("timed") and "step_seconds" not in given:
        given["step_seconds"] = probe.step_seconds()
    if probe.plan.seconds is None:  # else how far it comes is not known
        left = probe.plan.length * probe.engine.steps_a_round - probe.step
        given.setdefault("steps_left", max(left, 1))
    given.setdefault("steps_taken", max(probe.step, 1))
    return measure(
        probe.loss,
        probe.run.params,
        probe.batches(batches),
        has_aux=True,
        base=probe.base,  # type: ignore[arg-type]
        learning_rate=probe.engine.rate,
        momentum=MOMENTUM,
        nu=probe.second_moments(),
        path=probe.path(),
        max_lr_scale=task.max_lr_scale,
        **given,
    )


def own(plan: Plan, problem: Problem) -> tuple[Plan, dict[str, Any]]:
    """A plan, and how many pairs, products and steps between two estimates FOSI has there: the task's, or the plan's.

    Where a step sees all data, the plan's estimates are on a part of them, as FOSI's are.
    """
    if problem.part is not None:
        plan = replace(plan, curvature="part")
    name, options = f"fosi-{plan.base}", dict(plan.options) if settings.with_fosi(plan.optimizer) else {}
    ours = replace(plan, optimizer=name, options=options).engine(problem)
    assert isinstance(ours, JaxEngine) and ours.schedule is not None
    fosi = settings.settle(name, plan.of, ours.steps_a_round, 1.0, options).fosi or {}
    asked = {"k": fosi["k"], "ell": fosi.get("ell", 0), "num_matvecs": ours.schedule.num_matvecs}
    return plan, {**asked, "refresh_every": ours.schedule.every}


def check(problem: Problem, **asked: Any) -> None:
    """Raises where so many pairs, products or steps between two estimates cannot be."""
    schedule.plan(n=sum(leaf.size for leaf in jax.tree.leaves(problem.params)), **asked)


def spectrum(probe: Probe, batches: int, there: Callable[[Any], Any] | None = None, **given: Any) -> Spectrum:
    """The extreme eigenpairs, of the mean over the next batches.

    Args:
      probe: where training stands.
      batches: how many.
      there: parameters as a function of other coordinates, a tree like them that is 0 where training stands; None for
        their own.
      **given: more arguments of ``fosi.jax.estimate_spectrum``.
    """
    drawn = list({id(batch): batch for batch in probe.batches(batches)}.values())
    batch = drawn[0] if len(drawn) == 1 else Batches(drawn)
    if there is None:
        return estimate_spectrum(probe.loss, probe.run.params, batch, has_aux=True, **given)
    zeros = jax.tree.map(jnp.zeros_like, probe.run.params)
    return estimate_spectrum(lambda x, batch: probe.loss(there(x), batch), zeros, batch, has_aux=True, **given)


def as_record(found: Spectrum) -> dict[str, Any]:
    """A spectrum's numbers, without its vectors."""
    numbers = jax.tree.map(lambda x: np.asarray(x).tolist(), found._replace(eigenvectors=None))._asdict()
    return {name: value for name, value in numbers.items() if name != "eigenvectors"}


def write(path: Path, command: str, probe: Probe, found: Mapping[str, Any]) -> None:
    """Adds a line to a results file, or renews the one of the same point.

    Args:
      path: the file.
      command: that made it.
      probe: where training stood.
      found: the numbers.
    """
    made = records.environment()
    del made["kind"]
    new = {
        "command": command,
        "name": probe.name,
        "step": probe.step,
        "rate": probe.engine.rate,
        "plan": probe.plan.record(),
        **found,
        **made,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    old = records.read_jsonl(path, cut=True) if path.exists() else []
    records.write_jsonl(path, [*(line for line in old if line.get("name") != probe.name), new])


def draw_spectrum(title: str, found: Mapping[str, Any]) -> Figure:
    """The eigenvalues, those in use filled.

    Args:
      title: of the figure.
      found: ``eigenvalues``, ``residuals`` and ``accepted``.
    """
    made, axis = figures.figure(width=5.5, height=3.8)
    _eigenvalues(axis, found["eigenvalues"], found["residuals"], found["accepted"])
    made.suptitle(title)
    figures.legend(made, axis, columns=3)
    return made


def draw(title: str, found: Diagnosis) -> Figure:
    """The eigenvalues, and how near to the base's limit the sharpest is, with and without FOSI."""
    made, (left, right) = figures.figure(1, 2, width=9.0, height=3.8, width_ratios=(5, 3))
    _eigenvalues(left, found.eigenvalues, found.residuals, found.accepted)
    if found.bulk_edge is not None:
        left.axhline(found.bulk_edge, color="#7F7F7F", linestyle=":", label="largest left to the base")
    if not found.base.startswith("adam"):  # whose limit is for another matrix
        left.axhline(found.limit, color="#D55E00", label=f"limit of {found.base}")
    figures.legend(made, left, columns=4)
    names = ["alone", "with FOSI" + (f",\n{found.lr_scale:.2g}× rate" if found.lr_scale > 1 else "")]
    right.bar(names, [max(found.of_limit, 0.0), found.of_limit_left], color=["#7F7F7F", "#0072B2"], width=0.6)
    right.axhline(1.0, color="#D55E00")
    divided = ", preconditioned" if found.base.startswith("adam") else ""
    right.set_ylabel(f"sharpness / limit of {found.base}{divided}")
    made.suptitle(title)
    return made


def _eigenvalues(
    axis: Axes, eigenvalues: Sequence[float], residuals: Sequence[float], accepted: Sequence[bool]
) -> None:
    values, used = np.asarray(eigenvalues, float), np.asarray(accepted, bool)
    index = np.arange(1, len(values) + 1)
    axis.errorbar(index, values, yerr=residuals, fmt="none", ecolor="#7F7F7F", elinewidth=1, label="residual")
    axis.plot(index[used], values[used], "o", color="#0072B2", label="accepted")
    axis.plot(index[~used], values[~used], "o", color="#0072B2", markerfacecolor="white", label="not accepted")
    sizes = np.abs(values[values != 0])
    if sizes.size and values.min() > 0:
        axis.set_yscale("log")
    elif sizes.size:  # logarithmic on both sides of zero
        axis.set_yscale("symlog", linthresh=max(sizes.max() * 1e-4, sizes.min()))
    axis.set_xlabel("pair")
    axis.set_ylabel("eigenvalue of the Hessian")
    axis.set_xticks(index)
