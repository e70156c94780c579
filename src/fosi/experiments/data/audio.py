"""Sound files: decoded, in one channel, at 16 kHz."""

from __future__ import annotations

import io
import math
import wave
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fosi.experiments.data.files import DataError
from fosi.experiments.data.mel import RATE


def decode(raw: bytes, name: str) -> NDArray[np.float32]:
    """Returns the samples of a sound file, in [−1, 1]: the mean of its channels, resampled to 16 kHz.

    WAV of 16 bits needs nothing but Python; all else needs soundfile.

    Args:
      raw: the file.
      name: of it, for errors.

    Raises:
      DataError: if it cannot be decoded.
      ModuleNotFoundError: if soundfile is not installed.
    """
    samples, rate = _wav(raw) or _any(raw, name)
    return resample(samples.mean(1), rate)


def resample(samples: NDArray[np.float32], rate: int) -> NDArray[np.float32]:
    """Returns the samples (N,) at 16 kHz."""
    if rate == RATE:
        return samples
    from scipy.signal import resample_poly  # comes with scikit-learn

    shared = math.gcd(rate, RATE)
    resampled: NDArray[np.float32] = resample_poly(samples, RATE // shared, rate // shared)
    return resampled.astype(np.float32, copy=False)


def _wav(raw: bytes) -> tuple[NDArray[np.float32], int] | None:
    """Samples (N, channels) and rate of a plain WAV file; None if it is anything else."""
    try:
        with wave.open(io.BytesIO(raw)) as file:
            channels, rate = file.getnchannels(), file.getframerate()
            if file.getsampwidth() != 2 or not rate:
                return None
            frames = file.readframes(file.getnframes())
    except (wave.Error, EOFError):
        return None
    whole = len(frames) // (2 * channels)  # a file cut short may end within a frame
    samples = np.frombuffer(frames, "<i2", whole * channels).reshape(whole, channels)
    return samples.astype(np.float32) / np.float32(2**15), rate


def _any(raw: bytes, name: str) -> tuple[NDArray[np.float32], int]:
    soundfile = _soundfile(name)
    try:
        samples, rate = soundfile.read(io.BytesIO(raw), dtype="float32", always_2d=True)
    except soundfile.LibsndfileError as error:
        raise DataError(f"{name} cannot be decoded: {error}") from None
    return samples, rate


def _soundfile(name: str) -> Any:
    try:
        import soundfile
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            f'{name} cannot be decoded without soundfile, which is not installed: pip install "fosi[tasks]"',
            name="soundfile",
        ) from None
    return soundfile
