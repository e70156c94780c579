"""An optimizer that works in coordinates of the layers: gradients go in, and its steps come out."""

from __future__ import annotations

import functools
import math
import numbers
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fosi.jax import layers
from fosi.jax.curvature import Batches, ModelLoss
from fosi.jax.spectrum import start_key
from fosi.jax.transform import Fosi, FosiState, only
from fosi.schedule import NEVER_AGAIN, Schedule

MAX_DIM = 8192
"""A side that is longer has no factor: to decompose one of 8,192 takes as long as some gradients of a large model."""


class LayeredState(NamedTuple):
    """State of ``in_layers``: arrays only.

    Attributes:
      refreshes: estimates made.
      metric: S, as factors for each block.
      place: y, from 0 at each estimate.
      inner: the state of the optimizer inside.
    """

    refreshes: jax.Array
    metric: layers.Metric
    place: Any
    inner: Any


class Layered(optax.GradientTransformationExtraArgs):
    """What ``in_layers`` returns: an optax transformation that also knows when an estimate is due and how to make one.

    ``inner`` is the optimizer inside.
    """

    inner: optax.GradientTransformationExtraArgs
    schedule: Callable[[Any], Schedule]
    refresh: Callable[..., Any]


def in_layers(
    make: Callable[[ModelLoss], optax.GradientTransformation],
    loss_fn: ModelLoss,
    *,
    every: int = 20,
    probes: int = 20,
    damping: float = 1e-3,
    max_dim: int = MAX_DIM,
    seed: int = 0,
) -> Layered:
    """An optimizer in coordinates in which every layer's Gauss–Newton matrix is near the identity.

    Parameters are x₀ + S y, and the optimizer trains y. S comes of two factors for each matrix of parameters (its last
    axis against all others), a bias that stands beside it in the tree being one more row or column, by backward passes
    with random signs: the model is called as it is, and nothing need be known of its layers. Every so many steps the
    factors are estimated anew. This is for full batches, where a few directions do not hold training back but whole
    layers do.

    With ``fosi_lbfgs`` inside the pairs are carried over from one S to the next: a pair's product does not depend on
    the coordinates it is written in, so that what has been learnt stays however often S is estimated. V is then of what
    two factors cannot tell. Any other optimizer inside begins anew with each estimate, as what it has learnt of one S
    means nothing with another.

    What is inside sees y, which begins at 0 with each estimate: weight decay inside would pull back to x₀ (have it in
    the loss), and schedules begin anew with what they are of.

    It is refreshed from outside: call ``refresh`` when ``schedule(params).due(step)``; before the first time S is the
    identity. Inside ``optax.chain`` it must come last, or be followed by what leaves updates as they are. For another
    loss, and for parameters that something else has changed, begin with ``init`` again.

    Args:
      make: make(loss) -> the optimizer, of a loss of (y, batch) that only ``refresh`` calls: a FOSI, with
        ``refresh="external"``, which then estimates whenever the factors are (never, where its ``warmup`` is
        ``fosi.schedule.NEVER_AGAIN``), or any optax transformation.
      loss_fn: the loss as a model and a convex loss of its outputs.
      every: steps between two estimates; the first comes before the first step.
      probes: backward passes of an estimate.
      damping: how much flatter than the mean direction one may be taken for; the root of it goes to each factor. In
        float32 what is carried over loses digits below some 1e-6.
      max_dim: a matrix with a longer side has only its diagonal, as numbers have, and vectors that are no bias.
      seed: of the random signs, with the count of estimates.

    Returns:
      A ``Layered``. Its ``update`` takes what the optimizer inside takes; ``value_fn`` is of the parameters, and
      ``optax.value_and_grad_from_state`` saves a gradient a step where a line search is inside.

    Raises:
      TypeError: if ``loss_fn`` is no ``ModelLoss``.
      ValueError: if a number is out of its range, or FOSI inside would refresh by itself.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from fosi.jax import ModelLoss, fosi_lbfgs, in_layers
      >>> x = jnp.array([[100.0, 0.0], [0.0, 0.01]])
      >>> loss = ModelLoss(lambda w, x: x @ w, lambda out, x: jnp.sum((out - 1) ** 2))
      >>> given = {"k": 1, "num_matvecs": 4, "curvature": "gauss_newton", "refresh": "external"}
      >>> opt = in_layers(lambda loss: fosi_lbfgs(loss, **given), loss, damping=1e-20)
      >>> w = jnp.zeros((2, 2))
      >>> state = opt.refresh(opt.init(w), w, batch=x)
      >>> value_and_grad = optax.value_and_grad_from_state(lambda w: loss(w, x))
      >>> for _ in range(3):
      ...     value, grad = value_and_grad(w, state=state)
      ...     given = {"value": value, "grad": grad, "value_fn": lambda w: loss(w, x)}
      ...     updates, state = opt.update(grad, state, w, **given)
      ...     w = optax.apply_updates(w, updates)
      >>> print(f"{loss(jnp.zeros((2, 2)), x):.4f} {loss(w, x):.4f}")
      4.0000 0.0000

    References:
      Ren and Goldfarb, Tensor Normal Training for Deep Learning Models, 2021: the factors.
    """
    _check(loss_fn, damping, every=every, probes=probes, max_dim=max_dim)

    def model(place: Any, batch: Any) -> Any:
        params, metric, examples = batch
        return loss_fn.model_fn(jax.tree.map(_moved, params, layers.outside(metric, place)), examples)

    made = make(ModelLoss(model, lambda outputs, batch: loss_fn.loss_fn(outputs, batch[2])))
    if isinstance(made, Fosi) and not made.external:
        raise ValueError("refresh must be 'external' for FOSI in in_layers, which refreshes it, got 'inline'")
    inner = optax.with_extra_args_support(made)

    def init(params: Any) -> LayeredState:
        place = _zeros(params)
        begun = begin(params, place)
        if not isinstance(made, Fosi) and any(_is_fosi(s) for s in jax.tree.leaves(begun, is_leaf=_is_fosi)):
            raise ValueError(
                f"make must return FOSI itself, which in_layers refreshes, or what has none in it, got {made!r}: put "
                "clipping and the like around in_layers"
            )
        return LayeredState(jnp.zeros((), jnp.int32), layers.identity(params, max_dim), place, begun)

    def begin(params: Any, place: Any) -> Any:
        """The inner optimizer's state; what a line search keeps for its caller in the parameters' dtypes."""
        begun, theirs = inner.init(place), jax.eval_shape(inner.init, params)
        for name in _KEPT:
            begun = _with_kept(begun, name, _kept(begun, name), _kept(theirs, name))
        return begun

    def update(
        updates: Any,
        state: LayeredState,
        params: Any = None,
        *,
        value_fn: Callable[[Any], Any] | None = None,
        grad: Any = None,
        **extra_args: Any,
    ) -> tuple[Any, LayeredState]:
        if params is None:
            raise ValueError("params must be passed to update: steps are taken from them, got None")
        metric, place = state.metric, state.place
        if value_fn is not None:
            theirs = value_fn

            def value_at(y: Any) -> Any:
                ahead = layers.outside(metric, jax.tree.map(jnp.subtract, y, place))
                return theirs(jax.tree.map(_moved, params, ahead))

            extra_args["value_fn"] = value_at
        if grad is not None:
            extra_args["grad"] = layers.inside(metric, grad)
        steps, after = inner.update(layers.inside(metric, updates), state.inner, place, **extra_args)
        # What a line search keeps, for ``optax.value_and_grad_from_state``, is read as the parameters' gradient.
        value, slopes = (_kept(after, name) for name in _KEPT)
        slopes = None if slopes is None else layers.back(metric, slopes)
        for name, found in zip(_KEPT, (value, slopes), strict=True):
            after = _with_kept(after, name, found, _kept(state.inner, name))
        state = LayeredState(state.refreshes, metric, optax.apply_updates(place, steps), after)
        return optax.tree.cast_like(layers.outside(metric, steps), updates), state

    def refresh(state: Any, params: Any, *, batch: Any) -> Any:
        if isinstance(batch, Batches):
            raise ValueError("batch must be one batch, got Batches: the factors are of one")
        ours = only(state, LayeredState)
        new = _estimated(params, batch, ours)
        if isinstance(made, Fosi) and made.schedule(new.place).warmup < NEVER_AGAIN:
            found = made.refresh(new.inner, _zeros(params), batch=(params, new.metric, batch))
            new = new._replace(inner=found)
        return jax.tree.map(lambda s: new if _is_ours(s) else s, state, is_leaf=_is_ours)

    @jax.jit
    def _estimated(params: Any, batch: Any, ours: LayeredState) -> LayeredState:
        key = start_key(seed, ours.refreshes)
        metric = layers.measure(loss_fn, params, batch, key, probes, damping, max_dim)
        usable = jnp.stack([jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(metric)]).all()
        place = _zeros(params)
        if isinstance(made, Fosi):
            seen = layers.relative(metric, ours.metric)
            steps, gradients = functools.partial(layers.onto, seen), functools.partial(layers.inside, seen)
            inside = made.moved(ours.inner, ours.place, steps, gradients)
        else:
            inside = begin(params, place)
        new = LayeredState(ours.refreshes, metric, place, inside)
        # An estimate that is not finite changes nothing, as FOSI's own.
        new = jax.tree.map(lambda x, old: jnp.where(usable, x, old), new, ours)
        return new._replace(refreshes=ours.refreshes + 1)

    found = Layered(init, update)
    found.inner, found.schedule, found.refresh = inner, lambda params: Schedule(0, every, probes), refresh
    return found


_KEPT = ("value", "grad")
"""What a line search keeps of where it ended."""


def _kept(state: Any, name: str) -> Any:
    """What an optimizer's state holds by a name, if it holds one; else None."""
    found = optax.tree.get_all_with_path(state, name)
    return found[0][1] if len(found) == 1 else None


def _with_kept(state: Any, name: str, kept: Any, like: Any) -> Any:
    """The state with that in it, in the dtypes of another; as it is where there is none."""
    if kept is None or like is None:
        return state
    return optax.tree.set(state, **{name: jax.tree.map(lambda x, y: x.astype(y.dtype), kept, like)})


def _zeros(params: Any) -> Any:
    """The coordinates at the beginning, no coarser than float32: they are sums of small steps."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32)), params)


def _is_fosi(node: Any) -> bool:
    return isinstance(node, FosiState)


def _moved(params: jax.Array, ahead: jax.Array) -> jax.Array:
    return params + ahead.astype(params.dtype)


def _is_ours(node: Any) -> bool:
    return isinstance(node, LayeredState)


def _check(loss_fn: Any, damping: Any, **whole: Any) -> None:
    if not isinstance(loss_fn, ModelLoss):
        raise TypeError(
            f"loss_fn must be a fosi.jax.ModelLoss, a model and a convex loss of its outputs, got {loss_fn!r}"
        )
    for name, value in whole.items():
        if not isinstance(value, numbers.Integral) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name} must be an integer ≥ 1, got {value!r}")
    if not isinstance(damping, int | float) or not (math.isfinite(damping) and damping > 0):
        raise ValueError(f"damping must be a finite number > 0, got {damping!r}")
