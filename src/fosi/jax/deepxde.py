"""FOSI with DeepXDE's JAX backend: a callback that refreshes, since DeepXDE owns the loop and its jitted step.

DeepXDE calls ``update(grads, state)`` without parameters: put ``fosi.jax.without_params`` around the optimizer.
DeepXDE itself is not imported, so that its choice of a backend stays the user's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from fosi.jax.own_params import OwnParams
from fosi.jax.transform import Fosi, own_state
from fosi.schedule import Schedule


class RefreshCallback:
    """Refreshes the FOSI optimizer of a ``deepxde.Model``, before the iterations for which it is due.

    The curvature is that of the total training loss, loss weights included, at the parameters as they are
    (``external_trainable_variables`` among them) and on the training points of the model's train state. Those are the
    previous iteration's, since DeepXDE draws new ones only after its callbacks were called: the very points of the
    coming step where they are fixed, an earlier sample where they are drawn anew.

    Args:
      fosi: the FOSI optimizer inside the model's, where that is a wrapper such as ``optax.chain``.

    Example:
      With ``data`` and ``net`` of DeepXDE's::

        model = deepxde.Model(data, net)
        model.compile(without_params(fosi_adam(1e-3, k=10, refresh="external")))
        model.train(iterations=1000, callbacks=[RefreshCallback()])
    """

    def __init__(self, fosi: Fosi | None = None) -> None:
        """See the class."""
        if fosi is not None and not isinstance(fosi, Fosi):
            raise TypeError(f"fosi must be an optimizer of fosi.jax or None, got {type(fosi).__name__}")
        self.fosi = fosi
        self.model: Any = None
        self._schedule: Schedule | None = None
        self._step = 0
        self._losses: Any = None
        self._refresh: Callable[..., Any] | None = None

    def set_model(self, model: Any) -> None:
        """Takes the model that is about to be trained."""
        if not hasattr(model, "opt_state"):
            raise TypeError(
                "model must be a deepxde.Model on DeepXDE's backend jax (DDE_BACKEND=jax), "
                f"got {type(model).__name__}; for its backend pytorch there is fosi.torch.deepxde"
            )
        self.model = model

    def on_train_begin(self) -> None:
        """Finds out where the optimizer stands; reading its counter in every iteration would wait for the device."""
        opt = self._optimizer()
        self._schedule = opt.schedule(self.model.params)
        self._step = int(own_state(self.model.opt_state).count)
        if self._losses is not self.model.outputs_losses_train:  # compile() makes a new one: other weights, other loss
            self._losses = self.model.outputs_losses_train
            self._refresh = _compiled(opt, self._losses)

    def on_batch_begin(self) -> None:
        """Refreshes if it is due."""
        if self._schedule is None or self._refresh is None:
            return
        if self._schedule.due(self._step):
            model, points = self.model, self.model.train_state
            model.opt_state = self._refresh(model.opt_state, model.params, points.X_train, points.y_train)
        self._step += 1

    def _nothing(self) -> None:
        """DeepXDE calls every callback at each of these."""

    init = on_epoch_begin = on_epoch_end = on_batch_end = on_train_end = _nothing
    on_predict_begin = on_predict_end = _nothing

    def _optimizer(self) -> Fosi:
        opt = self.model.opt
        found = self.fosi or (opt.inner if isinstance(opt, OwnParams) else opt)
        if not isinstance(found, Fosi):
            raise TypeError(
                f"the model's optimizer {type(found).__name__} is not FOSI's and cannot be refreshed: compile the "
                'model with without_params(fosi_adam(1e-3, refresh="external")), and where there is a wrapper inside '
                "such as optax.chain, name the FOSI optimizer with RefreshCallback(fosi=...)"
            )
        if found.external:
            return found
        raise ValueError(
            "RefreshCallback needs an optimizer with refresh='external', got refresh='inline', which would refresh "
            "inside DeepXDE's step, where the training points cannot be had"
        )


def _compiled(opt: Fosi, losses: Callable[..., Any]) -> Callable[..., Any]:
    """A refresh compiled once: of a new ``value_fn`` in each call a new one would be compiled."""

    @jax.jit
    def refresh(state: Any, params: Any, inputs: Any, targets: Any) -> Any:
        return opt.refresh(state, params, value_fn=lambda p: losses(p, inputs, targets)[1].sum())

    return refresh
