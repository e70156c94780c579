"""Training over several processes: replicas (DDP), each with its part of the batch, whose products are averaged."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


def replicas(model: nn.Module | None) -> Any:
    """The group of processes that train the same parameters: DDP's, or all there are; None for one alone.

    Without a model to tell, all of them: replicas that estimated for themselves would drift apart.
    """
    if isinstance(model, DistributedDataParallel):
        group = model.process_group
    elif dist.is_available() and dist.is_initialized():
        group = dist.group.WORLD  # type: ignore[assignment]
    else:
        return None
    return group if dist.get_world_size(group) > 1 else None


def mean(vector: Tensor, group: Any) -> None:
    """The mean over the processes, in place, the same to the last bit on each."""
    dist.all_reduce(vector, group=group)
    vector.div_(dist.get_world_size(group))


@contextlib.contextmanager
def unsynchronised(model: nn.Module | None) -> Iterator[None]:
    """DDP's forward pass as the module's own: nothing is broadcast, and no backward pass is waited for."""
    if not isinstance(model, DistributedDataParallel):
        yield
        return
    kept = model.require_forward_param_sync
    model.require_forward_param_sync = False
    try:
        with model.no_sync():
            yield
    finally:
        model.require_forward_param_sync = kept
