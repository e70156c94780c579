"""Minimising many quadratic functions at once: one compiled program for all functions, rates and momenta of a call."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fosi.experiments.quadratic.functions import Array, Functions
from fosi.jax import fosi_adam, fosi_sgd

OPTIMIZERS = ("gd", "heavy-ball", "adam", "fosi-gd", "fosi-heavy-ball", "fosi-adam")
BACKENDS = ("jax", "torch")
MOMENTUM = 0.9
"""Heavy-Ball's β and Adam's β₁ where the paper does not vary them."""


@dataclass(frozen=True)
class Method:
    """An optimizer by its name, with what the paper sets for FOSI: the estimate is made once, before the first step.

    Attributes:
      optimizer: one of ``OPTIMIZERS``.
      c: cap on the scaling of the base's learning rate; FOSI around gradient descent and Heavy-Ball only.
      k: how many of the largest eigenpairs.
      alpha: learning rate of the Newton part.
    """

    optimizer: str
    c: float = np.inf
    k: int = 10
    alpha: float = 1.0

    def __post_init__(self) -> None:
        if self.optimizer not in OPTIMIZERS:
            raise ValueError(f"optimizer is {self.optimizer!r}; give one of {', '.join(OPTIMIZERS)}")

    @property
    def with_fosi(self) -> bool:
        """Whether it is FOSI around a base."""
        return self.optimizer.startswith("fosi-")

    @property
    def base(self) -> str:
        """The base optimizer's name."""
        return self.optimizer.removeprefix("fosi-")

    @property
    def settings(self) -> dict[str, Any]:
        """FOSI's settings: the paper to the letter."""
        cap = {} if self.base == "adam" else {"max_lr_scale": self.c}
        return {"k": self.k, "alpha": self.alpha, "warmup": 0, "accept": "all", "precision": "float64", **cap}


class Descent(Protocol):
    """How a backend minimises."""

    def __call__(self, method: Method, of: Functions, eta: Any, momentum: Any, iterations: int) -> Array:
        """Values of f (B, C, iterations + 1), before the first step and after each."""


def descent(backend: str) -> Descent:
    """The function that minimises with this backend.

    Raises:
      ValueError: if there is no such backend.
      ModuleNotFoundError: if it is not installed.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend is {backend!r}; give one of {', '.join(BACKENDS)}")
    if backend == "jax":
        return minimise
    found: Descent = importlib.import_module("fosi.experiments.quadratic.torch_descent").minimise
    return found


def minimise(method: Method, of: Functions, eta: Any, momentum: Any, iterations: int) -> Array:
    """Minimises all the functions with JAX, in float64.

    Args:
      method: the optimizer.
      of: the functions.
      eta: learning rates, broadcast to (B, C).
      momentum: Heavy-Ball's β or Adam's β₁, broadcast to (B, C); ignored for gradient descent.
      iterations: steps.

    Returns:
      Values of f (B, C, iterations + 1), before the first step and after each; not finite where it diverged.
    """
    eta, momentum = (np.broadcast_to(np.asarray(x, float), of.eigenvalues.shape[:2]) for x in (eta, momentum))
    with jax.enable_x64(True):  # for this program alone; the global flag is the user's
        return np.asarray(_program(method, iterations)(*of, eta, momentum))


@functools.cache
def _program(method: Method, iterations: int) -> Callable[..., jax.Array]:
    def one(basis: Any, eigenvalues: Any, coordinates: Any, eta: Any, momentum: Any) -> jax.Array:
        def value(theta: jax.Array, _: Any = None) -> jax.Array:
            # Not θᵀHθ, whose rounding can be negative near the minimum.
            return 0.5 * jnp.sum(eigenvalues * (theta @ basis) ** 2)

        opt = _optimizer(method, value, eta, momentum)
        theta = basis @ coordinates
        state = opt.init(theta)
        if method.with_fosi:
            state = opt.refresh(state, theta, value_fn=value)

        def step(carry: Any, _: None) -> tuple[Any, jax.Array]:
            theta, state = carry
            before, gradient = jax.value_and_grad(value)(theta)
            updates, state = opt.update(gradient, state, theta)
            return (optax.apply_updates(theta, updates), state), before

        (theta, _), values = jax.lax.scan(step, (theta, state), length=iterations)
        return jnp.append(values, value(theta))

    # The inner map shares the basis.
    return jax.jit(jax.vmap(jax.vmap(one, (None, 0, 0, 0, 0))))


def _optimizer(method: Method, value: Callable[..., jax.Array], eta: Any, momentum: Any) -> Any:
    settings = {**method.settings, "refresh": "external"} if method.with_fosi else {}
    match method.optimizer:
        case "gd":
            return optax.sgd(eta)
        case "heavy-ball":
            return optax.sgd(eta, momentum=momentum)
        case "adam":
            return optax.adam(eta, b1=momentum)
        case "fosi-gd":
            return fosi_sgd(eta, value, **settings)
        case "fosi-heavy-ball":
            return fosi_sgd(eta, value, momentum=momentum, **settings)
        case _:
            return fosi_adam(eta, value, b1=momentum, **settings)
