"""LR: softmax regression on MNIST, 7,850 parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from fosi.experiments.tasks import inputs
from fosi.experiments.tasks.task import Outputs, Problem, Task, cross_entropy, epochs, mean_over, rows, split_model


class Regression:
    """One layer on images of bytes, as pixels in [0, 1], or on features as they are.

    Attributes:
      params: the layer before training.
      state: nothing.
    """

    def __init__(self, features: int, seed: int, precision: str | None = None) -> None:
        """Draws the layer; ``precision`` is that of its products, None for JAX's own choice."""
        layer = nnx.Linear(features, 10, precision=precision, rngs=nnx.Rngs(seed))
        self._graph, self.params, self.state = split_model(layer)

    def logits(self, params: Any, inputs: jax.Array) -> jax.Array:
        """Those of the ten classes for each of the inputs."""
        if inputs.dtype == jnp.uint8:
            inputs = inputs.astype(jnp.float32) / 255
        out: jax.Array = nnx.merge(self._graph, params, self.state)(inputs.reshape(len(inputs), -1))
        return out

    def loss(self, params: Any, state: Any, batch: Any) -> tuple[jax.Array, Any]:
        """Cross-entropy, mean over the batch."""
        return cross_entropy(self.logits(params, batch[0]), batch[1]), state

    def outputs(self, params: Any, state: Any, batch: Any) -> Outputs:
        """What the loss is made of."""
        return Outputs("softmax", self.logits(params, batch[0]), batch[1])

    def correct(self, params: Any, state: Any, batch: Any) -> jax.Array:
        """Whether the class is right, for each of the examples."""
        return jnp.argmax(self.logits(params, batch[0]), -1) == batch[1]

    def losses(self, params: Any, state: Any, batch: Any) -> jax.Array:
        """Cross-entropy of each of the examples."""
        found: jax.Array = jax.vmap(cross_entropy)(self.logits(params, batch[0]), batch[1])
        return found


def build(data_dir: Path | None, download: bool, seed: int, tiny: bool) -> Problem:
    """Pixels in [0, 1], one layer."""
    train, validation, size = inputs.lr(data_dir, download, tiny)
    model = Regression(28 * 28, seed)
    return Problem(
        model.params,
        model.state,
        model.loss,
        jax.device_put(train),
        rows,
        epochs(len(train[0]), size),
        mean_over(model.correct, jax.device_put(validation), 2000),
        outputs=model.outputs,
    )


TASK = Task("lr", "LR: softmax regression, MNIST", "accuracy", build, rounds=100, batch_size=inputs.LR_BATCH_SIZE)
