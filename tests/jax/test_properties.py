"""Over trees, shapes, dtypes, k and ell: what an update and a spectrum are, computed densely in NumPy."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import fosi.jax as fj
from tests.problems import symmetric

# Every example compiles an estimate: few, the same ones every time, and a failing one is not shrunk.
few = settings(
    max_examples=7,
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
RATE, ALPHA = 0.05, 0.5

shapes = st.lists(st.integers(1, 4), max_size=4).map(tuple).filter(lambda shape: math.prod(shape) <= 12)


def trees(dtypes):
    """Trees of shapes: lists, tuples and dicts inside each other, up to 30 numbers in all."""
    leaf = st.builds(jax.ShapeDtypeStruct, shapes, st.sampled_from(dtypes).map(jnp.dtype))

    def inside(children):
        some = st.lists(children, min_size=1, max_size=3)
        return some | some.map(tuple) | st.dictionaries(st.sampled_from("abc"), children, min_size=1)

    return st.recursive(leaf, inside, max_leaves=6).filter(lambda tree: 1 <= size_of(tree) <= 30)


def size_of(tree):
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


def flatten(tree, rows=()):
    """A tree (or one with leading axes) as a NumPy vector, in float64."""
    return np.concatenate([np.asarray(x).astype(np.float64).reshape(*rows, -1) for x in jax.tree.leaves(tree)], axis=-1)


def unflatten(vector, like):
    leaves, end = [], 0
    for leaf in jax.tree.leaves(like):
        size = math.prod(leaf.shape)
        leaves.append(jnp.asarray(vector[end : end + size].reshape(leaf.shape), leaf.dtype))
        end += size
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def eigenvalues_of(n, definite):
    """Evenly spread, so that every pair is a pair of its own, and none near 0."""
    values = 1.0 + np.arange(n)
    return values if definite else values - math.floor(n / 2) - 0.5


def quadratic(params, hessian):
    vector = jnp.concatenate([jnp.ravel(leaf).astype(jnp.float32) for leaf in jax.tree.leaves(params)])
    return 0.5 * vector @ hessian @ vector


@st.composite
def problems(draw, dtypes):
    tree = draw(trees(dtypes))
    n = size_of(tree)
    rank = draw(st.integers(1, n))
    k = draw(st.integers(0, rank))
    seed = draw(st.integers(0, 1000))
    hessian = symmetric(eigenvalues_of(n, draw(st.booleans())), seed)
    rng = np.random.default_rng(seed)
    params, grads = unflatten(rng.normal(size=n), tree), unflatten(rng.normal(size=n), tree)
    return params, grads, hessian, k, rank - k


def precision_of(tree):
    return max(float(jnp.finfo(leaf.dtype).eps) for leaf in jax.tree.leaves(tree))


def one_update(params, grads, hessian, k, ell, diagonal=None, layout="auto"):
    """The first update and the state after it; the base is GD, or one with a fixed diagonal."""
    options = {
        "k": k,
        "ell": ell,
        "alpha": ALPHA,
        "num_matvecs": size_of(params),
        "warmup": 0,
        "layout": layout,
    }
    if diagonal is None:
        opt = fj.fosi_sgd(RATE, quadratic, max_lr_scale=1.0, accept="all", **options)
    else:
        tree = unflatten(diagonal, params)
        base = optax.stateless(lambda g, _: jax.tree.map(lambda d, x: (-d * x).astype(x.dtype), tree, g))
        opt = fj.fosi(base, quadratic, momentum=None, accept="all", **options)
    batch = jnp.asarray(hessian, jnp.float32)
    return jax.jit(opt.update)(grads, opt.init(params), params, batch=batch)


def basis_of(state, rank):
    """V in NumPy, whatever its layout."""
    return flatten(list(state.basis) if isinstance(state.basis, tuple) else [state.basis], rows=(rank,))


@few
@given(problem=problems(["bfloat16", "float16", "float32"]), data=st.data())
def test_an_update_is_newtons_inside_the_subspace_and_the_bases_outside(problem, data):
    params, grads, hessian, k, ell = problem
    n = len(hessian)
    fixed = data.draw(st.booleans(), label="a base with a fixed diagonal")
    layout = data.draw(st.sampled_from(["flat", "leaves"]), label="layout")
    diagonal = np.random.default_rng(n).uniform(0.5, 1.5, n).astype(np.float32) * RATE if fixed else None
    updates, state = one_update(params, grads, hessian, k, ell, diagonal, layout)

    assert jax.tree.structure(updates) == jax.tree.structure(params)
    for u, p in zip(jax.tree.leaves(updates), jax.tree.leaves(params), strict=True):
        assert (u.shape, u.dtype) == (p.shape, p.dtype)

    eps = precision_of(params)
    used = np.asarray(state.accepted)
    V, values = basis_of(state, k + ell), np.asarray(state.eigenvalues, np.float64)
    assert used.any()
    np.testing.assert_allclose(V @ V.T, np.diag(used.astype(float)), atol=1e-5)
    exact = np.linalg.eigvalsh(hessian)
    slack = 8 * eps * np.abs(exact).max()
    assert np.all(values[used] <= exact[-1] + slack) and np.all(values[used] >= exact[0] - slack)

    g = flatten(grads)
    c = V @ g
    newton = np.where(used, -ALPHA * c / np.maximum(np.abs(values), 1e-8), 0)
    d = -(RATE if diagonal is None else flatten(unflatten(diagonal, params))) * (g - V.T @ c)
    wanted = V.T @ newton + d - V.T @ (V @ d)
    got = flatten(updates)
    tolerance = 8 * eps * (np.linalg.norm(newton) + np.linalg.norm(d)) + 1e-7
    np.testing.assert_allclose(V @ got, newton, atol=tolerance)
    np.testing.assert_allclose(got, wanted, atol=tolerance)


@few
@given(problem=problems(["float32"]), precision=st.sampled_from(["float32", "float64"]))
def test_a_spectrum_is_the_dense_one(problem, precision):
    params, _, hessian, k, ell = problem
    n = len(hessian)
    spectrum = fj.estimate_spectrum(
        quadratic, params, jnp.asarray(hessian, jnp.float32), k=k, ell=ell, num_matvecs=n, precision=precision
    )
    for v, p in zip(jax.tree.leaves(spectrum.eigenvectors), jax.tree.leaves(params), strict=True):
        assert v.shape == (k + ell, *p.shape)
    values, vectors = np.linalg.eigh(hessian)
    chosen = [*range(n - 1, n - 1 - k, -1), *range(ell - 1, -1, -1)]
    scale = np.abs(values).max()
    assert bool(spectrum.accepted.all())
    np.testing.assert_allclose(spectrum.eigenvalues, values[chosen], atol=1e-5 * scale)
    V = flatten(spectrum.eigenvectors, rows=(k + ell,))
    np.testing.assert_allclose(V @ V.T, np.eye(k + ell), atol=1e-5)
    np.testing.assert_allclose(np.abs(np.sum(V * vectors[:, chosen].T, axis=1)), 1, atol=1e-4)
    true_residuals = np.linalg.norm(V @ hessian - values[chosen][:, None] * V, axis=1)
    assert np.all(np.asarray(spectrum.residuals) <= 1e-3 * scale) and np.all(true_residuals <= 1e-4 * scale)


@settings(few, max_examples=5)
@given(
    pieces=st.lists(st.integers(1, 5), min_size=1, max_size=5),
    data=st.data(),
    fixed=st.booleans(),
    layout=st.sampled_from(["flat", "leaves"]),
)
def test_how_a_vector_is_cut_into_leaves_changes_nothing(pieces, data, fixed, layout):
    n = sum(pieces)
    order = data.draw(st.permutations(range(len(pieces))), label="order of the leaves")
    rank = data.draw(st.integers(1, n), label="rank")
    k = data.draw(st.integers(0, rank), label="k")
    hessian, rng = symmetric(eigenvalues_of(n, False), n), np.random.default_rng(n)
    theta, gradient = rng.normal(size=n), rng.normal(size=n)
    diagonal = rng.uniform(0.5, 1.5, n).astype(np.float32) * RATE if fixed else None
    whole, _ = one_update(
        jnp.asarray(theta, jnp.float32), jnp.asarray(gradient, jnp.float32), hessian, k, rank - k, diagonal
    )

    # The same vector in pieces, which a dict sorts into another order.
    cuts = np.split(np.arange(n), np.cumsum(pieces)[:-1])
    names = {f"{place}": cuts[i] for place, i in enumerate(order)}
    place = np.concatenate([names[name] for name in sorted(names)])

    def pick(vector):
        return {name: jnp.asarray(vector[index].reshape(1, -1), jnp.float32) for name, index in names.items()}

    diagonal = None if diagonal is None else diagonal[place]
    cut, _ = one_update(pick(theta), pick(gradient), hessian[np.ix_(place, place)], k, rank - k, diagonal, layout)
    np.testing.assert_allclose(flatten(cut), np.asarray(whole)[place], rtol=1e-3, atol=1e-5)
