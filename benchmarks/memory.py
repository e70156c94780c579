"""How much memory does a refresh take beyond the linearised loss and the V already held?

Read off the compiled program: what it allocates and returns, less what a program needs that linearises the same loss
and makes one product. The budget is (m + k + ell + 4) vectors of n float32.
"""

from __future__ import annotations

from typing import Any

import jax

from benchmarks import common, models
from fosi.jax import fosi_adam

K = 10
MODELS = {
    "softmax": models.softmax_regression,
    "lstm": lambda: models.lstm(batch_size=8, length=32),
    "mobilenet": models.mobilenet,
}


def _bytes(function: Any, *args: Any) -> int:
    analysis = jax.jit(function).lower(*args).compile().memory_analysis()
    return analysis.temp_size_in_bytes + analysis.output_size_in_bytes


def measure(problem: models.Problem, precision: str) -> dict[str, Any]:
    """Bytes of a refresh inside jit, of one product, and the difference in vectors of n float32."""
    opt = fosi_adam(1e-3, problem.loss_fn, k=K, refresh="external", precision=precision)
    state = opt.init(problem.params)
    m = opt.schedule(problem.params).num_matvecs

    def product(params: Any, batch: Any, v: Any) -> Any:
        return jax.linearize(lambda p: jax.grad(problem.loss_fn)(p, batch), params)[1](v)

    def refresh(state: Any, params: Any, batch: Any) -> Any:
        fresh = opt.refresh(state, params, batch=batch)
        return fresh._replace(base=None)  # the base's state only passes through

    whole = _bytes(refresh, state, problem.params, problem.batch)
    one = _bytes(product, problem.params, problem.batch, problem.params)
    vectors = (whole - one) / (4 * problem.size)
    return {
        "model": problem.name,
        "n": problem.size,
        "num_matvecs": m,
        "k": K,
        "precision": precision,
        "refresh_mib": whole / 2**20,
        "one_product_mib": one / 2**20,
        "vectors": vectors,
        "budget_vectors": m + K + 4,
    }


def main(argv: list[str] | None = None) -> None:
    """Prints the table."""
    parser = common.parser(__doc__)
    parser.add_argument("--models", default="softmax,lstm", help=f"comma-separated, of {', '.join(MODELS)}")
    args = parser.parse_args(argv)
    rows = [measure(MODELS[name](), p) for name in args.models.split(",") for p in ("float32", "float64")]
    common.table(
        "memory of a refresh beyond the linearised loss and the V already held",
        ["model", "n", "m", "basis", "MiB", "of it the loss", "rest, in vectors of n float32", "budget"],
        [
            (
                r["model"],
                r["n"],
                r["num_matvecs"],
                r["precision"],
                r["refresh_mib"],
                r["one_product_mib"],
                r["vectors"],
                r["budget_vectors"] if r["precision"] == "float32" else "",
            )
            for r in rows
        ],
    )
    common.record(args.out, "memory", rows)


if __name__ == "__main__":
    main()
