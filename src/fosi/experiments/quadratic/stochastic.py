"""Study 5: noisy gradients and steps ∝ t^−β: the rate of Lemma 2, for gradient descent and for a fixed preconditioner.

F(θ, x) = ½ θᵀHθ + xᵀθ with x drawn anew in each step: its gradient is that of f plus noise, its Hessian is H.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure

from fosi.analysis import effective_hessian
from fosi.experiments import figures
from fosi.experiments.quadratic.functions import Array, one_large, start, uniform_basis
from fosi.experiments.quadratic.study import Table, Unit, at_least, digits, distinct, ends, not_empty, select
from fosi.experiments.records import Record, number
from fosi.jax import fosi

NAME = "stochastic"
NOISE = 100.0
"""σ² of the lemma, the mean of ‖∇F − ∇f‖²: large beside ‖∇f‖², for the noise sets the rate, not the start."""
PAIRS = 10
CONSTANTS = {"k": PAIRS, "noise": NOISE}
CHUNK = 10_000
"""Iterations of one call of a program, which cannot be interrupted."""
OPTIMIZERS = ("gd", "fosi-gd", "diagonal", "fosi-diagonal")


@dataclass(frozen=True)
class Settings:
    """The exponents of the step size; the noise differs from seed to seed, the function does not."""

    n: int = 100
    lambda1: float = 10.0
    betas: tuple[float, ...] = (0.6, 0.75, 0.9)
    seeds: int = 16
    iterations: int = 100_000

    def __post_init__(self) -> None:
        at_least(PAIRS + 1, n=self.n)
        at_least(1, seeds=self.seeds)
        at_least(10, iterations=self.iterations)
        not_empty(betas=self.betas)
        if not all(0.5 < beta < 1 for beta in self.betas):
            raise ValueError(f"betas is {self.betas}; the lemma is about exponents between 0.5 and 1")


def units(settings: Settings) -> list[Unit]:
    """One unit for each optimizer and exponent: all seeds in one program."""
    return [
        Unit(f"{name}, β {beta:g}", functools.partial(_run, settings, name, beta))
        for name in OPTIMIZERS
        for beta in settings.betas
    ]


def _run(settings: Settings, name: str, beta: float) -> Iterable[Record]:
    basis, lam = uniform_basis(settings.n, 0), one_large(settings.n, settings.lambda1)
    q, eta = _preconditioner(name, basis, lam), _largest_rate(name, basis, lam)
    # Means up to 10 iterations in a decade: a straight line on logarithmic axes is the rate.
    marks = np.unique(np.geomspace(1, settings.iterations, int(10 * np.log10(settings.iterations)) + 1).astype(int))
    with jax.enable_x64(True):
        keys = jax.random.split(jax.random.key(0), settings.seeds)
        begin, advance = _programs(name.startswith("fosi-"), min(CHUNK, settings.iterations))
        function = (basis, lam, q, eta, beta)
        carry = begin(*function, start(settings.n, 0), keys)
        parts = []
        for first in range(0, settings.iterations, CHUNK):
            carry, means = advance(*function, keys, first, carry)
            parts.append(np.asarray(means))
        means = np.concatenate(parts, axis=1)
    for seed in range(settings.seeds):
        for mark in marks:
            yield {
                "study": NAME,
                "optimizer": name,
                "n": settings.n,
                "lambda1": settings.lambda1,
                "eta": digits(eta),
                "beta": beta,
                "momentum": None,
                "c": None,
                "iteration": int(mark),
                "value": digits(means[seed, mark - 1]),
                "seed": seed,
            }


def _preconditioner(name: str, basis: Array, lam: Array) -> Array:
    """The base's inverse preconditioner: 1, or one over the diagonal of H."""
    return np.ones(len(lam)) if name.endswith("gd") else 1 / ((basis**2) @ lam)


def _largest_rate(name: str, basis: Array, lam: Array) -> float:
    """One over the largest eigenvalue of P⁻¹H, which Lemma 1 gives for α = η = 1: half of where it gets unstable."""
    q, hessian = _preconditioner(name, basis, lam), (basis * lam) @ basis.T
    if name.startswith("fosi-"):
        effective = effective_hessian(hessian, lam[:PAIRS], basis[:, :PAIRS], 1.0, 1.0, q)
    else:
        effective = q[:, None] * hessian
    return float(1 / np.linalg.eigvals(effective).real.max())


@functools.cache
def _programs(with_fosi: bool, iterations: int) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The start of all runs, and what takes them so many iterations further."""

    def parts(basis: Any, lam: Any, q: Any, eta: Any, beta: Any) -> tuple[Callable[..., jax.Array], Any]:
        def value(theta: jax.Array, noise: jax.Array) -> jax.Array:
            return 0.5 * jnp.sum(lam * (theta @ basis) ** 2) + noise @ theta

        def rate(count: jax.Array) -> jax.Array:
            return eta * (count + 1.0) ** -beta

        base = optax.chain(_multiplied(q), optax.scale_by_learning_rate(rate))
        # α = η_t, as in the proof of the lemma.
        settings: dict[str, Any] = {"k": PAIRS, "alpha": rate, "momentum": None, "accept": "all", "warmup": 0}
        return value, fosi(base, value, **settings, precision="float64", refresh="external") if with_fosi else base

    def begin(basis: Any, lam: Any, q: Any, eta: Any, beta: Any, coordinates: Any, key: jax.Array) -> Any:
        _, opt = parts(basis, lam, q, eta, beta)
        theta = basis @ coordinates
        state = opt.init(theta)
        if with_fosi:
            state = opt.refresh(state, theta, batch=jnp.zeros(len(lam)))
        return theta, state, jnp.zeros(())

    def advance(basis: Any, lam: Any, q: Any, eta: Any, beta: Any, key: jax.Array, first: Any, carry: Any) -> Any:
        value, opt = parts(basis, lam, q, eta, beta)

        def step(carry: Any, t: jax.Array) -> tuple[Any, jax.Array]:
            theta, state, total = carry
            total += jnp.sum((lam * (theta @ basis)) ** 2)  # ‖∇f‖² at θ_t, without the noise
            noise = jnp.sqrt(NOISE / len(lam)) * jax.random.normal(jax.random.fold_in(key, t), lam.shape)
            updates, state = opt.update(jax.grad(value)(theta, noise), state, theta)
            return (optax.apply_updates(theta, updates), state, total), total / (t + 1)

        return jax.lax.scan(step, carry, first + jnp.arange(iterations))

    shared = (None,) * 5
    return jax.jit(jax.vmap(begin, (*shared, None, 0))), jax.jit(jax.vmap(advance, (*shared, 0, None, 0)))


def _multiplied(q: jax.Array) -> optax.GradientTransformation:
    return optax.stateless(lambda updates, params: q * updates)


def slopes(records: Sequence[Record]) -> dict[tuple[str, float], float]:
    """By (optimizer, β): the slope, on logarithmic axes, of the mean over the seeds in its last decade."""
    found = {}
    for name in OPTIMIZERS:
        for beta in distinct(records, "beta"):
            line = _mean(select(records, optimizer=name, beta=beta))
            tail = [(t, v) for t, v in line if t >= line[-1][0] / 10]
            t, v = np.log(np.array(tail)).T
            found[name, beta] = float(np.polyfit(t, v, 1)[0])
    return found


def _mean(records: Sequence[Record]) -> list[tuple[int, float]]:
    by_iteration: dict[int, list[float]] = {}
    for r in records:
        by_iteration.setdefault(r["iteration"], []).append(number(r["value"]))
    return [(t, float(np.mean(v))) for t, v in sorted(by_iteration.items())]


def draw(records: Sequence[Record]) -> dict[str, Figure]:
    """Running means of ‖∇f‖² over the iterations, beside a line with the slope of the lemma."""
    betas = distinct(records, "beta")
    made, axes = figures.figure(1, len(betas), max(6.0, 3.1 * len(betas)), 4.2, sharey=True, squeeze=False)
    for ax, beta in zip(axes[0], betas, strict=True):
        lines = {name: _mean(select(records, optimizer=name, beta=beta)) for name in OPTIMIZERS}
        for name, line in lines.items():
            ax.plot(*zip(*line, strict=True), **figures.look(name, len(line)))
        t = np.array([t for t, _ in lines["gd"]])
        ax.plot(
            t,
            0.5 * lines["gd"][0][1] * t ** (beta - 1.0),
            color="black",
            linestyle=":",
            label="slope of Lemma 2, −(1−β)",
        )
        ax.set_xscale("log")
        ax.set_yscale("log")
        ax.set_xlabel("iterations N")
        ax.set_title(f"β = {beta:g}")
    axes[0][0].set_ylabel("mean of ‖∇f(θₜ)‖² over t ≤ N")
    figures.legend(made, axes[0][0], columns=3)
    return {NAME: made}


def table(records: Sequence[Record]) -> Table:
    """Slopes against the lemma's bound, and where each ends."""
    last = ends(records, "optimizer", "beta", "seed")
    rows = []
    for (name, beta), slope in slopes(records).items():
        end = np.mean([v for (o, b, _), v in last.items() if (o, b) == (name, beta)])
        rows.append((name, f"{beta:g}", f"{beta - 1:.2f}", f"{slope:.2f}", f"{end:.3g}"))
    headings = ("optimizer", "β", "bound on the slope", "slope, last decade", "mean of ‖∇f‖² at the end")
    return Table("The rate of Lemma 2", headings, rows)
