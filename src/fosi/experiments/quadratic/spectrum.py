"""Study 1: dimension and largest eigenvalue. Six optimizers on functions with one large eigenvalue and a long tail."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.figure import Figure

from fosi.experiments import figures
from fosi.experiments.quadratic.descent import MOMENTUM, OPTIMIZERS, Method, descent
from fosi.experiments.quadratic.functions import Array, functions, one_large, start, uniform_basis
from fosi.experiments.quadratic.study import (
    Table,
    Unit,
    at_least,
    distinct,
    ends,
    measurements,
    not_empty,
    over,
    plot,
    rates,
    select,
)
from fosi.experiments.records import Record

NAME = "spectrum"
CONSTANTS = {"k": 10, "alpha": 1.0, "momentum": MOMENTUM}


@dataclass(frozen=True)
class Settings:
    """n and λ₁ of the functions; seeds beyond the first draw another basis and another start."""

    n: tuple[int, ...] = (100, 1500)
    lambda1: tuple[float, ...] = (5.0, 10.0, 20.0, 50.0, 200.0)
    seeds: int = 11
    iterations: int = 200
    backend: str = "jax"

    def __post_init__(self) -> None:
        not_empty(n=self.n, lambda1=self.lambda1)
        at_least(1, seeds=self.seeds, iterations=self.iterations)
        at_least(11, n=min(self.n))
        descent(self.backend)
        if min(self.lambda1) <= 1:
            raise ValueError(f"lambda1 is {min(self.lambda1)}; give more than 1, the second largest eigenvalue")


def units(settings: Settings) -> list[Unit]:
    """One unit for each dimension, seed and optimizer."""
    return [
        Unit(f"n {n}, seed {seed}, {name}", functools.partial(_run, settings, n, seed, Method(name)))
        for n in settings.n
        for seed in range(settings.seeds)
        for name in OPTIMIZERS
    ]


@functools.lru_cache(maxsize=1)
def _basis(n: int, seed: int) -> Array:
    return uniform_basis(n, seed)


def _run(settings: Settings, n: int, seed: int, method: Method) -> Iterable[Record]:
    lam = np.stack([one_large(n, largest) for largest in settings.lambda1])
    eta = rates(method.base, lam[:, 0], lam[:, -1])
    family = functions([_basis(n, seed)], lam, start(n, seed))
    curves = descent(settings.backend)(method, family, eta, MOMENTUM, settings.iterations)[0]
    for largest, rate, curve in zip(settings.lambda1, eta, curves, strict=True):
        # Curves for the paper's start; of the others, where they end.
        points = list(enumerate(curve))[0 if seed == 0 else -1 :]
        yield from measurements(NAME, method, points, n=n, lambda1=largest, eta=rate, momentum=MOMENTUM, seed=seed)


def ratios(records: Sequence[Record]) -> dict[tuple[str, int, float], list[float]]:
    """What f of the base is over f of FOSI at the end, over the seeds, by (base, n, lambda1)."""
    last = ends(records, "optimizer", "n", "lambda1", "seed")
    found: dict[tuple[str, int, float], list[float]] = {}
    for (name, n, largest, seed), value in last.items():
        if not name.startswith("fosi-"):
            found.setdefault((name, n, largest), []).append(over(value, last[f"fosi-{name}", n, largest, seed]))
    return found


def draw(records: Sequence[Record]) -> dict[str, Figure]:
    """Learning curves of the paper's start for the smallest and the largest λ₁, and the ratios over all starts."""
    curves = select(records, seed=0)
    sizes, largest = distinct(records, "n"), distinct(records, "lambda1")
    shown = largest[:: len(largest) - 1] if len(largest) > 1 else largest
    made, axes = figures.figure(
        len(shown),
        len(sizes),
        max(6.0, 3.8 * len(sizes)),
        2.9 * len(shown) + 0.6,
        sharex=True,
        sharey="row",
        squeeze=False,
    )
    for row, lambda1 in zip(axes, shown, strict=True):
        for ax, n in zip(row, sizes, strict=True):
            plot(ax, select(curves, n=n, lambda1=lambda1))
            ax.set_title(f"n = {n}, λ₁ = {lambda1:g}")
        row[0].set_ylabel("f(θ)")
    for ax in axes[-1]:
        ax.set_xlabel("iteration")
    figures.legend(made, axes[0][0], columns=3)
    return {NAME: made, f"{NAME}-seeds": _draw_ratios(records)}


def _draw_ratios(records: Sequence[Record]) -> Figure:
    sizes, largest = distinct(records, "n"), distinct(records, "lambda1")
    made, axes = figures.figure(1, len(sizes), max(7.4, 3.8 * len(sizes)), 4.1, sharey=True, squeeze=False)
    found = ratios(records)
    for ax, n in zip(axes[0], sizes, strict=True):
        for shift, base in enumerate(("gd", "heavy-ball", "adam")):
            points = [(i + 0.25 * (shift - 1), r) for i, v in enumerate(largest) for r in found[base, n, v]]
            style = figures.look(f"fosi-{base}", 1)
            style.pop("markevery")
            ax.plot(
                *zip(*points, strict=True),
                **style | {"linestyle": "none", "alpha": 0.55, "label": f"{base} / fosi-{base}"},
            )
            medians = [float(np.median(found[base, n, v])) for v in largest]
            at = np.arange(len(largest)) + 0.25 * (shift - 1)
            ax.hlines(
                medians, at - 0.11, at + 0.11, color="black", linewidth=1.6, label="median" if shift == 2 else None
            )
        ax.axhline(100, color="black", linewidth=1, linestyle=":", label="two orders of magnitude")
        ax.set_yscale("log")
        ax.set_xticks(range(len(largest)), [f"{v:g}" for v in largest])
        ax.set_xlabel("λ₁")
        ax.set_title(f"n = {n}")
    axes[0][0].set_ylabel("f of the base / f of FOSI at the end")
    figures.legend(made, axes[0][0], columns=3)
    return made


def table(records: Sequence[Record]) -> Table:
    """How much lower FOSI ends, over the starts."""
    rows = []
    for (base, n, largest), values in sorted(ratios(records).items(), key=lambda item: (item[0][1], item[0][0])):
        low, mid, high = np.min(values), np.median(values), np.max(values)
        rows.append((base, str(n), f"{largest:g}", str(len(values)), f"{low:.3g}", f"{mid:.3g}", f"{high:.3g}"))
    headings = ("base", "n", "λ₁", "starts", "lowest", "median", "highest")
    return Table("f of the base over f of FOSI after the last iteration", headings, rows)
