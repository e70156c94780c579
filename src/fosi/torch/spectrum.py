"""ESE, the paper's Algorithm 1: Ritz values, vectors and residuals, and which pairs deserve to be used."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fosi.options import Accept, Curvature, Options, Precision
from fosi.torch import lanczos
from fosi.torch import space as sp
from fosi.torch.curvature import Closures, Operator, operator
from fosi.torch.distributed import mean, replicas, reshard
from fosi.torch.isolation import Isolation

_log = logging.getLogger("fosi")

# A pair is used if its residual is at most this fraction of |λ|: its 1/|λ| is then good to about as much.
_RESIDUAL = 0.1
# Rounding in m products and their sums, in units of one product's relative precision: 1e-6 λ₁ for float32.
_ROUNDING = 10.0


class Spectrum(NamedTuple):
    """The extreme eigenpairs of a Hessian, or of Gauss–Newton's matrix, as Lanczos sees them.

    Attributes:
      eigenvalues: (k + ell,), the k largest and then the ell smallest, descending; 0 where Lanczos ended early.
      eigenvectors: one tensor a parameter, in the parameters' order (or by name, where they came by name), shaped like
        it with one more axis in front for the k + ell vectors.
      residuals: (k + ell,), ‖H v − λ v‖ as Lanczos bounds it, not below the error of a product.
      accepted: (k + ell,), the pairs FOSI uses.
      extremes: (2,), the largest and the smallest Ritz value.
      resolution: the level below which an eigenvalue cannot be told from rounding in the products.
    """

    eigenvalues: Tensor
    eigenvectors: Any
    residuals: Tensor
    accepted: Tensor
    extremes: Tensor
    resolution: Tensor


class Estimate(NamedTuple):
    """A spectrum as the optimizer keeps it: small numbers on the host, the eigenvectors as a basis of the space."""

    eigenvalues: np.ndarray
    basis: Tensor
    residuals: np.ndarray
    accepted: np.ndarray
    extremes: np.ndarray
    resolution: float

    @property
    def usable(self) -> bool:
        """Whether there is anything in it that deserves trust."""
        return bool(np.isfinite(self.eigenvalues).all() and self.accepted.any())

    def spectrum(self, space: sp.Space) -> Spectrum:
        """As users see it."""

        def tensor(values: Any) -> Tensor:
            return torch.as_tensor(values, dtype=space.dtype, device=space.device)

        return Spectrum(
            eigenvalues=tensor(self.eigenvalues),
            eigenvectors=space.pieces(self.basis),
            residuals=tensor(self.residuals),
            accepted=torch.as_tensor(self.accepted, device=space.device),
            extremes=tensor(self.extremes),
            resolution=tensor(self.resolution),
        )


def estimate(
    closures: Closures,
    space: sp.Space,
    options: Options,
    refreshes: int,
    *,
    model: nn.Module | None = None,
    decay: list[float] | None = None,
    group: Any = None,
    around: Callable[[lanczos.Matvec], lanczos.Matvec] | None = None,
) -> Estimate:
    """ESE at the parameters' values.

    ``decay`` holds what L2 penalty the base adds to the loss, for each parameter; ``group`` the processes over which
    products are averaged; ``around`` makes another symmetric operator of the matrix, on flat vectors.
    """
    dtype = {"float32": torch.float32, "float64": torch.float64}[options.precision]
    with Isolation(space.params, model) as isolation:
        matvec = _matvec(operator(closures, isolation.leaves, isolation, options.curvature), space, dtype, decay, group)
        matvec = matvec if around is None else around(matvec)
        # Of a product, which runs in the dtypes that the loss sees, and of what Lanczos does with it.
        eps = max(torch.finfo(x).eps for x in (dtype, *(p.dtype for p in isolation.leaves)))
        with torch.no_grad():
            krylov = lanczos.lanczos(
                matvec,
                _start(space, options.seed, refreshes),
                options.schedule(space.dimension).num_matvecs,
                dtype,
                breakdown=_ROUNDING * eps,
                group=space.group,
            )
            del matvec  # and with it the graph, before the eigenvectors need memory
            return _extract(krylov, options, space, eps)


def warn_of_hooks(params: Iterable[Tensor]) -> None:
    """One line in the log where a product is not what autograd alone would make it."""
    if any(p._backward_hooks for p in params):
        _log.warning("FOSI: hooks on parameters are called on Hessian products too; those not linear spoil them")


def _start(space: sp.Space, seed: int, refreshes: int) -> Tensor:
    """The start vector; zero at frozen parameters, so that no rounding can ever give an eigenvector a part there."""
    vector = space.random(seed, refreshes)
    for view, p in zip(space.views(vector), space.params, strict=True):
        if not p.requires_grad:
            view.zero_()
    return vector


def _matvec(
    hessian: Operator, space: sp.Space, dtype: torch.dtype, decay: list[float] | None, group: Any
) -> lanczos.Matvec:
    """The operator on vectors; it runs in the model's precision, whatever the basis is kept in."""
    out = space.buffer(dtype)
    if space.sharding is not None:
        hessian, group = space.sharding.averaged(hessian, space.dtype), None

    def apply(vector: Tensor) -> Tensor:
        sp.write(out.views, hessian(space.cast(vector)))
        if group is not None:
            mean(out.vector, group)
        if decay is not None:
            torch._foreach_add_(out.views, torch._foreach_mul(space.views(vector), decay))
        return out.vector

    return apply


def _extract(krylov: lanczos.Krylov, options: Options, space: sp.Space, eps: float) -> Estimate:
    """The k largest and ell smallest Ritz pairs out of a decomposition that may have ended early.

    ``eps`` is the relative precision of its numbers.
    """
    k, ell, steps = options.k, options.ell, krylov.steps
    off = krylov.betas[: steps - 1]
    tridiagonal = np.diag(krylov.alphas) + np.diag(off, 1) + np.diag(off, -1)
    basis = torch.zeros(k + ell, space.size, dtype=space.dtype, device=space.device)
    nothing = np.zeros(k + ell)
    if not np.isfinite(tridiagonal).all():
        unknown = np.full(k + ell, np.nan)
        return Estimate(unknown, basis, unknown, nothing.astype(bool), np.full(2, np.nan), np.nan)
    values, vectors = np.linalg.eigh(tridiagonal)

    # Where in the result, and which Ritz pair: the largest first; the smallest at the end, as far as some are left.
    chosen = {i: steps - 1 - i for i in range(min(k, steps))}
    chosen |= {k + ell - 1 - i: i for i in range(min(ell, max(steps - k, 0)))}
    extremes = np.array([values[-1], values[0]])
    # In exact arithmetic the residual goes on falling; below the products' own error, as far as dtypes (theirs and the
    # basis') and asymmetry tell it, it means nothing.
    rounding = max(eps * np.abs(extremes).max(), krylov.asymmetry)
    eigenvalues, residuals = nothing.copy(), nothing.copy()
    for place, which in chosen.items():
        eigenvalues[place] = values[which]
        residuals[place] = max(krylov.betas[-1] * abs(vectors[-1, which]), rounding)
        coefficients = torch.as_tensor(vectors[:, which], dtype=krylov.basis.dtype, device=space.device)
        basis[place] = sp.combine(krylov.basis[:steps].t(), coefficients)
    resolution = _ROUNDING * rounding
    accepted = np.isin(np.arange(k + ell), list(chosen)) & np.isfinite(residuals)
    if options.accept == "converged":
        magnitude = np.abs(eigenvalues)
        accepted &= (residuals <= _RESIDUAL * magnitude) & (magnitude > resolution)
    return Estimate(eigenvalues, basis, residuals, accepted, extremes, resolution)


def estimate_spectrum(
    closure: Closures,
    params: Iterable[Tensor] | Mapping[str, Tensor] | nn.Module,
    *,
    k: int = 10,
    ell: int = 0,
    num_matvecs: int | None = None,
    precision: Precision = Options.precision,
    accept: Accept = "converged",
    seed: int = 0,
    curvature: Curvature = "hessian",
    model: nn.Module | None = None,
) -> Spectrum:
    """The k largest and ell smallest eigenpairs of the Hessian of a loss (the paper's ESE, §3.1).

    m Lanczos steps with full re-orthogonalisation give H Q = Q T + r eᵀ; the eigenpairs (λ, s) of the small T give
    the Ritz pairs (λ, Q s), with ‖H Q s − λ Q s‖ = ‖r‖ |s_m|.

    Args:
      closure: a function without arguments that computes the loss, without backward; called once. A sequence of such
        functions stands for the mean of their losses: several batches, or one in micro-batches of equal size. Their
        graphs are built one at a time, for every product anew: the memory of one, at more time.
      params: where the Hessian is taken: tensors that require gradients, by name if a mapping, or a module.
      k: how many of the largest eigenpairs.
      ell: how many of the smallest.
      num_matvecs: Hessian–vector products, m; None takes max(4 (k + ell), ⌈2 ln n⌉), never above n.
      precision: dtype of the Lanczos basis, ``"float32"`` or ``"float64"``.
      accept: ``"converged"`` or ``"all"``, see ``Spectrum.accepted``.
      seed: of the start vector.
      curvature: ``"hessian"``, or ``"gauss_newton"`` where each closure is a ``ModelLoss``.
      model: whose buffers (BatchNorm's statistics) and modes are left as they are; ``params`` if that is a module.

    Returns:
      A ``Spectrum``.

    Example:
      >>> import torch
      >>> from fosi.torch import estimate_spectrum
      >>> w, scales = torch.ones(4, requires_grad=True), torch.tensor([4.0, 3.0, 2.0, 1.0])
      >>> s = estimate_spectrum(lambda: 0.5 * (scales * w**2).sum(), [w], k=2)
      >>> [round(x, 3) for x in s.eigenvalues.tolist()]
      [4.0, 3.0]

    References:
      Sivan, Gabel and Schuster, FOSI: Hybrid First and Second Order Optimization, ICLR 2024, §3.1.
    """
    options = Options(
        k=k,
        ell=ell,
        num_matvecs=num_matvecs,
        precision=precision,
        accept=accept,
        seed=seed,
        curvature=curvature,
    )
    if isinstance(params, nn.Module):
        model = params if model is None else model
        reshard(params)
        params = {name: p for name, p in params.named_parameters() if p.requires_grad}
    named = params if isinstance(params, Mapping) else None
    space = sp.Space(list(params.values() if isinstance(params, Mapping) else params))
    # Other than in training, one process may look at a spectrum by itself.
    group = replicas(model) if isinstance(model, DistributedDataParallel) else None
    found = estimate(closure, space, options, 0, model=model, group=group).spectrum(space)
    if named is not None:
        found = found._replace(eigenvectors=dict(zip(named, found.eigenvectors, strict=True)))
    return found
