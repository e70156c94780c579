"""What a diagnosis needs, measured with JAX: spectrum, sharpness as the base sees it, gradients, times."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import Partial

from fosi.batches import checked, distinct
from fosi.diagnosis import Base, BaseName, Diagnosis, Measured
from fosi.jax import space as sp
from fosi.jax.curvature import Batches, Leaves, Loss, Operator
from fosi.jax.gradients import gradient, mean_squares, products, projected
from fosi.jax.spectrum import Job, Spectrum, start_key
from fosi.jax.timing import seconds
from fosi.measured import check_times
from fosi.options import Accept, Curvature, Options, Precision


class Seen(Loss):
    """The curvature as a base that divides sees it, with or without the directions that FOSI takes from it.

    Its batch is (the batch, the factors that stand on both sides of the Hessian, V as rows).
    """

    def operator(
        self, space: sp.Space, params: sp.Tree, batch: Any = None, value_fn: Callable[[sp.Tree], Any] | None = None
    ) -> Operator:
        """The operator S (I − V Vᵀ) H (I − V Vᵀ) S, with S the factors."""
        inner, factors, basis = batch
        return Partial(functools.partial(_between, space), super().operator(space, params, inner), factors, basis)


def diagnose(
    loss_fn: Callable[..., Any],
    params: sp.Tree,
    batches: Sequence[Any],
    *,
    learning_rate: float,
    base: BaseName = "adam",
    momentum: float = 0.9,
    nu: sp.Tree | None = None,
    path: Sequence[sp.Tree] = (),
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
    has_aux: bool = False,
    mask: sp.Mask | None = None,
    curvature: Curvature = "hessian",
    micro_batches: int = 1,
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
      loss_fn: loss_fn(params, batch) -> scalar, or (scalar, aux) with ``has_aux``.
      params: where training stands.
      batches: a few, four say, of the same shapes, as training draws them; one alone does not tell noise from signal.
        Where training sees all data in every step, the same object twice says that there is no noise.
      learning_rate: the base's, at this point.
      base: ``"gd"``, ``"heavy-ball"``, ``"nesterov"``, ``"adam"`` or ``"adamw"``.
      momentum: its momentum; b1 of Adam.
      nu: Adam's second moments, bias-corrected, a tree like ``params``; None takes the mean squared gradient,
        of the batches or along ``path``.
      path: with Adam, parameters at some points of the training near here, twenty over a hundred steps say, trees like
        ``params``: where a training swings, as at its limit, ν is a mean over what one gradient is not; () for
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
      has_aux: whether the loss returns (scalar, aux).
      mask: True for the leaves that FOSI works on; all float leaves where None.
      curvature: ``"hessian"``, or ``"gauss_newton"`` for a ``ModelLoss``.
      micro_batches: cut each batch into so many pieces for the products, to save memory.
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
      ValueError: if an argument is out of its range, or ``nu`` or one of ``path`` is not like ``params``.
      TypeError: if an argument has the wrong type.

    Example:
      >>> import jax.numpy as jnp
      >>> from fosi.jax import diagnose
      >>> def loss_fn(w, shift):
      ...     return 0.5 * jnp.sum(jnp.array([100.0, 50.0, 1.0, 0.5, 0.1]) * (w - shift) ** 2)
      >>> found = diagnose(loss_fn, jnp.ones(5), [0.0, 0.1], base="heavy-ball", learning_rate=0.01, k=2)
      >>> print(f"{found.sharpness:.0f} of {found.limit:.0f}, {found.bulk_edge:.0f} left to the base")
      100 of 380, 1 left to the base
    """
    optimizer = Base(base, learning_rate, momentum, adam_eps)
    check_times(step_seconds, timed, raced, steps_left=steps_left, steps_taken=steps_taken)
    drawn = checked(batches)
    space = sp.span(params, mask)
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
    m = options.schedule(space.size).num_matvecs
    loss = Loss(loss_fn, has_aux, curvature, micro_batches)
    job = Job.of(loss, space, options)
    if isinstance(curvature_batches, Sequence):
        taken = checked(curvature_batches, "curvature_batches")
    else:
        taken = distinct(drawn, curvature_batches)
    over = taken[0] if len(taken) == 1 else Batches(taken)
    # One pair more than FOSI uses: the largest of what it leaves.
    more = m > k + ell
    found = job._replace(k=k + more, num_matvecs=m).run(params, over, None, start_key(seed, 0))
    pairs, beyond = _without(found, k if more else None)
    used = sp.rows_where(pairs.accepted, pairs.eigenvectors)

    gradients = [gradient(loss, space, params, batch) for batch in drawn]
    inside, outside = products(gradients, [projected(used, vector) for vector in gradients], used)
    sharpness = sharpness_left = growth = None
    if optimizer.adaptive:
        points = list(path)
        for point in points:
            _leaves_like(space, "path", point)
        near = (gradient(loss, space, point, drawn[i % len(drawn)]) for i, point in enumerate(points))
        squares, squares_left = mean_squares(space, used, near if points else gradients)
        moments = squares if nu is None else _leaves_like(space, "nu", nu, "≥ 0 ", 0.0)
        # Adam inside FOSI sees only what FOSI leaves: its second moments are of that.
        root, after = ([optimizer.inverse_root(x) for x in some] for some in (moments, squares_left))
        after = after if nu is None else root
        growth = optimizer.growth(moments, squares, squares_left)
        seen = Job.of(Seen(loss_fn, has_aux, curvature, micro_batches), space, options)._replace(k=1, ell=0)
        nothing = jax.tree.map(jnp.zeros_like, used)  # and not None, for which all would be compiled anew
        whole = seen.run(params, (over, root, nothing), None, start_key(seed, 1))
        left = seen.run(params, (over, after, used), None, start_key(seed, 2))
        sharpness, sharpness_left = float(whole.extremes[0]), float(left.extremes[0])
    return Diagnosis.of(
        optimizer,
        Measured(
            n=space.size,
            k=k,
            ell=ell,
            num_matvecs=m,
            eigenvalues=np.asarray(pairs.eigenvalues),
            residuals=np.asarray(pairs.residuals),
            accepted=np.asarray(pairs.accepted),
            beyond=beyond,
            extremes=np.asarray(pairs.extremes),
            sharpness=sharpness,
            sharpness_left=sharpness_left,
            inside=inside,
            outside=outside,
            growth=growth,
            seconds=seconds(job, optimizer, params, drawn[0], taken[0], gradients[0], used)._replace(step=step_seconds)
            if timed
            else None,
        ),
        options,
        steps_left=steps_left,
        steps_taken=steps_taken,
        raced=raced,
    )


def _without(found: Spectrum, index: int | None) -> tuple[Spectrum, float | None]:
    """The spectrum without one pair, and that pair's eigenvalue."""
    if index is None:
        return found, None
    one = functools.partial(jnp.delete, obj=index, axis=0)
    return found._replace(
        eigenvalues=one(found.eigenvalues),
        eigenvectors=jax.tree.map(one, found.eigenvectors),
        residuals=one(found.residuals),
        accepted=one(found.accepted),
    ), float(found.eigenvalues[index])


def _leaves_like(space: sp.Space, name: str, tree: sp.Tree, range_: str = "", least: float = -np.inf) -> Leaves:
    """A tree's leaves, if they are finite numbers that are no less, in the shapes of the parameters."""
    try:
        leaves = [jnp.asarray(leaf, space.dtype) for leaf in space.leaves(tree)]
    except (ValueError, TypeError) as error:
        raise ValueError(f"{name} must be a tree of arrays like params: {error}") from error
    shapes = tuple(leaf.shape for leaf in leaves)
    if shapes != space.shapes or not all(bool(jnp.all((leaf >= least) & jnp.isfinite(leaf))) for leaf in leaves):
        raise ValueError(
            f"{name} must hold finite numbers {range_}in the shapes of params, {space.shapes}, got shapes {shapes}"
        )
    return leaves


def _between(space: sp.Space, operator: Operator, factors: Leaves, basis: sp.Basis, v: Leaves) -> Leaves:
    def project(leaves: Leaves) -> Leaves:
        return space.unpack(projected(basis, space.pack(leaves, space.dtype)))

    def scale(leaves: Leaves) -> Leaves:
        return [(f * x).astype(x.dtype) for f, x in zip(factors, leaves, strict=True)]

    return scale(project(operator(project(scale(v)))))
