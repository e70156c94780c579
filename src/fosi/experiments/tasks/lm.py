"""LM: characters of Tiny Shakespeare, two LSTMs of 256, about a million parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from fosi.experiments.data import shakespeare
from fosi.experiments.tasks.task import Problem, Task, cross_entropy, split_model

BATCH_SIZE, LENGTH = 32, 128
VOCABULARY = 128
"""ASCII."""
STEPS_A_ROUND = 100


class Lstm(nnx.Module):
    """One-hot characters → LSTM → ReLU → LSTM → hidden layer → logits."""

    def __init__(self, width: int, rngs: nnx.Rngs) -> None:
        self.first = nnx.RNN(nnx.OptimizedLSTMCell(VOCABULARY, width, rngs=rngs), rngs=rngs)
        self.second = nnx.RNN(nnx.OptimizedLSTMCell(width, width, rngs=rngs), rngs=rngs)
        self.hidden = nnx.Linear(width, width, rngs=rngs)
        self.out = nnx.Linear(width, VOCABULARY, rngs=rngs)

    def __call__(self, characters: jax.Array) -> jax.Array:
        """Returns the logits of the next character at every place."""
        nothing = jnp.zeros((len(characters), self.hidden.in_features))
        x = self.first(jax.nn.one_hot(characters, VOCABULARY), initial_carry=(nothing, nothing))
        x = self.second(nnx.relu(x), initial_carry=(nothing, nothing))
        return self.out(nnx.relu(self.hidden(x)))


def build(data_dir: Path | None, download: bool, seed: int, tiny: bool) -> Problem:
    """Windows of 128 characters from anywhere in the text; each character is predicted from those before it."""
    if tiny:
        text = shakespeare.split(np.tile(np.arange(64, 128, dtype=np.uint8), 40))
        size, length, width, steps = 4, 16, 16, 10
    else:
        text = shakespeare.load(data_dir, download)
        size, length, width, steps = BATCH_SIZE, LENGTH, 256, STEPS_A_ROUND
    graph, params, state = split_model(Lstm(width, nnx.Rngs(seed)))
    train = jax.device_put(text.train)

    def batch(data: jax.Array, starts: jax.Array) -> jax.Array:
        return data[starts[:, None] + jnp.arange(length + 1)[None]]

    def order(key: jax.Array) -> jax.Array:
        return jax.random.randint(key, (steps, size), 0, len(text.train) - length)

    def loss(params: Any, state: Any, windows: jax.Array) -> tuple[jax.Array, Any]:
        logits = nnx.merge(graph, params, state)(windows[:, :-1])
        return cross_entropy(logits, windows[:, 1:]), state

    # All of the validation text, cut into windows.
    count = (len(text.validation) - 1) // length
    windows = np.arange(count)[:, None] * length + np.arange(length + 1)
    held_out = jax.device_put(text.validation[windows])

    @jax.jit
    def validate(params: Any, state: Any, windows: jax.Array) -> jax.Array:
        return loss(params, state, windows)[0]

    return Problem(params, state, loss, train, batch, order, lambda p, s: validate(p, s, held_out))


TASK = Task(
    "lm",
    "LM: characters of Tiny Shakespeare, LSTM",
    "loss",
    build,
    rounds=100,
    batch_size=BATCH_SIZE,
    warmup_rounds=None,
    extra={"length": LENGTH, "steps_a_round": STEPS_A_ROUND},
)
