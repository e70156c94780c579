"""Hessian-free optimization: Gauss and Newton's matrix, conjugate gradients, Levenberg and Marquardt's damping.

After Martens, "Deep learning via Hessian-free optimization" (2010), without his preconditioner: the step d solves
(G + λI) d = −g by products with G alone, λ follows how well the quadratic model foretold the loss, and the step is cut
until the loss falls enough. All of it is one program, so that a training loop can be compiled around it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree

from fosi.jax import ModelLoss, gauss_newton

ENOUGH = 1e-4
"""Of the fall that the slope promises, how much a step must give (Armijo's rule)."""
POOR, GOOD = 0.25, 0.75
"""The fall of the loss over the model's: less than the first raises the damping, more than the second lowers it."""
HALVINGS = 30
"""How often a step is halved before it is given up."""
_FULL = jax.lax.Precision.HIGHEST


class NewtonCgState(NamedTuple):
    """The state.

    Attributes:
      damping: λ of the next step.
      direction: the last d, from which conjugate gradients go on; zero where there is none.
      products: with Gauss and Newton's matrix, in all.
      ratio: the fall of the loss over that of its model, at the last full step.
    """

    damping: jax.Array
    direction: jax.Array
    products: jax.Array
    ratio: jax.Array


class _Solve(NamedTuple):
    """Conjugate gradients under way: the solution, its residual, the direction, ‖residual‖², and products made."""

    x: jax.Array
    residual: jax.Array
    along: jax.Array
    square: jax.Array
    products: jax.Array


class _Search(NamedTuple):
    """A line search under way: the size, the loss there, the loss at size 1, and how many were tried."""

    size: jax.Array
    found: jax.Array
    whole: jax.Array
    tried: jax.Array


def newton_cg(
    loss: ModelLoss,
    damping: float = 1.0,
    max_cg: int = 100,
    tolerance: float = 1e-3,
    warm_start: float = 0.95,
    damping_factor: float = 1.5,
    min_damping: float = 1e-8,
) -> optax.GradientTransformationExtraArgs:
    """Returns the optimizer as an optax transformation; ``update`` wants ``value``, ``value_fn`` and ``batch``.

    Args:
      loss: the loss as a model and a convex loss of its outputs, of which the matrix is made on ``batch``.
      damping: λ of the first step.
      max_cg: products in the solution of a step at most.
      tolerance: the residual, relative to the gradient, at which a solution is good enough.
      warm_start: multiplies the last step's solution, from which the next one starts; 0 to start from zero.
      damping_factor: by which λ is raised where the model foretold badly, and lowered where it did well.
      min_damping: how low λ may get.
    """
    _check("damping", damping, damping > 0, "a number above 0")
    _check("max_cg", max_cg, isinstance(max_cg, int) and max_cg >= 1, "a whole number, 1 or more")
    _check("tolerance", tolerance, 0 <= tolerance < 1, "a number from 0 up to, but not including, 1")
    _check("warm_start", warm_start, 0 <= warm_start <= 1, "a number from 0 to 1")
    _check("damping_factor", damping_factor, 1 <= damping_factor < math.inf, "a number of 1 or more")
    _check("min_damping", min_damping, 0 <= min_damping <= damping, f"a number from 0 to damping, {damping:g}")

    def init(params: Any) -> NewtonCgState:
        flat = ravel_pytree(params)[0]
        none = jnp.zeros((), jnp.int32)
        return NewtonCgState(jnp.asarray(damping, flat.dtype), jnp.zeros_like(flat), none, jnp.zeros((), flat.dtype))

    def update(
        updates: Any,
        state: NewtonCgState,
        params: Any = None,
        *,
        value: jax.Array,
        value_fn: Callable[[Any], jax.Array],
        batch: Any,
        **_: Any,
    ) -> tuple[Any, NewtonCgState]:
        at, tree = ravel_pytree(params)
        gradient = ravel_pytree(updates)[0]
        product = _product(loss, params, batch)
        solved = conjugate_gradients(
            lambda v: product(v) + state.damping * v,
            -gradient,
            warm_start * state.direction,
            max_cg,
            tolerance,
        )
        direction = solved.x
        slope = jnp.vdot(gradient, direction, precision=_FULL)
        # gᵀd + dᵀGd / 2, by (G + λI) d = −g − residual. Without the damping: it is to say how far the loss is from its
        # model, not from the damped one.
        foretold = (slope - jnp.vdot(direction, solved.residual + state.damping * direction, precision=_FULL)) / 2
        size, whole = backtrack(lambda t: value_fn(tree(at + t * direction)), value, slope)
        ratio = (whole - value) / foretold
        # Where the loss or the model is no number the ratio is none either, and the damping rises.
        rises, falls = ~(ratio >= POOR), ratio > GOOD
        factor = jnp.where(rises, damping_factor, jnp.where(falls, 1 / damping_factor, 1.0))
        found = NewtonCgState(
            jnp.maximum(factor * state.damping, min_damping).astype(state.damping.dtype),
            jnp.where(size > 0, direction, 0),
            state.products + solved.products,
            ratio.astype(state.ratio.dtype),
        )
        return tree(jnp.where(size > 0, size * direction, 0)), found

    return optax.GradientTransformationExtraArgs(init, update)


def conjugate_gradients(
    product: Callable[[jax.Array], jax.Array], wanted: jax.Array, start: jax.Array, most: int, tolerance: float
) -> _Solve:
    """Solves A x = ``wanted`` until the residual is ``tolerance`` of it.

    Args:
      product: v ↦ Av, of a positive definite matrix.
      wanted: the right side.
      start: where to begin, if the quadratic model is lower there than at zero: then every x is a way down.
      most: products.
      tolerance: of ‖wanted‖.
    """
    enough = tolerance**2 * _square(wanted)

    def goes_on(now: _Solve) -> jax.Array:
        return (now.products == 0) | ((now.products < most) & (now.square > enough))

    # One body for the product with the start and for those of the iteration: a loss is long to compile.
    def body(now: _Solve) -> _Solve:
        image = product(now.along)
        curvature = jnp.vdot(now.along, image, precision=_FULL)
        begins = now.products == 0
        better = curvature / 2 < jnp.vdot(now.along, wanted, precision=_FULL)
        # Rounding can leave no curvature at all where the matrix has next to none; then this is the end.
        fine = curvature > 0
        length = jnp.where(begins, better, jnp.where(fine, now.square / curvature, 0)).astype(wanted.dtype)
        residual = now.residual - length * image
        square = jnp.where(begins | fine, _square(residual), 0)
        along = residual + jnp.where(begins, 0, square / now.square) * now.along
        return _Solve(now.x + length * now.along, residual, along, square, now.products + 1)

    none = jnp.zeros((), jnp.int32)
    return jax.lax.while_loop(goes_on, body, _Solve(jnp.zeros_like(wanted), wanted, start, enough, none))


def backtrack(
    along: Callable[[jax.Array], jax.Array], value: jax.Array, slope: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Halves a step until it leads down far enough; returns its size, 0 where none does, and the loss at size 1.

    Args:
      along: t ↦ the loss after the step times t.
      value: the loss before.
      slope: the gradient along the step.
    """

    def short(size: jax.Array, found: jax.Array) -> jax.Array:
        return ~(found <= value + ENOUGH * size * slope)

    def goes_on(now: _Search) -> jax.Array:
        size, found, _, tried = now
        return short(size, found) & (tried <= HALVINGS)

    def halve(now: _Search) -> _Search:
        size, _, whole, tried = now
        found = along(size / 2)
        return _Search(size / 2, found, jnp.where(tried == 0, found, whole), tried + 1)

    # The first half is of two: one body for all, since a loss is long to compile.
    unknown = jnp.full((), jnp.nan, value.dtype)
    first = _Search(jnp.full((), 2, value.dtype), unknown, unknown, jnp.zeros((), jnp.int32))
    size, found, whole, _ = jax.lax.while_loop(goes_on, halve, first)
    return jnp.where(short(size, found), 0, size), whole


def _product(loss: ModelLoss, params: Any, batch: Any) -> Callable[[jax.Array], jax.Array]:
    """The product with G on flat vectors; the model is linearised once."""
    leaves, tree = jax.tree.flatten(params)
    back = ravel_pytree(leaves)[1]
    # Conjugate gradients keep their directions apart by these products: TF32 would not do.
    with jax.default_matmul_precision("highest"):
        operator = gauss_newton(
            lambda at: loss.model_fn(jax.tree.unflatten(tree, at), batch),
            functools.partial(_convex, loss, batch),
            leaves,
        )

    def product(v: jax.Array) -> jax.Array:
        with jax.default_matmul_precision("highest"):
            return ravel_pytree(operator(back(v)))[0]

    return product


def _convex(loss: ModelLoss, batch: Any, outputs: Any) -> jax.Array:
    return loss.loss_fn(outputs, batch)


def _square(v: jax.Array) -> jax.Array:
    return jnp.vdot(v, v, precision=_FULL)


def _check(name: str, value: Any, good: bool, wanted: str) -> None:
    if not good:
        raise ValueError(f"{name} is {value!r}; give {wanted}")
