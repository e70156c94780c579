"""Trajectories against the paper written literally (tests/oracle.py), on known Hessians, and against JAX."""

import math

import numpy as np
import pytest
import torch

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
from tests.torch.running import as_params, loss_of, run

PROBLEMS = ["quadratic", "rotating", "network"]
# dtype of parameters, gradients and products; dtype of the Lanczos basis; relative tolerance of every point.
EXACT = (torch.float64, "float64", 1e-9)
PRECISIONS = {"exact": EXACT, "single": (torch.float32, "float32", 1e-4), "mixed": (torch.float32, "float64", 1e-4)}


@pytest.mark.parametrize("name", PROBLEMS)
def test_the_loss_is_the_problems(name):
    problem = problem_named(name)
    params = as_params(problem, problem.start, torch.float64)
    loss = loss_of(problem, params)()
    np.testing.assert_allclose(loss.item(), problem.value(problem.start, problem.batch, np), rtol=1e-12)
    gradient = torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, params)])
    np.testing.assert_allclose(gradient, problem.gradient(problem.start, problem.batch), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("base", [*BASES, "diagonal-nesterov"])
@pytest.mark.parametrize(
    ("precision", "name"),
    [*(("exact", name) for name in PROBLEMS), *(("single", name) for name in PROBLEMS), ("mixed", "rotating")],
)
def test_trajectories(precision, name, base):
    dtype, basis, rtol = PRECISIONS[precision]
    problem = problem_named(name)

    # Within one spectrum, the Hessian changing under it: the paper to the letter.
    expected = expected_path(theirs(base, problem, "literal", **ONE_SPECTRUM), problem, 30)
    path, opt = run(base, problem, 30, dtype, precision=basis, **ONE_SPECTRUM)
    assert_same_path(path, expected, rtol)
    assert opt.spectrum.accepted.all()

    # After a warm-up, over six refreshes of a subspace that turns: with our rule for momentum across them.
    paper = theirs(base, problem, "ours", **REFRESHING)
    expected = expected_path(paper, problem, 24)
    assert name == "quadratic" or turned(paper) > 0.1
    path, opt = run(base, problem, 24, dtype, precision=basis, **REFRESHING)
    assert_same_path(path, expected, rtol)
    assert len(paper.estimates) == 6


@pytest.mark.parametrize("base", ["gd", "heavy-ball", "adam", "diagonal-trace"])
def test_alpha_and_learning_rate_as_schedules(base):
    dtype, basis, rtol = EXACT
    problem = problem_named("rotating")
    rate, alpha = (lambda t: 0.01 / (1 + 0.2 * t)), (lambda t: 0.01 * (1 + 0.3 * t))
    expected = expected_path(theirs(base, problem, rate=rate, alpha=alpha, **REFRESHING), problem, 24)
    path, _ = run(
        base,
        problem,
        24,
        dtype,
        precision=basis,
        alpha=alpha,
        base_settings={"rate": rate(0)},
        scheduler=lambda opt: torch.optim.lr_scheduler.LambdaLR(opt, lambda t: rate(t) / rate(0)),
        **REFRESHING,
    )
    assert_same_path(path, expected, rtol)


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

    # SGD's own rule is read off its param_groups, and the cap is 3 where none is given.
    options = {"lr_rule": rule, "max_lr_scale": cap}
    if cap == 3.0:
        options = {"lr_rule": "default" if base in LINEAR else rule}
    dtype, basis, rtol = EXACT
    path, opt = run(base, problem, 24, dtype, precision=basis, **options, **schedule)
    assert_same_path(path, expected, rtol)
    np.testing.assert_allclose(opt.lr_scale, paper.scale.max(), rtol=1e-9)


@pytest.mark.parametrize("base", ["heavy-ball", "adam"])
def test_curvature_of_an_earlier_batch(base):
    dtype, basis, rtol = EXACT
    problem = problem_named("network")
    steps = 20
    batches = [problems.network(seed=3, data_seed=t).batch for t in range(steps)]
    earlier = [batches[max(t - 2, 0)] for t in range(steps)]
    expected = expected_path(theirs(base, problem, **REFRESHING), problem, steps, batches, earlier)
    path, _ = run(base, problem, steps, dtype, batches, earlier, precision=basis, **REFRESHING)
    assert_same_path(path, expected, rtol)


def test_decoupled_weight_decay_is_not_projected_away():
    dtype, basis, rtol = EXACT
    problem = problem_named("rotating")
    expected = expected_path(theirs("adamw", problem, weight_decay=0.5, **REFRESHING), problem, 24)
    path, _ = run("adamw", problem, 24, dtype, base_settings={"weight_decay": 0.5}, precision=basis, **REFRESHING)
    assert_same_path(path, expected, rtol)
    without = expected_path(theirs("adam", problem, **REFRESHING), problem, 24)
    assert np.linalg.norm(expected[-1] - without[-1]) > 0.01


@pytest.mark.parametrize("base", ["gd", "heavy-ball", "nesterov", "adam"])
def test_coupled_weight_decay_is_a_penalty_in_the_loss(base):
    dtype, basis, rtol = EXACT
    problem = problem_named("rotating")
    strength = 2.0
    penalised = problem._replace(
        gradient=lambda theta, batch: problem.gradient(theta, batch) + strength * theta,
        hessian=lambda theta, batch: problem.hessian(theta, batch) + strength * np.eye(len(theta)),
    )
    expected = expected_path(theirs(base, penalised, **REFRESHING), penalised, 24)
    settings = {"weight_decay": strength}
    path, opt = run(base, problem, 24, dtype, base_settings=settings, precision=basis, **REFRESHING)
    assert_same_path(path, expected, rtol)
    assert opt.param_groups[0]["weight_decay"] == strength
    unpenalised = expected_path(theirs(base, problem, **REFRESHING), problem, 24)
    assert np.linalg.norm(expected[-1] - unpenalised[-1]) > 0.01


@pytest.mark.parametrize("base", ["gd", "heavy-ball", "nesterov", "adam"])
@pytest.mark.parametrize("name", ["rotating", "network"])
def test_torch_and_jax_take_the_same_path(name, base):
    from tests.jax.bases import ours
    from tests.jax.running import External, x64

    problem = problem_named(name)
    with x64(np.float64):
        jax_opt = ours(
            base,
            problem,
            np.float64,
            precision="float64",
            refresh="external",
            lr_rule="default" if base in LINEAR else None,
        )
    by_jax, _ = External(jax_opt, problem, np.float64)(24, **REFRESHING)
    by_torch, _ = run(base, problem, 24, torch.float64, precision="float64", lr_rule="default", **REFRESHING)
    assert_same_path(by_torch, by_jax, 1e-9)
