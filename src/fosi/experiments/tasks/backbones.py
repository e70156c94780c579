"""Pretrained image networks up to their last pooling, frozen: EfficientNet-Lite0 and ResNet-18, images NHWC."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from fosi.experiments.data.imagenet import Pretrained

Arrays = Mapping[str, NDArray[Any]]
Padding = str | Sequence[tuple[int, int]]


class Conv(NamedTuple):
    """A convolution and the BatchNorm after it: kernel (height, width, inputs a group, outputs), bias (1, 1, 1, N)."""

    kernel: jax.Array
    bias: jax.Array


Weights = dict[str, Conv]


class Backbone(NamedTuple):
    """A frozen network.

    Attributes:
      name: of the network.
      features: how many numbers it makes of an image.
      weights: its arrays, by the names of the file they are from.
      apply: apply(weights, images) -> features (N, features), of images (N, height, width, 3) with pixels 0 … 255.
    """

    name: str
    features: int
    weights: Weights
    apply: Callable[[Weights, jax.Array], jax.Array]


class Stage(NamedTuple):
    """Blocks of an EfficientNet: the first has the stride, all others 1."""

    expand: int
    kernel: int
    stride: int
    channels: int
    repeats: int


LITE0 = (
    Stage(1, 3, 1, 16, 1),
    Stage(6, 3, 2, 24, 2),
    Stage(6, 5, 2, 40, 2),
    Stage(6, 3, 2, 80, 3),
    Stage(6, 5, 1, 112, 3),
    Stage(6, 5, 2, 192, 4),
    Stage(6, 3, 1, 320, 1),
)


# The BatchNorm after each convolution, by the last parts of their names.
_LITE_NORMS = {
    "_conv_stem": "_bn0",
    "_expand_conv": "_bn0",
    "_depthwise_conv": "_bn1",
    "_project_conv": "_bn2",
    "_conv_head": "_bn1",
}
_RESNET_NORMS = {"conv1": "bn1", "conv2": "bn2", "0": "1"}
_RESNET_MEAN = np.array([0.485, 0.456, 0.406], np.float32).reshape(1, 1, 1, 3)
_RESNET_DEVIATION = np.array([0.229, 0.224, 0.225], np.float32).reshape(1, 1, 1, 3)


def load(pretrained: Pretrained) -> Backbone:
    """Returns the network of a state dict."""
    return {"resnet18": resnet, "efficientnet_lite0": efficientnet_lite}[pretrained.network](pretrained.arrays)


def efficientnet_lite(arrays: Arrays, stages: Sequence[Stage] = LITE0) -> Backbone:
    """EfficientNet-Lite: no squeeze-and-excite, ReLU6; pixels and padding as in TensorFlow, where it was trained."""
    strides = [stage.stride if i == 0 else 1 for stage in stages for i in range(stage.repeats)]
    weights = fold(arrays, _LITE_NORMS, 1e-3)

    def apply(weights: Weights, images: jax.Array) -> jax.Array:
        x = jax.nn.relu6(convolve((images - 127) / 128, weights["_conv_stem"], 2))
        for i, stride in enumerate(strides):
            before, name = x, f"_blocks.{i}."
            if name + "_expand_conv" in weights:
                x = jax.nn.relu6(convolve(x, weights[name + "_expand_conv"]))
            x = jax.nn.relu6(convolve(x, weights[name + "_depthwise_conv"], stride))
            x = convolve(x, weights[name + "_project_conv"])
            if stride == 1 and x.shape == before.shape:
                x = x + before
        return jnp.mean(jax.nn.relu6(convolve(x, weights["_conv_head"])), axis=(1, 2))

    return Backbone("efficientnet_lite0", weights["_conv_head"].kernel.shape[-1], weights, apply)


def resnet(arrays: Arrays) -> Backbone:
    """ResNet-18: four layers of two blocks; torchvision's pixels and padding."""
    weights = fold(arrays, _RESNET_NORMS, 1e-5)

    def apply(weights: Weights, images: jax.Array) -> jax.Array:
        def conv(x: jax.Array, name: str, stride: int = 1) -> jax.Array:
            around = weights[name].kernel.shape[0] // 2
            return convolve(x, weights[name], stride, ((around, around), (around, around)))

        x = jax.nn.relu(conv((images / 255 - _RESNET_MEAN) / _RESNET_DEVIATION, "conv1", 2))
        around = ((0, 0), (1, 1), (1, 1), (0, 0))
        x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), around)
        for layer in (1, 2, 3, 4):
            for block in (0, 1):
                name, stride = f"layer{layer}.{block}.", 2 if layer > 1 and block == 0 else 1
                y = conv(jax.nn.relu(conv(x, name + "conv1", stride)), name + "conv2")
                skip = conv(x, name + "downsample.0", stride) if name + "downsample.0" in weights else x
                x = jax.nn.relu(y + skip)
        return jnp.mean(x, axis=(1, 2))

    return Backbone("resnet18", weights["layer4.1.conv2"].kernel.shape[-1], weights, apply)


def convolve(x: jax.Array, conv: Conv, stride: int = 1, padding: Padding = "SAME") -> jax.Array:
    """A convolution; a depthwise one where the kernel has one input."""
    depthwise = conv.kernel.shape[2] == 1
    return (by_taps if depthwise and jax.default_backend() == "cpu" else by_groups)(x, conv, stride, padding)


def by_groups(x: jax.Array, conv: Conv, stride: int, padding: Padding) -> jax.Array:
    """A convolution as XLA has it."""
    out = jax.lax.conv_general_dilated(
        x,
        conv.kernel,
        (stride, stride),
        padding,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=x.shape[-1] // conv.kernel.shape[2],
    )
    return out + conv.bias


def by_taps(x: jax.Array, conv: Conv, stride: int, padding: Padding) -> jax.Array:
    """A depthwise convolution as a sum over the kernel's entries, which XLA does 3 to 40 times faster on a CPU."""
    height, width = conv.kernel.shape[:2]
    if isinstance(padding, str):
        padding = jax.lax.padtype_to_pads(x.shape[1:3], (height, width), (stride, stride), padding)
    x = jnp.pad(x, ((0, 0), *padding, (0, 0)))
    rows, columns = x.shape[1] - height + 1, x.shape[2] - width + 1
    parts = (
        x[:, i : i + rows : stride, j : j + columns : stride] * conv.kernel[None, None, i, j]
        for i in range(height)
        for j in range(width)
    )
    return sum(parts, conv.bias)


def fold(arrays: Arrays, norms: Mapping[str, str], eps: float) -> Weights:
    """Returns the convolutions of a state dict, each with the BatchNorm after it.

    With its statistics frozen BatchNorm is a factor and a shift for each channel. In the convolution's kernel and bias
    it costs nothing, and two arrays are left of five.
    """
    weights = {}
    for key in arrays:
        name = key.removesuffix(".weight")
        where, dot, layer = name.rpartition(".")
        if name == key or layer not in norms:
            continue
        norm = where + dot + norms[layer] + "."
        gain, shift, mean, variance = (
            arrays[norm + part].astype(np.float64) for part in ("weight", "bias", "running_mean", "running_var")
        )
        factor = gain / np.sqrt(variance + eps)
        kernel = arrays[key].transpose(2, 3, 1, 0) * factor  # PyTorch's is (outputs, inputs, height, width)
        bias = (shift - mean * factor).reshape(1, 1, 1, -1)
        weights[name] = Conv(jnp.asarray(kernel, jnp.float32), jnp.asarray(bias, jnp.float32))
    return weights


def untrained(stages: Sequence[Stage], stem: int, head: int, seed: int) -> dict[str, NDArray[np.float32]]:
    """Returns the state dict of an EfficientNet-Lite of any size with random numbers in it."""
    rng = np.random.default_rng(seed)
    arrays: dict[str, NDArray[np.float32]] = {}

    def add(name: str, inputs: int, outputs: int, kernel: int) -> None:
        where, dot, layer = name.rpartition(".")
        norm = where + dot + _LITE_NORMS[layer]
        made = {
            name + ".weight": rng.normal(0, (2 / (inputs * kernel**2)) ** 0.5, (outputs, inputs, kernel, kernel)),
            norm + ".weight": rng.uniform(0.8, 1.2, outputs),
            norm + ".bias": rng.normal(0, 0.1, outputs),
            norm + ".running_mean": rng.normal(0, 0.1, outputs),
            norm + ".running_var": rng.uniform(0.5, 1.5, outputs),
        }
        arrays.update({key: value.astype(np.float32) for key, value in made.items()})

    add("_conv_stem", 3, stem, 3)
    width, blocks = stem, (stage for stage in stages for _ in range(stage.repeats))
    for i, stage in enumerate(blocks):
        inner = width * stage.expand
        if stage.expand > 1:
            add(f"_blocks.{i}._expand_conv", width, inner, 1)
        add(f"_blocks.{i}._depthwise_conv", 1, inner, stage.kernel)
        add(f"_blocks.{i}._project_conv", inner, stage.channels, 1)
        width = stage.channels
    add("_conv_head", width, head, 1)
    return arrays
