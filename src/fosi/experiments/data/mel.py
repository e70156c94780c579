"""Log-mel spectrograms of sound at 16 kHz, as VGGish and AudioSet have them."""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import NDArray

RATE = 16_000
WINDOW, HOP = 400, 160
"""Samples: 25 ms every 10 ms."""
FFT = 512
BANDS = 64
LOWEST, HIGHEST = 125.0, 7_500.0
"""Hz, the outer edges of the first and of the last band."""
OFFSET = 0.01
"""Added before the logarithm, so that silence has one."""
FRAMES = 96
PIECE = (FRAMES - 1) * HOP + WINDOW
"""Samples in the frames of a piece: 15,600."""


def pieces(wave: NDArray[np.float32]) -> NDArray[np.float32]:
    """Returns the log-mel spectrograms (seconds, 96, 64) of a sound, a piece for each of its seconds.

    A piece is the 96 frames of the second's first 15,600 samples. Frames that would reach into the next second are left
    out, so that no two pieces share a sample. A last second counts if it has those 15,600 samples.

    Args:
      wave: (samples,), in [−1, 1], at 16 kHz.
    """
    if len(wave) < PIECE:
        return np.empty((0, FRAMES, BANDS), np.float32)
    return log_mel(np.lib.stride_tricks.sliding_window_view(wave, PIECE)[::RATE])


def log_mel(waves: NDArray[np.float32]) -> NDArray[np.float32]:
    """Returns log(mel + 0.01) of the magnitude spectrum: (..., samples) to (..., frames, 64).

    Only whole frames count: 1 + (samples − 400) // 160 of them.
    """
    frames = np.lib.stride_tricks.sliding_window_view(waves, WINDOW, axis=-1)[..., ::HOP, :]
    spectrum = np.abs(np.fft.rfft(frames * hann(), FFT))
    # einsum and not @: for products this small, the threads of @ wait for each other on a busy machine.
    bands: NDArray[np.float32] = np.einsum("...f,bf->...b", spectrum, filters())
    return np.log(bands + np.float32(OFFSET))


@functools.cache
def hann() -> NDArray[np.float32]:
    """The periodic Hann window (400,): its last sample is not the 0 that comes after it."""
    return (0.5 - 0.5 * np.cos(2 * np.pi * np.arange(WINDOW) / WINDOW)).astype(np.float32)


@functools.cache
def filters() -> NDArray[np.float32]:
    """The weight in each band of each frequency (64, 257).

    Bands are triangles on the mel scale, as wide as two steps of it, with a peak of 1 where their neighbours end.
    """
    edges = np.linspace(mel(LOWEST), mel(HIGHEST), BANDS + 2)
    places = mel(np.arange(FFT // 2 + 1) * RATE / FFT)
    distance = np.abs(places[None, :] - edges[1:-1, None]) / (edges[1] - edges[0])
    return np.maximum(0, 1 - distance).astype(np.float32)


def mel(frequency: float | NDArray[np.float64]) -> NDArray[np.float64]:
    """The HTK mel scale of a frequency in Hz."""
    return 1127 * np.log1p(np.asarray(frequency) / 700)
