"""One step inside a spectrum: the split of the gradient, the Newton part and the base optimizer's part.

Both forms compute Algorithm 2's update. V holds zero rows for the pairs that are not used, so a step before the
first estimate is the base optimizer's own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import optax

from fosi.jax import space as sp
from fosi.options import Momentum

Scalar = Any
Decay = Callable[[sp.Tree, jax.Array], sp.Tree]


class Subspace(NamedTuple):
    """What a step needs of the current estimate.

    Attributes:
      basis: V, k + ell rows.
      newton: α / |λ| for each row.
      lr_scale: factor on the base's learning rate.
    """

    basis: sp.Basis
    newton: jax.Array
    lr_scale: jax.Array


class Step(Protocol):
    """A base optimizer and the way FOSI puts its part and the Newton part together."""

    def init(self, params: sp.Tree) -> Any:
        """The base's state."""

    def init_momentum(self, rank: int, dtype: Any) -> Any:
        """The Newton part's momentum, k + ell numbers, or None where it needs none of its own."""

    def __call__(
        self,
        space: sp.Space,
        subspace: Subspace,
        grads: sp.Tree,
        base_state: Any,
        momentum: Any,
        params: sp.Tree,
        count: jax.Array,
        extra_args: dict[str, Any],
    ) -> tuple[sp.Tree, Any, Any]:
        """The updates, the base's next state and the next momentum."""


@dataclasses.dataclass(frozen=True)
class LinearStep:
    """A base that is linear in the gradients: GD, Heavy-Ball, Nesterov. Two reads of V.

    §3.4 asks for the same linear combination of past gradients in both parts. With m̄ the base's own combination of
    the whole gradients, c = V m̄ gives both, and the update is −η m̄ + Vᵀ((η − α / |λ|) ⊙ c) with η the scaled rate.
    At a refresh m̄ is kept whole, so the Newton part starts with the base's momentum instead of from zero.
    """

    learning_rate: Scalar | Callable[[Any], Scalar]
    momentum: optax.GradientTransformation

    def init(self, params: sp.Tree) -> Any:
        """The state of the base's momentum."""
        return self.momentum.init(params)

    def init_momentum(self, rank: int, dtype: Any) -> None:
        """The base's own momentum serves both parts."""
        return None

    def __call__(
        self,
        space: sp.Space,
        subspace: Subspace,
        grads: sp.Tree,
        base_state: Any,
        momentum: None,
        params: sp.Tree,
        count: jax.Array,
        extra_args: dict[str, Any],
    ) -> tuple[sp.Tree, Any, None]:
        """See ``Step``."""
        del params, extra_args
        mean, base_state = self.momentum.update(grads, base_state)
        leaves = space.leaves(mean)
        rate = jnp.asarray(_at(self.learning_rate, count), space.dtype)
        scale = subspace.lr_scale
        inside = sp.products(subspace.basis, space.pack(leaves, space.dtype))
        inside = (rate * scale - subspace.newton) * inside
        correction = space.unpack(sp.combine(subspace.basis, inside), [space.dtype] * len(leaves))

        # The base's own update, in the leaves' dtypes: until there is a subspace nothing is added to it.
        base = jax.tree.map(lambda x: (-rate).astype(x.dtype) * x, mean)
        moved = [(scale * b + c).astype(b.dtype) for b, c in zip(space.leaves(base), correction, strict=True)]
        return space.merge(moved, base), base_state, None


@dataclasses.dataclass(frozen=True)
class ProjectedStep:
    """Any base: it is handed the gradient less its part in V, in the parameters' shapes. Four reads of V.

    c = V g, the base's step d on g − Vᵀc, e = V d, and the update s d − Vᵀ(s e + (α / |λ|) ⊙ c̄). The momentum c̄ of
    the Newton part lives in the subspace; at a refresh it is carried over as V_new V_oldᵀ c̄.
    """

    base: optax.GradientTransformationExtraArgs
    momentum: Momentum
    decay: Decay | None = None

    def init(self, params: sp.Tree) -> Any:
        """The base's state."""
        return self.base.init(params)

    def init_momentum(self, rank: int, dtype: Any) -> jax.Array | None:
        """Zeros: there is no subspace yet in which past gradients could have been seen."""
        return None if self.momentum is None else jnp.zeros(rank, dtype)

    def __call__(
        self,
        space: sp.Space,
        subspace: Subspace,
        grads: sp.Tree,
        base_state: Any,
        momentum: jax.Array | None,
        params: sp.Tree,
        count: jax.Array,
        extra_args: dict[str, Any],
    ) -> tuple[sp.Tree, Any, jax.Array | None]:
        """See ``Step``."""
        basis = subspace.basis
        leaves = space.leaves(grads)
        gradient = space.pack(leaves, space.dtype)
        inside = sp.products(basis, gradient)
        rest = jax.tree.map(jnp.subtract, gradient, sp.combine(basis, inside))
        rest_tree = space.merge(space.unpack(rest, [jnp.result_type(leaf) for leaf in leaves]), grads)
        base_updates, base_state = self.base.update(rest_tree, base_state, params, **extra_args)

        if self.momentum is not None:
            momentum = self.momentum.update(momentum, inside)
            inside = self.momentum.read(momentum, inside, (count + 1).astype(space.dtype))
        base_leaves = space.leaves(base_updates)
        vector = space.pack(base_leaves, space.dtype)
        scale = subspace.lr_scale
        taken = scale * sp.products(basis, vector) + subspace.newton * inside
        direction = jax.tree.map(lambda x, y: scale * x - y, vector, sp.combine(basis, taken))
        updates = space.merge(space.unpack(direction, [jnp.result_type(leaf) for leaf in base_leaves]), base_updates)
        if self.decay is not None:
            # After the projection: inside the base its part along V would be lost.
            updates = jax.tree.map(lambda u, d: (u + d).astype(u.dtype), updates, self.decay(params, count))
        return updates, base_state, momentum


def _at(value: Scalar | Callable[[Any], Scalar], count: jax.Array) -> Scalar:
    return value(count) if callable(value) else value


def decoupled_decay(rate: Scalar | Callable[[Any], Scalar], strength: Scalar, mask: sp.Mask | None) -> Decay:
    """Decoupled decay, −η λ θ, for the leaves that ``mask`` lets in (all where None)."""

    def decay(params: sp.Tree, count: jax.Array) -> sp.Tree:
        factor = -_at(rate, count) * strength
        if mask is None:
            return jax.tree.map(lambda p: factor * p, params)
        inside = mask(params) if callable(mask) else mask
        return jax.tree.map(
            lambda m, part: jax.tree.map(lambda p: factor * p if m else jnp.zeros_like(p), part), inside, params
        )

    return decay
