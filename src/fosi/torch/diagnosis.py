"""What a diagnosis needs, measured with PyTorch: spectrum, sharpness as the base sees it, gradients, times."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fosi.batches import checked, distinct
from fosi.diagnosis import Base, BaseName, Diagnosis, Measured, Seconds
from fosi.measured import check_times
from fosi.options import Accept, Options, Precision
from fosi.torch import lanczos
from fosi.torch import space as sp
from fosi.torch.curvature import Closure, evaluate
from fosi.torch.isolation import Isolation
from fosi.torch.spectrum import estimate


def diagnose(
    closure: Callable[..., Any] | Sequence[Closure],
    params: Iterable[Tensor] | Mapping[str, Tensor] | nn.Module,
    batches: Sequence[Any] | None = None,
    *,
    learning_rate: float,
    base: BaseName = "adam",
    momentum: float = 0.9,
    nu: Iterable[Tensor] | Mapping[str, Tensor] | None = None,
    adam_eps: float = 1e-8,
    k: int = 10,
    ell: int = 0,
    num_matvecs: int | None = None,
    precision: Precision = Options.precision,
    accept: Accept = "converged",
    overhead: float = 0.1,
    refresh_every: int | None = None,
    max_lr_scale: float = 3.0,
    seed: int = 0,
    model: nn.Module | None = None,
    curvature_batches: int | Sequence[Any] | None = None,
    timed: bool = False,
    step_seconds: float | None = None,
    steps_left: int | None = None,
    steps_taken: int | None = None,
) -> Diagnosis:
    """Whether FOSI is likely to help at this point of a training, by how much, and with which settings.

    Spectra at the start of a training mislead: train for a while with the base first, an epoch say. An estimate is made
    of the Hessian, and with Adam two more of P^(−½) H P^(−½), P = diag(√ν + ε): with and without the eigenvectors that
    FOSI would take from it. Each takes m Hessian–vector products on each batch.

    Args:
      closure: closure(batch) -> the loss, without backward, where ``batches`` are given; else a sequence of functions
        without arguments, one a batch.
      params: where training stands: tensors that require gradients, by name if a mapping, or a module.
      batches: a few, four say, as training draws them; one alone does not tell noise from signal. Where training sees
        all data in every step, the same object twice says that there is no noise.
      learning_rate: the base's, at this point.
      base: ``"gd"``, ``"heavy-ball"``, ``"nesterov"``, ``"adam"`` or ``"adamw"``.
      momentum: its momentum; b1 of Adam.
      nu: Adam's second moments, bias-corrected, a tensor for each parameter in their order or by name: that is
        ``state["exp_avg_sq"] / (1 - b2 ** state["step"])``; None takes the batches' mean squared gradient.
      adam_eps: Adam's ε.
      k: how many of the largest eigenpairs.
      ell: how many of the smallest.
      num_matvecs: products of one estimate, m; None takes max(4 (k + ell), ⌈2 ln n⌉), never above n.
      precision: dtype of the Lanczos basis.
      accept: ``"converged"`` or ``"all"``, see ``Spectrum.accepted``.
      overhead: FOSI's run-time budget, which sets how often it estimates.
      refresh_every: T, how often it estimates, in the place of that.
      max_lr_scale: cap on the scaling of the base's rate.
      seed: of the start vectors.
      model: whose buffers and modes are left as they are; ``params`` if that is a module.
      curvature_batches: how many of the batches the curvature is taken on, the first ones; a list of others, such as a
        part of the data where a batch is all of it; None for all.
      timed: whether to measure what a gradient and an estimate take, here and now, rather than count a product as two
        gradients.
      step_seconds: with ``timed``, what a step of the base takes where it trains, loading and all; None for a gradient
        alone, which for a small model is far less.
      steps_left: that training has yet to take; None for many. Adam forgets what FOSI takes from ν over a thousand.
      steps_taken: that it has taken; None for many. After few Adam forgets sooner.

    Returns:
      A ``fosi.diagnosis.Diagnosis``; its ``explain()`` says it in words.

    Raises:
      ValueError: if an argument is out of its range, ``nu`` is not like ``params``, or the parameters are sharded.
      TypeError: if an argument has the wrong type.

    Example:
      >>> import torch
      >>> from fosi.torch import diagnose
      >>> w, scales = torch.ones(5, requires_grad=True), torch.tensor([100.0, 50.0, 1.0, 0.5, 0.1])
      >>> def loss(shift):
      ...     return 0.5 * (scales * (w - shift) ** 2).sum()
      >>> found = diagnose(loss, [w], [0.0, 0.1], base="heavy-ball", learning_rate=0.01, k=2)
      >>> print(f"{found.sharpness:.0f} of {found.limit:.0f}, {found.bulk_edge:.0f} left to the base")
      100 of 380, 1 left to the base
    """
    optimizer = Base(base, learning_rate, momentum, adam_eps)
    check_times(step_seconds, timed, steps_left=steps_left, steps_taken=steps_taken)
    losses = _losses(closure, batches)
    if isinstance(params, nn.Module):
        model = params if model is None else model
        params = {name: p for name, p in params.named_parameters() if p.requires_grad}
    names = list(params) if isinstance(params, Mapping) else None
    space = sp.Space(list(params.values() if isinstance(params, Mapping) else params))
    if space.sharding is not None:
        raise ValueError("params are sharded (DTensor); diagnose a copy of the model that one process holds whole")
    options = Options(
        k=k,
        ell=ell,
        num_matvecs=num_matvecs,
        precision=precision,
        accept=accept,
        overhead=overhead,
        refresh_every=refresh_every,
        max_lr_scale=max_lr_scale,
        seed=seed,
    )
    m = options.schedule(space.dimension).num_matvecs
    if isinstance(curvature_batches, Sequence):
        whose = curvature_batches if batches is None else closure
        over = _losses(whose, None if batches is None else curvature_batches, "curvature_batches")
    else:
        over = distinct(losses, curvature_batches)
    # One pair more than FOSI uses: the largest of what it leaves.
    more = m > k + ell
    found = estimate(over, space, replace(options, k=k + more, num_matvecs=m), 0, model=model)
    beyond = float(found.eigenvalues[k]) if more else None
    kept = np.delete(np.arange(k + more + ell), [k] if more else [])
    accepted = found.accepted[kept]
    used = found.basis[torch.as_tensor(kept, device=space.device)]
    used = used * torch.as_tensor(accepted, device=space.device)[:, None]

    gradients = _gradients(losses, space, model)
    remains = [_project(used, g) for g in gradients]
    inside, outside = _products(gradients, remains, used)
    sharpness = sharpness_left = None
    if optimizer.adaptive:
        root = optimizer.inverse_root(_second_moments(space, gradients, nu, names))
        # Adam inside FOSI sees only what FOSI leaves: its second moments are of that.
        after = root if nu is not None else optimizer.inverse_root(_second_moments(space, remains, None, names))
        one = replace(options, k=1, ell=0, num_matvecs=m)
        seen = [functools.partial(_between, root, None), functools.partial(_between, after, used)]
        tops = [estimate(over, space, one, i, model=model, around=f).extremes[0] for i, f in enumerate(seen, 1)]
        sharpness, sharpness_left = float(tops[0]), float(tops[1])
    return Diagnosis.of(
        optimizer,
        Measured(
            n=space.dimension,
            k=k,
            ell=ell,
            num_matvecs=m,
            eigenvalues=found.eigenvalues[kept],
            residuals=found.residuals[kept],
            accepted=accepted,
            beyond=beyond,
            extremes=found.extremes,
            sharpness=sharpness,
            sharpness_left=sharpness_left,
            inside=inside,
            outside=outside,
            seconds=_seconds(losses[0], over[0], space, options, model, optimizer, gradients[0], used)._replace(
                step=step_seconds
            )
            if timed
            else None,
        ),
        options,
        steps_left=steps_left,
        steps_taken=steps_taken,
    )


def _losses(closure: Any, batches: Any, name: str = "closure") -> list[Closure]:
    if batches is None:
        if isinstance(closure, Sequence) and closure and all(map(callable, closure)):
            return list(closure)
        raise TypeError(
            f"{name} must be a sequence of functions without arguments, or come with batches=, got {closure!r}"
        )
    if not callable(closure):
        raise TypeError(f"closure must be callable as closure(batch) where batches are given, got {closure!r}")
    drawn = checked(batches, "batches" if name == "closure" else name)
    known = {id(batch): functools.partial(closure, batch) for batch in drawn}
    return [known[id(batch)] for batch in drawn]


def _gradients(losses: list[Closure], space: sp.Space, model: nn.Module | None) -> list[Tensor]:
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


def _project(basis: Tensor, vector: Tensor) -> Tensor:
    """What of a vector lies outside the span of the rows."""
    return vector - sp.combine(basis.t(), sp.products(basis, vector))


def _products(gradients: list[Tensor], remains: list[Tensor], used: Tensor) -> tuple[NDArray[Any], NDArray[Any]]:
    """The gradients along the eigenvectors, and the inner products of what is left of them, on the host."""
    inside = torch.stack([sp.products(used, g) for g in gradients])
    left = torch.stack(remains)
    outside = torch.stack([sp.products(left, row) for row in left])
    return inside.double().cpu().numpy(), outside.double().cpu().numpy()


def _second_moments(space: sp.Space, gradients: list[Tensor], nu: Any, names: list[str] | None) -> Tensor:
    if nu is None:
        return torch.stack([g**2 for g in gradients]).mean(0)
    if isinstance(nu, Mapping):
        if names is None or set(nu) != set(names):
            raise ValueError(f"nu must have the names of params, {names}, got {list(nu)}")
        nu = [nu[name] for name in names]
    tensors = list(nu) if isinstance(nu, Iterable) else [nu]
    if not all(isinstance(x, Tensor) for x in tensors):
        raise TypeError(f"nu must be tensors, one for each parameter, or None, got {nu!r:.80}")
    shapes, wanted = [tuple(x.shape) for x in tensors], [tuple(p.shape) for p in space.params]
    if shapes != wanted or not all(bool(((x >= 0) & x.isfinite()).all()) for x in tensors):
        raise ValueError(f"nu must hold finite numbers ≥ 0 in the shapes of params, {wanted}, got shapes {shapes}")
    buffer = space.buffer()
    for view, x in zip(buffer.views, tensors, strict=True):
        view.copy_(x)
    return buffer.vector


def _between(root: Tensor, basis: Tensor | None, matvec: lanczos.Matvec) -> lanczos.Matvec:
    """The operator S (I − V Vᵀ) H (I − V Vᵀ) S, with S the root."""

    def project(vector: Tensor) -> Tensor:
        return vector if basis is None else _project(basis.to(vector.dtype), vector)

    def apply(vector: Tensor) -> Tensor:
        factors = root.to(vector.dtype)
        return factors * project(matvec(project(factors * vector)))

    return apply


def _seconds(
    loss: Closure,
    estimated: Closure,
    space: sp.Space,
    options: Options,
    model: nn.Module | None,
    optimizer: Base,
    gradient: Tensor,
    used: Tensor,
) -> Seconds:
    """Times of warm functions, the least of some calls."""
    passes = 2 if optimizer.adaptive else 1  # V is read four times a step, or twice where the base is linear
    trained = [p for p in space.params if p.requires_grad]
    kept = [] if model is None else [(buffer, buffer.clone()) for buffer in model.buffers()]

    def gradient_alone() -> None:
        # As in training: a refresh switches off mixed precision and fused kernels, which products cannot have.
        with torch.enable_grad():
            torch.autograd.grad(loss(), trained, allow_unused=True)

    devices = [space.device] if space.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        alone = _least(gradient_alone, 5, space.device)
    for buffer, before in kept:
        buffer.data.copy_(before)
    return Seconds(
        gradient=alone,
        refresh=_least(lambda: estimate(estimated, space, options, 0, model=model), 1, space.device),
        projections=passes * _least(lambda: _project(used, gradient), 5, space.device),
    )


def _least(call: Callable[[], Any], times: int, device: torch.device) -> float:
    taken = []
    for _ in range(times + 1):
        begin = time.perf_counter()
        call()
        if device.type != "cpu":
            torch.get_device_module(device.type).synchronize(device)
        taken.append(time.perf_counter() - begin)
    return min(taken[1:])  # the first one warms up
