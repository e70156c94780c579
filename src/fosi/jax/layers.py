"""Coordinates in which the Gauss–Newton matrix of every layer is near the identity.

A matrix W of m × n parameters, its bias among them, has a block of that matrix to itself, mn × mn numbers, and
A ⊗ B / tr A stands for it: A = E U Uᵀ, B = E Uᵀ U, with U the part for W of Jᵀ H^½ z. J is the Jacobian of the model's
outputs, H the second derivative of the loss of them, and z random signs, so that E u uᵀ is the Gauss–Newton matrix,
whatever the model is made of: a probe is a backward pass. In y = S⁻¹ x, with S Sᵀ = (A ⊗ B / tr A)⁻¹, the block is the
identity as far as the product of two factors can tell. What it cannot tell is left to the optimizer that works there.

Ren and Goldfarb, Tensor Normal Training for Deep Learning Models (2021), have the factors, of sampled gradients.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jax.scipy.linalg import solve_triangular

from fosi.jax import lanczos
from fosi.jax import space as sp
from fosi.jax.blocks import Block, blocks_of, joined, parted
from fosi.jax.curvature import ModelLoss

_ROOT_STEPS = 5
"""Lanczos steps for H^½ z where H is no diagonal: exact where H has as many eigenvalues, and elsewhere far better than
the factors are."""
_BESIDE = 1e-5
"""How much of H may lie beside the diagonal: more than float32's rounding, far less than the factors are good to."""
_HIGHEST = jax.lax.Precision.HIGHEST


class Factors(NamedTuple):
    """The Cholesky factors of one block's two matrices; of one that is no matrix the roots of its diagonal alone.

    Their inverses too, since every trial of a line search multiplies by them, which takes a fraction of solving.

    Attributes:
      left: L with L Lᵀ = A, damped and scaled to a mean eigenvalue of 1; None for a block that is no matrix.
      right: R with R Rᵀ = B, likewise, and the block's own scale; or the roots of the diagonal, in the block's shape.
      over_left: L⁻¹.
      over_right: R⁻¹, or one over the roots.
    """

    left: jax.Array | None
    right: jax.Array
    over_left: jax.Array | None
    over_right: jax.Array


Metric = tuple[Factors, ...]
"""Factors for each block."""


class _Moments(NamedTuple):
    """Sums over probes: U Uᵀ and Uᵀ U, or None and the squares of a block that is no matrix."""

    left: jax.Array | None
    right: jax.Array


def identity(params: Any, max_dim: int) -> Metric:
    """The metric that changes nothing."""

    def one(block: Block, of: jax.ShapeDtypeStruct) -> Factors:
        dtype = jnp.promote_types(of.dtype, jnp.float32)
        if not _is_matrix(block, of.shape, max_dim):
            return Factors(None, jnp.ones(of.shape, dtype), None, jnp.ones(of.shape, dtype))
        # No array twice: a state may be given away.
        return Factors(*(jnp.eye(size, dtype=dtype) for size in 2 * of.shape))

    return tuple(one(*both) for both in zip(blocks_of(params), jax.eval_shape(joined, params), strict=True))


def measure(
    loss: ModelLoss, params: Any, batch: Any, key: jax.Array, probes: int, damping: float, max_dim: int
) -> Metric:
    """The metric at ``params``, of so many probes.

    Each factor has √damping of its own mean eigenvalue added to its diagonal, and no block is taken for flatter than
    ``damping`` of the mean of all.
    """
    outputs, pull = jax.vjp(lambda p: loss.model_fn(p, batch), params)
    across = jax.linearize(jax.grad(lambda o: loss.loss_fn(o, batch)), outputs)[1]
    flat, shape = ravel_pytree(outputs)
    dtype = jnp.promote_types(flat.dtype, jnp.float32)  # there is no decomposition of anything in half precision

    def product(vector: sp.Vector) -> sp.Vector:
        assert isinstance(vector, jax.Array)
        moved: jax.Array = ravel_pytree(across(shape(vector.astype(flat.dtype))))[0]
        return moved.astype(dtype)

    test = jax.random.normal(jax.random.fold_in(key, probes), flat.shape, flat.dtype).astype(dtype)
    rounding = max(_BESIDE, 4 * float(jnp.finfo(flat.dtype).eps))
    root_times = _root(product, test, [leaf.size for leaf in jax.tree.leaves(outputs)], rounding)
    blocks = blocks_of(params)

    def probe(key: jax.Array) -> list[_Moments]:
        (pulled,) = pull(shape(root_times(jax.random.rademacher(key, flat.shape, dtype)).astype(flat.dtype)))
        return [_moments(*both, max_dim) for both in zip(blocks, joined(pulled), strict=True)]

    def add(total: list[_Moments], key: jax.Array) -> tuple[list[_Moments], None]:
        return jax.tree.map(jnp.add, total, probe(key)), None

    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(probe, key))
    total, _ = jax.lax.scan(add, zeros, jax.random.split(key, probes))
    moments = jax.tree.map(lambda x: x / probes, total)
    mass = sum(jnp.trace(m.right) if m.left is not None else jnp.sum(m.right) for m in moments)
    least = jnp.where(mass > 0, damping * mass / max(1, sum(x.size for x in jax.tree.leaves(params))), 1)
    return tuple(_factored(m, damping, least) for m in moments)


def _root(
    product: lanczos.Matvec, test: jax.Array, sizes: Sequence[int], rounding: float
) -> Callable[[jax.Array], jax.Array]:
    """The map z ↦ H^½ z for a positive semi-definite H.

    Where the loss is a sum over outputs H is a diagonal, which its product with ones is, and a vector of normal numbers
    tells whether it is one, for each array of the outputs, of these sizes; else by Lanczos from z.
    """
    found, seen = product(jnp.ones_like(test)), product(test)
    assert isinstance(found, jax.Array) and isinstance(seen, jax.Array)  # of vectors that are arrays, not trees
    wanted, ends = found * test, list(itertools.accumulate(sizes))[:-1]
    pieces = zip(jnp.split(seen - wanted, ends), jnp.split(wanted, ends), strict=True)
    said = [jnp.linalg.norm(beside) <= rounding * jnp.linalg.norm(along) for beside, along in pieces]
    diagonal = jnp.stack(said).all()  # False for what is no number
    root = jnp.sqrt(jnp.maximum(found, 0))

    def times(vector: jax.Array) -> jax.Array:
        found: jax.Array = jax.lax.cond(diagonal, lambda v: root * v, lambda v: _root_times(product, v), vector)
        return found

    return times


def _root_times(product: lanczos.Matvec, vector: jax.Array) -> jax.Array:
    """H^½ z for a positive semi-definite H, by Lanczos from z."""
    steps = min(_ROOT_STEPS, vector.size)
    found = lanczos.lanczos(
        product,
        vector,
        jnp.zeros((steps, vector.size), vector.dtype),
        breakdown=10 * float(jnp.finfo(vector.dtype).eps),
    )
    off = found.betas[:-1]
    values, vectors = jnp.linalg.eigh(jnp.diag(found.alphas) + jnp.diag(off, 1) + jnp.diag(off, -1))
    coefficients = vectors @ (jnp.sqrt(jnp.maximum(values, 0)) * vectors[0])
    assert isinstance(found.basis, jax.Array)
    root: jax.Array = jnp.matmul(coefficients, found.basis, precision=_HIGHEST)
    return jnp.linalg.norm(vector) * root


def _is_matrix(block: Block, shape: tuple[int, ...], max_dim: int) -> bool:
    # A bias does not count: a matrix is not to lose its factors for it.
    sides = (size - (block.bias is not None and axis == block.axis) for axis, size in enumerate(shape))
    return len(shape) == 2 and max(sides) <= max_dim


def _moments(block: Block, u: jax.Array, max_dim: int) -> _Moments:
    u = u.astype(jnp.promote_types(u.dtype, jnp.float32))
    if not _is_matrix(block, u.shape, max_dim):
        return _Moments(None, u**2)
    return _Moments(jnp.matmul(u, u.T, precision=_HIGHEST), jnp.matmul(u.T, u, precision=_HIGHEST))


def _factored(moments: _Moments, damping: float, least: jax.Array) -> Factors:
    """Of A and B, or of a diagonal."""
    left, right = moments
    more, least = math.sqrt(damping), least.astype(right.dtype)
    if left is None:
        diagonal = jnp.sqrt(jnp.maximum(right + more * jnp.mean(right), least))
        return Factors(None, diagonal, None, 1 / diagonal)
    trace = jnp.trace(left)
    scale = jnp.maximum(trace / max(1, len(left) * len(right)), least)  # the mean eigenvalue of A ⊗ B / tr A

    def root(matrix: jax.Array, scale: Any) -> tuple[jax.Array, jax.Array]:
        eye = jnp.eye(len(matrix), dtype=matrix.dtype)
        # To a mean eigenvalue of 1. A block that nothing depends on has no trace.
        matrix = jnp.where(trace > 0, matrix * len(matrix) / trace + more * eye, eye)
        factor = jnp.sqrt(scale) * jnp.linalg.cholesky(matrix)
        return factor, solve_triangular(factor, eye, lower=True)

    (left, over_left), (right, over_right) = root(left, 1.0), root(right, scale)
    return Factors(left, right, over_left, over_right)


def _each(function: Callable[[Factors, jax.Array], jax.Array], metric: Metric, tree: Any) -> Any:
    return parted([function(*both) for both in zip(metric, joined(tree), strict=True)], tree)


def _product(left: jax.Array, middle: jax.Array, right: jax.Array) -> jax.Array:
    found: jax.Array = jnp.linalg.multi_dot([left, middle, right], precision=_HIGHEST)
    return found


def inside(metric: Metric, gradient: Any) -> Any:
    """Sᵀ g, in the factors' dtypes: a gradient by the parameters becomes one by the coordinates."""

    def one(factors: Factors, g: jax.Array) -> jax.Array:
        if factors.over_left is None:
            return g * factors.over_right
        return _product(factors.over_left, g, factors.over_right.T)

    return _each(one, metric, gradient)


def outside(metric: Metric, step: Any) -> Any:
    """S y: a step in the coordinates becomes one of the parameters."""

    def one(factors: Factors, y: jax.Array) -> jax.Array:
        if factors.over_left is None:
            return y * factors.over_right
        return _product(factors.over_left.T, y, factors.over_right)

    return _each(one, metric, step)


def back(metric: Metric, gradient: Any) -> Any:
    """S⁻ᵀ g: what ``inside`` has made of a gradient becomes that again."""

    def one(factors: Factors, g: jax.Array) -> jax.Array:
        return g * factors.right if factors.left is None else _product(factors.left, g, factors.right.T)

    return _each(one, metric, gradient)


def onto(metric: Metric, step: Any) -> Any:
    """S⁻¹ x: a step of the parameters becomes one in the coordinates."""

    def one(factors: Factors, x: jax.Array) -> jax.Array:
        return x * factors.right if factors.left is None else _product(factors.left.T, x, factors.right)

    return _each(one, metric, step)


def relative(new: Metric, old: Metric) -> Metric:
    """The metric of S_old⁻¹ S_new, with the old coordinates in the place of the parameters.

    To go through it takes half as long as out of the one and into the other, and there are many vectors that do.
    """

    def one(new: Factors, old: Factors) -> Factors:
        if new.left is None or old.left is None or new.over_left is None or old.over_left is None:
            return Factors(None, old.over_right * new.right, None, new.over_right * old.right)
        pairs = (old.over_left, new.left), (old.over_right, new.right)
        over = (new.over_left, old.left), (new.over_right, old.right)
        return Factors(*(jnp.matmul(*both, precision=_HIGHEST) for both in (*pairs, *over)))

    return tuple(one(*both) for both in zip(new, old, strict=True))
