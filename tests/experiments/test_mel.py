"""Log-mel spectrograms against the definition written out in loops, and against what is known of them."""

import cmath
import math

import numpy as np
import pytest

from fosi.experiments.data import mel


def to_mel(frequency):
    return 2595 * math.log10(1 + frequency / 700)


def literal(wave):
    """log(mel + 0.01) of each frame: a DFT by its sum, triangles by their two sides."""
    low, high = to_mel(125), to_mel(7500)
    edges = [low + (high - low) * i / 65 for i in range(66)]
    out = []
    for start in range(0, len(wave) - 400 + 1, 160):
        frame = [
            float(wave[start + n]) * math.sin(math.pi * n / 400) ** 2  # Hann: sin², 0 again at n = 400
            for n in range(400)
        ]
        sizes = [abs(sum(x * cmath.exp(-2j * math.pi * k * n / 512) for n, x in enumerate(frame))) for k in range(257)]
        row = []
        for left, peak, right in zip(edges, edges[1:], edges[2:], strict=False):
            total = 0.0
            for k, size in enumerate(sizes):
                place = to_mel(k * 31.25)
                if left < place <= peak:
                    total += size * (place - left) / (peak - left)
                elif peak < place < right:
                    total += size * (right - place) / (right - peak)
            row.append(math.log(total + 0.01))
        out.append(row)
    return np.array(out)


def noise(samples, seed=0):
    return np.random.default_rng(seed).normal(0, 0.1, samples).astype(np.float32)


def tone(frequency, samples=16_000):
    return np.sin(2 * np.pi * frequency * np.arange(samples) / 16_000).astype(np.float32)


def test_equals_the_definition_in_loops():
    wave = noise(400 + 2 * 160 + 159)  # the last 159 samples make no frame
    found = mel.log_mel(wave)
    assert found.shape == (3, 64) and found.dtype == np.float32
    # A factor on the mel scale (1127 ln, 2595 log10) changes no band.
    np.testing.assert_allclose(found, literal(wave), atol=1e-5)


def test_clips_are_transformed_alike_together_and_alone():
    waves = np.stack([noise(2000, seed) for seed in range(6)]).reshape(2, 3, 2000)
    together = mel.log_mel(waves)
    assert together.shape == (2, 3, 11, 64)
    np.testing.assert_allclose(together[1, 2], mel.log_mel(waves[1, 2]), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("band", [3, 20, 40, 63])
def test_tone_lands_in_its_band(band):
    step = (to_mel(7500) - to_mel(125)) / 65
    frequency = 700 * (10 ** ((to_mel(125) + step * (band + 1)) / 2595) - 1)
    assert set(mel.log_mel(tone(frequency)).argmax(-1)) == {band}


def test_energy_is_kept_by_the_transform():
    # Parseval, on the spectrum that the magnitudes are of: bins 1 to 255 stand for two each.
    frame = noise(400) * mel.hann()
    sizes = np.abs(np.fft.rfft(frame, 512)) ** 2
    assert (2 * sizes.sum() - sizes[0] - sizes[-1]) / 512 == pytest.approx(np.sum(frame**2), rel=1e-5)
    # A tone on a bin and on no other: half the window's sum, 200 / 2, in the magnitude at the peak.
    k, weights = 64, mel.filters()
    best = mel.log_mel(tone(k * 31.25, 400))[0]
    band = weights[:, k].argmax()
    neighbours = np.abs(np.fft.rfft(tone(k * 31.25, 400) * mel.hann(), 512))
    assert neighbours[k] == pytest.approx(100, rel=1e-3)
    assert math.exp(best[band]) - 0.01 == pytest.approx(float(weights[band] @ neighbours), rel=1e-4)


def test_silence_is_the_log_of_the_offset():
    np.testing.assert_allclose(mel.log_mel(np.zeros(4000, np.float32)), math.log(0.01), rtol=1e-6)


def test_bands_end_where_they_should():
    weights = mel.filters()
    heard = np.flatnonzero(weights.sum(0) > 1e-6) * 31.25
    assert heard.min() == 156.25 and heard.max() == 7468.75  # 125 and 7,500 Hz themselves weigh nothing
    inner = weights.sum(0)[8:228]
    np.testing.assert_allclose(inner, 1, atol=1e-6)  # neighbours fade into each other
    assert mel.mel(1000.0) == pytest.approx(1000, abs=0.1) and mel.mel(0.0) == 0
    assert mel.hann()[0] == 0 and mel.hann()[200] == 1 and mel.hann()[399] == pytest.approx(mel.hann()[1])


@pytest.mark.parametrize(
    "samples, seconds", [(80_000, 5), (79_600, 5), (79_599, 4), (15_600, 1), (15_599, 0), (0, 0), (160_000, 10)]
)
def test_piece_for_every_second(samples, seconds):
    assert mel.pieces(np.zeros(samples, np.float32)).shape == (seconds, 96, 64)


def test_pieces_share_no_sample():
    wave = noise(48_000)
    found = mel.pieces(wave)
    np.testing.assert_allclose(found[1], mel.log_mel(wave[16_000:31_600]), rtol=1e-6, atol=1e-6)
    wave[16_000:32_000] = 0
    changed = mel.pieces(wave)
    assert np.array_equal(changed[[0, 2]], found[[0, 2]])
    np.testing.assert_allclose(changed[1], math.log(0.01), rtol=1e-6)
