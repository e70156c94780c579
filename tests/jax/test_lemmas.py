"""The paper's lemmas on the preconditioner, measured on the optimizer itself.

After a refresh every unit gradient eᵢ is fed to ``update``; minus the updates are the columns of P⁻¹. What
the lemmas say of that matrix is then checked with NumPy on a dense eigendecomposition of the Hessian.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fosi import analysis
from fosi.jax import fosi as wrap
from fosi.jax import fosi_sgd
from tests.jax.running import flat, x64
from tests.problems import orthogonal, symmetric

DTYPES = {"float64": (np.float64, 1e-11), "float32": (np.float32, 2e-5)}
SHAPES = {"a": (2, 3), "b": (), "c": (5,)}
N = 12
# Convex, as the lemmas assume, the eigenvalues in descending order.
LAM = np.array([100.0, 60.0, 30.0, 8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 0.5, 0.2])
DIAGONAL = np.random.default_rng(7).permutation(np.linspace(0.3, 1.7, N))


def as_tree(vector, dtype):
    ends = np.cumsum([int(np.prod(shape)) for shape in SHAPES.values()])[:-1]
    pieces = np.split(np.asarray(vector), ends)
    return {
        name: jnp.asarray(piece.reshape(shape), dtype)
        for (name, shape), piece in zip(SHAPES.items(), pieces, strict=True)
    }


def loss(params, H):
    theta = flat(params)
    return 0.5 * theta @ (H @ theta)


def optimizer(base, dtype, alpha, eta, k, ell, q=DIAGONAL):
    options = {"k": k, "ell": ell, "alpha": alpha, "accept": "all", "num_matvecs": N, "refresh": "external"}
    options["precision"] = np.dtype(dtype).name
    if base == "gd":
        return fosi_sgd(eta, loss, lr_rule=None, **options)
    scale = as_tree(q, dtype)
    diagonal = optax.stateless(lambda updates, params: jax.tree.map(jnp.multiply, updates, scale))
    return wrap(optax.chain(diagonal, optax.scale(-eta)), loss, momentum=None, **options)


def applied_matrix(opt, H, dtype, state=None):
    """P⁻¹ as the optimizer applies it, column by column."""
    params = as_tree(np.linspace(-1, 1, N), dtype)
    if state is None:
        state = opt.refresh(opt.init(params), params, batch=jnp.asarray(H, dtype))
    update = jax.jit(lambda g: opt.update(g, state, params)[0])
    columns = [-np.asarray(flat(update(as_tree(e, dtype))), np.float64) for e in np.eye(N)]
    return np.stack(columns, axis=1)


def eigenbasis(H, k, ell):
    """V = [V̂, V̌] and λ = [λ̂, λ̌] as the lemmas order them: the k largest, the ell smallest, the rest."""
    values, vectors = np.linalg.eigh(H)
    values, vectors = values[::-1], vectors[:, ::-1]
    order = [*range(k), *range(N - ell, N), *range(k, N - ell)]
    return values[order], vectors[:, order]


@pytest.mark.parametrize(("k", "ell"), [(3, 0), (0, 2), (3, 2)])
@pytest.mark.parametrize("base", ["gd", "diagonal"])
@pytest.mark.parametrize("precision", DTYPES)
def test_lemma_1_and_lemma_3(precision, base, k, ell):
    dtype, rtol = DTYPES[precision]
    alpha, eta, r = 0.3, 0.05, k + ell
    H = symmetric(LAM, seed=11)
    with x64(dtype):
        P_inv = applied_matrix(optimizer(base, dtype, alpha, eta, k, ell), H, dtype)
    lam, V = eigenbasis(H, k, ell)
    q = np.ones(N) if base == "gd" else DIAGONAL
    tolerance = rtol * np.linalg.norm(P_inv, 2)

    # 1. P⁻¹ = V blockdiag(α diag(1/λ̂), η M) Vᵀ, M the trailing principal submatrix of Vᵀ diag(q) V.
    middle = np.zeros((N, N))
    middle[:r, :r] = alpha * np.diag(1 / np.abs(lam[:r]))
    middle[r:, r:] = eta * (V.T @ np.diag(q) @ V)[r:, r:]
    np.testing.assert_allclose(P_inv, V @ middle @ V.T, atol=tolerance)
    if base == "gd":  # Lemma 3
        np.testing.assert_allclose(
            P_inv, V @ np.diag(np.r_[alpha / lam[:r], eta * np.ones(N - r)]) @ V.T, atol=tolerance
        )
    given = None if base == "gd" else q
    np.testing.assert_allclose(
        P_inv, analysis.inverse_preconditioner(lam[:r], V[:, :r], alpha, eta, given), atol=tolerance
    )

    # 2. It is symmetric and positive definite.
    np.testing.assert_allclose(P_inv, P_inv.T, atol=tolerance)
    bound = min(alpha / lam[:r].max(), eta * q.min())
    assert np.linalg.eigvalsh((P_inv + P_inv.T) / 2).min() > bound - tolerance

    # 3. α is an eigenvalue of P⁻¹H, and V̂ lies in its eigenspace.
    effective = P_inv @ H
    tolerance = rtol * np.linalg.norm(H, 2) * np.linalg.norm(P_inv, 2)
    np.testing.assert_allclose(effective @ V[:, :r], alpha * V[:, :r], atol=tolerance)
    np.testing.assert_allclose(
        effective, analysis.effective_hessian(H, lam[:r], V[:, :r], alpha, eta, given), atol=tolerance
    )
    if base == "gd":  # Lemma 3: and η λ̌ are the others, with V̌
        np.testing.assert_allclose(effective @ V[:, r:], V[:, r:] * (eta * lam[r:]), atol=tolerance)


def test_negative_curvature_is_descended_too():
    # |λ|: along an eigenvector of negative curvature P⁻¹H has −α, and P⁻¹ stays positive definite.
    H = symmetric([*LAM[:-2], -10.0, -20.0], seed=11)
    with x64(np.float64):
        P_inv = applied_matrix(optimizer("diagonal", np.float64, 0.3, 0.05, 2, 2), H, np.float64)
    _, V = eigenbasis(H, 2, 2)
    assert np.linalg.eigvalsh((P_inv + P_inv.T) / 2).min() > 0
    np.testing.assert_allclose(P_inv @ H @ V[:, :2], 0.3 * V[:, :2], atol=1e-10)
    np.testing.assert_allclose(P_inv @ H @ V[:, 2:4], -0.3 * V[:, 2:4], atol=1e-10)


# k = 3 and ell = 2 leave 8 … 2 to GD: with η = 0.1 the interval of case 2 is [0.2, 0.8]; λ₁/λₙ = 500.
CASES = {
    "1, improved": (0.1, 1, 8.0),
    "1, not improved": (0.001, 1, 800.0),
    "2, lower end": (0.2 + 1e-9, 2, 4.0),
    "2": (0.5, 2, 4.0),
    "2, upper end": (0.8 - 1e-9, 2, 4.0),
    "3, improved": (1.0, 3, 5.0),
    "3, not improved": (150.0, 3, 750.0),
}


def test_lemma_4():
    k, ell, eta = 3, 2, 0.1
    H = symmetric(LAM, seed=12)
    original = np.linalg.cond(H)
    np.testing.assert_allclose(original, 500, rtol=1e-12)
    _, V = eigenbasis(H, k, ell)
    with x64(np.float64):
        params = as_tree(np.zeros(N), np.float64)
        opt = optimizer("gd", np.float64, 1.0, eta, k, ell)
        state = opt.refresh(opt.init(params), params, batch=jnp.asarray(H))  # α has no part in it
        matrices = {
            name: applied_matrix(optimizer("gd", np.float64, alpha, eta, k, ell), H, np.float64, state)
            for name, (alpha, _, _) in CASES.items()
        }
    for name, (alpha, case, kappa) in CASES.items():
        # P⁻¹H has the eigenvalues of the symmetric H½ P⁻¹ H½.
        half = symmetric(np.sqrt(LAM), seed=12)
        eigenvalues = np.linalg.eigvalsh(half @ matrices[name] @ half)
        whole = eigenvalues.max() / eigenvalues.min()
        np.testing.assert_allclose(whole, kappa, rtol=1e-6, err_msg=name)
        said = analysis.condition_numbers(LAM, k, ell, alpha, eta)
        assert said.case == case, name
        np.testing.assert_allclose([said.original, said.whole], [original, whole], rtol=1e-6)
        assert said.improved == (whole <= original) == ("not" not in name)

        # Of each subspace by itself: 1 in V̂, λₖ₊₁/λₙ₋ₗ in its complement, both below the original.
        effective = V.T @ matrices[name] @ H @ V
        newton, rest = np.linalg.cond(effective[:5, :5]), np.linalg.cond(effective[5:, 5:])
        np.testing.assert_allclose([newton, rest], [1, 4], rtol=1e-8)
        np.testing.assert_allclose([said.newton, said.base], [newton, rest], rtol=1e-8)
        assert max(newton, rest) < original


@pytest.mark.parametrize("good", [False, True], ids=["any diagonal", "inverse of the Hessian's"])
def test_the_special_case_of_a_diagonal_hessian(good):
    # Appendix A.3: V is a permutation; P⁻¹H has the eigenvalues α, k + ℓ times, and η qᵢ λᵢ for the others.
    k, ell, alpha, eta = 3, 2, 0.3, 0.05
    place = np.random.default_rng(3).permutation(N)
    diagonal_of_H = LAM[place]
    q = 1 / diagonal_of_H if good else DIAGONAL
    with x64(np.float64):
        P_inv = applied_matrix(
            optimizer("diagonal", np.float64, alpha, eta, k, ell, q), np.diag(diagonal_of_H), np.float64
        )
    extreme = (place < k) | (place >= N - ell)
    expected = np.where(extreme, alpha, eta * q * diagonal_of_H)
    np.testing.assert_allclose(P_inv @ np.diag(diagonal_of_H), np.diag(expected), atol=1e-11)
    if good:  # "an optimal case": condition number 1 on either side
        np.testing.assert_allclose(expected[~extreme], eta, rtol=1e-12)


def test_the_example_where_the_condition_number_grows():
    # Appendix A.4: n = 100, λ₁ … λ₁₀ in [9, 10], the others in [0.01, 0.1], η = 0.001, k = 9, α = 1.
    lam = np.r_[np.linspace(10, 9, 10), np.linspace(0.1, 0.01, 90)]
    basis = orthogonal(100, seed=13)
    H = (basis * lam) @ basis.T
    with x64(np.float64):
        opt = fosi_sgd(
            0.001,
            lambda theta, H: 0.5 * theta @ (H @ theta),
            k=9,
            alpha=1.0,
            lr_rule=None,
            accept="all",
            num_matvecs=100,
            refresh="external",
            precision="float64",
        )
        theta = jnp.ones(100, jnp.float64)
        state = opt.refresh(opt.init(theta), theta, batch=jnp.asarray(H))
        update = jax.jit(lambda g: opt.update(g, state, theta)[0])
        P_inv = -np.stack([np.asarray(update(jnp.asarray(e))) for e in np.eye(100)], axis=1)
    half = (basis * np.sqrt(lam)) @ basis.T
    eigenvalues = np.linalg.eigvalsh(half @ P_inv @ half)
    np.testing.assert_allclose(eigenvalues.max() / eigenvalues.min(), 1e5, rtol=1e-5)
    said = analysis.condition_numbers(lam, 9, 0, 1.0, 0.001)
    np.testing.assert_allclose([said.original, said.whole], [1000, 1e5], rtol=1e-9)
    assert said.case == 3 and not said.improved
