"""A loss becomes a linear operator v ↦ Hv over the leaves that span the space."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Sequence
from typing import Any, get_args

import jax
import jax.numpy as jnp
from jax.tree_util import Partial

from fosi.jax.space import Space, Tree
from fosi.options import Curvature, check_choice

Leaves = list[jax.Array]
# Always a tree of arrays too (jax.tree_util.Partial), so that it can leave one compiled function and enter another.
Operator = Callable[[Leaves], Leaves]


@dataclasses.dataclass(frozen=True)
class ModelLoss:
    """A loss given as a model and a convex loss of its outputs, so that Gauss–Newton products can be formed.

    It is itself a loss function of (params, batch). The Gauss–Newton matrix Jᵀ H_loss J, with J the Jacobian of
    the model and H_loss the Hessian of the convex loss, is positive semi-definite wherever the parameters are.

    Attributes:
      model_fn: (params, batch) ↦ outputs, an array or a tree of arrays.
      loss_fn: (outputs, batch) ↦ scalar, convex in the outputs.

    Example:
      >>> import jax.numpy as jnp
      >>> from fosi.jax import ModelLoss, estimate_spectrum
      >>> loss = ModelLoss(lambda w, batch: batch[0] @ w, lambda out, batch: jnp.mean((out - batch[1]) ** 2))
      >>> batch = (jnp.eye(3), jnp.ones(3))
      >>> s = estimate_spectrum(loss, jnp.zeros(3), batch, k=1, curvature="gauss_newton")
      >>> print(f"{s.eigenvalues[0]:.3f}")
      0.667
    """

    model_fn: Callable[[Tree, Any], Any]
    loss_fn: Callable[[Any, Any], jax.Array]

    def __call__(self, params: Tree, batch: Any) -> jax.Array:
        """The loss itself."""
        return self.loss_fn(self.model_fn(params, batch), batch)


@jax.tree_util.register_pytree_node_class
class Batches:
    """Several batches whose mean loss the curvature is taken of: ``batch=Batches([b1, b2, b3])``.

    A larger sample for the estimate than for a step makes it less noisy (appendix A.7). The batches must have the
    same shapes; they are gone through one after the other, so the memory is that of one.
    """

    def __init__(self, batches: Sequence[Any]) -> None:
        """Stacks the batches along a new first axis."""
        if len(batches) == 0:
            raise ValueError("batches must hold at least one batch, got none")
        try:
            self.stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *batches)
        except (ValueError, TypeError) as error:
            raise ValueError(f"batches must be of one structure and of the same shapes: {error}") from error

    def tree_flatten(self) -> tuple[tuple[Any], None]:
        """As a tree."""
        return (self.stacked,), None

    @classmethod
    def tree_unflatten(cls, _: None, children: tuple[Any]) -> Batches:
        """From a tree."""
        made = object.__new__(cls)
        (made.stacked,) = children
        return made


class ByIdentity:
    """A function that equals itself alone, so that what was compiled for it is found again.

    Functions may hold arrays (an equinox module) and then have neither a hash nor an equality of their own.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        """Wraps ``function``."""
        self.function = function
        # A bound method is a new object at every look-up; its parts are not.
        method = isinstance(function, types.MethodType)
        self._parts = (function.__func__, function.__self__) if method else (function,)  # type: ignore[attr-defined]

    def __call__(self, *args: Any) -> Any:
        """The function itself."""
        return self.function(*args)

    def __hash__(self) -> int:
        return hash(tuple(map(id, self._parts)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ByIdentity) and [*map(id, self._parts)] == [*map(id, other._parts)]


@dataclasses.dataclass(frozen=True)
class Loss:
    """What the curvature is taken of, as the user gave it."""

    loss_fn: Callable[..., Any] | None = dataclasses.field(compare=False)
    has_aux: bool = False
    curvature: Curvature = "hessian"
    micro_batches: int = 1
    _identity: ByIdentity | None = dataclasses.field(init=False, default=None, repr=False)

    def __post_init__(self) -> None:
        """Checks what needs no parameters."""
        if self.loss_fn is not None and not callable(self.loss_fn):
            raise TypeError(f"loss_fn must be callable as loss_fn(params, batch) or None, got {self.loss_fn!r}")
        check_choice("curvature", self.curvature, get_args(Curvature))
        if self.curvature == "gauss_newton" and not isinstance(self.loss_fn, ModelLoss):
            raise ValueError(
                "curvature='gauss_newton' needs loss_fn=fosi.jax.ModelLoss(model_fn, loss_fn), "
                f"a model and a convex loss of its outputs, got {self.loss_fn!r}"
            )
        if not isinstance(self.micro_batches, int) or self.micro_batches < 1:
            raise ValueError(f"micro_batches must be an integer ≥ 1, got {self.micro_batches!r}")
        if self.curvature == "gauss_newton" and self.has_aux:
            raise ValueError("has_aux=True has no meaning with a ModelLoss, whose loss_fn returns the scalar alone")
        if self.loss_fn is not None:
            object.__setattr__(self, "_identity", ByIdentity(self.loss_fn))

    def operator(
        self, space: Space, params: Tree, batch: Any = None, value_fn: Callable[[Tree], Any] | None = None
    ) -> Operator:
        """The operator at ``params``, over one batch, several, or one in micro-batches; ``value_fn`` wins."""
        if value_fn is not None:
            if self.curvature != "hessian":
                raise ValueError("curvature='gauss_newton' takes batch=, not value_fn=: it needs the model's outputs")
            return hessian(self._scalar(space, params, value_fn), space.leaves(params))
        if batch is None:
            raise ValueError(
                "a refresh needs the loss it estimates the curvature of: pass batch= (for loss_fn(params, batch)) "
                "or value_fn= (for value_fn(params)) to update or refresh, got neither"
            )
        loss = self.loss_fn
        if loss is None:
            raise ValueError("loss_fn is None: pass value_fn= with update or refresh, or give loss_fn when building")

        def build(params: Tree, piece: Any) -> Operator:
            value = self._scalar(space, params, lambda p: loss(p, piece))
            if self.curvature == "hessian":
                return hessian(value, space.leaves(params))
            assert isinstance(loss, ModelLoss)
            return gauss_newton(
                lambda leaves: loss.model_fn(space.merge(leaves, params), piece),
                lambda outputs: loss.loss_fn(outputs, piece),
                space.leaves(params),
            )

        pieces = self._pieces(batch)
        return build(params, batch) if pieces is None else mean(build, params, pieces)

    def gradient(self, space: Space, params: Tree, batch: Any) -> Leaves:
        """The gradient at ``params`` over one batch."""
        loss = self.loss_fn
        if loss is None:
            raise ValueError("loss_fn must be callable as loss_fn(params, batch), got None")
        return jax.grad(self._scalar(space, params, lambda p: loss(p, batch)))(space.leaves(params))

    def _pieces(self, batch: Any) -> Any:
        """The batch cut along a new first axis, or None where it is used whole."""
        stacked = batch.stacked if isinstance(batch, Batches) else None
        parts = self.micro_batches
        if parts == 1:
            return stacked
        lead = 0 if stacked is None else 1

        def cut(leaf: jax.Array) -> jax.Array:
            size = leaf.shape[lead] if leaf.ndim > lead else 0
            if size == 0 or size % parts:
                raise ValueError(
                    f"micro_batches={parts} must divide the batch's first axis, got a leaf of shape {leaf.shape[lead:]}"
                )
            rows = (leaf.shape[0] if lead else 1) * parts
            return leaf.reshape((rows, size // parts, *leaf.shape[lead + 1 :]))

        return jax.tree.map(cut, batch if stacked is None else stacked)

    def _scalar(self, space: Space, params: Tree, value_fn: Callable[[Tree], Any]) -> Callable[[Leaves], jax.Array]:
        """``value_fn`` as a function of the space's leaves alone, checked to give one real number."""

        def value(leaves: Leaves) -> Any:
            out = value_fn(space.merge(leaves, params))
            return out[0] if self.has_aux and isinstance(out, tuple) else out

        shape = jax.eval_shape(value, space.leaves(params))
        if isinstance(shape, tuple):
            raise ValueError("the loss returned a tuple: pass has_aux=True for a loss that returns (scalar, aux)")
        ok = isinstance(shape, jax.ShapeDtypeStruct) and shape.shape == () and jnp.issubdtype(shape.dtype, jnp.floating)
        if not ok:
            raise ValueError(f"the loss must return one real number (shape (), a float dtype), got {shape}")
        return value


def hessian(value_fn: Callable[[Leaves], jax.Array], at: Leaves) -> Operator:
    """The operator v ↦ ∇²f(at) v; the gradient is linearised once, so no product repeats its primal pass."""
    return jax.linearize(jax.grad(value_fn), at)[1]


def gauss_newton(model_fn: Callable[[Leaves], Any], loss_fn: Callable[[Any], jax.Array], at: Leaves) -> Operator:
    """The operator v ↦ Jᵀ ∇²loss(model(at)) J v, with J the Jacobian of the model at ``at``."""
    outputs, forward = jax.linearize(model_fn, at)
    across = jax.linearize(jax.grad(loss_fn), outputs)[1]
    return Partial(_gauss_newton, forward, across)


def _gauss_newton(forward: Callable[[Leaves], Any], across: Callable[[Any], Any], v: Leaves) -> Leaves:
    (out,) = jax.linear_transpose(forward, v)(across(forward(v)))
    return list(out)


def mean(build: Callable[[Tree, Any], Operator], params: Tree, pieces: Any) -> Operator:
    """The mean of the operators of the pieces, one after the other: the memory of one, at a pass more a product."""

    def matvec(params: Tree, pieces: Any, v: Leaves) -> Leaves:
        def body(total: Leaves, piece: Any) -> tuple[Leaves, None]:
            return jax.tree.map(jnp.add, total, build(params, piece)(v)), None

        total, _ = jax.lax.scan(body, jax.tree.map(jnp.zeros_like, v), pieces)
        count = jax.tree.leaves(pieces)[0].shape[0]
        return jax.tree.map(lambda x: x / count, total)

    return Partial(matvec, params, pieces)
