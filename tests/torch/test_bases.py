"""Every optimizer of torch.optim as base: untouched before the first refresh, corrected after it, and resumed."""

import copy
import inspect
import io

import numpy as np
import pytest
import torch
from torch import nn

from fosi.torch import FOSI
from tests import oracle, problems
from tests.torch.running import as_params, flat, loss_of
from tests.torch.training import assert_same_bits, batch, differs, network, train, values
from tests.torch.training import loss_of as network_loss

# Settings for every optimizer that takes dense gradients; with weight decay where it takes that.
SETTINGS = {
    "SGD": [
        {"lr": 0.01},
        {"lr": 0.01, "momentum": 0.9},
        {"lr": 0.01, "momentum": 0.9, "nesterov": True},
        {"lr": 0.01, "momentum": 0.9, "dampening": 0.5},
    ],
    "Adam": [{"lr": 0.05}, {"lr": 0.05, "amsgrad": True}, {"lr": 0.05, "decoupled_weight_decay": True}],
    "AdamW": [{"lr": 0.05, "betas": (0.8, 0.95)}],
    "NAdam": [{"lr": 0.05}, {"lr": 0.05, "decoupled_weight_decay": True}],
    "RAdam": [{"lr": 0.05}, {"lr": 0.05, "decoupled_weight_decay": True}],
    "Adamax": [{"lr": 0.05}],
    "Adagrad": [{"lr": 0.05, "lr_decay": 0.1}],
    "Adadelta": [{"lr": 1.0}],
    "RMSprop": [{"lr": 0.01}, {"lr": 0.01, "momentum": 0.9}, {"lr": 0.01, "centered": True}],
    "Rprop": [{"lr": 0.01}],
    "ASGD": [{"lr": 0.01}],
    "Adafactor": [{"lr": 0.05}],
    "Muon": [{"lr": 0.05}, {"lr": 0.05, "nesterov": False}],
}
NOT_BASES = {"LBFGS", "SparseAdam"}  # see test_errors


def of_torch():
    """All optimizers that this torch has."""
    found = {name: getattr(torch.optim, name) for name in dir(torch.optim)}
    return {
        name: x
        for name, x in found.items()
        if isinstance(x, type) and issubclass(x, torch.optim.Optimizer) and x is not torch.optim.Optimizer
    }


def takes(name, option):
    return option in inspect.signature(of_torch()[name]).parameters


def variants():
    """Every setting, its implementation for loops and for lists of tensors and the fused one where there are such."""
    for name, many in SETTINGS.items():
        for settings in many:
            yield name, settings
        for foreach in (True, False):
            if takes(name, "foreach"):
                yield name, {**many[-1], "foreach": foreach}
        if takes(name, "fused"):
            yield name, {**many[0], "fused": True}


def label(value):
    if isinstance(value, str):
        return value
    return ",".join(key if x is True else f"{key}={x}" for key, x in value.items() if key != "lr") or "plain"


VARIANTS = list(variants())
every_base = pytest.mark.parametrize(("name", "settings"), VARIANTS, ids=label)


def base_of(name, params, settings):
    """The optimizer around all the parameters it can take: Muon takes matrices."""
    return of_torch()[name]([p for p in params if name != "Muon" or p.ndim == 2], **settings)


def test_no_optimizer_of_torch_is_forgotten():
    assert set(of_torch()) - NOT_BASES == set(SETTINGS)
    assert {name for name, settings in VARIANTS if "fused" in settings} >= {"SGD", "Adam", "AdamW", "Adagrad"}


@every_base
def test_before_the_first_refresh_a_step_is_the_bases(name, settings):
    """Parameters and state, bit for bit."""
    bare_model, model = network(), network()
    bare = base_of(name, bare_model.parameters(), settings)
    opt = FOSI(base_of(name, model.parameters(), settings), model=model, k=2, warmup=100)
    train(bare_model, bare, range(5))
    train(model, opt, range(5))
    assert_same_bits(values(model), values(bare_model))
    assert differs(values(model), values(network()))
    assert_same_bits(opt.base.state_dict(), bare.state_dict())


def momentum_of(name, settings):
    """The linear combination of gradients in each optimizer, from its description in torch's documentation."""
    if name == "SGD" and "dampening" in settings:
        return Dampened(settings["momentum"], settings["dampening"])
    if name in ("SGD", "RMSprop") and "momentum" in settings:
        rule = oracle.NesterovMomentum if settings.get("nesterov") else oracle.HeavyBallMomentum
        return rule(settings["momentum"])
    if name in ("Adam", "AdamW", "NAdam", "RAdam", "Adamax"):
        return oracle.AdamMomentum(settings.get("betas", (0.9, 0.999))[0])
    return oracle.AdamMomentum(0.95) if name == "Muon" else oracle.NoMomentum()


class Dampened:
    """SGD's momentum with dampening: the first gradient is taken whole."""

    def __init__(self, beta, dampening):
        self.beta, self.share, self.velocity = beta, 1 - dampening, None

    def __call__(self, g):
        self.velocity = g if self.velocity is None else self.beta * self.velocity + self.share * g
        return self.velocity


def is_decoupled(name, settings):
    return name in ("AdamW", "Muon", "Adafactor") or settings.get("decoupled_weight_decay", False)


def expected_steps(problem, name, settings, decay, alpha, steps):
    """Algorithm 2 in NumPy; only what the base makes of g − V Vᵀ g comes from torch, from a copy of the base."""
    A, b, k, ell = problem.batch["A"], problem.batch["b"], problem.k, problem.ell
    penalty, shrinking = (0.0, decay) if is_decoupled(name, settings) else (decay, 0.0)
    whole, lam, V = oracle.ese(A + penalty * np.eye(len(A)), k, ell)
    best = oracle.OPTIMAL_RATE["gd"]
    scale = best(lam[k - 1], lam[k]) / best(whole[0], whole[-1])
    assert 1.1 < scale < 3
    theta, momentum = problem.start, momentum_of(name, settings)
    params = as_params(problem, theta, torch.float64)
    base = base_of(name, params, {**settings, "weight_decay": 0.0} if takes(name, "weight_decay") else settings)
    path = [theta]
    for _ in range(steps):
        g = A @ theta - b + penalty * theta
        theta = (1 - settings["lr"] * shrinking) * theta
        for mine, at, along in zip(
            params,
            as_params(problem, theta, torch.float64),
            as_params(problem, g - V @ (V.T @ g), torch.float64),
            strict=True,
        ):
            mine.data, mine.grad = at.detach(), along.detach()
        base.step()
        db = scale * (flat(params).detach().numpy() - theta)
        d1 = -alpha * V @ (momentum(V.T @ g) / np.abs(lam))
        assert np.linalg.norm(d1) > 1e-3 * np.linalg.norm(theta)
        theta = theta + d1 + db - V @ (V.T @ db)
        path.append(theta)
    return np.stack(path)


@pytest.mark.parametrize(
    ("name", "settings", "decay"),
    [
        *((name, settings, 0.0) for name, settings in VARIANTS),
        *((name, settings, 0.3) for name, settings in VARIANTS if takes(name, "weight_decay")),
    ],
    ids=lambda x: f"decay={x}" if isinstance(x, float) else label(x),
)
def test_inside_a_spectrum_a_step_is_algorithm_2(name, settings, decay):
    problem = problems.quadratic()
    if name == "Muon":
        problem = problem._replace(shapes={"a": (2, 3), "b": (3, 2)})
    expected = expected_steps(problem, name, settings, decay, alpha=0.3, steps=4)
    params = as_params(problem, problem.start, torch.float64)
    settings = {**settings, "weight_decay": decay} if takes(name, "weight_decay") else settings
    opt = FOSI(
        base_of(name, params, settings),
        k=problem.k,
        ell=problem.ell,
        alpha=0.3,
        lr_rule="gd",
        warmup=0,
        num_matvecs=len(problem.start),
        precision="float64",
        accept="all",
    )
    path = [problem.start]
    for _ in range(4):
        opt.zero_grad()
        loss_of(problem, params)().backward()
        if opt.refresh_due:
            opt.refresh(loss_of(problem, params))
        opt.step()
        path.append(flat(params).detach().numpy().copy())
    np.testing.assert_allclose(np.stack(path), expected, rtol=0, atol=1e-9)
    assert opt.spectrum is not None
    assert all(group.get("weight_decay", 0.0) == decay for group in opt.param_groups)


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize(("name", "settings"), [x for x in VARIANTS if "foreach" not in x[1]], ids=label)
def test_resuming_changes_no_bit(name, settings):
    """Through a file, within a spectrum and over the next refresh."""

    def build():
        model = network()
        base = base_of(name, model.parameters(), settings)
        return model, FOSI(base, model=model, k=3, ell=1, warmup=1, refresh_every=5, accept="all")

    model, opt = build()
    train(model, opt, range(4))
    saved = through_a_file({"model": model.state_dict(), "opt": opt.state_dict()})
    train(model, opt, range(4, 9))

    again, resumed = build()
    train(again, resumed, range(20, 22))  # what was there before must leave no trace
    again.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["opt"])
    within = resumed.spectrum.eigenvalues
    train(again, resumed, range(4, 9))
    assert_same_bits(values(again), values(model))
    assert_same_bits(resumed.state_dict(), opt.state_dict())
    assert differs([resumed.spectrum.eigenvalues], [within])  # there was a refresh in between


SUBSPACE = {"k": 3, "ell": 1, "warmup": 0, "refresh_every": 3, "accept": "all"}
FEW = {
    "linear": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=0.1),
    "projected": lambda params: torch.optim.AdamW(params, lr=0.05, weight_decay=0.1),
    "coupled": lambda params: torch.optim.RMSprop(params, lr=0.01, weight_decay=0.1),
}
few_bases = pytest.mark.parametrize("base", FEW)


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW"])
def test_groups_with_their_own_rates_and_decay(name):
    """Two groups on a quadratic in closed form: H = diag(λ), so V spans the last coordinate of the first group."""
    scales = [torch.tensor([2.0, 1.0, 64.0], dtype=torch.float64), torch.tensor([4.0, 3.0], dtype=torch.float64)]
    rates, decays, start, alpha = [0.01, 0.002], [0.5, 0.25], [1.0, -2.0], 0.5
    params = [torch.full_like(s, x, requires_grad=True) for s, x in zip(scales, start, strict=True)]
    copies = [p.detach().clone() for p in params]
    groups = [{"params": [p], "lr": r, "weight_decay": w} for p, r, w in zip(params, rates, decays, strict=True)]
    opt = FOSI(of_torch()[name](groups), k=1, alpha=alpha, warmup=0, num_matvecs=5, precision="float64", lr_rule=None)

    def loss():
        return sum(0.5 * (s * p**2).sum() for s, p in zip(scales, params, strict=True))

    loss().backward()
    opt.refresh(loss)
    opt.step()

    penalty = [0.0, 0.0] if name == "AdamW" else decays
    for i, (theta, rate, w) in enumerate(zip(copies, rates, decays, strict=True)):
        g = (scales[i] + penalty[i]) * theta
        # The first step of Adam is −lr sign(g), up to its eps.
        db = -rate * g if name == "SGD" else -rate * g / (g.abs() + 1e-8)
        after = theta * (1 - rate * w) if name == "AdamW" else theta
        expected = after + db
        if i == 0:
            expected[2] = after[2] - alpha * g[2] / (64.0 + penalty[0])
        torch.testing.assert_close(params[i].detach(), expected, rtol=1e-10, atol=1e-10)


@few_bases
def test_what_has_no_gradient_or_is_not_the_bases_stays(base):
    """Frozen and unused parameters of the base, and parameters it does not own, bit for bit; also after a refresh."""
    model = network()
    unused, frozen = nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(2, 2), requires_grad=False)
    owned = [unused, *model[0].parameters(), frozen, model[2].weight]
    before = [unused.detach().clone(), frozen.clone(), model[2].bias.detach().clone()]
    moving = values(model[0])
    opt = FOSI(FEW[base](owned), model=model, **SUBSPACE)
    train(model, opt, range(5))
    assert_same_bits([unused.detach(), frozen.detach(), model[2].bias.detach()], before)
    assert differs(values(model[0]), moving)
    assert len(opt.spectrum.eigenvectors) == len(owned)
    for i in (0, 3):
        assert opt.spectrum.eigenvectors[i].abs().max() < 1e-5


def test_a_parameter_that_is_used_now_and_then():
    """While it has no gradient it stays, whatever the steps before left behind; the others move as if it were not."""
    model = network(torch.float64)
    sometimes = nn.Parameter(torch.ones(3, dtype=torch.float64))
    data = batch(0, dtype=torch.float64)

    def loss(use):
        plain = network_loss(model, data)()
        return plain + (model[0].weight.sum(0) * sometimes).sum() ** 2 if use else plain

    opt = FOSI(torch.optim.Adam([sometimes, *model.parameters()], lr=0.05), model=model, **SUBSPACE)
    for use in (True, True, False):
        opt.zero_grad()
        loss(use).backward()
        if opt.refresh_due:
            opt.refresh(lambda: loss(True))
        before = sometimes.detach().clone(), values(model)
        if not use:
            basis = torch.cat([v.flatten(1) for v in opt.spectrum.eigenvectors], dim=1).numpy()
            base, momentum = copy.deepcopy(opt.base), opt.state_dict()["state"][0]["fosi_momentum"].numpy().copy()
            g = np.concatenate([np.zeros(3), *(p.grad.reshape(-1).numpy() for p in model.parameters())])
        opt.step()
    assert_same_bits(sometimes.detach(), before[0])

    inside = basis @ g
    rest = torch.from_numpy(g - basis.T @ inside)[3:]
    _, *twins = base.param_groups[0]["params"]
    for twin, grad in zip(twins, rest.split([p.numel() for p in twins]), strict=True):
        twin.grad = grad.reshape(twin.shape).clone()
    base.param_groups[0]["params"][0].grad = None
    base.step()
    theta = np.concatenate([x.reshape(-1).numpy() for x in before[1]])
    db = np.concatenate([np.zeros(3), flat(twins).detach().numpy() - theta])
    mean = (0.9 * momentum + 0.1 * inside) / (1 - 0.9**3)
    d1 = -0.01 * basis.T @ (mean / np.abs(opt.spectrum.eigenvalues.numpy()))
    step = d1 + db - basis.T @ (basis @ db)
    np.testing.assert_allclose(flat(model.parameters()).detach().numpy(), theta + step[3:], rtol=0, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@few_bases
def test_gradients_are_left_as_they_were(base, dtype):
    model = network(dtype)
    opt = FOSI(FEW[base](model.parameters()), model=model, **SUBSPACE)
    for t in range(3):
        loss = network_loss(model, batch(t, dtype=dtype))
        opt.zero_grad()
        loss().backward()
        same, before = [p.grad for p in model.parameters()], [p.grad.clone() for p in model.parameters()]
        if opt.refresh_due:
            opt.refresh(loss)
        opt.step()
        assert all(p.grad is g for p, g in zip(model.parameters(), same, strict=True))
        assert_same_bits([p.grad for p in model.parameters()], before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["SGD", "Adam"])
def test_half_precision_parameters(name, dtype):
    """Numbers that half precision holds exactly: the step is right to its rounding."""
    scales = torch.tensor([64.0, 32.0, 4.0, 2.0, 1.0], dtype=dtype)
    w = torch.ones(5, dtype=dtype, requires_grad=True)
    settings = {"lr": 0.125} if name == "SGD" else {"lr": 0.125, "eps": 1e-4}  # Adam's 1e-8 is 0 in float16
    opt = FOSI(of_torch()[name]([w], **settings), k=2, alpha=0.5, warmup=0, lr_rule=None)
    (0.5 * (scales * w**2).sum()).backward()
    spectrum = opt.refresh(lambda: 0.5 * (scales * w**2).sum())
    assert spectrum.eigenvectors[0].dtype == torch.float32
    assert spectrum.accepted.all()
    opt.step()
    outside = [0.5, 0.75, 0.875] if name == "SGD" else [0.875] * 3
    expected = torch.tensor([0.5, 0.5, *outside])
    assert w.dtype == dtype
    torch.testing.assert_close(w.detach().float(), expected, rtol=0, atol=12 * torch.finfo(dtype).eps)


class Convolution(nn.Module):
    """A convolution whose weights lie in memory as told."""

    def __init__(self, memory_format):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.conv = nn.Conv2d(2, 3, 2).double()
            self.head = nn.Linear(3, 2).double()
        self.to(memory_format=memory_format)

    def forward(self, x):
        return self.head(torch.tanh(self.conv(x)).mean((2, 3)))


@few_bases
def test_weights_in_channels_last(base):
    """The same path as contiguous weights, and a checkpoint of either goes on in the other."""
    x = torch.randn(16, 2, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    y = torch.sin(x.sum((2, 3)))

    def go(model, opt, steps):
        for _ in range(steps):
            opt.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            if opt.refresh_due:
                opt.refresh(lambda: nn.functional.mse_loss(model(x), y))
            opt.step()
        return flat(model.parameters()).detach()

    def build(memory_format):
        model = Convolution(memory_format)
        options = {"k": 2, "num_matvecs": 35, "precision": "float64", "warmup": 0, "refresh_every": 4}
        return model, FOSI(FEW[base](model.parameters()), model=model, alpha=0.1, **options)

    straight, opt = build(torch.contiguous_format)
    strided, other = build(torch.channels_last)
    assert straight.conv.weight.is_contiguous() and not strided.conv.weight.is_contiguous()
    start = flat(straight.parameters()).detach()
    torch.testing.assert_close(go(strided, other, 6), go(straight, opt, 6), rtol=1e-8, atol=1e-8)
    assert (flat(straight.parameters()) - start).norm() > 0.1
    assert opt.spectrum.accepted.all()

    swapped, third = build(torch.contiguous_format)
    swapped.load_state_dict(strided.state_dict())
    third.load_state_dict(through_a_file(other.state_dict()))
    torch.testing.assert_close(go(swapped, third, 4), go(straight, opt, 4), rtol=1e-8, atol=1e-8)


def test_a_group_added_on_the_way():
    """Its parameters take the base's steps until the next refresh, and have their part in the spectrum after it."""
    model = network()
    opt = FOSI(torch.optim.Adam(model[0].parameters(), lr=0.05), model=model, **SUBSPACE)
    train(model, opt, range(1))
    old = opt.spectrum
    opt.add_param_group({"params": list(model[2].parameters()), "lr": 0.02})
    assert_same_bits(opt.spectrum.eigenvectors[:2], old.eigenvectors)
    assert_same_bits(opt.spectrum.eigenvalues, old.eigenvalues)
    assert opt.param_groups[1]["betas"] == (0.9, 0.999)

    twins = [nn.Parameter(p.detach().clone()) for p in model[2].parameters()]
    bare = torch.optim.Adam(twins, lr=0.02)

    def follow(t):
        for twin, p in zip(twins, model[2].parameters(), strict=True):
            twin.grad = p.grad.clone()
        bare.step()

    train(model, opt, range(1, 3), after=follow)
    assert_same_bits(values(model[2]), values(twins))
    assert not opt.spectrum.eigenvectors[2].any()
    train(model, opt, range(3, 4), after=follow)
    assert opt.spectrum.eigenvectors[2].any()
    assert differs(values(model[2]), values(twins))

    again = network()
    groups = [{"params": list(again[0].parameters()), "lr": 0.05}, {"params": list(again[2].parameters()), "lr": 0.02}]
    resumed = FOSI(torch.optim.Adam(groups), model=again, **SUBSPACE)
    again.load_state_dict(model.state_dict())
    resumed.load_state_dict(through_a_file(opt.state_dict()))
    train(model, opt, range(4, 7))
    train(again, resumed, range(4, 7))
    assert_same_bits(values(again), values(model))
