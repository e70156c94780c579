"""One step inside a spectrum: the split of the gradient, the Newton part and the base optimizer's part.

Both forms compute Algorithm 2's update with the base's own ``step()``: what it did to the parameters is corrected
afterwards, so that the base may be any optimizer, fused ones among them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, optim

from fosi.options import Momentum
from fosi.torch import bases
from fosi.torch import space as sp


class Subspace(NamedTuple):
    """What a step needs of the current estimate.

    Attributes:
      basis: V, the rows up to the last that is used.
      used: 1 for each row that is used, 0 for the others; None where all are.
      newton: α / |λ| for each row that is used, 0 for the others.
      lr_scale: factor on the base's learning rate.
    """

    basis: Tensor
    used: Tensor | None
    newton: Tensor
    lr_scale: float


class Workspace:
    """Vectors that steps write into, made when first needed and kept: a step then allocates next to nothing."""

    def __init__(self, space: sp.Space) -> None:
        """Starts without any."""
        self.space = space
        self._buffers: dict[str, sp.Buffer] = {}

    def __getitem__(self, name: str) -> sp.Buffer:
        if name not in self._buffers:
            self._buffers[name] = self.space.buffer()
        return self._buffers[name]


class Parts(NamedTuple):
    """The parameters that take part in a step, those that have a gradient, and where they are among all."""

    params: list[Tensor]
    grads: list[Tensor]
    where: list[int] | None

    def of(self, views: list[Tensor]) -> list[Tensor]:
        """The views that belong to them."""
        return views if self.where is None else [views[i] for i in self.where]


def parts(params: Sequence[Tensor]) -> Parts:
    """The parameters with a gradient. Those without one are left alone, as the base leaves them."""
    grads = [p.grad for p in params]
    if any(g is None for g in grads):
        index = [i for i, g in enumerate(grads) if g is not None]
        if not index:
            raise RuntimeError("step() found no gradient on any parameter: call loss.backward() before it")
        present = Parts([params[i] for i in index], [g for g in grads if g is not None], index)
    else:
        present = Parts(list(params), grads, None)  # type: ignore[arg-type]
    return present


def check_dense(grads: Sequence[Tensor]) -> None:
    """Raises for sparse gradients."""
    for g in grads:
        if g.layout != torch.strided:
            raise ValueError(
                f"a gradient has layout {g.layout}; FOSI takes dense gradients (nn.Embedding(sparse=False))"
            )


def linear_step(base: optim.Optimizer, present: Parts, subspace: Subspace, work: Workspace) -> None:
    """A base that is linear in the gradients: SGD, with momentum or without. Two reads of V.

    §3.4 asks for the same linear combination of past gradients in both parts. With m̄ the base's own combination of the
    whole gradients, c = V m̄ gives both, and the update is −η m̄ + Vᵀ((η − α / |λ|) ⊙ c) with η the scaled rate. The base
    takes its own step, −lr m̄; the rest is added. At a refresh m̄ is kept whole, so the Newton part starts with the
    base's momentum instead of from zero.
    """
    group = base.param_groups[0]
    beta, rate, scale = float(group["momentum"]), bases.number(group["lr"]), subspace.lr_scale
    mean, change = work["mean"], work["change"]
    _clear_absent(mean, present)
    ahead = not beta or group["nesterov"]
    if ahead:  # what is needed of the gradient and the penalty is needed before the step
        sp.write(present.of(mean.views), present.grads)
        _add_penalty(mean, base, present)
    base.step()
    if beta:
        buffers = [base.state[p]["momentum_buffer"] for p in present.params]
        if ahead:
            torch._foreach_add_(present.of(mean.views), buffers, alpha=beta)
        else:
            sp.write(present.of(mean.views), buffers)
    inside = _products(subspace, mean.vector)
    sp.combine(subspace.basis, (rate * scale - subspace.newton) * inside, out=change.vector)
    if scale != 1:
        change.vector.add_(mean.vector, alpha=-rate * (scale - 1))
    torch._foreach_add_(present.params, present.of(change.views))


def momentum_inside(base: optim.Optimizer, subspace: Subspace, work: Workspace) -> Tensor:
    """The part of SGD's momentum that lies in the subspace."""
    mean = work["mean"]
    mean.vector.zero_()
    for view, p in zip(mean.views, work.space.params, strict=True):
        buffer = base.state[p].get("momentum_buffer") if p in base.state else None
        if buffer is not None:
            view.copy_(buffer)
    return _products(subspace, mean.vector)


def projected_step(
    base: optim.Optimizer,
    present: Parts,
    subspace: Subspace,
    work: Workspace,
    rule: Momentum,
    momentum: Tensor | None,
    count: int,
) -> Tensor | None:
    """Any base: it is handed the gradient less its part in V. Four reads of V.

    c = V g, the base's step d on g − Vᵀc, e = V d, and the update s d − Vᵀ(s e + (α / |λ|) ⊙ c̄). The momentum c̄ of the
    Newton part lives in the subspace. Weight decay is taken out of the base: an L2 penalty is part of the gradient that
    is split, decoupled decay is applied by itself, so that its part in V is not lost.

    Returns:
      The next momentum.
    """
    basis, scale = subspace.basis, subspace.lr_scale
    before, rest, change = work["before"], work["mean"], work["change"]
    params = present.params
    for buffer in (rest, before):
        _clear_absent(buffer, present)
    sp.write(present.of(rest.views), present.grads)
    _add_penalty(rest, base, present)
    inside = _products(subspace, rest.vector)
    sp.subtract(rest.vector, basis, inside)
    _shrink(base)
    sp.write(present.of(before.views), params)
    with _gradients(present, present.of(rest.views), work.space.uniform), bases.without_decay(base):
        base.step()

    if rule is not None:
        momentum = rule.update(torch.zeros_like(inside) if momentum is None else momentum, inside)
        inside = rule.read(momentum, inside, count + 1)
    torch._foreach_sub_(present.of(before.views), params)  # −d
    along = _products(subspace, before.vector)
    sp.combine(
        basis,
        torch.addcmul(along if scale == 1 else scale * along, subspace.newton, inside, value=-1),
        out=change.vector,
    )
    if scale != 1:
        change.vector.add_(before.vector, alpha=1 - scale)
    torch._foreach_add_(params, present.of(change.views))
    return momentum


@contextlib.contextmanager
def _gradients(present: Parts, others: Sequence[Tensor], alike: bool) -> Iterator[None]:
    """Other gradients in the place of the parameters' own, which are not written to and come back whatever happens."""
    try:
        for p, grad, other in zip(present.params, present.grads, others, strict=True):
            # Asking .to() for nothing would cost as much as all the rest of this loop.
            p.grad = other if alike else other.to(grad.dtype)
        yield
    finally:
        for p, grad in zip(present.params, present.grads, strict=True):
            p.grad = grad


def _products(subspace: Subspace, vector: Tensor) -> Tensor:
    """The inner products with the rows that are used, zeros for the others."""
    inside = sp.products(subspace.basis, vector)
    return inside if subspace.used is None else inside * subspace.used


def _clear_absent(buffer: sp.Buffer, present: Parts) -> None:
    """Parameters that take no part count as zeros; what an earlier step left there must not be seen."""
    if present.where is not None:
        buffer.vector.zero_()


def _add_penalty(gradient: sp.Buffer, base: optim.Optimizer, present: Parts) -> None:
    """The gradient of the base's L2 penalty, ½ w ‖θ‖² in each group."""
    by_group = bases.strengths(base, "coupled")
    if not any(by_group):
        return
    views = dict(zip(map(id, present.params), present.of(gradient.views), strict=True))
    for strength, group in zip(by_group, base.param_groups, strict=True):
        here = [p for p in group["params"] if id(p) in views]
        if strength and here:
            torch._foreach_add_([views[id(p)] for p in here], here, alpha=strength)


def _shrink(base: optim.Optimizer) -> None:
    """Decoupled weight decay, θ ← (1 − lr w) θ, before the step as in the base."""
    for strength, group in zip(bases.strengths(base, "decoupled"), base.param_groups, strict=True):
        if not strength:
            continue
        here = [p for p in group["params"] if p.grad is not None]
        if here:
            torch._foreach_mul_(here, 1 - bases.number(group["lr"]) * strength)
