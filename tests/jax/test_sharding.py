"""Parameters split over eight devices: FOSI's state is split as they are, and nothing large is gathered."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding

import fosi.jax as fj

SPECS = {
    "both": jax.P(None, "data", "model"),
    "one": jax.P(("data", "model")),
    "row": jax.P("data"),
    "whole": jax.P(),
}
SHAPES = {"both": (2, 4, 4), "one": (8, 2), "row": (4,), "whole": (3,)}
SIZE = 2 * 4 * 4 + 8 * 2 + 4 + 3
SMALL = {"k": 2, "ell": 1, "num_matvecs": 30, "warmup": 0, "refresh_every": 2, "alpha": 0.5}


@pytest.fixture(params=["explicit", "auto"])
def mesh(request):
    kind = AxisType.Explicit if request.param == "explicit" else AxisType.Auto
    made = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind, kind))
    with jax.set_mesh(made):
        yield made


def leaves(vector):
    """A NumPy vector as the parameters' tree."""
    out, end = {}, 0
    for name, shape in SHAPES.items():
        size = int(np.prod(shape))
        out[name], end = vector[end : end + size].reshape(shape).astype(np.float32), end + size
    return out


def vector(tree, rows=()):
    """The parameters' tree (or one with leading axes) as a NumPy vector."""
    return np.concatenate([np.asarray(tree[name], np.float64).reshape(*rows, -1) for name in SHAPES], axis=-1)


def problem():
    """½ θᵀ(D + s u uᵀ)θ: the batch, the parameters and the dense Hessian, in NumPy."""
    rng = np.random.default_rng(5)
    diagonal = np.sort(rng.uniform(1, 4, SIZE))
    diagonal[[7, 20, 40]] = 20.0, 12.0, -8.0
    u = rng.normal(size=SIZE) / np.sqrt(SIZE)
    batch = {"diagonal": leaves(diagonal), "u": leaves(u)}
    return batch, leaves(rng.normal(size=SIZE)), np.diag(diagonal) + 3 * np.outer(u, u)


def loss_fn(params, batch):
    square = sum(jnp.sum(batch["diagonal"][name] * params[name].astype(jnp.float32) ** 2) for name in SHAPES)
    inner = sum(jnp.sum(batch["u"][name] * params[name].astype(jnp.float32)) for name in SHAPES)
    return 0.5 * square + 1.5 * inner**2


def split(tree, mesh, dtype=None):
    return {
        name: jax.device_put(jnp.asarray(leaf, dtype), NamedSharding(mesh, SPECS[name])) for name, leaf in tree.items()
    }


def sharded_problem(mesh, dtype=None):
    batch, params, _ = problem()
    return {part: split(batch[part], mesh) for part in batch}, split(params, mesh, dtype)


def spec_of(array):
    """The partition without the trailing Nones that JAX adds or drops."""
    parts = list(array.sharding.spec) if isinstance(array.sharding, NamedSharding) else []
    while parts and parts[-1] is None:
        parts.pop()
    return tuple(parts)


def placed(tree):
    return jax.tree.map(lambda x: (jax.typeof(x), spec_of(x)), tree)


def assert_split_as_the_parameters(basis, rows=(None,)):
    for part, spec in zip(basis, SPECS.values(), strict=True):
        assert spec_of(part) == ((*rows, *spec) if tuple(spec) else ())


def collectives(compiled):
    """Name and element count of every collective in a compiled program."""
    found = re.findall(
        r"= (.*?) (all-gather|all-to-all|collective-permute|all-reduce)(?:-start)?\(", compiled.as_text()
    )
    return {
        (
            name,
            max(int(np.prod([int(d) for d in dims.split(",") if d])) for dims in re.findall(r"\[([\d,]*)\]", kind)),
        )
        for kind, name in found
    }


def optimizers(**options):
    options = {**SMALL, **options}
    return {
        "heavy-ball": fj.fosi_sgd(0.01, loss_fn, momentum=0.9, **options),
        "adamw": fj.fosi_adamw(0.01, loss_fn, **options),
        "lion": fj.fosi(optax.lion(0.01, weight_decay=0.0), loss_fn, momentum=None, **options),
    }


@pytest.mark.parametrize("name", ["heavy-ball", "adamw", "lion"])
def test_the_state_is_the_same_type_in_the_same_places_after_an_update(mesh, name):
    _, params = sharded_problem(mesh, jnp.float16)
    grads = jax.tree.map(jnp.ones_like, params)
    opt = optimizers(refresh="external")[name]
    state = opt.init(params)
    assert_split_as_the_parameters(state.basis)
    if name == "heavy-ball":
        assert_split_as_the_parameters(state.momentum, rows=())
    for update in (opt.update, jax.jit(opt.update)):
        updates, after = update(grads, state, params)
        assert placed(after) == placed(state)
        assert placed(updates) == placed(params)
    if mesh.axis_types[0] == AxisType.Explicit:  # only there does a type tell inside jit how a leaf is split
        assert placed(jax.jit(opt.init)(params)) == placed(state)


def test_an_eager_inline_refresh_keeps_types_and_places(mesh):
    batch, params = sharded_problem(mesh, jnp.float16)
    opt = optimizers()["heavy-ball"]
    state = opt.init(params)
    _, after = opt.update(jax.tree.map(jnp.ones_like, params), state, params, batch=batch)
    assert int(after.refreshes) == 1 and bool(after.accepted[0])
    assert placed(after) == placed(state)


def test_a_spectrum_is_split_as_the_parameters_and_agrees_with_the_dense_one(mesh):
    batch, params = sharded_problem(mesh)
    _, _, hessian = problem()
    spectrum = fj.estimate_spectrum(loss_fn, params, batch, k=2, ell=1, num_matvecs=30)
    assert_split_as_the_parameters([spectrum.eigenvectors[name] for name in SHAPES])

    values, vectors = np.linalg.eigh(hessian)
    wanted = vectors[:, [-1, -2, 0]].T
    assert bool(spectrum.accepted.all())
    np.testing.assert_allclose(spectrum.eigenvalues, values[[-1, -2, 0]], rtol=1e-5)
    got = vector(spectrum.eigenvectors, rows=(3,))
    np.testing.assert_allclose(np.abs(np.sum(got * wanted, axis=1)), 1, rtol=1e-5)


def steps_of(opt, params, batch, count, compiled=None):
    """Parameters after ``count`` steps; the state is put where ``init`` puts it."""
    state = opt.init(params)
    update, refresh = compiled or (jax.jit(opt.update), jax.jit(opt.refresh))
    schedule = opt.schedule(params)
    for step in range(count):
        grads = jax.grad(loss_fn)(params, batch)
        if refresh is None:
            updates, state = update(grads, state, params, batch=batch)
        else:
            if schedule.due(step):
                state = refresh(state, params, batch=batch)
            updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


@functools.cache
def single_device(name, layout):
    batch, params, _ = problem()
    batch, params = jax.tree.map(jnp.asarray, (batch, params))
    return steps_of(optimizers(refresh="external", layout=layout)[name], params, batch, 3)


@pytest.mark.parametrize(("name", "refresh"), [("adamw", "inline"), ("heavy-ball", "external")])
def test_a_sharded_run_equals_one_on_a_single_device_and_gathers_nothing(mesh, name, refresh):
    batch, params = sharded_problem(mesh)
    opt = optimizers(refresh=refresh)[name]
    state, grads = opt.init(params), jax.tree.map(jnp.zeros_like, params)
    if refresh == "inline":
        programs = (jax.jit(opt.update).lower(grads, state, params, batch=batch).compile(), None)
    else:
        programs = (
            jax.jit(opt.update).lower(grads, state, params).compile(),
            jax.jit(opt.refresh).lower(state, params, batch=batch).compile(),
        )
    for program in programs:
        if program is not None:
            found = collectives(program)
            assert {kind for kind, _ in found} == {"all-reduce"}
            assert max(size for _, size in found) <= SMALL["num_matvecs"]

    params, after = steps_of(opt, params, batch, 3, programs)
    assert placed(after) == placed(state)
    assert int(after.refreshes) == 2 and bool(after.accepted.all())
    with jax.set_mesh(jax.make_mesh((1,), ("x",), axis_types=(AxisType.Auto,))):
        wanted, wanted_state = single_device(name, "flat")
    np.testing.assert_allclose(vector(params), vector(wanted), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(after.eigenvalues, wanted_state.eigenvalues, rtol=1e-5)


def lbfgs_steps(params, batch, count=6, **options):
    """Parameters after so many steps of FOSI around L-BFGS, the state before and after, and the step compiled."""
    # Not optax's own search, whose inner products gather what is split.
    opt = fj.fosi_lbfgs(memory_size=3, linesearch=optax.scale(0.3), **{**SMALL, **options})

    @jax.jit
    def step(params, state, batch):
        def value_fn(params):
            return loss_fn(params, batch)

        value, grad = jax.value_and_grad(value_fn)(params)
        updates, state = opt.update(grad, state, params, value=value, grad=grad, value_fn=value_fn)
        return optax.apply_updates(params, updates), state

    before = after = opt.init(params)
    compiled = step.lower(params, before, batch).compile()
    for _ in range(count):
        params, after = compiled(params, after, batch)
    return params, before, after, compiled


def test_lbfgs_sharded_equals_one_on_a_single_device_and_gathers_nothing(mesh):
    batch, params = sharded_problem(mesh)
    params, before, after, compiled = lbfgs_steps(params, batch)
    assert placed(after._replace(base=after.base.pairs)) == placed(before._replace(base=before.base.pairs))
    assert int(after.refreshes) == 3
    assert_split_as_the_parameters(after.base.pairs.steps)
    found = collectives(compiled)
    assert {kind for kind, _ in found} == {"all-reduce"} and max(size for _, size in found) <= SMALL["num_matvecs"]
    with jax.set_mesh(jax.make_mesh((1,), ("x",), axis_types=(AxisType.Auto,))):
        wanted = lbfgs_steps(*jax.tree.map(jnp.asarray, (problem()[1], problem()[0])), layout="flat")[0]
    np.testing.assert_allclose(vector(params), vector(wanted), rtol=1e-3, atol=1e-4)


def test_a_refresh_outside_jit_keeps_types_and_places(mesh):
    batch, params = sharded_problem(mesh)
    opt = optimizers(refresh="external")["adamw"]
    state = opt.init(params)
    after = opt.refresh(state, params, batch=batch)
    assert placed(after) == placed(state)
    assert bool(after.accepted.all())


def test_the_two_layouts_agree():
    (flat, flat_state), (tree, tree_state) = single_device("adamw", "flat"), single_device("adamw", "leaves")
    assert flat_state.basis.shape == (3, SIZE)
    assert [rows.shape for rows in tree_state.basis] == [(3, *shape) for shape in SHAPES.values()]
    np.testing.assert_allclose(vector(tree), vector(flat), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(tree_state.eigenvalues, flat_state.eigenvalues, rtol=1e-5)


def test_leaves_of_one_shape_start_from_different_vectors():
    # The largest pair lies along a − b; from the same numbers in both leaves Lanczos would never see it.
    def difference(params, curvature):
        return 5 * (params["a"][0] - params["b"][0]) ** 2 + 0.5 * sum(
            jnp.sum(curvature * x**2) for x in params.values()
        )

    params = {"a": jnp.zeros(4), "b": jnp.zeros(4)}
    spectrum = fj.estimate_spectrum(difference, params, jnp.array([1.0, 2.0, 3.0, 4.0]), k=1, layout="leaves")
    np.testing.assert_allclose(spectrum.eigenvalues, [21.0], rtol=1e-5)


def test_data_parallel_training_keeps_the_flat_layout(mesh):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(16, 5)).astype(np.float32), rng.normal(size=16).astype(np.float32)
    start = {"w": rng.normal(size=(5,)).astype(np.float32), "b": np.float32(0.5)}

    def regression(params, batch):
        return 0.5 * jnp.mean((batch[0] @ params["w"] + params["b"] - batch[1]) ** 2)

    opt = fj.fosi_sgd(0.1, regression, k=1, num_matvecs=6, alpha=0.5, refresh="external", max_lr_scale=1.0)
    params = jax.device_put(start, NamedSharding(mesh, jax.P()))
    batch = jax.device_put((x, y), NamedSharding(mesh, jax.P(("data", "model"))))
    state = opt.init(params)
    assert state.basis.shape == (1, 6) and spec_of(state.basis) == ()
    state = jax.jit(opt.refresh)(state, params, batch=batch)
    updates, state = jax.jit(opt.update)(jax.grad(regression)(params, batch), state, params)
    assert placed(updates) == placed(params)

    # By hand: the Hessian of the regression, its largest pair, and FOSI's step with gradient descent.
    features = np.concatenate([np.ones((16, 1)), x], axis=1)  # b sorts before w
    theta = np.concatenate([[0.5], start["w"]])
    gradient = features.T @ (features @ theta - y) / 16
    values, vectors = np.linalg.eigh(features.T @ features / 16)
    v = vectors[:, -1]
    wanted = -0.5 * v * (v @ gradient) / values[-1] - 0.1 * (gradient - v * (v @ gradient))
    got = np.concatenate([np.asarray(updates["b"]).reshape(1), updates["w"]])
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)
