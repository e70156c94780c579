"""ESC-50: 2,000 sounds of five seconds in 50 classes, from the official release or as Ogg Vorbis at 16 kHz."""

from __future__ import annotations

import csv
import io
import lzma
import tarfile
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fosi.experiments.data import audio, mel
from fosi.experiments.data.files import DataError, DataFile, fetch, folder

CLIPS, SECONDS, CLASSES = 2_000, 5, 50
TRAINING_FOLDS = (1, 2, 3, 4)
"""The fifth is for validation."""


class Clip(NamedTuple):
    """A row of the table: a clip's name without its ending, fold 1 to 5 and class 0 to 49."""

    name: str
    fold: int
    label: int


class Esc50(NamedTuple):
    """Log-mel spectrograms of one-second pieces (N, 96, 64) with their labels, folds and clips (N,).

    The pieces of a clip follow each other, and clips come as in the official table: 10,000 pieces.
    """

    pieces: NDArray[np.float32]
    labels: NDArray[np.uint8]
    folds: NDArray[np.uint8]
    clips: NDArray[np.int32]

    def split(self) -> tuple[Esc50, Esc50]:
        """Returns the pieces of folds 1 to 4 (8,000) and those of fold 5 (2,000)."""
        training = np.isin(self.folds, TRAINING_FOLDS)
        return self._only(training), self._only(~training)

    def _only(self, which: NDArray[np.bool_]) -> Esc50:
        return Esc50(self.pieces[which], self.labels[which], self.folds[which], self.clips[which])


def _incomplete(path: Path) -> str:
    """What is wrong with an official archive: GitHub makes it anew, so it has clips and names, not one checksum."""
    try:
        with zipfile.ZipFile(path) as archive:
            rows = _rows(archive.read(_inside("meta/esc50.csv")), path)
            missing = {_inside(f"audio/{row.name}.wav") for row in rows} - set(archive.namelist())
    except (zipfile.BadZipFile, zlib.error, KeyError) as error:
        return f"it does not hold the release: {error}"
    except DataError as error:
        return str(error)
    return f"it lacks {len(missing)} clips, among them {min(missing)}" if missing else ""


def _inside(name: str) -> str:
    return f"ESC-50-master/{name}"


OFFICIAL = DataFile(
    "audio/ESC-50-master.zip",
    None,
    (
        "https://github.com/karolpiczak/ESC-50/archive/master.zip",
        "https://github.com/karoldvl/ESC-50/archive/master.zip",
    ),
    check=_incomplete,
)
COMPRESSED = DataFile(
    "audio/esc50-16k-ogg.tar.xz",
    "3afc8fe1fc992354dac14e7c18fb59f5d67770fca8117fec06ca2176fb52d898",
    origin=OFFICIAL.urls[0],
)
TABLE = DataFile(
    "audio/esc50.csv",
    "ca660da60191a97de289983a05821c9382d852a38a2ba8428980816b68cf6246",
    ("https://raw.githubusercontent.com/karolpiczak/ESC-50/master/meta/esc50.csv",),
)


def load(data_dir: Path | None = None, download: bool = False) -> Esc50:
    """Returns all pieces.

    Looks for audio/esc50-16k-ogg.tar.xz with audio/esc50.csv, then for the official audio/ESC-50-master.zip, which it
    can download (600 MB).
    """
    if (folder(data_dir) / COMPRESSED.path).exists():
        path, table = fetch(COMPRESSED, data_dir), fetch(TABLE, data_dir, download)
        return transform(_rows(table.read_bytes(), table), _compressed(path), path)
    path = fetch(OFFICIAL, data_dir, download)
    with zipfile.ZipFile(path) as archive:
        return transform(_rows(archive.read(_inside("meta/esc50.csv")), path), _official(archive, path), path)


def transform(rows: list[Clip], files: Iterable[tuple[str, bytes]], path: Path) -> Esc50:
    """Returns the pieces of the clips.

    Args:
      rows: the clips, in the order of the result.
      files: the sound files with their names, in any order; one after the other, so that memory stays small.
      path: where they come from, for errors.
    """
    place = {row.name: index for index, row in enumerate(rows)}
    pieces = np.empty((len(rows), SECONDS, mel.FRAMES, mel.BANDS), np.float32)
    for name, raw in files:
        clip = name.rpartition("/")[2].rpartition(".")[0]
        if clip not in place:
            raise DataError(f"{path} holds {name}, which is not in the table, or twice")
        samples = audio.decode(raw, f"{name} in {path}")
        if len(samples) != SECONDS * mel.RATE:
            raise DataError(f"{name} in {path} has {len(samples)} samples at 16 kHz, expected {SECONDS * mel.RATE}")
        pieces[place.pop(clip)] = mel.pieces(samples)
    if place:
        raise DataError(f"{path} lacks {len(place)} of {len(rows)} clips, among them {min(place)}")
    return Esc50(
        pieces.reshape(-1, mel.FRAMES, mel.BANDS),
        np.repeat(np.array([row.label for row in rows], np.uint8), SECONDS),
        np.repeat(np.array([row.fold for row in rows], np.uint8), SECONDS),
        np.repeat(np.arange(len(rows), dtype=np.int32), SECONDS),
    )


def _rows(raw: bytes, path: Path) -> list[Clip]:
    try:
        table = csv.DictReader(io.StringIO(raw.decode()))
        rows = [Clip(r["filename"].removesuffix(".wav"), int(r["fold"]), int(r["target"])) for r in table]
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"the table in {path} is not esc50.csv: {error!r}") from None
    if len({row.name for row in rows}) != CLIPS:
        raise DataError(f"the table in {path} names {len({row.name for row in rows})} clips, expected {CLIPS}")
    return rows


def _compressed(path: Path) -> Iterator[tuple[str, bytes]]:
    """The files of a tar archive in its order: to go back in it would be to decompress it again."""
    try:
        with tarfile.open(path, "r|xz") as archive:
            for member in archive:
                if (stream := archive.extractfile(member)) is not None:
                    yield member.name, stream.read()
    except (tarfile.TarError, lzma.LZMAError, EOFError) as error:
        raise DataError(f"{path} cannot be unpacked: {error}") from None


def _official(archive: zipfile.ZipFile, path: Path) -> Iterator[tuple[str, bytes]]:
    for name in archive.namelist():
        if name.startswith(_inside("audio/")) and name.endswith(".wav"):
            try:
                yield name, archive.read(name)
            except (zipfile.BadZipFile, zlib.error) as error:
                raise DataError(f"{path} is damaged: {error}; remove it and download it again") from None
