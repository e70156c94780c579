"""One step inside a spectrum: the split of the gradient, the Newton part and the base optimizer's part.

Both forms compute Algorithm 2's update with the base's own ``step()``: what it did to the parameters is corrected
afterwards, so that the base may be any optimizer, fused ones among them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, optim

from fosi.momentum import Ema, Trace
from fosi.options import Momentum
from fosi.torch import bases
from fosi.torch import space as sp


class Subspace(NamedTuple):
    """What a step needs of the current estimate.

    Attributes:
      basis: V, the rows up to the last that is used.
      columns: Vᵀ, on the same memory.
      rows: how many V has.
      used: 1 for each row that is used, 0 for the others; None where all are.
      inverse: 1 / |λ| for each row that is used, 0 for the others.
      lr_scale: factor on the base's learning rate.
    """

    basis: Tensor
    columns: Tensor
    rows: int
    used: Tensor | None
    inverse: Tensor
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
    """The parameters that take part in a step, those that have a gradient, and where they are among all.

    ``params`` and ``grads`` are the base's, ``local_params`` and ``local_grads`` what this process holds of them: the
    same lists, or the shards, which share memory with them.
    """

    params: list[Tensor]
    grads: list[Tensor]
    local_params: list[Tensor]
    local_grads: list[Tensor]
    where: list[int] | None

    def of(self, views: list[Tensor]) -> list[Tensor]:
        """The views that belong to them."""
        return views if self.where is None else [views[i] for i in self.where]


def parts(space: sp.Space) -> Parts:
    """The parameters with a gradient. Those without one are left alone, as the base leaves them."""
    params, where = space.params, None
    grads = [grad for p in params if (grad := p.grad) is not None]
    if len(grads) < len(params):
        if not grads:
            raise RuntimeError("step() found no gradient on any parameter: call loss.backward() before it")
        where = [i for i, p in enumerate(params) if p.grad is not None]
        params = [params[i] for i in where]
    return Parts(params, grads, space.local(params), space.local(grads), where)


def check_dense(grads: Sequence[Tensor]) -> None:
    """Raises for sparse gradients."""
    for g in grads:
        if g.layout != torch.strided:
            raise ValueError(
                f"a gradient has layout {g.layout}; FOSI takes dense gradients (nn.Embedding(sparse=False))"
            )


def linear_step(base: optim.Optimizer, present: Parts, subspace: Subspace, work: Workspace, alpha: float) -> None:
    """A base that is linear in the gradients: SGD, with momentum or without. Two reads of V.

    §3.4 asks for the same linear combination of past gradients in both parts. With m̄ the base's own combination of the
    whole gradients, c = V m̄ gives both, and the update is −η m̄ + Vᵀ((η − α / |λ|) ⊙ c) with η the scaled rate. The base
    takes its own step, −lr m̄; the rest is added. At a refresh m̄ is kept whole, so the Newton part starts with the
    base's momentum instead of from zero.
    """
    group = base.param_groups[0]
    beta, rate, scale = float(group["momentum"]), bases.number(group["lr"]), subspace.lr_scale
    mean = work["mean"]
    _clear_absent(mean, present)
    ahead = not beta or group["nesterov"]
    if ahead:  # what is needed of the gradient and the penalty is needed before the step
        sp.write(present.of(mean.views), present.local_grads)
        _add_penalty(mean, bases.decays(base), present)
    base.step()
    if beta:
        buffers = work.space.local([base.state[p]["momentum_buffer"] for p in present.params])
        if ahead:
            torch._foreach_add_(present.of(mean.views), buffers, alpha=beta)
        else:
            sp.write(present.of(mean.views), buffers)
    inside = _products(subspace, mean.vector, work.space.group)
    along = torch.addcmul(rate * scale * inside, subspace.inverse, inside, value=-alpha)
    sp.add_to_multiple(rate * (1 - scale), mean.vector, subspace.columns, along)
    torch._foreach_add_(present.local_params, present.of(mean.views))


def momentum_inside(base: optim.Optimizer, subspace: Subspace, work: Workspace) -> Tensor:
    """The part of SGD's momentum that lies in the subspace."""
    mean = work["mean"]
    mean.vector.zero_()
    for view, p in zip(mean.views, work.space.params, strict=True):
        buffer = base.state[p].get("momentum_buffer") if p in base.state else None
        if buffer is not None:
            view.copy_(work.space.local([buffer])[0])
    return _products(subspace, mean.vector, work.space.group)


def projected_step(
    base: optim.Optimizer,
    present: Parts,
    subspace: Subspace,
    work: Workspace,
    alpha: float,
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
    scale = subspace.lr_scale
    before, rest = work["before"], work["mean"]
    params, group, decays = present.local_params, work.space.group, bases.decays(base)
    for buffer in (rest, before):
        _clear_absent(buffer, present)
    sp.write(present.of(rest.views), present.local_grads)
    _add_penalty(rest, decays, present)
    inside = _products(subspace, rest.vector, group)
    sp.subtract(rest.vector, subspace.columns, inside)
    _shrink(decays)
    sp.write(present.of(before.views), params)
    _step_on(base, present, present.of(rest.views), decays, work.space)

    momentum, inside, factor = _combined(rule, momentum, inside, count + 1)
    torch._foreach_sub_(present.of(before.views), params)  # −d
    along = _products(subspace, before.vector, group)
    along = torch.addcmul(along if scale == 1 else scale * along, subspace.inverse, inside, value=-alpha * factor)
    sp.add_to_multiple(1 - scale, before.vector, subspace.columns, along)
    torch._foreach_add_(params, present.of(before.views))
    return momentum


def _step_on(
    base: optim.Optimizer, present: Parts, others: Sequence[Tensor], decays: list[bases.Decay], space: sp.Space
) -> None:
    """The base's step without its weight decay, on other gradients in the place of the parameters' own.

    These are not written to and, as the weight decay, come back whatever happens.
    """
    if not space.uniform:  # asking .to() for nothing would cost as much as all the rest of this
        others = [other.to(grad.dtype) for other, grad in zip(others, present.grads, strict=True)]
    if space.sharding is not None:
        others = space.sharding.wrap(others, present.params)
    try:
        for decay in decays:
            decay.group["weight_decay"] = 0.0
        for p, other in zip(present.params, others, strict=True):
            p.grad = other
        base.step()
    finally:
        for p, grad in zip(present.params, present.grads, strict=True):
            p.grad = grad
        for decay in decays:
            decay.group["weight_decay"] = decay.strength


def _combined(
    rule: Momentum, momentum: Tensor | None, inside: Tensor, count: int
) -> tuple[Tensor | None, Tensor, float]:
    """The next momentum, and what the step reads from it: numbers, and a factor on them.

    Written out for torch: with the rules' own operators an average would take four kernels in the place of one.
    """
    if rule is None:
        return momentum, inside, 1.0
    if momentum is None:
        momentum = torch.zeros_like(inside)
    if type(rule) not in (Ema, Trace):  # of the user's own making
        momentum = rule.update(momentum, inside)
        return momentum, rule.read(momentum, inside, count), 1.0
    if isinstance(rule, Ema):
        momentum = torch.lerp(momentum, inside, 1 - rule.decay)
        return momentum, momentum, rule.read(1.0, 0.0, count)
    momentum = torch.add(inside, momentum, alpha=rule.decay)
    ahead = torch.add(inside, momentum, alpha=rule.decay) if rule.nesterov else momentum
    return momentum, ahead, 1.0


def _products(subspace: Subspace, vector: Tensor, group: Any) -> Tensor:
    """The inner products with the rows that are used, zeros for the others."""
    inside = sp.products(subspace.basis, vector, group)
    return inside if subspace.used is None else inside * subspace.used


def _clear_absent(buffer: sp.Buffer, present: Parts) -> None:
    """Parameters that take no part count as zeros; what an earlier step left there must not be seen."""
    if present.where is not None:
        buffer.vector.zero_()


def _add_penalty(gradient: sp.Buffer, decays: list[bases.Decay], present: Parts) -> None:
    """The gradient of the base's L2 penalty, ½ w ‖θ‖² in each group."""
    coupled = [decay for decay in decays if decay.kind == "coupled"]
    if not coupled:
        return
    pairs = zip(present.of(gradient.views), present.local_params, strict=True)
    by_param = dict(zip(map(id, present.params), pairs, strict=True))
    for decay in coupled:
        here = [by_param[id(p)] for p in decay.group["params"] if id(p) in by_param]
        if here:
            views, params = zip(*here, strict=True)
            torch._foreach_add_(views, params, alpha=float(decay.strength))


def _shrink(decays: list[bases.Decay]) -> None:
    """Decoupled weight decay, θ ← (1 − lr w) θ, before the step as in the base."""
    for group, strength, kind in decays:
        if kind == "decoupled" and (here := [p for p in group["params"] if p.grad is not None]):
            torch._foreach_mul_(here, 1 - bases.number(group["lr"]) * float(strength))
