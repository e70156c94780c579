"""FOSI around L-BFGS against BFGS's textbook recursion from FOSI's metric, dense; and against optax's own L-BFGS."""

import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fosi
from fosi.jax import Fosi, ModelLoss, fosi_lbfgs, space
from fosi.jax.pairs import Pairs
from fosi.jax.steps import Subspace
from fosi.jax.transform import own_state
from tests.cases import SIZES, assert_same_path, expected_lbfgs_path, problem_named
from tests.jax.running import as_arrays, as_tree, flat, loss_fn, x64

EXACT = {"k": 2, "ell": 1, "accept": "all", "precision": "float64"}


def path(opt, problem, steps, dtype=np.float64):
    """θ₀ … θ_steps as rows, and the last state, in one compiled scan, with the loss as users of optax.lbfgs give it."""
    with x64(dtype):
        batch, loss = as_arrays(problem.batch, dtype), loss_fn(problem)

        def value_fn(params):
            return loss(params, batch)

        def step(carry, _):
            params, state = carry
            value, grad = jax.value_and_grad(value_fn)(params)
            updates, state = opt.update(grad, state, params, value=value, grad=grad, value_fn=value_fn)
            params = optax.apply_updates(params, updates)
            return (params, state), flat(params)

        params = as_tree(problem, problem.start, dtype)
        (_, state), points = jax.jit(lambda p: jax.lax.scan(step, (p, opt.init(p)), None, steps))(params)
        return np.concatenate([flat(params)[None], points]), jax.device_get(state)


@pytest.mark.parametrize(("layout", "scaling"), [("flat", "geometric"), ("leaves", "geometric"), ("flat", "usual")])
@pytest.mark.parametrize("name", ["quadratic", "rotating", "network"])
def test_steps_are_bfgs_from_fosis_metric(name, layout, scaling):
    problem = problem_named(name)
    schedule = {"warmup": 3, "refresh_every": 5, "num_matvecs": len(problem.start), "scaling": scaling}
    opt = fosi_lbfgs(memory_size=3, linesearch=optax.scale(0.1), layout=layout, **schedule, **EXACT)
    found, state = path(opt, problem, 14)
    expected, kept = expected_lbfgs_path(problem, 14, 3, 0.1, 3, 5, scaling)
    assert kept == 3 and state.base.pairs.used.all() and state.refreshes == 3
    assert_same_path(found, expected, 1e-8)


class Ended(NamedTuple):
    """What a search says of itself."""

    learning_rate: jax.Array
    count: jax.Array


def ends_at(sizes):
    """A search that ends where it is told."""

    def update(updates, state, params=None, **_):
        size = jnp.asarray(sizes)[state.count]
        return jax.tree.map(lambda u: size * u, updates), Ended(size, state.count + 1)

    return optax.GradientTransformationExtraArgs(lambda _: Ended(jnp.asarray(1.0), jnp.zeros((), jnp.int32)), update)


@pytest.mark.parametrize("scaling", ["geometric", "usual"])
@pytest.mark.parametrize("name", ["quadratic", "network"])
def test_scale_is_cut_after_a_search_that_ended_far_below_1_and_grows_back(name, scaling):
    problem = problem_named(name)
    schedule = {"warmup": 3, "refresh_every": 5, "num_matvecs": len(problem.start), "scaling": scaling}
    with x64(np.float64):
        opt = fosi_lbfgs(memory_size=20, linesearch=ends_at(SIZES), **schedule, **EXACT)
        found, state = path(opt, problem, len(SIZES))
    expected, _ = expected_lbfgs_path(problem, len(SIZES), 20, None, 3, 5, scaling, SIZES)
    assert_same_path(found, expected, 1e-8)
    assert state.base.pairs.trust == pytest.approx(1 if scaling == "usual" else 1e-3 * 1.1**6)


def test_scale_is_not_lost_where_noise_ends_every_search():
    _, state = path(fosi_lbfgs(linesearch=ends_at([0.001] * 50), warmup=100, **EXACT), problem_named("quadratic"), 50)
    assert state.base.pairs.trust == pytest.approx(1e-6)


@pytest.mark.parametrize(("scaling", "wanted"), [("geometric", 0.1), ("usual", 1)])
def test_scale_is_cut_after_a_search_that_found_nothing_lower(scaling, wanted):
    opt, w = fosi_lbfgs(k=1, scaling=scaling, warmup=100, num_matvecs=3), jnp.array([1.0, 2.0, 3.0])

    def uphill(other):
        return jnp.sum(w**2) + jnp.any(other != w) + jnp.sum(other - jax.lax.stop_gradient(other))

    updates, state = opt.update(2 * w, opt.init(w), w, value=jnp.sum(w**2), grad=2 * w, value_fn=uphill)
    assert not updates.any() and state.base.search.learning_rate == 1
    assert state.base.pairs.trust == pytest.approx(wanted)


def test_before_the_first_estimate_it_is_optaxs_lbfgs():
    problem = problem_named("network")
    ours, _ = path(fosi_lbfgs(memory_size=4, warmup=100, scaling="usual", **EXACT), problem, 12)
    theirs, _ = path(optax.lbfgs(memory_size=4), problem, 12)
    assert np.linalg.norm(theirs[-1] - theirs[0]) > 0.1
    assert_same_path(ours, theirs, 1e-7)


def test_what_is_left_out_is_not_taken_for_much_steeper_than_the_largest_that_are_in():
    curvature = jnp.array([4.0, 2.0, 1e4, 1e-6])  # since the estimate something steep has come up outside
    subspace = Subspace(jnp.eye(4)[jnp.array([0, 1, 3])], 1 / curvature[jnp.array([0, 1, 3])], jnp.ones(()))
    like = Pairs.none(space.span(jnp.zeros(4), layout="flat"), 3)

    def scale(step, largest):
        return like.seen(subspace, largest, "geometric", step, curvature * step, jnp.zeros((), bool)).scale

    assert scale(jnp.ones(4), 2) == pytest.approx(0.1 / 2)
    assert scale(jnp.ones(4), 1) == pytest.approx(0.1 / 4)
    assert scale(jnp.ones(4), 0) == pytest.approx(1e-4)
    # What is so small that it is rounding's, as where k is more than the rank and every pair is accepted, is no length.
    subspace = subspace._replace(newton=jnp.array([1 / 4, 1e8, 1e6]))
    assert scale(jnp.ones(4), 2) == pytest.approx(0.1 / 4)
    subspace = subspace._replace(newton=jnp.array([1 / 4, 1 / 2, 1e6]))
    # A step within says nothing of the rest: it is taken for as flat as the flattest of the largest, or as it was.
    assert scale(jnp.array([1.0, 1.0, 0.0, 1.0]), 2) == 1
    like = like._replace(scale=jnp.asarray(0.1))
    assert scale(jnp.array([1.0, 1.0, 0.0, 1.0]), 2) == pytest.approx(1 / 2)


def test_scale_is_between_the_steepest_and_the_flattest_that_a_step_met():
    curvature = jnp.array([100.0, 4.0, 1.0])
    inside = Subspace(jnp.eye(3)[:1], jnp.array([1e-2]), jnp.ones(()))
    like = Pairs.none(space.span(jnp.zeros(3), layout="flat"), 3)
    step = jnp.ones(3)
    for scaling, wanted in (("usual", 5 / 17), ("geometric", (2 / 17) ** 0.5)):
        found = like.seen(inside, 1, scaling, step, curvature * step, jnp.zeros((), bool))
        assert found.scale == pytest.approx(wanted, rel=1e-5)


def test_steps_become_newtons_near_a_minimum():
    """One that is ten times too short satisfies a search too: it must find its way back to 1."""

    def rosenbrock(w):
        return jnp.sum(100 * (w[1:] - w[:-1] ** 2) ** 2 + (1 - w[:-1]) ** 2)

    with x64(np.float64):
        opt = fosi_lbfgs(k=5, memory_size=20, warmup=1, refresh_every=20, num_matvecs=10)
        losses, sizes = descent(opt, rosenbrock, jnp.zeros(10), 120)
    assert losses[-1] < 1e-20 and sizes[-1] == 1


def descent(opt, loss, w, steps):
    """The loss before each step, and where its search ended."""
    value_and_grad = optax.value_and_grad_from_state(loss)

    def step(carry, _):
        w, state = carry
        value, grad = value_and_grad(w, state=state)
        updates, state = opt.update(grad, state, w, value=value, grad=grad, value_fn=loss)
        size = getattr(own_state(state).base.search, "learning_rate", 1.0) if isinstance(opt, Fosi) else 1.0
        return (optax.apply_updates(w, updates), state), (value, size)

    return jax.device_get(jax.jit(lambda: jax.lax.scan(step, (w, opt.init(w)), None, steps)[1])())


def test_a_search_begins_near_where_the_last_one_ended_and_at_one_after_a_failure():
    opt = fosi_lbfgs(k=1, memory_size=2, warmup=100, num_matvecs=2)

    def value_fn(w):
        return jnp.sum(jnp.array([1e3, 1.0]) * w**2)

    def rates(opt, steps=6):
        w, found = jnp.ones(2), []
        state = opt.init(w)
        for _ in range(steps):
            value, grad = jax.value_and_grad(value_fn)(w)
            updates, state = opt.update(grad, state, w, value=value, grad=grad, value_fn=value_fn)
            w = optax.apply_updates(w, updates)
            found.append((float(state.base.search.learning_rate), int(state.base.search.info.num_linesearch_steps)))
        return found, state, w

    found, state, w = rates(opt)
    # A search that its first trial satisfies ends where it began: a tenth above where the last one ended.
    ends = [(before[0], after[0]) for before, after in itertools.pairwise(found) if after[1] == 1]
    assert ends and any(end != 1 for _, end in ends)
    np.testing.assert_allclose([end for _, end in ends], [min(1, 1.1 * last) for last, _ in ends], rtol=1e-6)
    usual = rates(fosi_lbfgs(k=1, memory_size=2, warmup=100, num_matvecs=2, scaling="usual"))[0]
    assert all(rate == 1 for rate, tries in usual if tries == 1)
    # Uphill whatever the size: nothing is taken, and the next search begins at 1 again.
    given = {"value": jnp.zeros(()), "grad": 2 * w, "value_fn": lambda w: 1 + 0 * jnp.sum(w)}
    updates, state = opt.update(2 * w, state, w, **given)
    assert not updates.any() and state.base.search.learning_rate == 1


def stiff(w):
    """A bent valley: thirty directions over six orders of magnitude, none of which is an axis for long."""
    scales = jnp.logspace(0, 6, 30)
    bent = w + 0.3 * jnp.sin(jnp.roll(w, 1))
    return jnp.sum(scales * bent**2)


def test_it_is_far_below_lbfgs_on_a_stiff_problem():
    with x64(np.float64):
        opt = fosi_lbfgs(k=10, memory_size=10, warmup=0, refresh_every=20, num_matvecs=30)
        ours, theirs = (descent(made, stiff, jnp.ones(30), 60)[0][-1] for made in (opt, optax.lbfgs(memory_size=10)))
    assert ours < 1e-2 * theirs


def test_a_pair_without_curvature_changes_nothing_and_a_step_that_fails_forgets_all():
    opt = fosi_lbfgs(k=1, memory_size=2, linesearch=optax.scale(1.0), warmup=100, num_matvecs=3)
    state = opt.init(jnp.zeros(3))

    def update(state, place, gradient):
        given = {"value": jnp.zeros(()), "value_fn": jnp.sum}
        return opt.update(jnp.asarray(gradient), state, jnp.asarray(place), **given)[1]

    def pairs(state):
        return jax.device_get(own_state(state).base.pairs)

    state = update(state, [0.0, 0.0, 0.0], [1.0, 1.0, 1.0])
    assert not pairs(state).used.any()
    state = update(state, [1.0, 0.0, 0.0], [3.0, 1.0, 1.0])
    before = pairs(state)
    assert before.used.tolist() == [True, False] and before.next == 1
    # s · y = 2 becomes 1.
    np.testing.assert_allclose(before.steps[0], [2**-0.5, 0, 0], rtol=1e-6)
    np.testing.assert_allclose(before.changes[0], [2**0.5, 0, 0], rtol=1e-6)
    assert before.scale == pytest.approx(0.5)  # of one direction all means are the same
    state = update(state, [1.0, 1.0, 0.0], [3.0, 0.0, 1.0])  # the gradient falls along the step
    after = pairs(state)
    for name in ("steps", "changes", "inverse", "next", "scale"):
        np.testing.assert_array_equal(getattr(after, name), getattr(before, name), err_msg=name)
    state = update(state, [1.0, 1.0, 0.0], [3.0, 0.0, 1.0])
    assert not pairs(state).used.any()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("n", "large", "k"), [(3, 2, 2), (3, 2, 3), (50, 5, 5)])
def test_steps_inside_the_subspace_say_nothing_of_the_rest(n, large, k, dtype):
    """All of the first change of the gradient is inside V: γ, read off the rest of it, was 1e7 and the loss rose."""
    with x64(dtype):
        scales = jnp.concatenate([jnp.logspace(4, 2, large, dtype=dtype), jnp.ones(n - large, dtype)])

        def loss(w):
            return jnp.sum(scales * (w - 1) ** 2)

        opt = fosi_lbfgs(k=k, warmup=1, refresh_every=3, memory_size=10, num_matvecs=min(n, 30))
        w = jnp.zeros(n, dtype)
        state, losses = opt.init(w), [loss(w)]
        step = jax.jit(lambda g, s, w, v: opt.update(g, s, w, value=v, grad=g, value_fn=loss))
        for _ in range(12):
            value, grad = jax.value_and_grad(loss)(w)
            updates, state = step(grad, state, w, value)
            w = optax.apply_updates(w, updates)
            losses.append(loss(w))
        losses = np.asarray(losses, np.float64)
    assert np.all(losses[1:] <= losses[:-1] * (1 + 1e-3) + 1e-12) and losses[-1] < 1e-6 * losses[0]


class Found(NamedTuple):
    value: jax.Array
    grad: jax.Array


def test_a_search_that_finds_no_lower_loss_takes_no_step():
    """As optax's, whose last trial is taken, whatever the loss is there."""
    ends = optax.GradientTransformationExtraArgs(
        lambda params: Found(jnp.asarray(jnp.inf), jnp.zeros_like(params)),
        lambda updates, state, params=None, *, value_fn, **_: (updates, Found(value_fn(params), 7 * updates)),
    )
    opt = fosi_lbfgs(k=1, memory_size=2, linesearch=ends, warmup=100, num_matvecs=3)
    w, g = jnp.array([1.0, 2.0, 3.0]), jnp.array([0.1, 0.2, 0.2])
    # A search that keeps neither is taken at its word.
    backtracking = fosi_lbfgs(k=1, linesearch=optax.scale_by_backtracking_linesearch(20), warmup=100, num_matvecs=3)
    given = {"value": jnp.sum(w**2), "grad": 2 * w, "value_fn": lambda w: jnp.sum(w**2)}
    assert backtracking.update(2 * w, backtracking.init(w), w, **given)[0].any()
    for end, taken in ((1.0, True), (1.0005, True), (1.01, False), (jnp.nan, False)):
        given = {"value": jnp.ones(()), "value_fn": lambda w, end=end: jnp.asarray(end)}
        updates, state = opt.update(g, opt.init(w), w, **given)  # without grad, which is then the updates
        np.testing.assert_allclose(updates, -g if taken else 0 * g)
        assert state.base.search.value == (jnp.float32(end) if taken else 1)
        np.testing.assert_allclose(state.base.search.grad, -7 * g if taken else g)


def test_steps_lead_down_whatever_rounding_makes_of_the_inverse():
    rng = np.random.default_rng(0)
    pairs = fosi_lbfgs(k=1, memory_size=2, num_matvecs=3).init(jnp.zeros(3)).base.pairs
    none = Subspace(jnp.zeros((1, 3)), jnp.zeros(1), jnp.ones(()))
    for wrong in (-40.0, 1.0, 40.0):
        vectors = jnp.asarray(rng.normal(size=(5, 3)), jnp.float32)
        inverse = jnp.array([[1.0, wrong], [0.0, 1.0]])
        given = pairs._replace(steps=vectors[:2], changes=vectors[2:4], inverse=inverse)
        assert float(jnp.vdot(given.times(none, vectors[4]), vectors[4])) > 0


def test_estimates_are_of_the_batch_where_one_comes():
    model = ModelLoss(lambda w, x: x @ w, lambda out, x: jnp.mean((out - 1) ** 2))
    opt = fosi_lbfgs(model, k=2, warmup=0, num_matvecs=3, curvature="gauss_newton")
    x, w = jnp.diag(jnp.array([3.0, 2.0, 1.0])), jnp.zeros(3)
    value, grad = jax.value_and_grad(model)(w, x)
    given = {"value": value, "grad": grad, "value_fn": lambda w: model(w, x)}
    _, state = opt.update(grad, opt.init(w), w, batch=x, **given)
    np.testing.assert_allclose(state.eigenvalues, [6.0, 8 / 3], rtol=1e-5)


def test_what_it_cannot_do_is_named():
    with pytest.raises(ValueError, match="memory_size must be an integer ≥ 1, got 0"):
        fosi_lbfgs(memory_size=0)
    for name, value in {"mask": np.array([True, False]), "lr_rule": "gd", "momentum": fosi.Ema(0.9)}.items():
        with pytest.raises(ValueError, match=f"{name} has no meaning for FOSI around L-BFGS"):
            fosi_lbfgs(**{name: value})
    with pytest.raises(ValueError, match="scaling must be 'geometric' or 'usual', got 'mean'"):
        fosi_lbfgs(scaling="mean")
    opt = fosi_lbfgs(k=1, refresh="external", num_matvecs=2)
    w = jnp.ones(2)
    with pytest.raises(ValueError, match="value and value_fn must be passed to update"):
        opt.update(w, opt.init(w), w)
    with pytest.raises(ValueError, match="value_fn must be passed to update"):
        opt.update(w, opt.init(w), w, value=jnp.ones(()))
