"""CIFAR-10, the official binary version: as it comes, unpacked, or batch by batch compressed with xz."""

from __future__ import annotations

import lzma
import tarfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fosi.experiments.data.files import DataError, DataFile, fetch, folder

ARCHIVE = DataFile(
    "cifar10/cifar-10-binary.tar.gz",
    "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
    ("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",),
)
COMPRESSED = {
    "data_batch_1": "734f3c1b14c317416b316a173149376c49c835d9585c93468da515c90dfe0029",
    "data_batch_2": "4dc765d65e1d1e54c20b95fa7adb0f40d483cd13ab57ec67e8b9ef3f3f802a6c",
    "data_batch_3": "2ec0ca94f8a935ca460bafeffecc25c0c69ad2b3845c7985e5c194accaa043c0",
    "data_batch_4": "2e965031311aba2532fd190da02b165e29725e43d054cacdb1d5f21d58d4846a",
    "data_batch_5": "59e54d92977e184fc8f567ba1fa44c700f88c687c412da0e896cfce00d4eeede",
    "test_batch": "1a892f62a90ffafd60b4586e3df66e5e39ae90a3b0f0adc2189f180b5fcefbcd",
}
RECORD = 1 + 3 * 32 * 32


class Cifar10(NamedTuple):
    """Images (N, 32, 32, 3) of bytes and labels (N,)."""

    train_images: NDArray[np.uint8]
    train_labels: NDArray[np.uint8]
    test_images: NDArray[np.uint8]
    test_labels: NDArray[np.uint8]


def load(data_dir: Path | None = None, download: bool = False) -> Cifar10:
    """Returns the 50,000 training and the 10,000 test images.

    Looks for cifar10/NAME.bin.xz, then for the official cifar10/cifar-10-binary.tar.gz, which it can download.
    """
    where = folder(data_dir) / "cifar10"
    if (where / "data_batch_1.bin.xz").exists():
        batches = [_compressed(name, data_dir) for name in COMPRESSED]
    else:
        batches = _archived(fetch(ARCHIVE, data_dir, download))
    images, labels = zip(*batches, strict=True)
    return Cifar10(np.concatenate(images[:-1]), np.concatenate(labels[:-1]), images[-1], labels[-1])


def decode(raw: bytes, path: Path) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Returns images and labels of one batch of records: a label, then the red, green and blue planes."""
    if not raw or len(raw) % RECORD:
        raise DataError(f"{path} holds {len(raw)} bytes, not a whole number of records of {RECORD}")
    records = np.frombuffer(raw, np.uint8).reshape(-1, RECORD)
    return records[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), records[:, 0]


def _compressed(name: str, data_dir: Path | None) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    path = fetch(DataFile(f"cifar10/{name}.bin.xz", COMPRESSED[name], origin=ARCHIVE.urls[0]), data_dir)
    return decode(lzma.decompress(path.read_bytes()), path)


def _archived(path: Path) -> list[tuple[NDArray[np.uint8], NDArray[np.uint8]]]:
    found = []
    with tarfile.open(path) as archive:
        for name in COMPRESSED:
            member = archive.extractfile(f"cifar-10-batches-bin/{name}.bin")
            if member is None:
                raise DataError(f"{path} holds no cifar-10-batches-bin/{name}.bin")
            found.append(decode(member.read(), path))
    return found
