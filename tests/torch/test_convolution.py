"""Convolutions inside a refresh: torch's own values and second derivatives, without a kernel for every group."""

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from fosi.torch import convolution, estimate_spectrum
from fosi.torch.curvature import Hessian
from fosi.torch.isolation import Isolation

CASES = {
    "plain": (nn.Conv2d, {"kernel_size": 3, "padding": 1}),
    "strided": (nn.Conv2d, {"kernel_size": (3, 2), "stride": (2, 1), "padding": (1, 0), "bias": False}),
    "dilated": (nn.Conv2d, {"kernel_size": 2, "dilation": 2}),
    "grouped": (nn.Conv2d, {"kernel_size": 3, "groups": 2, "stride": 2, "padding": 1}),
    "depthwise": (nn.Conv2d, {"kernel_size": 3, "groups": 4}),
    "same": (nn.Conv2d, {"kernel_size": 3, "padding": "same"}),
    "circular": (nn.Conv2d, {"kernel_size": 3, "padding": 1, "padding_mode": "circular"}),
    "line": (nn.Conv1d, {"kernel_size": 3, "groups": 2}),
    "volume": (nn.Conv3d, {"kernel_size": 2}),
    "transposed": (nn.ConvTranspose2d, {"kernel_size": 3, "stride": 2, "output_padding": 1, "padding": 1}),
    "transposed grouped": (nn.ConvTranspose1d, {"kernel_size": 3, "groups": 4}),
}


def _problem(case, batched=True):
    kind, settings = CASES[case]
    torch.manual_seed(0)
    # Two layers with a bend between them: the Hessian then has blocks of weights with weights and with activations.
    first, second = kind(4, 4, **settings).double(), kind(4, 4, **settings).double()
    x = torch.randn(*([2] if batched else []), 4, *[7] * (first.weight.ndim - 2), dtype=torch.float64)
    params = [*first.parameters(), *second.parameters()]
    return params, lambda: (torch.tanh(second(torch.tanh(first(x)))) ** 2).sum()


def _by_torch(loss, params, vectors):
    grads = torch.autograd.grad(loss(), params, create_graph=True)
    return torch.autograd.grad(grads, params, vectors)


@pytest.fixture
def as_on_cuda(monkeypatch):
    """One group is a case for ours too."""
    plain = convolution._plain
    monkeypatch.setattr(convolution, "_plain", lambda x, weight, groups: plain(x, weight, max(groups, 2)))


@pytest.mark.usefixtures("as_on_cuda")
@pytest.mark.parametrize("batched", [True, False], ids=["batch", "one"])
@pytest.mark.parametrize("case", CASES)
def test_products_are_those_of_torchs_own_derivatives(case, batched):
    params, loss = _problem(case, batched)
    vectors = [torch.randn_like(p) for p in params]
    expected = _by_torch(loss, params, vectors)
    with Isolation(params):
        value = loss()
        products = Hessian(value, params)(vectors)
    torch.testing.assert_close(value, loss(), rtol=1e-12, atol=1e-12)
    for product, right in zip(products, expected, strict=True):
        torch.testing.assert_close(product, right, rtol=1e-9, atol=1e-10)


def test_one_group_on_a_cpu_is_left_to_torch():
    x, weight = torch.randn(2, 4, 5, 5), torch.randn(4, 4, 3, 3)
    assert convolution.CONVOLUTIONS[torch.conv2d](x, weight) is None
    assert convolution.CONVOLUTIONS[torch.conv2d](x, weight[:, :2], groups=2) is not None


@pytest.mark.usefixtures("as_on_cuda")
@pytest.mark.parametrize("case", ["plain", "depthwise"])
def test_a_loss_with_batched_derivatives_in_it(case):
    kind, settings = CASES[case]
    torch.manual_seed(0)
    layer = kind(4, 4, **settings).double()
    params = list(layer.parameters())
    x = torch.randn(2, 4, 5, 5, dtype=torch.float64)

    def loss():
        inputs = x.clone().requires_grad_()
        out = torch.tanh(layer(inputs)).sum((0, 2, 3))
        unit = torch.eye(4, dtype=torch.float64)
        (slopes,) = torch.autograd.grad(out, inputs, unit, create_graph=True, is_grads_batched=True)
        return slopes.square().mean()

    vectors = [torch.randn_like(p) for p in params]
    expected = _by_torch(loss, params, vectors)
    with Isolation(params):
        found = Hessian(loss(), params)(vectors)
    for product, right in zip(found, expected, strict=True):
        torch.testing.assert_close(product, right, rtol=1e-9, atol=1e-10)


@pytest.mark.usefixtures("as_on_cuda")
@pytest.mark.parametrize("case", ["plain", "depthwise", "transposed"])
def test_activation_checkpoints(case):
    """They run the layers again where torch's own are not replaced, and compare what is saved."""
    kind, settings = CASES[case]
    torch.manual_seed(0)
    model = nn.Sequential(kind(4, 4, **settings), nn.BatchNorm2d(4), nn.Tanh(), nn.Flatten()).double()
    x = torch.randn(2, 4, 5, 5, dtype=torch.float64)
    model.append(nn.LayerNorm(model(x).shape[1:], dtype=torch.float64))
    params = list(model.parameters())
    vectors = [torch.randn_like(p) for p in params]
    products = []
    for run in (model, lambda x: checkpoint(model, x, use_reentrant=False)):
        with Isolation(params, model):
            products.append(Hessian(run(x).pow(3).sum(), params)(vectors))
    for product, right in zip(*products, strict=True):
        torch.testing.assert_close(product, right, rtol=1e-9, atol=1e-10)


@pytest.mark.usefixtures("as_on_cuda")
def test_complex_and_forward_mode_convolutions_are_left_to_torch():
    x = torch.randn(2, 4, 5, 5, dtype=torch.float64)
    weight = torch.randn(4, 2, 3, 3, dtype=torch.float64, requires_grad=True)
    ours = convolution.CONVOLUTIONS[torch.conv2d]
    assert ours(x.to(torch.complex128), weight.to(torch.complex128), groups=2) is None
    with Isolation([weight]), forward_ad.dual_level():
        out = torch.conv2d(forward_ad.make_dual(x, x), weight, groups=2)
        torch.testing.assert_close(forward_ad.unpack_dual(out).tangent, out, rtol=1e-12, atol=1e-12)


class _Count(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += "convolution" in str(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("groups", [4, 32])
def test_a_product_is_as_many_convolutions_however_many_groups(groups):
    layers = [nn.Conv2d(groups, groups, 3, groups=groups) for _ in range(2)]
    params = [p for layer in layers for p in layer.parameters()]
    x = torch.randn(2, groups, 8, 8)
    with Isolation(params):
        hessian = Hessian(torch.tanh(layers[1](torch.tanh(layers[0](x)))).sum(), params)
        with _Count() as counted:
            hessian([torch.randn_like(p) for p in params])
    assert 0 < counted.calls <= 10


def test_a_frozen_layer_and_inputs_that_need_no_gradient():
    params, loss = _problem("depthwise")
    params[0].requires_grad_(False)
    free = [p for p in params if p.requires_grad]
    dense = torch.stack([torch.cat([o.flatten() for o in _by_torch(loss, free, v)]) for v in _unit(free)])
    spectrum = estimate_spectrum(loss, free, k=3, num_matvecs=len(dense), precision="float64")
    torch.testing.assert_close(spectrum.eigenvalues, torch.linalg.eigvalsh(dense).flip(0)[:3], rtol=1e-8, atol=1e-10)


def _unit(params):
    sizes = [p.numel() for p in params]
    for row in torch.eye(sum(sizes), dtype=torch.float64):
        yield [piece.view_as(p) for piece, p in zip(row.split(sizes), params, strict=True)]


@pytest.mark.parametrize("bias", [torch.zeros(1), torch.zeros(4, dtype=torch.float64)])
def test_bias_that_torch_refuses_is_refused_in_a_refresh_too(bias):
    x, w = torch.randn(1, 4, 5, 5), nn.Parameter(torch.randn(4, 2, 3, 3))
    with pytest.raises(RuntimeError), Isolation([w]):
        torch.conv2d(x, w, bias, groups=2)
