"""Lanczos with full re-orthogonalisation: an operator and a start vector become a basis and a tridiagonal matrix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fosi.jax import space as sp

Matvec = Callable[[sp.Vector], sp.Vector]


class Krylov(NamedTuple):
    """H Q = Q T + r eᵀ, where the first ``steps`` rows of ``basis`` are the columns of Q.

    Attributes:
      basis: m rows, orthonormal up to ``steps`` and zero after it.
      alphas: the diagonal of T.
      betas: the off-diagonal of T, and at position ``steps − 1`` the norm of the remainder r.
      steps: how many rows count; less than m where Lanczos found an invariant subspace.
      asymmetry: the largest part of a product that a symmetric operator could not have had. Rounding, TF32 or
        noise in the operator show here, and nothing below this level can be believed.
    """

    basis: sp.Basis
    alphas: jax.Array
    betas: jax.Array
    steps: jax.Array
    asymmetry: jax.Array


class Progress(NamedTuple):
    """Lanczos after some steps: what one step hands to the next."""

    basis: sp.Basis
    vector: sp.Vector
    alphas: jax.Array
    betas: jax.Array
    steps: jax.Array
    scale: jax.Array
    asymmetry: jax.Array
    going: jax.Array


def lanczos(matvec: Matvec, start: sp.Vector, basis: sp.Basis, *, breakdown: float) -> Krylov:
    """Runs as many Lanczos steps as ``basis`` has rows, in one compiled loop.

    Args:
      matvec: the symmetric operator, on vectors of the basis' dtype.
      start: the start vector; its length does not matter.
      basis: zeros with the wanted number of rows; its dtype is that of the computation.
      breakdown: ends the iteration when the remainder falls below this fraction of the largest entry of T.

    Returns:
      The decomposition.
    """
    progress = begin(start, basis)
    rows = progress.alphas.shape[0]
    progress = jax.lax.fori_loop(0, rows, lambda j, p: advance(matvec, j, p, breakdown), progress)
    return finish(progress)


def begin(start: sp.Vector, basis: sp.Basis) -> Progress:
    """Before the first step."""
    first = jax.tree.leaves(basis)[0]
    m, dtype = first.shape[0], first.dtype
    start = jax.tree.map(lambda x: x.astype(dtype), start)
    length = jnp.maximum(sp.norm(start), jnp.finfo(dtype).tiny)
    return Progress(
        basis=basis,
        vector=jax.tree.map(lambda x: x / length, start),
        alphas=jnp.zeros(m, dtype),
        betas=jnp.zeros(m, dtype),
        steps=jnp.zeros((), jnp.int32),
        scale=jnp.zeros((), dtype),
        asymmetry=jnp.zeros((), dtype),
        going=jnp.ones((), bool),
    )


def advance(matvec: Matvec, j: Any, progress: Progress, breakdown: float) -> Progress:
    """Step ``j``.

    The product is orthogonalised twice against all rows so far: one pass leaves an error that grows with the
    cancellation in it, the second brings it down to rounding ("twice is enough"), in float32 as in float64.
    """
    dtype = progress.alphas.dtype
    index = jnp.arange(progress.alphas.shape[0])
    basis = sp.put(progress.basis, j, progress.vector)
    w = matvec(progress.vector)
    h = sp.products(basis, w)
    w = _minus(w, sp.combine(basis, h))
    correction = sp.products(basis, w)
    w = _minus(w, sp.combine(basis, correction))

    alpha = h[j] + correction[j]
    beta = sp.norm(w)
    before = jnp.where(j > 0, progress.betas[j - 1], 0)
    strange = jnp.linalg.norm(jnp.where(index == j, 0, jnp.where(index == j - 1, h - before, h)))
    scale = jnp.maximum(progress.scale, jnp.maximum(jnp.abs(alpha), beta))
    going = progress.going
    # A NaN must go on, to be seen in T; so "not small" rather than "large".
    goes_on = going & ~(beta <= breakdown * scale)
    factor = jnp.where(goes_on, 1 / jnp.maximum(beta, jnp.finfo(dtype).tiny), 0).astype(dtype)
    return Progress(
        basis=basis,
        vector=jax.tree.map(lambda x: x * factor, w),
        alphas=progress.alphas.at[j].set(jnp.where(going, alpha, 0)),
        betas=progress.betas.at[j].set(jnp.where(going, beta, 0)),
        steps=progress.steps + going,
        scale=scale,
        asymmetry=jnp.where(going, jnp.maximum(progress.asymmetry, strange), progress.asymmetry),
        going=goes_on,
    )


def finish(progress: Progress) -> Krylov:
    """After the last step."""
    return Krylov(progress.basis, progress.alphas, progress.betas, progress.steps, progress.asymmetry)


def _minus(a: sp.Vector, b: sp.Vector) -> sp.Vector:
    return jax.tree.map(jnp.subtract, a, b)
