"""The laws of Lanczos, H Q = Q T + r eᵀ and QᵀQ = I, for 1 … n products and awkward spectra."""

import numpy as np
import pytest
import torch

from fosi.torch.lanczos import lanczos
from tests.problems import symmetric

DTYPES = [torch.float32, torch.float64]


def eps_of(dtype):
    return float(torch.finfo(dtype).eps)


def run(A, products, dtype, scale=1.0):
    """The decomposition, the basis as float64 rows; A as the operator held it; and how often that was applied."""
    start = scale * torch.tensor(np.random.default_rng(0).normal(size=len(A)), dtype=torch.float32)
    held = torch.tensor(A, dtype=dtype)
    calls = 0

    def matvec(v):
        nonlocal calls
        calls += 1
        assert v.dtype == dtype
        return held @ v

    out = lanczos(matvec, start, products, dtype, breakdown=10 * eps_of(dtype))
    assert out.basis.dtype == dtype and out.basis.shape == (products, len(A))
    return held.double().numpy(), out._replace(basis=out.basis.double().numpy()), calls


def tridiagonal(out):
    off = out.betas[: out.steps - 1]
    return np.diag(out.alphas) + np.diag(off, 1) + np.diag(off, -1)


def assert_laws(A, out, dtype):
    """What must hold whatever the spectrum, to the rounding of a few operations."""
    eps, steps = eps_of(dtype), out.steps
    scale = max(np.linalg.norm(A, 2), float(torch.finfo(dtype).tiny))
    assert np.isfinite(out.basis).all() and np.isfinite(out.alphas).all() and np.isfinite(out.betas).all()
    assert out.alphas.shape == out.betas.shape == (steps,) and 1 <= steps <= len(out.basis)
    Q = out.basis[:steps].T
    np.testing.assert_allclose(Q.T @ Q, np.eye(steps), atol=8 * eps)
    remainder = A @ Q - Q @ tridiagonal(out)
    np.testing.assert_allclose(remainder[:, :-1], 0, atol=8 * eps * scale)
    np.testing.assert_allclose(np.linalg.norm(remainder[:, -1]), out.betas[-1], atol=8 * eps * scale)
    np.testing.assert_allclose(Q.T @ remainder[:, -1], 0, atol=8 * eps * scale)
    assert (out.betas[:-1] > 0).all()
    assert (out.basis[steps:] == 0).all()
    assert out.asymmetry <= 8 * eps * scale


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
@pytest.mark.parametrize("name", SPECTRA)
def test_laws(name, dtype):
    """Both laws for every number of products, and the end exactly where the space is used up."""
    eigenvalues, ends = SPECTRA[name]
    A = symmetric(eigenvalues, seed=4)
    for products in range(1, len(A) + 1):
        held, out, calls = run(A, products, dtype)
        assert_laws(held, out, dtype)
        if ends is not None:
            assert out.steps == min(products, ends)
        assert calls == out.steps  # no product is made for nothing


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [name for name, (_, ends) in SPECTRA.items() if ends is not None])
def test_all_products_give_every_distinct_eigenvalue(name, dtype):
    eigenvalues, _ = SPECTRA[name]
    _, out, _ = run(symmetric(eigenvalues, seed=4), len(eigenvalues), dtype)
    atol = 20 * eps_of(dtype) * np.abs(eigenvalues).max()
    np.testing.assert_allclose(np.linalg.eigvalsh(tridiagonal(out)), np.unique(eigenvalues), atol=atol)


@pytest.mark.parametrize("dtype", DTYPES)
def test_orthogonality_survives_cancellation(dtype):
    """Extreme Ritz values converge long before the end; from there one pass of orthogonalisation loses digits."""
    A = symmetric(np.r_[1e4, 3e3, 1e3, np.linspace(1.0, 2.0, 57)], seed=6)
    held, out, _ = run(A, 60, dtype)
    assert_laws(held, out, dtype)
    assert out.steps > 40


def test_the_length_of_the_start_vector_does_not_matter():
    A = symmetric(np.arange(1.0, 13.0))
    _, one, _ = run(A, 5, torch.float32)
    _, other, _ = run(A, 5, torch.float32, scale=1024.0)
    np.testing.assert_array_equal(one.alphas, other.alphas)
    np.testing.assert_array_equal(one.basis, other.basis)


@pytest.mark.parametrize("dtype", DTYPES)
def test_asymmetry_of_the_operator_is_seen(dtype):
    """In proportion to what was planted, from the second product on."""
    A = symmetric(np.linspace(1.0, 10.0, 12), seed=4)
    skew = np.random.default_rng(1).normal(size=(12, 12))
    skew = (skew - skew.T) / np.linalg.norm(skew - skew.T, 2)
    for planted in (1e-1, 1e-2, 1e-3):
        for products in (2, 8):
            _, out, _ = run(A + planted * skew, products, dtype)
            assert 0.3 * planted <= out.asymmetry <= 5 * planted


@pytest.mark.parametrize("dtype", DTYPES)
def test_noise_in_the_operator_is_seen(dtype):
    """An operator that is another one in every product, as with a new dropout mask each time."""
    A = symmetric(np.linspace(1.0, 10.0, 12), seed=4)
    rng = np.random.default_rng(2)

    def noisy(v):
        noise = rng.normal(size=(12, 12)) * 1e-2
        return torch.tensor(A + noise + noise.T, dtype=dtype) @ v

    out = lanczos(noisy, torch.ones(12), 8, dtype, breakdown=10 * eps_of(dtype))
    assert 1e-2 < out.asymmetry < 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_product_that_is_not_finite_shows_in_the_result(bad, dtype):
    """It is no early end: Lanczos makes all its products, and T tells."""
    A = np.diag(np.arange(1.0, 13.0))
    A[3, 4] = A[4, 3] = bad
    _, out, calls = run(A, 5, dtype)
    assert out.steps == calls == 5
    assert np.isnan(out.alphas).any() and np.isnan(out.asymmetry)


def test_a_nan_that_comes_late_shows_too():
    """The steps before it are as they would have been."""
    A, calls = torch.tensor(np.diag(np.arange(1.0, 13.0)), dtype=torch.float32), 0

    def turning(v):
        nonlocal calls
        calls += 1
        return A @ v if calls < 4 else torch.full_like(v, torch.nan)

    start = torch.ones(12)
    out = lanczos(turning, start, 6, torch.float32, breakdown=1e-6)
    good = lanczos(lambda v: A @ v, start, 3, torch.float32, breakdown=1e-6)
    assert out.steps == 6 and np.isnan(out.alphas[3:]).all()
    np.testing.assert_array_equal(out.alphas[:3], good.alphas)
