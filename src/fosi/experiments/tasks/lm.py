"""LM: characters of Tiny Shakespeare, two LSTMs of 256, about a million parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from fosi.experiments.tasks import inputs
from fosi.experiments.tasks.task import Problem, Task, cross_entropy, split_model


class Lstm(nnx.Module):
    """One-hot characters → LSTM → ReLU → LSTM → hidden layer → logits."""

    def __init__(self, width: int, rngs: nnx.Rngs) -> None:
        self.first = nnx.RNN(nnx.OptimizedLSTMCell(inputs.VOCABULARY, width, rngs=rngs), rngs=rngs)
        self.second = nnx.RNN(nnx.OptimizedLSTMCell(width, width, rngs=rngs), rngs=rngs)
        self.hidden = nnx.Linear(width, width, rngs=rngs)
        self.out = nnx.Linear(width, inputs.VOCABULARY, rngs=rngs)

    def __call__(self, characters: jax.Array) -> jax.Array:
        """Returns the logits of the next character at every place."""
        nothing = jnp.zeros((len(characters), self.hidden.in_features))
        x = self.first(jax.nn.one_hot(characters, inputs.VOCABULARY), initial_carry=(nothing, nothing))
        x = self.second(nnx.relu(x), initial_carry=(nothing, nothing))
        return self.out(nnx.relu(self.hidden(x)))


def build(data_dir: Path | None, download: bool, seed: int, tiny: bool) -> Problem:
    """Windows of 128 characters from anywhere in the text; each character is predicted from those before it."""
    text = inputs.lm(data_dir, download, tiny)
    graph, params, state = split_model(Lstm(text.width, nnx.Rngs(seed)))
    train = jax.device_put(text.train)

    def batch(data: jax.Array, starts: jax.Array) -> jax.Array:
        return data[starts[:, None] + jnp.arange(text.length + 1)[None]]

    def order(key: jax.Array) -> jax.Array:
        return jax.random.randint(key, (text.steps, text.batch_size), 0, len(text.train) - text.length)

    def loss(params: Any, state: Any, windows: jax.Array) -> tuple[jax.Array, Any]:
        logits = nnx.merge(graph, params, state)(windows[:, :-1])
        return cross_entropy(logits, windows[:, 1:]), state

    held_out = jax.device_put(text.windows)

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
    batch_size=inputs.LM_BATCH_SIZE,
    warmup_rounds=None,
    extra={"length": inputs.LM_LENGTH, "steps_a_round": inputs.LM_STEPS_A_ROUND},
)
