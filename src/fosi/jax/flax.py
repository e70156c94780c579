"""FOSI with flax: a linen TrainState that hands on the batch, and what an nnx.Optimizer needs for a refresh.

Import it by name, ``import fosi.jax.flax``; it needs flax, which ``fosi.jax`` itself does not.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import optax
from flax import nnx
from flax.training import train_state

from fosi.jax.spectrum import ValueFn
from fosi.jax.transform import Fosi


class TrainState(train_state.TrainState):
    """flax's TrainState whose ``apply_gradients`` also hands ``batch=`` or ``value_fn=`` to the optimizer.

    Example:
      >>> import flax.linen as nn, jax, jax.numpy as jnp
      >>> from fosi.jax import fosi_adam
      >>> from fosi.jax.flax import TrainState
      >>> model = nn.Dense(1)
      >>> def loss_fn(params, batch):
      ...     return jnp.mean((model.apply({"params": params}, batch[0]) - batch[1]) ** 2)
      >>> batch = jnp.eye(3), jnp.ones((3, 1))
      >>> params = model.init(jax.random.key(0), batch[0])["params"]
      >>> opt = fosi_adam(0.1, loss_fn, k=2, warmup=0)
      >>> state = TrainState.create(apply_fn=model.apply, params=params, tx=opt)
      >>> grads = jax.grad(loss_fn)(state.params, batch)
      >>> state = state.apply_gradients(grads=grads, batch=batch)
      >>> int(state.step), int(state.opt_state.refreshes)
      (1, 1)
    """

    def apply_gradients(self, *, grads: Any, **kwargs: Any) -> TrainState:
        """One step; see flax's ``TrainState.apply_gradients``.

        Args:
          grads: the gradients.
          **kwargs: fields of the state are replaced, as flax does; others go to the optimizer's ``update``.

        Returns:
          The next state.
        """
        fields = {field.name for field in dataclasses.fields(self)}
        replaced = {name: value for name, value in kwargs.items() if name in fields}
        extra_args = {name: value for name, value in kwargs.items() if name not in fields}
        tx = optax.with_extra_args_support(self.tx)
        bound = optax.GradientTransformation(tx.init, functools.partial(tx.update, **extra_args))
        step: Any = train_state.TrainState.apply_gradients
        state: TrainState = step(self.replace(tx=bound), grads=grads, **replaced).replace(tx=self.tx)
        return state

    def refresh(self, *, batch: Any = None, value_fn: ValueFn | None = None, fosi: Fosi | None = None) -> TrainState:
        """A new estimate at the current parameters, for ``refresh="external"``.

        Args:
          batch: what ``loss_fn`` is taken on.
          value_fn: value_fn(params) -> scalar, instead of ``batch``.
          fosi: the FOSI optimizer inside ``tx``, where that is a wrapper such as ``optax.chain``.

        Returns:
          The state with the new estimate in it.

        Example:
          >>> import jax.numpy as jnp
          >>> from fosi.jax import fosi_sgd
          >>> from fosi.jax.flax import TrainState
          >>> opt = fosi_sgd(0.1, lambda w, scales: 0.5 * jnp.sum(scales * w**2), k=1, refresh="external")
          >>> state = TrainState.create(apply_fn=None, params=jnp.ones(3), tx=opt)
          >>> state = state.refresh(batch=jnp.array([1.0, 2.0, 3.0]))
          >>> print(f"{state.opt_state.eigenvalues[0]:.3f}")
          3.000
        """
        opt = _fosi(self.tx, fosi)
        return self.replace(opt_state=opt.refresh(self.opt_state, self.params, batch=batch, value_fn=value_fn))


def value_fn_nnx(loss: Callable[[Any], Any], model: Any, wrt: Any = nnx.Param) -> ValueFn:
    """A loss of the model as a ``value_fn`` of its parameters alone.

    All else in the model (running statistics, random keys) is held as it is now, so that every product of an
    estimate belongs to one and the same function, and is not changed by it.

    Args:
      loss: loss(model) -> scalar.
      model: an nnx module.
      wrt: which of its variables are the parameters: the ``wrt`` of the ``nnx.Optimizer``.

    Returns:
      What ``optimizer.update(model, grads, value_fn=…)`` and ``refresh_nnx`` take.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from fosi.jax import fosi_sgd
      >>> from fosi.jax.flax import value_fn_nnx
      >>> model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
      >>> optimizer = nnx.Optimizer(model, fosi_sgd(0.1, k=2, warmup=0), wrt=nnx.Param)
      >>> def loss(model):
      ...     return jnp.mean((model(jnp.eye(3)) - 1) ** 2)
      >>> updates = optimizer.update(model, nnx.grad(loss)(model), value_fn=value_fn_nnx(loss, model))
      >>> int(optimizer.opt_state.refreshes[...])
      1
    """
    graph, *states = nnx.split(model, wrt, ...)
    rest = nnx.as_pure(states[-1])
    return lambda params: loss(nnx.merge(graph, params, rest))


def refresh_nnx(
    optimizer: nnx.Optimizer[Any],
    model: Any,
    *,
    value_fn: ValueFn | None = None,
    batch: Any = None,
    fosi: Fosi | None = None,
) -> None:
    """A new estimate at the model's parameters, for ``refresh="external"``; changes ``optimizer`` in place.

    (The inline refresh needs no help: ``optimizer.update(model, grads, batch=batch)``, or ``value_fn=``.)

    Args:
      optimizer: an ``nnx.Optimizer`` around a FOSI optimizer.
      model: the model it trains.
      value_fn: value_fn(params) -> scalar, see ``value_fn_nnx``.
      batch: what ``loss_fn(params, batch)`` is taken on, instead of ``value_fn``.
      fosi: the FOSI optimizer inside ``optimizer.tx``, where that is a wrapper such as ``optax.chain``.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from fosi.jax import fosi_sgd
      >>> from fosi.jax.flax import refresh_nnx, value_fn_nnx
      >>> model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
      >>> def loss(model):
      ...     return jnp.mean((model(jnp.eye(3)) - 1) ** 2)
      >>> optimizer = nnx.Optimizer(model, fosi_sgd(0.1, k=2, refresh="external"), wrt=nnx.Param)
      >>> refresh_nnx(optimizer, model, value_fn=value_fn_nnx(loss, model))
      >>> int(optimizer.opt_state.refreshes[...])
      1
    """
    opt = _fosi(optimizer.tx, fosi)
    params = nnx.as_pure(nnx.state(model, optimizer.wrt))
    state = opt.refresh(nnx.as_pure(optimizer.opt_state), params, batch=batch, value_fn=value_fn)
    nnx.update(optimizer.opt_state, nnx.state(state))


def _fosi(tx: Any, given: Fosi | None) -> Fosi:
    found = tx if given is None else given
    if not isinstance(found, Fosi):
        raise TypeError(
            f"the optimizer {type(found).__name__} is not FOSI's and cannot be refreshed: where it is a "
            "wrapper such as optax.chain, name the FOSI optimizer inside it with fosi="
        )
    return found
