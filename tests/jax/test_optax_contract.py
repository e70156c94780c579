"""What optax's own tests ask of every optimizer: minima, extra arguments, dtypes, wrappers, state."""

import functools
import logging
import pickle

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fosi.jax as fj

# One eigenpair, estimated in the very first update and every ten steps from then on.
SMALL = {"k": 1, "alpha": 0.1, "warmup": 0, "refresh_every": 10}

# Name: the rate that suits the targets below, the factory, and its arguments at a rate.
TABLE = {
    "gd": (1e-3, fj.fosi_sgd, lambda rate: {"learning_rate": rate}),
    "heavy-ball": (3e-4, fj.fosi_sgd, lambda rate: {"learning_rate": rate, "momentum": 0.9}),
    "nesterov": (3e-4, fj.fosi_sgd, lambda rate: {"learning_rate": rate, "momentum": 0.9, "nesterov": True}),
    "adam": (1e-2, fj.fosi_adam, lambda rate: {"learning_rate": rate}),
    "adamw": (1e-2, fj.fosi_adamw, lambda rate: {"learning_rate": rate, "weight_decay": 1e-4}),
    "rmsprop": (1e-3, fj.fosi, lambda rate: {"base": optax.rmsprop(rate), "momentum": None}),
    "lion": (1e-3, fj.fosi, lambda rate: {"base": optax.lion(rate, weight_decay=0.0), "momentum": None}),
}
# What each is before its first estimate, and outside the subspace always.
BASES = {
    "gd": optax.sgd,
    "heavy-ball": lambda rate: optax.sgd(rate, momentum=0.9),
    "nesterov": lambda rate: optax.sgd(rate, momentum=0.9, nesterov=True),
    "adam": optax.adam,
    "adamw": lambda rate: optax.adamw(rate, weight_decay=1e-4),
    "rmsprop": optax.rmsprop,
    "lion": lambda rate: optax.lion(rate, weight_decay=0.0),
}
# How many trees shaped like the parameters the base keeps. The momentum of fosi_sgd is a vector of the space instead.
COPIES = {"gd": 0, "heavy-ball": 0, "nesterov": 0, "adam": 2, "adamw": 2, "rmsprop": 1, "lion": 1}
DTYPES = ("bfloat16", "float16", "float32", "float64")

every_optimizer = pytest.mark.parametrize("name", TABLE)
# Compiling an estimate takes a second or two; where one of a kind will do, these stand for the table.
one_of_a_kind = pytest.mark.parametrize("name", ["heavy-ball", "adamw", "lion"])


def build(name, rate=None, loss_fn=None, **options):
    usual, factory, arguments = TABLE[name]
    return factory(loss_fn=loss_fn, **arguments(usual if rate is None else rate), **{**SMALL, **options})


def parabola():
    goal = jnp.array([1.0, -1.0, 1.0])
    return jnp.array([-1.0, 10.0, 1.0]), goal, lambda x: jnp.sum((x - goal) ** 2)


def rosenbrock():
    return jnp.zeros(2), jnp.ones(2), lambda x: (1 - x[0]) ** 2 + 100 * (x[1] - x[0] ** 2) ** 2


def matrix_parabola():
    goal = jnp.array([[3.0, -2.0], [1.0, 4.0]])
    return jnp.zeros((2, 2)), goal, lambda x: jnp.sum((x - goal) ** 2)


def mixed_tree():
    goal = {"vector": jnp.array([1.0, -1.0, 2.0]), "matrix": jnp.array([[1.0, 0.0], [-1.0, 1.0]])}

    def loss(x):
        return jnp.sum((x["vector"] - goal["vector"]) ** 2) + 3 * jnp.sum((x["matrix"] - goal["matrix"]) ** 2)

    return jax.tree.map(jnp.zeros_like, goal), goal, loss


def quadratic(params, curvature):
    """A loss of (params, batch) with a diagonal Hessian: the batch."""
    terms = jax.tree.map(lambda p, c: 0.5 * jnp.sum(c * p.astype(c.dtype) ** 2), params, curvature)
    return sum(jax.tree.leaves(terms))


def tree(dtype="float32"):
    """Parameters of a few shapes and a diagonal Hessian for them; the largest entry is 9, at ["a"][1]."""
    params = {"a": jnp.array([1.0, -2.0, 3.0], dtype), "b": (jnp.array(0.5, dtype), jnp.ones((2, 2), dtype))}
    curvature = {"a": jnp.array([3.0, 9.0, 1.0]), "b": (jnp.array(2.0), jnp.array([[1.0, 2.0], [0.5, 1.0]]))}
    return params, curvature


def assert_same(actual, wanted, **tolerance):
    assert jax.tree.structure(actual) == jax.tree.structure(wanted)
    jax.tree.map(lambda a, w: np.testing.assert_allclose(a, w, **(tolerance or {"rtol": 0})), actual, wanted)


def dtypes_of(state):
    return jax.tree.map(lambda x: (x.shape, x.dtype, x.weak_type), state)


@every_optimizer
@pytest.mark.parametrize("target", [parabola, rosenbrock])
def test_the_minimum_is_reached(name, target):
    assert_reaches_the_minimum(name, *target())


@one_of_a_kind
@pytest.mark.parametrize("target", [matrix_parabola, mixed_tree])
def test_the_minimum_is_reached_over_other_shapes(name, target):
    assert_reaches_the_minimum(name, *target())


def assert_reaches_the_minimum(name, start, goal, loss):
    opt = build(name)
    steps = 15_000

    def step(carry, _):
        params, state = carry
        updates, state = opt.update(jax.grad(loss)(params), state, params, value_fn=loss)
        return (optax.apply_updates(params, updates), state), None

    (params, state), _ = jax.jit(lambda carry: jax.lax.scan(step, carry, length=steps))((start, opt.init(start)))
    assert_same(params, goal, rtol=1e-2, atol=1e-2)
    assert int(state.count) == steps
    assert int(state.refreshes) == steps / SMALL["refresh_every"]
    assert bool(state.accepted.all())


@every_optimizer
def test_before_the_first_estimate_every_step_is_the_bases(name):
    params, curvature = tree()
    opt, base = build(name, 0.01, quadratic, warmup=5), BASES[name](0.01)
    state, base_state, base_params = opt.init(params), base.init(params), params
    update, base_update = jax.jit(opt.update), jax.jit(base.update)
    for _ in range(5):
        updates, state = update(jax.grad(quadratic)(params, curvature), state, params, batch=curvature)
        wanted, base_state = base_update(jax.grad(quadratic)(base_params, curvature), base_state, base_params)
        assert_same(updates, wanted, rtol=1e-6, atol=1e-9)
        params, base_params = optax.apply_updates(params, updates), optax.apply_updates(base_params, wanted)
    assert int(state.refreshes) == 0
    updates, state = update(jax.grad(quadratic)(params, curvature), state, params, batch=curvature)
    assert int(state.refreshes) == 1
    wanted, _ = base_update(jax.grad(quadratic)(base_params, curvature), base_state, base_params)
    assert abs(float(updates["a"][1] - wanted["a"][1])) > 1e-3


@every_optimizer
def test_unknown_arguments_are_accepted_and_nothing_is_compiled_twice(name, caplog):
    start, _, loss = rosenbrock()
    opt = build(name)

    @jax.jit
    def step(params, state):
        value, grads = jax.value_and_grad(loss)(params)
        updates, state = opt.update(grads, state, params, value_fn=loss, value=value, nobody_expects_this=1)
        return optax.apply_updates(params, updates), state

    params, state = step(start, opt.init(start))
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        caplog.clear()
        params, state = step(params, state)
        params, state = step(params, state)
        assert [r.getMessage() for r in caplog.records if "compil" in r.getMessage()] == []
        jax.jit(lambda x: x * 2.5)(start)  # the log does see compilations
        assert any("compil" in r.getMessage() for r in caplog.records)


def test_the_base_is_handed_every_argument_but_ours():
    seen = []

    def update(updates, state, params=None, **extra_args):
        seen.append(set(extra_args))
        return updates, state

    base = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
    params, curvature = tree()
    opt = fj.fosi(base, quadratic, momentum=None, **SMALL)
    seen.clear()  # building may have tried the base
    opt.update(params, opt.init(params), params, batch=curvature, value_fn=None, value=1.0, step_size=2)
    assert seen == [{"value", "step_size"}]


def test_a_base_without_extra_arguments_is_handed_none():
    def update(updates, state, params=None):
        return updates, state

    base = optax.GradientTransformation(lambda params: optax.EmptyState(), update)
    params, curvature = tree()
    opt = fj.fosi(base, quadratic, momentum=None, **SMALL)
    opt.update(params, opt.init(params), params, batch=curvature, value=1.0)


@every_optimizer
@pytest.mark.parametrize("layout", ["flat", "leaves"])
def test_map_params_reaches_what_is_shaped_like_the_parameters_and_nothing_else(name, layout):
    params, _ = tree()
    opt = build(name, layout=layout)
    state = opt.init(params)
    assert_same(optax.tree.map_params(opt, lambda x: x, state), state)

    mapped = optax.tree.map_params(opt, lambda x: x + 1, state, transform_non_params=lambda x: x)
    assert_same(mapped._replace(base=None), state._replace(base=None))
    assert jax.tree.structure(mapped) == jax.tree.structure(state)
    changed = sum(
        bool(jnp.all(m == s + 1)) for m, s in zip(*map(jax.tree.leaves, (mapped.base, state.base)), strict=True)
    )
    assert changed == COPIES[name] * len(jax.tree.leaves(params))


def size_of(*trees):
    return sum(x.size for x in jax.tree.leaves(trees))


@pytest.mark.parametrize("name", ["gd", "heavy-ball", "nesterov"])
@pytest.mark.parametrize("layout", ["flat", "leaves"])
@pytest.mark.parametrize("mask", [None, {"a": False, "b": True}], ids=["all", "masked"])
def test_sgds_momentum_is_kept_once(name, layout, mask):
    params, _ = tree()
    opt = build(name, ell=1, layout=layout, mask=mask, refresh="external")
    state, inside = opt.init(params), 8 if mask is None else 5
    for kept in (state, opt.update(params, state, params)[1]):
        assert size_of(kept.momentum) == (0 if name == "gd" else inside)
        assert size_of(kept.momentum, kept.base) == (0 if name == "gd" else 8)
        # Besides: count, refreshes, seed and factor; two eigenvalues, residuals and verdicts.
        assert size_of(kept) == size_of(kept.momentum, kept.base) + 2 * inside + 4 + 3 * 2


def stable_step(opt, curvature):
    """A step or none; the branches of a cond must agree in structure, shape and dtype, weak types too."""

    def step(params, state, take):
        grads = jax.grad(quadratic)(params, curvature)
        return jax.lax.cond(
            take,
            lambda: opt.update(grads, state, params, batch=curvature),
            lambda: (jax.tree.map(jnp.zeros_like, grads), state),
        )

    return step


@every_optimizer
@pytest.mark.parametrize("dtype", DTYPES)
def test_updates_have_the_gradients_dtype_and_the_state_never_changes_its_own(name, dtype):
    with jax.enable_x64(dtype == "float64"):
        params, curvature = tree(dtype)
        opt = build(name, loss_fn=quadratic, ell=1)
        state = opt.init(params)
        updates, after = jax.eval_shape(stable_step(opt, curvature), params, state, True)
        assert {u.dtype.name for u in jax.tree.leaves(updates)} == {dtype}
        assert dtypes_of(after) == dtypes_of(state)
        wide = "float64" if dtype == "float64" else "float32"
        assert state.basis.dtype == state.eigenvalues.dtype == state.lr_scale.dtype == wide


@pytest.mark.parametrize("name", ["heavy-ball", "adam"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_it_runs_in_every_dtype(name, dtype):
    with jax.enable_x64(dtype == "float64"):
        params, curvature = tree(dtype)
        opt = build(name, loss_fn=quadratic, ell=1)
        state, step = opt.init(params), jax.jit(stable_step(opt, curvature))
        before, first = dtypes_of(state), quadratic(params, curvature)
        for take in (True, False, True):
            updates, state = step(params, state, take)
            assert dtypes_of(state) == before
            params = optax.apply_updates(params, updates)
            assert {p.dtype.name for p in jax.tree.leaves(params)} == {dtype}
        assert int(state.refreshes) == 1 and int(state.count) == 2
        if (name, dtype) != (
            "adam",
            "float16",
        ):  # there Adam's own ε is 0: optax.adam makes a NaN of a zero gradient
            assert quadratic(params, curvature) < first


def test_mixed_dtypes_stay_mixed():
    params = {
        "wide": jnp.ones(3),
        "narrow": jnp.ones((2, 2), jnp.bfloat16),
        "index": jnp.arange(4),
    }  # no float: left out
    curvature = {"wide": jnp.array([5.0, 1.0, 1.0]), "narrow": jnp.ones((2, 2))}

    def loss(params, curvature):
        return quadratic({key: params[key] for key in curvature}, curvature)

    opt = build("adam", loss_fn=loss)
    grads = jax.grad(loss, allow_int=True)(params, curvature)
    grads["index"] = jnp.zeros_like(params["index"])
    updates, state = opt.update(grads, opt.init(params), params, batch=curvature)
    assert (updates["wide"].dtype, updates["narrow"].dtype) == (jnp.float32, jnp.bfloat16)
    assert state.basis.shape == (1, 7)


def test_leaves_may_be_numbers_or_numpy_arrays():
    params, curvature = {"number": 2.0, "array": np.array([1.0, 3.0], np.float32)}, {"number": 9.0, "array": np.ones(2)}
    opt = build("gd", 0.1, lambda p, c: 0.5 * (c["number"] * p["number"] ** 2 + jnp.sum(c["array"] * p["array"] ** 2)))
    grads = {"number": jnp.asarray(18.0), "array": jnp.array([1.0, 3.0])}
    updates, _ = opt.update(grads, opt.init(params), params, batch=jax.tree.map(np.float32, curvature))
    np.testing.assert_allclose(updates["number"], -SMALL["alpha"] * 18 / 9, rtol=1e-5)


def injected(name, rate=None, **options):
    usual, factory, arguments = TABLE[name]
    factory = optax.inject_hyperparams(factory, static_args=fj.STATIC_ARGS)
    return factory(loss_fn=quadratic, **arguments(usual if rate is None else rate), **{**SMALL, **options})


@pytest.mark.parametrize("name", ["gd", "heavy-ball", "adamw", "rmsprop"])
def test_inject_hyperparams_gives_the_same_updates_and_states(name):
    params, curvature = tree()
    opt, other = build(name, loss_fn=quadratic, k=2), injected(name, k=2)
    grads = jax.grad(quadratic)(params, curvature)
    updates, state = jax.jit(opt.update)(grads, jax.jit(opt.init)(params), params, batch=curvature)
    got, got_state = jax.jit(other.update)(grads, jax.jit(other.init)(params), params, batch=curvature)
    assert int(state.refreshes) == 1
    assert_same(got, updates, rtol=1e-5, atol=1e-7)
    assert_same(got_state.inner_state, state, rtol=1e-5, atol=1e-7)


@every_optimizer
def test_inject_hyperparams_works_in_half_precision(name):
    # There the injected eps is 0, and so is Adam's: no gradient here is zero, and no estimate is made yet.
    params, curvature = tree("float16")
    opt = injected(name, 0.125, refresh="external")
    state = opt.init(params)
    grads = jax.grad(quadratic)(params, curvature)
    updates, state = jax.jit(opt.update)(grads, state, params)
    for u, g in zip(jax.tree.leaves(updates), jax.tree.leaves(grads), strict=True):
        assert u.dtype == jnp.float16
        assert bool(jnp.all(jnp.sign(u) == -jnp.sign(g)))


def test_sgds_momentum_can_be_injected():
    params, curvature = tree()
    static = {*fj.STATIC_ARGS, "nesterov"} - {"momentum"}
    factory = optax.inject_hyperparams(fj.fosi_sgd, static_args=static)
    opt = factory(0.01, quadratic, momentum=0.5, nesterov=True, **SMALL)
    fixed = fj.fosi_sgd(0.01, quadratic, momentum=0.9, nesterov=True, **SMALL)
    state, fixed_state = opt.init(params), fixed.init(params)
    state.hyperparams["momentum"] = jnp.asarray(0.9)
    update, fixed_update = jax.jit(opt.update), jax.jit(fixed.update)
    grads = jax.grad(quadratic)(params, curvature)
    for _ in range(3):
        updates, state = update(grads, state, params, batch=curvature)
        wanted, fixed_state = fixed_update(grads, fixed_state, params, batch=curvature)
        assert_same(updates, wanted, rtol=1e-5, atol=1e-7)
    assert int(fixed_state.refreshes) == 1


def test_rates_can_be_changed_through_inject_hyperparams():
    params, curvature = tree()
    opt = injected("gd", 0.1, max_lr_scale=1.0)
    grads = jax.grad(quadratic)(params, curvature)
    state = opt.init(params)
    state.hyperparams["learning_rate"] = jnp.asarray(0.25)
    state.hyperparams["alpha"] = jnp.asarray(0.5)
    updates, state = jax.jit(opt.update)(grads, state, params, batch=curvature)
    # Newton's share is a[1], with the curvature 9; all else moves by the rate.
    wanted = jax.tree.map(lambda g: -0.25 * g, grads)
    wanted["a"] = wanted["a"].at[1].set(-0.5 * grads["a"][1] / 9)
    assert_same(updates, wanted, rtol=1e-4, atol=1e-4)


@every_optimizer
def test_a_learning_rate_may_be_a_schedule(name):
    params, curvature = tree()
    schedule = optax.piecewise_constant_schedule(0.02, {2: 0.5})
    opt, base = build(name, schedule, quadratic, refresh="external"), BASES[name](schedule)
    state, base_state = opt.init(params), base.init(params)
    grads = jax.grad(quadratic)(params, curvature)
    update = jax.jit(opt.update)
    for _ in range(4):  # before the first estimate: the base's step, at the base's rate
        updates, state = update(grads, state, params)
        wanted, base_state = base.update(grads, base_state, params)
        assert_same(updates, wanted, rtol=1e-6, atol=1e-9)


def test_alpha_may_be_a_schedule():
    params, curvature = tree()
    schedule = optax.linear_schedule(1.0, 0.0, 4)
    opt = build("gd", 0.1, quadratic, alpha=schedule)
    grads, state = jax.grad(quadratic)(params, curvature), opt.init(params)
    update = jax.jit(opt.update)
    for step in range(5):
        updates, state = update(grads, state, params, batch=curvature)
        np.testing.assert_allclose(updates["a"][1], -(1 - step / 4) * grads["a"][1] / 9, rtol=1e-4, atol=1e-4)


def test_multi_steps_with_the_external_refresh():
    params, curvature = tree()
    opt = build("heavy-ball", 0.01, quadratic, refresh="external", warmup=1, refresh_every=2)
    multi = optax.MultiSteps(opt, every_k_schedule=4)
    schedule = opt.schedule(params)
    state, update = multi.init(params), jax.jit(multi.update)
    refresh = jax.jit(opt.refresh)

    plain, plain_state, moved = params, opt.init(params), []
    for mini in range(12):
        if int(state.mini_step) == 0 and schedule.due(int(state.gradient_step)):
            state = refresh(state, params, batch=curvature)
        # The mean of these four gradients is the gradient.
        factor = (0.4, 1.6, 0.8, 1.2)[mini % 4]
        grads = jax.tree.map(lambda g, f=factor: f * g, jax.grad(quadratic)(params, curvature))
        updates, state = update(grads, state, params)
        moved.append(any(bool(jnp.any(u != 0)) for u in jax.tree.leaves(updates)))
        params = optax.apply_updates(params, updates)
    assert moved == [False, False, False, True] * 3

    for step in range(3):
        if schedule.due(step):
            plain_state = refresh(plain_state, plain, batch=curvature)
        updates, plain_state = opt.update(jax.grad(quadratic)(plain, curvature), plain_state, plain)
        plain = optax.apply_updates(plain, updates)
    inner = state.inner_opt_state
    assert isinstance(inner, fj.FosiState)
    assert int(inner.refreshes) == 1 and int(inner.count) == 3 and bool(inner.accepted.all())
    assert_same(params, plain, rtol=1e-5, atol=1e-6)


def test_refresh_finds_the_state_inside_a_chain():
    params, curvature = tree()
    inner = build("gd", 0.1, quadratic, refresh="external", alpha=1.0, max_lr_scale=1.0)
    opt = optax.chain(optax.clip_by_global_norm(1.0), inner, optax.add_decayed_weights(-0.01))
    state = opt.init(params)
    refreshed = inner.refresh(state, params, batch=curvature)
    assert jax.tree.structure(refreshed) == jax.tree.structure(state)
    assert int(refreshed[1].refreshes) == 1 and int(state[1].refreshes) == 0
    np.testing.assert_allclose(refreshed[1].eigenvalues, [9.0], rtol=1e-5)

    grads = jax.grad(quadratic)(params, curvature)
    updates, _ = jax.jit(opt.update)(grads, refreshed, params)
    norm = np.sqrt(sum(float(jnp.sum(g**2)) for g in jax.tree.leaves(grads)))
    wanted = jax.tree.map(lambda g: -0.1 * g / norm, grads)
    wanted["a"] = wanted["a"].at[1].set(-grads["a"][1] / norm / 9)
    wanted = jax.tree.map(lambda u, p: u - 0.01 * p, wanted, params)
    assert_same(updates, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "wrap", [lambda o: o, optax.chain, lambda o: optax.apply_if_finite(o, 3), optax.with_extra_args_support]
)
def test_parameters_may_come_by_keyword(wrap):
    params, curvature = tree()
    opt = wrap(build("adam", 0.1, refresh="external"))
    grads, state = jax.grad(quadratic)(params, curvature), opt.init(params)
    by_keyword, _ = jax.jit(opt.update)(updates=grads, state=state, params=params)
    by_position, _ = jax.jit(opt.update)(grads, state, params)
    assert_same(by_keyword, by_position)


@every_optimizer
def test_init_takes_shapes_in_the_place_of_arrays(name):
    params, _ = tree("bfloat16")
    shapes = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype), params)
    opt = build(name, ell=1)
    state = opt.init(params)
    assert dtypes_of(opt.init(shapes)) == dtypes_of(state)
    abstract = jax.eval_shape(opt.init, params)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), abstract) == jax.tree.map(lambda x: (x.shape, x.dtype), state)


@one_of_a_kind
def test_the_state_can_be_donated(name):
    params, curvature = tree()
    layout = "leaves" if name == "adamw" else "flat"
    opt = build(name, loss_fn=quadratic, ell=1, layout=layout, refresh_every=2)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state):
        updates, state = opt.update(jax.grad(quadratic)(params, curvature), state, params, batch=curvature)
        return optax.apply_updates(params, updates), state

    state = opt.init(params)
    for _ in range(3):
        before = params, state
        params, state = step(params, state)  # a buffer that cannot be reused, or is there twice, fails here
        assert all(x.is_deleted() for x in jax.tree.leaves(before))
    assert int(state.refreshes) == 2

    external = build(name, loss_fn=quadratic, ell=1, layout=layout, refresh="external")
    before, state = state, jax.jit(external.refresh, donate_argnums=0)(state, params, batch=curvature)
    assert all(x.is_deleted() for x in jax.tree.leaves(before.basis))
    assert int(state.refreshes) == 3


def _through_pickle(state, _):
    return pickle.loads(pickle.dumps(jax.device_get(state)))


def _through_flax(state, fresh):
    return flax.serialization.from_bytes(fresh, flax.serialization.to_bytes(state))


def _through_numpy(state, fresh):
    leaves = [np.array(x) for x in jax.tree.leaves(state)]
    return jax.tree.unflatten(jax.tree.structure(fresh), leaves)


@pytest.mark.parametrize(("name", "layout"), [("heavy-ball", "flat"), ("adamw", "leaves")])
def test_a_run_goes_on_bit_for_bit_from_a_saved_state(name, layout):
    params, curvature = tree()
    opt = build(name, loss_fn=quadratic, refresh_every=2, layout=layout)
    update = jax.jit(opt.update)

    def run(params, state, steps):
        for _ in range(steps):
            updates, state = update(jax.grad(quadratic)(params, curvature), state, params, batch=curvature)
            params = optax.apply_updates(params, updates)
        return params, state

    params, state = run(params, opt.init(params), 3)
    assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(state))
    wanted, wanted_state = run(params, state, 3)
    assert int(wanted_state.refreshes) == 3
    for save_and_load in (_through_pickle, _through_flax, _through_numpy):
        restored = save_and_load(state, opt.init(params))
        assert jax.tree.structure(restored) == jax.tree.structure(state)
        got, got_state = run(params, restored, 3)
        assert_same(got, wanted)
        assert_same(got_state, wanted_state)


@pytest.mark.parametrize("precision", ["float32", "float64"])
@pytest.mark.parametrize("x64", [False, True])
def test_training_changes_neither_the_x64_flag_nor_a_dtype(precision, x64):
    with jax.enable_x64(x64):
        params, curvature = tree("float32")
        params["b"] = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params["b"])
        opt = build("adamw", loss_fn=quadratic, precision=precision, refresh_every=2)
        state = opt.init(params)
        before = dtypes_of((params, state))
        update = jax.jit(opt.update)
        for _ in range(3):
            updates, state = update(jax.grad(quadratic)(params, curvature), state, params, batch=curvature)
            params = optax.apply_updates(params, updates)
        assert dtypes_of((params, state)) == before
        assert jax.config.jax_enable_x64 == x64
        assert int(state.refreshes) == 2 and bool(state.accepted.all())
        np.testing.assert_allclose(state.eigenvalues, [9.0], rtol=1e-2)


@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_the_lanczos_basis_has_the_dtype_asked_for(precision):
    params, curvature = tree()
    opt = build("gd", loss_fn=quadratic, precision=precision, refresh="external")
    # max(4 k, ⌈2 ln 8⌉) = 5 vectors of 8 numbers
    program = str(jax.make_jaxpr(lambda s, p: opt.refresh(s, p, batch=curvature))(opt.init(params), params))
    assert ("f64[5,8]" in program) == (precision == "float64")
    assert ("f32[5,8]" in program) == (precision == "float32")
