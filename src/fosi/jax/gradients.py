"""Gradients for a diagnosis: what of them an estimate takes, and how large they are along a training."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from fosi.jax import space as sp
from fosi.jax.curvature import Leaves, Loss


@functools.partial(jax.jit, static_argnums=(0, 1))
def gradient(loss: Loss, space: sp.Space, params: sp.Tree, batch: Any) -> sp.Vector:
    """Of the loss, on a batch."""
    return space.pack(loss.gradient(space, params, batch), space.dtype)


@jax.jit
def _inner(rows: sp.Basis, vector: sp.Vector) -> jax.Array:
    return sp.products(rows, vector)


@jax.jit
def projected(rows: sp.Basis, vector: sp.Vector) -> sp.Vector:
    """What of a vector lies outside the span of the rows."""
    return jax.tree.map(jnp.subtract, vector, sp.combine(rows, sp.products(rows, vector)))


def products(gradients: list[sp.Vector], left: list[sp.Vector], used: sp.Basis) -> tuple[NDArray[Any], NDArray[Any]]:
    """The gradients along the eigenvectors, and the inner products of what is left of them, on the host."""
    inside = [np.asarray(_inner(used, vector), np.float64) for vector in gradients]
    rows = jax.tree.map(lambda *vectors: jnp.stack(vectors), *left)
    return np.stack(inside), np.stack([np.asarray(_inner(rows, vector), np.float64) for vector in left])


def mean_squares(space: sp.Space, used: sp.Basis, gradients: Iterable[sp.Vector]) -> tuple[Leaves, Leaves]:
    """Of whole gradients, and of what of them is outside the subspace, as leaves; one at a time, to save memory."""
    sums: tuple[sp.Vector, sp.Vector] | None = None
    count = 0
    for vector in gradients:
        squares = _squares(used, vector)
        sums = squares if sums is None else _added(sums, squares)
        count += 1
    assert sums is not None
    whole, left = (space.unpack(total, dtypes=[space.dtype] * len(space.shapes)) for total in sums)
    return [x / count for x in whole], [x / count for x in left]


@jax.jit
def _squares(rows: sp.Basis, vector: sp.Vector) -> tuple[sp.Vector, sp.Vector]:
    whole, left = (jax.tree.map(jnp.square, x) for x in (vector, projected(rows, vector)))
    return whole, left


@jax.jit
def _added(one: Any, other: Any) -> Any:
    return jax.tree.map(jnp.add, one, other)
