"""LR: softmax regression on MNIST, 7,850 parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from fosi.experiments.tasks import inputs
from fosi.experiments.tasks.task import Outputs, Problem, Task, cross_entropy, epochs, mean_over, rows, split_model


def build(data_dir: Path | None, download: bool, seed: int, tiny: bool) -> Problem:
    """Pixels in [0, 1], one layer."""
    train, validation, size = inputs.lr(data_dir, download, tiny)
    graph, params, state = split_model(nnx.Linear(28 * 28, 10, rngs=nnx.Rngs(seed)))

    def logits(params: Any, state: Any, images: jax.Array) -> jax.Array:
        pixels = images.reshape(len(images), -1).astype(jnp.float32) / 255
        out: jax.Array = nnx.merge(graph, params, state)(pixels)
        return out

    def loss(params: Any, state: Any, batch: Any) -> tuple[jax.Array, Any]:
        return cross_entropy(logits(params, state, batch[0]), batch[1]), state

    def outputs(params: Any, state: Any, batch: Any) -> Outputs:
        return Outputs("softmax", logits(params, state, batch[0]), batch[1])

    def correct(params: Any, state: Any, batch: Any) -> jax.Array:
        return jnp.argmax(logits(params, state, batch[0]), -1) == batch[1]

    return Problem(
        params,
        state,
        loss,
        jax.device_put(train),
        rows,
        epochs(len(train[0]), size),
        mean_over(correct, jax.device_put(validation), 2000),
        outputs=outputs,
    )


TASK = Task("lr", "LR: softmax regression, MNIST", "accuracy", build, rounds=100, batch_size=inputs.LR_BATCH_SIZE)
