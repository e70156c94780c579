"""The laws of Lanczos, H Q = Q T + r eᵀ and QᵀQ = I, for 1 … n products and awkward spectra."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fosi.jax.lanczos import lanczos
from tests.jax.running import x64
from tests.problems import symmetric

# A vector of the second layout: a tuple with one array a leaf, in the leaf's shape.
SHAPES = {12: ((2, 3), (), (5,)), 1: ((1, 1),)}
LAYOUTS = ["flat", "leaves"]
DTYPES = [np.float32, np.float64]


def split(x, layout):
    if layout == "flat":
        return x
    shapes = SHAPES[x.shape[-1]]
    ends = np.cumsum([int(np.prod(shape)) for shape in shapes])[:-1]
    pieces = jnp.split(x, ends, axis=-1)
    return tuple(piece.reshape(x.shape[:-1] + shape) for piece, shape in zip(pieces, shapes, strict=True))


def join(x, rows=()):
    return x if not isinstance(x, tuple) else jnp.concatenate([p.reshape((*rows, -1)) for p in x], axis=-1)


@functools.partial(jax.jit, static_argnums=(2, 3))
def compiled(A, start, products, layout):
    n, dtype = A.shape[0], A.dtype
    out = lanczos(
        lambda v: split(A @ join(v), layout),
        split(start, layout),
        split(jnp.zeros((products, n), dtype), layout),
        breakdown=10 * float(jnp.finfo(dtype).eps),
    )
    return out._replace(basis=join(out.basis, (products,)))


def run(A, products, layout, dtype, seed=0):
    """The decomposition as NumPy float64 arrays, and A as the operator held it."""
    start = np.random.default_rng(seed).normal(size=len(A))
    with x64(dtype):
        A = jnp.asarray(A, dtype)
        out = compiled(A, jnp.asarray(start, dtype), products, layout)
        assert out.basis.dtype == out.alphas.dtype == out.betas.dtype == dtype
    as_float64 = [np.asarray(x, np.float64) for x in (out.basis, out.alphas, out.betas)]
    return np.asarray(A, np.float64), *as_float64, int(out.steps), float(out.asymmetry)


def assert_laws(A, basis, alphas, betas, steps, asymmetry, dtype):
    """What must hold whatever the spectrum, to the rounding of a few operations."""
    m, eps = len(alphas), float(np.finfo(dtype).eps)
    scale = max(np.linalg.norm(A, 2), np.finfo(dtype).tiny)
    assert np.isfinite(basis).all() and np.isfinite(alphas).all() and np.isfinite(betas).all()
    assert 1 <= steps <= m
    Q = basis[:steps].T
    np.testing.assert_allclose(Q.T @ Q, np.eye(steps), atol=8 * eps)
    T = np.diag(alphas[:steps]) + np.diag(betas[: steps - 1], 1) + np.diag(betas[: steps - 1], -1)
    remainder = A @ Q - Q @ T
    np.testing.assert_allclose(remainder[:, :-1], 0, atol=8 * eps * scale)
    np.testing.assert_allclose(np.linalg.norm(remainder[:, -1]), betas[steps - 1], atol=8 * eps * scale)
    np.testing.assert_allclose(Q.T @ remainder[:, -1], 0, atol=8 * eps * scale)
    assert (betas[: steps - 1] > 0).all()
    assert (basis[steps:] == 0).all() and (alphas[steps:] == 0).all() and (betas[steps:] == 0).all()
    assert asymmetry <= 8 * eps * scale


# Name: the eigenvalues, and after how many products the space is used up (None: not to be foreseen).
SPECTRA = {
    "distinct": (np.arange(1.0, 13.0), 12),
    "both signs": (np.linspace(-30.0, 7.0, 12), 12),
    "spread over decades": (np.logspace(2, -1, 12), 12),
    "clustered": (np.r_[1 + 1e-4 * np.arange(6), 5 + 1e-4 * np.arange(6)], None),
    "clustered within rounding": (np.r_[1 + 1e-7 * np.arange(6), 5 + 1e-7 * np.arange(6)], None),
    "repeated": (np.repeat([4.0, 1.0, -2.0], 4), 3),
    "identity": (np.ones(12), 1),
    "rank one": (np.r_[7.0, np.zeros(11)], 2),
    "rank one, tiny": (np.r_[1e-12, np.zeros(11)], 2),
    "zero": (np.zeros(12), 1),
    "one parameter": (np.array([3.0]), 1),
    "one parameter, flat": (np.array([0.0]), 1),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("products", "layout"), [*((m, "flat") for m in range(1, 13)), *((m, "leaves") for m in (1, 2, 5, 12))]
)
def test_laws(products, layout, dtype):
    for name, (eigenvalues, ends) in SPECTRA.items():
        if products > len(eigenvalues):
            continue
        A = symmetric(eigenvalues, seed=4)
        out = run(A, products, layout, dtype)
        assert_laws(*out, dtype)
        steps = out[4]
        assert ends is None or steps == min(products, ends), name


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_products_give_the_whole_spectrum(dtype):
    for eigenvalues, ends in SPECTRA.values():
        if ends is None:
            continue
        _, _, alphas, betas, steps, _ = run(symmetric(eigenvalues, seed=4), len(eigenvalues), "flat", dtype)
        T = np.diag(alphas[:steps]) + np.diag(betas[: steps - 1], 1) + np.diag(betas[: steps - 1], -1)
        atol = 20 * np.finfo(dtype).eps * np.abs(eigenvalues).max()
        np.testing.assert_allclose(np.linalg.eigvalsh(T), np.unique(eigenvalues), atol=atol)


@pytest.mark.parametrize("dtype", DTYPES)
def test_orthogonality_survives_cancellation(dtype):
    # Extreme Ritz values converge long before the end; from there one pass of orthogonalisation loses digits.
    A = symmetric(np.r_[1e4, 3e3, 1e3, np.linspace(1.0, 2.0, 57)], seed=6)
    out = run(A, 60, "flat", dtype)
    assert_laws(*out, dtype)


def test_the_length_of_the_start_vector_does_not_matter():
    A = jnp.asarray(symmetric(np.arange(1.0, 13.0)), jnp.float32)
    start = jnp.linspace(-1.0, 2.0, 12)
    one, other = compiled(A, start, 5, "flat"), compiled(A, 1024 * start, 5, "flat")
    np.testing.assert_array_equal(one.alphas, other.alphas)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_asymmetry_of_the_operator_is_seen(dtype, layout):
    A = symmetric(np.linspace(1.0, 10.0, 12), seed=4)
    skew = np.random.default_rng(1).normal(size=(12, 12))
    skew = (skew - skew.T) / np.linalg.norm(skew - skew.T, 2)
    for planted in (1e-1, 1e-2, 1e-3):
        asymmetry = run(A + planted * skew, 8, layout, dtype)[5]
        assert 0.3 * planted <= asymmetry <= 5 * planted


def test_a_product_that_is_not_finite_shows_in_the_result():
    A = np.diag(np.arange(1.0, 13.0))
    A[3, 4] = A[4, 3] = np.nan
    with np.errstate(invalid="ignore"):
        alphas = run(A, 5, "flat", np.float32)[2]
    assert np.isnan(alphas).any()
