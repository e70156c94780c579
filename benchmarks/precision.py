"""Does a float32 Lanczos basis lose anything against float64?

Eigenvalues against a reference, true residuals, orthogonality and time, on three models. The products are float32 in
both; the reference is the float64 basis with three times the products.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from benchmarks import common, models
from fosi.jax import estimate_spectrum

K = 10
MODELS = {
    "softmax": models.softmax_regression,
    "autoencoder": models.conv_autoencoder,
    "lstm": lambda warm: models.lstm(warm, batch_size=8, length=32),
    "mobilenet": models.mobilenet,
}


def _quality(problem: models.Problem, spectrum: Any, reference: np.ndarray) -> dict[str, float]:
    rows = np.stack(
        [np.asarray(ravel_pytree(jax.tree.map(lambda v, i=i: v[i], spectrum.eigenvectors))[0]) for i in range(K)]
    ).astype(np.float64)
    gradient = jax.grad(lambda p: problem.loss_fn(p, problem.batch))
    product = jax.jit(lambda v: jax.jvp(gradient, (problem.params,), (v,))[1])
    values = np.asarray(spectrum.eigenvalues, np.float64)
    residuals = []
    for i in range(K):
        vector = jax.tree.map(lambda v, i=i: v[i], spectrum.eigenvectors)
        image = np.asarray(ravel_pytree(product(vector))[0], np.float64)
        residuals.append(np.linalg.norm(image - values[i] * rows[i]) / abs(values[0]))
    return {
        "eigenvalue_error": float(np.max(np.abs(values - reference)) / abs(reference[0])),
        "first_eigenvalue_error": float(abs(values[0] - reference[0]) / abs(reference[0])),
        "best_true_residual": float(np.min(residuals)),
        "worst_true_residual": float(np.max(residuals)),
        "worst_claimed_residual": float(np.max(np.asarray(spectrum.residuals)) / abs(values[0])),
        "orthogonality_error": float(np.max(np.abs(rows @ rows.T - np.eye(K)))),
        "accepted": int(jnp.sum(spectrum.accepted)),
    }


def measure(problem: models.Problem, repeats: int) -> list[dict[str, Any]]:
    """One row a precision."""
    estimate = partial(estimate_spectrum, problem.loss_fn, problem.params, problem.batch, k=K)
    reference = np.asarray(estimate(precision="float64", num_matvecs=120).eigenvalues, np.float64)
    runs = {p: partial(estimate, precision=p) for p in ("float32", "float64")}
    spectra = {p: run() for p, run in runs.items()}
    seconds = common.interleaved(runs, repeats)
    return [
        {
            "model": problem.name,
            "n": problem.size,
            "precision": p,
            "seconds": seconds[p],
            **_quality(problem, spectra[p], reference),
        }
        for p in runs
    ]


def main(argv: list[str] | None = None) -> None:
    """Prints the table."""
    parser = common.parser(__doc__)
    parser.add_argument("--models", default="softmax,autoencoder,lstm", help=f"comma-separated, of {', '.join(MODELS)}")
    parser.add_argument("--warm", type=int, default=30, help="training steps before the estimate")
    args = parser.parse_args(argv)
    rows = []
    for name in args.models.split(","):
        rows += measure(MODELS[name](args.warm), args.repeats or 3)
    common.table(
        "float32 against float64 basis, k = 10, errors relative to lambda_1",
        [
            "model",
            "n",
            "basis",
            "s",
            "eigenvalue error",
            "of the first",
            "best residual",
            "worst",
            "claimed",
            "orthogonality",
            "accepted",
        ],
        [
            (
                r["model"],
                r["n"],
                r["precision"],
                r["seconds"],
                r["eigenvalue_error"],
                r["first_eigenvalue_error"],
                r["best_true_residual"],
                r["worst_true_residual"],
                r["worst_claimed_residual"],
                r["orthogonality_error"],
                r["accepted"],
            )
            for r in rows
        ],
    )
    common.record(args.out, "precision", rows)


if __name__ == "__main__":
    main()
