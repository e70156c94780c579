"""How much faster is a refresh than the paper written plainly, at equal residuals? And in gradients?"""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import common, models
from benchmarks.literal import literal_ese
from fosi.jax import fosi_sgd

K = 10
MODELS = {
    "softmax": models.softmax_regression,
    "autoencoder": models.conv_autoencoder,
    "lstm": models.lstm,
    "mobilenet": models.mobilenet,
}


def measure(
    problem: models.Problem, repeats: int, precisions: tuple[str, ...], layouts: tuple[str, ...] = ("auto",)
) -> list[dict[str, Any]]:
    """Seconds of a gradient, of the literal estimate and of ours, and how good the pairs are."""
    opt = fosi_sgd(0.1, problem.loss_fn, momentum=0.9, k=K, accept="all", refresh="external")
    m = opt.schedule(problem.params).num_matvecs
    ese = jax.jit(partial(literal_ese, problem.loss_fn, k=K, num_matvecs=m))
    gradient = jax.jit(jax.grad(problem.loss_fn))
    runs: dict[str, common.Run] = {
        "gradient": lambda: gradient(problem.params, problem.batch),
        "gradient, waited for": lambda: gradient(problem.params, problem.batch),
        "literal": lambda: ese(problem.params, problem.batch, jax.random.key(0)),
    }
    for precision, layout in itertools.product(precisions, layouts):
        name = f"fosi {precision}" + ("" if layout == "auto" else f" {layout}")
        opt = fosi_sgd(
            0.1,
            problem.loss_fn,
            momentum=0.9,
            k=K,
            accept="all",
            refresh="external",
            precision=precision,
            layout=layout,
        )
        runs[name] = partial(opt.refresh, opt.init(problem.params), problem.params, batch=problem.batch)
    queue = {"gradient": 1 if jax.default_backend() == "cpu" else 20}
    outputs: dict[str, Any] = {}
    seconds = common.interleaved(runs, repeats, queue, outputs)

    rows = []
    for name in runs:
        if name.startswith("gradient"):
            continue
        if name == "literal":
            values, _, residuals = outputs[name]
        else:
            values, residuals = outputs[name].eigenvalues, outputs[name].residuals
        converged = int(jnp.sum(residuals <= 0.1 * jnp.abs(values)))
        rows.append(
            {
                "model": problem.name,
                "n": problem.size,
                "k": K,
                "num_matvecs": m,
                "estimate": name,
                "seconds": seconds[name],
                "gradient_seconds": seconds["gradient"],
                "gradient_latency": seconds["gradient, waited for"],
                "gradients": seconds[name] / seconds["gradient"],
                "literal_over_this": seconds["literal"] / seconds[name],
                "largest": float(values[0]),
                "worst_relative_residual": float(jnp.max(residuals / jnp.abs(values))),
                "converged": converged,
            }
        )
    return rows


def main(argv: list[str] | None = None) -> None:
    """Prints the table."""
    parser = common.parser(__doc__)
    parser.add_argument("--models", default="softmax,lstm", help=f"comma-separated, of {', '.join(MODELS)}")
    parser.add_argument("--warm", type=int, default=30, help="training steps before the estimate")
    parser.add_argument("--precisions", default="float32", help="comma-separated, of float32, float64")
    parser.add_argument("--layouts", default="auto", help="comma-separated, of auto, flat, leaves")
    args = parser.parse_args(argv)
    rows = []
    for name in args.models.split(","):
        problem = MODELS[name](args.warm)
        rows += measure(problem, args.repeats or 3, tuple(args.precisions.split(",")), tuple(args.layouts.split(",")))
    common.table(
        "refresh",
        ["model", "n", "m", "estimate", "seconds", "gradients", "literal / this", "lambda_1", "pairs converged"],
        [
            (
                r["model"],
                r["n"],
                r["num_matvecs"],
                r["estimate"],
                r["seconds"],
                r["gradients"],
                r["literal_over_this"],
                r["largest"],
                r["converged"],
            )
            for r in rows
        ],
    )
    common.record(args.out, "refresh", rows)


if __name__ == "__main__":
    main()
