"""TL: one layer on a frozen ImageNet network, for CIFAR-10; 5,130 parameters on ResNet-18, as in the paper."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from numpy.typing import NDArray

from fosi.experiments.data import cifar10, imagenet
from fosi.experiments.tasks import backbones
from fosi.experiments.tasks.backbones import Backbone, Stage
from fosi.experiments.tasks.task import Outputs, Problem, Task, cross_entropy, epochs, mean_over, rows, split_model

MODES = ("loop", "cached")
BATCH_SIZE = 128
IMAGE_SIZE = 128
FEATURES_BATCH = 500
_TINY = (Stage(1, 3, 1, 8, 1), Stage(2, 3, 2, 12, 2))


def build(data_dir: Path | None, download: bool, seed: int, tiny: bool, mode: str | None = None) -> Problem:
    """Images made larger, through the network, into one layer.

    Args:
      data_dir: the data folder.
      download: whether to download what is missing there.
      seed: of the layer.
      tiny: made images and a small network that nobody trained.
      mode: ``"loop"``, as in the paper, or ``"cached"``: the network's features are computed once, here, rather than
        at every step. The losses are the same; what a step takes is not.
    """
    mode = mode or MODES[0]
    if mode not in MODES:
        raise ValueError(f"mode is {mode!r}; give one of {', '.join(MODES)}")
    cached = mode == "cached"
    if tiny:
        images, labels = _tiny_images()
        backbone = backbones.efficientnet_lite(backbones.untrained(_TINY, 8, 24, 0), _TINY)
        train, validation, size, side = (images[:64], labels[:64]), (images[64:], labels[64:]), 16, 16
    else:
        found = cifar10.load(data_dir, download)
        backbone = backbones.load(imagenet.load(data_dir, download))
        train, validation, size, side = found[:2], found[2:], BATCH_SIZE, IMAGE_SIZE
    graph, params, nothing = split_model(nnx.Linear(backbone.features, 10, rngs=nnx.Rngs(seed)))
    see = partial(_see, backbone.apply, side)

    def logits(params: Any, state: Any, inputs: jax.Array) -> jax.Array:
        out: jax.Array = nnx.merge(graph, params, nothing)(inputs if cached else see(state, inputs))
        return out

    def loss(params: Any, state: Any, batch: Any) -> tuple[jax.Array, Any]:
        return cross_entropy(logits(params, state, batch[0]), batch[1]), state

    def outputs(params: Any, state: Any, batch: Any) -> Outputs:
        return Outputs("softmax", logits(params, state, batch[0]), batch[1])

    def correct(params: Any, state: Any, batch: Any) -> jax.Array:
        return jnp.argmax(logits(params, state, batch[0]), -1) == batch[1]

    data: list[tuple[Any, Any]] = [train, validation]
    if cached:
        data = [(features(backbone, side, images), labels) for images, labels in data]
    train, validation = jax.device_put(data)
    return Problem(
        params,
        {} if cached else backbone.weights,
        loss,
        train,
        rows,
        epochs(len(train[0]), size),
        mean_over(correct, validation, FEATURES_BATCH),
        {"backbone": backbone.name},
        outputs,
    )


def features(backbone: Backbone, side: int, images: NDArray[np.uint8]) -> jax.Array:
    """Returns the network's features of images scaled to ``side``, a batch at a time."""
    see = jax.jit(partial(_see, backbone.apply, side))
    starts = range(0, len(images), FEATURES_BATCH)
    return jnp.concatenate([see(backbone.weights, images[i : i + FEATURES_BATCH]) for i in starts])


def _see(apply: Callable[[Any, jax.Array], jax.Array], side: int, weights: Any, images: jax.Array) -> jax.Array:
    larger = jax.image.resize(images.astype(jnp.float32), (len(images), side, side, 3), "bilinear")
    return apply(weights, larger)


def _tiny_images() -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Ten pictures, each several times with noise."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 10, 96, dtype=np.uint8)
    pictures = rng.uniform(50, 200, (10, 8, 8, 3))
    return (pictures[labels] + rng.uniform(-50, 50, (96, 8, 8, 3))).astype(np.uint8), labels


TASK = Task(
    "tl",
    "TL: transfer learning, ImageNet to CIFAR-10",
    "accuracy",
    build,
    rounds=20,
    batch_size=BATCH_SIZE,
    heavy_ball_rate=0.001,
    modes=MODES,
    extra={"image_size": IMAGE_SIZE},
)
