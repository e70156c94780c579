"""A transformation that keeps the parameters itself, for trainers whose ``update`` is called without them."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax


class OwnParamsState(NamedTuple):
    """State of ``without_params``: arrays only.

    Attributes:
      params: the parameters as they are after the updates so far.
      inner: the state of the transformation inside.
    """

    params: Any
    inner: Any


class OwnParams(optax.GradientTransformationExtraArgs):
    """What ``without_params`` returns; ``inner`` is the transformation inside."""

    inner: optax.GradientTransformationExtraArgs
    bound: dict[str, Any]

    def __new__(cls, inner: optax.GradientTransformation, bound: dict[str, Any]) -> OwnParams:
        """Binds the two functions to the transformation inside."""
        inner = optax.with_extra_args_support(inner)

        def init(params: Any) -> OwnParamsState:
            # Copies: a step to which both the parameters and the state are donated would give one buffer twice.
            return OwnParamsState(jax.tree.map(jnp.copy, params), inner.init(params))

        def update(
            updates: Any, state: OwnParamsState, params: Any = None, **extra_args: Any
        ) -> tuple[Any, OwnParamsState]:
            params = state.params if params is None else params
            updates, after = inner.update(updates, state.inner, params, **{**bound, **extra_args})
            return updates, OwnParamsState(optax.apply_updates(params, updates), after)

        made = super().__new__(cls, init, update)
        made.inner, made.bound = inner, bound
        return made

    def __getnewargs__(self) -> tuple[optax.GradientTransformation, dict[str, Any]]:
        """A copy is made of what it was made of, not of the tuple's two functions."""
        return self.inner, self.bound


def without_params(opt: optax.GradientTransformation, **extra_args: Any) -> OwnParams:
    """``opt``, for a caller of ``update(grads, state)`` who passes no parameters.

    The state holds a copy of them, to which each update is added as ``optax.apply_updates`` does it. The caller must
    therefore apply the updates as they come: nothing may change them afterwards (put clipping and the like inside,
    or before it in a chain), and parameters that are set to other values need a new ``init``, or to be passed once.

    Args:
      opt: any optax transformation, such as ``fosi_adam(1e-3, k=10)``.
      **extra_args: handed to every ``update`` of ``opt``, where the caller passes none of that name: ``value_fn=`` for
        FOSI's curvature, or ``batch=`` for its ``loss_fn``. Under ``jit`` their arrays are constants of the step.

    Returns:
      An ``optax.GradientTransformationExtraArgs``. A FOSI inside is refreshed from outside as in a chain:
      ``opt.refresh(state, params, batch=)`` finds its own state.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> from fosi.jax import fosi_sgd, without_params
      >>> def loss(w):
      ...     return 0.5 * jnp.sum(jnp.array([100.0, 50.0, 2.0, 1.0]) * w**2)
      >>> opt = without_params(fosi_sgd(0.1, k=2, alpha=1.0, warmup=0, max_lr_scale=1), value_fn=loss)
      >>> w = jnp.ones(4)
      >>> state = opt.init(w)
      >>> updates, state = opt.update(jax.grad(loss)(w), state)
      >>> [round(abs(float(x)), 3) for x in optax.apply_updates(w, updates)]
      [0.0, 0.0, 0.8, 0.9]
    """
    if not (callable(getattr(opt, "init", None)) and callable(getattr(opt, "update", None))):
        raise TypeError(f"opt must be an optax transformation such as fosi_adam(1e-3), got {opt!r}")
    return OwnParams(opt, extra_args)
