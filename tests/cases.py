"""The cases every backend is tried on: problems, rates, and every base optimizer as the oracle has it."""

import functools

import numpy as np

from tests import oracle, problems

BETA = 0.9
# Rates at which all problems move far without running away: of the base, and of the Newton part.
RATES = {
    "gd": (0.01, 0.08),
    "heavy-ball": (0.004, 0.02),
    "nesterov": (0.004, 0.02),
    "adam": (0.03, 0.06),
    "adamw": (0.03, 0.06),
    "diagonal": (0.01, 0.08),
    "diagonal-trace": (0.004, 0.02),
    "diagonal-nesterov": (0.004, 0.02),
}
ONE_SPECTRUM = {"warmup": 0, "refresh_every": np.inf}
REFRESHING = {"warmup": 3, "refresh_every": 4}
LINEAR = ("gd", "heavy-ball", "nesterov")
BASES = [*LINEAR, "adam", "diagonal", "diagonal-trace"]


@functools.cache
def problem_named(name):
    return problems.PROBLEMS[name]()


def diagonal(n):
    """A fixed diagonal, far from the identity."""
    return np.random.default_rng(7).permutation(np.linspace(0.3, 1.7, n))


def theirs(base, problem, rule="ours", rate=None, refresh_every=np.inf, **options):
    """The same in the oracle."""
    rate = RATES[base][0] if rate is None else rate
    momentum = {
        "gd": oracle.NoMomentum,
        "heavy-ball": lambda: oracle.HeavyBallMomentum(BETA),
        "nesterov": lambda: oracle.NesterovMomentum(BETA),
        "adam": lambda: oracle.AdamMomentum(0.9),
        "adamw": lambda: oracle.AdamMomentum(0.9),
        "diagonal": oracle.NoMomentum,
        "diagonal-trace": lambda: oracle.HeavyBallMomentum(BETA),
        "diagonal-nesterov": lambda: oracle.NesterovMomentum(BETA),
    }[base]
    if base.startswith("adam"):
        optimizer = oracle.Adam(rate)
    else:
        optimizer = oracle.Linear(rate, momentum(), 1.0 if base in LINEAR else diagonal(len(problem.start)))
    if rule == "ours":
        rule = "whole" if base in LINEAR else "projected"
    options = {"k": problem.k, "ell": problem.ell, "alpha": RATES[base][1], "every": refresh_every, **options}
    return oracle.Fosi(optimizer, newton=None if rule == "whole" else momentum(), rule=rule, **options)


def expected_path(paper, problem, steps, batches=None, curvature_batches=None):
    """The oracle's trajectory, after a look that the problem is one on which agreement can be asked for."""
    batches = [problem.batch] * steps if batches is None else batches
    curvature_batches = batches if curvature_batches is None else curvature_batches
    path = paper.optimize(
        problem.start,
        lambda t, theta: problem.gradient(theta, batches[t]),
        lambda t, theta: problem.hessian(theta, curvature_batches[t]),
        steps,
    )
    k, ell = paper.k, paper.ell
    for _, values, _ in paper.estimates:  # no doubt about which pairs are the extreme ones, nor about 1/|λ|
        gaps = [values[k - 1] - values[k], values[-ell - 1] - values[-ell] if ell else np.inf]
        assert min(gaps) > 0.01 * values[0]
        assert np.abs(np.r_[values[:k], values[len(values) - ell :]]).min() > 1e-3 * values[0]
    return path


def turned(paper):
    """How far the subspace turned from the first estimate to the last: the sine of the largest angle."""
    first, last = paper.estimates[0][2], paper.estimates[-1][2]
    return np.linalg.norm(last - first @ (first.T @ last), ord=2)


def assert_same_path(path, expected, rtol):
    """Every point of a trajectory, relative to the norm of the expected point."""
    assert path.shape == expected.shape
    error = np.linalg.norm(path - expected, axis=1) / np.linalg.norm(expected, axis=1)
    assert np.isfinite(error).all(), f"not finite from step {int(np.argmin(np.isfinite(error)))}"
    assert error.max() <= rtol, f"off by {error.max():.1e} at step {int(error.argmax())}; allowed {rtol:.0e}"


SIZES = (0.3, 0.1, 0.009, 0.05, 0.1, 1e-6, 0.015, 0.02, 0.005, 0.2, 0.3, 0.021, 0.019, 0.1)
"""Where searches end: thrice below 0.01, and six times above 0.02 since the first of these."""


def expected_lbfgs_path(problem, steps, memory, rate, warmup, every, scaling, sizes=None):
    """BFGS of the last pairs, from FOSI's metric with k = 2, ℓ = 1 and α = 1; and how many pairs it ends with.

    Every step is so long, or as long as a search found it: γ then is cut after one that ended below 0.01.
    """
    theta, n, trust = np.array(problem.start), len(problem.start), 1.0
    path, pairs, lam, V, last = [theta], [], np.zeros(0), np.zeros((n, 0)), None
    for step in range(steps):
        g = problem.gradient(theta, problem.batch)
        if step >= warmup and (step - warmup) % every == 0:
            _, lam, V = oracle.ese(problem.hessian(theta, problem.batch), 2, 1)
        outside = np.eye(n) - V @ V.T
        if last is None:
            gamma = min(1, 1 / np.linalg.norm(g))
        else:
            s, y = theta - last[0], g - last[1]
            if s @ y > 0:
                pairs = [*pairs, (s, y)][-memory:]
                known = s @ outside @ y > 1e-3 * (s @ y)
                flattest = max(1 / np.abs(lam[:2]), default=0)
                if scaling == "usual":
                    measured = (s @ outside @ y) / (y @ outside @ y)
                else:
                    measured = max(np.linalg.norm(outside @ s) / np.linalg.norm(outside @ y), 0.1 * flattest)
                gamma = measured if known else max(gamma, flattest)
        last = theta, g
        H = oracle.bfgs(V @ np.diag(1 / np.abs(lam)) @ V.T + trust * gamma * outside, pairs)
        size = rate if sizes is None else sizes[step]
        theta = theta - size * H @ g
        if sizes is not None and scaling == "geometric":
            trust = 0.1 * trust if size < 0.01 else min(1, 1.1 * trust) if size > 0.02 else trust
        path.append(theta)
    return np.stack(path), len(pairs)
