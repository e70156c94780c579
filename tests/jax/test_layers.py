"""Coordinates of the layers against dense matrices: the factors, S in all directions, and optimizers in it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fosi.jax import Batches, ModelLoss, fosi_adam, fosi_lbfgs, in_layers, layers
from fosi.quasi_newton import LEAST_SHARE
from fosi.schedule import NEVER_AGAIN
from tests.jax.running import x64
from tests.problems import symmetric

MAX = 100


@pytest.fixture(autouse=True)
def in_float64():
    with x64(np.float64):
        yield


def network(columns=False):
    """Two matrices, one of them with three axes, a vector, a number and a leaf that nothing depends on."""
    rng = np.random.default_rng(0)
    first = rng.normal(size=(3, 4))
    params = {
        "first": {"w": first.T if columns else first, "b": rng.normal(size=4)},
        "second": rng.normal(size=(2, 2, 3)),
        "shift": np.array(0.3),
        "unused": rng.normal(size=(2, 2)),
    }
    batch = rng.normal(size=(8, 3)) * [3.0, 1.0, 0.3], rng.integers(0, 3, 8)

    def model(params, batch):
        w = params["first"]["w"].T if columns else params["first"]["w"]
        hidden = jnp.tanh(batch[0] @ w + params["first"]["b"][None])
        return hidden @ params["second"].reshape(4, 3) + params["shift"] * jnp.arange(3.0)[None]

    def loss(outputs, batch):
        return -jnp.mean(jax.nn.log_softmax(outputs)[jnp.arange(len(outputs)), batch[1]])

    return ModelLoss(model, loss), jax.tree.map(jnp.asarray, params), jax.tree.map(jnp.asarray, batch)


def ravelled(tree):
    return np.asarray(jax.flatten_util.ravel_pytree(tree)[0])


def dense_gauss_newton(loss, params, batch):
    flat, shape = jax.flatten_util.ravel_pytree(params)
    outputs = loss.model_fn(params, batch)
    J = jax.jacobian(lambda x: loss.model_fn(shape(x), batch).ravel())(flat)
    H = jax.hessian(lambda o: loss.loss_fn(o.reshape(outputs.shape), batch))(outputs.ravel())
    return np.asarray(J.T @ H @ J)


REST = ((np.r_[16:28], (2, 2, 3)), (np.r_[28:29], ()), (np.r_[29:33], (2, 2)))
ROW, COLUMN = np.r_[4:16, 0:4], np.c_[np.arange(4, 16).reshape(4, 3), np.arange(4)].ravel()
"""Where the blocks of ``network`` are among its parameters, and their shapes; the first with its bias as one more row,
and as one more column."""


def damped(block, shape, damping, least):
    """A ⊗ B / tr A with what is added to each, by the block itself: partial traces in the place of means."""
    if len(shape) < 2:
        return np.diag(np.maximum(np.diag(block) + np.sqrt(damping) * np.diag(block).mean(), least))
    rows, columns = int(np.prod(shape[:-1])), shape[-1]
    parts = block.reshape(rows, columns, rows, columns)
    A, B, trace = np.einsum("ikjk->ij", parts), np.einsum("kikj->ij", parts), np.trace(block)
    if trace == 0:
        return least * np.eye(rows * columns)
    A = A * rows / trace + np.sqrt(damping) * np.eye(rows)
    B = B * columns / trace + np.sqrt(damping) * np.eye(columns)
    return max(trace / block.shape[0], least) * np.kron(A, B)


def matrix_of(function, params):
    """The dense matrix of a linear map of trees."""
    flat, shape = jax.flatten_util.ravel_pytree(params)
    return np.stack([ravelled(function(shape(row))) for row in jnp.eye(len(flat))], axis=1)


@pytest.mark.parametrize("summed", [False, True])
@pytest.mark.parametrize("columns", [False, True])
def test_factors_are_those_of_the_dense_blocks(columns, summed):
    """The mean of many probes, of a loss whose second derivative is not diagonal, and of one that is summed."""
    loss, params, batch = network(columns)
    if summed:
        targets = jnp.asarray(np.random.default_rng(6).uniform(size=(8, 3)))
        loss = ModelLoss(loss.model_fn, lambda o, batch: jnp.sum(jax.nn.softplus(9 * o) - 9 * targets * o))
    metric = layers.measure(loss, params, batch, jax.random.key(0), 40_000, 1e-2, MAX)
    G = dense_gauss_newton(loss, params, batch)
    found = np.linalg.inv(matrix_of(lambda g: layers.outside(metric, layers.inside(metric, g)), params))
    least = 1e-2 * np.trace(G) / len(G)
    assert least > 0
    wanted, between = np.zeros_like(found), np.ones(found.shape, bool)
    for where, shape in ((COLUMN if columns else ROW, (4, 4)), *REST):
        block = np.ix_(where, where)
        between[block] = False
        wanted[block] = damped(G[block], shape, 1e-2, least)
        np.testing.assert_allclose(found[block], wanted[block], atol=0.03 * np.abs(wanted[block]).max())
    # Nothing stands between the blocks.
    assert np.abs(found[between]).max() < 1e-9 * np.abs(found).max()


def test_one_probe_is_exact_where_there_is_one_output():
    params = {"w": jnp.asarray(np.random.default_rng(1).normal(size=(2, 3))), "b": jnp.ones(3)}
    x = jnp.array([1.0, 2.0])
    loss = ModelLoss(lambda p, x: jnp.sum(jnp.tanh(x @ p["w"] + p["b"])), lambda o, x: 3 * o**2)
    metric = layers.measure(loss, params, x, jax.random.key(2), 1, 1e-6, MAX)
    G = dense_gauss_newton_of_one(loss, params, x)
    found = np.linalg.inv(matrix_of(lambda g: layers.outside(metric, layers.inside(metric, g)), params))
    where = np.r_[3:9, 0:3]  # the bias is the last row
    wanted = damped(G[np.ix_(where, where)], (3, 3), 1e-6, 1e-6 * np.trace(G) / len(G))
    np.testing.assert_allclose(found[np.ix_(where, where)], wanted, rtol=1e-6, atol=1e-9)


def dense_gauss_newton_of_one(loss, params, batch):
    g = ravelled(jax.grad(lambda p: loss.model_fn(p, batch))(params))
    return 6 * np.outer(g, g)


@pytest.mark.parametrize("eigenvalues", [[2.0] * 6, [5.0, 5.0, 1.0, 0.1, 0.0, 0.0], [0.0] * 6, [3.0]])
def test_roots_times_vectors(eigenvalues):
    H = jnp.asarray(symmetric(eigenvalues, seed=3))
    z = jnp.asarray(np.random.default_rng(4).normal(size=len(eigenvalues)))
    values, vectors = np.linalg.eigh(H)
    wanted = vectors @ (np.sqrt(np.maximum(values, 0)) * (vectors.T @ z))
    np.testing.assert_allclose(layers._root_times(lambda v: H @ v, z), wanted, atol=1e-7)


@pytest.mark.parametrize("eigenvalues", [np.geomspace(1, 1e-6, 40), np.ones(40), np.zeros(40)])
def test_root_of_a_diagonal_is_exact(eigenvalues):
    """Of more eigenvalues than Lanczos has steps."""
    h, z = jnp.asarray(eigenvalues), jnp.asarray(np.random.default_rng(4).normal(size=40))
    found = layers._root(lambda v: h * v, jnp.asarray(np.random.default_rng(5).normal(size=40)), [40], 1e-5)(z)
    np.testing.assert_allclose(found, np.sqrt(h) * z, rtol=1e-12)


def test_what_is_nearly_a_diagonal_is_none():
    """Three of forty rows have neighbours, by a thousandth, of which one adds up to what it would be without them."""
    H = np.diag(np.r_[np.ones(37), 3.0, 3.0, 3.0])
    H[37, 38] = H[38, 37] = 1e-3
    H[37, 39] = H[39, 37] = -1e-3
    z = jnp.asarray(np.random.default_rng(4).normal(size=40))
    test = jnp.asarray(np.random.default_rng(5).normal(size=40))
    found = layers._root(lambda v: jnp.asarray(H) @ v, test, [40], 1e-5)(z)
    values, vectors = np.linalg.eigh(H)
    np.testing.assert_allclose(found, vectors @ (np.sqrt(values) * (vectors.T @ z)), atol=1e-7)
    assert np.abs(found - np.sqrt(np.diag(H)) * z).max() > 1e-5


def test_arrays_of_outputs_are_each_a_diagonal_or_not():
    """Squares a million times as steep as a softmax beside them, all of whose products with ones are 0."""
    H = jnp.asarray(jax.scipy.linalg.block_diag(1e6 * np.eye(20), (np.eye(20) - 0.05) / 20))
    z, test = (jnp.asarray(np.random.default_rng(i).normal(size=40)) for i in (4, 5))
    found = layers._root(lambda v: H @ v, test, [20, 20], 1e-5)(z)
    np.testing.assert_allclose(found, np.r_[1e3 * z[:20], (z[20:] - z[20:].mean()) / np.sqrt(20)], atol=1e-5)


@pytest.mark.parametrize(("dtype", "rtol"), [("float32", 1e-5), ("bfloat16", 0.03)])
def test_a_diagonal_is_one_in_low_precision(dtype, rtol):
    """Of sigmoids from 6e-6 to a half, the small ones of which Lanczos would not tell apart; outputs are parameters."""
    logits = jnp.linspace(-12, 0, 50).astype(dtype)
    loss = ModelLoss(lambda p, batch: p, lambda o, batch: jnp.sum(jax.nn.softplus(o)))
    (factors,) = layers.measure(loss, logits, None, jax.random.key(0), 3, 1e-20, MAX)
    p = 1 / (1 + np.exp(-np.asarray(logits, np.float64)))
    np.testing.assert_allclose(factors.right, np.sqrt(p * (1 - p)), rtol=rtol, atol=1e-6)


def test_a_softmax_is_no_diagonal_in_float16():
    """Of so many examples that the squares of its second derivatives are 0 there."""
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(20_000, 4)), jnp.float16)
    loss = ModelLoss(lambda b, logits: logits + b[None], lambda o, _: -jnp.mean(jax.nn.log_softmax(o)[:, 0]))
    (half,) = layers.measure(loss, jnp.zeros(4, jnp.float16), logits, jax.random.key(0), 20, 1e-3, MAX)
    exact = logits.astype(jnp.float32)
    (wanted,) = layers.measure(loss, jnp.zeros(4, jnp.float32), exact, jax.random.key(0), 20, 1e-3, MAX)
    np.testing.assert_allclose(half.right, wanted.right, rtol=0.1)
    assert half.right.max() < 0.9


def test_leaves_that_are_empty_and_dtypes_that_differ():
    """Neither spoils the rest; factors are in the dtypes that they begin in."""
    rng = np.random.default_rng(7)
    params = {"none": jnp.zeros((0, 3)), "no": {"w": jnp.zeros((3, 0)), "b": jnp.zeros(0)}}
    params |= {"v": jnp.ones(2, jnp.float32), "w": jnp.ones((3, 2), jnp.float32), "wide": jnp.ones((2, 2))}
    x = jnp.asarray(rng.normal(size=(5, 3)))
    loss = ModelLoss(lambda p, x: x @ p["w"] @ p["wide"] * p["v"][None], lambda o, x: jnp.sum(o**2))
    found = layers.measure(loss, params, x, jax.random.key(0), 2, 1e-3, MAX)
    begun = layers.identity(params, MAX)
    assert jax.tree.map(lambda a: (a.shape, a.dtype), found) == jax.tree.map(lambda a: (a.shape, a.dtype), begun)
    assert np.isfinite(ravelled(found)).all()
    jax.tree.map(np.testing.assert_array_equal, layers.outside(begun, params), params)


def test_a_bias_costs_a_matrix_nothing():
    params = {"w": jnp.ones((4, 3)), "b": jnp.ones(3)}
    (kept,) = layers.identity(params, 4)
    assert kept.left.shape == (5, 5) and kept.right.shape == (3, 3)
    (lost,) = layers.identity(params, 3)
    assert lost.left is None and lost.right.shape == (5, 3)


def test_directions_of_s():
    """Sᵀ, S and S⁻ᵀ are one matrix's; the identity is what it says; a side that is too long has a diagonal."""
    loss, params, batch = network()
    for largest in (MAX, 3):
        metric = layers.measure(loss, params, batch, jax.random.key(0), 7, 1e-3, largest)
        S = matrix_of(lambda y, m=metric: layers.outside(m, y), params)
        np.testing.assert_allclose(matrix_of(lambda g, m=metric: layers.inside(m, g), params), S.T, atol=1e-12)
        np.testing.assert_allclose(
            matrix_of(lambda g, m=metric: layers.back(m, g), params) @ S.T, np.eye(len(S)), atol=1e-9
        )
        assert [factors.left is None for factors in metric] == [largest == 3, largest == 3, True, False]
        same = layers.identity(params, largest)
        assert jax.tree.structure(same) == jax.tree.structure(metric)
        for function in (layers.inside, layers.outside, layers.back):
            np.testing.assert_array_equal(matrix_of(lambda x, f=function, m=same: f(m, x), params), np.eye(len(S)))


@pytest.mark.parametrize("largest", [MAX, 3])
def test_one_metric_seen_from_another(largest):
    """S_old⁻¹ S_new, in all directions."""
    loss, params, batch = network()
    old, new = (layers.measure(loss, params, batch, jax.random.key(i), 7, 1e-3, largest) for i in range(2))
    before, after = (matrix_of(lambda y, m=m: layers.outside(m, y), params) for m in (old, new))
    wanted = np.linalg.solve(before, after)
    seen = layers.relative(new, old)
    for function, dense in (
        (layers.outside, wanted),
        (layers.onto, np.linalg.inv(wanted)),
        (layers.inside, wanted.T),
        (layers.back, np.linalg.inv(wanted).T),
    ):
        found = matrix_of(lambda x, f=function: f(seen, x), params)
        np.testing.assert_allclose(found, dense, rtol=1e-8, atol=1e-9 * np.abs(dense).max())
    assert np.abs(wanted - np.eye(len(wanted))).max() > 0.1


def test_gradient_descent_inside_is_divided_by_the_metric():
    loss, params, batch = network()
    opt = in_layers(lambda _: optax.sgd(0.5), loss, probes=5, damping=1e-2, seed=3)
    state, grads = opt.init(params), jax.grad(loss)(params, batch)
    before, state = opt.update(grads, state, params)
    np.testing.assert_allclose(ravelled(before), -0.5 * ravelled(grads), rtol=1e-12)  # S is the identity at first
    state = opt.refresh(state, params, batch=batch)
    S = matrix_of(lambda y: layers.outside(state.metric, y), params)
    assert np.abs(S - np.eye(len(S))).max() > 0.1
    after, state = opt.update(grads, state, params)
    np.testing.assert_allclose(ravelled(after), -0.5 * S @ S.T @ ravelled(grads), rtol=1e-9)
    np.testing.assert_allclose(ravelled(state.place), -0.5 * S.T @ ravelled(grads), rtol=1e-9)
    assert int(state.refreshes) == 1
    again = opt.refresh(state, params, batch=batch)
    assert not np.allclose(ravelled(again.metric), ravelled(state.metric))  # other signs
    assert not ravelled(again.place).any()


def test_least_squares_of_one_matrix_take_one_step():
    """XᵀX ⊗ I is a product of two factors: with many probes S Sᵀ is next to the inverse of half the Hessian."""
    rng = np.random.default_rng(5)
    x = jnp.asarray(rng.normal(size=(30, 4)) * [100.0, 10.0, 1.0, 0.1])
    target = x @ jnp.asarray(rng.normal(size=(4, 5)))
    loss = ModelLoss(lambda w, x: x @ w, lambda out, x: jnp.sum((out - target) ** 2))
    opt = in_layers(lambda _: optax.sgd(1.0), loss, probes=20_000, damping=1e-20)
    w = jnp.zeros((4, 5))
    state = opt.refresh(opt.init(w), w, batch=x)
    updates, state = opt.update(jax.grad(loss)(w, x), state, w)
    assert loss(optax.apply_updates(w, updates), x) < 1e-3 * loss(w, x)


def test_fosi_inside_estimates_what_is_left():
    """The eigenvalues of Sᵀ G S, dense; and steps of it come out."""
    loss, params, batch = network()
    options = {"k": 3, "num_matvecs": 20, "precision": "float64", "curvature": "gauss_newton", "refresh": "external"}
    opt = in_layers(lambda inner: fosi_lbfgs(inner, memory_size=5, **options), loss, damping=1e-2)
    state = opt.refresh(opt.init(params), params, batch=batch)
    S, G = matrix_of(lambda y: layers.outside(state.metric, y), params), dense_gauss_newton(loss, params, batch)
    np.testing.assert_allclose(state.inner.eigenvalues, np.linalg.eigvalsh(S.T @ G @ S)[:-4:-1], rtol=1e-8)
    assert state.inner.accepted.all()


@pytest.mark.parametrize("inside", ["fosi", "optax"])
def test_a_search_keeps_the_gradient_that_its_caller_wants(inside):
    """Every step's loss and gradient out of the state are those at the parameters; the loss falls; under jit."""
    loss, params, batch = network()
    options = {"k": 3, "curvature": "gauss_newton", "refresh": "external"}
    make = {"fosi": lambda inner: fosi_lbfgs(inner, **options), "optax": lambda _: optax.lbfgs()}[inside]
    opt = in_layers(make, loss, every=4, damping=1e-2)
    value_and_grad = optax.value_and_grad_from_state(lambda p: loss(p, batch))
    calls = []

    @jax.jit
    def step(params, state):
        value, grad = value_and_grad(params, state=state)
        given = {"value": value, "grad": grad, "value_fn": lambda p: loss(p, batch)}
        updates, state = opt.update(grad, state, params, **given)
        return optax.apply_updates(params, updates), state, value, grad

    state, schedule, first = opt.init(params), opt.schedule(params), float(loss(params, batch))
    for i in range(10):
        if schedule.due(i):
            state = opt.refresh(state, params, batch=batch)
            calls.append(i)
        wanted = jax.value_and_grad(loss)(params, batch)
        params, state, value, grad = step(params, state)
        np.testing.assert_allclose(value, wanted[0], rtol=1e-10)
        np.testing.assert_allclose(ravelled(grad), ravelled(wanted[1]), rtol=1e-7, atol=1e-12)
    assert calls == [0, 4, 8] and int(state.refreshes) == 3
    assert float(loss(params, batch)) < 0.4 * first


class LiteralLbfgs:
    """The two loops, over pairs of the parameters themselves; the first guess is that of S y, as it is now."""

    def __init__(self, memory):
        self.memory, self.pairs, self.before, self.scale = memory, [], None, None

    def moved(self, S):
        if self.pairs:
            s, y = self.pairs[-1]
            self.scale = (s @ y) / (S.T @ y @ S.T @ y)

    def direction(self, x, g, S, V, newton):
        if self.before is None:
            self.scale = min(1.0, 1 / np.linalg.norm(S.T @ g))
        else:
            s, y = x - self.before[0], g - self.before[1]
            assert s @ y > 0
            self.pairs = [*self.pairs, (s, y)][-self.memory :]
            outside = S.T @ y - V.T @ (V @ (S.T @ y))
            share = (np.linalg.inv(S) @ s) @ outside
            known = share > LEAST_SHARE * (s @ y)
            self.scale = share / (outside @ outside) if known else max(self.scale, *newton)
        self.before = x, g
        q, taken = g.copy(), []
        for s, y in reversed(self.pairs):
            taken.append((s @ q) / (s @ y))
            q -= taken[-1] * y
        inside = S.T @ q
        r = S @ (self.scale * inside + V.T @ ((newton - self.scale) * (V @ inside)))
        for (s, y), a in zip(self.pairs, reversed(taken), strict=True):
            r += (a - (y @ r) / (s @ y)) * s
        return -r


@pytest.mark.parametrize(("largest", "layout"), [(MAX, "flat"), (3, "leaves")])
@pytest.mark.parametrize("estimating", [False, True])
def test_pairs_outlive_their_coordinates(estimating, largest, layout):
    """FOSI around L-BFGS is L-BFGS of the parameters, whose first guess follows S: step by step, over estimates."""
    logits, params, batch = network()
    loss = ModelLoss(logits.model_fn, lambda o, batch: jnp.mean((o - jnp.eye(3)[batch[1]]) ** 2))
    options = {"k": 3, "num_matvecs": 12, "precision": "float64", "curvature": "gauss_newton", "accept": "all"}
    never = {} if estimating else {"warmup": NEVER_AGAIN}

    def make(inner):
        given = {"linesearch": optax.scale(0.2), "scaling": "usual", "refresh": "external", "layout": layout}
        return fosi_lbfgs(inner, memory_size=4, **options, **never, **given)

    opt = in_layers(make, loss, probes=5, damping=1e-2, max_dim=largest)
    state, literal = opt.init(params), LiteralLbfgs(4)
    shape = jax.flatten_util.ravel_pytree(params)[1]
    metrics = []
    for i in range(11):
        # The first after two steps in the parameters' own coordinates, and two at one place.
        for _ in range({2: 1, 5: 2, 6: 1, 9: 1}.get(i, 0)):
            state = opt.refresh(state, params, batch=batch)
            metrics.append(ravelled(state.metric))
            literal.moved(matrix_of(lambda y, m=state.metric: layers.outside(m, y), params))
        grad = jax.grad(loss)(params, batch)
        S = matrix_of(lambda y, m=state.metric: layers.outside(m, y), params)
        V = np.concatenate([rows.reshape(3, -1) for rows in jax.tree.leaves(state.inner.basis)], axis=1)
        values = np.asarray(state.inner.eigenvalues)
        newton = np.where(values > 0, 1 / np.where(values > 0, values, 1), 0)
        assert (values > 0).all() == (estimating and i >= 2)
        given = {"value": loss(params, batch), "grad": grad, "value_fn": lambda p: loss(p, batch)}
        updates, state = opt.update(grad, state, params, **given)
        wanted = 0.2 * literal.direction(ravelled(params), ravelled(grad), S, V, newton)
        np.testing.assert_allclose(ravelled(updates), wanted, rtol=1e-6, atol=1e-9 * np.abs(wanted).max())
        params = shape(jnp.asarray(ravelled(params) + wanted))
    assert len(literal.pairs) == 4 and not np.allclose(metrics[0], metrics[-1])
    assert int(state.refreshes) == 5 and int(state.inner.refreshes) == (5 if estimating else 0)


def lbfgs_after_steps(loss, params, batch, steps=3, estimating=False, **options):
    """The optimizer, the parameters and the state after an estimate and so many steps."""
    given = {"k": 2, "num_matvecs": 8, "curvature": "gauss_newton", "accept": "all", "refresh": "external", **options}
    never = {} if estimating else {"warmup": NEVER_AGAIN}
    opt = in_layers(lambda inner: fosi_lbfgs(inner, memory_size=3, **given, **never), loss, probes=5, damping=1e-2)

    @jax.jit
    def step(params, state):
        value, grad = optax.value_and_grad_from_state(lambda p: loss(p, batch))(params, state=state)
        # Without grad=, which FOSI around L-BFGS does not need.
        updates, state = opt.update(grad, state, params, value=value, value_fn=lambda p: loss(p, batch))
        return optax.apply_updates(params, updates), state

    state = opt.init(params)
    for _ in range(2):
        state = opt.refresh(state, params, batch=batch)
        for _ in range(steps):
            params, state = step(params, state)
    return opt, params, state


def test_gradients_are_kept_right_where_none_is_handed_in():
    loss, params, batch = network()
    _, params, state = lbfgs_after_steps(loss, params, batch)
    value, grad = optax.value_and_grad_from_state(lambda p: 0 * loss(p, batch))(params, state=state)
    wanted = jax.value_and_grad(loss)(params, batch)
    np.testing.assert_allclose(value, wanted[0], rtol=1e-10)
    np.testing.assert_allclose(ravelled(grad), ravelled(wanted[1]), rtol=1e-7, atol=1e-12)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_dtypes_stay_as_they_begin(dtype):
    """Two estimates, a line search, and steps in one compiled function; float64 being on."""
    exact, params, batch = network()
    loss = ModelLoss(*(lambda *given, f=f: f(*given).astype(dtype) for f in (exact.model_fn, exact.loss_fn)))
    params = jax.tree.map(lambda x: x.astype(dtype), params)
    batch = batch[0].astype(dtype), batch[1]
    opt, after, state = lbfgs_after_steps(loss, params, batch)
    assert jax.tree.map(jnp.result_type, opt.init(params)) == jax.tree.map(jnp.result_type, state)
    assert {x.dtype for x in jax.tree.leaves(after)} == {jnp.dtype(dtype)}
    assert float(loss(after, batch)) < float(loss(params, batch))


def test_an_estimate_that_is_no_number_changes_nothing():
    loss, params, batch = network()
    opt, params, state = lbfgs_after_steps(loss, params, batch, estimating=True)
    assert state.inner.accepted.all() and ravelled(state.place).any()
    after = opt.refresh(state, params, batch=(batch[0] * jnp.nan, batch[1]))
    counted = after.inner._replace(refreshes=state.inner.refreshes)
    found = after._replace(refreshes=state.refreshes, inner=counted)
    jax.tree.map(np.testing.assert_array_equal, found, state)
    assert int(after.refreshes) == int(state.refreshes) + 1


@pytest.mark.parametrize("scaling", ["usual", "geometric"])
def test_new_coordinates_are_trusted(scaling):
    loss, params, batch = network()
    opt, params, state = lbfgs_after_steps(loss, params, batch, scaling=scaling)
    pairs = state.inner.base.pairs._replace(trust=jnp.asarray(1e-3))
    base = state.inner.base._replace(pairs=pairs)
    state = state._replace(inner=state.inner._replace(base=base))
    moved = opt.refresh(state, params, batch=batch).inner.base.pairs
    newest = (int(moved.next) - 1) % 3
    s, y = np.asarray(moved.steps[newest]), np.asarray(moved.changes[newest])
    np.testing.assert_allclose(s @ y, 1, rtol=1e-6)
    np.testing.assert_allclose(moved.scale, s @ y / (y @ y) if scaling == "usual" else np.sqrt(s @ s / (y @ y)))
    assert float(moved.trust) == 1 and not np.allclose(moved.scale, pairs.scale)


def test_another_optimizer_begins_anew():
    """Nothing is known of the state of one that is none of FOSI's; FOSI around Adam has no estimate either at first."""
    loss, params, batch = network()
    adam = {"k": 2, "refresh": "external", "warmup": NEVER_AGAIN}
    for make in (lambda _: optax.adam(0.1), lambda inner: fosi_adam(0.1, inner, **adam)):
        opt = in_layers(make, loss, probes=5)
        grads, begun = jax.grad(loss)(params, batch), opt.init(params)
        state = opt.update(grads, opt.refresh(begun, params, batch=batch), params)[1]
        assert jax.tree.leaves(optax.tree.get(state, "mu"))[0].any()
        again = opt.refresh(state, params, batch=batch).inner
        for found, wanted in zip(*map(jax.tree.leaves, (again, begun.inner)), strict=True):
            np.testing.assert_array_equal(found, wanted)


def test_half_precision_and_a_chain():
    """Parameters and outputs in bfloat16: steps as in float64 to two digits, and y no coarser than float32."""
    loss, params, batch = network()
    exact = in_layers(lambda _: optax.sgd(0.1), loss, probes=3, damping=1e-2)
    wanted, _ = exact.update(
        jax.grad(loss)(params, batch), exact.refresh(exact.init(params), params, batch=batch), params
    )

    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    half = batch[0].astype(jnp.bfloat16), batch[1]
    inner = in_layers(lambda _: optax.sgd(0.1), loss, probes=3, damping=1e-2)
    opt = optax.chain(optax.clip(1e3), inner)
    state = inner.refresh(opt.init(params), params, batch=half)
    assert {x.dtype for x in jax.tree.leaves(state[1].place)} == {jnp.dtype(jnp.float32)}
    grads = jax.grad(loss)(params, half)
    updates, _ = opt.update(grads, state, params)
    assert {x.dtype for x in jax.tree.leaves(updates)} == {jnp.dtype(jnp.bfloat16)}
    found = ravelled(jax.tree.map(lambda x: x.astype(jnp.float32), updates))
    assert found @ ravelled(wanted) > 0.95 * np.linalg.norm(found) * np.linalg.norm(ravelled(wanted))


def test_what_will_not_do_is_named():
    loss, params, batch = network()

    def inside(loss):
        return optax.sgd(0.1)

    with pytest.raises(TypeError, match=r"loss_fn must be a fosi\.jax\.ModelLoss"):
        in_layers(inside, loss.loss_fn)
    wrong = [{"every": 0}, {"probes": 2.5}, {"max_dim": True}, {"damping": 0.0}, {"damping": float("inf")}]
    for given in wrong:
        (name,) = given
        with pytest.raises(ValueError, match=f"{name} must be .*, got {given[name]}"):
            in_layers(inside, loss, **given)
    with pytest.raises(ValueError, match="refresh must be 'external' for FOSI in in_layers"):
        in_layers(lambda loss: fosi_adam(0.1, loss, k=2), loss)
    opt = in_layers(inside, loss)
    with pytest.raises(ValueError, match="params must be passed"):
        opt.update(params, opt.init(params))
    with pytest.raises(ValueError, match="batch must be one batch, got Batches"):
        opt.refresh(opt.init(params), params, batch=Batches([batch, batch]))
    external = {"k": 2, "refresh": "external"}
    chained = in_layers(lambda loss: optax.chain(optax.clip(1.0), fosi_adam(0.1, loss, **external)), loss)
    with pytest.raises(ValueError, match="make must return FOSI itself"):
        chained.init(params)
    with pytest.raises(ValueError, match="exactly one LayeredState, found 0 in tuple"):
        opt.refresh((), params, batch=batch)
