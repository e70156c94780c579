"""Scalars as TensorBoard's event files, without TensorBoard: records with checksums, protocol buffers by hand."""

from __future__ import annotations

import struct
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import numpy as np

_VERSION = b"brain.Event:2"
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
"""How the value of a field is written."""


class EventWriter:
    """Writes scalars into a new event file, a record a call, with the system when it returns: a kill loses nothing.

    TensorBoard reads the files of a folder in the order of their names as one run. So a run that goes on after it was
    stopped opens the folder again, and has a file of its own there; what is in the others stays.

    Args:
      folder: of the run; made where it is not there.

    Attributes:
      path: of the file.

    Example:
      >>> import tempfile
      >>> with EventWriter(Path(tempfile.mkdtemp())) as events:
      ...     events.scalars(100, {"train/loss": 0.5, "validation/accuracy": 0.75})
    """

    def __init__(self, folder: Path) -> None:
        """Writes the record that every event file begins with."""
        folder.mkdir(parents=True, exist_ok=True)
        self.path, self._stream = _open_next(folder)
        self._write(_field(1, _FIXED64, struct.pack("<d", time.time())) + _field(3, _BYTES, _VERSION))

    def scalars(self, step: int, values: Mapping[str, float], wall_time: float | None = None) -> None:
        """Writes what was measured after a step.

        Args:
          step: steps taken, 0 or more.
          values: by tag; a tag's part before "/" groups it. Not a number and infinity are written as they are.
          wall_time: seconds since 1970; None for now.
        """
        if step < 0:
            raise ValueError(f"step is {step}; give 0 or more")
        when = time.time() if wall_time is None else wall_time
        summary = b"".join(_field(1, _BYTES, _scalar(tag, value)) for tag, value in values.items())
        event = _field(1, _FIXED64, struct.pack("<d", when)), _field(2, _VARINT, _varint(step))
        self._write(b"".join(event) + _field(5, _BYTES, summary))

    def close(self) -> None:
        """Closes the file."""
        self._stream.close()

    def __enter__(self) -> EventWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _write(self, data: bytes) -> None:
        length = struct.pack("<Q", len(data))
        # In one piece, so that a reader beside us does not see half of it for long.
        self._stream.write(length + _checksum(length) + data + _checksum(data))
        self._stream.flush()


def crc32c(data: bytes) -> int:
    """The checksum CRC-32C (Castagnoli) of some bytes.

    Example:
      >>> hex(crc32c(b"123456789"))
      '0xe3069283'
    """
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    return crc ^ 0xFFFFFFFF


def _table() -> Iterable[int]:
    for crc in range(256):
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
        yield crc


_TABLE = tuple(_table())


def _checksum(data: bytes) -> bytes:
    """As the format has it: rotated and moved, since a checksum of bytes that hold their own is a weak one."""
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def _scalar(tag: str, value: float) -> bytes:
    with np.errstate(over="ignore"):  # what single precision does not hold is infinite
        single = np.asarray(value).astype("<f4").tobytes()
    return _field(1, _BYTES, tag.encode()) + _field(2, _FIXED32, single)


def _field(number: int, kind: int, value: bytes) -> bytes:
    return _varint(number << 3 | kind) + (_varint(len(value)) if kind == _BYTES else b"") + value


def _varint(value: int) -> bytes:
    """Seven bits a byte, the lowest first; the eighth says that more follow."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _open_next(folder: Path) -> tuple[Path, BinaryIO]:
    """A file that was not there, and comes after those that were; others put the machine's name into theirs."""
    seconds, number = int(time.time()), 0
    while True:
        path = folder / f"events.out.tfevents.{seconds:010d}.{number:03d}.fosi"
        try:
            return path, path.open("xb")
        except FileExistsError:
            number += 1
