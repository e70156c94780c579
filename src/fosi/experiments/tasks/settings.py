"""The optimizers of the training tasks by name and the settings for them, the same in every framework."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

from fosi import presets
from fosi.options import Curvature

if TYPE_CHECKING:  # it brings JAX with it
    from fosi.experiments.tasks.task import Task

BASES = ("gd", "heavy-ball", "nesterov", "adam", "adamw")
RATES = {"muon": 0.02, "soap": 3e-3, "sophia": 1e-3}
"""Peers that take one gradient a step, with the rates that their authors begin with; Sophia's is Adam's here."""
SECOND_ORDER = ("kfac", "lbfgs", "newton-cg")
PEERS = (*SECOND_ORDER, *RATES)
"""What FOSI is compared with. Their target is Heavy-Ball's."""
AROUND = ("muon", "soap")
"""Those of them that FOSI can be around too, in JAX; its target is then theirs."""
SECONDS = {
    "fosi-lbfgs": ("memory_size", "layers"),
    "lbfgs": ("memory_size", "scaling", "code", "layers"),
    "newton-cg": ("damping", "max_cg", "tolerance", "warm_start", "damping_factor", "min_damping"),
}
"""What can go on where another has arrived, with its settings: ``-lbfgs`` after the other's name. Their steps end when
a search does, so one need not take as long as the next."""
RELAYS = tuple(f"{first}-{second}" for second in SECONDS for first in ("adam", "fosi-adam", "soap"))
NAMES = (*BASES, *(f"fosi-{base}" for base in (*BASES, *AROUND, "lbfgs")), *PEERS, *RELAYS)
AROUND_LBFGS = presets.deterministic("lbfgs")
"""FOSI's settings around L-BFGS."""
ADAM_RATE = 1e-3
MOMENTUM = 0.9
WEIGHT_DECAY = 1e-4
"""Of AdamW. The frameworks' own defaults differ."""


class Settings(NamedTuple):
    """What an optimizer is built with.

    Attributes:
      base: one of ``BASES``, or of ``AROUND``.
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


def with_fosi(name: str) -> bool:
    """Whether FOSI is in it, first or second."""
    return "fosi" in name.split("-")


def without_fosi(name: str) -> str:
    """The same optimizer, or one after another, without FOSI."""
    return name.replace("fosi-", "")


def is_first_order(name: str) -> bool:
    """Whether it is a base, FOSI around one, or a peer of theirs: a step of it takes one gradient."""
    return name.removeprefix("fosi-") in (*BASES, *RATES)


def is_wrappable(name: str) -> bool:
    """Whether it is a base, or FOSI around one."""
    return name.removeprefix("fosi-") in BASES


def in_torch(name: str) -> bool:
    """Whether it is there in PyTorch too: a base, L-BFGS, L-BFGS after Adam, and FOSI around each of them."""
    return without_fosi(name).removesuffix("-lbfgs") in (*BASES, "lbfgs")


def check_operator(operator: str, name: str) -> None:
    """Raises where there is no such matrix to estimate, or no FOSI to estimate it."""
    if operator not in get_args(Curvature):
        raise ValueError(f"operator is {operator!r}; give {' or '.join(get_args(Curvature))}")
    if operator != "hessian" and not with_fosi(name):
        raise ValueError(f"operator is {operator!r}, which is a setting of FOSI; {name} has none")


def second_of(name: str) -> str | None:
    """What searches: the optimizer itself, or the one that goes on in a relay; None where nothing does."""
    return next((second for second in SECONDS if name == second or (name in RELAYS and name.endswith(second))), None)


def check_no_rate(name: str, rate_factor: float) -> None:
    """Raises where a rate is given to one of ``SECONDS``."""
    if rate_factor != 1:
        raise ValueError(f"rate_factor is {rate_factor:g}, but {name} finds its rate by a line search: give 1")


class Relay(NamedTuple):
    """One optimizer after another.

    Attributes:
      first: the name of the one.
      second: that of the other, which searches.
      at: how many steps are the first's.
      given: the settings of the first.
      then: those of the second.
    """

    first: str
    second: str
    at: int
    given: dict[str, Any]
    then: dict[str, Any]


def relay(name: str, options: Mapping[str, Any]) -> Relay:
    """Which of the options for one of ``RELAYS`` are whose.

    Where FOSI is in both they have the same of it, but for α, which is 1 where a search follows.
    """
    second = second_of(name)
    assert second is not None
    if "switch_at" not in options:
        raise ValueError(f"{name} wants switch_at: after how many steps {second} goes on")
    at = options["switch_at"]
    if not isinstance(at, int) or at < 1:
        raise ValueError(f"switch_at is {at}; give 1 or more steps, a whole number, to the first optimizer")
    first, its_own = name.removesuffix(f"-{second}"), ("switch_at", *SECONDS[second])
    given = {key: value for key, value in options.items() if key not in its_own}
    then = {key: options[key] for key in SECONDS[second] if key in options}
    if with_fosi(second):
        both = with_fosi(first)
        then |= {key: value for key, value in given.items() if not (both and key == "alpha")}
        given = given if both else {}
    return Relay(first, second, at, given, then)


def of_relay(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that say how a second optimizer goes on, which FOSI and its base must have alike."""
    second = second_of(name)
    if second is None or (name not in RELAYS and not with_fosi(name)):
        return {}
    return {key: options[key] for key in ("switch_at", *SECONDS[second]) if key in options}


def for_one(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Those of options for several optimizers that are for this one: FOSI's, and those of what searches."""
    others = {"switch_at", *(key for keys in SECONDS.values() for key in keys)}
    ours = {key: value for key, value in options.items() if key not in others} if with_fosi(name) else {}
    own = {key: options[key] for key in SECONDS.get(name, ()) if key in options}
    return {**ours, **own, **of_relay(name, options)}


def settle(name: str, task: Task, steps_a_round: int, rate_factor: float, options: dict[str, Any]) -> Settings:
    """Returns the settings of a base, or of FOSI around one, for the task: the paper's, unless it has its own.

    Args:
      name: a base of ``NAMES``, or FOSI around one or around a peer: the others have settings of their own.
      task: gives rate, warm-up and cap.
      steps_a_round: in which the warm-up is counted.
      rate_factor: multiplies the rate; the control is the base alone at three times its rate.
      options: FOSI's settings in the place of those.
    """
    check(name)
    base = name.removeprefix("fosi-")
    if base not in BASES and (name == base or base not in AROUND):
        raise ValueError(f"optimizer is {name!r}, which is neither a base ({', '.join(BASES)}) nor FOSI around one")
    adam = base.startswith("adam") or base in AROUND  # the rate of neither has a closed form to scale it by
    rate = rate_factor * RATES.get(base, ADAM_RATE if adam else task.heavy_ball_rate)
    if name == base:
        if options:
            raise ValueError(f"{', '.join(options)} given, which are settings of FOSI; {name} has none")
        return Settings(base, rate, None)
    cap = {} if adam else {"max_lr_scale": task.max_lr_scale}
    if task.fosi is not None:
        return Settings(base, rate, {**task.fosi, **cap, **options})
    warmup = None if task.warmup_rounds is None else task.warmup_rounds * steps_a_round
    return Settings(base, rate, {**presets.paper(), "warmup": warmup, **cap, **options})
