"""The optimizers of the training tasks in PyTorch, with the settings of those in JAX."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn, optim

from fosi.experiments.tasks import settings
from fosi.experiments.tasks.settings import MOMENTUM, WEIGHT_DECAY
from fosi.quasi_newton import Scaling
from fosi.schedule import NEVER_AGAIN
from fosi.torch import FOSI, FosiLBFGS

if TYPE_CHECKING:  # it brings JAX with it
    from fosi.experiments.tasks.task import Task

Parameters = list[nn.Parameter]


class Leg(NamedTuple):
    """An optimizer that takes the steps from one on, until the next takes over: Adam, say, and then L-BFGS.

    Attributes:
      make: make(parameters, model) -> the optimizer, before its first step.
      rate: the base's learning rate; 1 where a line search finds it.
      estimates: whether FOSI is in it.
      since: its first step. There it is made, where the last one has arrived.
      searches: whether it wants a closure, and takes several steps a call.
    """

    make: Callable[[Parameters, nn.Module], optim.Optimizer]
    rate: float
    estimates: bool
    since: int = 0
    searches: bool = False


def build(
    name: str, task: Task, steps_a_round: int, full_batch: bool, rate_factor: float, options: dict[str, Any]
) -> tuple[Leg, ...]:
    """Returns what takes the steps: one, or two of which the second goes on where the first has arrived.

    Args:
      name: of the optimizer.
      task: gives rate, warm-up and cap.
      steps_a_round: in which the warm-up is counted.
      full_batch: whether every step sees all data, which a search needs.
      rate_factor: multiplies the base's learning rate.
      options: FOSI's settings in the place of the task's; ``memory_size``, ``scaling`` and ``code`` of L-BFGS, whose
        ``code="torch"`` is ``torch.optim.LBFGS``; ``switch_at``, where one comes after another.
    """
    settings.check(name)
    if not settings.in_torch(name):
        raise ValueError(
            f"optimizer is {name!r}, which is there only in JAX; in PyTorch give a base, lbfgs, adam-lbfgs, or "
            "FOSI around them"
        )
    if settings.second_of(name) is not None and not full_batch:
        raise ValueError(f"optimizer is {name!r}, which wants all data in every step; {task.name} has batches")
    if name in settings.RELAYS:
        parts = settings.relay(name, options)
        (first,) = build(parts.first, task, steps_a_round, full_batch, rate_factor, parts.given)
        return first, _searching(parts.second, task, parts.then)._replace(since=parts.at)
    if name in settings.SECONDS:
        settings.check_no_rate(name, rate_factor)
        return (_searching(name, task, options),)
    base, rate, given = settings.settle(name, task, steps_a_round, rate_factor, options)

    def make(params: Parameters, model: nn.Module) -> optim.Optimizer:
        made = _base(base, params, rate)
        # FOSI reads the base's momentum, and the closed form of its best rate, off the base.
        return made if given is None else FOSI(made, model, **given)

    return (Leg(make, rate, given is not None),)


def _searching(name: str, task: Task, options: dict[str, Any]) -> Leg:
    return (_lbfgs if name == "lbfgs" else _fosi_lbfgs)(**{"memory_size": task.lbfgs_memory, **options})


def _lbfgs(memory_size: int, scaling: Scaling | None = None, code: str = "fosi") -> Leg:
    """L-BFGS by the code of FOSI around it, so that a ratio of seconds is not of the code, or by torch's own."""
    if code not in ("fosi", "torch"):
        raise ValueError(f"code is {code!r}; give fosi or torch")
    if code == "torch" and scaling is not None:
        raise ValueError(f"scaling is {scaling!r}, which torch.optim.LBFGS does not have: give code='fosi'")
    never: dict[str, Any] = {"k": 1, "num_matvecs": 2, "warmup": NEVER_AGAIN, "scaling": scaling or "usual"}

    def make(params: Parameters, model: nn.Module) -> optim.Optimizer:
        return (
            _of_torch(params, memory_size) if code == "torch" else FosiLBFGS(params, history_size=memory_size, **never)
        )

    return Leg(make, 1.0, estimates=False, searches=True)


def _fosi_lbfgs(memory_size: int, **options: Any) -> Leg:
    given = {**settings.AROUND_LBFGS, **options}

    def make(params: Parameters, model: nn.Module) -> optim.Optimizer:
        return FosiLBFGS(params, history_size=memory_size, model=model, **given)

    return Leg(make, 1.0, estimates=True, searches=True)


def _of_torch(params: Parameters, pairs: int) -> optim.Optimizer:
    # Its tolerances would end it long before float32 does, and there is no cap on what a search may evaluate.
    return optim.LBFGS(
        params,
        history_size=pairs,
        line_search_fn="strong_wolfe",
        tolerance_grad=0.0,
        tolerance_change=0.0,
        max_eval=10**9,
    )


def _base(base: str, params: Parameters, rate: float) -> optim.Optimizer:
    make: dict[str, Callable[[], optim.Optimizer]] = {
        "gd": lambda: optim.SGD(params, rate),
        "heavy-ball": lambda: optim.SGD(params, rate, momentum=MOMENTUM),
        "nesterov": lambda: optim.SGD(params, rate, momentum=MOMENTUM, nesterov=True),
        "adam": lambda: optim.Adam(params, rate),
        "adamw": lambda: optim.AdamW(params, rate, weight_decay=WEIGHT_DECAY),
    }
    return make[base]()
