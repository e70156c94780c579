"""MNIST in its official idx files."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fosi.experiments.data.files import DataError, DataFile, fetch

_FROM = ("https://ossci-datasets.s3.amazonaws.com/mnist/", "https://storage.googleapis.com/cvdf-datasets/mnist/")


def _file(name: str, sha256: str) -> DataFile:
    return DataFile(f"mnist/{name}", sha256, tuple(base + name for base in _FROM))


FILES = (
    _file("train-images-idx3-ubyte.gz", "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609"),
    _file("train-labels-idx1-ubyte.gz", "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c"),
    _file("t10k-images-idx3-ubyte.gz", "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6"),
    _file("t10k-labels-idx1-ubyte.gz", "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6"),
)


class Mnist(NamedTuple):
    """Images (N, 28, 28) of bytes and labels (N,)."""

    train_images: NDArray[np.uint8]
    train_labels: NDArray[np.uint8]
    test_images: NDArray[np.uint8]
    test_labels: NDArray[np.uint8]


def load(data_dir: Path | None = None, download: bool = False) -> Mnist:
    """Returns the 60,000 training and the 10,000 test images."""
    return Mnist(*(read_idx(fetch(file, data_dir, download)) for file in FILES))


def read_idx(path: Path) -> NDArray[np.uint8]:
    """Returns the array in an idx file of bytes, compressed with gzip or not."""
    raw = path.read_bytes()
    data = gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw
    if data[:3] != b"\x00\x00\x08":
        raise DataError(f"{path} is not an idx file of bytes: it starts with {data[:4].hex()}")
    dims = data[3]
    shape = tuple(np.frombuffer(data, ">u4", dims, 4).tolist())
    values = np.frombuffer(data, np.uint8, offset=4 + 4 * dims)
    if values.size != np.prod(shape):
        raise DataError(f"{path} holds {values.size} values, its header says {shape}")
    return values.reshape(shape)
