"""A closure of torch.optim's as a function of one vector: where the parameters are, going elsewhere, the loss there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fosi.torch import space as sp
from fosi.torch.search import Trial
from fosi.torch.steps import check_dense


class Walk:
    """Through the space of the parameters.

    Attributes:
      calls: how often the closure was called.
    """

    def __init__(self, space: sp.Space, closure: Callable[[], Any]) -> None:
        """Begins where the parameters are; the closure zeroes gradients, runs backward and returns the loss."""
        self.space, self.closure, self.calls = space, closure, 0

    def place(self) -> Tensor:
        """The parameters."""
        return self._flat([p.detach() for p in self.space.params])

    def look(self) -> tuple[Any, Trial]:
        """What the closure returns, and the loss and the gradient of it."""
        self.calls += 1
        with torch.enable_grad():
            loss = self.closure()
        try:
            value = float(loss)
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(f"closure must return the loss, one number, got {loss!r}") from error
        grads = [p.grad for p in self.space.params if p.grad is not None]
        if not grads:
            raise RuntimeError("closure left no gradient on any parameter: call loss.backward() in it")
        check_dense(grads)
        everywhere = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.space.params]
        return loss, Trial(0.0, value, 0.0, self._flat(everywhere))

    def go(self, place: Tensor, gradient: Tensor | None = None) -> None:
        """Sets the parameters, and their gradients, which a look elsewhere has left."""
        params = self.space.params
        sp.write(params, self.space.views(place))
        if gradient is not None:
            for p, view in zip(params, self.space.views(gradient), strict=True):
                if p.grad is not None:
                    p.grad.copy_(view)

    def _flat(self, tensors: list[Tensor]) -> Tensor:
        buffer = self.space.buffer()
        sp.write(buffer.views, tensors)
        return buffer.vector
