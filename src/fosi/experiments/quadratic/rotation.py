"""Study 3: ill-conditioning b and rotation ζ away from the coordinate axes, on a grid of functions."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from fosi.experiments import figures
from fosi.experiments.quadratic.descent import MOMENTUM, OPTIMIZERS, Method, descent
from fosi.experiments.quadratic.functions import BLOCKS, functions, powers, rotated_basis, start
from fosi.experiments.quadratic.study import (
    Table,
    Unit,
    at_least,
    distinct,
    ends,
    group,
    measurements,
    not_empty,
    over,
    plot,
    rates,
    select,
)
from fosi.experiments.records import Record

NAME = "rotation"
CONSTANTS = {"k": 10, "alpha": 1.0, "momentum": MOMENTUM}
SHOWN = ((1.12, 50), (1.12, 90), (1.16, 50), (1.16, 90))
"""The functions (b, ζ) whose whole curves are kept."""


@dataclass(frozen=True)
class Settings:
    """b and ζ of the functions; seeds beyond the first draw another rotation and another start."""

    n: int = 100
    b: tuple[float, ...] = (1.1, 1.11, 1.12, 1.13, 1.14, 1.15, 1.16, 1.17)
    zeta: tuple[int, ...] = tuple(range(101))
    block: str = "ends"
    seeds: int = 3
    iterations: int = 200
    backend: str = "jax"

    def __post_init__(self) -> None:
        at_least(11, n=self.n)
        at_least(1, seeds=self.seeds, iterations=self.iterations)
        not_empty(b=self.b, zeta=self.zeta)
        descent(self.backend)
        if min(self.b) <= 1:
            raise ValueError(f"b is {min(self.b)}; give more than 1")
        if self.block not in BLOCKS:
            raise ValueError(f"block is {self.block!r}; give one of {', '.join(BLOCKS)}")
        if min(self.zeta) < 0 or max(self.zeta) > self.n:
            raise ValueError(
                f"zeta runs from {min(self.zeta)} to {max(self.zeta)}; it must stay between 0 and n={self.n}"
            )


def units(settings: Settings) -> list[Unit]:
    """One unit for each seed and optimizer: the whole grid in one program."""
    return [
        Unit(f"seed {seed}, {name}", functools.partial(_run, settings, seed, Method(name)))
        for seed in range(settings.seeds)
        for name in OPTIMIZERS
    ]


def _run(settings: Settings, seed: int, method: Method) -> Iterable[Record]:
    lam = np.stack([powers(settings.n, b) for b in settings.b])
    eta = rates(method.base, lam[:, -1], lam[:, 0])
    bases = [rotated_basis(settings.n, zeta, seed, settings.block) for zeta in settings.zeta]
    family = functions(bases, lam, start(settings.n, seed))
    curves = descent(settings.backend)(method, family, eta, MOMENTUM, settings.iterations)
    for zeta, of_zeta in zip(settings.zeta, curves, strict=True):
        for b, rate, curve in zip(settings.b, eta, of_zeta, strict=True):
            whole = seed == 0 and (b, zeta) in SHOWN
            yield from measurements(
                NAME,
                method,
                list(enumerate(curve))[0 if whole else -1 :],
                n=settings.n,
                b=b,
                zeta=zeta,
                eta=rate,
                momentum=MOMENTUM,
                seed=seed,
            )


def draw(records: Sequence[Record]) -> dict[str, Figure]:
    """Contours over (b, ζ) for the six optimizers, and the curves of four functions."""
    first = select(records, seed=0)
    grid = min(len(distinct(first, "b")), len(distinct(first, "zeta"))) > 1  # contours need one
    found = {NAME: _contours(first)} if grid else {}
    curves = {key: lines for key, lines in group(first, "b", "zeta").items() if key in SHOWN}
    return found | ({f"{NAME}-curves": _curves(curves)} if curves else {})


def _contours(records: Sequence[Record]) -> Figure:
    last = ends(records, "optimizer", "b", "zeta")
    bs, zetas = distinct(records, "b"), distinct(records, "zeta")
    grids = {name: np.array([[last[name, b, zeta] for b in bs] for zeta in zetas]) for name in OPTIMIZERS}
    everything = np.concatenate([grid[np.isfinite(grid)] for grid in grids.values()])
    high = np.ceil(np.log10(everything.max()))
    # Where nothing is turned Adam ends so low that its range would leave no colours for the rest.
    low = max(np.floor(np.log10(everything.min())), high - 7)
    levels = 10.0 ** np.arange(low, high + 0.25, 0.5)
    made, axes = figures.figure(2, 3, 8.4, 5.6, sharex=True, sharey=True)
    for ax, name in zip(axes.ravel(), OPTIMIZERS, strict=True):
        filled = ax.contourf(bs, zetas, grids[name], levels=levels, norm=LogNorm(), cmap="cividis", extend="min")
        ax.contour(bs, zetas, grids[name], levels=levels[::2], colors="white", linewidths=0.8)
        marked = [(b, zeta) for b, zeta in SHOWN if b in bs and zeta in zetas]
        if marked:
            ax.plot(*zip(*marked, strict=True), "x", color="white", markersize=7, markeredgewidth=3.2)
            ax.plot(*zip(*marked, strict=True), "x", color="black", markersize=6, markeredgewidth=1.4)
        ax.set_title(name)
        ax.grid(visible=False)
    for ax in axes[-1]:
        ax.set_xlabel("b (λᵢ = 0.001 bⁱ)")
    for ax in axes[:, 0]:
        ax.set_ylabel("ζ (axes turned)")
    bar = made.colorbar(filled, ax=axes, ticks=levels[::2], format=lambda v, _: f"$10^{{{np.log10(v):.0f}}}$")
    bar.set_label("f(θ) after the last iteration, paper's start; white: powers of ten")
    return made


def _curves(curves: dict[tuple[float, int], list[Record]]) -> Figure:
    made, axes = figures.figure(2, 2, 7.6, 6.0, sharex=True, sharey=True)
    for ax, ((b, zeta), lines) in zip(axes.ravel(), sorted(curves.items()), strict=False):
        plot(ax, lines)
        ax.set_title(f"b = {b:g}, ζ = {zeta}")
    for ax in axes[-1]:
        ax.set_xlabel("iteration")
    for ax in axes[:, 0]:
        ax.set_ylabel("f(θ)")
    figures.legend(made, axes[0][0], columns=3)
    return made


def table(records: Sequence[Record]) -> Table:
    """Over the grid: how much lower FOSI ends, and how much ζ matters to each."""
    last = ends(records, "optimizer", "b", "zeta", "seed")
    rows = []
    for name in OPTIMIZERS:
        mine = {key[1:]: value for key, value in last.items() if key[0] == name}
        spread = max(
            over(max(v), min(v))
            for v in ([x for (b, _, s), x in mine.items() if (b, s) == at] for at in {(b, s) for b, _, s in mine})
        )
        against = [over(last[(name.removeprefix("fosi-"), *key)], value) for key, value in mine.items()]
        lower = f"{sum(a > 1 for a in against)} of {len(against)}" if name.startswith("fosi-") else ""
        rows.append((name, f"{max(mine.values()):.3g}", f"{spread:.3g}", lower, f"{min(against):.3g}" if lower else ""))
    headings = ("optimizer", "largest f", "largest / smallest f over ζ", "cells below the base", "least base / FOSI")
    return Table("After the last iteration, over the grid", headings, rows)
