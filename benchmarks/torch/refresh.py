"""What does a refresh cost in PyTorch, in gradients?"""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.torch import common, models
from fosi.torch import FOSI
from fosi.torch.curvature import Hessian
from fosi.torch.isolation import Isolation

M = 40


def measure(problem: models.Problem, repeats: int) -> dict[str, Any]:
    """Seconds of a gradient, of one Hessian product and of a whole refresh of 40 products."""
    params = list(problem.model.parameters())
    opt = FOSI(torch.optim.SGD(params, lr=1e-4), model=problem.model, k=10, num_matvecs=M)

    def gradient() -> None:
        opt.zero_grad()
        problem.loss().backward()

    seconds_of_product = _product(problem, params, repeats)
    # Gradients as they are trained with: fused attention and all.
    whole = common.interleaved({"gradient": gradient, "refresh": lambda: opt.refresh(problem.loss)}, repeats)
    queued = common.interleaved({"gradient": gradient}, repeats, calls=20)
    return {
        "model": problem.name,
        "n": problem.size,
        "gradient_ms": 1e3 * queued["gradient"],
        "gradient_waited_ms": 1e3 * whole["gradient"],
        "product_ms": 1e3 * seconds_of_product,
        "refresh_ms": 1e3 * whole["refresh"],
        "product_in_gradients": seconds_of_product / queued["gradient"],
        "refresh_in_gradients": whole["refresh"] / queued["gradient"],
        "refresh_in_gradients_per_product": whole["refresh"] / queued["gradient"] / M,
    }


def _product(problem: models.Problem, params: list[torch.Tensor], repeats: int) -> float:
    with Isolation(params, problem.model):
        hessian = Hessian(problem.loss(), params)
        along = [torch.randn_like(p) for p in params]
        return common.interleaved({"product": lambda: hessian(along)}, repeats, calls=5)["product"]


def main(argv: list[str] | None = None) -> None:
    """Prints the table."""
    parser = common.parser(__doc__)
    parser.add_argument("--models", default="mobilenet,cnn,transformer", help="comma-separated")
    parser.add_argument("--batch", type=int, default=None, help="batch size, where the models' own is too large")
    args = parser.parse_args(argv)
    on_cpu = common.device().type == "cpu"
    settings = {"batch_size": args.batch} if args.batch else {}
    rows = []
    for name in args.models.split(","):
        rows.append(measure(getattr(models, name)(common.device(), **settings), args.repeats or (3 if on_cpu else 10)))
        common.record(args.out, "torch_refresh", rows[-1:], common.machine())
    common.table(
        f"a refresh of {M} products in PyTorch",
        ["model", "n", "gradient ms", "product ms", "in gradients", "refresh ms", "gradients a product, all in"],
        [
            (
                r["model"],
                r["n"],
                r["gradient_ms"],
                r["product_ms"],
                r["product_in_gradients"],
                r["refresh_ms"],
                r["refresh_in_gradients_per_product"],
            )
            for r in rows
        ],
    )


if __name__ == "__main__":
    main()
