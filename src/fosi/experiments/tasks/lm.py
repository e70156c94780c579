"""LM: characters of Tiny Shakespeare, two LSTMs of 256, about a million parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from fosi.experiments.tasks import inputs
from fosi.experiments.tasks.task import Problem, Task, cross_entropy, split_model

UNROLL = 16
"""Steps of time in one turn of the loop on a GPU, which waits for the host between two turns. A CPU gains nothing by
it, and compiles a minute longer."""


class Lstm(nnx.Module):
    """An LSTM whose inputs are multiplied for all times at once; flax's own does it inside the loop, time by time."""

    def __init__(self, inputs: int, width: int, rngs: nnx.Rngs) -> None:
        # Gates i, f, g, o side by side, started as flax's own.
        self.inputs = nnx.Linear(inputs, 4 * width, rngs=rngs)
        self.before = nnx.Param(nnx.initializers.orthogonal()(rngs.params(), (width, 4 * width)))

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns the outputs at all times, (batch, times, width)."""
        before = self.before[...]

        def step(carry: tuple[jax.Array, jax.Array], new: jax.Array) -> tuple[Any, jax.Array]:
            cell, out = carry
            i, f, g, o = jnp.split(new + out @ before, 4, axis=-1)
            cell = nnx.sigmoid(f) * cell + nnx.sigmoid(i) * jnp.tanh(g)
            out = nnx.sigmoid(o) * jnp.tanh(cell)
            return (cell, out), out

        nothing = jnp.zeros((len(x), len(before)))
        unroll = 1 if jax.default_backend() == "cpu" else UNROLL
        _, outs = jax.lax.scan(step, (nothing, nothing), self.inputs(x).swapaxes(0, 1), unroll=unroll)
        return outs.swapaxes(0, 1)


class Model(nnx.Module):
    """One-hot characters → LSTM → ReLU → LSTM → hidden layer → logits."""

    def __init__(self, width: int, rngs: nnx.Rngs) -> None:
        self.first = Lstm(inputs.VOCABULARY, width, rngs)
        self.second = Lstm(width, width, rngs)
        self.hidden = nnx.Linear(width, width, rngs=rngs)
        self.out = nnx.Linear(width, inputs.VOCABULARY, rngs=rngs)

    def __call__(self, characters: jax.Array) -> jax.Array:
        """Returns the logits of the next character at every place."""
        x = self.first(jax.nn.one_hot(characters, inputs.VOCABULARY))
        x = self.second(nnx.relu(x))
        return self.out(nnx.relu(self.hidden(x)))


def build(data_dir: Path | None, download: bool, seed: int, tiny: bool, batch_size: int | None = None) -> Problem:
    """Windows of 128 characters from anywhere in the text; each character is predicted from those before it."""
    text = inputs.lm(data_dir, download, tiny, batch_size)
    graph, params, state = split_model(Model(text.width, nnx.Rngs(seed)))
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
    resizes=True,
    extra={"length": inputs.LM_LENGTH, "steps_a_round": inputs.LM_STEPS_A_ROUND},
)
