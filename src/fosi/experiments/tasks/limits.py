"""How crowded the limit of a base is: the sharpest directions as the base sees them, beside what it can bear.

A subspace of k directions helps a base that stands at its limit as far as what is left of the curvature is below it:
with λ₁ ≥ λ₂ ≥ … of the matrix that the limit is for, steps outside can be λ₁/λₖ₊₁ times as long, and no more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from matplotlib.figure import Figure

from fosi.experiments import figures, records
from fosi.experiments.tasks import TASKS, diagnosing, markdown, soap
from fosi.experiments.tasks.plan import Plan
from fosi.experiments.tasks.probing import Probe
from fosi.experiments.tasks.settings import BASES, MOMENTUM
from fosi.stability import Base

FILE = "limits.jsonl"
KNOWN = (*BASES, "soap")
"""Bases whose limit is known."""
PAIRS, PRODUCTS = 40, 120
"""Eigenvalues, and the products that they are told by: three for each."""
AT = (10, 39)
"""After so many pairs a table says what is left: FOSI's around a first-order base, and as many as can be told."""
_LINES: tuple[Any, ...] = ("-", (0, (4, 2)), (0, (1, 1)), (0, (6, 1, 1, 1)), (0, (8, 2, 2, 2, 2, 2)), (0, (3, 1)))
_COLOURS = tuple(figures.COLOURS.values())  # a task each here
_SUBSCRIPTS = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")


class Crowd(NamedTuple):
    """What stands at the limit of one base at one point of a training.

    Attributes:
      plan: which training.
      step: steps taken.
      of_limit: the largest eigenvalues of the matrix that the limit is for, of the limit, descending.
      device: where.
    """

    plan: Plan
    step: int
    of_limit: Sequence[float]
    device: str

    @property
    def label(self) -> str:
        """The task, and what of the plan is not its own."""
        factor = "" if self.plan.rate_factor == 1 else f"{self.plan.rate_factor:g}× rate"
        return ", ".join(word for word in (self.plan.task, self.plan.other_mode, factor) if word)

    def longer(self, pairs: int) -> float | None:
        """How many times as long steps outside can be, at the most, where so many directions are taken.

        None where nothing is left that curves up, or so many are not known.
        """
        left = self.of_limit[pairs] if pairs < len(self.of_limit) else 0.0
        return self.of_limit[0] / left if left > 0 else None


def measure(probe: Probe, batches: int = 4) -> dict[str, Any]:
    """The largest eigenvalues as the base sees them, with its limit, of the mean over the next batches.

    Raises:
      ValueError: if the base does not yet divide by anything.
    """
    name, b1 = probe.plan.optimizer, MOMENTUM
    if name == "soap":  # Adam in other coordinates
        name, b1 = "adam", soap.B1
    base = Base(name, probe.engine.rate, b1)
    if base.adaptive and probe.step < 2:
        raise ValueError(f"steps is {probe.step}; give 2 or more: {probe.plan.optimizer} has divided by nothing yet")
    found = diagnosing.spectrum(probe, batches, there=coordinates(probe), k=PAIRS, num_matvecs=PRODUCTS, accept="all")
    seen = {key: value for key, value in diagnosing.as_record(found).items() if key in ("eigenvalues", "residuals")}
    return {"limit": base.limit, "num_matvecs": PRODUCTS, **seen}


def coordinates(probe: Probe) -> Callable[[Any], Any] | None:
    """Parameters as a function of those in which the base is gradient descent with momentum, 0 where training stands.

    With P what its steps are divided by, the Hessian there has the eigenvalues of P^(−½) H P^(−½). None where it
    divides by nothing.
    """
    params, nu = probe.run.params, probe.second_moments()
    if nu is not None:
        factors = jax.tree.map(Base("adam", probe.engine.rate).inverse_root, nu)
        return lambda x: jax.tree.map(lambda p, s, z: p + s * z, params, factors, x)
    leaves = jax.tree.leaves(probe.run.opt_state, is_leaf=_is_soap)
    state = next((leaf for leaf in leaves if _is_soap(leaf)), None)
    if state is None:
        return None
    return lambda x: jax.tree.map(lambda p, z: p + z, params, soap.inverse_root(state, x))


def read(where: Path) -> list[Crowd]:
    """All that were measured on the tasks of a results folder, but for tiny ones."""
    found = []
    for path in (where / task / FILE for task in TASKS):
        for line in records.read_jsonl(path) if path.exists() else []:
            plan = Plan(**line["plan"])
            if not plan.tiny:
                of_limit = [value / line["limit"] for value in line["eigenvalues"]]
                found.append(Crowd(plan, line["step"], of_limit, line["device"]))
    return found


def section(where: Path) -> tuple[list[str], list[Path]]:
    """The part of a report, and where its figure was written; nothing where nothing was measured."""
    found = read(where)
    if not found:
        return [], []
    headings = ["task", "base", "steps", *(f"λ{n + 1} / limit".translate(_SUBSCRIPTS) for n in (0, *AT))]
    headings += [f"steps longer at most, {n} pairs taken" for n in AT]
    rows = [
        [
            one.label,
            one.plan.optimizer,
            f"{one.step:,}",
            *(f"{one.of_limit[n]:.2g}" if n < len(one.of_limit) else "-" for n in (0, *AT)),
            *(markdown.number(one.longer(n)) for n in AT),
        ]
        for one in found
    ]
    said = (
        f"The {PAIRS} largest eigenvalues of the matrix that a base's limit is for (for Adam and SOAP of the Hessian "
        f"between what they divide by), by {PRODUCTS} products on all data, or on four batches. Where a few stand near "
        f"the limit, FOSI takes them and what is left bears longer steps; where {PAIRS} do, a subspace of so few helps "
        f"little. Measured on {', '.join(sorted({one.device for one in found}))}."
    )
    parts = ["## How crowded the limit is", said, markdown.table(headings, rows), "![limits](./limits.png)"]
    return parts, list(figures.save(draw(found), where / "limits"))


def draw(found: Sequence[Crowd]) -> Figure:
    """The eigenvalues of the limit, a panel a base and a line a training."""
    bases = list(dict.fromkeys(one.plan.optimizer for one in found))
    made, panels = figures.figure(1, len(bases), width=4.6 * len(bases), height=4.4, sharey=True, squeeze=False)
    labels = list(dict.fromkeys(one.label for one in found))
    looks = {
        label: {"color": _COLOURS[i % len(_COLOURS)], "linestyle": _LINES[i % len(_LINES)]}
        for i, label in enumerate(labels)
    }
    for axis, base in zip(panels[0], bases, strict=True):
        for one in (one for one in found if one.plan.optimizer == base):
            values = np.asarray(one.of_limit)
            index = np.arange(1, len(values) + 1)
            axis.plot(index[values > 0], values[values > 0], label=one.label, linewidth=1.8, **looks[one.label])
        axis.axhline(1.0, color="#7F7F7F", linewidth=1)
        axis.set_yscale("log")
        axis.set_ylim(bottom=1e-4)
        axis.set_title(f"as {base} sees it")
        axis.set_xlabel("direction, the sharpest first")
        axis.legend(loc="lower left", fontsize=8)
    panels[0][0].set_ylabel("curvature / limit of the base")
    return made


def _is_soap(node: Any) -> bool:
    return isinstance(node, soap.SoapState)
