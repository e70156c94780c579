"""The models the torch benchmarks measure on, with one batch of made data each: what is timed does not depend on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Problem(NamedTuple):
    """A module and its loss on one batch."""

    name: str
    model: nn.Module
    loss: Callable[[], Tensor]

    @property
    def size(self) -> int:
        return sum(p.numel() for p in self.model.parameters())


def mobilenet(device: torch.device, batch_size: int = 256, classes: int = 527) -> Problem:
    """AC: MobileNetV1 with BatchNorm on 64 × 96 log-mel pieces, 3.7M parameters in 83 tensors."""
    plan = [(64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2)] + 5 * [(512, 1)] + [(1024, 2), (1024, 1)]

    def conv(inputs: int, outputs: int, size: int, stride: int, groups: int = 1) -> list[nn.Module]:
        layer = nn.Conv2d(inputs, outputs, size, stride, size // 2, groups=groups, bias=False)
        return [layer, nn.BatchNorm2d(outputs), nn.ReLU()]

    layers, channels = conv(1, 32, 3, 2), 32
    for outputs, stride in plan:
        layers += conv(channels, channels, 3, stride, channels) + conv(channels, outputs, 1, 1)
        channels = outputs
    torch.manual_seed(0)
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)).to(device)
    x = torch.randn(batch_size, 1, 96, 64, device=device)
    y = torch.randint(0, classes, (batch_size,), device=device)
    return Problem("MobileNetV1", model, lambda: F.cross_entropy(model(x), y))


def cnn(device: torch.device, batch_size: int = 128) -> Problem:
    """A plain convolutional network with BatchNorm on 32 × 32 images, 1.2M parameters."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for inputs, outputs, stride in [(3, 64, 1), (64, 128, 2), (128, 128, 1), (128, 256, 2), (256, 256, 1)]:
        layers += [nn.Conv2d(inputs, outputs, 3, stride, 1), nn.BatchNorm2d(outputs), nn.ReLU()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10)).to(device)
    x = torch.randn(batch_size, 3, 32, 32, device=device)
    y = torch.randint(0, 10, (batch_size,), device=device)
    return Problem("CNN", model, lambda: F.cross_entropy(model(x), y))


class _Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.before(x)).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.between(x))


def transformer(
    device: torch.device, batch_size: int = 32, length: int = 256, width: int = 384, depth: int = 6
) -> Problem:
    """A causal language model of characters, 10.8M parameters, with scaled-dot-product attention."""
    torch.manual_seed(0)
    vocabulary = 96
    embed, head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary)
    blocks = nn.Sequential(*(_Block(width, 6) for _ in range(depth)), nn.LayerNorm(width))
    model = nn.Sequential(embed, blocks, head).to(device)
    text = torch.randint(0, vocabulary, (batch_size, length + 1), device=device)
    return Problem("transformer", model, lambda: F.cross_entropy(model(text[:, :-1]).transpose(1, 2), text[:, 1:]))
