"""FOSI as a torch optimizer: schedulers, hooks, clipping, accumulation and scaling, and when a refresh happens."""

import copy
import dataclasses
import gc
import inspect
import math
import os
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import fosi
from fosi.torch import FOSI
from tests.torch.training import assert_same_bits, batch, differs, loss_of, network, train, values

BASES = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.02, momentum=0.9),
    "Adam": lambda params: torch.optim.Adam(params, lr=0.02),
}
OPTIONS = {"k": 3, "ell": 1, "warmup": 1, "refresh_every": 3, "accept": "all"}
every_base = pytest.mark.parametrize("base", BASES)


def build(base="Adam", dtype=torch.float32, **options):
    model = network(dtype)
    return model, FOSI(BASES[base](model.parameters()), model=model, **{**OPTIONS, **options})


def count(opt):
    return int(opt.state_dict()["state"][0]["fosi_step"])


def test_it_is_an_optimizer():
    model, opt = build()
    assert isinstance(opt, torch.optim.Optimizer)
    assert opt.defaults["betas"] == (0.9, 0.999)
    assert [p for group in opt.param_groups for p in group["params"]] == list(model.parameters())


def test_groups_and_state_are_the_bases_also_after_loading():
    """The base replaces both when it loads."""
    model, opt = build(alpha=0.0)
    train(model, opt, range(2))
    opt.load_state_dict(copy.deepcopy(opt.state_dict()))
    assert opt.param_groups is opt.base.param_groups and opt.state is opt.base.state
    opt.param_groups[0]["lr"] = 0.0
    before = values(model)
    train(model, opt, range(2, 3))
    assert_same_bits(values(model), before)


# Learning-rate schedulers.

SCHEDULERS = {
    "LambdaLR": lambda opt: lr_scheduler.LambdaLR(opt, lambda t: 1 / (1 + t)),
    "CosineAnnealingLR": lambda opt: lr_scheduler.CosineAnnealingLR(opt, T_max=6),
    "OneCycleLR": lambda opt: lr_scheduler.OneCycleLR(opt, max_lr=0.05, total_steps=10),
    "ReduceLROnPlateau": lambda opt: lr_scheduler.ReduceLROnPlateau(opt, factor=0.5, patience=0),
}
STEPS = range(7)


def advance(scheduler):
    scheduler.step(*([1.0] if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else []))


def settings_over_time(base, name):
    """What the scheduler makes of the base's settings at each step, on a bare optimizer."""
    opt = BASES[base]([nn.Parameter(torch.ones(1))])
    scheduler = SCHEDULERS[name](opt)
    found = []
    for _ in STEPS:
        found.append(
            {key: opt.param_groups[0][key] for key in ("lr", "momentum", "betas") if key in opt.param_groups[0]}
        )
        opt.step()
        advance(scheduler)
    return found


@pytest.mark.parametrize("name", SCHEDULERS)
@every_base
def test_schedulers(base, name):
    """On the wrapper or on the base: as if the settings were written by hand before every step."""
    expected = settings_over_time(base, name)
    assert len({tuple(x.values()) for x in expected}) > 3
    if name == "OneCycleLR":
        assert len({x.get("momentum", x.get("betas")) for x in expected}) > 3
    by_hand, opt = build(base)
    for t in STEPS:
        opt.param_groups[0].update(expected[t])
        train(by_hand, opt, [t])
    for on_base in (False, True):
        model, opt = build(base)
        scheduler = SCHEDULERS[name](opt.base if on_base else opt)
        train(model, opt, STEPS, after=lambda t, scheduler=scheduler: advance(scheduler))
        assert_same_bits(values(model), values(by_hand))
    constant, opt = build(base)
    train(constant, opt, STEPS)
    assert differs(values(constant), values(by_hand))


# Hooks, gradients, scaling, closures.


@every_base
def test_step_hooks_run_once_a_step(base):
    """Before the first refresh and after it; the base's inside the wrapper's."""
    model, opt = build(base)
    seen = []
    for who, one in (("ours", opt), ("base", opt.base)):
        one.register_step_pre_hook(lambda o, args, kwargs, who=who, one=one: seen.append((who, "before", o is one)))
        one.register_step_post_hook(lambda o, args, kwargs, who=who, one=one: seen.append((who, "after", o is one)))
    train(model, opt, range(3))
    once = [("ours", "before", True), ("base", "before", True), ("base", "after", True), ("ours", "after", True)]
    assert seen == 3 * once


def test_hooks_on_all_optimizers_and_profilers_see_the_step():
    model, opt = build()
    seen = []
    before = register_optimizer_step_pre_hook(lambda o, args, kwargs: seen.append((type(o).__name__, "before")))
    after = register_optimizer_step_post_hook(lambda o, args, kwargs: seen.append((type(o).__name__, "after")))
    try:
        train(model, opt, range(1))
    finally:
        before.remove()
        after.remove()
    base = type(opt.base).__name__
    assert seen == [("FOSI", "before"), (base, "before"), (base, "after"), ("FOSI", "after")]
    with torch.autograd.profiler.profile() as profile:
        train(model, opt, range(1, 2))
    marks = [event.name for event in profile.function_events if event.name.startswith("Optimizer.step#")]
    assert sorted(marks) == sorted(f"Optimizer.step#{name}.step" for name in ("FOSI", base))


def test_zero_grad():
    model, opt = build()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    opt.zero_grad(set_to_none=False)
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())
    opt.zero_grad()
    assert all(p.grad is None for p in model.parameters())


@every_base
def test_gradient_clipping(base):
    """The step sees the clipped gradient."""

    def run(rescale):
        model, opt = build(base, torch.float64, warmup=0)
        for t in range(4):
            loss = loss_of(model, batch(t, dtype=torch.float64))
            opt.zero_grad()
            loss().backward()
            rescale(list(model.parameters()))
            if opt.refresh_due:
                opt.refresh(loss)
            opt.step()
        return values(model)

    def by_hand(params):
        norm = math.sqrt(sum(float((p.grad**2).sum()) for p in params))
        assert norm > 0.1
        for p in params:
            p.grad = p.grad * (0.1 / (norm + 1e-6))

    clipped = run(lambda params: nn.utils.clip_grad_norm_(params, 0.1))
    torch.testing.assert_close(clipped, run(by_hand), rtol=1e-9, atol=1e-9)
    assert differs(clipped, run(lambda params: None))


@every_base
def test_gradient_accumulation(base):
    """Four small batches are one large one, for gradients and for curvature."""
    whole, small = build(base, torch.float64, warmup=0), build(base, torch.float64, warmup=0)
    for t in range(4):
        x, y = batch(t, rows=16, dtype=torch.float64)
        model, opt = whole
        opt.zero_grad()
        loss_of(model, (x, y))().backward()
        if opt.refresh_due:
            opt.refresh(loss_of(model, (x, y)))
        opt.step()
        model, opt = small
        opt.zero_grad()
        pieces = [loss_of(model, piece) for piece in zip(x.split(4), y.split(4), strict=True)]
        for piece in pieces:
            (piece() / 4).backward()
        if opt.refresh_due:
            opt.refresh(pieces)
        opt.step()
    torch.testing.assert_close(values(small[0]), values(whole[0]), rtol=1e-6, atol=1e-6)


@every_base
def test_grad_scaler(base):
    """A power of two and back changes no bit; a step with an infinite gradient does not happen and does not count."""
    plain, opt = build(base)
    train(plain, opt, range(5))

    model, opt = build(base)
    scaler = torch.amp.GradScaler(device="cpu", init_scale=2.0**10)

    def scaled_step(t, spoil=False):
        loss = loss_of(model, batch(t))
        opt.zero_grad()
        scaler.scale(loss()).backward()
        if spoil:
            model[0].weight.grad[0, 0] = math.inf
        if opt.refresh_due:
            opt.refresh(loss)
        scaler.step(opt)
        scaler.update()

    for t in range(3):
        scaled_step(t)
    before, spectrum = values(model), opt.spectrum
    scaled_step(3, spoil=True)
    assert_same_bits(values(model), before)
    assert count(opt) == 3
    assert opt.spectrum.eigenvalues.equal(spectrum.eigenvalues)
    assert scaler.get_scale() == 2.0**9
    for t in range(3, 5):
        scaled_step(t)
    assert count(opt) == 5
    assert_same_bits(values(model), values(plain))


@every_base
def test_step_with_a_closure(base):
    """It evaluates the loss and its gradients, once, also where gradients are off; step returns what it returns."""
    plain, opt = build(base)
    train(plain, opt, range(4))
    model, opt = build(base)
    calls = []
    for t in range(4):
        loss = loss_of(model, batch(t))

        def closure(loss=loss, t=t):
            opt.zero_grad()
            value = loss()
            value.backward()
            calls.append(value)
            return value

        if opt.refresh_due:
            opt.refresh(loss)
        with torch.no_grad():
            assert opt.step(closure) is calls[t]
    assert len(calls) == 4
    assert_same_bits(values(model), values(plain))
    assert opt.step() is None


# When a refresh happens, and what it leaves alone.


def expected_refreshes(warmup, every, steps):
    return [t for t in range(steps) if t >= warmup and (t - warmup) % every == 0]


@pytest.mark.parametrize(("warmup", "every"), [(0, 1), (0, 3), (2, 3), (3, 2), (1, math.inf), (None, 4)])
def test_when_a_refresh_is_due(warmup, every):
    """Before step t exactly when t ≥ W and (t − W) mod T = 0; with curvature_loss at the same steps by itself."""
    model, opt = build(warmup=warmup, refresh_every=every)
    expected = expected_refreshes(every if warmup is None else warmup, every, 11)
    due = []
    for t in range(11):
        loss = loss_of(model, batch(t))
        opt.zero_grad()
        loss().backward()
        assert opt.refresh_due is (t in expected)
        if opt.refresh_due:
            due.append(t)
            opt.refresh(loss)
            assert not opt.refresh_due
        opt.step()
    assert due == expected

    twin = network()
    now, called = [0], []

    def curvature_loss():
        called.append(now[0])
        return loss_of(twin, batch(now[0]))()

    other = FOSI(
        BASES["Adam"](twin.parameters()),
        model=twin,
        curvature_loss=curvature_loss,
        **{**OPTIONS, "warmup": warmup, "refresh_every": every},
    )
    for t in range(11):
        now[0] = t
        other.zero_grad()
        loss_of(twin, batch(t))().backward()
        other.step()
    assert called == expected
    assert_same_bits(values(twin), values(model))


def test_a_refresh_by_hand_stands_for_the_one_that_is_due():
    model = network()
    calls = []

    def curvature_loss():
        calls.append(1)
        return loss_of(model, batch(0))()

    opt = FOSI(BASES["Adam"](model.parameters()), model=model, curvature_loss=curvature_loss, k=2, warmup=0)
    loss_of(model, batch(0))().backward()
    opt.refresh(loss_of(model, batch(0)))
    opt.step()
    assert not calls


@every_base
def test_a_due_step_without_a_refresh_uses_the_spectrum_it_has(base):
    once, opt = build(base, warmup=0, refresh_every=math.inf)
    train(once, opt, range(5))
    model, opt = build(base, warmup=0, refresh_every=2)
    train(model, opt, range(1))
    for t in range(1, 5):
        opt.zero_grad()
        loss_of(model, batch(t))().backward()
        assert opt.refresh_due is (t % 2 == 0)
        opt.step()
    assert_same_bits(values(model), values(once))

    bare, model = network(), network()
    train(bare, BASES[base](bare.parameters()), range(1))
    opt = FOSI(BASES[base](model.parameters()), k=2, warmup=0)
    loss_of(model, batch(0))().backward()
    opt.step()  # due, and there is no spectrum
    assert_same_bits(values(model), values(bare))


def test_a_refresh_leaves_gradients_and_parameters_alone():
    model, opt = build(warmup=0)
    loss = loss_of(model, batch(0))
    before = values(model)
    opt.refresh(loss)
    assert all(p.grad is None for p in model.parameters())
    loss().backward()
    same, kept = [p.grad for p in model.parameters()], [p.grad.clone() for p in model.parameters()]
    opt.refresh(loss)
    assert all(p.grad is g for p, g in zip(model.parameters(), same, strict=True))
    assert_same_bits([p.grad for p in model.parameters()], kept)
    assert_same_bits(values(model), before)
    assert all(p.grad_fn is None and p.requires_grad for p in model.parameters())


UNUSABLE = {
    "NaN": lambda model: loss_of(model, batch(1))() * math.nan,
    "inf": lambda model: loss_of(model, batch(1))() * math.inf,
    "no curvature": lambda model: sum(p.sum() for p in model.parameters()),
    "zero": lambda model: 0.0 * loss_of(model, batch(1))(),
}


@pytest.mark.parametrize("kind", UNUSABLE)
@pytest.mark.parametrize("earlier", [True, False])
@every_base
def test_an_unusable_estimate_changes_nothing(base, earlier, kind):
    """The previous one stays, or none; the step goes on with it, and the refresh was made."""
    options = {"k": 2, "ell": 0, "warmup": 0, "refresh_every": 2, "accept": "converged"}
    control, other = build(base, **{**options, "refresh_every": math.inf if earlier else 1, "warmup": 0})
    model, opt = build(base, **options)
    if earlier:
        train(model, opt, range(2))
        train(control, other, range(2))
        assert opt.spectrum is not None
    was, scale = opt.spectrum, opt.lr_scale
    assert opt.refresh_due
    found = opt.refresh(lambda: UNUSABLE[kind](model))
    assert not found.accepted.any()
    assert not opt.refresh_due
    assert opt.lr_scale == scale
    if earlier:
        assert_same_bits(list(opt.spectrum), list(was))
    else:
        assert opt.spectrum is None
    for one, by in ((model, opt), (control, other)):
        by.zero_grad()
        loss_of(one, batch(2))().backward()
        by.step()
    assert_same_bits(values(model), values(control))
    assert count(opt) == (3 if earlier else 1)


def start_vectors(seed, refreshes):
    """One Lanczos step along the start vector v gives vᵀHv as Ritz value and v, up to its sign, as Ritz vector."""
    w = torch.ones(50, requires_grad=True)
    scales = torch.linspace(1, 9, 50)
    opt = FOSI(torch.optim.SGD([w], lr=0.1), k=1, num_matvecs=1, accept="all", seed=seed)
    found = []
    for _ in range(refreshes):
        spectrum = opt.refresh(lambda: 0.5 * (scales * w**2).sum())
        v = spectrum.eigenvectors[0][0]
        torch.testing.assert_close(spectrum.eigenvalues[0], (scales * v * v).sum())
        found.append(v)
    return torch.stack(found)


def test_start_vectors_follow_from_the_seed_and_the_count():
    """New ones at every refresh, the same for the same seed, nothing to do with torch's own random numbers."""
    torch.manual_seed(1)
    state = torch.get_rng_state()
    found = start_vectors(seed=5, refreshes=4)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    assert_same_bits(start_vectors(seed=5, refreshes=4), found)
    everything = torch.cat([found, start_vectors(seed=6, refreshes=4)])
    overlaps = (everything @ everything.T - torch.eye(8)).abs()
    assert overlaps.max() < 0.7  # none the same, none the other's negative


def test_alpha_as_a_function_of_the_step():
    """In closed form: inside V the step is −α(t) w, from the first step on, refresh or not."""
    scales = torch.tensor([16.0, 1.0], dtype=torch.float64)
    w = torch.ones(2, dtype=torch.float64, requires_grad=True)
    asked = []

    def alpha(t):
        asked.append(t)
        return 0.5 / (1 + t)

    opt = FOSI(torch.optim.SGD([w], lr=0.01), k=1, alpha=alpha, warmup=1, lr_rule=None)
    for _ in range(4):
        opt.zero_grad()
        loss = 0.5 * (scales * w**2).sum()
        loss.backward()
        if opt.refresh_due:
            opt.refresh(lambda: 0.5 * (scales * w**2).sum())
        opt.step()
    assert asked == [1, 2, 3]
    expected = torch.tensor([(1 - 0.16) * (1 - 0.25) * (1 - 0.5 / 3) * (1 - 0.125), 0.99**4], dtype=torch.float64)
    torch.testing.assert_close(w.detach(), expected, rtol=1e-6, atol=1e-6)


def test_what_it_says_of_itself():
    _, opt = build(k=7, alpha=0.25)
    assert "Adam" in repr(opt) and "lr: 0.02" in repr(opt)
    assert "k=7" in repr(opt) and "alpha=0.25" in repr(opt)
    parameters = inspect.signature(FOSI).parameters
    assert list(parameters)[:2] == ["base", "model"]
    assert parameters["k"].default == 10 and parameters["ell"].default == 0
    assert {"alpha", "refresh_every", "warmup", "overhead", "curvature_loss", "lr_rule", "seed"} <= set(parameters)


# Memory.


def tensors_alive():
    gc.collect()
    return sum(issubclass(type(x), torch.Tensor) for x in gc.get_objects())


def resident_megabytes():
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads the memory in use from Linux")
def test_two_hundred_refreshes_leak_nothing():
    """Neither graphs nor memory: every graph is gone at once, without the garbage collector, and parameters can go."""
    parts = refresh_again_and_again()
    gc.collect()
    assert not any(part() is not None for part in parts)


def refresh_again_and_again():
    model = nn.Sequential(nn.Linear(3, 500), nn.Tanh(), nn.Linear(500, 2))
    data, graphs = batch(0, rows=500), []  # activations of a megabyte
    opt = FOSI(torch.optim.Adam(model.parameters()), model=model, k=1, num_matvecs=2, warmup=0, accept="all")

    def loss():
        hidden = model[1](model[0](data[0]))
        value = nn.functional.mse_loss(model[2](hidden), data[1])
        graphs.extend([weakref.ref(hidden), weakref.ref(value)])
        return value

    def refresh(times):
        gc.disable()
        try:
            for _ in range(times):
                opt.refresh(loss)
                assert len(graphs) == 2 and not any(graph() is not None for graph in graphs)
                graphs.clear()
        finally:
            gc.enable()

    refresh(10)
    alive, used = tensors_alive(), resident_megabytes()
    refresh(200)
    assert tensors_alive() == alive
    assert resident_megabytes() - used < 20
    return [weakref.ref(p) for p in model.parameters()]


def test_hook_that_a_closure_registers_is_called_for_its_step():
    model, opt = build()
    seen = []

    def closure():
        opt.zero_grad()
        loss = loss_of(model, batch(0))()
        loss.backward()
        opt.register_step_post_hook(lambda o, args, kwargs: seen.append(o))
        return loss

    opt.step(closure)
    assert seen == [opt]


def test_momentum_of_a_users_own_making_is_asked():
    @dataclasses.dataclass(frozen=True)
    class Damped(fosi.Trace):
        def update(self, momentum, value):
            return 0.1 * value + self.decay * momentum

    ends = []
    for rule in (fosi.Trace(0.9), Damped(0.9)):
        model, opt = build(momentum=rule, warmup=0, alpha=0.1)
        train(model, opt, range(4))
        ends.append(values(model))
    assert differs(*ends)


def test_alpha_may_be_a_tensor():
    for alpha in (torch.tensor(0.1), torch.tensor([0.1])):
        model, opt = build(alpha=alpha, warmup=0)
        train(model, opt, range(2))
