"""Study 2: FOSI raises the effective condition number a hundredfold, and still converges much faster."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.figure import Figure

from fosi.analysis import condition_numbers
from fosi.experiments import figures
from fosi.experiments.quadratic.descent import Method, descent
from fosi.experiments.quadratic.functions import functions, start, two_clusters, uniform_basis
from fosi.experiments.quadratic.study import Table, Unit, at_least, ends, group, measurements, select
from fosi.experiments.records import Record, number

NAME = "condition"
PAIRS = 9
RATE = 0.001
CONSTANTS = {"k": PAIRS, "alpha": 1.0, "eta": RATE, "c": 1.0}


@dataclass(frozen=True)
class Settings:
    """Seeds beyond the first draw another basis and another start."""

    n: int = 100
    seeds: int = 11
    iterations: int = 200
    backend: str = "jax"

    def __post_init__(self) -> None:
        at_least(12, n=self.n)
        at_least(1, seeds=self.seeds, iterations=self.iterations)
        descent(self.backend)


def units(settings: Settings) -> list[Unit]:
    """One unit for each seed and optimizer."""
    # c = 1: the paper's effective condition number, 1/(η λₙ) = 10⁵, is that of the unscaled rate.
    methods = (Method("gd"), Method("fosi-gd", c=1.0, k=PAIRS))
    return [
        Unit(f"seed {seed}, {method.optimizer}", functools.partial(_run, settings, seed, method))
        for seed in range(settings.seeds)
        for method in methods
    ]


def _run(settings: Settings, seed: int, method: Method) -> Iterable[Record]:
    family = functions([uniform_basis(settings.n, seed)], two_clusters(settings.n), start(settings.n, seed))
    curve = descent(settings.backend)(method, family, RATE, 0.0, settings.iterations)[0, 0]
    yield from measurements(
        NAME, method, enumerate(curve), n=settings.n, lambda1=10.0, eta=RATE, momentum=None, seed=seed
    )


def draw(records: Sequence[Record]) -> dict[str, Figure]:
    """Learning curves: the paper's start drawn strong, the others faint."""
    made, ax = figures.figure(width=6.4, height=4.2)
    numbers = condition_numbers(two_clusters(records[0]["n"]), PAIRS, 0, 1.0, RATE)
    known = {"gd": numbers.original, "fosi-gd": numbers.whole}
    for (name, seed), line in group(records, "optimizer", "seed").items():
        style = figures.look(name, len(line) if seed == 0 else 0)
        style["label"] = f"{name}, effective condition number {known[name]:,.0f}" if seed == 0 else None
        strength = {} if seed == 0 else {"linewidth": 0.8, "alpha": 0.35}
        ax.plot([r["iteration"] for r in line], [number(r["value"]) for r in line], **style | strength)
    ax.set_yscale("log")
    ax.set_xlabel("iteration")
    ax.set_ylabel("f(θ)")
    ax.set_title(f"η = {RATE:g}, k = {PAIRS}, α = 1, c = 1; faint: other starts")
    figures.legend(made, ax, columns=1)
    return {NAME: made}


def table(records: Sequence[Record]) -> Table:
    """Values at the end and condition numbers."""
    numbers = condition_numbers(two_clusters(records[0]["n"]), PAIRS, 0, 1.0, RATE)
    rows = []
    for name, effective in (("gd", numbers.original), ("fosi-gd", numbers.whole)):
        values = list(ends(select(records, optimizer=name), "seed").values())
        rows.append((name, f"{effective:,.0f}", f"{values[0]:.3g}", f"{np.median(values):.3g}", str(len(values))))
    headings = ("optimizer", "effective condition number", "f, paper's start", "f, median", "starts")
    return Table("After the last iteration", headings, rows)
