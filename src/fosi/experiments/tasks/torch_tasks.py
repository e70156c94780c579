"""The tasks that exist in PyTorch too: the models, starting weights and data of those in JAX. LR and LM are here."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fosi.experiments.tasks import inputs, torch_pinn
from fosi.experiments.tasks.torch_problem import TorchProblem, lecun_normal_
from fosi.torch import ModelLoss


def build(name: str, data_dir: Path | None, download: bool, seed: int, tiny: bool, **extra: str | int) -> TorchProblem:
    """Builds a task on the GPU, where there is one.

    Args:
      name: of the task.
      data_dir: where the data lie; None for the folder of FOSI_DATA.
      download: whether to download what is missing.
      seed: of the starting weights. They are drawn as in JAX, but are others.
      tiny: a small model on made data.
      **extra: ``mode`` and ``batch_size``, where the task has them.
    """
    if name not in _BUILDERS:
        raise ValueError(f"task is {name!r}, which is not there in PyTorch; give one of {', '.join(_BUILDERS)}")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return _BUILDERS[name](data_dir, download, seed, tiny, device, **extra)


def _lr(data_dir: Path | None, download: bool, seed: int, tiny: bool, device: torch.device) -> TorchProblem:
    """Pixels in [0, 1], one layer."""
    found = inputs.lr(data_dir, download, tiny)
    train, validation = (tuple(torch.tensor(x, device=device) for x in part) for part in found[:2])
    model = nn.Linear(28 * 28, 10)
    # Drawn on the CPU, so that a seed gives the same weights on every machine.
    lecun_normal_(model.weight, torch.Generator().manual_seed(seed))
    nn.init.zeros_(model.bias)
    examples, steps = len(found.train[0]), len(found.train[0]) // found.batch_size

    def logits(model: nn.Module, images: Tensor) -> Tensor:
        out: Tensor = model(images.flatten(1).float() / 255)
        return out

    def split(model: nn.Module, batch: Any) -> ModelLoss:
        images, labels = batch
        return ModelLoss(lambda: logits(model, images), lambda found: nn.functional.cross_entropy(found, labels.long()))

    def loss(model: nn.Module, batch: Any) -> Tensor:
        value: Tensor = split(model, batch)()
        return value

    def batch(data: Any, indices: Tensor) -> Any:
        return tuple(x[indices] for x in data)

    def order(generator: torch.Generator) -> Tensor:
        chosen = torch.randperm(examples, generator=generator)[: steps * found.batch_size]
        return chosen.reshape(steps, found.batch_size).to(device)

    @torch.no_grad()
    def validate(model: nn.Module) -> Tensor:
        return (logits(model, validation[0]).argmax(-1) == validation[1]).float().mean()

    return TorchProblem(model.to(device), loss, train, batch, order, validate, split=split)


class Lstm(nn.Module):
    """One-hot characters → LSTM → ReLU → LSTM → hidden layer → logits."""

    def __init__(self, width: int, generator: torch.Generator) -> None:
        """Starts as flax does: LeCun normal, orthogonal from step to step, biases 0."""
        super().__init__()
        self.first = nn.LSTM(inputs.VOCABULARY, width, batch_first=True)
        self.second = nn.LSTM(width, width, batch_first=True)
        self.hidden = nn.Linear(width, width)
        self.out = nn.Linear(width, inputs.VOCABULARY)
        for layer in (self.first, self.second):
            into, onward, bias, other_bias = layer.all_weights[0]
            lecun_normal_(into, generator)
            nn.init.orthogonal_(onward, generator=generator)
            nn.init.zeros_(bias)
            # Only the sum of the two biases matters. Were both trained, it would move at twice the rate, and the model
            # would have 8 · width parameters more than the task's.
            nn.init.zeros_(other_bias).requires_grad_(False)
        for linear in (self.hidden, self.out):
            lecun_normal_(linear.weight, generator)
            nn.init.zeros_(linear.bias)

    def forward(self, characters: Tensor) -> Tensor:
        """Returns the logits of the next character at every place."""
        one_hot = nn.functional.one_hot(characters.long(), inputs.VOCABULARY).float()
        x, _ = self.first(one_hot)
        x, _ = self.second(x.relu())
        out: Tensor = self.out(self.hidden(x).relu())
        return out


def _lm(
    data_dir: Path | None,
    download: bool,
    seed: int,
    tiny: bool,
    device: torch.device,
    batch_size: int | None = None,
) -> TorchProblem:
    """Windows of 128 characters from anywhere in the text; each character is predicted from those before it."""
    text = inputs.lm(data_dir, download, tiny, batch_size)
    train, held_out = torch.tensor(text.train, device=device), torch.tensor(text.windows, device=device)
    places = torch.arange(text.length + 1, device=device)

    def batch(data: Tensor, starts: Tensor) -> Tensor:
        return data[starts[:, None] + places]

    def order(generator: torch.Generator) -> Tensor:
        shape = text.steps, text.batch_size
        return torch.randint(len(text.train) - text.length, shape, generator=generator).to(device)

    def loss(model: nn.Module, windows: Tensor) -> Tensor:
        return nn.functional.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten().long())

    @torch.no_grad()
    def validate(model: nn.Module) -> Tensor:
        return loss(model, held_out)

    model = Lstm(text.width, torch.Generator().manual_seed(seed))
    return TorchProblem(model.to(device), loss, train, batch, order, validate)


_BUILDERS: dict[str, Callable[..., TorchProblem]] = {
    "lr": _lr,
    "lm": _lm,
    **{name: partial(torch_pinn.build, name) for name in torch_pinn.EQUATIONS},
}
