"""What does our rule for momentum across a refresh change, against n-vector velocities that live on?

The paper says nothing of momentum at a refresh; within one spectrum all forms agree. Ours: with SGD both
parts read one velocity of the whole gradient; with any other base the Newton part's velocity is projected
onto the new eigenvectors. Both are compared in the NumPy oracle of the tests on a function whose Hessian
turns as θ moves, with exact gradients and with noisy ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks import common
from tests import oracle, problems

STEPS = 400
NOISE = 3.0
SEEDS = 20
# Base: the oracle's optimizer, its momentum, the learning rate of the Newton part, and our rule.
BASES: dict[str, tuple[Callable[[], Any], Callable[[], Any], float, str]] = {
    "heavy-ball": (
        lambda: oracle.Linear(0.003, oracle.HeavyBallMomentum(0.9)),
        lambda: oracle.HeavyBallMomentum(0.9),
        0.03,
        "whole",
    ),
    "nesterov": (
        lambda: oracle.Linear(0.003, oracle.NesterovMomentum(0.9)),
        lambda: oracle.NesterovMomentum(0.9),
        0.03,
        "whole",
    ),
    "adam": (lambda: oracle.Adam(0.02), lambda: oracle.AdamMomentum(0.9), 0.3, "projected"),
}


def path(problem: problems.Problem, base: str, rule: str, warmup: int, every: int, noise: np.ndarray) -> np.ndarray:
    """θ₀ … θ_STEPS by the oracle, with ``noise[t]`` added to the gradient of step t."""
    optimizer, momentum, alpha, _ = BASES[base]
    newton = None if rule == "whole" else momentum()
    options = {"k": problem.k, "ell": problem.ell, "alpha": alpha, "warmup": warmup, "every": every}
    run = oracle.Fosi(optimizer(), newton=newton, rule=rule, **options)
    return run.optimize(
        problem.start,
        lambda t, theta: problem.gradient(theta, problem.batch) + noise[t],
        lambda t, theta: problem.hessian(theta, problem.batch),
        STEPS,
    )


def measure() -> list[dict[str, Any]]:
    """One row a base, warm-up and interval."""
    problem = problems.rotating(smallest=(2.0, 1.0))
    size = (STEPS, len(problem.start))
    noises = [NOISE * np.random.default_rng(seed).normal(size=size) for seed in range(SEEDS)]

    def losses(points: np.ndarray) -> np.ndarray:
        return np.array([problem.value(theta, problem.batch, np) for theta in points])

    lowest = losses(path(problem, "nesterov", "literal", 0, 5, np.zeros(size)))[-1]
    rows = []
    for base, (*_, ours) in BASES.items():
        for every in (5, 20, 100):
            for warmup in (0, every):
                row: dict[str, Any] = {"base": base, "T": every, "W": warmup}
                exact = [path(problem, base, rule, warmup, every, np.zeros(size)) for rule in ("literal", ours)]
                distance = np.linalg.norm(exact[1] - exact[0], axis=1) / np.linalg.norm(exact[0], axis=1)
                row["distance"], row["distance_end"] = float(distance.max()), float(distance[-1])
                for label, points in zip(("literal", "ours"), exact, strict=True):
                    row[f"mean_{label}"] = float(np.mean(losses(points)) - lowest)
                for label, rule in (("literal", "literal"), ("ours", ours)):
                    late = [losses(path(problem, base, rule, warmup, every, noise)[-100:]).mean() for noise in noises]
                    row[f"noisy_{label}"] = float(np.mean(late) - lowest)
                rows.append(row)
    return rows


def main(argv: list[str] | None = None) -> None:
    """Prints the table."""
    args = common.parser(__doc__).parse_args(argv)
    rows = measure()
    common.table(
        "momentum across a refresh, our rule against literal velocities: relative distance of the\n"
        f"trajectories (largest and last of {STEPS} steps), mean loss above the minimum, exact gradients\n"
        f"(all steps) and noise of {NOISE:g} in every entry of them (last 100 steps, {SEEDS} runs)",
        ["base", "T", "W", "distance", "last", "exact: literal", "ours", "noisy: literal", "ours"],
        [tuple(row.values()) for row in rows],
    )
    common.record(args.out, "momentum_rule", rows)


if __name__ == "__main__":
    main()
