"""Four partial differential equations in one place and time, as physics-informed networks are tried on.

Domains, coefficients and conditions are those of Rathore et al., "Challenges in Training PINNs" (ICML 2024); Burgers'
equation is that of Raissi et al. (2019). They are written once, for the derivatives of either framework.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

Array = Any
"""An array of JAX or a tensor of PyTorch."""
Field = Callable[[Array, Array], Array]
"""u(x, t) of arrays of equal shape, entry by entry."""
Conditions = Callable[[Field], tuple[Callable[[Array], Array], ...]]
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


class Calculus(NamedTuple):
    """What an equation is written with, of one framework.

    Attributes:
      along: along(f, x) -> the derivative of f at x, where f works entry by entry.
      sin: entry by entry.
      exp: entry by entry.
    """

    along: Callable[[Callable[[Array], Array], Array], Array]
    sin: Callable[[Array], Array]
    exp: Callable[[Array], Array]

    def in_space(self, u: Field) -> Field:
        """∂u/∂x."""
        return lambda x, t: self.along(lambda x: u(x, t), x)

    def in_time(self, u: Field) -> Field:
        """∂u/∂t."""
        return lambda x, t: self.along(lambda t: u(x, t), t)


JAX = Calculus(lambda f, x: jax.jvp(f, (x,), (jnp.ones_like(x),))[1], jnp.sin, jnp.exp)


def _everywhere(value: float, like: Array) -> Array:
    return 0 * like + value


def _starts_as(start: Callable[[Array], Array]) -> Conditions:
    return lambda u: (lambda x: u(x, _everywhere(0.0, x)) - start(x),)


def _periodic(left: float, right: float) -> Conditions:
    return lambda u: (lambda t: u(_everywhere(left, t), t) - u(_everywhere(right, t), t),)


def _zero_at(*places: float) -> Conditions:
    return lambda u: tuple(lambda t, place=place: u(_everywhere(place, t), t) for place in places)


SPEED = 40.0


def _convection(d: Calculus) -> Equation:
    return Equation(
        "convection",
        f"u_t + {SPEED:g} u_x = 0",
        0.0,
        2 * math.pi,
        1.0,
        lambda u: lambda x, t: d.in_time(u)(x, t) + SPEED * d.in_space(u)(x, t),
        _starts_as(d.sin),
        _periodic(0.0, 2 * math.pi),
        lambda x, t: np.sin(x - SPEED * t),
    )


GROWTH = 5.0


def _bump(x: Array, exp: Callable[[Array], Array]) -> Array:
    return exp(-((x - math.pi) ** 2) / (2 * (math.pi / 4) ** 2))


def _reaction_exact(x: NDArray[np.float64], t: NDArray[np.float64]) -> NDArray[np.float64]:
    start = _bump(x, np.exp)
    grown = start * np.exp(GROWTH * t)
    return np.asarray(grown / (grown + 1 - start))


def _reaction(d: Calculus) -> Equation:
    return Equation(
        "reaction",
        f"u_t = {GROWTH:g} u (1 − u)",
        0.0,
        2 * math.pi,
        1.0,
        lambda u: lambda x, t: d.in_time(u)(x, t) - GROWTH * u(x, t) * (1 - u(x, t)),
        _starts_as(lambda x: _bump(x, d.exp)),
        _periodic(0.0, 2 * math.pi),
        _reaction_exact,
    )


def _wave(d: Calculus) -> Equation:
    def start(x: Array) -> Array:
        return d.sin(math.pi * x) + 0.5 * d.sin(5 * math.pi * x)

    def initial(u: Field) -> tuple[Callable[[Array], Array], ...]:
        return *_starts_as(start)(u), lambda x: d.in_time(u)(x, _everywhere(0.0, x))

    return Equation(
        "wave",
        "u_tt = 4 u_xx",
        0.0,
        1.0,
        1.0,
        lambda u: lambda x, t: d.in_time(d.in_time(u))(x, t) - 4 * d.in_space(d.in_space(u))(x, t),
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


def _burgers(d: Calculus) -> Equation:
    return Equation(
        "burgers",
        "u_t + u u_x = (0.01/π) u_xx",
        -1.0,
        1.0,
        1.0,
        lambda u: (
            lambda x, t: (
                d.in_time(u)(x, t) + u(x, t) * d.in_space(u)(x, t) - VISCOSITY * d.in_space(d.in_space(u))(x, t)
            )
        ),
        _starts_as(lambda x: -d.sin(math.pi * x)),
        _zero_at(-1.0, 1.0),
        _burgers_exact,
    )


def written_with(calculus: Calculus) -> dict[str, Equation]:
    """The equations by name, with the derivatives of one framework."""
    return {made.name: made for made in (of(calculus) for of in (_wave, _convection, _reaction, _burgers))}


EQUATIONS = written_with(JAX)
