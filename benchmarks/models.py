"""The models the benchmarks measure on, as pure functions: parameters, one batch, a loss of both.

They are the paper's tasks in size and shape (appendix B), on made data: what is timed here does not depend on
the values. Plain JAX, so that a benchmark needs nothing beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

Params = Any
Batch = tuple[jax.Array, jax.Array]


class Problem(NamedTuple):
    """A loss with parameters and one batch to evaluate it on."""

    name: str
    params: Params
    batch: Batch
    loss_fn: Callable[[Params, Batch], jax.Array]

    @property
    def size(self) -> int:
        return sum(leaf.size for leaf in jax.tree.leaves(self.params))


def _dense(key: jax.Array, inputs: int, outputs: int) -> dict[str, jax.Array]:
    scale = inputs**-0.5
    return {"w": scale * jax.random.normal(key, (inputs, outputs)), "b": jnp.zeros(outputs)}


def _apply_dense(layer: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    return x @ layer["w"] + layer["b"]


def _cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], axis=-1)
    return -picked.mean()


def _fit_a_little(problem: Problem, steps: int, rate: float = 1e-3) -> Problem:
    """Moves off the initial plateau, where the Hessian has no outliers yet (the paper's warm-up)."""
    if steps == 0:
        return problem
    import optax

    opt = optax.adam(rate)

    @jax.jit
    def train(params: Params, batch: Batch) -> Params:
        def body(carry: Any, _: None) -> tuple[Any, None]:
            params, state = carry
            grads = jax.grad(problem.loss_fn)(params, batch)
            updates, state = opt.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), None

        return jax.lax.scan(body, (params, opt.init(params)), None, length=steps)[0][0]

    return problem._replace(params=train(problem.params, problem.batch))


def softmax_regression(warm: int = 0, batch_size: int = 1024) -> Problem:
    """LR: 784 → 10, 7,850 parameters, on clustered points."""
    keys = jax.random.split(jax.random.key(0), 3)
    labels = jax.random.randint(keys[0], (batch_size,), 0, 10)
    centres = jax.random.normal(keys[1], (10, 784))
    x = jax.nn.relu(centres[labels] + jax.random.normal(keys[2], (batch_size, 784))) / 4
    params = {"w": jnp.zeros((784, 10)), "b": jnp.zeros(10)}

    def loss_fn(params: Params, batch: Batch) -> jax.Array:
        return _cross_entropy(_apply_dense(params, batch[0]), batch[1])

    return _fit_a_little(Problem("softmax regression", params, (x, labels), loss_fn), warm)


def conv_autoencoder(warm: int = 0, batch_size: int = 32) -> Problem:
    """AE: three strided convolutions down to 128 numbers and back, on smooth images of 32 × 32."""
    keys = iter(jax.random.split(jax.random.key(1), 16))
    width, latent = 32, 128

    def conv(inputs: int, outputs: int) -> dict[str, jax.Array]:
        scale = (9 * inputs) ** -0.5
        return {"w": scale * jax.random.normal(next(keys), (3, 3, inputs, outputs)), "b": jnp.zeros(outputs)}

    params = {
        "down": [conv(3, width), conv(width, 2 * width), conv(2 * width, 2 * width)],
        "code": _dense(next(keys), 2 * 16 * width, latent),
        "spread": _dense(next(keys), latent, 2 * 16 * width),
        "up": [conv(2 * width, 2 * width), conv(2 * width, width), conv(width, 3)],
    }
    layout = ("NHWC", "HWIO", "NHWC")

    def loss_fn(params: Params, batch: Batch) -> jax.Array:
        x = batch[0]
        for layer in params["down"]:
            x = jax.nn.gelu(
                jax.lax.conv_general_dilated(x, layer["w"], (2, 2), "SAME", dimension_numbers=layout) + layer["b"]
            )
        x = _apply_dense(params["code"], x.reshape(x.shape[0], -1))
        x = jax.nn.gelu(_apply_dense(params["spread"], x)).reshape(x.shape[0], 4, 4, 2 * width)
        for i, layer in enumerate(params["up"]):
            x = jax.lax.conv_transpose(x, layer["w"], (2, 2), "SAME", dimension_numbers=layout) + layer["b"]
            x = jnp.tanh(x) if i == len(params["up"]) - 1 else jax.nn.gelu(x)
        return jnp.square(x - batch[0]).sum(axis=(1, 2, 3)).mean()

    coarse = jax.random.normal(next(keys), (batch_size, 4, 4, 3))
    images = jnp.tanh(jax.image.resize(coarse, (batch_size, 32, 32, 3), "bicubic"))
    return _fit_a_little(Problem("conv autoencoder", params, (images, images), loss_fn), warm)


def lstm(warm: int = 0, batch_size: int = 32, length: int = 128) -> Problem:
    """LM: one-hot 128 → LSTM 256 → ReLU → LSTM 256 → MLP [256, 128], 1.0M parameters."""
    vocabulary, hidden = 128, 256
    keys = iter(jax.random.split(jax.random.key(2), 8))
    params = {
        "lstm": [_dense(next(keys), vocabulary + hidden, 4 * hidden), _dense(next(keys), 2 * hidden, 4 * hidden)],
        "mlp": [_dense(next(keys), hidden, hidden), _dense(next(keys), hidden, vocabulary)],
    }

    def run(layer: dict[str, jax.Array], xs: jax.Array) -> jax.Array:
        def cell(carry: tuple[jax.Array, jax.Array], x: jax.Array) -> tuple[Any, jax.Array]:
            h, c = carry
            gates = _apply_dense(layer, jnp.concatenate([x, h], axis=-1))
            i, g, f, o = jnp.split(gates, 4, axis=-1)
            c = jax.nn.sigmoid(f + 1) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        start = jnp.zeros((xs.shape[1], hidden))
        return jax.lax.scan(cell, (start, start), xs)[1]

    def loss_fn(params: Params, batch: Batch) -> jax.Array:
        xs = jax.nn.one_hot(batch[0].T, vocabulary)
        ys = run(params["lstm"][1], jax.nn.relu(run(params["lstm"][0], xs)))
        ys = jax.nn.relu(_apply_dense(params["mlp"][0], ys))
        return _cross_entropy(_apply_dense(params["mlp"][1], ys), batch[1].T)

    # A made language: every character is a fixed function of the last, now and then a random one.
    successor = jax.random.permutation(next(keys), vocabulary)
    surprise = jax.random.bernoulli(next(keys), 0.2, (batch_size, length + 1))
    noise = jax.random.randint(next(keys), (batch_size, length + 1), 0, 65)
    characters = [noise[:, 0]]
    for t in range(1, length + 1):
        characters.append(jnp.where(surprise[:, t], noise[:, t], successor[characters[-1]]))
    text = jnp.stack(characters, axis=1)
    return _fit_a_little(Problem("LSTM", params, (text[:, :-1], text[:, 1:]), loss_fn), warm)


def mobilenet(warm: int = 0, batch_size: int = 256, classes: int = 527) -> Problem:
    """AC: MobileNetV1 with BatchNorm (statistics of the batch) on 64 × 96 log-mel pieces."""
    keys = iter(jax.random.split(jax.random.key(3), 64))
    plan = [(64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2)] + 5 * [(512, 1)] + [(1024, 2), (1024, 1)]

    def conv(size: int, inputs: int, outputs: int) -> dict[str, jax.Array]:
        scale = (2.0 / (size * size * inputs)) ** 0.5
        weight = scale * jax.random.normal(next(keys), (size, size, inputs, outputs))
        return {"w": weight, "scale": jnp.ones(outputs), "shift": jnp.zeros(outputs)}

    blocks, channels = [], 32
    for outputs, _ in plan:
        blocks.append({"depth": conv(3, 1, channels), "point": conv(1, channels, outputs)})
        channels = outputs
    params = {"stem": conv(3, 1, 32), "blocks": blocks, "head": _dense(next(keys), channels, classes)}

    def layer(p: dict[str, jax.Array], x: jax.Array, stride: int, groups: int = 1) -> jax.Array:
        x = jax.lax.conv_general_dilated(
            x,
            p["w"],
            (stride, stride),
            "SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=groups,
        )
        # E[x²] − E[x]², as flax's BatchNorm takes the variance.
        mean = x.mean(axis=(0, 1, 2))
        var = jnp.square(x).mean(axis=(0, 1, 2)) - jnp.square(mean)
        return jax.nn.relu((x - mean) * jax.lax.rsqrt(var + 1e-3) * p["scale"] + p["shift"])

    def loss_fn(params: Params, batch: Batch) -> jax.Array:
        x = layer(params["stem"], batch[0], 2)
        for block, (_, stride) in zip(params["blocks"], plan, strict=True):
            x = layer(block["depth"], x, stride, groups=x.shape[-1])
            x = layer(block["point"], x, 1)
        return _cross_entropy(_apply_dense(params["head"], x.mean(axis=(1, 2))), batch[1])

    x = jax.random.normal(next(keys), (batch_size, 96, 64, 1))
    labels = jax.random.randint(next(keys), (batch_size,), 0, classes)
    return _fit_a_little(Problem("MobileNetV1", params, (x, labels), loss_fn), warm)
