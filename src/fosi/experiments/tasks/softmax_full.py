"""Softmax regression on all of MNIST at every step: a convex problem, as it is or with a given condition number."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from numpy.typing import NDArray

from fosi import presets
from fosi.experiments.tasks import inputs
from fosi.experiments.tasks.lr import Regression
from fosi.experiments.tasks.task import Problem, Task, every_step_sees_all, mean_over, quarter_of, whole

MODES = ("full", "conditioned")
CONDITION = 1e6
EXAMPLES, STEPS_A_ROUND = 60_000, 20
FOSI = presets.deterministic("adam")


class Map(NamedTuple):
    """x ↦ (x − mean) matrix.

    Attributes:
      mean: of the pixels.
      matrix: (pixels, features).
    """

    mean: NDArray[np.float64]
    matrix: NDArray[np.float64]

    def __call__(self, images: NDArray[np.uint8]) -> NDArray[np.float32]:
        """The features of images."""
        return ((_pixels(images) - self.mean) @ self.matrix).astype(np.float32)


def conditioned(images: NDArray[np.uint8], condition: float = CONDITION) -> Map:
    """Returns the map after which these images have features whose covariance has that condition number.

    The pixels in [0, 1], less their mean, are written in the eigenvectors of their covariance, those left out whose
    variance is below 1 / condition of the largest: 670 features are left of MNIST. They are whitened; then the i-th of
    them, from the largest variance to the least, gets the variance v · condition^(−i / (d − 1)), where v is what the
    largest was, so that learning rates mean what they did. A fixed rotation, the orthogonal factor of a normal matrix
    of seed 0, mixes them: otherwise the covariance would be diagonal, and Adam's scaling of each parameter could undo
    it.
    """
    pixels = _pixels(images)
    mean = pixels.mean(axis=0)
    pixels -= mean
    variances, vectors = np.linalg.eigh(pixels.T @ pixels / len(pixels))
    kept = variances >= variances[-1] / condition
    variances, vectors = variances[kept][::-1], vectors[:, kept][:, ::-1]
    count = len(variances)
    wanted = variances[0] * condition ** -np.linspace(0, 1, count)
    rotation, triangle = np.linalg.qr(np.random.default_rng(0).normal(size=(count, count)))
    rotation *= np.sign(np.diag(triangle))  # which of the two signs LAPACK gives is its own affair
    return Map(mean, vectors * np.sqrt(wanted / variances) @ rotation)


def build(data_dir: Path | None, download: bool, seed: int, tiny: bool, mode: str | None = None) -> Problem:
    """One layer, products in full float32; the metric is the mean cross-entropy of the test images.

    Args:
      data_dir: the data folder.
      download: whether to download what is missing there.
      seed: of the layer.
      tiny: made images.
      mode: ``"full"``: pixels in [0, 1]; ``"conditioned"``: features of ``conditioned``.
    """
    mode = mode or MODES[0]
    if mode not in MODES:
        raise ValueError(f"mode is {mode!r}; give one of {', '.join(MODES)}")
    found = inputs.lr(data_dir, download, tiny)
    train: tuple[NDArray[Any], NDArray[Any]] = found.train
    test: tuple[NDArray[Any], NDArray[Any]] = found.validation
    if mode == "conditioned":
        see = conditioned(train[0])
        train, test = (see(train[0]), train[1]), (see(test[0]), test[1])
    features = int(np.prod(train[0].shape[1:]))
    model = Regression(features, seed, precision="highest")
    return Problem(
        model.params,
        model.state,
        model.loss,
        jax.device_put(train),
        whole,
        every_step_sees_all(5 if tiny else STEPS_A_ROUND),
        mean_over(model.losses, jax.device_put(test), 2000),
        {"batch_size": len(train[0]), "features": features},
        model.outputs,
        part=quarter_of,
    )


def _pixels(images: NDArray[np.uint8]) -> NDArray[np.float64]:
    return images.reshape(len(images), -1) / 255


TASK = Task(
    "softmax-full",
    "Softmax regression, MNIST, full batch",
    "loss",
    build,
    rounds=500,
    batch_size=EXAMPLES,
    modes=MODES,
    fosi=FOSI,
    extra={"steps_a_round": STEPS_A_ROUND},
)
