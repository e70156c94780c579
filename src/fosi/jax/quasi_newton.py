"""FOSI around L-BFGS: FOSI's two-part metric is where L-BFGS starts from, and a line search goes along the whole step.

L-BFGS makes an inverse Hessian out of a first guess H₀ and the last pairs of steps and of changes of the gradient. The
usual guess is γI, and in a badly conditioned problem the pairs, few and soon old, have all to learn. Here
H₀ = V diag(α/|λ|) Vᵀ + γ(I − V Vᵀ): FOSI's own step around gradient descent. The pairs then correct it for what has
changed since the estimate, which FOSI's sum of two separate parts cannot.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fosi.jax import space as sp
from fosi.jax.pairs import Pairs
from fosi.jax.steps import Subspace, TreeMap
from fosi.quasi_newton import GROWTH, LOSS_NOISE, MAX_TRIALS, Scaling


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

    def moved(
        self, space: sp.Space, base_state: LbfgsState, place: sp.Tree, steps: TreeMap, gradients: TreeMap
    ) -> LbfgsState:
        """All pairs, and the line search as it is: of vectors it may hold none but the gradient for its caller."""

        def of_vectors(function: TreeMap) -> Callable[[sp.Vector], sp.Vector]:
            def one(vector: sp.Vector) -> sp.Vector:
                tree = function(space.merge(space.unpack(vector), place))
                return space.pack(space.leaves(tree), space.dtype)

            return one

        here = space.pack(space.leaves(place), space.dtype)
        pairs = base_state.pairs.moved(here, of_vectors(steps), of_vectors(gradients), self.scaling)
        return base_state._replace(pairs=pairs)

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
