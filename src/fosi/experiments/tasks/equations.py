"""Four partial differential equations in one place and time, as physics-informed networks are tried on.

Domains, coefficients and conditions are those of Rathore et al., "Challenges in Training PINNs" (ICML 2024); Burgers'
equation is that of Raissi et al. (2019).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

Field = Callable[[jax.Array, jax.Array], jax.Array]
"""u(x, t) of arrays of equal shape, entry by entry."""
Conditions = Callable[[Field], tuple[Callable[[jax.Array], jax.Array], ...]]
"""What must be zero, of a field: each a function of the place, or of the time."""
Exact = Callable[[NDArray[np.float64], NDArray[np.float64]], NDArray[np.float64]]


@dataclass(frozen=True)
class Equation:
    """An equation on [left, right] × [0, end].

    Attributes:
      name: as on the command line.
      title: the equation in symbols.
      left: where space begins.
      right: where it ends.
      end: when time ends.
      residual: of a field, as a field: zero where it solves the equation.
      initial: what must be zero at time zero, of a field: each a function of x.
      boundary: what must be zero at the ends, of a field: each a function of t.
      exact: the solution.
    """

    name: str
    title: str
    left: float
    right: float
    end: float
    residual: Callable[[Field], Field]
    initial: Conditions
    boundary: Conditions
    exact: Exact


def in_space(u: Field) -> Field:
    """∂u/∂x."""
    return lambda x, t: jax.jvp(lambda x: u(x, t), (x,), (jnp.ones_like(x),))[1]


def in_time(u: Field) -> Field:
    """∂u/∂t."""
    return lambda x, t: jax.jvp(lambda t: u(x, t), (t,), (jnp.ones_like(t),))[1]


def _starts_as(start: Callable[[Any], Any]) -> Conditions:
    return lambda u: (lambda x: u(x, jnp.zeros_like(x)) - start(x),)


def _periodic(left: float, right: float) -> Conditions:
    return lambda u: (lambda t: u(jnp.full_like(t, left), t) - u(jnp.full_like(t, right), t),)


def _zero_at(*places: float) -> Conditions:
    return lambda u: tuple(lambda t, place=place: u(jnp.full_like(t, place), t) for place in places)


SPEED = 40.0


def _convection() -> Equation:
    return Equation(
        "convection",
        f"u_t + {SPEED:g} u_x = 0",
        0.0,
        2 * math.pi,
        1.0,
        lambda u: lambda x, t: in_time(u)(x, t) + SPEED * in_space(u)(x, t),
        _starts_as(jnp.sin),
        _periodic(0.0, 2 * math.pi),
        lambda x, t: np.sin(x - SPEED * t),
    )


GROWTH = 5.0


def _bump(x: Any) -> Any:
    return jnp.exp(-((x - math.pi) ** 2) / (2 * (math.pi / 4) ** 2))


def _reaction_exact(x: NDArray[np.float64], t: NDArray[np.float64]) -> NDArray[np.float64]:
    start = np.exp(-((x - math.pi) ** 2) / (2 * (math.pi / 4) ** 2))
    grown = start * np.exp(GROWTH * t)
    return np.asarray(grown / (grown + 1 - start))


def _reaction() -> Equation:
    return Equation(
        "reaction",
        f"u_t = {GROWTH:g} u (1 − u)",
        0.0,
        2 * math.pi,
        1.0,
        lambda u: lambda x, t: in_time(u)(x, t) - GROWTH * u(x, t) * (1 - u(x, t)),
        _starts_as(_bump),
        _periodic(0.0, 2 * math.pi),
        _reaction_exact,
    )


def _wave_start(x: Any) -> Any:
    return jnp.sin(math.pi * x) + 0.5 * jnp.sin(5 * math.pi * x)


def _wave() -> Equation:
    def initial(u: Field) -> tuple[Callable[[jax.Array], jax.Array], ...]:
        return *_starts_as(_wave_start)(u), lambda x: in_time(u)(x, jnp.zeros_like(x))

    return Equation(
        "wave",
        "u_tt = 4 u_xx",
        0.0,
        1.0,
        1.0,
        lambda u: lambda x, t: in_time(in_time(u))(x, t) - 4 * in_space(in_space(u))(x, t),
        initial,
        _zero_at(0.0, 1.0),
        lambda x, t: (
            np.sin(math.pi * x) * np.cos(2 * math.pi * t) + 0.5 * np.sin(5 * math.pi * x) * np.cos(10 * math.pi * t)
        ),
    )


VISCOSITY = 0.01 / math.pi


def _burgers_exact(x: NDArray[np.float64], t: NDArray[np.float64]) -> NDArray[np.float64]:
    """By the transformation of Cole and Hopf, the integrals by Gauss and Hermite's rule."""
    places, weights = np.polynomial.hermite.hermgauss(200)
    x, t = np.broadcast_arrays(x, t)
    found = -np.sin(math.pi * x)
    later = t > 0
    # The integrals over s of w(x − s) exp(−cos(πs) / 2πν) exp(−(x − s)²/4νt), the Gaussian being the rule's own weight.
    at = x[later, None] - 2 * np.sqrt(VISCOSITY * t[later, None]) * places
    exponent = -np.cos(math.pi * at) / (2 * math.pi * VISCOSITY)
    mass = weights * np.exp(exponent - exponent.max(axis=1, keepdims=True))
    found[later] = -np.sum(np.sin(math.pi * at) * mass, axis=1) / np.sum(mass, axis=1)
    return found


def _burgers() -> Equation:
    return Equation(
        "burgers",
        "u_t + u u_x = (0.01/π) u_xx",
        -1.0,
        1.0,
        1.0,
        lambda u: lambda x, t: in_time(u)(x, t) + u(x, t) * in_space(u)(x, t) - VISCOSITY * in_space(in_space(u))(x, t),
        _starts_as(lambda x: -jnp.sin(math.pi * x)),
        _zero_at(-1.0, 1.0),
        _burgers_exact,
    )


EQUATIONS = {equation.name: equation for equation in (_wave(), _convection(), _reaction(), _burgers())}
