"""Convolutions whose second derivatives are convolutions.

PyTorch differentiates the backward pass of a grouped convolution group by group, thousands of small kernels for a
depthwise layer. A convolution is bilinear, so its second derivatives are the same three maps again, which libraries
have fast kernels for: with y = B(x, w) and the adjoints Bₓ*(ȳ, w) and B_w*(ȳ, x), the derivatives of
⟨Bₓ*(ȳ, w), u⟩ + ⟨B_w*(ȳ, x), v⟩ are B(u, w) + B(x, v) for ȳ, Bₓ*(ȳ, v) for x and B_w*(ȳ, u) for w.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor


class _Form(NamedTuple):
    """Which convolution: the last arguments of ``aten::convolution``."""

    stride: list[int]
    padding: list[int]
    dilation: list[int]
    transposed: bool
    output_padding: list[int]
    groups: int

    def forward(self, x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        return torch.ops.aten.convolution(x, w, b, *self)

    def backward(self, y_bar: Tensor, x: Tensor, w: Tensor, wanted: list[bool]) -> tuple[Tensor | None, Tensor | None]:
        # The bias' share is a sum, which autograd takes by itself.
        x_bar, w_bar, _ = torch.ops.aten.convolution_backward(y_bar, x, w, None, *self, [*wanted, False])
        return x_bar, w_bar


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, form: _Form, x: Tensor, w: Tensor) -> Tensor:
        ctx.form = form
        ctx.save_for_backward(x, w)
        return form.forward(x, w)

    @staticmethod
    def backward(ctx: Any, y_bar: Tensor) -> Any:
        x, w = ctx.saved_tensors
        return None, *_Backward.apply(ctx.form, y_bar, x, w, list(ctx.needs_input_grad[1:]))  # type: ignore[no-untyped-call]


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, form: _Form, y_bar: Tensor, x: Tensor, w: Tensor, wanted: list[bool]) -> Any:
        ctx.form = form
        ctx.save_for_backward(y_bar, x, w)
        ctx.set_materialize_grads(False)
        return form.backward(y_bar, x, w, wanted)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, u: Tensor | None, v: Tensor | None) -> Any:
        y_bar, x, w = ctx.saved_tensors
        form: _Form = ctx.form
        needs_y, needs_x, needs_w = ctx.needs_input_grad[1:4]
        to_y = to_x = to_w = None
        if needs_y and u is not None:
            to_y = form.forward(u, w)
        if needs_y and v is not None:
            other = form.forward(x, v)
            to_y = other if to_y is None else to_y.add_(other)
        if needs_x and v is not None:
            to_x = form.backward(y_bar, x, v, [True, False])[0]
        if needs_w and u is not None:
            to_w = form.backward(y_bar, u, w, [False, True])[1]
        return None, to_y, to_x, to_w, None


def _straight(
    x: Tensor, weight: Tensor, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1
) -> Tensor | None:
    dims = weight.ndim - 2
    if isinstance(padding, str) or x.ndim != weight.ndim:
        return None
    form = _Form(_each(stride, dims), _each(padding, dims), _each(dilation, dims), False, [0] * dims, groups)
    return _apply(form, x, weight, bias)


def _transposed(
    x: Tensor,
    weight: Tensor,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Tensor | None:
    dims = weight.ndim - 2
    if x.ndim != weight.ndim:
        return None
    out = _each(output_padding, dims)
    return _apply(
        _Form(_each(stride, dims), _each(padding, dims), _each(dilation, dims), True, out, groups), x, weight, bias
    )


def _apply(form: _Form, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    y: Tensor = _Convolution.apply(form, x, weight)  # type: ignore[no-untyped-call]
    return y if bias is None else y + bias.reshape(-1, *[1] * (weight.ndim - 2))


def _each(value: Any, dims: int) -> list[int]:
    values = [value] if isinstance(value, int) else list(value)
    return values * dims if len(values) == 1 else values


TWICE_DIFFERENTIABLE: dict[Any, Callable[..., Tensor | None]] = {
    **dict.fromkeys((torch.conv1d, torch.conv2d, torch.conv3d), _straight),
    **dict.fromkeys((torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d), _transposed),
}
"""For each of torch's convolutions one that gives the same, or None where it does not know how (padding="same")."""
