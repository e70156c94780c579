"""Gradients for a diagnosis: what of them an estimate takes, and how large they are along a training."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fosi.torch import space as sp
from fosi.torch.curvature import Closure, evaluate
from fosi.torch.isolation import Isolation


def gradients(losses: list[Closure], space: sp.Space, model: nn.Module | None) -> list[Tensor]:
    """A gradient for each; what was given twice has the same one. In one isolation: each draws its own dropout."""
    known: dict[int, Tensor] = {}
    with Isolation(space.params, model) as isolation:
        for loss in losses:
            if id(loss) not in known:
                known[id(loss)] = _gradient(loss, space, isolation.leaves)
    return [known[id(loss)] for loss in losses]


def _gradient(loss: Closure, space: sp.Space, leaves: Sequence[Tensor]) -> Tensor:
    buffer = space.buffer()
    trained = [(view, leaf) for view, leaf in zip(buffer.views, leaves, strict=True) if leaf.requires_grad]
    found = torch.autograd.grad(evaluate(loss), [leaf for _, leaf in trained], allow_unused=True)
    with torch.no_grad():
        for (view, _), gradient in zip(trained, found, strict=True):
            if gradient is not None:
                view.copy_(gradient)
    return buffer.vector


def projected(basis: Tensor, vector: Tensor) -> Tensor:
    """What of a vector lies outside the span of the rows."""
    return vector - sp.combine(basis.t(), sp.products(basis, vector))


def products(vectors: list[Tensor], remains: list[Tensor], used: Tensor) -> tuple[NDArray[Any], NDArray[Any]]:
    """The gradients along the eigenvectors, and the inner products of what is left of them, on the host."""
    inside = torch.stack([sp.products(used, g) for g in vectors])
    left = torch.stack(remains)
    outside = torch.stack([sp.products(left, row) for row in left])
    return inside.double().cpu().numpy(), outside.double().cpu().numpy()


def along(
    path: Sequence[Sequence[Tensor]], losses: list[Closure], space: sp.Space, model: nn.Module | None
) -> Generator[Tensor]:
    """A gradient at each point, of the losses in turns. The parameters are there meanwhile, and back afterwards."""
    here = [p.detach().clone() for p in space.params]
    try:
        for index, point in enumerate(path):
            _put(space.params, point)
            yield gradients([losses[index % len(losses)]], space, model)[0]
    finally:
        _put(space.params, here)


def mean_squares(used: Tensor, vectors: Iterable[Tensor]) -> tuple[Tensor, Tensor]:
    """Of whole gradients, and of what of them is outside the subspace; one at a time, to save memory."""
    each = [torch.zeros(()), torch.zeros(())]
    count = 0
    for count, vector in enumerate(vectors, 1):  # noqa: B007
        each = [total.to(vector) + part**2 for total, part in zip(each, (vector, projected(used, vector)), strict=True)]
    return each[0] / count, each[1] / count


def _put(params: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for param, value in zip(params, values, strict=True):
        param.data.copy_(value)  # unseen by a graph that the caller may still want to go back through
