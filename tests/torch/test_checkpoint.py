"""Saving and loading: state_dict, distributed checkpoints, pickle and copies go on bit for bit."""

import copy
import io
import pickle

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

from fosi.torch import FOSI
from tests.torch.training import assert_same_bits, batch, differs, loss_of, network, train, values

BASES = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.02),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.02, momentum=0.9),
    "Adam": lambda params: torch.optim.Adam(params, lr=0.02),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=0.01, momentum=0.9),
}
OPTIONS = {"k": 3, "ell": 1, "warmup": 1, "refresh_every": 5, "accept": "all"}
every_base = pytest.mark.parametrize("base", BASES)
pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled"
)  # distributed checkpoints in one process


def build(base="Adam", dtype=torch.float32, seed=0, **options):
    model = network(dtype, seed)
    return model, FOSI(BASES[base](model.parameters()), model=model, **{**OPTIONS, **options})


def trained(base="Adam", dtype=torch.float32, steps=4, **options):
    model, opt = build(base, dtype, **options)
    train(model, opt, range(steps))
    return model, opt


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def assert_they_go_on_alike(model, opt, other_model, other):
    """Within the spectrum and over the next refresh."""
    assert opt.spectrum is not None
    was = opt.spectrum.eigenvalues
    train(model, opt, range(4, 9))
    train(other_model, other, range(4, 9))
    assert differs([opt.spectrum.eigenvalues], [was])
    assert_same_bits(values(other_model), values(model))
    assert_same_bits(other.state_dict(), opt.state_dict())


@every_base
@pytest.mark.parametrize("steps", [0, 4])
def test_layout(base, steps):
    """Only what torch's tools know: ``state`` by parameter and ``param_groups``, and nothing but tensors of ours."""
    model, opt = trained(base, steps=steps)
    saved = opt.state_dict()
    assert set(saved) == {"state", "param_groups"}
    assert_same_bits(saved["param_groups"], opt.base.state_dict()["param_groups"])
    bare = opt.base.state_dict()["state"]
    for i, p in enumerate(model.parameters()):
        ours = {name: x for name, x in saved["state"][i].items() if name.startswith("fosi_")}
        theirs = {name: x for name, x in saved["state"][i].items() if name not in ours}
        assert_same_bits(theirs, bare.get(i, {}))
        assert ours["fosi_basis"].shape == (4, *p.shape)
        assert all(isinstance(x, torch.Tensor) for x in ours.values())
        assert i == 0 or set(ours) == {"fosi_basis"}
    assert not any("fosi" in str(name) for p in model.parameters() for name in opt.base.state[p])
    assert int(saved["state"][0]["fosi_step"]) == steps


# Distributed checkpoints, in one process.


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@every_base
def test_distributed_checkpoint_through_files(base, dtype, tmp_path):
    """They load in place, into what a fresh optimizer shows."""
    model, opt = trained(base, dtype)
    model_state, optimizer_state = get_state_dict(model, opt)
    dcp.save({"model": model_state, "opt": optimizer_state}, checkpoint_id=tmp_path, no_dist=True)

    other_model, other = build(base, dtype, seed=1)
    model_state, optimizer_state = get_state_dict(other_model, other)
    state = {"model": model_state, "opt": optimizer_state}
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    set_state_dict(other_model, other, model_state_dict=state["model"], optim_state_dict=state["opt"])
    assert_same_bits(other.state_dict(), opt.state_dict())
    for found, expected in zip(other.spectrum, opt.spectrum, strict=True):
        assert_same_bits(found, expected)
    assert_they_go_on_alike(model, opt, other_model, other)


@every_base
def test_distributed_checkpoint_in_memory(base):
    model, opt = trained(base)
    saved = get_optimizer_state_dict(model, opt)
    assert set(saved) == {"state", "param_groups"}
    assert list(saved["state"]) == [name for name, _ in model.named_parameters()]
    other_model, other = build(base)
    other_model.load_state_dict(model.state_dict())
    set_optimizer_state_dict(other_model, other, through_a_file(saved))
    assert_they_go_on_alike(model, opt, other_model, other)


@pytest.mark.parametrize("base", [name for name in BASES if name != "SGD"])  # that one has no state
def test_a_flattened_distributed_checkpoint_keeps_the_bases_state(base):
    """torch takes the names to load from ``state``, the base's: the curvature is estimated anew."""
    model, opt = trained(base)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    saved = get_optimizer_state_dict(model, opt, options=options)
    assert all(f"state.{name}.fosi_basis" in saved for name, _ in model.named_parameters())
    other_model, other = build(base)
    set_optimizer_state_dict(other_model, other, through_a_file(saved), options=options)
    assert_same_bits(other.base.state_dict(), opt.base.state_dict())


def test_distributed_checkpoint_with_frozen_parameters(tmp_path):
    """Nothing is loaded for those: the first parameter must not be the one that everything hangs on."""
    model, other_model = network(), network(seed=1)
    opts = []
    for one in (model, other_model):
        one[0].requires_grad_(False)
        opts.append(FOSI(torch.optim.Adam(one.parameters(), lr=0.02), model=one, **OPTIONS))
    train(model, opts[0], range(4))
    model_state, optimizer_state = get_state_dict(model, opts[0])
    dcp.save({"model": model_state, "opt": optimizer_state}, checkpoint_id=tmp_path, no_dist=True)
    model_state, optimizer_state = get_state_dict(other_model, opts[1])
    state = {"model": model_state, "opt": optimizer_state}
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    set_state_dict(other_model, opts[1], model_state_dict=state["model"], optim_state_dict=state["opt"])
    train(model, opts[0], range(4, 9))
    train(other_model, opts[1], range(4, 9))
    assert opts[1].spectrum is not None
    # Not bit for bit: Lanczos leaves rounding errors in the frozen part of the eigenvectors, which are not loaded.
    torch.testing.assert_close(values(other_model), values(model), rtol=1e-5, atol=1e-6)


@every_base
def test_the_rehearsal_of_a_distributed_checkpoint_is_harmless(base):
    """It has a fresh optimizer step with zero gradients and rate: nothing moves, and that step does not count."""
    model = network()

    def never():
        raise AssertionError("a refresh for a step that does not count")

    opt = FOSI(BASES[base](model.parameters()), model=model, curvature_loss=never, k=2, warmup=0)
    before, rates = values(model), [group["lr"] for group in opt.param_groups]
    get_optimizer_state_dict(model, opt)
    assert_same_bits(values(model), before)
    assert opt.refresh_due and opt.spectrum is None
    assert int(opt.state_dict()["state"][0]["fosi_step"]) == 0
    assert [group["lr"] for group in opt.param_groups] == rates


def test_only_a_rehearsal_does_not_count():
    """Zero gradients or a zero rate alone make a step like any other."""
    for lr, factor in ((0.0, 1.0), (0.1, 0.0)):
        w = torch.ones(3, requires_grad=True)
        opt = FOSI(torch.optim.SGD([w], lr=lr), k=1, warmup=1)
        (factor * w).sum().backward()
        opt.step()
        assert opt.refresh_due


# What load_state_dict makes of what it is given.


@every_base
def test_a_checkpoint_of_the_bare_base_loads(base):
    """The base's state is kept, and the curvature starts empty, whatever was there before."""
    bare_model = network()
    bare = BASES[base](bare_model.parameters())
    train(bare_model, bare, range(3))
    model, opt = trained(base)
    assert opt.spectrum is not None and not opt.refresh_due
    model.load_state_dict(bare_model.state_dict())
    opt.load_state_dict(through_a_file(bare.state_dict()))
    assert opt.spectrum is None and opt.lr_scale == 1
    assert_same_bits(opt.base.state_dict(), bare.state_dict())
    train(bare_model, bare, range(3, 4))
    train(model, opt, range(3, 4))
    assert_same_bits(values(model), values(bare_model))
    assert opt.refresh_due  # counted from 0: warmup is 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_basis_keeps_its_precision(dtype):
    """Not cast to the parameters' dtype, as torch does with a base's state."""
    model, opt = trained("momentum", dtype)
    other_model, other = build("momentum", dtype)
    other_model.load_state_dict(model.state_dict())
    other.load_state_dict(through_a_file(opt.state_dict()))
    found, expected = other.spectrum.eigenvectors, opt.spectrum.eigenvectors
    assert found[0].dtype == torch.float32
    assert_same_bits(found, expected)
    assert differs([x.to(dtype).float() for x in expected], expected)
    assert_they_go_on_alike(model, opt, other_model, other)


@pytest.mark.parametrize("options", [{"k": 5}, {"k": 1}, {"ell": 0}])
def test_another_number_of_pairs_is_an_error(options):
    """That names both shapes, and leaves the optimizer as it was."""
    _, opt = trained()
    model, other = trained(**options)
    rank = other.options.k + other.options.ell
    kept, control = other.state_dict(), copy.deepcopy((model, other))
    with pytest.raises(ValueError, match=rf"\(4, 4, 3\).*\({rank}, 4, 3\).*k and ell"):
        other.load_state_dict(opt.state_dict())
    assert_same_bits(other.state_dict(), kept)
    train(model, other, range(4, 9))
    train(*control, range(4, 9))
    assert_same_bits(values(model), values(control[0]))


@pytest.mark.parametrize("change", ["fewer parameters", "other shapes", "more groups"])
def test_a_checkpoint_of_another_model_is_an_error(change):
    """And leaves the optimizer as it was."""
    other_model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3 if change == "other shapes" else 2))
    params = list(other_model.parameters())
    groups = {"fewer parameters": params[:3], "other shapes": params, "more groups": None}[change]
    groups = groups or [{"params": params[:2]}, {"params": params[2:]}]
    other = FOSI(torch.optim.Adam(groups), model=other_model, **OPTIONS)
    _, opt = trained()
    kept = copy.deepcopy(opt.state_dict())
    with pytest.raises(ValueError, match=r"shape|group"):
        opt.load_state_dict(other.state_dict())
    assert_same_bits(opt.state_dict(), kept)
    assert opt.spectrum is not None


def test_loading_changes_nothing_that_it_is_given():
    _, opt = trained()
    saved = copy.deepcopy(opt.state_dict())
    kept = copy.deepcopy(saved)
    _, other = build()
    other.register_load_state_dict_pre_hook(lambda o, state: state.pop("note") and None)
    saved["note"] = kept["note"] = "of the user's"
    other.load_state_dict(saved)
    assert_same_bits(saved, kept)


def test_what_was_loaded_shares_no_memory_with_the_checkpoint():
    _, opt = trained()
    saved = copy.deepcopy(opt.state_dict())
    _, other = build()
    other.load_state_dict(saved)
    loaded = copy.deepcopy(other.spectrum)
    for entries in saved["state"].values():
        for name, tensor in entries.items():
            if name.startswith("fosi_"):
                tensor.fill_(7)
    for found, expected in zip(other.spectrum, loaded, strict=True):
        assert_same_bits(found, expected)
    ours = [x for entries in other.state_dict()["state"].values() for n, x in entries.items() if n.startswith("fosi_")]
    assert not any((x == 7).all() for x in ours)


def test_a_saved_empty_spectrum_has_memory_of_its_own_for_everything():
    """Distributed checkpoints load in place: what shares memory overwrites each other."""
    _, opt = build()
    tensors = [x for entries in opt.state_dict()["state"].values() for x in entries.values()]
    spans = [(x.data_ptr(), x.data_ptr() + x.numel() * x.element_size()) for x in tensors]
    pieces = [x for n, e in opt.state_dict()["state"].items() for k, x in e.items() if k == "fosi_basis"]
    small = [s for s, x in zip(spans, tensors, strict=True) if x.shape not in {p.shape for p in pieces}]
    assert len(small) > 5
    assert len(set(small)) == len(small)


def test_hooks_of_saving_and_loading():
    model, opt = trained()
    seen = []
    opt.register_state_dict_pre_hook(lambda o: seen.append(("save", o is opt)))
    opt.register_state_dict_post_hook(lambda o, state: {**state, "note": len(seen)})
    opt.base.register_state_dict_pre_hook(lambda o: seen.append(("base", o is opt.base)))
    saved = copy.deepcopy(opt.state_dict())
    assert saved["note"] == 2 and seen == [("save", True), ("base", True)]

    other_model, other = build()
    other_model.load_state_dict(model.state_dict())

    def rename(o, state):
        seen.append(("load", sorted(state)))
        state = dict(state)
        state["state"] = state.pop("moved")
        return state

    other.register_load_state_dict_pre_hook(rename)
    other.register_load_state_dict_post_hook(lambda o: seen.append(("loaded", o.spectrum is not None)))
    moved = {"moved": saved["state"], "param_groups": saved["param_groups"]}
    other.load_state_dict(moved)
    assert seen[2:] == [("load", ["moved", "param_groups"]), ("loaded", True)]
    assert sorted(moved) == ["moved", "param_groups"]
    train(model, opt, range(4, 7))
    train(other_model, other, range(4, 7))
    assert_same_bits(values(other_model), values(model))


def test_a_refresh_already_made_is_not_made_again():
    """Saved between the refresh of a step and the step itself."""
    model, opt = build(warmup=0)
    loss = loss_of(model, batch(0))
    opt.refresh(loss)
    assert not opt.refresh_due
    _, other = build(warmup=0)
    other.load_state_dict(through_a_file(opt.state_dict()))
    assert not other.refresh_due


# Pickle and copies of model and optimizer together.


@pytest.mark.parametrize("scheduled", [False, True])
@pytest.mark.parametrize("way", ["pickle", "deepcopy"])
@pytest.mark.parametrize("steps", [0, 4])
@every_base
def test_copies_go_on_alike(base, steps, way, scheduled):
    model, opt = build(base)
    if scheduled:
        torch.optim.lr_scheduler.LambdaLR(opt, lambda t: 1.0)
        torch.optim.lr_scheduler.LambdaLR(opt.base, lambda t: 1.0)
    train(model, opt, range(steps))
    pair = (model, opt)
    twin, other = copy.deepcopy(pair) if way == "deepcopy" else pickle.loads(pickle.dumps(pair))
    mine, theirs = [*model.parameters()], [*twin.parameters()]
    assert all(p is q for p, q in zip(other.param_groups[0]["params"], theirs, strict=True))
    assert not any(p is q for p, q in zip(mine, theirs, strict=True))
    train(model, opt, range(4, 9))
    kept = values(model)
    train(twin, other, range(4, 9))
    assert_same_bits(values(twin), kept)
    assert_same_bits(values(model), kept)  # the copy's steps are its own
    assert_same_bits(other.state_dict(), opt.state_dict())
    np.testing.assert_equal(other.lr_scale, opt.lr_scale)


def test_a_copy_is_an_optimizer_with_hooks_and_schedulers():
    model, opt = trained("momentum")
    twin, other = copy.deepcopy((model, opt))
    seen = []
    other.register_step_post_hook(lambda *_: seen.append(1))
    schedule = torch.optim.lr_scheduler.LambdaLR(other, lambda t: 0.5**t)
    train(twin, other, range(4, 6), after=lambda t: schedule.step())
    assert seen == [1, 1]
    assert other.param_groups[0]["lr"] == 0.02 * 0.25
    assert opt.param_groups[0]["lr"] == 0.02
    assert repr(other).startswith("FOSI(")
