"""What a diagnosis needs, measured with PyTorch: spectrum, sharpness as the base sees it, gradients, times."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fosi.batches import checked, distinct
from fosi.diagnosis import Base, BaseName, Diagnosis, Measured
from fosi.measured import check_times
from fosi.options import Accept, Curvature, Options, Precision
from fosi.torch import lanczos
from fosi.torch import space as sp
from fosi.torch.curvature import Closure, check_closures
from fosi.torch.gradients import along, gradients, mean_squares, products, projected
from fosi.torch.spectrum import estimate
from fosi.torch.timing import seconds


def diagnose(
    closure: Callable[..., Any] | Sequence[Closure],
    params: Iterable[Tensor] | Mapping[str, Tensor] | nn.Module,
    batches: Sequence[Any] | None = None,
    *,
    learning_rate: float,
    base: BaseName = "adam",
    momentum: float = 0.9,
    nu: Iterable[Tensor] | Mapping[str, Tensor] | None = None,
    path: Sequence[Iterable[Tensor] | Mapping[str, Tensor]] = (),
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
    curvature: Curvature = "hessian",
    model: nn.Module | None = None,
    curvature_batches: int | Sequence[Any] | None = None,
    timed: bool = False,
    step_seconds: float | None = None,
    steps_left: int | None = None,
    steps_taken: int | None = None,
    raced: float | None = None,
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
        ``state["exp_avg_sq"] / (1 - b2 ** state["step"])``; None takes the mean squared gradient, of the batches
        or along ``path``.
      path: with Adam, parameters at some points of the training near here, twenty over a hundred steps say, each as
        ``nu`` is given: where a training swings, as at its limit, ν is a mean over what one gradient is not; () for
        ``params`` alone.
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
      curvature: ``"hessian"``, or ``"gauss_newton"``, for which a closure is a ``ModelLoss``; where ``batches`` are
        given, closure(batch) makes one.
      model: whose buffers and modes are left as they are; ``params`` if that is a module.
      curvature_batches: how many of the batches the curvature is taken on, the first ones; a list of others, such as a
        part of the data where a batch is all of it; None for all.
      timed: whether to measure what a gradient and an estimate take, here and now, rather than count a product as two
        gradients.
      step_seconds: with ``timed``, what a step of the base takes where it trains, loading and all; None for a gradient
        alone, which for a small model is far less.
      steps_left: that training has yet to take; None for many. Adam forgets what FOSI takes from ν over a thousand.
      steps_taken: that it has taken; None for many. After few Adam forgets sooner.
      raced: where you have trained base and FOSI side by side for a while: what ``fosi.diagnosis.race`` says of that,
        FOSI's seconds over the base's. It tells more than all else.

    Returns:
      A ``fosi.diagnosis.Diagnosis``; its ``explain()`` says it in words.

    Raises:
      ValueError: if an argument is out of its range, ``nu`` or one of ``path`` is not like ``params``, or they are
        sharded.
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
    check_times(step_seconds, timed, raced, steps_left=steps_left, steps_taken=steps_taken)
    losses = _losses(closure, batches, curvature)
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
        curvature=curvature,
    )
    m = options.schedule(space.dimension).num_matvecs
    if isinstance(curvature_batches, Sequence):
        whose = curvature_batches if batches is None else closure
        over = _losses(whose, None if batches is None else curvature_batches, curvature, "curvature_batches")
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

    found_here = gradients(losses, space, model)
    inside, outside = products(found_here, [projected(used, g) for g in found_here], used)
    sharpness = sharpness_left = growth = None
    if optimizer.adaptive:
        # Copies: a point may be the parameters themselves, which move.
        points = [[x.detach().clone() for x in _tensors_like(space, "path", point, names)] for point in path]
        with contextlib.closing(along(points, losses, space, model)) as near:  # whatever happens, params are put back
            squares, squares_left = mean_squares(used, near if points else found_here)
        moments = squares if nu is None else _second_moments(space, nu, names)
        root = optimizer.inverse_root(moments)
        # Adam inside FOSI sees only what FOSI leaves: its second moments are of that.
        after = optimizer.inverse_root(squares_left) if nu is None else root
        growth = optimizer.growth([moments], [squares], [squares_left])
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
            growth=growth,
            seconds=seconds(losses[0], over[0], space, options, model, optimizer, found_here[0], used)._replace(
                step=step_seconds
            )
            if timed
            else None,
        ),
        options,
        steps_left=steps_left,
        steps_taken=steps_taken,
        raced=raced,
    )


def _losses(closure: Any, batches: Any, curvature: Curvature, name: str = "closure") -> list[Closure]:
    if batches is None:
        if isinstance(closure, Sequence) and closure and all(map(callable, closure)):
            return list(closure)
        raise TypeError(
            f"{name} must be a sequence of functions without arguments, or come with batches=, got {closure!r}"
        )
    if not callable(closure):
        raise TypeError(f"closure must be callable as closure(batch) where batches are given, got {closure!r}")
    drawn = checked(batches, "batches" if name == "closure" else name)
    made = closure if curvature == "gauss_newton" else functools.partial(functools.partial, closure)
    known: dict[int, Closure] = {}
    for batch in drawn:
        if id(batch) not in known:
            known[id(batch)] = made(batch)
            check_closures(curvature, known[id(batch)], name="closure(batch)")
    return [known[id(batch)] for batch in drawn]


def _second_moments(space: sp.Space, nu: Any, names: list[str] | None) -> Tensor:
    buffer = space.buffer()
    for view, x in zip(buffer.views, _tensors_like(space, "nu", nu, names, "≥ 0 ", 0.0), strict=True):
        view.copy_(x)
    return buffer.vector


def _tensors_like(
    space: sp.Space, name: str, given: Any, names: list[str] | None, range_: str = "", least: float = -np.inf
) -> list[Tensor]:
    """Tensors in the order of the parameters, if they hold finite numbers that are no less, in their shapes."""
    if isinstance(given, Mapping):
        if names is None or set(given) != set(names):
            raise ValueError(f"{name} must have the names of params, {names}, got {list(given)}")
        given = [given[each] for each in names]
    tensors = list(given) if isinstance(given, Iterable) else [given]
    if not all(isinstance(x, Tensor) for x in tensors):
        raise TypeError(f"{name} must be tensors, one for each parameter, got {given!r:.80}")
    shapes, wanted = [tuple(x.shape) for x in tensors], [tuple(p.shape) for p in space.params]
    if shapes != wanted or not all(bool(((x >= least) & x.isfinite()).all()) for x in tensors):
        raise ValueError(
            f"{name} must hold finite numbers {range_}in the shapes of params, {wanted}, got shapes {shapes}"
        )
    return tensors


def _between(root: Tensor, basis: Tensor | None, matvec: lanczos.Matvec) -> lanczos.Matvec:
    """The operator S (I − V Vᵀ) H (I − V Vᵀ) S, with S the root."""

    def project(vector: Tensor) -> Tensor:
        return vector if basis is None else projected(basis.to(vector.dtype), vector)

    def apply(vector: Tensor) -> Tensor:
        factors = root.to(vector.dtype)
        return factors * project(matvec(project(factors * vector)))

    return apply
