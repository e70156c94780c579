"""PyTorch's state dicts (.pth) as NumPy arrays, without torch: the zip format, and the pickle format before it."""

from __future__ import annotations

import io
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fosi.experiments.data.files import DataError

_MAGIC, _PROTOCOL = 0x1950A86A20F9469CFC6C, 1001
_DTYPES = {
    "FloatStorage": "<f4",
    "DoubleStorage": "<f8",
    "HalfStorage": "<f2",
    "LongStorage": "<i8",
    "IntStorage": "<i4",
    "ShortStorage": "<i2",
    "CharStorage": "i1",
    "ByteStorage": "u1",
    "BoolStorage": "?",
}


class _Storage(NamedTuple):
    """A row of numbers that is elsewhere in the file; tensors are views of it."""

    key: str
    dtype: np.dtype[Any]
    length: int


class _Tensor(NamedTuple):
    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def read(path: Path) -> dict[str, NDArray[Any]]:
    """Returns the arrays of a state dict by name, in its order, each with memory of its own.

    The file's pickle may name nothing but ordered dictionaries, tensors and storages: unlike with ``pickle.load``, no
    code of the file's choice is run.

    Raises:
      DataError: if the file is something else, is damaged, or holds anything but tensors.
    """
    raw = path.read_bytes()
    try:
        found, storages = _zipped(raw) if raw[:4] == b"PK\x03\x04" else _pickled(raw)
        if not isinstance(found, dict):
            raise ValueError(f"it holds an object of type {type(found).__name__}, not a dictionary")
        return {str(name): _array(name, value, storages) for name, value in found.items()}
    # A damaged pickle can raise anything.
    except Exception as error:
        raise DataError(f"{path} is not a state dict of PyTorch: {type(error).__name__}, {error}") from error


def _rebuild_tensor(storage: Any, offset: Any, shape: Any, strides: Any, *_: Any) -> _Tensor:
    return _Tensor(storage, offset, tuple(shape), tuple(strides))


def _rebuild_parameter(tensor: Any, *_: Any) -> Any:
    return tensor


_ADMITTED: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor,
    ("torch._utils", "_rebuild_parameter"): _rebuild_parameter,
    **{("torch", name): np.dtype(code) for name, code in _DTYPES.items()},
}


class _Unpickler(pickle.Unpickler):
    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream)
        self.storages: dict[str, _Storage] = {}

    def find_class(self, module: str, name: str) -> Any:
        try:
            return _ADMITTED[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no state dict needs") from None

    def persistent_load(self, pid: Any) -> _Storage:
        # The pickle format's sixth item says that a storage is part of another one, which torch gave up long ago.
        kind, dtype, key, _, length, *part = pid
        if kind != "storage" or not isinstance(dtype, np.dtype) or any(part):
            raise pickle.UnpicklingError(f"it refers to {pid!r}, which is no storage")
        return self.storages.setdefault(str(key), _Storage(str(key), dtype, int(length)))


Storages = Callable[[_Storage], bytes]


def _zipped(raw: bytes) -> tuple[Any, Storages]:
    archive = zipfile.ZipFile(io.BytesIO(raw))
    # Everything is in one folder, whose name is the file's when it was saved.
    (pickled,) = (name for name in archive.namelist() if name.endswith("/data.pkl") and name.count("/") == 1)
    root = pickled.removesuffix("data.pkl")
    if root + "byteorder" in archive.namelist() and archive.read(root + "byteorder") != b"little":
        raise ValueError("its numbers are big-endian")
    found = _Unpickler(io.BytesIO(archive.read(pickled))).load()
    return found, lambda storage: archive.read(f"{root}data/{storage.key}")


def _pickled(raw: bytes) -> tuple[Any, Storages]:
    """Five pickles (a magic number, a version, the machine, the dictionary, the storages' keys), then the storages."""
    stream = io.BytesIO(raw)
    magic, protocol, machine = (_Unpickler(stream).load() for _ in range(3))
    if (magic, protocol) != (_MAGIC, _PROTOCOL):
        raise ValueError(f"it starts with {magic!r}, {protocol!r}")
    if not machine["little_endian"]:
        raise ValueError("its numbers are big-endian")
    dictionary = _Unpickler(stream)
    found = dictionary.load()
    contents = {}
    for key in _Unpickler(stream).load():
        length = int.from_bytes(stream.read(8), "little")
        contents[str(key)] = stream.read(length * dictionary.storages[str(key)].dtype.itemsize)
    return found, lambda storage: contents[storage.key]


def _array(name: Any, value: Any, storages: Storages) -> NDArray[Any]:
    if not isinstance(value, _Tensor):
        raise ValueError(f"{name!r} is of type {type(value).__name__}, not a tensor")
    values = np.frombuffer(storages(value.storage), value.storage.dtype)
    numbers = (value.offset, *value.shape, *value.strides)
    last = value.offset + sum((n - 1) * s for n, s in zip(value.shape, value.strides, strict=True))
    # A view outside its storage would read memory that is not the file's.
    if values.size != value.storage.length or min(numbers) < 0 or (0 not in value.shape and last >= values.size):
        raise ValueError(
            f"{name!r} has shape {value.shape}, strides {value.strides} and offset {value.offset}, "
            f"in a storage of {values.size} numbers that should have {value.storage.length}"
        )
    strides = [s * values.itemsize for s in value.strides]
    view = np.lib.stride_tricks.as_strided(values[value.offset :], value.shape, strides)
    return np.array(view, order="C")
