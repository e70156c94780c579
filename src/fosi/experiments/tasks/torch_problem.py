"""A task in PyTorch, ready to be trained, and weights drawn as flax draws them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fosi.torch import ModelLoss


class TorchProblem(NamedTuple):
    """A task ready to be trained; all its tensors are on one device.

    Attributes:
      model: what is trained.
      loss: loss(model, batch) -> mean loss of the batch, as in training.
      data: the training data.
      batch: batch(data, indices) -> what ``loss`` takes.
      order: order(generator) -> the indices of one round, (steps, batch size).
      validate: validate(model) -> the metric on the validation data.
      facts: what a results file should say of how it was built.
      part: part(data) -> a quarter of the examples as ``loss`` takes them, for estimates, where a batch is all of them;
        None where it is not.
      split: split(model, batch) -> that loss as a model and a convex loss of its outputs, for Gauss and Newton's
        matrix; None where the task does not say what its loss is made of.
    """

    model: nn.Module
    loss: Callable[[nn.Module, Any], Tensor]
    data: Any
    batch: Callable[[Any, Tensor], Any]
    order: Callable[[torch.Generator], Tensor]
    validate: Callable[[nn.Module], Tensor]
    facts: Mapping[str, Any] = MappingProxyType({})
    part: Callable[[Any], Any] | None = None
    split: Callable[[nn.Module, Any], ModelLoss] | None = None


def lecun_normal_(weight: Tensor, generator: torch.Generator) -> None:
    """Draws a weight (outputs, inputs) as flax does: variance 1 / inputs, cut off at two standard deviations."""
    _cut_normal_(weight, 1 / weight.shape[1], generator)


def glorot_normal_(weight: Tensor, generator: torch.Generator) -> None:
    """Draws a weight (outputs, inputs) as flax does: variance 2 / (inputs + outputs), cut off likewise."""
    _cut_normal_(weight, 2 / sum(weight.shape), generator)


def _cut_normal_(weight: Tensor, variance: float, generator: torch.Generator) -> None:
    # The cut takes from the variance: what is drawn from is wider by the deviation of a unit normal cut there.
    wide = math.sqrt(variance) / 0.87962566103423978
    nn.init.trunc_normal_(weight, std=wide, a=-2 * wide, b=2 * wide, generator=generator)
