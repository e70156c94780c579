"""PINNs: a network trained until it solves a partial differential equation, on the full batch, in float32.

Equations, points, network and loss are those of Rathore et al., "Challenges in Training PINNs" (ICML 2024).
"""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from fosi.experiments.tasks.equations import EQUATIONS, Equation, Field
from fosi.experiments.tasks.task import Outputs, Problem, Task, every_step_sees_all, split_model, whole

FOSI = {"alpha": 0.1, "refresh_every": 200, "warmup": 200, "accept": "converged", "precision": "float32"}
MODES = ("full", "quick")


class Size(NamedTuple):
    """How large a problem is.

    Attributes:
      width: of the three hidden layers.
      places: of the grid in space, the ends counted in.
      times: of the grid in time, the ends counted in.
      residuals: points of its inside at which the equation must hold.
      steps: between two evaluations.
    """

    width: int
    places: int
    times: int
    residuals: int
    steps: int = 100


SIZES = {"full": Size(200, 257, 101, 10_000), "quick": Size(50, 65, 33, 1000), "tiny": Size(8, 9, 7, 30, 5)}


class Points(NamedTuple):
    """Where a network is asked: the inside, time zero, and the ends."""

    x: jax.Array
    t: jax.Array
    initial: jax.Array
    boundary: jax.Array


class Network(nnx.Module):
    """Three hidden layers of tanh, u(x, t); products in full float32."""

    def __init__(self, width: int, rngs: nnx.Rngs) -> None:
        sizes = (2, width, width, width, 1)
        self.layers = nnx.List(
            [
                nnx.Linear(i, o, kernel_init=nnx.initializers.glorot_normal(), precision="highest", rngs=rngs)
                for i, o in itertools.pairwise(sizes)
            ]
        )

    def __call__(self, x: jax.Array, t: jax.Array) -> jax.Array:
        """The field at each place and time."""
        y = jnp.stack([x, t], axis=-1)
        for layer in self.layers[:-1]:
            y = jnp.tanh(layer(y))
        out: jax.Array = self.layers[-1](y)[..., 0]
        return out


def build(
    equation: Equation, data_dir: Path | None, download: bool, seed: int, tiny: bool, mode: str | None = None
) -> Problem:
    """The network before training, and its points.

    Args:
      equation: to solve.
      data_dir: not needed: there are no data.
      download: likewise.
      seed: of the weights and of the points.
      tiny: in seconds, for tests.
      mode: ``"full"``, or ``"quick"``: a smaller network and grid.
    """
    mode = mode or MODES[0]
    if mode not in MODES:
        raise ValueError(f"mode is {mode!r}; give one of {', '.join(MODES)}")
    size = SIZES["tiny" if tiny else mode]
    graph, params, nothing = split_model(Network(size.width, nnx.Rngs(seed)))

    def residuals(params: Any, points: Points) -> tuple[jax.Array, ...]:
        u: Field = nnx.merge(graph, params, nothing)
        parts = [equation.residual(u)(points.x, points.t)]
        parts += [condition(points.initial) for condition in equation.initial(u)]
        return *parts, *(condition(points.boundary) for condition in equation.boundary(u))

    def outputs(params: Any, state: Any, points: Points) -> Outputs:
        # One example: a sum of squares over it is the loss.
        found = jnp.concatenate([part / np.sqrt(part.size) for part in residuals(params, points)])[None]
        return Outputs("residuals", found, jnp.zeros_like(found))

    def loss(params: Any, state: Any, points: Points) -> tuple[jax.Array, Any]:
        return jnp.sum(jnp.stack([jnp.mean(part**2) for part in residuals(params, points)])), state

    x, t = np.linspace(equation.left, equation.right, size.places), np.linspace(0.0, equation.end, size.times)
    wanted = equation.exact(*np.meshgrid(x, t, indexing="ij"))
    grid = jax.device_put([a.astype(np.float32) for a in (*np.meshgrid(x, t, indexing="ij"), wanted)])

    @jax.jit
    def error(params: Any, x: jax.Array, t: jax.Array, wanted: jax.Array) -> jax.Array:
        found = nnx.merge(graph, params, nothing)(x, t)
        return jnp.linalg.norm(found - wanted) / jnp.linalg.norm(wanted)

    return Problem(
        params,
        nothing,
        loss,
        jax.device_put(_points(x, t, size.residuals, seed)),
        whole,
        every_step_sees_all(size.steps),
        lambda params, state: error(params, *grid),
        {**size._asdict(), "batch_size": size.residuals},
        outputs,
    )


def _points(x: Any, t: Any, residuals: int, seed: int) -> Points:
    """So many of the inside of the grid, drawn without repetition, and all of its first and outer ones."""
    inside = [a.ravel() for a in np.meshgrid(x[1:-1], t[1:], indexing="ij")]
    chosen = np.random.default_rng(seed).choice(inside[0].size, residuals, replace=False)
    return Points(*(jnp.asarray(a, jnp.float32) for a in (inside[0][chosen], inside[1][chosen], x, t)))


def task(equation: Equation) -> Task:
    """Training until one equation is solved."""
    return Task(
        equation.name,
        f"PINN: {equation.title}",
        "error",
        partial(build, equation),
        rounds=410,
        batch_size=SIZES["full"].residuals,
        heavy_ball_rate=1e-3,
        modes=MODES,
        fosi=FOSI,
        lbfgs_memory=100,
        extra={"steps_a_round": SIZES["full"].steps},
    )


TASKS = {name: task(equation) for name, equation in EQUATIONS.items()}
