"""What a gradient, an estimate and the products with its eigenvectors take, warm, where they run."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fosi.diagnosis import Base, Seconds
from fosi.options import Options
from fosi.torch import space as sp
from fosi.torch.curvature import Closure
from fosi.torch.gradients import projected
from fosi.torch.spectrum import estimate


def seconds(
    loss: Closure,
    estimated: Closure,
    space: sp.Space,
    options: Options,
    model: nn.Module | None,
    optimizer: Base,
    gradient: Tensor,
    used: Tensor,
) -> Seconds:
    """Times of warm functions, the least of some calls."""
    passes = 2 if optimizer.adaptive else 1  # V is read four times a step, or twice where the base is linear
    trained = [p for p in space.params if p.requires_grad]
    kept = [] if model is None else [(buffer, buffer.clone()) for buffer in model.buffers()]

    def gradient_alone() -> None:
        # As in training: a refresh switches off mixed precision and fused kernels, which products cannot have.
        with torch.enable_grad():
            torch.autograd.grad(loss(), trained, allow_unused=True)

    devices = [space.device] if space.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        alone = _least(gradient_alone, 5, space.device)
    for buffer, before in kept:
        buffer.data.copy_(before)
    return Seconds(
        gradient=alone,
        refresh=_least(lambda: estimate(estimated, space, options, 0, model=model), 1, space.device),
        projections=passes * _least(lambda: projected(used, gradient), 5, space.device),
    )


def _least(call: Callable[[], Any], times: int, device: torch.device) -> float:
    taken = []
    for _ in range(times + 1):
        begin = time.perf_counter()
        call()
        if device.type != "cpu":
            torch.get_device_module(device.type).synchronize(device)
        taken.append(time.perf_counter() - begin)
    return min(taken[1:])  # the first one warms up
