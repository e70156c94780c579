"""What the tasks that exist in both frameworks train on: NumPy arrays and sizes, real or tiny."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fosi.experiments.data import mnist, shakespeare
from fosi.experiments.tasks.task import resized

LR_BATCH_SIZE = 1024
LM_BATCH_SIZE, LM_LENGTH, LM_WIDTH, LM_STEPS_A_ROUND = 32, 128, 256, 100
VOCABULARY = 128
"""ASCII."""

Bytes = NDArray[np.uint8]


class Labelled(NamedTuple):
    """Images with labels.

    Attributes:
      train: images (N, 28, 28) of bytes, labels (N,).
      validation: the same.
      batch_size: examples in a batch.
    """

    train: tuple[Bytes, Bytes]
    validation: tuple[Bytes, Bytes]
    batch_size: int


class Characters(NamedTuple):
    """A text and the sizes that go with it.

    Attributes:
      train: characters as bytes.
      windows: the whole validation text, cut into windows of ``length + 1`` (each starts with the last of the one
        before).
      batch_size: windows in a batch.
      length: characters that are predicted in a window.
      width: of the layers.
      steps: in a round.
    """

    train: Bytes
    windows: Bytes
    batch_size: int
    length: int
    width: int
    steps: int


def lr(data_dir: Path | None, download: bool, tiny: bool) -> Labelled:
    """MNIST, or bytes at random whose label depends on them."""
    if not tiny:
        found = mnist.load(data_dir, download)
        return Labelled(found[:2], found[2:], LR_BATCH_SIZE)
    images = np.random.default_rng(0).integers(0, 256, (384, 28, 28), dtype=np.uint8)
    labels = images.reshape(384, -1)[:, :80].reshape(384, 10, 8).mean(-1).argmax(-1).astype(np.uint8)
    return Labelled((images[:320], labels[:320]), (images[320:], labels[320:]), 64)


def lm(data_dir: Path | None, download: bool, tiny: bool, batch_size: int | None = None) -> Characters:
    """Tiny Shakespeare, or 64 characters over and over; in batches of another size a round has as many windows."""
    if tiny:
        text = shakespeare.split(np.tile(np.arange(64, 128, dtype=np.uint8), 40))
        size, length, width, steps = 4, 16, 16, 10
    else:
        text = shakespeare.load(data_dir, download)
        size, length, width, steps = LM_BATCH_SIZE, LM_LENGTH, LM_WIDTH, LM_STEPS_A_ROUND
    if batch_size is not None:
        steps, size = resized(steps * size, batch_size), batch_size
    count = (len(text.validation) - 1) // length
    windows = text.validation[np.arange(count)[:, None] * length + np.arange(length + 1)]
    return Characters(text.train, windows, size, length, width, steps)
