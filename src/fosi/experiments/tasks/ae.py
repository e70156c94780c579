"""AE: a convolutional autoencoder of CIFAR-10, about half a million parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from fosi.experiments.data import cifar10
from fosi.experiments.tasks.task import Outputs, Problem, Task, epochs, mean_over, rows, split_model

BATCH_SIZE = 256
TRAINING = 45_000
"""Of the 50,000; the others are for validation."""


class Autoencoder(nnx.Module):
    """Three convolutions of stride 2 down to ``latent`` numbers, and back."""

    def __init__(self, channels: int, latent: int, rngs: nnx.Rngs) -> None:
        c = channels

        def conv(inputs: int, outputs: int, stride: int) -> nnx.Conv:
            return nnx.Conv(inputs, outputs, (3, 3), strides=stride, rngs=rngs)

        def up(inputs: int, outputs: int) -> nnx.ConvTranspose:
            return nnx.ConvTranspose(inputs, outputs, (3, 3), strides=(2, 2), rngs=rngs)

        self.down = nnx.List(
            [conv(3, c, 2), conv(c, c, 1), conv(c, 2 * c, 2), conv(2 * c, 2 * c, 1), conv(2 * c, 2 * c, 2)]
        )
        self.encode = nnx.Linear(4 * 4 * 2 * c, latent, rngs=rngs)
        self.decode = nnx.Linear(latent, 4 * 4 * 2 * c, rngs=rngs)
        self.up = nnx.List([up(2 * c, 2 * c), conv(2 * c, 2 * c, 1), up(2 * c, c), conv(c, c, 1)])
        self.out = up(c, 3)

    def __call__(self, images: jax.Array) -> jax.Array:
        """Returns the images as far as they went through."""
        x = images
        for layer in self.down:
            x = nnx.gelu(layer(x))
        x = nnx.gelu(self.decode(self.encode(x.reshape(len(x), -1))))
        x = x.reshape(len(x), 4, 4, -1)
        for back in self.up:
            x = nnx.gelu(back(x))
        return jnp.tanh(self.out(x))


def build(data_dir: Path | None, download: bool, seed: int, tiny: bool) -> Problem:
    """Pixels in [−1, 1]; squared error, summed over pixels, mean over images."""
    if tiny:
        images = np.random.default_rng(0).integers(0, 256, (96, 32, 32, 3), dtype=np.uint8)
        train, validation, size, channels, latent = images[:64], images[64:], 16, 4, 8
    else:
        images = cifar10.load(data_dir, download).train_images
        train, validation, size, channels, latent = images[:TRAINING], images[TRAINING:], BATCH_SIZE, 32, 128
    graph, params, state = split_model(Autoencoder(channels, latent, nnx.Rngs(seed)))

    def outputs(params: Any, state: Any, images: jax.Array) -> Outputs:
        wanted = images.astype(jnp.float32) / 127.5 - 1
        return Outputs("squared", nnx.merge(graph, params, state)(wanted), wanted)

    def errors(params: Any, state: Any, images: jax.Array) -> jax.Array:
        _, found, wanted = outputs(params, state, images)
        return jnp.sum((found - wanted) ** 2, axis=(1, 2, 3))

    def loss(params: Any, state: Any, images: jax.Array) -> tuple[jax.Array, Any]:
        return jnp.mean(errors(params, state, images)), state

    return Problem(
        params,
        state,
        loss,
        jax.device_put(train),
        rows,
        epochs(len(train), size),
        mean_over(errors, jax.device_put(validation), 500),
        outputs=outputs,
    )


TASK = Task(
    "ae",
    "AE: convolutional autoencoder, CIFAR-10",
    "loss",
    build,
    rounds=200,
    batch_size=BATCH_SIZE,
    warmup_rounds=None,
    heavy_ball_rate=0.001,
    max_lr_scale=1.0,
    clip=1.0,
)
