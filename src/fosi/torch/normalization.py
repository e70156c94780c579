"""Normalizations whose second derivatives are a few passes over the activations, and whose third are right.

PyTorch composes the second derivatives of batch and layer norm of dozens of passes. It takes mean and deviation for
constants in them: one derivative more, which the Hessian of a loss with a gradient in it needs, comes out wrong (2.13).

With z = (x - mean x) r, r = (var x + ε)^-½ and y = γ z + β, the derivative of z is a symmetric map,
P t = r (t - mean t - z mean(t z)), so the gradients of ȳ are P(γ ȳ) for x, Σ ȳ z for γ and Σ ȳ for β. The derivatives
of ⟨P(γ ȳ), u⟩ + ⟨Σ ȳ z, v⟩ + ⟨Σ ȳ, w⟩ then are

- γ P u + v z + w for ȳ,
- Σ ȳ P u for γ,
- P(v ȳ - r q γ ȳ - r p u) - r mean(γ ȳ P u) z for x, where p = mean(γ ȳ z) and q = mean(u z).

Means are over the entries of one statistic, sums over those that share a γ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fosi.torch.convolution import ordinary, transformed


class _Batch(NamedTuple):
    """Batch norm: a statistic and a γ for each entry of the second dimension, a channel."""

    running: tuple[Tensor | None, Tensor | None]
    momentum: float
    eps: float

    def over(self, x: Tensor) -> list[int]:
        return [d for d in range(x.ndim) if d != 1]

    def spread(self, weight: Tensor, x: Tensor) -> Tensor:
        return weight.reshape(-1, *[1] * (x.ndim - 2))

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, ...]:
        return torch.ops.aten.native_batch_norm(x, weight, bias, *self.running, True, self.momentum, self.eps)

    def backward(
        self, wanted: list[bool], y_bar: Tensor, x: Tensor, weight: Tensor, mean: Tensor, r: Tensor
    ) -> tuple[Tensor, ...]:
        return torch.ops.aten.native_batch_norm_backward(y_bar, x, weight, None, None, mean, r, True, self.eps, wanted)

    def prepare(self, y_bar: Tensor, x: Tensor, weight: Tensor, mean: Tensor, r: Tensor) -> tuple[Tensor, ...]:
        """What is the same in every call of ``again``."""
        lines = _lines(x.numel() / r.numel(), weight, mean, r, *_sums(y_bar, x, mean, r))
        return *lines, torch.zeros_like(r), torch.ones_like(r)

    def again(self, saved: tuple[Tensor, ...], u: Tensor, v: Tensor, w: Tensor, wants_x: bool) -> Any:
        y_bar, x, _, mean, r, lines, *of_u, zero, one = saved
        sums = torch.stack([*_sums(u, x, mean, r), _sums(u, y_bar, zero, one)[0], v, w])
        *factors, to_weight = (lines * sums).sum(1)
        y_shift, of_y, x_shift, of_x, y_u, x_u = (self.spread(t, x) for t in (*factors, *of_u))
        to_y = torch.addcmul(y_shift, x, of_y).addcmul_(u, y_u)
        to_x = torch.addcmul(x_shift, x, of_x).addcmul_(y_bar, of_y).addcmul_(u, x_u) if wants_x else None
        return to_y, to_x, to_weight


def _lines(n: float, weight: Tensor, mean: Tensor, r: Tensor, dots: Tensor, sums: Tensor) -> tuple[Tensor, ...]:
    """How the factors of ``again`` come of Σ u z, Σ u, Σ u ȳ, v and w, which they are linear in; and those of u itself.

    γ and r are the same all over a mean here, so that the derivatives for ȳ and x are sums of x, ȳ and u, each with a
    factor a channel. Found anew in each product, in dozens of small steps, these would take longer than the sums.
    """
    unit = torch.eye(5, dtype=r.dtype, device=r.device)[:, :, None]
    q, u_mean, both, v, w = *(unit[:3] / n), *unit[3:]
    p, y_mean = dots / n, sums / n  # p without γ
    inner = r * (both - u_mean * y_mean - p * q)  # mean(ȳ P u)
    of_y = r * (v - weight * r * q)  # that of x in the one for ȳ, and of ȳ in the one for x
    y_u, x_u = weight * r, -weight * r * r * p
    of_x = -r * (p * of_y + q * x_u + weight * r * inner)
    y_shift = w - y_u * u_mean - mean * of_y
    x_shift = -y_mean * of_y - u_mean * x_u - mean * of_x
    return torch.stack([y_shift, of_y, x_shift, of_x, n * inner]), y_u, x_u


class _Layer(NamedTuple):
    """Layer norm: a γ for each entry of the last dimensions, a statistic for each of those before."""

    shape: list[int]
    eps: float

    def over(self, x: Tensor) -> list[int]:
        return list(range(x.ndim - len(self.shape), x.ndim))

    def spread(self, weight: Tensor, x: Tensor) -> Tensor:
        return weight

    def forward(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor, ...]:
        return torch.ops.aten.native_layer_norm(x, self.shape, weight, bias, self.eps)

    def backward(
        self, wanted: list[bool], y_bar: Tensor, x: Tensor, weight: Tensor, mean: Tensor, r: Tensor
    ) -> tuple[Tensor, ...]:
        # Of β it reads the shape alone, which is γ's.
        return torch.ops.aten.native_layer_norm_backward(y_bar, x, self.shape, mean, r, weight, weight, wanted)

    def prepare(self, y_bar: Tensor, x: Tensor, weight: Tensor, mean: Tensor, r: Tensor) -> tuple[Tensor, ...]:
        """What is the same in every call of ``again``."""
        share = -r / weight.numel()  # makes -r mean of a sum
        return share, share * self._dots(y_bar * weight, x, mean, r)

    def again(self, saved: tuple[Tensor, ...], u: Tensor, v: Tensor, w: Tensor, wants_x: bool) -> Any:
        y_bar, x, weight, mean, r, share, of_u = saved
        z = self.forward(x, None, None)[0]
        projected = self._project(u, x, mean, r)
        to_y = torch.addcmul(w, z, v).addcmul_(projected, weight)
        products = (y_bar * projected).reshape(-1, weight.numel())
        to_x = None
        if wants_x:
            mixed = torch.addcmul(v, weight, share * self._dots(u, x, mean, r)).mul_(y_bar).addcmul_(u, of_u)
            of_z = share * (products @ weight.reshape(-1)).reshape(r.shape)
            to_x = self._project(mixed, x, mean, r).addcmul_(z, of_z)
        return to_y, to_x, products.sum(0).reshape(weight.shape)

    def _project(self, t: Tensor, x: Tensor, mean: Tensor, r: Tensor) -> Tensor:
        wanted = [True, False, False]
        return torch.ops.aten.native_layer_norm_backward(t, x, self.shape, mean, r, None, None, wanted)[0]

    def _dots(self, t: Tensor, x: Tensor, mean: Tensor, r: Tensor) -> Tensor:
        """Σ t z of each statistic."""
        rows = r.numel()
        dots, _ = _sums(t.reshape(1, rows, -1), x.reshape(1, rows, -1), mean.reshape(-1), r.reshape(-1))
        return dots.reshape(r.shape)


def _sums(t: Tensor, x: Tensor, mean: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    """Σ t z and Σ t of each entry of the second dimension, in one pass."""
    _, dots, sums = torch.ops.aten.native_batch_norm_backward(
        t, x, r, None, None, mean, r, True, 0.0, [False, True, True]
    )
    return dots, sums


class _Composed:
    """The same derivatives, of operations that autograd differentiates to any order."""

    def __init__(self, norm: _Batch | _Layer, x: Tensor, weight: Tensor) -> None:
        self.norm, self.x, self.over = norm, x, norm.over(x)
        self.shape, self.gamma = weight.shape, norm.spread(weight, x)
        centred = x - self.mean(x)
        self.r = (self.mean(centred**2) + norm.eps).rsqrt()
        self.z = centred * self.r

    def mean(self, t: Tensor) -> Tensor:
        return t.mean(self.over, keepdim=True)

    def sum(self, t: Tensor) -> Tensor:
        return t.sum_to_size(self.gamma.shape).reshape(self.shape)

    def project(self, t: Tensor) -> Tensor:
        return self.r * (t - self.mean(t) - self.z * self.mean(t * self.z))

    def backward(self, y_bar: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.project(self.gamma * y_bar), self.sum(y_bar * self.z), self.sum(y_bar)

    def again(self, y_bar: Tensor, u: Tensor, v: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        v, w = (self.norm.spread(t, self.x) for t in (v, w))
        projected, scaled = self.project(u), self.gamma * y_bar
        p, q = self.mean(scaled * self.z), self.mean(u * self.z)
        to_x = self.project(v * y_bar - self.r * (q * scaled + p * u)) - self.r * self.mean(scaled * projected) * self.z
        return self.gamma * projected + v * self.z + w, to_x, self.sum(y_bar * projected)


class _Normalize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, norm: _Batch | _Layer, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        y, mean, r = norm.forward(x, weight, bias)
        ctx.norm = norm
        ctx.save_for_backward(x, weight, mean, r)
        return y

    @staticmethod
    def backward(ctx: Any, y_bar: Tensor) -> Any:
        norm, saved, wanted = ctx.norm, ctx.saved_tensors, list(ctx.needs_input_grad[1:])
        if transformed(y_bar):
            out = _Composed(norm, *saved[:2]).backward(y_bar)
        elif torch.is_grad_enabled():
            out = _Backward.apply(norm, wanted, y_bar, *saved)  # type: ignore[no-untyped-call]
        else:
            out = norm.backward(wanted, y_bar, *saved)
        return None, *_those(wanted, out)


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, norm: _Batch | _Layer, wanted: list[bool], *tensors: Tensor) -> Any:
        ctx.norm = norm
        ctx.save_for_backward(*tensors, *norm.prepare(*tensors))
        ctx.set_materialize_grads(False)
        return tuple(_those(wanted, norm.backward(wanted, *tensors)))

    @staticmethod
    def backward(ctx: Any, u: Tensor | None, v: Tensor | None, w: Tensor | None) -> Any:
        y_bar, x, weight, *_ = saved = ctx.saved_tensors
        u = torch.zeros_like(x) if u is None else u
        v, w = (torch.zeros_like(weight) if t is None else t for t in (v, w))
        wanted = ctx.needs_input_grad[2:5]  # ȳ, x and γ
        if torch.is_grad_enabled() or transformed(u, v, w):
            out = _Composed(ctx.norm, x, weight).again(y_bar, u, v, w)
        else:
            out = ctx.norm.again(saved, u, v, w, wanted[1])
        return None, None, *_those(wanted, out), None, None


def _those(wanted: Sequence[bool], tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    return [t if wants else None for t, wants in zip(tensors, wanted, strict=True)]


def _normalize(norm: _Batch | _Layer, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    out: Tensor = _Normalize.apply(norm, x, weight, bias)  # type: ignore[no-untyped-call]
    return out


def _batch(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: Any = 0.1,
    eps: float = 1e-5,
) -> Tensor | None:
    given = [t for t in (running_mean, running_var, weight, bias) if t is not None]
    # Without training it is a line, which torch is good at.
    if not training or not isinstance(momentum, (int, float)) or input.ndim < 2 or not _plain(input, *given):
        return None
    channels = input.shape[1]
    if input.numel() <= channels or any(t.shape != (channels,) for t in given):
        return None
    weight = input.new_ones(channels) if weight is None else weight
    return _normalize(_Batch((running_mean, running_var), momentum, eps), input, weight, bias)


def _instance(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor | None:
    if not use_input_stats or running_mean is not None or running_var is not None or input.ndim < 3:
        return None
    # The same as torch does: a batch of one, with a channel for every channel of every entry.
    channels = input.reshape(1, len(input) * input.shape[1], *input.shape[2:])
    scale, shift = (None if t is None else t.repeat(len(input)) for t in (weight, bias))
    out = _batch(channels, None, None, scale, shift, True, momentum, eps)
    return None if out is None else out.reshape(input.shape)


def _layer(
    input: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Tensor | None:
    given = [t for t in (weight, bias) if t is not None]
    shape = list(normalized_shape)
    if not shape or list(input.shape[-len(shape) :]) != shape or not _plain(input, *given):
        return None
    weight = input.new_ones(shape) if weight is None else weight
    return _normalize(_Layer(shape, eps), input, weight, bias)


def _plain(*tensors: Tensor) -> bool:
    """Whether there is nothing about the call that torch's own function had better handle."""
    x = tensors[0]
    known = x.device.type in ("cpu", "cuda") and x.dtype in (torch.float32, torch.float64)
    # Activation checkpoints are such hooks. They compare what is saved with what is when the forward pass is run again,
    # from within torch.autograd.grad, where no mode is on.
    hooked = torch._C._autograd._top_saved_tensors_default_hooks(False) is not None
    return known and not hooked and x.numel() > 0 and ordinary(*tensors)


NORMALIZATIONS: dict[Any, Callable[..., Tensor | None]] = {
    F.batch_norm: _batch,
    F.instance_norm: _instance,
    **dict.fromkeys((F.layer_norm, torch.layer_norm), _layer),
}
"""For each of torch's normalizations one that gives the same, or None: torch's own had better be called."""
