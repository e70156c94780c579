"""One optimizer after another, such as Adam and then L-BFGS: what people do where first-order training stalls."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax


class RelayState(NamedTuple):
    """How far it has come, and both optimizers' states."""

    count: jax.Array  # type: ignore[assignment]
    first: Any
    second: Any


def relay(
    first: optax.GradientTransformation, second: optax.GradientTransformation, at: int
) -> optax.GradientTransformationExtraArgs:
    """Returns the transformation that is ``first`` for ``at`` updates, and then ``second``.

    Args:
      first: takes the first steps.
      second: takes the others; it starts, with ``init``, where the first has arrived.
      at: how many steps are the first's.
    """
    if at < 1:
        raise ValueError(f"switch_at is {at}; give 1 or more steps to the first optimizer")
    first, second = optax.with_extra_args_support(first), optax.with_extra_args_support(second)

    def init(params: Any) -> RelayState:
        return RelayState(jnp.zeros((), jnp.int32), first.init(params), second.init(params))

    def update(updates: Any, state: RelayState, params: Any = None, **extra: Any) -> tuple[Any, RelayState]:
        def begins() -> tuple[Any, Any, Any]:
            found, mine = first.update(updates, state.first, params, **extra)
            return found, mine, state.second

        def goes_on() -> tuple[Any, Any, Any]:
            fresh = second.init(params)
            mine = jax.tree.map(lambda new, old: jnp.where(state.count == at, new, old), fresh, state.second)
            found, mine = second.update(updates, mine, params, **extra)
            return found, state.first, mine

        found, one, two = jax.lax.cond(state.count < at, begins, goes_on)
        return found, RelayState(state.count + 1, one, two)

    return optax.GradientTransformationExtraArgs(init, update)
