"""Training over several processes, each with its part of the batch, whose products are averaged.

Replicas (DDP) hold all of every vector. Shards (FSDP2) hold a part of it: the only file that knows how parameters are
cut, and what FSDP must be told for a loss to be differentiated twice.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

Operator = Callable[[Sequence[Tensor]], list[Tensor]]

# By their newer names where torch has them: it warns of the older ones then.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


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


def total(numbers: Tensor, group: Any) -> Tensor:
    """The sum over the processes, in place, the same to the last bit on each."""
    dist.all_reduce(numbers, group=group)
    return numbers


class Sharding:
    """How parameters are cut: each along one dimension, one shard a process of a one-dimensional mesh (FSDP2).

    Attributes:
      group: the processes.
      rank: which of them this one is.
      dimension: the number of parameters in all shards together.
    """

    def __init__(self, params: Sequence[Tensor]) -> None:
        """Raises where the parameters are cut in any other way."""
        self.params: list[DTensor] = []
        for p in params:
            if not isinstance(p, DTensor):
                raise ValueError(
                    f"params holds sharded tensors (DTensor) and a plain one of shape {tuple(p.shape)}: shard all of "
                    "them with fully_shard (without ignored_params), or none"
                )
            if p.device_mesh.ndim != 1 or type(p.placements[0]) is not Shard:
                raise ValueError(
                    f"params holds a DTensor with placements {p.placements} on {p.device_mesh}; FOSI takes parameters "
                    "that fully_shard (FSDP2) cut over a one-dimensional mesh, or replicas (DistributedDataParallel); "
                    "hybrid sharding and tensor parallelism are not supported"
                )
            if self.params and p.device_mesh != self.params[0].device_mesh:
                raise ValueError(
                    f"params holds DTensors on several meshes, {self.params[0].device_mesh} and {p.device_mesh}; "
                    "FOSI takes parameters that are cut over one"
                )
            if p.device.type not in (p.device_mesh.device_type, "meta"):
                raise ValueError(
                    f"params holds a shard on {p.device.type} of a mesh of {p.device_mesh.device_type} devices: "
                    "offload_policy is not supported"
                )
            self.params.append(p)
        mesh = self.params[0].device_mesh
        self.group: Any = mesh.get_group()
        self.rank, self.count = mesh.get_local_rank(), mesh.size()
        self.dimension = sum(p.numel() for p in self.params)

    @torch.no_grad()
    def local(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """This process' shards, on the same memory."""
        return [t.to_local() if isinstance(t, DTensor) else t for t in tensors]

    def wrap(self, shards: Sequence[Tensor], like: Sequence[Any]) -> list[Tensor]:
        """Shards as the tensors they are shards of, cut ``like`` others, with one more dimension in front or none."""
        return [_whole(shard, p) for shard, p in zip(shards, like, strict=True)]

    @torch.no_grad()
    def cut(self, tensor: Tensor, index: int) -> Tensor:
        """This process' shard of a tensor like one of the parameters, or of several such: whole, or cut in any way."""
        param = self.params[index]
        placement = _behind(param, tensor.ndim - param.ndim)
        if isinstance(tensor, DTensor):
            return tensor.redistribute(param.device_mesh, [placement]).to_local()
        pieces = tensor.chunk(self.count, placement.dim)  # may be fewer, where there are not enough rows
        return pieces[self.rank] if self.rank < len(pieces) else tensor.narrow(placement.dim, 0, 0)

    def averaged(self, operator: Operator, dtype: torch.dtype) -> Operator:
        """An operator on whole tensors, of this process' part of the batch, as one on shards, of the whole batch.

        One collective each way for all parameters together: shards lie behind one another, padded to the size of the
        first process', which no other's exceeds.
        """
        dims = [_dim(p) for p in self.params]
        lengths = [p.shape[d] for p, d in zip(self.params, dims, strict=True)]
        shapes = [list(p.shape) for p in self.params]
        for shape, d in zip(shapes, dims, strict=True):
            shape[d] = -(-shape[d] // self.count)
        sizes = [torch.Size(shape).numel() for shape in shapes]
        mine = torch.zeros(sum(sizes), dtype=dtype, device=self.params[0].device)
        everyone = mine.new_empty(self.count, mine.numel())
        padded = [x.view(shape) for x, shape in zip(mine.split(sizes), shapes, strict=True)]
        shards = [
            x.narrow(d, 0, shard.shape[d]) for x, d, shard in zip(padded, dims, self.local(self.params), strict=True)
        ]
        # A whole tensor, with the processes as a dimension of its own before the one that is cut.
        slots = [
            x.unflatten(1, shape).movedim(0, d)
            for x, shape, d in zip(everyone.split(sizes, dim=1), shapes, dims, strict=True)
        ]

        def apply(vectors: Sequence[Tensor]) -> list[Tensor]:
            torch._foreach_copy_(shards, list(vectors))
            _all_gather(everyone.view(-1), mine, group=self.group)
            whole = [x.flatten(d, d + 1).narrow(d, 0, n) for x, d, n in zip(slots, dims, lengths, strict=True)]
            for slot, product, d in zip(slots, operator(whole), dims, strict=True):
                slot.copy_(_padded(product, d, slot.shape[d] * slot.shape[d + 1]).unflatten(d, slot.shape[d : d + 2]))
            _reduce_scatter(mine, everyone.view(-1), group=self.group)
            mine.div_(self.count)
            return shards

        return apply


def sharding(params: Sequence[Tensor]) -> Sharding | None:
    """How the parameters are cut; None where they are not."""
    return Sharding(params) if any(isinstance(p, DTensor) for p in params) else None


@contextlib.contextmanager
def unsynchronised(params: Sequence[Tensor], model: nn.Module | None) -> Iterator[list[Tensor]]:
    """The model as a module by itself: nothing is sent by its passes but what FOSI sends.

    Yields:
      The parameters as the loss sees them: themselves, or the whole tensors that they are shards of.
    """
    if any(isinstance(p, DTensor) for p in params):
        with _unsharded(params, model) as whole:
            yield whole
        return
    if not isinstance(model, DistributedDataParallel):
        yield list(params)
        return
    kept = model.require_forward_param_sync
    model.require_forward_param_sync = False
    try:
        with model.no_sync():
            yield list(params)
    finally:
        model.require_forward_param_sync = kept


# What a group of FSDP's parameters is told while second derivatives are taken: neither to reduce gradients, nor to free
# parameters that are needed again. None here means to keep them after a forward pass.
_QUIET = {
    "reduce_grads": False,
    "all_reduce_grads": False,
    "reshard_after_backward": False,
    "post_forward_mesh_info": None,
}
# What passes under these settings leave behind on a group, in those versions of torch that have it.
_MARKS = ("_post_backward_pending",)


@contextlib.contextmanager
def _unsharded(params: Sequence[Tensor], model: nn.Module | None) -> Iterator[list[Tensor]]:
    """FSDP's parameters as the whole tensors its forward pass computes with, for as long as this lasts."""
    if model is None:
        raise ValueError("params holds sharded tensors (DTensor): pass model=, the module that fully_shard was put on")
    reshard(model)  # a forward pass without a backward leaves whole tensors in the place of those the base knows
    modules = _fsdp_modules(model)
    names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
    states = [m._get_fsdp_state() for m in modules]
    kept = [
        (state, group, {name: getattr(group, name) for name in (*_QUIET, *_MARKS) if hasattr(group, name)})
        for state in states
        for group in _groups(state)
    ]
    grads: list[tuple[Tensor, Tensor | None]] = []
    try:
        for _, group, _ in kept:
            _set(group, _QUIET)
        for m in modules:
            m.unshard()
        found = dict(model.named_parameters())
        for p in params:
            if p not in names or isinstance(found[names[p]], DTensor):
                raise ValueError(
                    f"a sharded parameter of shape {tuple(p.shape)} is not one that fully_shard cut for this model: "
                    "pass model=, the module that fully_shard was put on, and build the base after that"
                )
        grads = [(whole, whole.grad) for whole in found.values()]
        yield [found[names[p]] for p in params]
    finally:
        for whole, grad in grads:  # a closure's backward() ends here, where no zero_grad() finds it
            whole.grad = grad
        for state, group, settings in kept:
            if state._is_root and state._auto_reshard_after_forward:
                # FSDP's own choice for its root, made in its first forward pass, which may have been in here.
                settings = {**settings, "post_forward_mesh_info": None}
            _set(group, settings)
        reshard(model)


def reshard(model: nn.Module) -> None:
    """Frees the whole tensors of an FSDP model: its parameters are the shards again."""
    for m in _fsdp_modules(model):
        m.reshard()


def _fsdp_modules(model: nn.Module) -> list[Any]:
    if not (dist.is_available() and dist.is_initialized()):
        return []
    from torch.distributed.fsdp import FSDPModule  # a tenth of a second, which few need to spend

    return [m for m in model.modules() if isinstance(m, FSDPModule)]


def _set(group: Any, settings: dict[str, Any]) -> None:
    for name, value in settings.items():
        setattr(group, name, value)


def _groups(state: Any) -> list[Any]:
    """The groups of parameters that a module of FSDP gathers together: one or none in torch 2.11, several later."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def _whole(shard: Tensor, like: DTensor) -> DTensor:
    """The tensor that this is a shard of: cut ``like`` another, with one more dimension in front or none."""
    rows = shard.shape[: shard.ndim - like.ndim]
    return DTensor.from_local(
        shard,
        like.device_mesh,
        [_behind(like, len(rows))],
        run_check=False,
        shape=rows + like.shape,
        stride=(*(like.numel() for _ in rows), *like.stride()),
    )


def _behind(like: DTensor, rows: int) -> Shard:
    """How a tensor with so many more dimensions in front is cut."""
    return Shard(_dim(like) + rows)


def _dim(param: DTensor) -> int:
    """The dimension that a parameter is cut along."""
    placement = param.placements[0]
    assert isinstance(placement, Shard)
    return placement.dim


def _padded(tensor: Tensor, dim: int, length: int) -> Tensor:
    missing = length - tensor.shape[dim]
    return tensor if not missing else nn.functional.pad(tensor, (0, 0) * (tensor.ndim - 1 - dim) + (0, missing))
