"""AudioSet: ten seconds of sound from each of many videos, with some of 527 labels, in a folder of your own.

Google publishes tables of labels, not the sound, and some videos are always gone. What is read, under audioset/:

    class_labels_indices.csv, balanced_train_segments.csv, eval_segments.csv   the official tables
    balanced_train/YTID.wav, eval/YTID.wav                                     the clips (.wav, .ogg or .flac)
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fosi.experiments.data import audio, mel
from fosi.experiments.data.files import DataError, folder

SECONDS = 10
ENDINGS = (".wav", ".ogg", ".flac")
ORIGIN = "https://research.google.com/audioset/download.html"


class Part(NamedTuple):
    """The training or the evaluation part.

    Attributes:
      pieces: log-mel spectrograms of one-second pieces, (N, 96, 64).
      labels: which of the labels each piece has, those of its clip, (N, 527).
      clips: the row of each piece's clip in the table, (N,).
      missing: clips of the table that have no file.
      unreadable: clips whose file cannot be decoded, or is shorter than a piece.
    """

    pieces: NDArray[np.float32]
    labels: NDArray[np.bool_]
    clips: NDArray[np.int32]
    missing: int
    unreadable: int


class AudioSet(NamedTuple):
    """The balanced training part and the evaluation part."""

    train: Part
    evaluation: Part


class Segment(NamedTuple):
    """A row of a table: a video and the indices of its labels."""

    video: str
    labels: list[int]


def load(data_dir: Path | None = None) -> AudioSet:
    """Returns both parts. There is nothing to download."""
    where = folder(data_dir) / "audioset"
    labels = _labels(where / "class_labels_indices.csv")
    return AudioSet(_part(where, "balanced_train", labels), _part(where, "eval", labels))


def _part(where: Path, name: str, labels: dict[str, int]) -> Part:
    segments = list(_segments(where / f"{name}_segments.csv", labels))
    sounds = where / name
    files = {path.stem: path for path in sorted(sounds.glob("*")) if path.suffix.lower() in ENDINGS}
    present = [row for row, segment in enumerate(segments) if segment.video in files]
    if not present:
        raise DataError(
            f"{sounds} holds none of the {len(segments)} clips of {name}_segments.csv; put them there as YTID.wav, "
            "YTID.ogg or YTID.flac, YTID being the first column of the table"
        )
    # Of the size they can have at most, so that gigabytes are not held twice.
    pieces = np.empty((len(present) * SECONDS, mel.FRAMES, mel.BANDS), np.float32)
    clips = np.empty(len(pieces), np.int32)
    end, unreadable = 0, 0
    for row in present:
        path = files[segments[row].video]
        try:
            found = mel.pieces(audio.decode(path.read_bytes(), str(path)))[:SECONDS]
        except DataError:
            found = np.empty((0, mel.FRAMES, mel.BANDS), np.float32)
        unreadable += not len(found)
        pieces[end : end + len(found)] = found
        clips[end : end + len(found)] = row
        end += len(found)
    if not end:
        raise DataError(f"none of the {len(present)} clips in {sounds} can be decoded and lasts a second")
    hot = np.zeros((len(segments), len(labels)), np.bool_)
    for row, segment in enumerate(segments):
        hot[row, segment.labels] = True
    return Part(pieces[:end], hot[clips[:end]], clips[:end], len(segments) - len(present), unreadable)


def _labels(path: Path) -> dict[str, int]:
    """The index of each label, from rows of index, mid, display_name under a heading."""
    rows = list(_table(path))[1:]
    if not rows or any(row[:1] != [str(index)] or len(row) < 2 for index, row in enumerate(rows)):
        raise DataError(f"{path} does not list labels as index, mid, display_name from 0 on; get it from {ORIGIN}")
    return {row[1]: index for index, row in enumerate(rows)}


def _segments(path: Path, labels: dict[str, int]) -> Iterator[Segment]:
    """The rows of YTID, start, end, "label,label"."""
    for row in _table(path):
        names = row[3].split(",") if len(row) == 4 else []
        unknown = [name for name in names if name not in labels]
        if not names or unknown:
            what = f"has the label {unknown[0]!r}, which class_labels_indices.csv lacks" if unknown else "is not one"
            raise DataError(f"{path}: the row {row} {what}; rows are YTID, start, end, labels")
        yield Segment(row[0], [labels[name] for name in names])


def _table(path: Path) -> Iterator[list[str]]:
    if not path.exists():
        raise DataError(f"{path} is missing: get it from {ORIGIN}")
    with path.open(newline="", encoding="utf-8") as stream:
        lines = (line for line in stream if line.strip() and not line.startswith("#"))
        yield from csv.reader(lines, skipinitialspace=True)
