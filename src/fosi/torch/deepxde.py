"""FOSI with DeepXDE's PyTorch backend: the training loss of a ``deepxde.Model``, for a refresh to differentiate.

DeepXDE owns the loop, and the closure that it hands to ``step()`` has run backward and freed its graph when it returns:
the curvature needs a loss of its own. DeepXDE itself is not imported, so that its choice of a backend stays the user's.
"""

from __future__ import annotations

import logging
from typing import Any

from torch import Tensor, nn

from fosi.torch.curvature import Closure
from fosi.torch.lbfgs import FosiLBFGS
from fosi.torch.optimizer import FOSI

_log = logging.getLogger("fosi")


def curvature_loss(model: Any) -> Closure:
    """The total training loss of a ``deepxde.Model`` as a function without arguments.

    It is the loss that the coming step descends, on the points of this very iteration (new ones after
    ``PDEPointResampler``, ``add_anchors`` or a batch), with the loss weights and the auxiliary variables: all is read
    when it is called. It may therefore be made before ``compile()``, and outlives a second ``compile()``.

    An optimizer that DeepXDE is handed ready made, as it is FOSI, gets nothing from ``compile()`` but ``decay``: the
    learning rate, ``external_trainable_variables`` and the strength of an L2 regularizer must be given to the base.
    Where one of the last two is missing, a line in the log says so at the first refresh.

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

    def loss() -> Tensor:
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
        losses = model.outputs_losses_train(points.X_train, points.y_train, points.train_aux_vars)[1]
        total: Tensor = losses.sum()
        return total

    return loss


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
