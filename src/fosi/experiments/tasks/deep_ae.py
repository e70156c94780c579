"""Deep AE: the classic deep autoencoder of MNIST, the benchmark of second-order optimizers; 2,837,314 parameters.

Layers, loss and l2 term are those of kfac-jax's example; the weights start as Glorot has it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from fosi import presets
from fosi.experiments.tasks import inputs
from fosi.experiments.tasks.task import (
    Outputs,
    Problem,
    Task,
    epochs,
    every_step_sees_all,
    mean_over,
    quarter_of,
    rows,
    split_model,
    whole,
)

MODES = ("full", "batch", "quick")
EXAMPLES, BATCH_SIZE = 60_000, 2000
L2 = 1e-5
FOSI = presets.deterministic("adam")


class Size(NamedTuple):
    """How large a problem is.

    Attributes:
      encoder: widths from the image to the code; the decoder is its mirror image.
      examples: images to train on at the most.
      batch_size: of those that a step sees, where that is not all.
      steps: between two evaluations, where a step sees all.
    """

    encoder: tuple[int, ...] = (28 * 28, 1000, 500, 250, 30)
    examples: int = EXAMPLES
    batch_size: int = BATCH_SIZE
    steps: int = 20


FULL, QUICK, TINY = Size(), Size((28 * 28, 200, 100, 50, 12), 2000), Size((28 * 28, 16, 8, 4), EXAMPLES, 64, 5)


def size_of(tiny: bool, mode: str | None) -> Size:
    """How large a problem of this mode is; None for the full one."""
    if mode not in (None, *MODES):
        raise ValueError(f"mode is {mode!r}; give one of {', '.join(MODES)}")
    return TINY if tiny else QUICK if mode == "quick" else FULL


class DeepAutoencoder(nnx.Module):
    """Hidden layers of tanh around a linear code; products in full float32.

    Weights are normal with variance 2 / (inputs + outputs), cut off at two standard deviations, and biases zero.
    """

    def __init__(self, encoder: Sequence[int], rngs: nnx.Rngs) -> None:
        """Takes the widths from the image to the code."""
        widths = (*encoder, *encoder[-2::-1])
        self.code = len(encoder) - 2
        self.layers = nnx.List(
            [
                nnx.Linear(i, o, kernel_init=nnx.initializers.glorot_normal(), precision="highest", rngs=rngs)
                for i, o in itertools.pairwise(widths)
            ]
        )

    def __call__(self, pixels: jax.Array) -> jax.Array:
        """Returns the logits of the images as far as they went through."""
        x = pixels
        for index, layer in enumerate(self.layers[:-1]):
            x = layer(x) if index == self.code else jnp.tanh(layer(x))
        out: jax.Array = self.layers[-1](x)
        return out


def build(data_dir: Path | None, download: bool, seed: int, tiny: bool, mode: str | None = None) -> Problem:
    """Pixels in [0, 1]; sigmoid cross-entropy, summed over pixels, mean over images, and the l2 term.

    The metric is the squared error, summed over pixels, mean over the test images.

    Args:
      data_dir: the data folder.
      download: whether to download what is missing there.
      seed: of the weights.
      tiny: made images and narrow layers.
      mode: ``"full"``: every step sees all 60,000 images; ``"batch"``: 2,000 of them; ``"quick"``: for a laptop, every
        step sees the same 2,000, and layers are a fifth as wide.
    """
    size, full = size_of(tiny, mode), mode != "batch"
    found = inputs.lr(data_dir, download, tiny)
    train, test = found.train[0][: size.examples], found.validation[0]
    graph, params, nothing = split_model(DeepAutoencoder(size.encoder, nnx.Rngs(seed)))

    def outputs(params: Any, state: Any, images: jax.Array) -> Outputs:
        pixels = images.reshape(len(images), -1).astype(jnp.float32) / 255
        return Outputs("pixels", nnx.merge(graph, params, nothing)(pixels), pixels)

    def loss(params: Any, state: Any, images: jax.Array) -> tuple[jax.Array, Any]:
        squares = optax.tree.norm(params, squared=True)
        return outputs(params, state, images).loss() + L2 / 2 * squares, state

    def errors(params: Any, state: Any, images: jax.Array) -> jax.Array:
        _, logits, wanted = outputs(params, state, images)
        return jnp.sum((jax.nn.sigmoid(logits) - wanted) ** 2, axis=1)

    return Problem(
        params,
        nothing,
        loss,
        jax.device_put(train),
        whole if full else rows,
        every_step_sees_all(size.steps) if full else epochs(len(train), size.batch_size),
        mean_over(errors, jax.device_put(test), 2000),
        {"batch_size": len(train) if full else size.batch_size, "encoder": list(size.encoder), "l2": L2},
        outputs,
        part=quarter_of if full else None,
    )


TASK = Task(
    "deep-ae",
    "Deep AE: autoencoder of eight layers, MNIST",
    "error",
    build,
    rounds=500,
    batch_size=EXAMPLES,
    heavy_ball_rate=1e-3,
    modes=MODES,
    fosi=FOSI,
    l2=L2,
    extra={"steps_a_round": FULL.steps},
)
