"""A refresh changes nothing of the user's, and takes second derivatives of every layer without help."""

import contextlib
import copy
import functools
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from fosi.torch import FOSI, estimate_spectrum
from tests.torch.dense import assert_pairs, by_differences, extreme
from tests.torch.models import MODELS, VECTOR, batch_of, made, perceptron

EPS = torch.finfo(torch.float64).eps


# What must not change.


def kept(tensors):
    """Tensors with their identity, the count of writes to them, and their bits."""
    return {name: None if t is None else (t, t._version, t.detach().clone()) for name, t in tensors.items()}


def assert_kept(before, after):
    assert before.keys() == after.keys()
    for name, was in before.items():
        now = after[name]
        assert (was is None) == (now is None), name
        if was is not None:
            assert now[0] is was[0], f"{name} is another tensor"
            assert now[1] == was[1], f"{name} was written to"
            assert torch.equal(now[2].nan_to_num(), was[2].nan_to_num()), f"{name} has other values"


def switches():
    """Everything global that a refresh may touch: names and plain values."""
    backends, precision = torch.backends, {}
    for name in ("cudnn.conv", "cudnn.rnn", "mkldnn.conv", "mkldnn.rnn", "mkldnn.matmul", "cuda.matmul"):
        precision[name] = functools.reduce(getattr, name.split("."), backends).fp32_precision
    return {
        "random": torch.get_rng_state().tolist(),
        "grad mode": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
        "autocast cache": torch.is_autocast_cache_enabled(),
        "cudnn": (backends.cudnn.enabled, backends.cudnn.benchmark, backends.cudnn.deterministic),
        "mkldnn": (backends.mkldnn.enabled, backends.mkldnn.deterministic),
        "precision": precision,
        "sdpa": (
            backends.cuda.flash_sdp_enabled(),
            backends.cuda.mem_efficient_sdp_enabled(),
            backends.cuda.math_sdp_enabled(),
            backends.cuda.cudnn_sdp_enabled(),
        ),
        "stance": stance(),
        "modes": torch._C._len_torch_function_stack(),
        "default dtype": torch.get_default_dtype(),
        "threads": torch.get_num_threads(),
    }


def stance():
    """What torch.compile'd code does when it is called; torch has no public way to ask."""
    return torch._dynamo.eval_frame._stance.stance


@contextlib.contextmanager
def nothing_changes(model):
    """Parameters, gradients, buffers, modes and switches are the same after the block, also when it raises."""

    def look():
        params = dict(model.named_parameters())
        return (
            kept(params),
            kept({name: p.grad for name, p in params.items()}),
            kept(dict(model.named_buffers(remove_duplicate=False))),
            {name: module.training for name, module in model.named_modules()},
            {name: p.requires_grad for name, p in params.items()},
            switches(),
        )

    before = look()
    try:
        yield
    finally:
        after = look()
        for was, now in zip(before[:3], after[:3], strict=True):
            assert_kept(was, now)
        assert before[3:] == after[3:]


def everything():
    """A model with all that could be changed: running statistics, random numbers, power iterations, recurrence."""
    torch.manual_seed(3)
    model = nn.Sequential(
        nn.Linear(4, 6),
        nn.BatchNorm1d(6),
        nn.Dropout(0.3),
        nn.Tanh(),
        nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6)),
        nn.BatchNorm1d(6, momentum=None),
        nn.Unflatten(1, (3, 2)),
        nn.GRU(2, 2, batch_first=True),
    )
    x = torch.randn(8, 4)
    model[1].eval()  # a mixture of modes

    def loss():
        hidden = model(x)[0]
        return F.scaled_dot_product_attention(hidden, hidden, hidden).square().mean()

    loss().backward()
    model[0].bias.grad = None
    return model, loss


AROUND = {
    "as it is": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast float16": lambda: torch.autocast("cpu", torch.float16),
}


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("sequence", [False, True], ids=["one", "several"])
def test_nothing_changes(sequence, around):
    """By a refresh of the optimizer or by an estimate alone."""
    model, loss = everything()
    opt = FOSI(torch.optim.Adam(model.parameters(), lr=1e-3), model=model, k=2, num_matvecs=5)
    closure = [loss, loss] if sequence else loss
    with AROUND[around]():
        with nothing_changes(model):
            assert opt.refresh(closure).eigenvalues.isfinite().all()
        with nothing_changes(model):
            assert estimate_spectrum(closure, model, k=2, num_matvecs=5).eigenvalues.isfinite().all()


def test_the_step_that_refreshes_by_itself_changes_parameters_only():
    """Buffers and random numbers are as after a step of the base alone, whatever the curvature's loss did."""
    model, loss = everything()
    opt = FOSI(
        torch.optim.SGD(model.parameters(), lr=1e-3), model=model, curvature_loss=loss, k=2, warmup=0, num_matvecs=5
    )
    buffers, random = kept(dict(model.named_buffers())), torch.get_rng_state()
    opt.step()
    assert opt.spectrum is not None
    assert_kept(buffers, kept(dict(model.named_buffers())))
    assert torch.equal(random, torch.get_rng_state())


class Broken(Exception):
    pass


@pytest.mark.parametrize("sequence", [False, True], ids=["one", "several"])
@pytest.mark.parametrize("after", [0, 1, 3])
def test_nothing_changes_when_the_closure_raises(after, sequence):
    """At once, or after some calls with all their effects."""
    model, loss = everything()
    opt = FOSI(torch.optim.Adam(model.parameters(), lr=1e-3), model=model, k=2, num_matvecs=5)
    calls = 0

    def breaking():
        nonlocal calls
        model.train()
        value = loss()
        if calls == after or not sequence:
            raise Broken
        calls += 1
        return value

    with nothing_changes(model), pytest.raises(Broken):
        opt.refresh([breaking, loss] if sequence else breaking)
    assert opt.spectrum is None and calls == (after if sequence else 0)
    with nothing_changes(model):  # and another refresh works
        opt.refresh(loss)


def test_nothing_changes_when_a_product_raises():
    """In the backward pass of the gradient, after everything was set up."""
    model, loss = everything()
    far = torch.ones(1, 4)
    with nothing_changes(model), pytest.raises(RuntimeError, match="_cdist_backward"):
        estimate_spectrum(lambda: loss() + torch.cdist(model[0].weight, far).sum(), model, k=2)


@pytest.mark.parametrize("sequence", [False, True], ids=["one", "several"])
def test_a_closure_that_evaluates_in_eval_mode(sequence):
    """The curvature is that of eval mode, and the modes are put back one by one."""
    model, loss = everything()

    def evaluating():
        model.eval()
        return loss()

    flags = [m.training for m in model.modules()]
    assert True in flags and False in flags
    with nothing_changes(model):
        found = estimate_spectrum([evaluating] * 2 if sequence else evaluating, model, k=2, num_matvecs=20)
    model.eval()
    expected = estimate_spectrum(loss, model, k=2, num_matvecs=20)
    torch.testing.assert_close(found.eigenvalues, expected.eigenvalues, rtol=1e-4, atol=0)


def test_buffers_that_the_closure_replaces_or_fills_are_put_back():
    """A buffer assigned anew, and one that was None until the first call."""

    class Lazy(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))
            self.register_buffer("count", torch.zeros(()))
            self.register_buffer("scale", None)

        def forward(self):
            self.count = self.count + 1
            if self.scale is None:
                self.scale = torch.tensor(2.0)
            return (self.scale * self.weight**2).sum() * self.count

    model = Lazy()
    for closure in (model, [model, model]):
        with nothing_changes(model):
            found = estimate_spectrum(closure, model, k=1)
        # In a sequence the second call sees the count of the first, in every product: (1 + 2) / 2.
        np.testing.assert_allclose(found.eigenvalues, [4.0 if closure is model else 6.0], rtol=1e-6)
    assert model.scale is None


def test_without_a_model_gradients_and_random_numbers_are_still_the_users():
    model, loss = everything()
    grads, random = kept({n: p.grad for n, p in model.named_parameters()}), torch.get_rng_state()
    buffer = model[5].num_batches_tracked.item()
    estimate_spectrum(loss, list(model.parameters()), k=2, num_matvecs=5)
    assert_kept(grads, kept({n: p.grad for n, p in model.named_parameters()}))
    assert torch.equal(random, torch.get_rng_state())
    assert model[5].num_batches_tracked.item() == buffer + 1  # its buffers are known from the model only


# What the closure sees.


def test_inside_gradients_are_on_and_fused_kernels_and_compilation_off():
    model, loss = everything()
    seen = []

    def looking():
        found = switches()
        seen.append({name: found[name] for name in ("grad mode", "autocast", "sdpa", "stance")})
        return loss()

    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        estimate_spectrum(looking, model, k=1, num_matvecs=3)
        estimate_spectrum([looking, looking], model, k=1, num_matvecs=3)
    assert len(seen) == 7
    for found in seen:
        assert found["grad mode"] is True and found["autocast"][0] is False and found["stance"] == "force_eager"
        assert found["sdpa"] == (False, False, True, False)


class Recorder(TorchFunctionMode):
    """Whether cuDNN and oneDNN were on, for every call of the functions it is told of."""

    def __init__(self, functions):
        super().__init__()
        self.functions, self.seen = functions, []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in self.functions:
            self.seen.append((torch.backends.cudnn.enabled, torch.backends.mkldnn.enabled))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN, functools.partial(nn.RNN, nonlinearity="relu")])
def test_cudnn_is_off_in_recurrent_layers_and_on_in_all_others(kind):
    """A GPU is needed to see why; that it is so can be seen without. Packed sequences are another function."""
    core, conv = kind(4, 3), nn.Conv1d(4, 4, 1, padding="same")  # a form of padding that torch's own function sees
    x = torch.randn(5, 2, 4)
    params = [*core.parameters(), *conv.parameters()]
    recurrent, other = Recorder({torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu}), Recorder({torch.conv1d})

    def loss():
        inputs = conv(x.transpose(1, 2)).transpose(1, 2)
        packed = nn.utils.rnn.pack_padded_sequence(inputs, torch.tensor([5, 3]))
        return core(inputs)[0].square().mean() + core(packed)[0].data.square().mean()

    # The innermost mode is asked first: recorders must be outside, to see what the refresh's own mode did.
    with recurrent, other:
        estimate_spectrum(loss, params, k=1, num_matvecs=2)
    assert recurrent.seen == [(False, False)] * 2
    assert other.seen == [(True, True)]


def test_recurrent_layers_under_the_settings_of_fp32_precision():
    """Which torch's own contexts for switching cuDNN off cannot be used with; and no warning comes up."""
    model, loss = made("lstm", torch.float32)
    before = torch.backends.cudnn.rnn.fp32_precision
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plain = estimate_spectrum(loss, model, k=1)
        try:
            torch.backends.cudnn.rnn.fp32_precision = "ieee"
            with nothing_changes(model):
                found = estimate_spectrum(loss, model, k=1)
        finally:
            torch.backends.cudnn.rnn.fp32_precision = before
    assert torch.equal(found.eigenvalues, plain.eigenvalues)


# Second derivatives of everything.


@pytest.mark.parametrize("name", MODELS)
def test_every_layer_by_itself(name):
    """Against differences of gradients, which the user's own kernels compute, with the same random numbers."""
    model, loss = made(name)
    params, state = list(model.parameters()), copy.deepcopy(model.state_dict())

    def again():  # with the same random numbers
        torch.manual_seed(11)
        return loss()

    if name == "spectral norm":  # the directions that one power iteration finds are constants of the loss
        loss()
        model.eval()

    H = by_differences(again, params)
    model.load_state_dict(state)
    model.train()
    torch.manual_seed(11)
    with nothing_changes(model):
        found = estimate_spectrum(loss, model, k=3, ell=2, num_matvecs=min(len(H), 90), precision="float64")
    assert found.accepted.all()
    assert_pairs(found, H, 3, 2, 1e-7)
    assert found.resolution < 300 * EPS * np.linalg.norm(H, 2)  # one symmetric operator
    # In the precision people train in, other kernels may be chosen.
    single, loss = made(name, torch.float32)
    if "dropout" not in name:  # whose masks in float32 are others
        found = estimate_spectrum(loss, single, k=3, ell=2, num_matvecs=min(len(H), 90))
        np.testing.assert_allclose(found.eigenvalues, extreme(H, 3, 2)[0], atol=1e-5 * np.linalg.norm(H, 2))


@pytest.mark.parametrize("name", ["convolutional", "encoder, dropout", "gru", "spectral norm"])
def test_eval_mode(name):
    """Running statistics, no dropout, no power iteration, and attention's fast path for inference."""
    model, loss = made(name)
    model.eval()
    H = by_differences(loss, model.parameters())
    with nothing_changes(model):
        found = estimate_spectrum(loss, model, k=2, ell=1, num_matvecs=90, precision="float64")
    assert_pairs(found, H, 2, 1, 1e-7)


@pytest.mark.parametrize("name", ["spectral norm", "batch norm", "encoder, dropout"])
def test_buffers_and_random_numbers_do_not_drift_over_the_products_of_a_sequence(name):
    """Every product is of the losses as the first call found them."""
    model, loss = made(name)
    seen = []

    def watched():
        seen.append([torch.get_rng_state(), *(b.clone() for b in model.buffers())])
        return loss()

    torch.manual_seed(11)
    with nothing_changes(model):
        found = estimate_spectrum([watched, watched], model, k=2, num_matvecs=8, precision="float64")
    first, second = seen[0], seen[1]
    assert len(seen) == 16
    for i, state in enumerate(seen):
        for a, b in zip(state, second if i % 2 else first, strict=True):
            assert torch.equal(a, b)
    # Between the two closures of one product they do move on.
    assert any(not torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert found.resolution < 300 * EPS * found.eigenvalues[0]


@pytest.mark.parametrize("name", ["attention", "convolutional", "gru"])
def test_inside_no_grad_and_autocast_as_outside(name):
    """Products are float32 inside autocast too."""
    model, loss = made(name, torch.float32)
    estimate = functools.partial(estimate_spectrum, loss, model, k=3, ell=1, num_matvecs=30)
    expected = estimate()
    for around in (torch.no_grad, AROUND["autocast"]):
        with around():
            found = estimate()
        torch.testing.assert_close(found.eigenvalues, expected.eigenvalues, rtol=1e-5, atol=0)
    with AROUND["autocast"]():  # the user's own loss would have shown: it is rounded
        assert abs(loss().item() - made(name)[1]().item()) > 1e-4


def test_a_compiled_model_is_taken_as_it_was_written():
    """The compiled code, whose backward pass has no derivative, is neither used nor made, and is kept."""
    compiled, ran = [], []

    def backend(graph, inputs):
        compiled.append(graph)
        return lambda *args: ran.append(1) or graph.forward(*args)

    plain, _ = made("batch norm", torch.float32)
    x, y = batch_of("batch norm", torch.float32)
    model = torch.compile(plain, backend=backend)

    def loss():
        return F.cross_entropy(model(x), y)

    expected = estimate_spectrum(lambda: F.cross_entropy(plain(x), y), plain, k=2)
    found = estimate_spectrum(loss, model, k=2)  # before there is any compiled code
    assert not compiled and not ran
    loss().backward()
    assert compiled and len(ran) == 1
    count = len(compiled)
    with nothing_changes(model):
        again = estimate_spectrum(loss, model, k=2)
    assert len(compiled) == count and len(ran) == 1
    for spectrum in (found, again):
        assert torch.equal(spectrum.eigenvalues, expected.eigenvalues)
        names = [name.removeprefix("_orig_mod.") for name in spectrum.eigenvectors]
        assert names == list(expected.eigenvectors)
    loss()
    assert len(ran) == 2 and len(compiled) == count  # the compiled code is in use again, without compiling anew
    torch._dynamo.reset()


def test_a_compiled_function_in_the_closure():
    """aot_eager makes the backward pass ahead of time, as inductor does: double backward fails without help."""
    model = perceptron()
    x = torch.randn(VECTOR)
    loss = torch.compile(lambda: model(x).square().mean(), backend="aot_eager")
    params = list(model.parameters())
    grads = torch.autograd.grad(loss(), params, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        torch.autograd.grad(sum(g.sum() for g in grads), params)
    found = estimate_spectrum(loss, model, k=2)
    expected = estimate_spectrum(lambda: model(x).square().mean(), model, k=2)
    torch.testing.assert_close(found.eigenvalues, expected.eigenvalues, rtol=1e-5, atol=0)
    torch._dynamo.reset()


def test_fused_attention_has_no_second_derivative_by_itself():
    """So that the tests above test something: with the default kernels it raises."""
    model, loss = made("attention", torch.float32)
    params = list(model.parameters())
    grads = torch.autograd.grad(loss(), params, create_graph=True)
    with pytest.raises(RuntimeError, match="is not implemented"):
        torch.autograd.grad(sum(g.sum() for g in grads), params)


def test_activation_checkpoints():
    """The forward pass is run again inside every product; its masks and statistics are those of the first."""
    model, loss = made("encoder, dropout")
    x, y = batch_of("encoder, dropout")
    torch.manual_seed(11)
    expected = estimate_spectrum(loss, model, k=2, num_matvecs=30, precision="float64")
    torch.manual_seed(11)
    with nothing_changes(model):
        found = estimate_spectrum(
            lambda: F.cross_entropy(checkpoint(model, x, use_reentrant=False), y),
            model,
            k=2,
            num_matvecs=30,
            precision="float64",
        )
    torch.testing.assert_close(found.eigenvalues, expected.eigenvalues, rtol=1e-9, atol=0)


def test_parametrizations_with_a_cache():
    """Whose cached weights may have been computed without a graph."""
    model, loss = made("weight norm")
    expected = estimate_spectrum(loss, model, k=2, num_matvecs=30, precision="float64")
    with parametrize.cached():
        found = estimate_spectrum(loss, model, k=2, num_matvecs=30, precision="float64")
    assert torch.equal(found.eigenvalues, expected.eigenvalues)


def test_a_refresh_inside_a_training_loop_changes_no_step_of_the_base():
    """With nothing accepted, FOSI's run is the base's to the bit: dropout, batch norm and Adam in between."""

    def train(refreshing):
        model, loss = everything()
        opt = base = torch.optim.Adam(model.parameters(), lr=1e-2)
        if refreshing:
            opt = FOSI(base, model=model, k=1, warmup=0, refresh_every=2, num_matvecs=2)
        for _ in range(6):
            opt.zero_grad()
            loss().backward()
            if refreshing and opt.refresh_due:
                found = opt.refresh(lambda: loss() * 0 + model[0].bias.sum())
                assert not found.accepted.any()
            opt.step()
        return model.state_dict()

    torch.manual_seed(0)
    alone, inside = train(False), train(True)
    for name, value in alone.items():
        assert torch.equal(value, inside[name]), name
