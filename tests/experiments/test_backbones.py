"""The frozen networks against the same networks written literally in PyTorch, BatchNorm and all, on random weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fosi.experiments.data.imagenet import Pretrained
from fosi.experiments.tasks import backbones
from fosi.experiments.tasks.backbones import LITE0, Conv, Stage

# Every kind of block: with and without expansion, kernels 3 and 5, strides 1 and 2, with and without a way around.
STAGES = (Stage(1, 3, 1, 8, 1), Stage(3, 3, 2, 10, 2), Stage(2, 5, 2, 10, 2), Stage(2, 5, 1, 12, 1))


def norm(x, arrays, name, eps):
    parts = (arrays[f"{name}.{part}"] for part in ("running_mean", "running_var", "weight", "bias"))
    return F.batch_norm(x, *parts, training=False, eps=eps)


def same(x, weight, stride=1, groups=1):
    """As TensorFlow pads: as many rows and columns as it takes, the odd one below and to the right."""
    pads = []
    for size, kernel in ((x.shape[3], weight.shape[3]), (x.shape[2], weight.shape[2])):
        outputs = (size + stride - 1) // stride
        total = max((outputs - 1) * stride + kernel - size, 0)
        pads += [total // 2, total - total // 2]
    return F.conv2d(F.pad(x, pads), weight, stride=stride, groups=groups)


def lite_in_torch(arrays, images, stages):
    a = {name: torch.tensor(value) for name, value in arrays.items()}
    x = (torch.tensor(images).permute(0, 3, 1, 2) - 127) / 128
    x = F.relu6(norm(same(x, a["_conv_stem.weight"], 2), a, "_bn0", 1e-3))
    index = 0
    for expand, _, stage_stride, channels, repeats in stages:
        for repeat in range(repeats):
            stride = stage_stride if repeat == 0 else 1
            block, inputs = f"_blocks.{index}", x
            if expand != 1:
                x = F.relu6(norm(F.conv2d(x, a[f"{block}._expand_conv.weight"]), a, f"{block}._bn0", 1e-3))
            x = same(x, a[f"{block}._depthwise_conv.weight"], stride, groups=x.shape[1])
            x = F.relu6(norm(x, a, f"{block}._bn1", 1e-3))
            x = norm(F.conv2d(x, a[f"{block}._project_conv.weight"]), a, f"{block}._bn2", 1e-3)
            if stride == 1 and inputs.shape[1] == channels:
                x = x + inputs
            index += 1
    x = F.relu6(norm(F.conv2d(x, a["_conv_head.weight"]), a, "_bn1", 1e-3))
    return F.adaptive_avg_pool2d(x, 1).flatten(1).numpy()


def resnet_in_torch(arrays, images):
    a = {name: torch.tensor(value) for name, value in arrays.items()}
    mean, deviation = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    x = ((torch.tensor(images) / 255 - mean) / deviation).permute(0, 3, 1, 2)
    x = F.relu(norm(F.conv2d(x, a["conv1.weight"], stride=2, padding=3), a, "bn1", 1e-5))
    x = F.max_pool2d(x, 3, stride=2, padding=1)
    for layer, block in [(1, 0), (1, 1), (2, 0), (2, 1), (3, 0), (3, 1), (4, 0), (4, 1)]:
        name, inputs, stride = f"layer{layer}.{block}", x, 2 if layer != 1 and block == 0 else 1
        x = F.conv2d(x, a[f"{name}.conv1.weight"], stride=stride, padding=1)
        x = F.relu(norm(x, a, f"{name}.bn1", 1e-5))
        x = norm(F.conv2d(x, a[f"{name}.conv2.weight"], padding=1), a, f"{name}.bn2", 1e-5)
        if stride == 2:
            inputs = F.conv2d(inputs, a[f"{name}.downsample.0.weight"], stride=2)
            inputs = norm(inputs, a, f"{name}.downsample.1", 1e-5)
        x = F.relu(x + inputs)
    return F.adaptive_avg_pool2d(x, 1).flatten(1).numpy()


def resnet_arrays(width):
    rng, arrays = np.random.default_rng(2), {}

    def add(conv, norm, inputs, outputs, kernel):
        arrays[f"{conv}.weight"] = rng.normal(0, (2 / (inputs * kernel**2)) ** 0.5, (outputs, inputs, kernel, kernel))
        arrays[f"{norm}.weight"], arrays[f"{norm}.bias"] = rng.uniform(0.5, 1.5, outputs), rng.normal(0, 0.3, outputs)
        arrays[f"{norm}.running_mean"] = rng.normal(0, 0.3, outputs)
        arrays[f"{norm}.running_var"] = rng.uniform(0.1, 2, outputs)

    add("conv1", "bn1", 3, width, 7)
    for layer in (1, 2, 3, 4):
        outputs = width * 2 ** (layer - 1)
        inputs = width if layer == 1 else outputs // 2
        for block in (0, 1):
            name = f"layer{layer}.{block}"
            add(f"{name}.conv1", f"{name}.bn1", inputs if block == 0 else outputs, outputs, 3)
            add(f"{name}.conv2", f"{name}.bn2", outputs, outputs, 3)
        if layer > 1:
            add(f"layer{layer}.0.downsample.0", f"layer{layer}.0.downsample.1", inputs, outputs, 1)
    arrays["fc.weight"] = np.zeros((10, outputs))
    return {name: value.astype(np.float32) for name, value in arrays.items()}


def pixels(height, width):
    return np.random.default_rng(3).uniform(0, 255, (3, height, width, 3)).astype(np.float32)


@pytest.mark.parametrize(("height", "width"), [(32, 32), (33, 22)])
def test_efficientnet_lite(height, width):
    arrays, images = backbones.untrained(STAGES, 8, 20, 1), pixels(height, width)
    made = backbones.efficientnet_lite(arrays, STAGES)
    found = jax.jit(made.apply)(made.weights, images)
    assert found.shape == (3, made.features) == (3, 20)
    np.testing.assert_allclose(found, lite_in_torch(arrays, images, STAGES), rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize(("height", "width"), [(64, 64), (49, 70)])
def test_resnet(height, width):
    arrays, images = resnet_arrays(6), pixels(height, width)
    made = backbones.resnet(arrays)
    found = jax.jit(made.apply)(made.weights, images)
    assert found.shape == (3, made.features) == (3, 48)
    np.testing.assert_allclose(found, resnet_in_torch(arrays, images), rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("way", [backbones.by_taps, backbones.by_groups])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("kernel", [3, 5])
def test_depthwise_convolution_in_its_two_ways(kernel, stride, way):
    rng = np.random.default_rng(4)
    x = rng.normal(size=(2, 8, 9, 6)).astype(np.float32)
    conv = Conv(jnp.asarray(rng.normal(size=(kernel, kernel, 1, 6)), jnp.float32), jnp.full((1, 1, 1, 6), 0.5))
    weight = torch.tensor(np.array(conv.kernel)).permute(3, 2, 0, 1)
    wanted = same(torch.tensor(x).permute(0, 3, 1, 2), weight, stride, groups=6).permute(0, 2, 3, 1).numpy() + 0.5
    found = jax.jit(lambda x, conv: way(x, conv, stride, "SAME"))(x, conv)
    np.testing.assert_allclose(found, wanted, atol=1e-5)
    around = ((kernel // 2, kernel // 2),) * 2
    wanted = F.conv2d(torch.tensor(x).permute(0, 3, 1, 2), weight, stride=stride, padding=kernel // 2, groups=6)
    found = jax.jit(lambda x, conv: way(x, conv, stride, around))(x, conv)
    np.testing.assert_allclose(found, wanted.permute(0, 2, 3, 1).numpy() + 0.5, atol=1e-5)


def test_networks_as_published():
    lite = backbones.load(Pretrained("efficientnet_lite0", backbones.untrained(LITE0, 32, 1280, 0)))
    # The published 4,652,008 less the layer for ImageNet's classes; BatchNorm's two arrays are one now.
    biases = sum(conv.bias.size for conv in lite.weights.values())
    assert sum(conv.kernel.size for conv in lite.weights.values()) + 2 * biases == 4_652_008 - 1281 * 1000
    assert lite.features == 1280 and len(lite.weights) == 49 and lite.name == "efficientnet_lite0"
    resnet = backbones.load(Pretrained("resnet18", resnet_arrays(64)))
    biases = sum(conv.bias.size for conv in resnet.weights.values())
    assert sum(conv.kernel.size for conv in resnet.weights.values()) + 2 * biases == 11_689_512 - 513 * 1000
    assert resnet.features == 512 and len(resnet.weights) == 20 and resnet.name == "resnet18"
    shape = jax.eval_shape(lite.apply, lite.weights, jax.ShapeDtypeStruct((2, 128, 128, 3), jnp.float32))
    assert shape.shape == (2, 1280)
