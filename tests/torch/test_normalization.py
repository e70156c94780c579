"""Normalizations inside a refresh: torch's own values and second derivatives in few passes, and right third ones."""

import copy
import functools
import itertools

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from fosi.torch import estimate_spectrum, isolation
from fosi.torch.curvature import Hessian
from fosi.torch.isolation import Isolation
from fosi.torch.normalization import NORMALIZATIONS
from tests.torch.dense import assert_pairs, by_differences
from tests.torch.models import made

DOUBLE = torch.float64


def _batch(f, x, weight, bias):
    return f(x, None, None, weight, bias, True)


def _layer(f, x, weight, bias):
    return f(x, weight.shape, weight, bias)


# Name: the function, how it is called, the shapes of x and γ, what the statistics are over, and γ's shape beside x.
CASES = {
    "batch of vectors": (F.batch_norm, _batch, (6, 3), (3,), [0], (3,)),
    "batch of lines": (F.batch_norm, _batch, (4, 3, 2), (3,), [0, 2], (3, 1)),
    "batch of images": (F.batch_norm, _batch, (2, 3, 2, 4), (3,), [0, 2, 3], (3, 1, 1)),
    "batch of volumes": (F.batch_norm, _batch, (2, 3, 2, 1, 2), (3,), [0, 2, 3, 4], (3, 1, 1, 1)),
    "instances": (F.instance_norm, _batch, (2, 3, 2, 4), (3,), [2, 3], (3, 1, 1)),
    "layer of one dimension": (F.layer_norm, _layer, (2, 3, 5), (5,), [2], (5,)),
    "layer of two": (F.layer_norm, _layer, (2, 3, 4), (3, 4), [1, 2], (3, 4)),
    "layer of all": (F.layer_norm, _layer, (6,), (6,), [0], (6,)),
}


def _problem(case):
    """The function in three ways, x, γ and β, and a ȳ."""
    function, call, shape, width, over, beside = CASES[case]

    def by_hand(x, weight, bias):
        mean = x.mean(over, keepdim=True)
        z = (x - mean) / ((x - mean).square().mean(over, keepdim=True) + 1e-5).sqrt()
        return z * weight.reshape(beside) + bias.reshape(beside)

    ways = {
        "ours": lambda *inputs: call(NORMALIZATIONS[function], *inputs),
        "torch": lambda *inputs: call(function, *inputs),
        "by hand": by_hand,
    }
    torch.manual_seed(0)
    inputs = [2 * torch.randn(shape, dtype=DOUBLE) + 0.7, *(1 + torch.randn(2, *width, dtype=DOUBLE))]
    return ways, inputs, torch.randn(shape, dtype=DOUBLE)


def _derivatives(function, inputs, needing, bend, order, graph=False):
    """The value, and each gradient of a random combination of the one before; the last with a graph or without."""
    leaves = [t.clone().requires_grad_(needs) for t, needs in zip(inputs, needing, strict=True)]
    chosen = [t for t in leaves if t.requires_grad]
    random = torch.Generator().manual_seed(1)
    found = [function(*leaves)]
    value = torch.tanh(found[0] + bend).square().sum()
    for left in reversed(range(order)):
        grads = torch.autograd.grad(value, chosen, create_graph=left > 0 or graph, materialize_grads=True)
        found += grads
        value = sum((g * torch.randn(g.shape, dtype=DOUBLE, generator=random)).sum() for g in grads)
    return found


def _assert_close(found, expected):
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9 * max(1.0, b.detach().abs().max().item()))


SOME = [some for some in itertools.product([True, False], repeat=3) if any(some)]


def _named(letters):
    return lambda some: "".join(letter for letter, yes in zip(letters, some, strict=True) if yes)


@pytest.mark.parametrize("needing", SOME, ids=_named("xγβ"))
@pytest.mark.parametrize("case", CASES)
def test_derivatives(case, needing):
    """Down to the fourth; a second one without a graph is the one of few passes, with a graph it is another."""
    ways, inputs, bend = _problem(case)
    for graph in (False, True):
        found = _derivatives(ways["ours"], inputs, needing, bend, 2, graph)
        _assert_close(found, _derivatives(ways["torch"], inputs, needing, bend, 2))
    found = _derivatives(ways["ours"], inputs, needing, bend, 4)
    _assert_close(found, _derivatives(ways["by hand"], inputs, needing, bend, 4))


@pytest.mark.parametrize("some", SOME, ids=_named("uvw"))
@pytest.mark.parametrize("case", CASES)
def test_the_derivative_of_each_gradient_by_itself(case, some):
    ways, inputs, y_bar = _problem(case)
    found = []
    for way in ("ours", "by hand"):
        leaves = [t.clone().requires_grad_() for t in (*inputs, y_bar)]
        grads = torch.autograd.grad(ways[way](*leaves[:3]), leaves[:3], leaves[3], create_graph=True)
        random = torch.Generator().manual_seed(2)
        along = [torch.randn(g.shape, dtype=DOUBLE, generator=random) for g in grads]
        grads, along = ([t for t, yes in zip(ts, some, strict=True) if yes] for ts in (grads, along))
        wanted = [leaves[3], leaves[0], leaves[1]]
        found.append(torch.autograd.grad(grads, wanted, along, materialize_grads=True))
    _assert_close(*found)


@pytest.mark.parametrize("case", CASES)
def test_batched_derivatives(case):
    """Of the function and of its gradients."""
    ways, inputs, y_bar = _problem(case)
    found = []
    for way in ("ours", "by hand"):
        leaves = [t.clone().requires_grad_() for t in (*inputs, y_bar)]
        y = ways[way](*leaves[:3])
        grads = torch.autograd.grad(y, leaves[:3], leaves[3], create_graph=True)
        several = functools.partial(torch.autograd.grad, is_grads_batched=True, retain_graph=True)
        first = several(y, leaves[:3], torch.stack([y_bar, y_bar.square()]))
        along = [torch.stack([t, t.square()]) for t in inputs]
        wanted = [leaves[3], *leaves[:2]]
        found.append([*first, *several(grads, wanted, along), *several(grads[0], wanted, along[0])])
    _assert_close(*found)


@pytest.mark.parametrize("case", CASES)
def test_without_weight_and_bias(case):
    function, call, _, width, *_ = CASES[case]
    _, inputs, bend = _problem(case)
    one = torch.ones(width, dtype=DOUBLE)
    found = []
    for f in (NORMALIZATIONS[function], function):
        bare = functools.partial(f, normalized_shape=width) if call is _layer else lambda x, f=f: call(f, x, None, None)
        bias_alone = lambda x, b, f=f: call(f, x, one, b)  # noqa: E731
        found.append(_derivatives(bare, inputs[:1], [True], bend, 2))
        found[-1] += _derivatives(bias_alone, inputs[::2], [True, True], bend, 2)
    _assert_close(*found)


LAYOUTS = {
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "transposed": lambda x: x.transpose(0, 2).contiguous().transpose(0, 2),
    "expanded": lambda x: x[:, :, :1].expand(x.shape),
    "a part": lambda x: torch.cat([x, x], 1)[:, ::2],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", ["batch of images", "instances", "layer"])
def test_activations_that_lie_in_memory_in_other_ways(case, layout):
    torch.manual_seed(0)
    base = torch.randn(2, 4, 6, 5, dtype=DOUBLE)
    function, call = (F.layer_norm, _layer) if case == "layer" else CASES[case][:2]
    width = (5,) if case == "layer" else (4,)
    weight, bias = torch.randn(2, *width, dtype=DOUBLE)
    weight = torch.stack([weight, bias], 1)[:, 0]  # strided
    found = []
    for f in (NORMALIZATIONS[function], function):
        leaves = [t.clone().requires_grad_() for t in (base, weight, bias)]
        # The gradients come in that way too, those of the second derivative from the tanh before.
        value = LAYOUTS[layout](call(f, LAYOUTS[layout](torch.tanh(leaves[0])), *leaves[1:])).square().sum()
        grads = torch.autograd.grad(value, leaves, create_graph=True)
        found.append(torch.autograd.grad(grads, leaves, [t.detach() for t in leaves]))
    _assert_close(*found)


# Within a refresh.


@pytest.fixture
def by_torch(monkeypatch):
    """A product within a refresh that leaves torch's normalizations in place."""

    def product(loss, params, vectors, model):
        with monkeypatch.context() as patch, Isolation(params, model):
            for function in NORMALIZATIONS:
                patch.delitem(isolation._REPLACED, function)
            return Hessian(loss(), params)(vectors)

    return product


@pytest.mark.parametrize("name", ["convolutional", "encoder", "batch norm"])
def test_products_are_those_of_torchs_own_derivatives(name, by_torch):
    model, loss = made(name)
    params = list(model.parameters())
    vectors = [torch.randn_like(p) for p in params]
    expected = by_torch(loss, params, vectors, model)
    with Isolation(params, model):
        value = loss()
        assert "_NormalizeBackward" in _names(value)
        _assert_close(Hessian(value, params)(vectors), expected)
    torch.testing.assert_close(value, loss(), rtol=1e-12, atol=1e-12)


def _names(value):
    waiting, seen = [value.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [following for following, _ in node.next_functions]
    return {node.name() for node in seen}


@pytest.mark.parametrize("name", ["convolutional", "encoder"])
def test_products_in_float32(name, by_torch):
    model, loss = made(name)
    params = list(model.parameters())
    vectors = [torch.randn_like(p) for p in params]
    expected = torch.cat([t.flatten() for t in by_torch(loss, params, vectors, model)])
    model, loss = made(name, torch.float32)
    params = list(model.parameters())
    with Isolation(params, model):
        found = torch.cat([t.flatten() for t in Hessian(loss(), params)([v.float() for v in vectors])])
    assert (found - expected).norm() < 1e-5 * expected.norm()


@pytest.mark.parametrize(
    "norm",
    [
        nn.BatchNorm1d(3),
        nn.BatchNorm1d(3, momentum=None),
        nn.BatchNorm1d(3, momentum=1),
        nn.BatchNorm1d(3, affine=False),
        nn.BatchNorm1d(3, track_running_stats=False),
    ],
    ids=str,
)
def test_running_statistics(norm):
    random = torch.Generator().manual_seed(0)
    batches = [torch.randn(5, 3, 2, dtype=DOUBLE, generator=random) * i + i for i in range(1, 4)]
    norm = copy.deepcopy(norm).double()
    plain, model = copy.deepcopy(norm), nn.Sequential(nn.Linear(2, 2).double(), norm)
    for x in batches:
        expected = plain(model[0](x))
        with Isolation(list(model.parameters())):  # without the model, whose buffers it would put back
            found = model(x)
        assert found.grad_fn.name() == "_NormalizeBackward"
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        for ours, right in zip(norm.buffers(), plain.buffers(), strict=True):
            torch.testing.assert_close(ours, right, rtol=1e-12, atol=0)


def test_activations_changed_in_place_afterwards(by_torch):
    torch.manual_seed(0)
    layers = [nn.Conv2d(2, 3, 2), nn.BatchNorm2d(3), nn.ELU(inplace=True), nn.InstanceNorm2d(3), nn.ELU(inplace=True)]
    model = nn.Sequential(*layers).double()
    x = torch.randn(4, 2, 5, 5, dtype=DOUBLE)
    params = list(model.parameters())
    loss = lambda: model(x).pow(3).sum()  # noqa: E731
    vectors = [torch.randn_like(p) for p in params]
    expected = by_torch(loss, params, vectors, model)
    with Isolation(params, model):
        _assert_close(Hessian(loss(), params)(vectors), expected)


class _Count(TorchDispatchMode):
    """How many operations have a whole activation for a result or an argument."""

    def __init__(self, size):
        super().__init__()
        self.size, self.calls = size, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        tensors = [t for t in (*args, out) if isinstance(t, torch.Tensor)]
        self.calls += not func.is_view and any(t.numel() == self.size for t in tensors)
        return out


@pytest.mark.parametrize(("case", "most"), [("batch of images", 7), ("layer of one dimension", 13)])
def test_a_second_derivative_is_few_passes(case, most):
    ways, inputs, y_bar = _problem(case)
    counts = {}
    for way in ("ours", "torch"):
        leaves = [t.clone().requires_grad_() for t in (*inputs, y_bar)]
        grads = torch.autograd.grad(ways[way](*leaves[:3]), leaves[:3], leaves[3], create_graph=True)
        along = [torch.ones_like(g) for g in grads]
        with _Count(y_bar.numel()) as counted:
            torch.autograd.grad(grads, [leaves[3], *leaves[:2]], along)
        counts[way] = counted.calls
    assert 0 < counts["ours"] <= most < counts["torch"]


# Losses that take derivatives themselves: the Hessian then is of third ones.


@pytest.mark.parametrize("inner", ["penalty", "batched", "twice", "twice, batched"])
@pytest.mark.parametrize("case", ["batch of lines", "instances", "layer of one dimension"])
def test_a_loss_that_takes_derivatives_itself(case, inner):
    ways, (x, weight, bias), y_bar = _problem(case)
    params = [torch.eye(x.shape[-1], dtype=DOUBLE) + 0.3 * torch.rand(x.shape[-1], dtype=DOUBLE), weight, bias]
    params = [p.requires_grad_() for p in params]
    along = torch.stack([y_bar, y_bar.square(), y_bar.flip(0)])

    def loss(way="torch"):
        inputs = x.clone().requires_grad_()
        slope = torch.tanh(ways[way](inputs @ params[0], *params[1:]))
        for _ in range(2 if "twice" in inner else 1):
            vectors, batched = (along, True) if "batched" in inner else (y_bar, False)
            (slope,) = torch.autograd.grad(slope, inputs, vectors, create_graph=True, is_grads_batched=batched)
            slope = slope.sum(0) if batched else slope
        return slope.square().mean()

    H = by_differences(lambda: loss("by hand"), params)
    found = estimate_spectrum(loss, params, k=2, ell=1, num_matvecs=len(H), precision="float64")
    assert_pairs(found, H, 2, 1, 1e-6)


# What is left to torch.


def _left(function, *args, **settings):
    return NORMALIZATIONS[function](*args, **settings) is None


def test_what_is_left_to_torch():
    x, one = torch.randn(4, 3), torch.ones(3)
    mean, var = torch.zeros(3), torch.ones(3)
    assert not _left(F.batch_norm, x, mean, var, one, one, training=True)
    assert _left(F.batch_norm, x, mean, var, one, one)  # the statistics of training
    assert _left(F.instance_norm, x[None], mean, var, one, one, use_input_stats=False)
    assert _left(F.instance_norm, x.T[None], mean, var, one, one)  # which would have to be averaged
    for odd in (x.half(), x.bfloat16(), x.to("meta"), x.double(), x[:0], x.to_sparse(), x.as_subclass(_Odd)):
        assert _left(F.batch_norm, odd, None, None, one, one, True)
        assert _left(F.layer_norm, odd, (3,), one, one)
    with torch.autocast("cpu"):
        assert _left(F.batch_norm, x, None, None, one, one, True)
    with forward_ad.dual_level():
        assert _left(F.layer_norm, x, (3,), one, one)
    seen = []
    torch.func.vmap(lambda row: seen.append(_left(F.layer_norm, row, (3,), one, one)) or row)(x)
    assert seen == [True]


class _Odd(torch.Tensor):
    pass


@pytest.mark.parametrize(
    "call",
    [
        lambda x: F.batch_norm(x[:1], None, None, training=True),
        lambda x: F.batch_norm(x, None, None, torch.ones(2), None, True),
        lambda x: F.batch_norm(x, torch.ones(3), torch.ones(2), training=True),
        lambda x: F.batch_norm(x, None, None, training=True, momentum=None),
        lambda x: F.batch_norm(x, None, None),
        lambda x: F.instance_norm(x[:, :, None]),
        lambda x: F.layer_norm(x, (4,)),
        lambda x: F.layer_norm(x, (3,), torch.ones(4)),
        lambda x: F.layer_norm(x, ()),
    ],
)
def test_mistakes_are_told_as_torch_tells_them(call):
    x = torch.randn(4, 3, requires_grad=True)
    with pytest.raises(Exception) as expected:
        call(x)
    with Isolation([x]), pytest.raises(type(expected.value)) as found:
        call(x)
    assert str(found.value) == str(expected.value)


def test_called_by_keyword():
    x, one = torch.randn(4, 3, requires_grad=True), torch.ones(3)

    def values():
        yield F.batch_norm(input=x, running_mean=None, running_var=None, weight=one, training=True, eps=0.1)
        yield F.layer_norm(input=x, normalized_shape=(3,), bias=one, eps=0.1)
        yield F.instance_norm(input=x[None], weight=None, eps=0.1)

    with Isolation([x]):
        found = list(values())
    for y, expected in zip(found, values(), strict=True):
        assert "_NormalizeBackward" in _names(y)
        torch.testing.assert_close(y, expected)
