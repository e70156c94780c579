"""The PINNs in PyTorch: equations, points, network and loss of those in JAX, with torch's derivatives."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from fosi.experiments.tasks import equations, pinn
from fosi.experiments.tasks.pinn import Points
from fosi.experiments.tasks.torch_problem import TorchProblem, glorot_normal_
from fosi.torch import ModelLoss


def along(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """The derivative of a function that works entry by entry, with a graph: it is differentiated again, and again.

    Backwards, since that is two to four times faster than ``torch.func.jvp``, whose layers of Python cost more than
    the products they save.
    """
    at = x if x.requires_grad else x.detach().requires_grad_()
    found = f(at)
    return torch.autograd.grad(found, at, torch.ones_like(found), create_graph=True)[0]


EQUATIONS = equations.written_with(equations.Calculus(along, torch.sin, torch.exp))


class Network(nn.Module):
    """Three hidden layers of tanh, u(x, t); products not rounded to TF32, which is torch's own choice."""

    def __init__(self, width: int, generator: torch.Generator) -> None:
        """Starts as flax does: Glorot normal, biases 0."""
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(i, o) for i, o in itertools.pairwise((2, width, width, width, 1)))
        for layer in self.layers:
            assert isinstance(layer, nn.Linear)
            glorot_normal_(layer.weight, generator)
            nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        """The field at each place and time."""
        y = torch.stack([x, t], dim=-1)
        for layer in self.layers[:-1]:
            y = torch.tanh(layer(y))
        out: Tensor = self.layers[-1](y)[..., 0]
        return out


def build(
    name: str,
    data_dir: Path | None,
    download: bool,
    seed: int,
    tiny: bool,
    device: torch.device,
    mode: str | None = None,
) -> TorchProblem:
    """The network before training, and its points.

    Args:
      name: of the equation.
      data_dir: not needed: there are no data.
      download: likewise.
      seed: of the weights and of the points. The points are those of JAX, the weights drawn alike, but others.
      tiny: in seconds, for tests.
      device: where all of it is.
      mode: ``"full"``; ``"quick"``: a smaller network and grid; ``"float64"``: the full one, in that precision.
    """
    equation, size = EQUATIONS[name], pinn.size_of(tiny, mode)
    found = pinn.inputs(equation, size, seed)
    x, t, exact = (torch.tensor(a, device=device) for a in found[1:])

    def split(model: nn.Module, points: Points) -> ModelLoss:
        return ModelLoss(
            lambda: pinn.residuals(equation, model, points),
            lambda parts: torch.stack([part.square().mean() for part in parts]).sum(),
        )

    def loss(model: nn.Module, points: Points) -> Tensor:
        value: Tensor = split(model, points)()
        return value

    @torch.no_grad()
    def validate(model: nn.Module) -> Tensor:
        return torch.linalg.norm(model(x, t) - exact) / torch.linalg.norm(exact)

    return TorchProblem(
        Network(size.width, torch.Generator().manual_seed(seed)).to(device, getattr(torch, size.dtype)),
        loss,
        Points(*(torch.tensor(a, device=device) for a in found.points)),
        lambda points, indices: points,
        lambda generator: torch.zeros(size.steps, 1, dtype=torch.long),  # every step sees all points
        validate,
        pinn.facts(size),
        pinn.part,
        split,
    )
