"""One step inside a spectrum: the split of the gradient, the Newton part and the base optimizer's part.

Both forms compute Algorithm 2's update. V holds zero rows for the pairs that are not used, so a step before the
first estimate is the base optimizer's own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import optax

from fosi.jax import space as sp
from fosi.options import Momentum

Scalar = Any
TreeMap = Callable[[sp.Tree], sp.Tree]
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
    """A base optimizer and the way FOSI puts its part and the Newton part together.

    Attributes:
      searches: whether it wants the loss as a function, ``value_fn``, among the extra arguments.
    """

    searches: ClassVar[bool]

    def init(self, space: sp.Space, params: sp.Tree) -> Any:
        """The base's state, less what the momentum holds."""

    def init_momentum(self, space: sp.Space, rank: int) -> Any:
        """The momentum that the Newton part reads, or None where there is none."""

    def in_subspace(self, momentum: Any) -> jax.Array | None:
        """The momentum where it is k + ell numbers that turn with V at a refresh, None where a refresh leaves it be."""

    def moved(self, space: sp.Space, base_state: Any, place: sp.Tree, steps: TreeMap, gradients: TreeMap) -> Any | None:
        """The base's state in other coordinates, or None where it cannot be told and the base begins anew.

        Args:
          space: of the old coordinates, and of the new ones.
          base_state: in the old ones.
          place: the old ones where the new ones are 0.
          steps: the linear map of steps from the old ones to the new.
          gradients: that of gradients, the inverse of its transpose.
        """

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

    The momentum is kept as the vector that V is multiplied with, and not as leaves besides: a leaf that is part of the
    vector and of the state as well costs a GPU a kernel of its own. The leaves outside the space have ``optax.trace``.
    """

    learning_rate: Scalar | Callable[[Any], Scalar]
    decay: Scalar | None
    nesterov: bool = False
    searches: ClassVar[bool] = False

    def init(self, space: sp.Space, params: sp.Tree) -> Any:
        """The momentum of the leaves outside the space."""
        return self._outside.init(_without(space, params))

    def init_momentum(self, space: sp.Space, rank: int) -> sp.Vector | None:
        """A zero vector of the space, as ``optax.trace`` starts."""
        return None if self.decay is None else space.zeros(space.dtype)

    def in_subspace(self, momentum: sp.Vector | None) -> None:
        """It is the whole gradients' and knows of no V."""
        return None

    def moved(self, space: sp.Space, base_state: Any, place: sp.Tree, steps: TreeMap, gradients: TreeMap) -> None:
        """It begins anew."""
        return None

    def __call__(
        self,
        space: sp.Space,
        subspace: Subspace,
        grads: sp.Tree,
        base_state: Any,
        momentum: sp.Vector | None,
        params: sp.Tree,
        count: jax.Array,
        extra_args: dict[str, Any],
    ) -> tuple[sp.Tree, Any, sp.Vector | None]:
        """See ``Step``."""
        del params, extra_args
        outside, base_state = self._outside.update(_without(space, grads), base_state)
        leaves = space.leaves(grads)
        dtypes = [jnp.result_type(leaf) for leaf in leaves]
        if momentum is None:
            mean = space.pack(leaves, space.dtype)
        else:  # in the dtypes that optax.trace would keep it in
            dtypes = [jnp.result_type(*both, self.decay) for both in zip(space.dtypes, dtypes, strict=True)]
            momentum, mean = self._added(space, leaves, momentum, dtypes)
        rate = jnp.asarray(_at(self.learning_rate, count), space.dtype)
        scale = subspace.lr_scale
        inside = (rate * scale - subspace.newton) * sp.products(subspace.basis, mean)
        correction = space.unpack(sp.combine(subspace.basis, inside), [space.dtype] * len(leaves))

        # The base's own update, in the leaves' dtypes: until there is a subspace nothing is added to it.
        def base(x: jax.Array) -> jax.Array:
            return (-rate).astype(x.dtype) * x

        own = [base(x) for x in space.unpack(mean, dtypes)]
        moved = [(scale * b + c).astype(b.dtype) for b, c in zip(own, correction, strict=True)]
        return space.merge(moved, jax.tree.map(base, outside)), base_state, momentum

    @property
    def _outside(self) -> optax.GradientTransformation:
        return optax.identity() if self.decay is None else optax.trace(self.decay, self.nesterov)

    def _added(
        self, space: sp.Space, leaves: list[jax.Array], momentum: sp.Vector, dtypes: list[Any]
    ) -> tuple[sp.Vector, sp.Vector]:
        """The next momentum and what the step reads of it, rounded as ``optax.trace`` rounds leaves of ``dtypes``."""

        def add(grads: Any, trace: Any) -> Any:
            return jax.tree.map(lambda g, t: g + self.decay * t, grads, trace)

        def vector(parts: Any) -> sp.Vector:
            wide = _widened(parts, space.dtype)
            return space.pack(wide, space.dtype) if mixed else wide

        # Leaf by leaf only where their dtypes differ, else in one pass over the vector, which writes it in place.
        mixed = len(set(dtypes)) > 1
        grads = leaves if mixed else space.pack(leaves, dtypes[0])
        old = space.unpack(momentum, dtypes) if mixed else jax.tree.map(lambda t: t.astype(dtypes[0]), momentum)
        new = add(grads, old)
        momentum = vector(new)
        return momentum, vector(add(grads, new)) if self.nesterov else momentum


@dataclasses.dataclass(frozen=True)
class ProjectedStep:
    """Any base: it is handed the gradient less its part in V, in the parameters' shapes. Four reads of V.

    c = V g, the base's step d on g − Vᵀc, e = V d, and the update s d − Vᵀ(s e + (α / |λ|) ⊙ c̄). The momentum c̄ of
    the Newton part lives in the subspace; at a refresh it is carried over as V_new V_oldᵀ c̄.
    """

    base: optax.GradientTransformationExtraArgs
    momentum: Momentum
    decay: Decay | None = None
    searches: ClassVar[bool] = False

    def init(self, space: sp.Space, params: sp.Tree) -> Any:
        """The base's state."""
        return self.base.init(params)

    def init_momentum(self, space: sp.Space, rank: int) -> jax.Array | None:
        """Zeros: there is no subspace yet in which past gradients could have been seen."""
        return None if self.momentum is None else jnp.zeros(rank, space.dtype)

    def in_subspace(self, momentum: jax.Array | None) -> jax.Array | None:
        """All of it."""
        return momentum

    def moved(self, space: sp.Space, base_state: Any, place: sp.Tree, steps: TreeMap, gradients: TreeMap) -> None:
        """Nothing is known of the base's state: it begins anew."""
        return None

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


def _widened(tree: sp.Tree, dtype: Any) -> sp.Tree:
    """Arrays in a wider dtype, the values still of their own one."""

    def one(x: jax.Array) -> jax.Array:
        if x.dtype == dtype:
            return x
        # XLA leaves out the rounding of a value that is widened again, unless it is told to round.
        return jax.lax.reduce_precision(x.astype(dtype), jnp.finfo(dtype).nexp, jnp.finfo(x.dtype).nmant)

    return jax.tree.map(one, tree)


def _without(space: sp.Space, tree: sp.Tree) -> sp.Tree:
    """``tree`` with nothing in the place of the leaves that span the space, as ``optax.masked`` does it."""
    return space.merge([optax.MaskedNode()] * len(space.selected), tree)


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
