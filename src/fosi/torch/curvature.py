"""A loss becomes a linear operator v ↦ Hv over the parameters."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from fosi.options import Curvature
from fosi.torch.isolation import Isolation

Closure = Callable[[], Any]
Closures = Closure | Sequence[Closure]
Operator = Callable[[Sequence[Tensor]], list[Tensor]]


@dataclasses.dataclass(frozen=True)
class ModelLoss:
    """A loss given as a model and a convex loss of its outputs, so that Gauss–Newton products can be formed.

    It is itself a function without arguments that returns the loss, as a refresh takes it. The Gauss–Newton matrix
    Jᵀ ∇²ℓ J, with J the Jacobian of the outputs and ℓ the convex loss, is positive semi-definite wherever the
    parameters are.

    Attributes:
      model_fn: () ↦ outputs, a tensor or lists, tuples and dicts of tensors: a classifier's logits, the residuals of an
        equation. What in them is no tensor, or does not depend on the parameters, is handed on.
      loss_fn: outputs ↦ the loss, convex in them. A penalty on the parameters is seen only if it is one of the outputs.

    Example:
      >>> import torch
      >>> from fosi.torch import ModelLoss, estimate_spectrum
      >>> w, x, y = torch.zeros(3, requires_grad=True), torch.eye(3), torch.ones(3)
      >>> loss = ModelLoss(lambda: x @ w, lambda outputs: (outputs - y).square().mean())
      >>> s = estimate_spectrum(loss, [w], k=1, curvature="gauss_newton")
      >>> print(f"{s.eigenvalues[0]:.3f}")
      0.667
    """

    model_fn: Callable[[], Any]
    loss_fn: Callable[[Any], Any]

    def __call__(self) -> Any:
        """The loss itself."""
        return self.loss_fn(self.model_fn())


class _Over:
    """An operator over those of the parameters that require a gradient; the others get zeros."""

    def __init__(self, params: Sequence[Tensor]) -> None:
        self.params = list(params)
        self.active = [p for p in self.params if p.requires_grad]
        if not self.active:
            raise ValueError(
                "none of the parameters requires a gradient (requires_grad is False): nothing can be trained"
            )

    def _gradient(self, of: Sequence[Tensor], along: Sequence[Tensor] | None = None) -> list[Tensor | None]:
        """Σ (∂of/∂p)ᵀ along for each active parameter, with a graph; None for one that nothing depends on."""
        try:
            # Not backward(create_graph=True): that would write into .grad, in a cycle that is never freed.
            found = torch.autograd.grad(of, self.active, along, create_graph=True, allow_unused=True)
        except RuntimeError as error:
            if "a second time" in str(error):
                raise ValueError(_BACKWARD) from error
            raise
        if all(g is None for g in found):
            raise ValueError(
                "the loss does not depend on any of the parameters: compute it with the model they belong to; "
                "activation checkpointing needs use_reentrant=False"
            )
        return list(found)

    def _at(self, vectors: Sequence[Tensor], where: Sequence[int], like: Sequence[Tensor]) -> list[Tensor]:
        """Those of the vectors that belong to some of the active parameters, in the dtypes of others."""
        mine = [v for v, p in zip(vectors, self.params, strict=True) if p.requires_grad]
        return [mine[i].to(x.dtype) for i, x in zip(where, like, strict=True)]

    def _whole(self, found: Sequence[Tensor | None]) -> list[Tensor]:
        """A tensor a parameter, of one for each active one."""
        each = iter(found)
        products = [next(each) if p.requires_grad else None for p in self.params]
        return [torch.zeros_like(p) if x is None else x for x, p in zip(products, self.params, strict=True)]


class Hessian(_Over):
    """v ↦ ∇²loss v, by differentiating the graph of the gradient, which is built once and kept.

    A product is then one backward pass through that graph: 1.3 to 2.1 gradients, where rebuilding it costs 3.2 to 3.8.
    """

    def __init__(self, loss: Tensor, params: Sequence[Tensor]) -> None:
        """Builds the graph of the gradient."""
        super().__init__(params)
        # A gradient that does not depend on the parameters has no second derivative to ask for.
        found = [(i, g) for i, g in enumerate(self._gradient([loss])) if g is not None and g.requires_grad]
        self.where, self.grads = [i for i, _ in found], [g for _, g in found]

    def __call__(self, vectors: Sequence[Tensor]) -> list[Tensor]:
        """The product, one tensor a parameter."""
        out: Sequence[Tensor | None] = [None] * len(self.active)
        if self.grads:
            along = self._at(vectors, self.where, self.grads)
            out = torch.autograd.grad(self.grads, self.active, along, retain_graph=True, allow_unused=True)
        return self._whole(out)


class GaussNewton(_Over):
    """v ↦ Jᵀ ∇²ℓ J v, with J the Jacobian of a model's outputs and ℓ the loss of them; the graphs are built once.

    J v is had backwards too: u ↦ Jᵀu is linear, so its own transpose, the derivative of its graph by u, is J. Forward
    mode is not there for all of torch's functions, and its layers of Python cost more.
    """

    def __init__(self, loss: ModelLoss, params: Sequence[Tensor], known: bool = False) -> None:
        """Builds the graphs of the outputs, of Jᵀu, and of the gradient by the outputs.

        ``known`` says that such outputs were seen to have second derivatives before.
        """
        super().__init__(params)
        leaves, tree = tree_flatten(loss.model_fn())
        places = [i for i, x in enumerate(leaves) if isinstance(x, Tensor) and x.requires_grad]
        self.outputs: list[Tensor] = [leaves[i] for i in places]
        if not self.outputs:
            raise ValueError(
                "model_fn returned nothing that has a graph (requires_grad is False): compute the outputs anew from "
                "the model, without .detach() or torch.no_grad()"
            )
        if not all(x.is_floating_point() for x in self.outputs):
            raise ValueError(f"model_fn must return real numbers, got {[x.dtype for x in self.outputs]}")
        if not known:
            _twice_differentiable(*self.outputs)
        self.heads = [torch.zeros_like(x, requires_grad=True) for x in self.outputs]
        pulled = enumerate(self._gradient(self.outputs, self.heads))
        found = [(i, g) for i, g in pulled if g is not None and g.requires_grad]
        self.where, self.pulled = [i for i, _ in found], [g for _, g in found]

        self.points = [x.detach().requires_grad_() for x in self.outputs]
        for i, point in zip(places, self.points, strict=True):
            leaves[i] = point.clone()  # a loss may write over its outputs
        value = _real(loss.loss_fn(tree_unflatten(leaves, tree)), "loss_fn", _OF_OUTPUTS)
        if not known:
            _twice_differentiable(value)
        slopes = torch.autograd.grad(value, self.points, create_graph=True, allow_unused=True)
        if all(g is None for g in slopes):
            raise ValueError(f"loss_fn returned a loss that does not depend on what model_fn returned: {_OF_OUTPUTS}")
        self.slopes = [(i, g) for i, g in enumerate(slopes) if g is not None and g.requires_grad]

    def __call__(self, vectors: Sequence[Tensor]) -> list[Tensor]:
        """The product, one tensor a parameter."""
        if not self.slopes or not self.pulled:  # a loss that is linear in the outputs, or outputs that stay
            return self._whole([None] * len(self.active))
        keep: dict[str, Any] = {"retain_graph": True, "allow_unused": True}
        forward = torch.autograd.grad(self.pulled, self.heads, self._at(vectors, self.where, self.pulled), **keep)
        moved = [torch.zeros_like(x) if f is None else f for f, x in zip(forward, self.outputs, strict=True)]
        across = torch.autograd.grad(
            [g for _, g in self.slopes], self.points, [moved[i] for i, _ in self.slopes], **keep
        )
        curved = [(x, a) for x, a in zip(self.outputs, across, strict=True) if a is not None]
        return self._whole(torch.autograd.grad([x for x, _ in curved], self.active, [a for _, a in curved], **keep))


class Mean:
    """The mean of the operators of several losses, one graph at a time: the memory of one, at a gradient more each.

    Random numbers and buffers are wound back before each, so that every product sees the same dropout masks.
    """

    def __init__(
        self, closures: Sequence[Closure], params: Sequence[Tensor], isolation: Isolation, curvature: Curvature
    ) -> None:
        """Holds on to the closures: each is called once for every product."""
        self.closures, self.params, self.isolation = list(closures), list(params), isolation
        self.curvature, self.known = curvature, False

    def __call__(self, vectors: Sequence[Tensor]) -> list[Tensor]:
        """The product, one tensor a parameter."""
        self.isolation.rewind()
        total = [torch.zeros_like(p) for p in self.params]
        for closure in self.closures:
            with torch.enable_grad():  # Lanczos, which calls this, runs without
                product = _of_one(closure, self.params, self.curvature, self.known)(vectors)
            torch._foreach_add_(total, product, alpha=1 / len(self.closures))
        self.known = True
        return total


_ONCE = torch.autograd.function.once_differentiable(lambda ctx: None).__code__


def _twice_differentiable(*values: Tensor) -> None:
    """Raises where a function on the way to them says that its backward pass must not be differentiated.

    torch takes what such a backward pass gave for a constant, without a word, and the product is wrong.
    """
    waiting: list[Any] = [value.grad_fn for value in values if value.grad_fn is not None]
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


def check_closures(curvature: Curvature, *closures: Any, name: str = "closure") -> None:
    """Raises where one of them is no loss to take this curvature of; ``name`` is what the user calls them."""
    for closure in closures:
        if curvature == "gauss_newton" and not isinstance(closure, ModelLoss):
            raise ValueError(
                f"curvature='gauss_newton' needs {name}=fosi.torch.ModelLoss(model_fn, loss_fn), a model without "
                f"arguments and a convex loss of its outputs, got {closure!r}"
            )
        if not callable(closure):
            raise TypeError(f"{name} must be a function without arguments that returns the loss, got {closure!r}")


def operator(
    closures: Closures, params: Sequence[Tensor], isolation: Isolation, curvature: Curvature = "hessian"
) -> Operator:
    """The operator of one loss, or the mean of several; to be called and used inside ``isolation``."""
    several = [closures] if callable(closures) else list(closures) if isinstance(closures, Sequence) else []
    if not several or not all(map(callable, several)):
        raise TypeError(f"closure must be a function without arguments, or a sequence of such, got {closures!r}")
    check_closures(curvature, *several)
    return _of_one(several[0], params, curvature) if len(several) == 1 else Mean(several, params, isolation, curvature)


def _of_one(closure: Closure, params: Sequence[Tensor], curvature: Curvature, known: bool = False) -> Operator:
    if isinstance(closure, ModelLoss) and curvature == "gauss_newton":
        return GaussNewton(closure, params, known)
    loss = evaluate(closure)
    if not known:
        _twice_differentiable(loss)
    return Hessian(loss, params)


def evaluate(closure: Closure) -> Tensor:
    """The loss, checked to be one real number with a graph behind it."""
    check_closures("hessian", closure)
    return _real(closure(), "the closure", "compute it anew from the model: opt.refresh(lambda: loss_fn(model(x), y))")


def _real(loss: Any, whose: str, hint: str) -> Tensor:
    if not isinstance(loss, Tensor):
        raise TypeError(
            f"{whose} must return the loss as a tensor, got {type(loss).__name__}; return the loss itself, not "
            f"loss.item(): {hint}"
        )
    if loss.numel() != 1 or not loss.is_floating_point():
        raise ValueError(
            f"{whose} must return one real number, got shape {tuple(loss.shape)} and dtype {loss.dtype}; "
            "reduce it, for example with .mean()"
        )
    if not loss.requires_grad:
        raise ValueError(
            f"{whose} returned a loss without a graph (requires_grad is False): give one without .detach(), .item() "
            f"or torch.no_grad(), and {hint}"
        )
    if loss.grad_fn is None:
        raise ValueError(f"{whose} returned a leaf tensor; it must compute the loss from the parameters")
    return loss


_OF_OUTPUTS = "compute it from the outputs that it is given: ModelLoss(lambda: model(x), lambda outputs: f(outputs, y))"
_BACKWARD = (
    "the graph of the loss is gone: the closure must return the loss without calling backward() on it, and compute it "
    "anew: opt.refresh(lambda: loss_fn(model(x), y))"
)
