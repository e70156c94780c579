"""What FOSI reads off the base optimizer: its momentum, its learning-rate rule and its kind of weight decay."""

from __future__ import annotations

import functools
import logging
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, optim

from fosi.momentum import Ema, Trace
from fosi.options import Momentum

_log = logging.getLogger("fosi")

DecayKind = Literal["coupled", "decoupled", "unknown"]

# Steps ask again and again for the same ones, and making one is checking it.
_ema, _trace = functools.lru_cache(Ema), functools.lru_cache(Trace)


def check(base: Any) -> None:
    """Raises where ``base`` is not an optimizer that FOSI can be put around."""
    if not isinstance(base, optim.Optimizer):
        raise TypeError(
            f"base must be a torch.optim.Optimizer such as torch.optim.Adam(model.parameters(), lr=1e-3), got {base!r}"
        )
    name = type(base).__name__
    if isinstance(base, optim.LBFGS):
        raise TypeError(
            f"base={name} cannot be used: it evaluates the loss by itself several times a step; take "
            "fosi.torch.FosiLBFGS(params, curvature_loss=...) as the optimizer"
        )
    if isinstance(base, optim.SparseAdam):
        raise TypeError(f"base={name} cannot be used: it takes sparse gradients only, and FOSI's are dense")
    for i, group in enumerate(base.param_groups):
        check_group(i, group)
    if any(group.get("weight_decay") and decay_kind(base, group) == "unknown" for group in base.param_groups):
        _log.warning(
            "FOSI: whether %s decays weights through the gradient or apart from it is not known; inside the subspace "
            "its decay is lost. Use a torch.optim optimizer, or put the penalty into the loss",
            name,
        )


def check_group(index: int, group: dict[str, Any]) -> None:
    """Raises for settings under which a step is not a descent step that can be corrected afterwards."""
    for key, instead in (("maximize", "minimise the negative of the loss"), ("differentiable", "use the base alone")):
        if group.get(key):
            raise ValueError(f"{key}=True in param_groups[{index}] of the base is not supported; {instead}")


def is_linear(base: optim.Optimizer) -> bool:
    """Whether a step is −lr times one linear combination of gradients: SGD with the same settings in all groups."""
    if type(base) is not optim.SGD:
        return False
    first = base.param_groups[0]
    keys = ("lr", "momentum", "nesterov", "dampening")
    return all(group is first or all(group[key] == first[key] for key in keys) for group in base.param_groups)


def momentum_rule(base: optim.Optimizer) -> Momentum:
    """The base's own linear combination of gradients, as far as its param_groups tell (§3.4)."""
    rules = [_group_rule(base, group) for group in base.param_groups]
    if any(rule != rules[0] for rule in rules[1:]):
        raise ValueError(
            f"the base's param_groups have different momentum ({', '.join(map(str, rules))}), and the Newton part "
            "spans them all: name one with momentum=fosi.Trace(decay), fosi.Ema(decay) or None"
        )
    return rules[0]


def _group_rule(base: optim.Optimizer, group: dict[str, Any]) -> Momentum:
    if isinstance(base, optim.Muon):  # an average, though it goes by the name of momentum
        return _ema(float(group["momentum"]))
    if "betas" in group:
        return _ema(float(group["betas"][0]))
    if group.get("momentum"):
        if group.get("dampening"):
            raise ValueError(
                f"dampening={group['dampening']} is supported for SGD with one learning rate and momentum for all "
                "parameters only; name the Newton part's momentum with momentum=fosi.Trace(decay)"
            )
        return _trace(float(group["momentum"]), bool(group.get("nesterov", False)))
    return None


def learning_rate_rule(base: optim.Optimizer) -> str | None:
    """The closed form of §3.6 that belongs to the base: SGD's, by its momentum; None for all others."""
    if not isinstance(base, optim.SGD):
        return None
    group = base.param_groups[0]
    if not group["momentum"]:
        return "gd"
    return "nesterov" if group["nesterov"] else "heavy_ball"


def decay_kind(base: optim.Optimizer, group: dict[str, Any]) -> DecayKind:
    """Whether a group's weight decay is part of the gradient (an L2 penalty) or a shrinking of its own."""
    if isinstance(base, (optim.AdamW, optim.Muon, optim.Adafactor)):
        return "decoupled"
    if group.get("decoupled_weight_decay", False):
        return "decoupled"
    return "coupled" if type(base).__module__.startswith("torch.optim") else "unknown"


class Decay(NamedTuple):
    """The weight decay of a group, of a kind that FOSI can apply in the base's place."""

    group: dict[str, Any]
    strength: Any
    kind: DecayKind


def decays(base: optim.Optimizer) -> list[Decay]:
    """Those of all groups that have one."""
    found = [Decay(g, g["weight_decay"], decay_kind(base, g)) for g in base.param_groups if g.get("weight_decay")]
    return [decay for decay in found if decay.kind != "unknown"]


def parameters(base: optim.Optimizer) -> list[Tensor]:
    """All the base's parameters, group after group."""
    return [p for group in base.param_groups for p in group["params"]]


def number(value: Any) -> float:
    """A learning rate, which may be a tensor, as a number."""
    return float(value.item()) if isinstance(value, torch.Tensor) else float(value)
