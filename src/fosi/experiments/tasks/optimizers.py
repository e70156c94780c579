"""The optimizers of the training tasks in JAX, with the paper's settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import optax

from fosi.experiments.tasks import settings
from fosi.experiments.tasks.relay import relay
from fosi.experiments.tasks.settings import MOMENTUM, NAMES, WEIGHT_DECAY
from fosi.experiments.tasks.task import Task
from fosi.jax import Fosi, ModelLoss, fosi_adam, fosi_adamw, fosi_sgd

__all__ = ["NAMES", "Built", "build"]


@dataclass(frozen=True)
class Built:
    """An optimizer for a task.

    Attributes:
      name: one of ``NAMES``.
      rate: the base's learning rate; 1 where a line search finds it.
      transform: what makes updates of gradients, clipping included.
      fosi: the FOSI inside it, which knows when a refresh is due; None for a base alone.
      searches: whether ``update`` wants the loss too, as a function, for a line search.
      until: the step from which FOSI is not in use any more; None where it always is.
    """

    name: str
    rate: float
    transform: optax.GradientTransformationExtraArgs
    fosi: Fosi | None = None
    searches: bool = False
    until: int | None = None


def build(
    name: str,
    task: Task,
    loss: Callable[..., Any],
    steps_a_round: int,
    rate_factor: float = 1.0,
    **options: Any,
) -> Built:
    """Builds an optimizer with the paper's settings for the task.

    Args:
      name: one of ``NAMES``.
      task: gives rate, warm-up, cap and clipping.
      loss: loss(params, batch) -> (scalar, aux), for FOSI's estimates; a ``ModelLoss`` for those of Gauss and Newton's
        matrix in the place of the Hessian.
      steps_a_round: in which the warm-up is counted.
      rate_factor: multiplies the rate; the control is the base alone at three times its rate.
      **options: FOSI's settings in the place of the task's; those of ``optax.lbfgs``; ``switch_at``, which must be
        given where L-BFGS comes after another: how many steps are the other's.
    """
    settings.check(name)
    if name == "kfac":
        raise ValueError("optimizer is 'kfac', which is no transformation of gradients: train with a KfacEngine")
    if name == "lbfgs":
        if rate_factor != 1:
            raise ValueError(f"rate_factor is {rate_factor:g}, but lbfgs finds its rate by a line search: give 1")
        return Built(name, 1.0, _lbfgs(task, **options), searches=True)
    if name in settings.RELAYS:
        if "switch_at" not in options:
            raise ValueError(f"{name} wants switch_at: after how many steps L-BFGS goes on")
        at = options.pop("switch_at")
        second = _lbfgs(task, **{key: options.pop(key) for key in ("memory_size",) if key in options})
        first = build(name.removesuffix(settings.THEN), task, loss, steps_a_round, rate_factor, **options)
        return replace(first, name=name, transform=relay(first.transform, second, at), searches=True, until=at)
    base, rate, given = settings.settle(name, task, steps_a_round, rate_factor, options)
    operator = {"curvature": "gauss_newton"} if isinstance(loss, ModelLoss) else {"has_aux": True}
    fosi = None if given is None else _fosi(base, rate, loss, {"refresh": "external", **operator, **given})
    made = _base(base, rate) if fosi is None else fosi
    chained = made if task.clip is None else optax.chain(optax.clip(task.clip), made)
    return Built(name, rate, optax.with_extra_args_support(chained), fosi)


def _lbfgs(task: Task, **options: Any) -> Any:
    # Not clipped: pairs of steps and clipped gradients say nothing of the curvature.
    return optax.lbfgs(**{"memory_size": task.lbfgs_memory, **options})


def _base(base: str, rate: float) -> Any:
    match base:
        case "gd":
            return optax.sgd(rate)
        case "heavy-ball":
            return optax.sgd(rate, momentum=MOMENTUM)
        case "nesterov":
            return optax.sgd(rate, momentum=MOMENTUM, nesterov=True)
        case "adam":
            return optax.adam(rate)
        case _:
            return optax.adamw(rate, weight_decay=WEIGHT_DECAY)


def _fosi(base: str, rate: float, loss: Callable[..., Any], given: dict[str, Any]) -> Fosi:
    match base:
        case "gd":
            return fosi_sgd(rate, loss, **given)
        case "heavy-ball":
            return fosi_sgd(rate, loss, momentum=MOMENTUM, **given)
        case "nesterov":
            return fosi_sgd(rate, loss, momentum=MOMENTUM, nesterov=True, **given)
        case "adam":
            return fosi_adam(rate, loss, **given)
        case _:
            return fosi_adamw(rate, loss, weight_decay=WEIGHT_DECAY, **given)
