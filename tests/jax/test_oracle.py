"""Trajectories against the paper's algorithms written literally (tests/oracle.py), on known Hessians."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import problems
from tests.cases import (
    BASES,
    LINEAR,
    ONE_SPECTRUM,
    REFRESHING,
    assert_same_path,
    expected_path,
    problem_named,
    theirs,
    turned,
)
from tests.jax.bases import ours
from tests.jax.running import External, as_arrays, as_tree, loss_fn, run_inline, x64

PROBLEMS = ["quadratic", "rotating", "network"]
# dtype of parameters, gradients and products; dtype of the Lanczos basis; relative tolerance of every point.
EXACT = (np.float64, "float64", 1e-9)
PRECISIONS = {"exact": EXACT, "single": (np.float32, "float32", 1e-4), "mixed": (np.float32, "float64", 1e-4)}


@pytest.mark.parametrize("name", PROBLEMS)
def test_problems_know_their_derivatives(name):
    problem = problem_named(name)
    theta, batch, n = problem.start, problem.batch, len(problem.start)
    with x64(np.float64):
        arrays = as_arrays(batch, np.float64)
        by_jax = jax.grad(problem.value)(jnp.asarray(theta), arrays, jnp)
        by_tree = loss_fn(problem)(as_tree(problem, theta, np.float64), arrays)
    np.testing.assert_allclose(problem.gradient(theta, batch), by_jax, atol=1e-12 * np.abs(by_jax).max())
    np.testing.assert_allclose(problem.value(theta, batch, np), by_tree, rtol=1e-12)
    hessian, h = problem.hessian(theta, batch), 1e-5
    forth = [problem.gradient(theta + e, batch) for e in h * np.eye(n)]
    back = [problem.gradient(theta - e, batch) for e in h * np.eye(n)]
    differences = (np.stack(forth) - np.stack(back)) / (2 * h)
    np.testing.assert_allclose(hessian, differences, atol=1e-6 * np.abs(hessian).max())


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("name", PROBLEMS)
def test_all_rules_for_momentum_agree_within_one_spectrum(name, base):
    problem = problem_named(name)
    literal = expected_path(theirs(base, problem, "literal", **ONE_SPECTRUM), problem, 30)
    by_our_rule = expected_path(theirs(base, problem, "ours", **ONE_SPECTRUM), problem, 30)
    assert_same_path(by_our_rule, literal, 1e-11)


@pytest.mark.parametrize("base", ["heavy-ball", "nesterov", "adam", "diagonal-trace"])
@pytest.mark.parametrize("name", ["rotating", "network"])
def test_the_rules_for_momentum_can_be_told_apart_across_refreshes(name, base):
    problem = problem_named(name)
    literal = expected_path(theirs(base, problem, "literal", **REFRESHING), problem, 24)
    by_our_rule = expected_path(theirs(base, problem, "ours", **REFRESHING), problem, 24)
    assert np.linalg.norm(by_our_rule[-1] - literal[-1]) > 1e4 * EXACT[2] * np.linalg.norm(literal[-1])


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize(
    ("precision", "name"),
    [
        *(("exact", name) for name in PROBLEMS),
        *(("single", name) for name in PROBLEMS),
        ("mixed", "rotating"),
    ],
)
def test_trajectories(precision, name, base):
    dtype, basis, rtol = PRECISIONS[precision]
    problem = problem_named(name)
    with x64(dtype):
        run = External(ours(base, problem, dtype, precision=basis, refresh="external"), problem, dtype)

    # Within one spectrum, the Hessian changing under it: the paper to the letter.
    expected = expected_path(theirs(base, problem, "literal", **ONE_SPECTRUM), problem, 30)
    path, state = run(30, **ONE_SPECTRUM)
    assert_same_path(path, expected, rtol)
    assert state.refreshes == 1 and state.count == 30

    # After a warm-up, over six refreshes of a subspace that turns: with our rule for momentum across them.
    paper = theirs(base, problem, "ours", **REFRESHING)
    expected = expected_path(paper, problem, 24)
    assert name == "quadratic" or turned(paper) > 0.1
    path, state = run(24, **REFRESHING)
    assert_same_path(path, expected, rtol)
    assert state.refreshes == len(paper.estimates) == 6 and state.count == 24


@pytest.mark.parametrize(
    ("precision", "base"),
    [
        *(("exact", base) for base in [*BASES, "diagonal-nesterov"]),
        ("single", "heavy-ball"),
        ("single", "adam"),
    ],
)
def test_refreshing_inside_the_update_is_the_same(precision, base):
    dtype, basis, rtol = PRECISIONS[precision]
    problem = problem_named("rotating")
    with x64(dtype):
        opt = ours(base, problem, dtype, precision=basis, **REFRESHING)
    path, state = run_inline(opt, problem, 24, dtype)
    assert_same_path(path, expected_path(theirs(base, problem, **REFRESHING), problem, 24), rtol)
    assert state.refreshes == 6 and state.count == 24
    if base in ("heavy-ball", "adam") and dtype == np.float64:
        external = ours(base, problem, dtype, precision=basis, refresh="external", **REFRESHING)
        assert_same_path(path, External(external, problem, dtype)(24, **REFRESHING)[0], 1e-12)


@pytest.mark.parametrize("base", ["gd", "heavy-ball", "adam", "diagonal-trace"])
def test_alpha_and_learning_rate_as_schedules(base):
    dtype, basis, rtol = EXACT
    problem = problem_named("rotating")
    options = {"rate": lambda t: 0.01 / (1 + 0.2 * t), "alpha": lambda t: 0.01 * (1 + 0.3 * t), **REFRESHING}
    with x64(dtype):
        opt = ours(base, problem, dtype, precision=basis, **options)
    path, _ = run_inline(opt, problem, 24, dtype)
    assert_same_path(path, expected_path(theirs(base, problem, **options), problem, 24), rtol)


@pytest.mark.parametrize(
    ("name", "base", "cap"),
    [
        *(("rotating", base, 3.0) for base in [*LINEAR, "adam"]),
        *(("quadratic", base, math.inf) for base in LINEAR),
        ("rotating", "heavy-ball", math.inf),
    ],
)
def test_learning_rate_scaling(name, base, cap):
    if name == "rotating":  # negative curvature counts as none, and the scalings differ between refreshes
        problem, schedule = problems.rotating(largest=(180.0, 100.0, 40.0)), REFRESHING
    else:  # the smallest eigenvalues have a say
        problem, schedule = problems.quadratic(largest=(90.0, 50.0, 20.0)), ONE_SPECTRUM
    rule = {"gd": "gd", "heavy-ball": "heavy_ball", "nesterov": "nesterov", "adam": "gd"}[base]
    paper = theirs(base, problem, lr_rule=rule, max_lr_scale=cap, **schedule)
    expected = expected_path(paper, problem, 24)
    scales = {float(paper.learning_rate_scale(values)) for _, values, _ in paper.estimates}
    assert scales == {3.0} if cap == 3.0 else len(scales) == len(paper.estimates) and min(scales) > 3.1

    # The ready-made SGD knows its own rule, and the cap is 3 where none is given.
    options = {"lr_rule": rule, "max_lr_scale": cap}
    if cap == 3.0:
        options = {"lr_rule": "default" if base in LINEAR else rule}
    dtype, basis, rtol = EXACT
    with x64(dtype):
        opt = ours(base, problem, dtype, precision=basis, **options, **schedule)
    path, state = run_inline(opt, problem, 24, dtype)
    assert_same_path(path, expected, rtol)
    np.testing.assert_allclose(state.lr_scale, paper.scale.max(), rtol=1e-9)


@pytest.mark.parametrize("base", ["heavy-ball", "adam"])
def test_curvature_of_an_earlier_batch(base):
    dtype, basis, rtol = EXACT
    problem = problem_named("network")
    steps = 20
    batches = [problems.network(seed=3, data_seed=t).batch for t in range(steps)]
    earlier = [batches[max(t - 2, 0)] for t in range(steps)]
    expected = expected_path(theirs(base, problem, **REFRESHING), problem, steps, batches, earlier)
    with x64(dtype):
        run = External(ours(base, problem, dtype, precision=basis, refresh="external"), problem, dtype)
    path, _ = run(steps, **REFRESHING, batches=batches, curvature_batches=earlier)
    assert_same_path(path, expected, rtol)


def test_a_loss_with_auxiliary_outputs():
    dtype, basis, rtol = EXACT
    problem = problem_named("rotating")

    def with_aux(params, batch):
        return loss_fn(problem)(params, batch), {"seen": params}

    with x64(dtype):
        opt = ours("gd", problem, dtype, loss=with_aux, has_aux=True, precision=basis, **REFRESHING)
    path, _ = run_inline(opt, problem, 24, dtype)
    assert_same_path(path, expected_path(theirs("gd", problem, **REFRESHING), problem, 24), rtol)


def test_a_value_function_instead_of_a_loss_and_a_batch():
    dtype, basis, rtol = EXACT
    problem = problem_named("rotating")
    with x64(dtype):
        opt = ours("heavy-ball", problem, dtype, loss=None, precision=basis, **REFRESHING)
    path, _ = run_inline(opt, problem, 24, dtype, by_value_fn=True)
    assert_same_path(path, expected_path(theirs("heavy-ball", problem, **REFRESHING), problem, 24), rtol)


def test_decoupled_weight_decay_is_not_projected_away():
    dtype, basis, rtol = EXACT
    problem = problem_named("rotating")
    options = {"weight_decay": 0.5, **REFRESHING}
    expected = expected_path(theirs("adamw", problem, **options), problem, 24)
    with x64(dtype):
        opt = ours("adamw", problem, dtype, precision=basis, **options)
    path, _ = run_inline(opt, problem, 24, dtype)
    assert_same_path(path, expected, rtol)
    without = expected_path(theirs("adam", problem, **REFRESHING), problem, 24)
    assert np.linalg.norm(expected[-1] - without[-1]) > 0.01


@pytest.mark.parametrize("base", ["heavy-ball", "adam", "diagonal-trace"])
def test_masked_leaves_follow_the_base_and_the_others_the_oracle_on_their_own_hessian(base):
    dtype, basis, rtol = EXACT
    problem = problem_named("rotating")
    inside = np.ones(16, bool)
    inside[7:11] = False  # the leaf called left
    options = {"lr_rule": "gd", **REFRESHING}
    expected = expected_path(theirs(base, problem, inside=inside, **options), problem, 24)
    with x64(dtype):
        mask = {"deep": True, "left": False, "right": True}
        opt = ours(base, problem, dtype, precision=basis, mask=mask, num_matvecs=12, **options)
    path, state = run_inline(opt, problem, 24, dtype)
    assert_same_path(path, expected, rtol)
    assert state.basis.shape == (5, 12)
