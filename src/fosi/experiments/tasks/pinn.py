"""PINNs: a network trained until it solves a partial differential equation, on the full batch.

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
from numpy.typing import NDArray

from fosi import presets
from fosi.experiments.tasks.engine import quarter
from fosi.experiments.tasks.equations import EQUATIONS, Equation, Field
from fosi.experiments.tasks.task import Outputs, Problem, Task, every_step_sees_all, split_model, whole

FOSI = presets.deterministic("adam")
MODES = ("full", "quick", "float64")


class Size(NamedTuple):
    """How large a problem is.

    Attributes:
      width: of the three hidden layers.
      places: of the grid in space, the ends counted in.
      times: of the grid in time, the ends counted in.
      residuals: points of its inside at which the equation must hold.
      steps: between two evaluations.
      dtype: of the weights, the points and the products.
    """

    width: int
    places: int
    times: int
    residuals: int
    steps: int = 100
    dtype: str = "float32"


SIZES = {"full": Size(200, 257, 101, 10_000), "quick": Size(50, 65, 33, 1000), "tiny": Size(8, 9, 7, 30, 5)}
SIZES["float64"] = SIZES["full"]._replace(dtype="float64")


class Points(NamedTuple):
    """Where a network is asked: the inside, time zero, and the ends; arrays of any framework."""

    x: Any
    t: Any
    initial: Any
    boundary: Any


class Inputs(NamedTuple):
    """What a network is trained on and measured with.

    Attributes:
      points: where it is asked.
      x: the grid's places, in the shape of the grid.
      t: the grid's times, likewise.
      exact: the solution there.
    """

    points: Points
    x: NDArray[np.floating]
    t: NDArray[np.floating]
    exact: NDArray[np.floating]


def inputs(equation: Equation, size: Size, seed: int) -> Inputs:
    """The points, so many of the inside of the grid, drawn without repetition, and all of its first and outer ones."""
    x, t = np.linspace(equation.left, equation.right, size.places), np.linspace(0.0, equation.end, size.times)
    grid = np.meshgrid(x, t, indexing="ij")
    inside = [a.ravel() for a in np.meshgrid(x[1:-1], t[1:], indexing="ij")]
    chosen = np.random.default_rng(seed).choice(inside[0].size, size.residuals, replace=False)
    points = Points(*(a.astype(size.dtype) for a in (inside[0][chosen], inside[1][chosen], x, t)))
    return Inputs(points, *(a.astype(size.dtype) for a in (*grid, equation.exact(*grid))))


def size_of(tiny: bool, mode: str | None) -> Size:
    """How large a problem of this mode is; None for the full one."""
    mode = mode or MODES[0]
    if mode not in MODES:
        raise ValueError(f"mode is {mode!r}; give one of {', '.join(MODES)}")
    return SIZES["tiny"]._replace(dtype=SIZES[mode].dtype) if tiny else SIZES[mode]


def facts(size: Size) -> dict[str, Any]:
    """What a results file should say of a problem of this size."""
    return {**size._asdict(), "batch_size": size.residuals}


def part(points: Points) -> Points:
    """A quarter of the points inside, which are in no order, and all others."""
    count = quarter(len(points.x))
    return points._replace(x=points.x[:count], t=points.t[:count])


def residuals(equation: Equation, u: Field, points: Points) -> tuple[Any, ...]:
    """What should be zero: in the equation, at time zero, at the ends; each an array, of the points' framework."""
    parts = [equation.residual(u)(points.x, points.t)]
    parts += [condition(points.initial) for condition in equation.initial(u)]
    return *parts, *(condition(points.boundary) for condition in equation.boundary(u))


class Network(nnx.Module):
    """Three hidden layers of tanh, u(x, t); products not rounded to TF32."""

    def __init__(self, size: Size, rngs: nnx.Rngs) -> None:
        widths = (2, size.width, size.width, size.width, 1)
        given: dict[str, Any] = {"kernel_init": nnx.initializers.glorot_normal(), "precision": "highest", "rngs": rngs}
        given["param_dtype"] = jnp.dtype(size.dtype)
        self.layers = nnx.List([nnx.Linear(i, o, **given) for i, o in itertools.pairwise(widths)])

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
      mode: ``"full"``; ``"quick"``: a smaller network and grid; ``"float64"``: the full one, in that precision, for
        which ``JAX_ENABLE_X64=1`` must be in the environment.
    """
    size = size_of(tiny, mode)
    if jax.dtypes.canonicalize_dtype(size.dtype) != size.dtype:
        raise ValueError("mode is 'float64', but JAX has no float64: set JAX_ENABLE_X64=1 in the environment")
    points, *grid = inputs(equation, size, seed)
    graph, params, nothing = split_model(Network(size, nnx.Rngs(seed)))

    def parts(params: Any, points: Points) -> tuple[jax.Array, ...]:
        return residuals(equation, nnx.merge(graph, params, nothing), points)

    def outputs(params: Any, state: Any, points: Points) -> Outputs:
        # One example: a sum of squares over it is the loss.
        found = jnp.concatenate([part / np.sqrt(part.size) for part in parts(params, points)])[None]
        return Outputs("residuals", found, jnp.zeros_like(found))

    def loss(params: Any, state: Any, points: Points) -> tuple[jax.Array, Any]:
        return jnp.sum(jnp.stack([jnp.mean(part**2) for part in parts(params, points)])), state

    grid = jax.device_put(grid)

    @jax.jit
    def field(params: Any, x: jax.Array, t: jax.Array) -> jax.Array:
        found: jax.Array = nnx.merge(graph, params, nothing)(x, t)
        return found

    @jax.jit
    def error(params: Any, x: jax.Array, t: jax.Array, wanted: jax.Array) -> jax.Array:
        return jnp.linalg.norm(field(params, x, t) - wanted) / jnp.linalg.norm(wanted)

    def solution(params: Any) -> dict[str, jax.Array]:
        x, t, exact = grid
        return {"x": x, "t": t, "exact": exact, "found": field(params, x, t)}

    return Problem(
        params,
        nothing,
        loss,
        jax.device_put(points),
        whole,
        every_step_sees_all(size.steps),
        lambda params, state: error(params, *grid),
        facts(size),
        outputs,
        solution,
        part,
    )


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
