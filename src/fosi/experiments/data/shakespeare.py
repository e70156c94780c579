"""Tiny Shakespeare: a million characters."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fosi.experiments.data.files import DataFile, fetch

FILE = DataFile(
    "tinyshakespeare/input.txt",
    "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
    ("https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",),
)


class Text(NamedTuple):
    """Characters as bytes, 90 / 5 / 5 percent of the text in its order."""

    train: NDArray[np.uint8]
    validation: NDArray[np.uint8]
    test: NDArray[np.uint8]


def load(data_dir: Path | None = None, download: bool = False) -> Text:
    """Returns the text, split."""
    return split(np.frombuffer(fetch(FILE, data_dir, download).read_bytes(), np.uint8))


def split(text: NDArray[np.uint8]) -> Text:
    """Returns the first 90, the next 5 and the last 5 percent of a text."""
    first, second = len(text) * 90 // 100, len(text) * 95 // 100
    return Text(text[:first], text[first:second], text[second:])
