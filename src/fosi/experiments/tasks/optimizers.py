"""The optimizers of the training tasks by name, with the paper's settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import optax

from fosi import presets
from fosi.experiments.tasks.task import Task
from fosi.jax import Fosi, fosi_adam, fosi_adamw, fosi_sgd

BASES = ("gd", "heavy-ball", "nesterov", "adam", "adamw")
SECOND_ORDER = ("kfac", "lbfgs")
NAMES = (*BASES, *(f"fosi-{base}" for base in BASES), *SECOND_ORDER)
ADAM_RATE = 1e-3
MOMENTUM = 0.9


@dataclass(frozen=True)
class Built:
    """An optimizer for a task.

    Attributes:
      name: one of ``NAMES``.
      rate: the base's learning rate; 1 where a line search finds it.
      transform: what makes updates of gradients, clipping included.
      fosi: the FOSI inside it, which knows when a refresh is due; None for a base alone.
      searches: whether ``update`` wants the loss too, as a function, for a line search.
    """

    name: str
    rate: float
    transform: optax.GradientTransformationExtraArgs
    fosi: Fosi | None = None
    searches: bool = False


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
      loss: loss(params, batch) -> (scalar, aux), for FOSI's estimates.
      steps_a_round: in which the warm-up is counted.
      rate_factor: multiplies the rate; the control is the base alone at three times its rate.
      **options: FOSI's settings in the place of the paper's; those of ``optax.lbfgs``.
    """
    if name not in NAMES:
        raise ValueError(f"optimizer is {name!r}; give one of {', '.join(NAMES)}")
    if name == "lbfgs":
        if rate_factor != 1:
            raise ValueError(f"rate_factor is {rate_factor:g}, but lbfgs finds its rate by a line search: give 1")
        # Not clipped: pairs of steps and clipped gradients say nothing of the curvature.
        return Built(name, 1.0, optax.lbfgs(**{"memory_size": 10, **options}), searches=True)
    base = name.removeprefix("fosi-")
    rate = rate_factor * (ADAM_RATE if base.startswith("adam") else task.heavy_ball_rate)
    fosi = None
    if name == base:
        if options:
            raise ValueError(f"{', '.join(options)} given, which are settings of FOSI; {name} has none")
        made = _base(base, rate)
    else:
        cap = {} if base.startswith("adam") else {"max_lr_scale": task.max_lr_scale}
        warmup = None if task.warmup_rounds is None else task.warmup_rounds * steps_a_round
        settings = {**presets.paper(), "has_aux": True, "refresh": "external", "warmup": warmup, **cap, **options}
        made = fosi = _fosi(base, rate, loss, settings)
    chained = made if task.clip is None else optax.chain(optax.clip(task.clip), made)
    return Built(name, rate, optax.with_extra_args_support(chained), fosi)


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
            return optax.adamw(rate)


def _fosi(base: str, rate: float, loss: Callable[..., Any], settings: dict[str, Any]) -> Fosi:
    match base:
        case "gd":
            return fosi_sgd(rate, loss, **settings)
        case "heavy-ball":
            return fosi_sgd(rate, loss, momentum=MOMENTUM, **settings)
        case "nesterov":
            return fosi_sgd(rate, loss, momentum=MOMENTUM, nesterov=True, **settings)
        case "adam":
            return fosi_adam(rate, loss, **settings)
        case _:
            return fosi_adamw(rate, loss, **settings)
