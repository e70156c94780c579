"""The pairs of L-BFGS that starts from FOSI's metric: steps, changes of the gradient along them, and H of them.

``fosi.torch.pairs`` is the same in torch; here all of it is traced, and what says yes or no is a mask.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fosi.jax import space as sp
from fosi.jax.steps import Subspace
from fosi.quasi_newton import CUT, LEAST_SCALE, LEAST_SHARE, LEAST_TRUST, LONG, REGROWTH, RESOLVED, SHORT, Scaling


class Pairs(NamedTuple):
    """The last steps s and the changes y of the gradient along them: the rows of a ring, scaled so that s · y = 1.

    Attributes:
      steps: s, a row each.
      changes: y, a row each.
      inverse: of R, the matrix of all s_i · y_j where j is not older than i, and of 0 where it is; 0 too in rows and
        columns that hold no pair.
      next: the row that is written next.
      scale: γ as measured; trust · scale multiplies what lies outside the subspace.
      trust: 1, or less after searches that ended far below 1.
      place: the parameters at the last step.
      gradient: the gradient there.
    """

    steps: sp.Basis
    changes: sp.Basis
    inverse: jax.Array
    next: jax.Array
    scale: jax.Array
    trust: jax.Array
    place: sp.Vector
    gradient: sp.Vector

    @classmethod
    def none(cls, space: sp.Space, memory_size: int) -> Pairs:
        """Before the first step."""
        dtype = space.dtype
        return cls(
            steps=space.zeros(dtype, memory_size),
            changes=space.zeros(dtype, memory_size),
            inverse=jnp.zeros((memory_size, memory_size), dtype),
            next=jnp.zeros((), jnp.int32),
            scale=jnp.ones((), dtype),
            trust=jnp.ones((), dtype),
            place=space.zeros(dtype),
            gradient=space.zeros(dtype),
        )

    @property
    def used(self) -> jax.Array:
        """Which rows hold a pair."""
        return jnp.diagonal(self.inverse) != 0

    def seen(
        self,
        subspace: Subspace,
        largest: int,
        scaling: Scaling,
        place: sp.Vector,
        gradient: sp.Vector,
        first: jax.Array,
    ) -> Pairs:
        """With the pair of the step that led here, if the curvature along it is positive.

        Where nothing has moved the search found no lower loss: all pairs are forgotten, and the next step is H₀'s.

        Args:
          subspace: V, and α / |λ|.
          largest: how many of its rows are of the largest eigenvalues, which come first.
          scaling: how γ is read off a pair.
          place: the parameters.
          gradient: there.
          first: whether this is the first step, before which there is no other.
        """
        step, change = _minus(place, self.place), _minus(gradient, self.gradient)
        curvature, lengths = _dot(step, change), sp.norm(step) * sp.norm(change)
        accepted = ~first & (curvature > jnp.finfo(curvature.dtype).eps * lengths)
        forgotten = ~first & (sp.norm(step) == 0)
        to_one = jax.lax.rsqrt(jnp.where(accepted, curvature, 1))
        step, change = (jax.tree.map(lambda x: to_one * x, vector) for vector in (step, change))

        def put(rows: sp.Basis, vector: sp.Vector) -> sp.Basis:
            kept = jax.tree.map(lambda x, old: jnp.where(accepted, x, old[self.next]), vector, rows)
            return sp.put(rows, self.next, kept)

        steps, changes = put(self.steps, step), put(self.changes, change)
        inverse = jnp.where(accepted, self._extended(sp.products(steps, change)), self.inverse)
        scale = self._scale(subspace, largest, scaling, step, change)
        steepness = sp.norm(gradient)
        start = jnp.where(steepness > 1, 1 / steepness, 1)  # 1 too where it is no number
        otherwise = jnp.where(first, start, self.scale)
        return Pairs(
            steps,
            changes,
            jnp.where(forgotten, 0, inverse),
            jnp.where(accepted, (self.next + 1) % len(inverse), self.next),
            jnp.where(accepted, scale, otherwise).astype(self.scale.dtype),
            self.trust,
            place,
            gradient,
        )

    def _extended(self, products: jax.Array) -> jax.Array:
        """R⁻¹ with a pair in the row that is written next, given s_i · y of all steps and its y.

        The oldest pair, if it was there, is R's first row and column, and what is left of R⁻¹ without them is the
        inverse of what is left of R. The new one is the last: R gains a column, and R⁻¹ minus itself times that.
        """
        others = jnp.arange(len(products)) != self.next
        left = jnp.where(others[:, None] & others[None], self.inverse, 0)
        column = jnp.where(others, -_times(left, self._of_pairs(products)), 1)
        return left.at[:, self.next].set(column)

    def _of_pairs(self, products: jax.Array) -> jax.Array:
        # Rows without a pair hold old ones. Their products count for nothing, but 0 times infinity would be no number.
        return jnp.where(self.used, products, 0)

    def _scale(
        self, subspace: Subspace, largest: int, scaling: Scaling, step: sp.Vector, change: sp.Vector
    ) -> jax.Array:
        """γ, of a pair with s · y = 1."""

        def outside(vector: sp.Vector) -> sp.Vector:
            return _minus(vector, sp.combine(subspace.basis, sp.products(subspace.basis, vector)))

        change = outside(change)
        share, size = _dot(step, change), _dot(change, change)
        # A step inside the subspace says nothing of the rest, but that it is flatter than the largest in there.
        known = (share > LEAST_SHARE) & (size > 0)
        size = jnp.where(known, size, 1)
        lengths = subspace.newton[:largest]
        shortest = jnp.min(lengths, initial=jnp.inf, where=lengths > 0)
        flattest = jnp.max(lengths, initial=0, where=lengths <= RESOLVED * shortest)
        if scaling == "usual":
            measured = share / size
        else:
            measured = jnp.maximum(sp.norm(outside(step)) / jnp.sqrt(size), LEAST_SCALE * flattest)
        return jnp.where(known, measured, jnp.maximum(self.scale, flattest))

    def after(self, size: jax.Array | None, scaling: Scaling) -> Pairs:
        """Trusts γ less where the search ended far below 1, and more where it did not; as before where it says nothing.

        Args:
          size: where it ended; 0 where it found no lower loss, None where it does not say.
          scaling: the usual γ is not cut.
        """
        if scaling == "usual" or size is None:
            return self
        change = jnp.where(size < SHORT, CUT, jnp.where(size > LONG, REGROWTH, 1))
        return self._replace(trust=jnp.clip(change * self.trust, LEAST_TRUST, 1).astype(self.trust.dtype))

    def moved(
        self,
        place: sp.Vector,
        steps: Callable[[sp.Vector], sp.Vector],
        gradients: Callable[[sp.Vector], sp.Vector],
        scaling: Scaling,
    ) -> Pairs:
        """The same pairs in other coordinates, which are 0 where the old ones are ``place``.

        Products of a step and a gradient are what they were, but for rounding, and so is R. γ is read off the newest
        pair again, without a V, and trusted.

        Args:
          place: the parameters.
          steps: a linear map, of steps.
          gradients: a linear map, of gradients: the inverse of the transpose of that.
          scaling: how γ is read off a pair.
        """
        moved, changes = jax.lax.map(steps, self.steps), jax.lax.map(gradients, self.changes)
        newest = (self.next - 1) % len(self.inverse)
        step, change = (jax.tree.map(lambda rows: rows[newest], rows) for rows in (moved, changes))
        length = 1 if scaling == "usual" else sp.norm(step) * sp.norm(change)
        size = _dot(change, change)
        known = self.used[newest] & (size > 0)
        scale = jnp.where(known, length / jnp.where(known, size, 1), self.scale)
        return self._replace(
            steps=moved,
            changes=changes,
            scale=scale.astype(self.scale.dtype),
            trust=jnp.ones_like(self.trust),
            place=steps(_minus(self.place, place)),
            gradient=gradients(self.gradient),
        )

    def times(self, subspace: Subspace, vector: sp.Vector) -> sp.Vector:
        """H times a vector.

        The two loops of L-BFGS as two products, a = R⁻¹Sᵀg and b = R⁻ᵀ(a − YᵀH₀(g − Y a)): a loop would wait for each
        of its pairs, and so would a triangular system. Whatever rounding makes of R⁻¹, it is
        (I − Y R⁻¹ Sᵀ)ᵀ H₀ (I − Y R⁻¹ Sᵀ) + (R⁻¹ Sᵀ)ᵀ R⁻¹ Sᵀ: never a way up.
        """
        first = _times(self.inverse, self._of_pairs(sp.products(self.steps, vector)))
        rest = _minus(vector, sp.combine(self.changes, first))
        scale = self.trust * self.scale
        inside = (subspace.newton - scale) * sp.products(subspace.basis, rest)
        start = jax.tree.map(lambda x, v: scale * x + v, rest, sp.combine(subspace.basis, inside))
        second = _times(self.inverse.T, first - self._of_pairs(sp.products(self.changes, start)))
        return jax.tree.map(jnp.add, start, sp.combine(self.steps, second))


def _times(matrix: jax.Array, vector: jax.Array) -> jax.Array:
    return jnp.matmul(matrix, vector, precision="highest")  # else rounded to TF32 on a GPU


def _minus(one: sp.Vector, other: sp.Vector) -> sp.Vector:
    return jax.tree.map(jnp.subtract, one, other)


def _dot(one: sp.Vector, other: sp.Vector) -> jax.Array:
    # As a sum: on an explicit mesh a contraction over a sharded axis is ambiguous.
    return functools.reduce(jnp.add, jax.tree.leaves(jax.tree.map(lambda x, y: jnp.sum(x * y), one, other)))
