"""What does FOSI add to a whole training step in PyTorch?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.torch import common, models
from fosi.torch import FOSI

K = 10


def _training(problem: models.Problem, opt: torch.optim.Optimizer) -> Callable[[], None]:
    def step() -> None:
        opt.zero_grad()
        problem.loss().backward()
        opt.step()

    return step


def _bases(device: torch.device) -> dict[str, Callable[[Any], torch.optim.Optimizer]]:
    fused = device.type == "cuda"
    return {
        "sgd momentum": lambda p: torch.optim.SGD(p, lr=1e-4, momentum=0.9, fused=fused),
        "adam": lambda p: torch.optim.Adam(p, lr=1e-5, fused=fused),
        "adamw": lambda p: torch.optim.AdamW(p, lr=1e-5, weight_decay=1e-2, fused=fused),
    }


def with_spectrum(problem: models.Problem, base: torch.optim.Optimizer) -> FOSI:
    """FOSI with a spectrum in use, all pairs of it: what a step costs does not depend on where it came from."""
    opt = FOSI(base, model=problem.model, k=K, num_matvecs=K + 2, alpha=1e-5, accept="all", max_lr_scale=1)
    opt.refresh(problem.loss)
    return opt


def measure(make: Callable[[torch.device], models.Problem], repeats: int, calls: int) -> list[dict[str, Any]]:
    """Milliseconds a step for the bases and for FOSI around them."""
    device = common.device()
    runs, problem = {}, make(device)
    for name, base in _bases(device).items():
        alone, wrapped = make(device), make(device)
        runs[name] = _training(alone, base(alone.model.parameters()))
        opt = with_spectrum(wrapped, base(wrapped.model.parameters()))
        runs["fosi " + name] = _training(wrapped, opt)
    seconds = common.interleaved(runs, repeats, calls)
    return [
        {
            "model": problem.name,
            "n": problem.size,
            "tensors": len(list(problem.model.parameters())),
            "optimizer": name,
            "step_ms": 1e3 * value,
            "over_base": value / seconds[name.removeprefix("fosi ")],
        }
        for name, value in seconds.items()
    ]


def main(argv: list[str] | None = None) -> None:
    """Prints the table."""
    parser = common.parser(__doc__)
    parser.add_argument("--model", default="mobilenet", choices=["mobilenet", "cnn", "transformer"])
    parser.add_argument("--calls", type=int, default=None, help="steps in one timed run")
    args = parser.parse_args(argv)
    on_cpu = common.device().type == "cpu"
    rows = measure(
        getattr(models, args.model), args.repeats or (3 if on_cpu else 20), args.calls or (1 if on_cpu else 20)
    )
    common.table(
        "training step in PyTorch: gradient and optimizer",
        ["model", "n", "optimizer", "ms a step", "over base"],
        [(r["model"], r["n"], r["optimizer"], r["step_ms"], r["over_base"]) for r in rows],
    )
    common.record(args.out, "torch_train_step", rows, common.machine())


if __name__ == "__main__":
    main()
