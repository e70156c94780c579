"""The quickstart's problem: scikit-learn's digits (1797 images of 8×8 pixels) and a small network."""

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

Params = list[tuple[jax.Array, jax.Array]]
"""Weights and biases, one pair a layer."""


class Batch(NamedTuple):
    """Images, one a row with pixels in [0, 1], and their labels 0 … 9."""

    images: np.ndarray
    labels: np.ndarray


class Digits(NamedTuple):
    """The data in its two parts."""

    train: Batch
    validation: Batch


LAYERS = (64, 128, 10)
# One split for every seed, so that runs with different seeds still speak about the same data.
_SPLIT_SEED = 0
_VALIDATION_SHARE = 0.2


def load() -> Digits:
    """Loads the digits from the installed scikit-learn; nothing is downloaded."""
    images, labels = load_digits(return_X_y=True)
    parts = train_test_split(
        images.astype(np.float32) / 16.0,
        labels.astype(np.int32),
        test_size=_VALIDATION_SHARE,
        random_state=_SPLIT_SEED,
        stratify=labels,
    )
    train_images, validation_images, train_labels, validation_labels = parts
    return Digits(Batch(train_images, train_labels), Batch(validation_images, validation_labels))


def batches(data: Batch, size: int, steps: int, seed: int) -> Iterator[Batch]:
    """Yields `steps` batches of `size` images, shuffled anew each epoch; the same ones for the same seed."""
    order = np.random.default_rng(seed)
    per_epoch = len(data.labels) // size
    for step in range(steps):
        position = step % per_epoch
        if position == 0:
            shuffled = order.permutation(len(data.labels))
        chosen = shuffled[position * size : (position + 1) * size]
        yield Batch(data.images[chosen], data.labels[chosen])


def init(seed: int) -> Params:
    """Draws the network's weights, scaled by 1/√(inputs)."""
    params = []
    key = jax.random.key(seed)
    for inputs, outputs in pairwise(LAYERS):
        key, draw = jax.random.split(key)
        params.append((jax.random.normal(draw, (inputs, outputs)) / np.sqrt(inputs), jnp.zeros(outputs)))
    return params


def logits(params: Params, images: jax.Array | np.ndarray) -> jax.Array:
    """Returns the network's ten scores for each image."""
    hidden = jnp.asarray(images)
    for weights, bias in params[:-1]:
        hidden = jnp.tanh(hidden @ weights + bias[None, :])
    weights, bias = params[-1]
    return hidden @ weights + bias[None, :]


def loss(params: Params, batch: Batch) -> jax.Array:
    """Returns the mean cross-entropy over the batch."""
    scores = logits(params, batch.images)
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(scores, jnp.asarray(batch.labels)))


def accuracy(params: Params, batch: Batch) -> jax.Array:
    """Returns the share of the batch's images that the network names right."""
    return jnp.mean(jnp.argmax(logits(params, batch.images), axis=-1) == batch.labels)
