"""ESE against a dense eigendecomposition: values, vectors, residuals, and what an early end leaves."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fosi.jax
from fosi.jax import Batches, ModelLoss, fosi_adam
from tests.jax.running import as_arrays, as_tree, flat, loss_fn, x64
from tests.problems import PROBLEMS, network, rotating, symmetric


def estimate_spectrum(*args, **options):
    """The estimate as NumPy arrays, which a test can use outside the x64 context they were made in."""
    return jax.tree.map(np.asarray, fosi.jax.estimate_spectrum(*args, **options))


def rows_of(spectrum):
    """The eigenvectors as rows, float64."""
    rows = jax.tree.map(lambda x: np.asarray(x, np.float64).reshape(x.shape[0], -1), spectrum.eigenvectors)
    return np.concatenate(jax.tree.leaves(rows), axis=1)


def dense(H, k, ell):
    values, vectors = np.linalg.eigh(H)
    wanted = [*range(len(H) - 1, len(H) - 1 - k, -1), *range(ell - 1, -1, -1)]
    return values[wanted], vectors[:, wanted].T


def assert_pairs(spectrum, H, k, ell, tolerance):
    """Values, vectors up to sign, and orthonormality, the first two relative to the largest eigenvalue."""
    values, vectors = dense(H, k, ell)
    scale = np.abs(values).max()
    np.testing.assert_allclose(spectrum.eigenvalues, values, atol=tolerance * scale)
    rows = rows_of(spectrum)
    rows *= np.sign(np.sum(rows * vectors, axis=1, keepdims=True))
    np.testing.assert_allclose(rows, vectors, atol=20 * tolerance)
    np.testing.assert_allclose(rows @ rows.T, np.eye(k + ell), atol=2e-6)


# dtype of everything the user holds, dtype of the basis, tolerance: the rounding of the products.
PRECISIONS = {
    "float64": (jnp.float64, "float64", 1e-12),
    "float32": (jnp.float32, "float32", 2e-6),
    "mixed": (jnp.float32, "float64", 2e-6),
    "bfloat16": (jnp.bfloat16, "float32", 2e-2),
}


@pytest.mark.parametrize(("name", "layout"), [("rotating", "auto"), ("rotating", "leaves"), ("network", "auto")])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_pairs_are_those_of_the_dense_hessian(precision, name, layout):
    dtype, basis, tolerance = PRECISIONS[precision]
    problem = PROBLEMS[name]()
    k, ell, n = problem.k, problem.ell, len(problem.start)
    with x64(dtype):
        params, batch = as_tree(problem, problem.start, dtype), as_arrays(problem.batch, dtype)
        options = {"k": k, "ell": ell, "num_matvecs": n, "precision": basis, "layout": layout}
        spectrum = estimate_spectrum(loss_fn(problem), params, batch, **options)
        assert jax.tree.map(jnp.shape, spectrum.eigenvectors) == jax.tree.map(lambda p: (k + ell, *p.shape), params)
        held_in = {jnp.promote_types(dtype, jnp.float32)}
        assert {x.dtype for x in jax.tree.leaves(spectrum._replace(accepted=None))} == held_in
        theta = np.asarray(flat(params), np.float64)
    # At the point and on the data as they were held, rounded.
    held = jax.tree.map(lambda x: np.asarray(x, np.float64), batch)
    H = problem.hessian(theta, held)
    if precision == "bfloat16":  # half the digits of the gaps between them are gone: values only
        values, _ = dense(H, k, ell)
        np.testing.assert_allclose(spectrum.eigenvalues, values, atol=tolerance * np.abs(values).max())
        rows = rows_of(spectrum)
        np.testing.assert_allclose(rows @ rows.T, np.eye(k + ell), atol=2e-6)
    else:
        assert_pairs(spectrum, H, k, ell, tolerance)
        values = np.linalg.eigvalsh(H)
        np.testing.assert_allclose(spectrum.extremes, values[[-1, 0]], atol=tolerance * values[-1])
    assert spectrum.accepted.all()


def test_leaves_of_several_dtypes_and_one_that_is_no_float():
    H = symmetric([50.0, 20.0, 3.0, 1.0, 0.5, 0.2, -15.0], seed=8).astype(np.float32)
    params = {
        "narrow": jnp.ones(2, jnp.bfloat16),
        "number": jnp.arange(3),
        "scalar": jnp.ones(()),
        "wide": jnp.ones((2, 2)),
    }

    def loss(params, H):
        w = jnp.concatenate([jnp.ravel(params[name]).astype(jnp.float32) for name in ("narrow", "scalar", "wide")])
        return 0.5 * w @ (H @ w)

    spectrum = estimate_spectrum(loss, params, jnp.asarray(H), k=2, ell=1, num_matvecs=7)
    assert spectrum.eigenvectors["number"] is None
    assert {x.dtype.name for x in jax.tree.leaves(spectrum.eigenvectors)} == {"float32"}
    assert_pairs(spectrum, H, 2, 1, 1e-2)  # bfloat16 holds two of the seven directions


def half_square(w, H):
    return 0.5 * w @ (H @ w)


def outliers(n=60):
    return symmetric([100.0, -50.0, *np.linspace(-1, 1, n - 2)], seed=5)


@pytest.mark.parametrize("num_matvecs", [6, 12])
@pytest.mark.parametrize("precision", ["float64", "float32", "mixed"])
def test_residuals_are_true(precision, num_matvecs):
    dtype, basis, _ = PRECISIONS[precision]
    with x64(dtype):
        H = jnp.asarray(outliers(), dtype)
        options = {"k": 4, "ell": 2, "num_matvecs": num_matvecs, "precision": basis}
        spectrum = estimate_spectrum(half_square, jnp.ones(60, dtype), H, **options)
    rows, values = rows_of(spectrum), np.asarray(spectrum.eigenvalues, np.float64)
    true = np.linalg.norm(rows @ np.asarray(H, np.float64) - values[:, None] * rows, axis=1)
    floor = 4 * np.finfo(dtype).eps * 100
    np.testing.assert_allclose(spectrum.residuals, true, rtol=1e-5, atol=floor)
    # Something is converged and something is not, or the comparison means little.
    assert true.min() < 0.01 and true.max() > 0.1
    # A pair is accepted exactly where that is so.
    clear = np.abs(true / np.abs(values) - 0.1) > 1e-3
    np.testing.assert_array_equal(spectrum.accepted[clear], (true <= 0.1 * np.abs(values))[clear])


def test_more_products_than_parameters_are_not_made():
    H = symmetric([3.0, 2.0, 1.0])
    spectrum = estimate_spectrum(half_square, jnp.ones(3), jnp.asarray(H, jnp.float32), k=2, num_matvecs=50)
    assert_pairs(spectrum, H, 2, 0, 2e-6)


@pytest.mark.parametrize("curvature", ["hessian", "gauss_newton"])
def test_several_batches_and_micro_batches_are_one_large_batch(curvature):
    problem = network()
    model, loss = model_and_loss(problem)
    whole = ModelLoss(model, loss)
    with x64(np.float64):
        params, batch = as_tree(problem, problem.start, np.float64), as_arrays(problem.batch, np.float64)
        rows = len(batch["y"])
        quarters = [jax.tree.map(lambda x, i=i: x[i * rows // 4 : (i + 1) * rows // 4], batch) for i in range(4)]
        halves = [jax.tree.map(lambda x, i=i: x[i * rows // 2 : (i + 1) * rows // 2], batch) for i in range(2)]
        estimate = functools.partial(
            estimate_spectrum,
            whole,
            params,
            k=3,
            ell=1,
            num_matvecs=26,
            precision="float64",
            curvature=curvature,
        )
        spectra = [estimate(batch), estimate(Batches(halves), micro_batches=2)]
        if curvature == "hessian":
            spectra += [estimate(Batches(quarters)), estimate(batch, micro_batches=4)]
        G = dense_gauss_newton(problem, model, loss, batch)
    H = problem.hessian(problem.start, problem.batch) if curvature == "hessian" else G
    for spectrum in spectra:
        np.testing.assert_allclose(spectrum.eigenvalues, dense(H, 3, 1)[0], atol=1e-10 * np.linalg.norm(H, 2))
        rows = rows_of(spectrum)[:3]
        np.testing.assert_allclose(rows @ H, rows * spectrum.eigenvalues[:3, None], atol=1e-7)


def model_and_loss(problem):
    """The network of tests/problems.py as a model and a convex loss of its outputs."""

    def model(params, batch):
        hidden = jnp.tanh(batch["x"] @ params["first"]["w"] + params["first"]["b"][None])
        return hidden @ params["second"]["w"] + params["second"]["b"][None]

    def loss(outputs, batch):
        return jnp.sum((outputs - batch["y"]) ** 2) / len(batch["y"])

    return model, loss


def dense_gauss_newton(problem, model, loss, batch):
    """Jᵀ H_loss J with the three matrices formed."""
    theta = jnp.asarray(problem.start)

    def outputs(theta):
        return model(as_tree_of(problem, theta), batch).ravel()

    def of_outputs(out):
        return loss(out.reshape(batch["y"].shape), batch)

    J = np.asarray(jax.jacrev(outputs)(theta))
    H = np.asarray(jax.hessian(of_outputs)(outputs(theta)))
    return J.T @ H @ J


def as_tree_of(problem, theta):
    shapes, treedef = jax.tree.flatten(problem.shapes, is_leaf=lambda x: isinstance(x, tuple))
    ends = np.cumsum([int(np.prod(shape)) for shape in shapes])[:-1]
    pieces = jnp.split(theta, ends)
    return treedef.unflatten([p.reshape(shape) for p, shape in zip(pieces, shapes, strict=True)])


@pytest.mark.parametrize("convex", ["squares", "cross-entropy"])
def test_gauss_newton_is_the_matrix_of_that_name(convex):
    problem = network()
    model, squares = model_and_loss(problem)

    def cross_entropy(outputs, batch):
        return -jnp.mean(jax.nn.log_softmax(outputs)[jnp.arange(len(outputs)), batch["label"]])

    loss = squares if convex == "squares" else cross_entropy
    with x64(np.float64):
        params, batch = as_tree(problem, problem.start, np.float64), as_arrays(problem.batch, np.float64)
        batch["label"] = jnp.asarray(problem.batch["x"][:, 0] > 0, jnp.int32)
        options = {"k": 2, "num_matvecs": 26, "precision": "float64"}
        gauss_newton = estimate_spectrum(ModelLoss(model, loss), params, batch, curvature="gauss_newton", **options)
        hessian = estimate_spectrum(ModelLoss(model, loss), params, batch, **options)
        G = dense_gauss_newton(problem, model, loss, batch)
    scale = np.linalg.norm(G, 2)
    values, vectors = dense(G, 2, 0)
    np.testing.assert_allclose(gauss_newton.eigenvalues, values, atol=1e-10 * scale)
    np.testing.assert_allclose(np.abs(np.sum(rows_of(gauss_newton) * vectors, axis=1)), 1, atol=1e-9)
    # Positive semi-definite, where the Hessian is not.
    np.testing.assert_allclose(gauss_newton.extremes[1], np.linalg.eigvalsh(G)[0], atol=1e-10 * scale)
    assert gauss_newton.extremes[1] > -1e-12 * scale
    assert hessian.extremes[1] < -1e-3 * scale


def test_a_mask_keeps_leaves_out():
    problem = rotating()
    inside = np.r_[0:7, 11:16]
    H = problem.hessian(problem.start, problem.batch)[np.ix_(inside, inside)]
    with x64(np.float64):
        params, batch = as_tree(problem, problem.start, np.float64), as_arrays(problem.batch, np.float64)
        mask = {"deep": {"s": True, "t": True}, "left": False, "right": True}
        options = {"k": 3, "ell": 2, "num_matvecs": 12, "precision": "float64"}
        for given in ({"deep": True, "left": False, "right": True}, lambda params: mask):
            spectrum = estimate_spectrum(loss_fn(problem), params, batch, mask=given, **options)
            assert spectrum.eigenvectors["left"] is None
            assert_pairs(spectrum, H, 3, 2, 1e-12)


@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_dtypes_and_the_x64_flag_stay_as_they_are(precision):
    problem = rotating()
    params, batch = as_tree(problem, problem.start, jnp.float32), as_arrays(problem.batch, jnp.float32)
    spectrum = estimate_spectrum(loss_fn(problem), params, batch, k=2, ell=1, precision=precision)
    assert not jax.config.jax_enable_x64
    assert {x.dtype.name for x in jax.tree.leaves(spectrum)} == {"float32", "bool"}

    seen = []  # what the user's loss is given, and makes, during a refresh

    def spying(params, batch):
        constant = jnp.asarray(1.0)
        seen.extend(x.dtype.name for x in jax.tree.leaves((params, batch, constant)))
        return loss_fn(problem)(params, batch) * constant

    opt = fosi_adam(0.1, spying, k=2, precision=precision, warmup=0, refresh_every=2)
    before = opt.init(params)
    several = Batches([batch, batch])  # the loss is then traced anew inside every product
    step = jax.jit(lambda state, params: opt.update(params, state, params, batch=several))
    state = before
    for _ in range(3):
        updates, state = step(state, params)
    assert not jax.config.jax_enable_x64
    assert set(seen) == {"float32"}
    assert jax.tree.map(lambda x: (x.shape, x.dtype), state) == jax.tree.map(lambda x: (x.shape, x.dtype), before)
    assert {x.dtype.name for x in jax.tree.leaves(updates)} == {"float32"}


def test_seeds():
    H, w = jnp.asarray(outliers(), jnp.float32), jnp.ones(60)
    estimate = functools.partial(estimate_spectrum, half_square, w, H, k=4, num_matvecs=4, accept="all")
    one, same, other = estimate(seed=3), estimate(seed=3), estimate(seed=4)
    jax.tree.map(np.testing.assert_array_equal, one, same)
    assert np.abs(one.eigenvalues - other.eigenvalues).max() > 1e-3  # not converged: they show the start


def test_inside_jit_as_outside():
    H, w = jnp.asarray(outliers(), jnp.float32), jnp.ones(60)
    outside = estimate_spectrum(half_square, w, H, k=1, ell=1)
    inside = jax.jit(lambda w, H: fosi.jax.estimate_spectrum(half_square, w, H, k=1, ell=1))(w, H)
    by_value = estimate_spectrum(None, w, value_fn=lambda w: half_square(w, H), k=1, ell=1)
    for other in (inside, by_value):
        np.testing.assert_allclose(other.eigenvalues, outside.eigenvalues, rtol=1e-6)
        np.testing.assert_allclose(other.eigenvectors, outside.eigenvectors, atol=1e-5)


# Eigenvalues; k and ell; what is found, top first; and which positions.
SHORT = {
    "rank one": ([7.0, *np.zeros(9)], 3, 0, [7, 0, 0], [1, 1, 0]),
    "rank one, both ends": ([7.0, *np.zeros(9)], 3, 2, [7, 0, 0, 0, 0], [1, 1, 0, 0, 0]),
    "rank one, few from the top": ([7.0, *np.zeros(9)], 1, 2, [7, 0, 0], [1, 0, 1]),
    "negative rank one": ([-7.0, *np.zeros(9)], 1, 2, [0, 0, -7], [1, 0, 1]),
    "three values": ([*3 * [4.0], *3 * [1.0], *4 * [-2.0]], 2, 2, [4, 1, 0, -2], [1, 1, 0, 1]),
    "multiple of the identity": (10 * [5.0], 2, 2, [5, 0, 0, 0], [1, 0, 0, 0]),
    "no curvature": (10 * [0.0], 2, 1, [0, 0, 0], [1, 0, 0]),
}


@pytest.mark.parametrize("name", SHORT)
def test_what_lanczos_did_not_reach_is_zero_and_not_accepted(name):
    eigenvalues, k, ell, expected, found = SHORT[name]
    H = jnp.asarray(symmetric(eigenvalues, seed=9), jnp.float32)
    found = np.array(found, bool)
    options = {"k": k, "ell": ell, "num_matvecs": 10}
    everything = estimate_spectrum(half_square, jnp.ones(10), H, accept="all", **options)
    trusted = estimate_spectrum(half_square, jnp.ones(10), H, precision="float64", **options)
    np.testing.assert_array_equal(everything.accepted, found)
    np.testing.assert_array_equal(trusted.accepted, np.array(expected) != 0)
    for spectrum in (everything, trusted):
        np.testing.assert_allclose(spectrum.eigenvalues, expected, atol=1e-5)
        assert (spectrum.eigenvalues[~found] == 0).all()
        # Found rows are orthonormal, so no pair stands at the top and at the bottom; the others are zero.
        rows = rows_of(spectrum)
        np.testing.assert_allclose(rows @ rows.T, np.diag(found.astype(float)), atol=2e-6)


def test_no_residual_is_claimed_below_the_error_of_the_products():
    """Where Lanczos is exact (m = n) only the products' error is left: their dtype's, or what asymmetry shows."""
    scales = jnp.array([8.0, 4.0, 2.0, 1.0])

    def loss(w, s):
        return 0.5 * jnp.sum(s.astype(w.dtype) * w**2)

    for dtype in (jnp.float32, jnp.bfloat16):
        found = estimate_spectrum(loss, jnp.ones(4, dtype), scales, k=2, num_matvecs=4)
        floor = 8 * float(jnp.finfo(dtype).eps)
        np.testing.assert_array_less(0.99 * floor, np.asarray(found.residuals))

    # An operator that is not quite symmetric, as products in TF32 are not: D + skew, through a custom rule.
    skew = 1e-2 * np.triu(np.ones((4, 4)), 1)
    matrix = jnp.diag(scales) + jnp.asarray(skew - skew.T, jnp.float32)

    @jax.custom_jvp
    def gradient(w):
        return scales * w

    gradient.defjvp(lambda at, along: (scales * at[0], matrix @ along[0]))

    @jax.custom_vjp
    def crooked(w):
        return 0.5 * jnp.sum(scales * w**2)

    crooked.defvjp(lambda w: (crooked(w), w), lambda w, ct: (ct * gradient(w),))
    found = estimate_spectrum(None, jnp.ones(4), value_fn=crooked, k=2, num_matvecs=4)
    np.testing.assert_array_less(1e-3, np.asarray(found.residuals))
    assert float(found.resolution) > 1e-2


def test_noise_of_the_basis_is_not_taken_for_curvature():
    """float64 parameters, a float32 basis, one curved direction of two: the other is the basis' rounding."""

    def loss(w, matrix):
        return 0.5 * w @ matrix @ w

    seen = []
    with x64(np.float64):
        for seed in range(40):
            matrix = jnp.asarray(symmetric([7.0, 0.0], seed))
            found = estimate_spectrum(loss, jnp.ones(2), matrix, k=2, num_matvecs=2, precision="float32", seed=seed)
            assert found.accepted.tolist() == [True, False]
            seen.append(abs(float(found.eigenvalues[1])))
    assert max(seen) > 1e-9  # there is noise to be taken for something
