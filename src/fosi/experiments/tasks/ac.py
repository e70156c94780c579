"""AC: sounds, MobileNetV1 on log-mel spectrograms of one second, 3.3 million parameters (3.7 million on AudioSet)."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from numpy.typing import NDArray

from fosi.experiments.data import audioset, esc50
from fosi.experiments.data.files import folder
from fosi.experiments.tasks.task import Outputs, Problem, Task, cross_entropy, epochs, mean_over, rows, split_model

_log = logging.getLogger(__name__)

BATCH_SIZE = 256
MODES = ("esc50", "audioset")
FIRST = 32
BLOCKS = ((64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), *((512, 1),) * 5, (1024, 2), (1024, 1))
"""MobileNetV1 of width 1: channels and stride of each block."""
MOMENTUM = 0.9
"""Of BatchNorm's statistics. They follow the last ten steps or so: an epoch has 31, all of training 3,100."""
EPSILON = 1e-3
"""Of BatchNorm, as the published MobileNetV1 has it."""


class Normalized(nnx.Module):
    """A convolution without bias → BatchNorm → ReLU."""

    def __init__(
        self, inputs: int, outputs: int, kernel: int, rngs: nnx.Rngs, *, stride: int = 1, groups: int = 1
    ) -> None:
        self.conv = nnx.Conv(
            inputs,
            outputs,
            (kernel, kernel),
            strides=stride,
            feature_group_count=groups,
            use_bias=False,
            rngs=rngs,
        )
        self.norm = nnx.BatchNorm(outputs, momentum=MOMENTUM, epsilon=EPSILON, rngs=rngs)

    def __call__(self, x: jax.Array, training: bool) -> jax.Array:
        """In training the batch's own statistics count, and the running ones move."""
        return nnx.relu(self.norm(self.conv(x), use_running_average=not training))


class MobileNet(nnx.Module):
    """MobileNetV1: a convolution, blocks of a depthwise and a pointwise one, mean over places, one layer."""

    def __init__(self, first: int, blocks: Sequence[tuple[int, int]], labels: int, rngs: nnx.Rngs) -> None:
        layers, inputs = [Normalized(1, first, 3, rngs, stride=2)], first
        for outputs, stride in blocks:
            layers.append(Normalized(inputs, inputs, 3, rngs, stride=stride, groups=inputs))
            layers.append(Normalized(inputs, outputs, 1, rngs))
            inputs = outputs
        self.layers = nnx.List(layers)
        self.out = nnx.Linear(inputs, labels, rngs=rngs)

    def __call__(self, pieces: jax.Array, training: bool) -> jax.Array:
        """Returns the logits (N, labels) of spectrograms (N, frames, bands)."""
        x = pieces[..., None]
        for layer in self.layers:
            x = layer(x, training)
        logits: jax.Array = self.out(x.mean((1, 2)))
        return logits


class Sounds(NamedTuple):
    """Spectrograms with their labels: (N,) classes, or (N, labels) of True and False where each may have several."""

    pieces: NDArray[np.float32]
    labels: NDArray[Any]


def build(
    data_dir: Path | None,
    download: bool,
    seed: int,
    tiny: bool,
    mode: str | None = None,
    batch_size: int | None = None,
) -> Problem:
    """Pieces less the training set's mean, over its standard deviation: one number each.

    ESC-50: cross-entropy, and the share of pieces whose class is right. AudioSet: sigmoid cross-entropy, mean over
    pieces and labels, and the share of pieces that have the label predicted first. BatchNorm uses the batch's
    statistics in the loss, the running ones in the metric. With ``batch_size`` an epoch has the steps that come nearest
    to all pieces: two of 4,096 see the 8,000 of ESC-50, where one would leave out half of them.
    """
    mode = mode or MODES[0]
    if mode not in MODES:
        raise ValueError(f"mode is {mode!r}; give one of {', '.join(MODES)}")
    train, validation = _made(mode) if tiny else _read(mode, folder(data_dir).resolve(), download)
    size, first, blocks = (16, 8, ((16, 2),)) if tiny else (BATCH_SIZE, FIRST, BLOCKS)
    several = train.labels.ndim == 2
    count = train.labels.shape[1] if several else int(train.labels.max()) + 1
    graph, params, state = split_model(MobileNet(first, blocks, count, nnx.Rngs(seed)))
    mean, deviation = moments(train.pieces)

    def apply(params: Any, state: Any, pieces: jax.Array, training: bool) -> tuple[jax.Array, Any]:
        model = nnx.merge(graph, params, state, copy=True)  # a copy, because the statistics are written to
        logits = model((pieces - mean) / deviation, training)
        return logits, split_model(model)[2]

    def loss(params: Any, state: Any, batch: Any) -> tuple[jax.Array, Any]:
        pieces, labels = batch
        logits, state = apply(params, state, pieces, True)
        if several:
            return jnp.mean(optax.sigmoid_binary_cross_entropy(logits, labels)), state
        return cross_entropy(logits, labels), state

    def outputs(params: Any, state: Any, batch: Any) -> Outputs:
        pieces, labels = batch
        return Outputs("sigmoid" if several else "softmax", apply(params, state, pieces, True)[0], labels)

    def correct(params: Any, state: Any, batch: Any) -> jax.Array:
        pieces, labels = batch
        best = jnp.argmax(apply(params, state, pieces, False)[0], -1)
        return jnp.take_along_axis(labels, best[:, None], 1)[:, 0] if several else best == labels

    return Problem(
        params,
        state,
        loss,
        jax.device_put(tuple(train)),
        rows,
        epochs(len(train.pieces), batch_size or size, nearest=batch_size is not None),
        mean_over(correct, jax.device_put(tuple(validation)), 500),
        outputs=outputs,
    )


def moments(pieces: NDArray[np.float32], chunk: int = 1000) -> tuple[float, float]:
    """Returns mean and standard deviation of all values, in float64 a chunk at a time: the data may be gigabytes."""
    total, squares = 0.0, 0.0
    for start in range(0, len(pieces), chunk):
        values = pieces[start : start + chunk].astype(np.float64)
        total, squares = total + float(values.sum()), squares + float((values**2).sum())
    mean = total / pieces.size
    return mean, float(np.sqrt(squares / pieces.size - mean**2))


@lru_cache(maxsize=1)
def _read(mode: str, data_dir: Path, download: bool) -> tuple[Sounds, Sounds]:
    """Training and validation data; kept, because decoding takes longer than a seed's or a batch size's own work."""
    if mode == "esc50":
        train, validation = esc50.load(data_dir, download).split()
        return Sounds(train.pieces, train.labels), Sounds(validation.pieces, validation.labels)
    found = audioset.load(data_dir)
    for name, part in (("training", found.train), ("evaluation", found.evaluation)):
        if part.missing or part.unreadable:  # AudioSet loses clips all the time
            _log.warning("AudioSet, %s: %d clips are missing, %d cannot be read", name, part.missing, part.unreadable)
    return Sounds(found.train.pieces, found.train.labels), Sounds(found.evaluation.pieces, found.evaluation.labels)


def _made(mode: str) -> tuple[Sounds, Sounds]:
    """Noise with stripes, in time or in frequency, in both or in none, which is the label; or that one and the next."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 4, 160)
    pieces = rng.normal(-3, 1, (160, 16, 16)).astype(np.float32)
    place = np.arange(16)
    stripes = [(-1) ** (place[:, None] * (label & 1) + place[None] * (label >> 1)) for label in range(4)]
    pieces += np.stack(stripes).astype(np.float32)[labels]
    hot = np.eye(4, dtype=np.bool_)[labels]
    known = hot | np.roll(hot, 1, axis=1) if mode == "audioset" else labels.astype(np.uint8)
    return Sounds(pieces[:128], known[:128]), Sounds(pieces[128:], known[128:])


TASK = Task(
    "ac",
    "AC: audio classification, MobileNetV1",
    "accuracy",
    build,
    rounds=100,
    batch_size=BATCH_SIZE,
    warmup_rounds=1,
    heavy_ball_rate=0.1,
    max_lr_scale=3.0,
    modes=MODES,
    resizes=True,
    extra={"batchnorm_momentum": MOMENTUM, "batchnorm_epsilon": EPSILON},
)
