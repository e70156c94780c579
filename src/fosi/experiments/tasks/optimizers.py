"""The optimizers of the training tasks in JAX, with the paper's settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import optax
import optax.contrib

from fosi import Ema
from fosi.experiments.tasks import settings
from fosi.experiments.tasks.newton_cg import newton_cg
from fosi.experiments.tasks.settings import MOMENTUM, NAMES, WEIGHT_DECAY
from fosi.experiments.tasks.soap import soap
from fosi.experiments.tasks.task import Task
from fosi.jax import Fosi, Layered, ModelLoss, fosi_adam, fosi_adamw, fosi_lbfgs, fosi_sgd, in_layers
from fosi.jax import fosi as around
from fosi.schedule import NEVER_AGAIN

__all__ = ["NAMES", "Built", "Leg", "build"]


class Leg(NamedTuple):
    """An optimizer that takes the steps from one on, until the next takes over: Adam, say, and then L-BFGS.

    Attributes:
      transform: what makes updates of gradients, clipping included.
      fosi: the FOSI inside it, or what else is estimated, if there is any; it knows when a refresh is due, counted from
        its first step.
      since: its first step. There it begins anew, with ``init``, where the last one has arrived.
      searches: whether ``update`` wants the loss too, as a function, for a line search or for its Hessian.
      multiplies: whether ``update`` wants the batch too, for products with Gauss and Newton's matrix.
      remembers: whether its state has the loss and the gradient where a line search ended.
    """

    transform: optax.GradientTransformationExtraArgs
    fosi: Fosi | Layered | None = None
    since: int = 0
    searches: bool = False
    multiplies: bool = False
    remembers: bool = False


@dataclass(frozen=True)
class Built:
    """An optimizer for a task.

    Attributes:
      name: one of ``NAMES``.
      rate: the base's learning rate; 1 where a line search finds it.
      legs: what takes the steps: one, or two of which the second goes on where the first has arrived.
    """

    name: str
    rate: float
    legs: tuple[Leg, ...]


def build(
    name: str,
    task: Task,
    loss: Callable[..., Any],
    steps_a_round: int,
    rate_factor: float = 1.0,
    model: ModelLoss | None = None,
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
      model: the loss as a model and a convex loss of its outputs, without which there are no newton-cg and no layers.
      **options: FOSI's settings in the place of the task's; those of ``optax.lbfgs``, ``newton_cg``, ``soap``,
        ``optax.contrib.muon`` and ``sophia``; ``switch_at``, which must be given where one comes after another: how
        many steps are the first's; ``layers`` of what searches: so many steps between two estimates
        of its coordinates.
    """
    settings.check(name)
    if name == "kfac":
        raise ValueError("optimizer is 'kfac', which is no transformation of gradients: train with a KfacEngine")
    if name in settings.SECONDS:
        settings.check_no_rate(name, rate_factor)
        return Built(name, 1.0, (_searching(name, task, loss, model, options),))
    if name in settings.RELAYS:
        return _relay(name, task, loss, steps_a_round, rate_factor, model, options)
    if name in settings.RATES:
        rate = rate_factor * settings.RATES[name]
        peer = _peer(name, rate, rate_factor, options)
        return Built(name, rate, (Leg(_clipped(task, peer), searches=name == "sophia"),))
    base, rate, given = settings.settle(name, task, steps_a_round, rate_factor, options)
    fosi = None if given is None else _fosi(base, rate, loss, {**_outside(loss), **given})
    made = _base(base, rate) if fosi is None else fosi
    return Built(name, rate, (Leg(_clipped(task, made), fosi),))


def _relay(
    name: str,
    task: Task,
    loss: Callable[..., Any],
    steps_a_round: int,
    rate_factor: float,
    model: ModelLoss | None,
    options: dict[str, Any],
) -> Built:
    parts = settings.relay(name, options)
    first = build(parts.first, task, loss, steps_a_round, rate_factor, **parts.given)
    goes_on = _searching(parts.second, task, loss, model, parts.then)._replace(since=parts.at)
    return Built(name, first.rate, (*first.legs, goes_on))


def _clipped(task: Task, made: Any) -> optax.GradientTransformationExtraArgs:
    return optax.with_extra_args_support(made if task.clip is None else optax.chain(optax.clip(task.clip), made))


def _outside(loss: Any) -> dict[str, Any]:
    """That refreshes are the engine's, and what they are made of."""
    operator = {"curvature": "gauss_newton"} if isinstance(loss, ModelLoss) else {"has_aux": True}
    return {"refresh": "external", **operator}


def _searching(name: str, task: Task, loss: Any, model: ModelLoss | None, options: dict[str, Any]) -> Leg:
    # Not clipped: pairs of steps and clipped gradients say nothing of the curvature, nor does a model of the loss fit.
    if name == "newton-cg":
        if model is None:
            raise ValueError(f"{name} wants model: the loss as a model and a convex loss of its outputs, got None")
        return Leg(newton_cg(model, **options), searches=True, multiplies=True)
    options = {"memory_size": task.lbfgs_memory, **options}
    every = options.pop("layers", None)
    if every is not None:
        return _layered(name, task, loss, model, every, options)
    if name == "lbfgs":
        if "code" in options:
            raise ValueError(f"code is {options['code']!r}, of which there is a choice in PyTorch only: leave it out")
        made = optax.lbfgs(**options) if task.fosi is None else _fast_lbfgs(**options)
        return Leg(made, searches=True, remembers=True)
    fosi = _fosi_lbfgs(loss, options)
    return Leg(optax.with_extra_args_support(fosi), fosi, searches=True, remembers=True)


def _fosi_lbfgs(loss: Any, options: dict[str, Any]) -> Fosi:
    return fosi_lbfgs(loss, **{**settings.AROUND_LBFGS, **_outside(loss), **options})


def _layered(name: str, task: Task, loss: Any, model: ModelLoss | None, every: int, options: dict[str, Any]) -> Leg:
    """The same in coordinates of the layers, which are estimated so often; FOSI's estimates come with them."""
    if model is None:
        raise ValueError(f"layers is {every} for {name}, which wants model: a loss of the model's outputs, got None")
    if not isinstance(every, int) or every < 1:
        raise ValueError(f"layers is {every}; give 1 or more steps between two estimates, a whole number")
    if unused := [key for key in ("refresh_every", "warmup") if key in options]:
        raise ValueError(f"{unused[0]} is {options[unused[0]]}, but estimates are made as layers says: leave it out")
    if name == "fosi-lbfgs" and not isinstance(loss, ModelLoss):
        raise ValueError(f"layers is {every}, with which FOSI estimates Gauss and Newton's matrix: give operator too")

    def make(loss: ModelLoss) -> optax.GradientTransformation:
        return _fosi_lbfgs(loss, options) if name == "fosi-lbfgs" else _never_estimating(**options)

    made = in_layers(make, model, every=every)
    return Leg(made, made, searches=True, remembers=True)


def _fast_lbfgs(memory_size: int, scaling: Any = "usual") -> optax.GradientTransformationExtraArgs:
    """L-BFGS by the code of FOSI around it, which never estimates: the same steps as optax's, several times sooner.

    So a ratio of seconds to it is not of the code, nor of how the line search bears noise; where it also has the
    scaling that FOSI around it has, and comes after as many steps of another, it is of FOSI's metric alone.
    """
    made = _never_estimating(memory_size, scaling)
    return optax.GradientTransformationExtraArgs(made.init, made.update)


def _never_estimating(memory_size: int, scaling: Any = "usual") -> Fosi:
    never: dict[str, Any] = {"k": 1, "num_matvecs": 2, "warmup": NEVER_AGAIN, "refresh": "external"}
    return fosi_lbfgs(memory_size=memory_size, scaling=scaling, **never)


def _peer(name: str, rate: float, rate_factor: float, options: dict[str, Any]) -> Any:
    match name:
        case "muon":
            # What is no matrix has Adam's rate, as where Adam is alone.
            adam = options.pop("adam_learning_rate", settings.ADAM_RATE)
            return optax.contrib.muon(rate, adam_learning_rate=rate_factor * adam, **options)
        case "soap":
            return soap(rate, **options)
        case _:
            return _sophia(rate, **options)


def _sophia(rate: float, **options: Any) -> optax.GradientTransformationExtraArgs:
    # Without weight decay, as the others: all of them are to minimise the same loss.
    made = optax.contrib.sophia(rate, **{"weight_decay": 0.0, **options})

    def update(updates: Any, state: Any, params: Any = None, *, value_fn: Any, **_: Any) -> Any:
        return made.update(updates, state, params, obj_fn=value_fn)

    return optax.GradientTransformationExtraArgs(made.init, update)


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
        case "muon" | "soap":
            # Both average gradients as Adam does, with 0.95. Of Muon's rates the one for what is no matrix follows.
            peer = _peer(base, rate, rate / settings.RATES[base], {})
            return around(peer, loss, momentum=Ema(0.95), **given)
        case _:
            return fosi_adamw(rate, loss, weight_decay=WEIGHT_DECAY, **given)
