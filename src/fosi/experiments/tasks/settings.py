"""The optimizers of the training tasks by name and the settings for them, the same in every framework."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from fosi import presets

if TYPE_CHECKING:  # it brings JAX with it
    from fosi.experiments.tasks.task import Task

BASES = ("gd", "heavy-ball", "nesterov", "adam", "adamw")
SECOND_ORDER = ("kfac", "lbfgs")
THEN = "-lbfgs"
"""After a name: L-BFGS goes on where that one has arrived."""
RELAYS = (f"adam{THEN}", f"fosi-adam{THEN}")
_OF_RELAY = ("switch_at", "memory_size")
NAMES = (*BASES, *(f"fosi-{base}" for base in BASES), *SECOND_ORDER, *RELAYS)
ADAM_RATE = 1e-3
MOMENTUM = 0.9
WEIGHT_DECAY = 1e-4
"""Of AdamW. The frameworks' own defaults differ."""


class Settings(NamedTuple):
    """What an optimizer is built with.

    Attributes:
      base: one of ``BASES``.
      rate: its learning rate.
      fosi: keyword arguments of the FOSI around it; None for the base alone.
    """

    base: str
    rate: float
    fosi: dict[str, Any] | None


def check(name: str) -> None:
    """Raises where no optimizer has that name."""
    if name not in NAMES:
        raise ValueError(f"optimizer is {name!r}; give one of {', '.join(NAMES)}")


def is_first_order(name: str) -> bool:
    """Whether it is a base, or FOSI around one: a step of it takes one gradient."""
    return name.removeprefix("fosi-") in BASES


def of_relay(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that say how L-BFGS goes on after another, which FOSI and its base must have alike."""
    return {key: options[key] for key in _OF_RELAY if key in options} if name in RELAYS else {}


def for_one(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Those of options for several optimizers that are for this one: FOSI's, and how L-BFGS goes on after another."""
    ours = {key: value for key, value in options.items() if key not in _OF_RELAY} if name.startswith("fosi-") else {}
    return {**ours, **of_relay(name, options)}


def settle(name: str, task: Task, steps_a_round: int, rate_factor: float, options: dict[str, Any]) -> Settings:
    """Returns the settings of a base, or of FOSI around one, for the task: the paper's, unless it has its own.

    Args:
      name: a base of ``NAMES``, or FOSI around one: the others have settings of their own.
      task: gives rate, warm-up and cap.
      steps_a_round: in which the warm-up is counted.
      rate_factor: multiplies the rate; the control is the base alone at three times its rate.
      options: FOSI's settings in the place of those.
    """
    check(name)
    base = name.removeprefix("fosi-")
    if base not in BASES:
        raise ValueError(f"optimizer is {name!r}, which is neither a base ({', '.join(BASES)}) nor FOSI around one")
    adam = base.startswith("adam")
    rate = rate_factor * (ADAM_RATE if adam else task.heavy_ball_rate)
    if name == base:
        if options:
            raise ValueError(f"{', '.join(options)} given, which are settings of FOSI; {name} has none")
        return Settings(base, rate, None)
    cap = {} if adam else {"max_lr_scale": task.max_lr_scale}
    if task.fosi is not None:
        return Settings(base, rate, {**task.fosi, **cap, **options})
    warmup = None if task.warmup_rounds is None else task.warmup_rounds * steps_a_round
    return Settings(base, rate, {**presets.paper(), "warmup": warmup, **cap, **options})
