"""A loss becomes a linear operator v ↦ Hv over the parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fosi.torch.isolation import Isolation

Closure = Callable[[], Any]
Closures = Closure | Sequence[Closure]
Operator = Callable[[Sequence[Tensor]], list[Tensor]]


class Hessian:
    """v ↦ ∇²loss v, by differentiating the graph of the gradient, which is built once and kept.

    A product is then one backward pass through that graph: 1.3 to 2.1 gradients, where rebuilding it costs 3.2 to 3.8.
    """

    def __init__(self, loss: Tensor, params: Sequence[Tensor]) -> None:
        """Builds the graph of the gradient."""
        self.params = list(params)
        self.active = [p for p in self.params if p.requires_grad]
        if not self.active:
            raise ValueError(
                "none of the parameters requires a gradient (requires_grad is False): nothing can be trained"
            )
        try:
            # Not backward(create_graph=True): that would write into .grad, in a cycle that is never freed.
            grads = torch.autograd.grad(loss, self.active, create_graph=True, allow_unused=True)
        except RuntimeError as error:
            if "a second time" in str(error):
                raise ValueError(_BACKWARD) from error
            raise
        if all(g is None for g in grads):
            raise ValueError(
                "the loss does not depend on any of the parameters: compute it with the model they belong to; "
                "activation checkpointing needs use_reentrant=False"
            )
        # A gradient that does not depend on the parameters has no second derivative to ask for.
        self.grads = [g for g in grads if g is not None and g.requires_grad]
        self.where = [i for i, g in enumerate(grads) if g is not None and g.requires_grad]

    def __call__(self, vectors: Sequence[Tensor]) -> list[Tensor]:
        """The product, one tensor a parameter."""
        mine = [v for v, p in zip(vectors, self.params, strict=True) if p.requires_grad]
        out: Sequence[Tensor | None] = [None] * len(self.active)
        if self.grads:
            along = [mine[i].to(g.dtype) for i, g in zip(self.where, self.grads, strict=True)]
            out = torch.autograd.grad(self.grads, self.active, along, retain_graph=True, allow_unused=True)
        found = iter(out)
        products = [next(found) if p.requires_grad else None for p in self.params]
        return [torch.zeros_like(p) if x is None else x for x, p in zip(products, self.params, strict=True)]


class Mean:
    """The mean of the operators of several losses, one graph at a time: the memory of one, at a gradient more each.

    Random numbers and buffers are wound back before each, so that every product sees the same dropout masks.
    """

    def __init__(self, closures: Sequence[Closure], params: Sequence[Tensor], isolation: Isolation) -> None:
        """Holds on to the closures: each is called once for every product."""
        self.closures, self.params, self.isolation = list(closures), list(params), isolation
        self.known = False

    def __call__(self, vectors: Sequence[Tensor]) -> list[Tensor]:
        """The product, one tensor a parameter."""
        self.isolation.rewind()
        total = [torch.zeros_like(p) for p in self.params]
        for closure in self.closures:
            with torch.enable_grad():  # Lanczos, which calls this, runs without
                loss = evaluate(closure)
                product = Hessian(loss if self.known else _twice_differentiable(loss), self.params)(vectors)
            torch._foreach_add_(total, product, alpha=1 / len(self.closures))
        self.known = True
        return total


_ONCE = torch.autograd.function.once_differentiable(lambda ctx: None).__code__


def _twice_differentiable(loss: Tensor) -> Tensor:
    """The loss; raises where a function on the way says that its backward pass must not be differentiated.

    torch takes what such a backward pass gave for a constant, without a word, and the product is wrong.
    """
    waiting: list[Any] = [loss.grad_fn]
    seen: set[Any] = set(waiting)
    while waiting:
        node = waiting.pop()
        function = getattr(node, "_forward_cls", None)
        # The decorator leaves no other mark than that it is its own code that is called.
        if getattr(getattr(function, "backward", None), "__code__", None) is _ONCE:
            raise ValueError(
                f"the loss has no second derivative: the backward pass of {function!r} is "
                "marked @once_differentiable; take a plain implementation of that layer for the closure"
            )
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
    return loss


def operator(closures: Closures, params: Sequence[Tensor], isolation: Isolation) -> Operator:
    """The operator of one loss, or the mean of several; to be called and used inside ``isolation``."""
    if callable(closures):
        return Hessian(_twice_differentiable(evaluate(closures)), params)
    several = list(closures) if isinstance(closures, Sequence) else []
    if not several or not all(callable(c) for c in several):
        raise TypeError(f"closure must be a function without arguments, or a sequence of such, got {closures!r}")
    return operator(several[0], params, isolation) if len(several) == 1 else Mean(several, params, isolation)


def evaluate(closure: Closure) -> Tensor:
    """The loss, checked to be one real number with a graph behind it."""
    if not callable(closure):
        raise TypeError(f"closure must be a function without arguments that returns the loss, got {closure!r}")
    loss = closure()
    if not isinstance(loss, Tensor):
        raise TypeError(
            f"the closure must return the loss as a tensor, got {type(loss).__name__}; "
            "return the loss itself, not loss.item(): opt.refresh(lambda: loss_fn(model(x), y))"
        )
    if loss.numel() != 1 or not loss.is_floating_point():
        raise ValueError(
            f"the closure must return one real number, got shape {tuple(loss.shape)} and dtype {loss.dtype}; "
            "reduce it, for example with .mean()"
        )
    if not loss.requires_grad:
        raise ValueError(
            "the closure returned a loss without a graph (requires_grad is False): compute it anew from the model, "
            "without .detach(), .item() or torch.no_grad(): opt.refresh(lambda: loss_fn(model(x), y))"
        )
    if loss.grad_fn is None:
        raise ValueError("the closure returned a leaf tensor; it must compute the loss from the parameters")
    return loss


_BACKWARD = (
    "the graph of the loss is gone: the closure must return the loss without calling backward() on it, and compute it "
    "anew: opt.refresh(lambda: loss_fn(model(x), y))"
)
