"""Files of a dataset: where they are looked for, that they are the right ones, and where they come from."""

from __future__ import annotations

import hashlib
import http.client
import os
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

VARIABLE = "FOSI_DATA"
_CHUNK = 1 << 20


class DataError(ValueError):
    """A dataset cannot be had; says what is missing or wrong, and what to do."""


@dataclass(frozen=True)
class DataFile:
    """One file of a dataset.

    Attributes:
      path: where it lies below the data folder.
      sha256: of the whole file; its first digits where no more of it is published, None where the source makes the
        file anew each time.
      urls: where it can be downloaded, the official source first.
      origin: where people find it, for files that no address leads to directly.
      check: check(path) -> what is wrong with the file, empty if nothing; for files without a checksum.
    """

    path: str
    sha256: str | None
    urls: tuple[str, ...] = ()
    origin: str = ""
    check: Callable[[Path], str] = lambda path: ""


def folder(given: Path | None) -> Path:
    """Returns the data folder: the one given, else that of the environment variable FOSI_DATA.

    Raises:
      DataError: if neither is there.
    """
    where = given or (Path(os.environ[VARIABLE]) if os.environ.get(VARIABLE) else None)
    if where is None:
        raise DataError(f"no data folder: give one with --data-dir, or set {VARIABLE}")
    if where.exists() and not where.is_dir():
        raise DataError(f"the data folder {where} is a file; give a folder")
    return where


def fetch(
    file: DataFile,
    data_dir: Path | None,
    download: bool = False,
    on_bytes: Callable[[int], None] = lambda count: None,
) -> Path:
    """Returns the path of the file, which is there and whose checksum is right.

    Args:
      file: which.
      data_dir: the data folder; None for the one of FOSI_DATA.
      download: whether to download the file where it is missing.
      on_bytes: called with the number of bytes that came, as a download goes on.

    Raises:
      DataError: if it is missing, or is not the file it should be.
    """
    path = folder(data_dir) / file.path
    if not path.exists():
        if not (download and file.urls):
            raise DataError(_missing(path, file))
        _download(path, file, on_bytes)
    if wrong := _wrong(path, file):
        raise DataError(f"{path} is not the file it should be: {wrong}; remove it and {_how(file)}")
    return path


def checksum(path: Path) -> str:
    """Returns the SHA-256 of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _wrong(path: Path, file: DataFile) -> str:
    if file.sha256 is None:
        return file.check(path)
    found = checksum(path)
    if found.startswith(file.sha256):
        return ""
    expected = file.sha256 if len(file.sha256) == 64 else f"one that starts with {file.sha256}"
    return f"its SHA-256 is {found}, expected {expected}"


def _download(path: Path, file: DataFile, on_bytes: Callable[[int], None]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # Under another name until it is whole: an interrupted download must not look like the file.
    part = path.with_name(path.name + ".part")
    reasons = []
    for url in file.urls:
        try:
            with urllib.request.urlopen(url, timeout=60) as stream, part.open("wb") as out:
                while chunk := stream.read(_CHUNK):
                    out.write(chunk)
                    on_bytes(len(chunk))
        except (urllib.error.URLError, http.client.HTTPException, OSError) as error:
            reasons.append(f"{url}: {error}")
            continue
        if not (wrong := _wrong(part, file)):
            part.replace(path)
            return
        reasons.append(f"{url}: {wrong}")
    part.unlink(missing_ok=True)
    raise DataError(f"{path} could not be downloaded; {'; '.join(reasons)}. Try again later, or put the file there")


def _missing(path: Path, file: DataFile) -> str:
    return f"{path} is missing: {_how(file)}"


def _how(file: DataFile) -> str:
    if file.urls:
        return f"run again with --download, or put the file of {file.urls[0]} there"
    return f"get it from {file.origin}"
