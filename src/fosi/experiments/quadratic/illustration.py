"""Study 6: the idea in two dimensions. f = f₁ + f₂, a Newton step on one, the base's step on the other."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from fosi.experiments import figures
from fosi.experiments.quadratic.functions import Array
from fosi.experiments.quadratic.study import Table, Unit, at_least, digits
from fosi.experiments.records import Record
from fosi.jax import fosi_sgd

NAME = "illustration"
HESSIAN = np.array([[2.5, 1.5], [1.5, 2.5]])
"""Of f = 1.25 θ₁² + 1.25 θ₂² + 1.5 θ₁θ₂: eigenvalues 4 and 1."""
START = (0.5, -1.7)
RATE = 0.45
"""Just stable for gradient descent (below 2/λ₁ = 0.5), so that one sees what its steps across the valley cost."""
CONSTANTS = {"k": 1, "alpha": 1.0, "eta": RATE, "c": 1.0, "start": list(START)}


@dataclass(frozen=True)
class Settings:
    """How many steps are drawn."""

    iterations: int = 6

    def __post_init__(self) -> None:
        at_least(1, iterations=self.iterations)


def units(settings: Settings) -> list[Unit]:
    """One unit for each of the two optimizers."""
    return [Unit(name, functools.partial(_run, settings, name)) for name in ("gd", "fosi-gd")]


def _run(settings: Settings, name: str) -> Iterable[Record]:
    with jax.enable_x64(True):
        hessian, theta = jnp.asarray(HESSIAN), jnp.asarray(START)

        def value(theta: jax.Array, _: Any = None) -> jax.Array:
            return 0.5 * theta @ hessian @ theta

        opt: Any = optax.sgd(RATE)
        vector = np.zeros(2)
        if name == "fosi-gd":
            opt = fosi_sgd(
                RATE,
                value,
                k=1,
                alpha=1.0,
                max_lr_scale=1.0,
                warmup=0,
                accept="all",
                precision="float64",
                refresh="external",
            )
        state = opt.init(theta)
        if name == "fosi-gd":
            state = opt.refresh(state, theta, value_fn=value)
            vector = np.asarray(opt.spectrum(state, theta).eigenvectors)[0]
        for iteration in range(settings.iterations + 1):
            at = np.asarray(theta)
            updates, state = opt.update(jax.grad(value)(theta), state, theta)
            theta = optax.apply_updates(theta, updates)
            newton = vector * (vector @ np.asarray(updates))  # the part of the step inside the subspace
            yield {
                "study": NAME,
                "optimizer": name,
                "n": 2,
                "lambda1": 4.0,
                "eta": RATE,
                "momentum": None,
                "c": 1.0 if name == "fosi-gd" else None,
                "iteration": iteration,
                "value": digits(value(jnp.asarray(at))),
                "seed": 0,
                "theta": at.tolist(),
                "d1": newton.tolist(),
                "d2": (np.asarray(updates) - newton).tolist(),
            }


def split() -> tuple[Array, Array]:
    """The Hessians of f₁ and f₂."""
    values, vectors = np.linalg.eigh(HESSIAN)
    first = values[1] * np.outer(vectors[:, 1], vectors[:, 1])
    return first, HESSIAN - first


def draw(records: Sequence[Record]) -> dict[str, Figure]:
    """Contours of f, f₁ and f₂ with the steps that FOSI takes in each, and gradient descent's in f."""
    made, axes = figures.figure(1, 3, 9.6, 3.9, sharex=True, sharey=True)
    grid = np.stack(np.meshgrid(*2 * [np.linspace(-2, 2, 201)]), axis=-1)
    first, second = split()
    paths = {name: [r for r in records if r["optimizer"] == name] for name in ("gd", "fosi-gd")}
    for ax, hessian, title in zip(axes, (HESSIAN, first, second), ("f", "f₁", "f₂"), strict=True):
        surface = 0.5 * np.einsum("xyi,ij,xyj->xy", grid, hessian, grid)
        ax.contourf(
            grid[..., 0], grid[..., 1], surface, levels=np.linspace(0, 8, 17), cmap="Greys", alpha=0.7, extend="max"
        )
        ax.contour(grid[..., 0], grid[..., 1], surface, levels=np.linspace(0, 8, 17), colors="0.45", linewidths=0.5)
        ax.set_title(title)
        ax.set_xlabel("θ₁")
        ax.set_aspect("equal")
        ax.grid(visible=False)
        ax.plot(0, 0, "*", color="black", markersize=9)
    axes[0].set_ylabel("θ₂")
    arrows = {"d1": ("#D55E00", "d₁: the Newton step on f₁"), "d2": ("#009E73", "d₂: the base's step on f₂")}
    for name in ("gd", "fosi-gd"):
        style = figures.look(name)
        for r in paths[name][:-1]:
            _arrow(axes[0], r["theta"], np.add(r["d1"], r["d2"]), style["color"], style["linestyle"])
    for ax, (part, (colour, _)) in zip(axes[1:], arrows.items(), strict=True):
        for r in paths["fosi-gd"][:-1]:
            _arrow(ax, r["theta"], r[part], colour)
    handles = [Line2D([], [], color="black", marker="*", linestyle="none", markersize=9, label="minimum of f")]
    handles += [Line2D([], [], **figures.look(name)) for name in ("gd", "fosi-gd")]
    handles += [Line2D([], [], color=colour, marker=">", markevery=[1], label=text) for colour, text in arrows.values()]
    made.legend(handles=handles, loc="outside lower center", ncols=5, frameon=False)
    return {NAME: made}


def _arrow(ax: Any, at: Sequence[float], along: Any, colour: str, dashes: Any = "-") -> None:
    ax.plot(*at, "o", color=colour, markersize=4)
    if np.linalg.norm(along) > 1e-3:
        shape = {"arrowstyle": "-|>", "color": colour, "linewidth": 1.6, "shrinkA": 0, "shrinkB": 0}
        ax.annotate("", xy=np.add(at, along), xytext=at, arrowprops=shape | {"linestyle": dashes})


def table(records: Sequence[Record]) -> Table:
    """f, f₁ and f₂ after each step."""
    first, second = split()
    rows = []
    for r in records:
        theta = np.array(r["theta"])
        parts = [0.5 * theta @ h @ theta for h in (first, second)]
        rows.append((r["optimizer"], str(r["iteration"]), f"{r['value']:.4g}", *(f"{abs(p):.4g}" for p in parts)))
    return Table("Step by step", ("optimizer", "iteration", "f", "f₁", "f₂"), rows)
