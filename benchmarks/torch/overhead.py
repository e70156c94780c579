"""How much time does Python take in a FOSI step, with 100 parameter tensors so small that nothing else does?"""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.torch import common
from fosi.torch import FOSI

TENSORS = 100


def measure(repeats: int) -> list[dict[str, Any]]:
    """Microseconds of a step of the base, of FOSI before its first estimate and of FOSI with one."""
    device = common.device()
    makes = {
        "sgd momentum": lambda p: torch.optim.SGD(p, lr=1e-4, momentum=0.9, foreach=True),
        "adam": lambda p: torch.optim.Adam(p, lr=1e-5, foreach=True),
    }
    rows = []
    for name, make in makes.items():
        runs, opts = {}, {}
        for kind in ("alone", "before", "with"):
            params = [torch.randn(4, 4, device=device, requires_grad=True) for _ in range(TENSORS)]
            sum((p**4).sum() for p in params).backward()
            opt: torch.optim.Optimizer = make(params)
            if kind != "alone":
                opt = FOSI(opt, k=10, warmup=10**6, accept="all")
                if kind == "with":
                    opt.refresh(lambda params=params: sum((p**4).sum() for p in params))
            opts[kind], runs[kind] = opt, opt.step
        seconds = common.interleaved(runs, repeats, calls=50)
        rows.append(
            {
                "optimizer": name,
                "tensors": TENSORS,
                "base_us": 1e6 * seconds["alone"],
                "before_us": 1e6 * seconds["before"],
                "fosi_us": 1e6 * seconds["with"],
                "overhead_ms": 1e3 * (seconds["with"] - seconds["alone"]),
            }
        )
    return rows


def main(argv: list[str] | None = None) -> None:
    """Prints the table."""
    args = common.parser(__doc__).parse_args(argv)
    rows = measure(args.repeats or 20)
    common.table(
        f"an optimizer step in PyTorch on {TENSORS} tensors of 16 numbers",
        ["optimizer", "base us", "before the first estimate", "fosi us", "fosi less base, ms"],
        [(r["optimizer"], r["base_us"], r["before_us"], r["fosi_us"], r["overhead_ms"]) for r in rows],
    )
    common.record(args.out, "torch_overhead", rows, common.machine())


if __name__ == "__main__":
    main()
