"""Convolutions whose second derivatives are convolutions.

PyTorch differentiates the backward pass of a grouped convolution group by group, thousands of small kernels for a
depthwise layer, and the gradient of any weight as a convolution with the image for a kernel, which is slow on CUDA. A
convolution is bilinear, so its second derivatives are the same three maps again, which libraries have fast kernels for:
with y = B(x, w) and the adjoints Bₓ*(ȳ, w) and B_w*(ȳ, x), the derivatives of ⟨Bₓ*(ȳ, w), u⟩ + ⟨B_w*(ȳ, x), v⟩ are
B(u, w) + B(x, v) for ȳ, Bₓ*(ȳ, v) for x and B_w*(ȳ, u) for w.
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
        return None, *_adjoints(ctx.form, y_bar, x, w, list(ctx.needs_input_grad[1:]))


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, form: _Form, y_bar: Tensor, x: Tensor, w: Tensor, wanted: list[bool]) -> Any:
        ctx.form = form
        ctx.save_for_backward(y_bar, x, w)
        ctx.set_materialize_grads(False)
        return form.backward(y_bar, x, w, wanted)

    @staticmethod
    def backward(ctx: Any, u: Tensor | None, v: Tensor | None) -> Any:
        y_bar, x, w = ctx.saved_tensors
        form: _Form = ctx.form
        needs_y, needs_x, needs_w = ctx.needs_input_grad[1:4]
        to_y = to_x = to_w = None
        if needs_y and u is not None:
            to_y = _convolve(form, u, w)
        if needs_y and v is not None:
            other = _convolve(form, x, v)
            to_y = other if to_y is None else to_y + other
        if needs_x and v is not None:
            to_x = _adjoints(form, y_bar, x, v, [True, False])[0]
        if needs_w and u is not None:
            to_w = _adjoints(form, y_bar, u, w, [False, True])[1]
        return None, to_y, to_x, to_w, None


def _convolve(form: _Form, x: Tensor, w: Tensor) -> Tensor:
    if transformed(x, w):
        return form.forward(x, w)
    out: Tensor = _Convolution.apply(form, x, w)  # type: ignore[no-untyped-call]
    return out


def _adjoints(form: _Form, y_bar: Tensor, x: Tensor, w: Tensor, wanted: list[bool]) -> tuple[Tensor | None, ...]:
    if transformed(y_bar, x, w):
        return form.backward(y_bar, x, w, wanted)
    out: tuple[Tensor | None, ...] = _Backward.apply(form, y_bar, x, w, wanted)  # type: ignore[no-untyped-call]
    return out


def _straight(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor | None:
    if isinstance(padding, str) or not _plain(input, weight, groups) or not _fits(bias, weight, weight.shape[0]):
        return None
    dims = weight.ndim - 2
    form = _Form(_each(stride, dims), _each(padding, dims), _each(dilation, dims), False, [0] * dims, groups)
    return _with_bias(_convolve(form, input, weight), bias)


def _transposed(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Tensor | None:
    if not _plain(input, weight, groups) or not _fits(bias, weight, groups * weight.shape[1]):
        return None
    dims = weight.ndim - 2
    out = _each(output_padding, dims)
    form = _Form(_each(stride, dims), _each(padding, dims), _each(dilation, dims), True, out, groups)
    return _with_bias(_convolve(form, input, weight), bias)


def _plain(x: Tensor, weight: Tensor, groups: int) -> bool:
    """Whether there is something to gain, and nothing about the call that torch's own function had better handle.

    On a CPU torch's own is the faster for one group. On CUDA it convolves with the image for a kernel: on an H200 a
    product of MobileNet took 59 ms with that and 43 without, one such kernel alone 11.
    """
    return (groups > 1 or weight.is_cuda) and x.ndim == weight.ndim and ordinary(x, weight)


def ordinary(*tensors: Tensor) -> bool:
    """Whether these are dense real tensors of one kind, outside autocast, torch.func and forward-mode derivatives."""
    kind = tensors[0].dtype, tensors[0].device
    if torch.is_autocast_enabled(kind[1].type) or torch.autograd.forward_ad._current_level >= 0:
        return False
    return not transformed(*tensors) and all(_dense(t) and (t.dtype, t.device) == kind for t in tensors)


def _dense(t: Tensor) -> bool:
    plain = type(t) in (Tensor, torch.nn.Parameter) and not t.is_nested and t.layout == torch.strided
    return plain and t.is_floating_point()


def transformed(*tensors: Tensor | None) -> bool:
    """Whether this is inside a transform: of torch.func, or of ``torch.autograd.grad(is_grads_batched=True)``.

    Functions of ours raise there, or lose their graph without a word; torch's own operations are what they know.
    """
    functorch = torch._C._functorch
    batched = any(t is not None and functorch.is_legacy_batchedtensor(t) for t in tensors)
    return batched or functorch.maybe_current_level() is not None


def _fits(bias: Tensor | None, weight: Tensor, outputs: int) -> bool:
    """Whether torch would take this bias; it says what is wrong with another one."""
    return bias is None or (bias.shape == (outputs,) and bias.dtype == weight.dtype)


def _with_bias(y: Tensor, bias: Tensor | None) -> Tensor:
    return y if bias is None else y + bias.reshape(-1, *[1] * (y.ndim - 2))


def _each(value: Any, dims: int) -> list[int]:
    values = [value] if isinstance(value, int) else list(value)
    return values * dims if len(values) == 1 else values


CONVOLUTIONS: dict[Any, Callable[..., Tensor | None]] = {
    **dict.fromkeys((torch.conv1d, torch.conv2d, torch.conv3d), _straight),
    **dict.fromkeys((torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d), _transposed),
}
"""For each of torch's convolutions one that gives the same, or None where torch's own is as good."""
