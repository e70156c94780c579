"""FOSI with DeepXDE's PyTorch backend: the training loss of a ``deepxde.Model``, for a refresh to differentiate.

DeepXDE owns the loop, and the closure that it hands to ``step()`` has run backward and freed its graph when it returns:
the curvature needs a loss of its own. DeepXDE itself is not imported, so that its choice of a backend stays the user's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Generator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fosi.torch.curvature import Closure, ModelLoss
from fosi.torch.lbfgs import FosiLBFGS
from fosi.torch.optimizer import FOSI

_log = logging.getLogger("fosi")


class Residual(NamedTuple):
    """One of the terms of DeepXDE's loss.

    Attributes:
      loss_fn: what ``compile()`` was given for it, mean squared error mostly.
      wanted: what should come out: zeros, for an equation.
      found: what did.
      weight: its loss weight.
    """

    loss_fn: Callable[[Any, Any], Tensor]
    wanted: Any
    found: Tensor
    weight: float


@dataclasses.dataclass(frozen=True)
class _TrainingLoss(ModelLoss):
    """The loss as DeepXDE sums it up, and the residuals that it is made of."""

    total: Closure

    def __call__(self) -> Any:
        return self.total()


def curvature_loss(model: Any) -> ModelLoss:
    """The total training loss of a ``deepxde.Model`` as a function without arguments.

    It is the loss that the coming step descends, on the points of this very iteration (new ones after
    ``PDEPointResampler``, ``add_anchors`` or a batch), with the loss weights and the auxiliary variables: all is read
    when it is called. It may therefore be made before ``compile()``, and outlives a second ``compile()``.

    An optimizer that DeepXDE is handed ready made, as it is FOSI, gets nothing from ``compile()`` but ``decay``: the
    learning rate, ``external_trainable_variables`` and the strength of an L2 regularizer must be given to the base.
    Where one of the last two is missing, a line in the log says so at the first refresh.

    It knows the residuals that the loss is made of, so that ``curvature="gauss_newton"`` takes it too, where every term
    is a loss function of ``compile()`` on one of them, as for ``deepxde.data.PDE``.

    Args:
      model: the ``deepxde.Model``, compiled or not, on DeepXDE's backend "pytorch".

    Returns:
      What ``FOSI(base, curvature_loss=...)`` and ``FOSI.refresh`` take, and those of ``FosiLBFGS``.

    Example:
      With ``data`` and ``net`` of DeepXDE's::

        model = deepxde.Model(data, net)
        base = torch.optim.Adam(net.parameters(), lr=1e-3)
        model.compile(FOSI(base, model=net, curvature_loss=curvature_loss(model), k=10))
        model.train(iterations=1000)
    """
    if not (hasattr(model, "outputs_losses_train") and hasattr(model, "train_state")):
        raise TypeError(f"model must be a deepxde.Model, got {type(model).__name__}")
    if not isinstance(getattr(model, "net", None), nn.Module):
        raise TypeError(
            f"model must have a torch.nn.Module as its net, got {type(getattr(model, 'net', None)).__name__}; choose "
            "DeepXDE's backend with DDE_BACKEND=pytorch (for its backend jax there is fosi.jax.deepxde)"
        )
    looked_at: Any = None

    def terms() -> Tensor:
        nonlocal looked_at
        if model.outputs_losses_train is None:
            raise RuntimeError("the deepxde.Model has no loss yet: call model.compile(optimizer) before a refresh")
        points = model.train_state
        if points.X_train is None:
            raise RuntimeError(
                "the deepxde.Model has no training points yet: model.train() sets them, and step() refreshes in it"
            )
        if isinstance(model.opt, (FOSI, FosiLBFGS)) and looked_at is not model.opt:
            looked_at = model.opt
            _warn_of_what_compile_leaves_out(model)
        losses: Tensor = model.outputs_losses_train(points.X_train, points.y_train, points.train_aux_vars)[1]
        return losses

    def residuals() -> list[Residual]:
        found: list[tuple[Any, Any, Any, Tensor]] = []
        with _listening(model.data, found):
            losses = terms()
        weights = model.loss_weights
        weights = [1.0] * len(found) if weights is None else [float(w) for w in weights]
        seen = [value.detach() * w for (*_, value), w in zip(found, weights, strict=False)]
        if len(seen) != len(losses) or not torch.allclose(torch.stack(seen), losses.detach(), atol=0, equal_nan=True):
            raise ValueError(
                f"curvature='gauss_newton' needs every term of the loss to be a loss function of residuals, and of the "
                f"{len(losses)} terms of {type(model.data).__name__} some are not; take curvature='hessian'"
            )
        return [Residual(f, wanted, x, w) for (f, wanted, x, _), w in zip(found, weights, strict=True)]

    def weighted(residuals: list[Residual]) -> Tensor:
        return torch.stack([r.weight * r.loss_fn(r.wanted, r.found) for r in residuals]).sum()

    return _TrainingLoss(residuals, weighted, lambda: terms().sum())


@contextlib.contextmanager
def _listening(data: Any, found: list[tuple[Any, Any, Any, Tensor]]) -> Generator[None]:
    """Within it, what ``data`` hands to its loss functions is written down: (function, wanted, found, value)."""
    own, original = vars(data).get("losses_train"), data.losses_train

    def recorded(loss_fn: Callable[[Any, Any], Tensor]) -> Callable[[Any, Any], Tensor]:
        def of(wanted: Any, x: Any) -> Tensor:
            value = loss_fn(wanted, x)
            found.append((loss_fn, wanted, x, value))
            return value

        return of

    def losses_train(targets: Any, outputs: Any, loss_fn: Any, *args: Any, **kwargs: Any) -> Any:
        each = list(map(recorded, loss_fn)) if isinstance(loss_fn, list | tuple) else recorded(loss_fn)
        return original(targets, outputs, each, *args, **kwargs)

    data.losses_train = losses_train
    try:
        yield
    finally:
        if own is None:
            del data.losses_train
        else:
            data.losses_train = own


def _warn_of_what_compile_leaves_out(model: Any) -> None:
    """DeepXDE hands these to the optimizers that it makes, and says nothing where it is given one."""
    groups = model.opt.param_groups
    trained = {id(p) for group in groups for p in group["params"]}
    missing = [i for i, v in enumerate(model.external_trainable_variables) if id(v) not in trained]
    if missing:
        _log.warning(
            "FOSI: external_trainable_variables %s of the deepxde.Model are not among the optimizer's parameters and "
            "stay as they are: give it [*net.parameters(), *variables]",
            missing,
        )
    regularizer = getattr(model.net, "regularizer", None)
    if regularizer and regularizer[0] == "l2" and not any(group.get("weight_decay") for group in groups):
        remedy = (
            "add it to the loss" if isinstance(model.opt, FosiLBFGS) else f"give the base weight_decay={regularizer[1]}"
        )
        _log.warning(
            "FOSI: the net's regularizer %r is not applied, since DeepXDE leaves it to optimizers it makes itself: %s",
            regularizer,
            remedy,
        )
