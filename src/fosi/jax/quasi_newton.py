"""FOSI around L-BFGS: FOSI's two-part metric is where L-BFGS starts from, and a line search goes along the whole step.

L-BFGS makes an inverse Hessian out of a first guess H₀ and the last pairs of steps and of changes of the gradient. The
usual guess is γI, and in a badly conditioned problem the pairs, few and soon old, have all to learn. Here
H₀ = V diag(α/|λ|) Vᵀ + γ(I − V Vᵀ): FOSI's own step around gradient descent. The pairs then correct it for what has
changed since the estimate, which FOSI's sum of two separate parts cannot.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fosi.jax import space as sp
from fosi.jax.steps import Subspace
from fosi.quasi_newton import (
    CUT,
    GROWTH,
    LEAST_SCALE,
    LEAST_SHARE,
    LEAST_TRUST,
    LONG,
    LOSS_NOISE,
    MAX_TRIALS,
    REGROWTH,
    RESOLVED,
    SHORT,
    Scaling,
)


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


class LbfgsState(NamedTuple):
    """The pairs, and the state of the line search, which has the loss and the gradient where it ended."""

    pairs: Pairs
    search: Any


@dataclasses.dataclass(frozen=True)
class LbfgsStep:
    """L-BFGS that starts from FOSI's metric, and a line search; see ``Step``."""

    memory_size: int
    search: optax.GradientTransformationExtraArgs
    largest: int
    scaling: Scaling
    searches: ClassVar[bool] = True

    def init(self, space: sp.Space, params: sp.Tree) -> LbfgsState:
        """No pairs yet."""
        return LbfgsState(Pairs.none(space, self.memory_size), self.search.init(params))

    def init_momentum(self, space: sp.Space, rank: int) -> None:
        """There is none."""
        return None

    def in_subspace(self, momentum: None) -> None:
        """There is none."""
        return None

    def __call__(
        self,
        space: sp.Space,
        subspace: Subspace,
        grads: sp.Tree,
        base_state: LbfgsState,
        momentum: None,
        params: sp.Tree,
        count: jax.Array,
        extra_args: dict[str, Any],
    ) -> tuple[sp.Tree, LbfgsState, None]:
        """See ``Step``; ``extra_args`` are those of a line search of optax: the loss here, and as a function."""
        if missing := [name for name in ("value", "value_fn") if extra_args.get(name) is None]:
            raise ValueError(
                f"{' and '.join(missing)} must be passed to update: the line search needs the loss, value=loss and "
                "value_fn=a function of the parameters, got None"
            )
        gradient = space.pack(space.leaves(grads), space.dtype)
        place = space.pack(space.leaves(params), space.dtype)
        if not space.flat:  # as leaves they are the caller's own arrays, which may be given away
            gradient, place = jax.tree.map(jnp.copy, (gradient, place))
        pairs = base_state.pairs.seen(subspace, self.largest, self.scaling, place, gradient, count == 0)
        ahead = jax.tree.map(jnp.negative, pairs.times(subspace, gradient))
        direction = space.merge(space.unpack(ahead), jax.tree.map(jnp.zeros_like, grads))
        extra_args = {"grad": grads, **extra_args}
        updates, search = self.search.update(direction, base_state.search, params, **extra_args)
        updates, search, size = _no_worse(updates, search, extra_args["value"], extra_args["grad"])
        return updates, LbfgsState(pairs.after(size, self.scaling), search), None


def line_search(scaling: Scaling) -> optax.GradientTransformationExtraArgs:
    """The line search of ``optax.lbfgs``, but that a loss 1e-3 higher will do where the slopes say that it is lower.

    It begins at 1 where the scaling is the usual one, else a tenth above where the last one ended.
    """
    usual = scaling == "usual"
    made = optax.scale_by_zoom_linesearch(
        max_linesearch_steps=MAX_TRIALS,
        initial_guess_strategy="one" if usual else "keep",
        approx_dec_rtol=LOSS_NOISE,
    )

    def update(updates: sp.Tree, state: Any, params: sp.Tree, **extra_args: Any) -> tuple[sp.Tree, Any]:
        begin = jnp.minimum(1, GROWTH * state.learning_rate).astype(jnp.asarray(state.learning_rate).dtype)
        updates, found = made.update(updates, state._replace(learning_rate=begin), params, **extra_args)
        return updates, found

    return made if usual else optax.GradientTransformationExtraArgs(made.init, update)


def _no_worse(updates: sp.Tree, search: Any, value: Any, grad: sp.Tree) -> tuple[sp.Tree, Any, jax.Array | None]:
    """No step, where a search that knows the loss at its end has found none as low: optax's takes its last trial.

    Returns:
      The updates, the search's state, and where the search ended: 0 where it found none, None where it does not say.
    """
    size = jnp.asarray(search.learning_rate) if hasattr(search, "learning_rate") else None
    if getattr(search, "value", None) is None or getattr(search, "grad", None) is None:
        return updates, search, size
    lower = search.value <= value + LOSS_NOISE * jnp.abs(value)  # False for what is no number
    updates = jax.tree.map(lambda u: jnp.where(lower, u, jnp.zeros_like(u)), updates)
    found = jnp.where(lower, search.value, value).astype(search.value.dtype)
    slopes = jax.tree.map(lambda new, old: jnp.where(lower, new, old).astype(new.dtype), search.grad, grad)
    search = search._replace(value=found, grad=slopes)
    if size is None:
        return updates, search, None
    # The next one does not begin where this one was lost.
    search = search._replace(learning_rate=jnp.where(lower & (size > 0), size, 1).astype(size.dtype))
    return updates, search, jnp.where(lower, size, 0)


def _times(matrix: jax.Array, vector: jax.Array) -> jax.Array:
    return jnp.matmul(matrix, vector, precision="highest")  # else rounded to TF32 on a GPU


def _minus(one: sp.Vector, other: sp.Vector) -> sp.Vector:
    return jax.tree.map(jnp.subtract, one, other)


def _dot(one: sp.Vector, other: sp.Vector) -> jax.Array:
    # As a sum: on an explicit mesh a contraction over a sharded axis is ambiguous.
    return functools.reduce(jnp.add, jax.tree.leaves(jax.tree.map(lambda x, y: jnp.sum(x * y), one, other)))
