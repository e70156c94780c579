"""FOSI's state inside the base optimizer's state_dict, where every tool that knows optimizers finds it.

Distributed checkpoints keep ``state`` and ``param_groups`` and drop other keys, and ``load_state_dict`` casts what it
finds to the parameters' dtype: so our tensors lie in ``state[i]`` under names of their own and are taken out again
before the base sees them. Each parameter has its piece of the basis, and of whatever else is a vector a row, in its own
shape, whatever its strides; the first trainable one also has the small numbers: distributed checkpoints load nothing
for frozen ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fosi.torch import space as sp
from fosi.torch.spectrum import Estimate

_OURS = "fosi_"
_SMALL = ("eigenvalues", "residuals", "accepted", "extremes", "resolution")


def merge(
    state_dict: dict[str, Any],
    space: sp.Space,
    rank: int,
    estimate: Estimate | None,
    small: Any,
    rows: Mapping[str, Tensor] = MappingProxyType({}),
) -> dict[str, Any]:
    """The base's state_dict with ours in it.

    ``small`` are further numbers or small tensors, by name, and ``rows`` matrices of as many columns as the space. An
    empty estimate is written as zeros: distributed checkpoints load only into what is there already, in place, so
    that no two tensors may share memory.
    """
    if estimate is None:
        basis = torch.zeros(rank, space.size, dtype=space.dtype, device=space.device)
        none = np.zeros(rank)
        estimate = Estimate(none, basis, none, none.astype(bool), np.zeros(2), 0.0)
    state = {index: dict(entries) for index, entries in state_dict["state"].items()}
    for name, whole in {"basis": estimate.basis, **rows}.items():
        for i, piece in enumerate(space.pieces(whole)):
            state.setdefault(i, {})[_OURS + name] = piece
    keeper = state[next((i for i, p in enumerate(space.params) if p.requires_grad), 0)]
    for name in _SMALL:
        keeper[_OURS + name] = torch.tensor(getattr(estimate, name), dtype=torch.float64)
    for name, value in small.items():
        keeper[_OURS + name] = torch.as_tensor(value)
    return {**state_dict, "state": state}


Pieces = dict[str, dict[int, Tensor]]
"""Of each matrix, by parameter."""


def split(state_dict: Mapping[str, Any], rows: Sequence[str] = ()) -> tuple[dict[str, Any], Pieces, dict[str, Tensor]]:
    """The base's part of a state_dict, our pieces of the basis and of ``rows``, and the small numbers by name.

    Parameters go by their place in the groups, whatever the state_dict calls them: names, in distributed checkpoints.
    """
    called = [index for group in state_dict["param_groups"] for index in group["params"]]
    place = {index: i for i, index in enumerate(called)}
    theirs: dict[Any, Any] = {}
    pieces: Pieces = {name: {} for name in ("basis", *rows)}
    small: dict[str, Tensor] = {}
    for index, entries in state_dict["state"].items():
        ours = {name: value for name, value in entries.items() if str(name).startswith(_OURS)}
        for name, found in pieces.items():
            if _OURS + name in ours:
                found[place[index]] = ours.pop(_OURS + name)
        small |= {name.removeprefix(_OURS): value for name, value in ours.items()}
        rest = {name: value for name, value in entries.items() if not str(name).startswith(_OURS)}
        if rest or not entries:
            theirs[index] = rest
    return {**state_dict, "state": theirs}, pieces, small


def matrix(space: sp.Space, name: str, pieces: dict[int, Tensor], count: int) -> Tensor:
    """The matrix of so many rows that was saved in pieces; copied, and checked to fit."""
    for i, piece in pieces.items():
        wanted = (count, *space.params[i].shape) if i < len(space.params) else None
        if tuple(piece.shape) != wanted:
            raise ValueError(
                f"the checkpoint's {_OURS}{name} of parameter {i} has shape {tuple(piece.shape)}, this optimizer's has "
                f"{wanted}: build it for the same parameters, with the k and ell of the checkpoint"
            )
    whole = torch.zeros(count, space.size, dtype=space.dtype, device=space.device)
    views = space.views(whole)
    for i, piece in pieces.items():
        views[i].copy_(piece if space.sharding is None else space.sharding.cut(piece, i))
    return whole


def restore(space: sp.Space, rank: int, pieces: dict[int, Tensor], small: dict[str, Tensor]) -> Estimate | None:
    """The estimate that was saved, or None where it was an empty one."""
    basis = matrix(space, "basis", pieces, rank)
    values = {name: small[name].to("cpu", torch.float64).numpy().copy() for name in _SMALL}
    if not values["accepted"].any():
        return None
    return Estimate(
        values["eigenvalues"],
        basis,
        values["residuals"],
        values["accepted"].astype(bool),
        values["extremes"],
        float(values["resolution"]),
    )
