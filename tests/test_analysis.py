"""Lemmas 1, 3 and 4 of the paper, checked against dense eigenvalue computations."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fosi.analysis import condition_numbers, effective_hessian, inverse_preconditioner


def problem(lam, k, ell, seed=0):
    """A Hessian with these eigenvalues in a random basis, and its extreme pairs: the first k and last ell."""
    lam = np.sort(np.asarray(lam, dtype=float))[::-1]
    n = len(lam)
    V, _ = np.linalg.qr(np.random.default_rng(seed).standard_normal((n, n)))
    extreme = np.r_[0:k, n - ell : n]
    rest = np.arange(k, n - ell)
    return (V * lam) @ V.T, lam, V, extreme, rest


def fosi_step(g, lam_hat, V_hat, alpha, eta, q):
    """UpdateStep of Algorithm 2, line by line; the base optimizer is −η diag(q)."""
    g1 = V_hat @ (V_hat.T @ g)
    g2 = g - g1
    d1 = -alpha * V_hat @ ((V_hat.T @ g1) / np.abs(lam_hat))
    d_b = -eta * q * g2
    return d1 + d_b - V_hat @ (V_hat.T @ d_b)


SIZES = [(8, 2, 0), (8, 0, 3), (9, 2, 2), (6, 5, 0), (5, 3, 2), (1, 1, 0)]
convex = np.geomspace(0.03, 50, 9)


@pytest.fixture(params=SIZES, ids=str)
def case(request):
    n, k, ell = request.param
    rng = np.random.default_rng(7)
    return *problem(convex[-n:], k, ell), rng.uniform(0.2, 3.0, n)


@pytest.mark.parametrize("diagonal", [True, False])
def test_inverse_preconditioner_is_what_a_fosi_step_applies(case, diagonal):
    _, lam, V, extreme, _, q = case
    q = q if diagonal else None
    P_inv = inverse_preconditioner(lam[extreme], V[:, extreme], 0.3, 0.05, q)
    for g in np.random.default_rng(3).standard_normal((4, len(lam))):
        step = fosi_step(g, lam[extreme], V[:, extreme], 0.3, 0.05, 1.0 if q is None else q)
        np.testing.assert_allclose(-P_inv @ g, step, atol=1e-12)


def test_effective_hessian_is_what_a_fosi_step_applies_to_the_distance_from_the_minimum(case):
    H, lam, V, extreme, _, q = case
    E = effective_hessian(H, lam[extreme], V[:, extreme], 0.3, 0.05, q)
    for theta in np.random.default_rng(3).standard_normal((4, len(lam))):
        step = fosi_step(H @ theta, lam[extreme], V[:, extreme], 0.3, 0.05, q)
        np.testing.assert_allclose(-E @ theta, step, atol=1e-12)


def test_lemma_1_claim_1_blocks_in_the_eigenbasis(case):
    _, lam, V, extreme, rest, q = case
    P_inv = inverse_preconditioner(lam[extreme], V[:, extreme], 0.3, 0.05, q)
    blocks = V.T @ P_inv @ V
    M = (V.T @ np.diag(q) @ V)[np.ix_(rest, rest)]
    np.testing.assert_allclose(blocks[np.ix_(extreme, extreme)], np.diag(0.3 / lam[extreme]), atol=1e-12)
    np.testing.assert_allclose(blocks[np.ix_(rest, rest)], 0.05 * M, atol=1e-12)
    np.testing.assert_allclose(blocks[np.ix_(extreme, rest)], 0, atol=1e-12)


@pytest.mark.parametrize("sign", [1, -1])
def test_lemma_1_claim_2_symmetric_positive_definite(case, sign):
    _, lam, V, extreme, _, q = case
    P_inv = inverse_preconditioner(sign * lam[extreme], V[:, extreme], 0.3, 0.05, q)
    np.testing.assert_allclose(P_inv, P_inv.T, atol=1e-13)
    assert np.linalg.eigvalsh(P_inv).min() > 0


def test_lemma_1_claim_3_alpha_is_an_eigenvalue_k_plus_ell_times(case):
    H, lam, V, extreme, rest, q = case
    alpha, eta = 0.3, 0.05
    E = effective_hessian(H, lam[extreme], V[:, extreme], alpha, eta, q)
    np.testing.assert_allclose(E @ V[:, extreme], alpha * V[:, extreme], atol=1e-11)
    eigenvalues = np.linalg.eigvals(E)
    assert np.sum(np.isclose(eigenvalues, alpha, rtol=1e-8)) == len(extreme)
    # The remaining ones are those of η M diag(λ), as in the lemma's proof.
    M = (V.T @ np.diag(q) @ V)[np.ix_(rest, rest)]
    wanted = np.r_[np.full(len(extreme), alpha), np.linalg.eigvals(eta * M * lam[rest]).real]
    np.testing.assert_allclose(np.sort(eigenvalues.real), np.sort(wanted), rtol=1e-8)


def test_lemma_3_the_rest_keeps_its_eigenvectors(case):
    H, lam, V, extreme, rest, _ = case
    alpha, eta = 0.3, 0.05
    E = effective_hessian(H, lam[extreme], V[:, extreme], alpha, eta)
    np.testing.assert_allclose(E @ V[:, extreme], alpha * V[:, extreme], atol=1e-11)
    np.testing.assert_allclose(E @ V[:, rest], eta * lam[rest] * V[:, rest], atol=1e-11)
    P_inv = inverse_preconditioner(lam[extreme], V[:, extreme], alpha, eta)
    np.testing.assert_allclose(
        P_inv,
        (V[:, np.r_[extreme, rest]] * np.r_[alpha / lam[extreme], np.full(len(rest), eta)])
        @ V[:, np.r_[extreme, rest]].T,
        atol=1e-12,
    )


def test_negative_curvature_is_walked_down():
    H, lam, V, extreme, _ = problem([5.0, 1.0, 0.5, -2.0], 1, 1)
    E = effective_hessian(H, lam[extreme], V[:, extreme], 0.3, 0.05)
    np.testing.assert_allclose(E @ V[:, 0], 0.3 * V[:, 0], atol=1e-12)
    np.testing.assert_allclose(E @ V[:, 3], -0.3 * V[:, 3], atol=1e-12)


def test_appendix_a3_diagonal_hessian():
    rng = np.random.default_rng(5)
    n, k, ell, alpha, eta = 9, 2, 1, 0.4, 0.07
    diagonal, q = rng.uniform(0.5, 20.0, n), rng.uniform(0.2, 3.0, n)
    order = np.argsort(diagonal)[::-1]
    extreme, rest = np.r_[order[:k], order[n - ell :]], order[k : n - ell]
    E = effective_hessian(np.diag(diagonal), diagonal[extreme], np.eye(n)[:, extreme], alpha, eta, q)
    wanted = np.empty(n)
    wanted[extreme] = alpha
    wanted[rest] = eta * q[rest] * diagonal[rest]
    np.testing.assert_allclose(E, np.diag(wanted), atol=1e-13)
    # A base optimizer that knows the diagonal leaves both subspaces with condition number 1.
    E = effective_hessian(np.diag(diagonal), diagonal[extreme], np.eye(n)[:, extreme], alpha, eta, 1 / diagonal)
    np.testing.assert_allclose(np.diag(E)[rest], eta)


def dense_condition_number(lam, k, ell, alpha, eta):
    H, lam, V, extreme, _ = problem(lam, k, ell)
    eigenvalues = np.linalg.eigvals(effective_hessian(H, lam[extreme], V[:, extreme], alpha, eta)).real
    return eigenvalues.max() / eigenvalues.min()


LAM = np.array([100.0, 40.0, 8.0, 5.0, 3.0, 2.0, 0.5, 0.1])  # with k = 2, ell = 2 the rest is 8 … 2


@pytest.mark.parametrize(
    ("alpha", "eta", "case", "improved"),
    [
        (0.1, 0.1, 1, True),  # 0.8 / 0.1 = 8, below 1000
        (1e-4, 0.1, 1, False),  # 0.8 / 1e-4 = 8000
        (0.2, 0.1, 2, True),  # the lower edge, η λₙ₋ₗ
        (0.5, 0.1, 2, True),
        (0.8, 0.1, 2, True),  # the upper edge, η λₖ₊₁
        (1.0, 0.1, 3, True),  # 1 / 0.2 = 5
        (1.0, 1e-4, 3, False),  # 1 / 2e-4 = 5000
    ],
)
def test_the_three_cases_of_lemma_4(alpha, eta, case, improved):
    result = condition_numbers(np.random.default_rng(0).permutation(LAM), 2, 2, alpha, eta)
    assert result.case == case
    assert result.improved is improved
    np.testing.assert_allclose(result.original, np.linalg.cond(np.diag(LAM)))
    np.testing.assert_allclose(result.whole, dense_condition_number(LAM, 2, 2, alpha, eta), rtol=1e-9)
    assert (result.newton, result.base) == (1.0, 4.0)


def test_the_papers_example_gets_a_larger_condition_number():
    lam = np.r_[np.linspace(9, 10, 10), np.linspace(0.01, 0.1, 90)]
    result = condition_numbers(lam, k=9, ell=0, alpha=1.0, eta=0.001)
    np.testing.assert_allclose([result.whole, result.original, result.base], [1e5, 1e3, 9 / 0.01])
    assert (result.case, result.improved) == (3, False)
    np.testing.assert_allclose(result.whole, dense_condition_number(lam, 9, 0, 1.0, 0.001), rtol=1e-6)


@settings(deadline=None)
@given(data=st.data(), lam=st.lists(st.floats(1e-2, 1e2), min_size=2, max_size=7))
def test_condition_numbers_are_those_of_the_effective_hessian(data, lam):
    n = len(lam)
    k = data.draw(st.integers(0, n))
    ell = data.draw(st.integers(1 if k == 0 else 0, n - k))
    alpha, eta = data.draw(st.floats(1e-2, 10)), data.draw(st.floats(1e-3, 1))
    result = condition_numbers(lam, k, ell, alpha, eta)
    np.testing.assert_allclose(result.whole, dense_condition_number(lam, k, ell, alpha, eta), rtol=1e-6)
    assert 1 <= result.base <= result.original
    if result.case == 2:
        assert result.improved


@pytest.mark.parametrize(("k", "ell"), [(3, 0), (0, 3), (2, 1)])
def test_nothing_left_to_the_base(k, ell):
    assert condition_numbers([1.0, 4.0, 2.0], k, ell, 0.1, 1.0) == (4.0, 1.0, 1.0, 1.0, 2)


def test_rounding_does_not_make_case_2_worse():
    # (0.3 · 0.3) / (0.3 · 0.1) is above 0.3 / 0.1 in floating point; the lemma says it is not.
    assert condition_numbers([0.3, 0.3, 0.1, 0.1], 1, 1, alpha=0.06, eta=0.3).improved


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_values_out_of_range_are_named(bad):
    V = np.eye(3)[:, :1]
    for name in ("alpha", "eta"):
        rates = {"alpha": 1.0, "eta": 1.0, name: bad}
        with pytest.raises(ValueError, match=f"{name}={bad}.*positive"):
            inverse_preconditioner([1.0], V, **rates)
        with pytest.raises(ValueError, match=f"{name}={bad}.*positive"):
            condition_numbers([1.0, 2.0], 1, 0, **rates)
    with pytest.raises(ValueError, match=r"q=.*positive"):
        inverse_preconditioner([1.0], V, 1.0, 1.0, q=[1.0, bad, 1.0])
    with pytest.raises(ValueError, match=r"eigvals=.*positive"):
        condition_numbers([3.0, bad, 1.0], 1, 0, 1.0, 1.0)
    if not bad < 0:
        with pytest.raises(ValueError, match=r"eigvals=.*not 0"):
            inverse_preconditioner([bad], V, 1.0, 1.0)


def test_shapes_that_do_not_fit_are_named():
    V = np.eye(3)[:, :2]
    for eigvecs in (V.T, V[:, 0], np.ones((3, 0))):
        with pytest.raises(ValueError, match=r"eigvecs has shape.*\(n, r\)"):
            inverse_preconditioner([1.0, 2.0], eigvecs, 1.0, 1.0)
    with pytest.raises(ValueError, match=r"eigvals has shape \(3,\); it must be \(2,\)"):
        inverse_preconditioner([1.0, 2.0, 3.0], V, 1.0, 1.0)
    with pytest.raises(ValueError, match=r"q has shape \(2,\); it must be \(3,\)"):
        inverse_preconditioner([1.0, 2.0], V, 1.0, 1.0, q=[1.0, 1.0])
    with pytest.raises(ValueError, match=r"alpha has shape \(2,\)"):
        inverse_preconditioner([1.0, 2.0], V, [1.0, 1.0], 1.0)
    with pytest.raises(ValueError, match=r"hessian has shape \(2, 2\); it must be \(3, 3\)"):
        effective_hessian(np.eye(2), [1.0, 2.0], V, 1.0, 1.0)
    for eigvals in ([], [[1.0, 2.0]], 1.0):
        with pytest.raises(ValueError, match=r"eigvals has shape.*\(n,\)"):
            condition_numbers(eigvals, 1, 0, 1.0, 1.0)


def test_pairs_that_do_not_fit_are_named():
    with pytest.raises(ValueError, match=r"k=2 and ell=2.*from 1 to n=3"):
        condition_numbers([1.0, 2.0, 3.0], 2, 2, 1.0, 1.0)
    with pytest.raises(ValueError, match=r"k=0 and ell=0.*from 1 to n=3"):
        condition_numbers([1.0, 2.0, 3.0], 0, 0, 1.0, 1.0)
    with pytest.raises(TypeError, match=r"k=1.5.*int"):
        condition_numbers([1.0, 2.0, 3.0], 1.5, 0, 1.0, 1.0)
