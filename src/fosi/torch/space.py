"""The vector space of the parameters: the only file that knows how a vector is laid out.

A vector is one flat tensor over all parameters, a basis a matrix with one vector a row: one kernel for a product with
the basis, whatever the number of parameters. Views shaped like the parameters lead in and out of it. Of sharded
parameters a process holds its shards, and of every vector the numbers that belong to them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fosi.torch.distributed import sharding, total


@dataclasses.dataclass(frozen=True)
class Buffer:
    """A flat vector and the same memory as views shaped like the parameters."""

    vector: Tensor
    views: list[Tensor]


class Space:
    """The space spanned by parameters, in their order.

    Attributes:
      params: the parameters themselves.
      sharding: how they are cut over processes; None where they are whole.
      group: the processes that hold parts of a vector; None where each holds all of it.
      size: how many numbers of a vector are held here.
      dimension: how many it has, n.
      dtype: what vectors are kept in: the widest of the parameters', and float32 at least.
      device: the parameters', and the vectors'.
      uniform: whether all parameters have that dtype.
    """

    def __init__(self, params: Sequence[Tensor]) -> None:
        """Checks that the parameters are ones FOSI can work with."""
        self.params = list(params)
        if not self.params:
            raise ValueError("params is empty; FOSI needs at least one float parameter")
        for p in self.params:
            if p.is_complex():
                raise ValueError(
                    f"params holds a tensor of dtype {p.dtype}: complex parameters are not supported; hold the real "
                    "and imaginary parts as two real parameters"
                )
            if not p.is_floating_point() or p.layout != torch.strided:
                raise ValueError(f"params holds a {p.layout} tensor of dtype {p.dtype}; FOSI needs dense float tensors")
        if len({id(p) for p in self.params}) < len(self.params):
            raise ValueError("params holds a tensor twice; each parameter counts once (shared weights too)")
        devices = {str(p.device) for p in self.params}
        if len(devices) > 1:
            raise ValueError(f"params are on several devices ({', '.join(sorted(devices))}); FOSI needs them on one")
        self.sharding = sharding(self.params)
        self.group = None if self.sharding is None else self.sharding.group
        self.sizes = [p.numel() for p in self.local(self.params)]
        self.size = sum(self.sizes)
        self.dimension = self.size if self.sharding is None else self.sharding.dimension
        self.device = self.params[0].device
        self.dtype = torch.float32
        for p in self.params:
            self.dtype = torch.promote_types(self.dtype, p.dtype)
        self.uniform = all(p.dtype == self.dtype for p in self.params)

    def local(self, tensors: list[Tensor]) -> list[Tensor]:
        """What this process holds of tensors like the parameters: all, or its shards, on the same memory."""
        return tensors if self.sharding is None else self.sharding.local(tensors)

    def buffer(self, dtype: torch.dtype | None = None) -> Buffer:
        """Zeros, as a flat vector and as views."""
        vector = torch.zeros(self.size, dtype=dtype or self.dtype, device=self.device)
        # By .data they are views of memory alone: what autograd knows as one takes longer in every operation.
        return Buffer(vector, [view.data for view in self.views(vector)])

    def anywhere(self, tensors: list[Tensor]) -> bool:
        """Whether tensors like the parameters hold anything but zeros, here or in another process."""
        found = any(bool(t.any()) for t in self.local(tensors))
        return found if self.group is None else bool(total(torch.tensor(float(found), device=self.device), self.group))

    def views(self, vectors: Tensor) -> list[Tensor]:
        """A vector, or the rows of a basis, as tensors shaped like what is held here, on the same memory."""
        pieces = vectors.split(self.sizes, dim=-1)
        return [_shaped(piece, p) for piece, p in zip(pieces, self.local(self.params), strict=True)]

    def pieces(self, basis: Tensor) -> list[Tensor]:
        """The rows of a basis as tensors like the parameters with one more dimension in front, and sharded as they."""
        views = self.views(basis)
        return views if self.sharding is None else self.sharding.wrap(views, self.params)

    def cast(self, vector: Tensor) -> list[Tensor]:
        """A vector as tensors in the parameters' shapes, dtypes and devices."""
        if self.uniform:
            return self.views(vector.to(self.dtype))
        return [view.to(p.dtype) for view, p in zip(self.views(vector), self.params, strict=True)]

    def random(self, seed: int, count: int) -> Tensor:
        """Independent N(0, 1) numbers, a function of ``seed`` and ``count`` alone, and of whose shards they are for."""
        entropy = [seed, count] if self.sharding is None else [seed, count, self.sharding.rank]
        state = np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0]
        generator = torch.Generator(self.device).manual_seed(int(state >> np.uint64(1)))
        return torch.randn(self.size, generator=generator, dtype=torch.float32, device=self.device)


def write(views: list[Tensor], tensors: list[Tensor]) -> None:
    """Copies tensors into views: in one kernel where their dtypes and strides agree."""
    torch._foreach_copy_(views, tensors)


# Matrix–vector products only: cuBLAS computes them in full float32 whatever the user lets TF32 do to matrix products,
# which would cost the basis its orthogonality.


def products(basis: Tensor, vector: Tensor, group: Any = None) -> Tensor:
    """The inner products of every row with ``vector``, over all processes of the group that hold parts of them."""
    inside = torch.mv(basis, vector)
    return inside if group is None else total(inside, group)


def norm(vector: Tensor, group: Any = None) -> Tensor:
    """The length of ``vector``, over all processes of the group that hold parts of it."""
    length = torch.linalg.vector_norm(vector)
    if group is None:
        return length
    # Squared in float64, where the square of a length that float32 can hold does not overflow.
    return total(length.double().square(), group).sqrt().to(length.dtype)


# These take the basis transposed: for a small model that view takes as long to make as the product, so a step has it.


def combine(columns: Tensor, coefficients: Tensor) -> Tensor:
    """The linear combination of the columns."""
    return torch.mv(columns, coefficients)


def subtract(vector: Tensor, columns: Tensor, coefficients: Tensor) -> Tensor:
    """``vector`` less the linear combination of the columns, in place."""
    return vector.addmv_(columns, coefficients, alpha=-1)


def add_to_multiple(factor: float, vector: Tensor, columns: Tensor, coefficients: Tensor) -> Tensor:
    """``factor`` times ``vector`` plus the linear combination of the columns, in place. By 0 it is not even read."""
    return vector.addmv_(columns, coefficients, beta=factor)


def _shaped(piece: Tensor, param: Tensor) -> Tensor:
    """The piece in the parameter's shape, and in its strides too (channels_last), for copies to be plain ones."""
    rows = piece.shape[:-1]
    if param.is_contiguous() or not _dense(param):
        return piece.view((*rows, *param.shape))
    lead = piece.stride()[:-1]
    return piece.as_strided((*rows, *param.shape), (*lead, *param.stride()), piece.storage_offset())


def _dense(param: Tensor) -> bool:
    """Whether the parameter's strides are a permutation of a contiguous tensor's."""
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(param.stride(), param.shape, strict=True) if n != 1):
        if stride != expected:
            return False
        expected *= size
    return expected == math.prod(param.shape)
