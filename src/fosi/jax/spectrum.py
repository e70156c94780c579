"""ESE, the paper's Algorithm 1: Ritz values, vectors and residuals, and which pairs deserve to be used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fosi.jax import lanczos
from fosi.jax import space as sp
from fosi.jax.curvature import ByIdentity, Loss, Operator
from fosi.options import Accept, Curvature, Options, Precision

ValueFn = Callable[[sp.Tree], Any]

# A pair is used if its residual is at most this fraction of |λ|: its 1/|λ| is then good to about as much.
_RESIDUAL = 0.1
# Rounding in m products and their sums, in units of one product's relative precision: 1e-6 λ₁ for float32.
_ROUNDING = 10.0


class Spectrum(NamedTuple):
    """The extreme eigenpairs of a Hessian as Lanczos sees them.

    Attributes:
      eigenvalues: (k + ell,), the k largest and then the ell smallest, descending; 0 where Lanczos ended early.
      eigenvectors: tree shaped and sharded like the parameters, with one more axis in front for the k + ell vectors;
        None for leaves outside the subspace.
      residuals: (k + ell,), ‖H v − λ v‖ as Lanczos bounds it, not below the error of a product.
      accepted: (k + ell,), the pairs FOSI uses.
      extremes: (2,), the largest and the smallest Ritz value.
      resolution: the level below which an eigenvalue cannot be told from rounding in the products.
    """

    eigenvalues: jax.Array
    eigenvectors: Any
    residuals: jax.Array
    accepted: jax.Array
    extremes: jax.Array
    resolution: jax.Array


class Job(NamedTuple):
    """What is static about an estimate."""

    loss: Loss
    space: sp.Space
    k: int
    ell: int
    num_matvecs: int
    precision: Precision
    accept: Accept
    users_x64: bool

    @classmethod
    def of(cls, loss: Loss, space: sp.Space, options: Options) -> Job:
        """The job that ``options`` describe."""
        m = options.schedule(space.size).num_matvecs
        x64 = bool(jax.config.jax_enable_x64)  # type: ignore[attr-defined]
        return cls(loss, space, options.k, options.ell, m, options.precision, options.accept, x64)

    def basis_precision(self) -> Any:
        """The context in which the basis is worked on: the global flag stays as the user has it."""
        return jax.enable_x64(True if self.precision == "float64" else self.users_x64)

    def run(self, params: sp.Tree, batch: Any, value_fn: ValueFn | None, key: jax.Array) -> Spectrum:
        """ESE; the eigenvectors come as a basis of the space.

        Inside a trace, and on accelerators, it is one compiled loop. On a CPU, called from outside, the loop is
        Python's, around one compiled step: XLA does not optimise convolutions inside a loop there (5× slower).
        """
        traced = any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves((params, batch, key)))
        if traced:
            return _whole(self, value_fn, params, batch, key)
        static_fn = None if value_fn is None else ByIdentity(value_fn)
        if not _on_cpu(self.space.leaves(params)):
            return _compiled_whole(self, static_fn, params, batch, key)
        operator, progress = _compiled_begin(self, static_fn, params, batch, key)
        with self.basis_precision():
            for j in range(self.num_matvecs):
                progress = _compiled_advance(self, operator, j, progress)
        return _compiled_extract(self, lanczos.finish(progress))

    def start(
        self, value_fn: ValueFn | None, params: sp.Tree, batch: Any, key: jax.Array
    ) -> tuple[Operator, sp.Vector, sp.Basis]:
        """The operator, the start vector and room for the basis."""
        operator = self.loss.operator(self.space, params, batch, value_fn)
        vector = self.space.random(key)
        with self.basis_precision():
            return operator, vector, self.space.zeros(jnp.dtype(self.precision), self.num_matvecs)

    def matvec(self, operator: Operator) -> lanczos.Matvec:
        """The operator on vectors; it runs in the model's precision, whatever the basis is kept in."""

        def apply(vector: sp.Vector) -> sp.Vector:
            leaves = self.space.unpack(vector)
            with jax.enable_x64(self.users_x64):
                leaves = operator(leaves)
            return self.space.pack(leaves, jnp.dtype(self.precision))

        return apply

    @property
    def breakdown(self) -> float:
        """Below this fraction of the largest entry of T, what is left of a product is rounding."""
        return _ROUNDING * max(self.space.product_eps, float(jnp.finfo(self.precision).eps))

    def extract(self, krylov: lanczos.Krylov) -> Spectrum:
        """The wanted pairs."""
        return _extract(krylov, self.k, self.ell, self.accept, self.space)


def _whole(job: Job, value_fn: ValueFn | None, params: sp.Tree, batch: Any, key: jax.Array) -> Spectrum:
    operator, vector, basis = job.start(value_fn, params, batch, key)
    with job.basis_precision():
        return job.extract(lanczos.lanczos(job.matvec(operator), vector, basis, breakdown=job.breakdown))


def _begin(
    job: Job, value_fn: ValueFn | None, params: sp.Tree, batch: Any, key: jax.Array
) -> tuple[Operator, lanczos.Progress]:
    operator, vector, basis = job.start(value_fn, params, batch, key)
    with job.basis_precision():
        return operator, lanczos.begin(vector, basis)


def _advance(job: Job, operator: Operator, j: int, progress: lanczos.Progress) -> lanczos.Progress:
    return lanczos.advance(job.matvec(operator), j, progress, job.breakdown)


_compiled_whole = jax.jit(_whole, static_argnums=(0, 1))
_compiled_begin = jax.jit(_begin, static_argnums=(0, 1))
_compiled_advance = jax.jit(_advance, static_argnums=0, donate_argnums=3)
_compiled_extract = jax.jit(Job.extract, static_argnums=0)


def _on_cpu(leaves: list[jax.Array]) -> bool:
    devices = [d for leaf in leaves if isinstance(leaf, jax.Array) for d in leaf.devices()]
    return (devices[0].platform if devices else jax.default_backend()) == "cpu"


def _extract(krylov: lanczos.Krylov, k: int, ell: int, accept: Accept, space: sp.Space) -> Spectrum:
    """The k largest and ell smallest Ritz pairs out of a decomposition that may have ended early."""
    m = krylov.alphas.shape[0]
    out = space.dtype
    with jax.enable_x64(True):
        steps = krylov.steps
        alphas, betas = krylov.alphas.astype(jnp.float64), krylov.betas.astype(jnp.float64)
        index = jnp.arange(m)
        counts, couples = index < steps, index[:-1] + 1 < steps
        # What Lanczos did not reach is set above the spectrum: there it can be counted off, and eigh cannot mix it
        # with a true eigenvalue, as it would at 0.
        above = 4 * jnp.max(jnp.abs(alphas)) + 4 * jnp.max(jnp.abs(betas)) + 1
        off = jnp.where(couples, betas[:-1], 0)
        tridiagonal = jnp.diag(jnp.where(counts, alphas, above)) + jnp.diag(off, 1) + jnp.diag(off, -1)
        values, vectors = jnp.linalg.eigh(tridiagonal)

        top = jnp.where(jnp.arange(k) < steps, steps - 1 - jnp.arange(k), -1)
        bottom = jnp.arange(ell)[::-1]
        chosen = jnp.concatenate([top, jnp.where(bottom < steps - k, bottom, -1)])
        found = chosen >= 0
        chosen = jnp.maximum(chosen, 0)
        eigenvalues = jnp.where(found, values[chosen], 0)
        coefficients = jnp.where(found[None], vectors[:, chosen], 0)
        extremes = jnp.stack([values[steps - 1], values[0]])
        # In exact arithmetic the residual goes on falling; below the products' own error, as far as dtype and asymmetry
        # tell it, it means nothing.
        eps = max(space.product_eps, float(jnp.finfo(krylov.alphas.dtype).eps))
        rounding = jnp.maximum(eps * jnp.max(jnp.abs(extremes)), krylov.asymmetry.astype(jnp.float64))
        residuals = jnp.maximum(betas[steps - 1] * jnp.abs(coefficients[steps - 1]), rounding)
        residuals = jnp.where(found, residuals, 0)
        resolution = _ROUNDING * rounding

        accepted = found & jnp.isfinite(eigenvalues) & jnp.isfinite(residuals)
        if accept == "converged":
            magnitude = jnp.abs(eigenvalues)
            accepted &= (residuals <= _RESIDUAL * magnitude) & (magnitude > resolution)
        basis = sp.combine(krylov.basis, coefficients)
        return Spectrum(
            eigenvalues=eigenvalues.astype(out),
            eigenvectors=jax.tree.map(lambda rows: rows.astype(out), basis),
            residuals=residuals.astype(out),
            accepted=accepted,
            extremes=extremes.astype(out),
            resolution=resolution.astype(out),
        )


def as_trees(spectrum: Spectrum, space: sp.Space) -> Spectrum:
    """The spectrum with its eigenvectors shaped like the parameters."""
    leaves = space.unpack(spectrum.eigenvectors, dtypes=[space.dtype] * len(space.shapes))
    full: list[Any] = [None] * space.treedef.num_leaves
    for i, leaf in zip(space.selected, leaves, strict=True):
        full[i] = leaf
    return spectrum._replace(eigenvectors=space.treedef.unflatten(full))


def start_key(seed: jax.Array | int, refreshes: jax.Array | int) -> jax.Array:
    """The key of a start vector: another one at every refresh, the same one for the same seed."""
    return jax.random.fold_in(jax.random.key(seed), refreshes)


def estimate_spectrum(
    loss_fn: Callable[..., Any] | None,
    params: sp.Tree,
    batch: Any = None,
    *,
    k: int = 10,
    ell: int = 0,
    num_matvecs: int | None = None,
    precision: Precision = Options.precision,
    accept: Accept = "converged",
    seed: int = 0,
    value_fn: Callable[[sp.Tree], Any] | None = None,
    has_aux: bool = False,
    mask: sp.Mask | None = None,
    curvature: Curvature = "hessian",
    micro_batches: int = 1,
    layout: sp.Layout = "auto",
) -> Spectrum:
    """The k largest and ell smallest eigenpairs of the Hessian of a loss (the paper's ESE, §3.1).

    m Lanczos steps with full re-orthogonalisation give H Q = Q T + r eᵀ; the eigenpairs (λ, s) of the small T give
    the Ritz pairs (λ, Q s), with ‖H Q s − λ Q s‖ = ‖r‖ |s_m|.

    Args:
      loss_fn: loss_fn(params, batch) -> scalar, or (scalar, aux) with ``has_aux``; None with ``value_fn``.
      params: where the Hessian is taken: a tree of arrays.
      batch: what the loss is taken on; ``Batches([...])`` averages over several.
      k: how many of the largest eigenpairs.
      ell: how many of the smallest.
      num_matvecs: Hessian–vector products, m; None takes max(4 (k + ell), ⌈2 ln n⌉), never above n.
      precision: dtype of the Lanczos basis, ``"float32"`` or ``"float64"``.
      accept: ``"converged"`` or ``"all"``, see ``Spectrum.accepted``.
      seed: of the start vector.
      value_fn: value_fn(params) -> scalar, instead of ``loss_fn`` and ``batch``. Outside ``jit`` a new function is
        compiled anew: for a loss that is the same but for its data, hand the data in as ``batch``.
      has_aux: whether the loss returns (scalar, aux).
      mask: True for the leaves that span the space; all float leaves where None.
      curvature: ``"hessian"``, or ``"gauss_newton"`` for a ``ModelLoss``.
      micro_batches: cut the batch into so many pieces, gone through one after the other, to save memory; the loss
        must be a mean over the batch.
      layout: how vectors are laid out; ``"auto"`` is flat unless the parameters are sharded.

    Returns:
      A ``Spectrum``.

    Example:
      >>> import jax.numpy as jnp
      >>> from fosi.jax import estimate_spectrum
      >>> def loss_fn(w, scales):
      ...     return 0.5 * jnp.sum(scales * w**2)
      >>> s = estimate_spectrum(loss_fn, jnp.ones(4), jnp.array([4.0, 3.0, 2.0, 1.0]), k=2)
      >>> [round(float(x), 3) for x in s.eigenvalues]
      [4.0, 3.0]

    References:
      Sivan, Gabel and Schuster, FOSI: Hybrid First and Second Order Optimization, ICLR 2024, §3.1.
    """
    options = Options(k=k, ell=ell, num_matvecs=num_matvecs, precision=precision, accept=accept, seed=seed)
    space = sp.span(params, mask, layout)
    job = Job.of(Loss(loss_fn, has_aux, curvature, micro_batches), space, options)
    return as_trees(job.run(params, batch, value_fn, start_key(seed, 0)), space)
