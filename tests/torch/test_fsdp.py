"""Two processes that share a model in shards (FSDP2), each with half of the batch, train as one with all of both."""

import re

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from fosi.torch import FOSI, ModelLoss, estimate_spectrum
from tests.torch.processes import two_processes

STEPS = 11
OPTIONS = {"k": 3, "ell": 1, "warmup": 2, "refresh_every": 3, "precision": "float64", "num_matvecs": 18}
BASES = {
    "heavy-ball": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, weight_decay=0.1),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True, weight_decay=0.1),
    "groups": lambda p: torch.optim.SGD([{"params": [x]} for x in p], lr=0.01, momentum=0.9, weight_decay=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
}


class Net(nn.Module):
    """18 numbers, in pieces that two processes cannot share evenly: of some the second process has nothing."""

    def __init__(self, seed=0, frozen=False):
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.last = nn.Linear(2, 3), nn.Linear(3, 1)
        self.scale, self.shift = nn.Parameter(torch.ones(1, 3)), nn.Parameter(torch.zeros(2))
        self.first.bias.requires_grad_(not frozen)
        self.double()

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)) * self.scale) + self.shift.sum()


def _sharded(seed=0, frozen=False, **settings):
    model = Net(seed, frozen)
    for part in (model.first, model.last, model):
        fully_shard(part, **settings)
    return model


def _data():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(16, 2, generator=generator, dtype=torch.float64)
    return x, (x[:, :1] * x[:, 1:2]).sin()


def _half():
    return tuple(whole.chunk(2)[dist.get_rank()] for whole in _data())


def _loss(model, x, y):
    return _split(model, x, y)()


def _split(model, x, y):
    return ModelLoss(lambda: model(x), lambda outputs: nn.functional.mse_loss(outputs, y))


def _optimizer(model, base, **options):
    return FOSI(BASES[base](model.parameters()), model=model, **{**OPTIONS, **options})


def _train(model, opt, x, y, steps):
    for t in range(steps):
        if t == 5:  # where there are several groups, SGD is linear until their rates part
            opt.param_groups[-1]["lr"] = 0.005
        opt.zero_grad()
        _loss(model, x, y).backward()
        if opt.refresh_due:
            opt.refresh(_split(model, x, y))
        opt.step()


def _full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _outcome(model, opt):
    """Parameters and eigenvalues; eigenvectors as projections, which have no sign."""
    params = [_full(p).detach().reshape(-1) for p in model.parameters()]
    spectrum = opt.spectrum
    basis = torch.cat([_full(v).reshape(len(spectrum.eigenvalues), -1) for v in spectrum.eigenvectors], dim=1)
    projections = torch.einsum("ki,kj->kij", basis, basis).reshape(-1)
    return torch.cat([*params, spectrum.eigenvalues, projections, torch.tensor([opt.lr_scale])]).numpy()


GAUSS_NEWTON = {"curvature": "gauss_newton", "ell": 0}  # whose smallest eigenvalues are 0
# The base, whether a parameter is frozen, and settings.
CASES = [
    ("heavy-ball", False, {}),
    ("groups", False, {}),
    ("nesterov", True, {}),
    ("adamw", False, {}),
    ("adamw", True, {}),
    ("heavy-ball", True, GAUSS_NEWTON),
]


def _along_the_last(param):
    """FSDP cuts along other dimensions than the first where it goes evenly."""
    return Shard(param.ndim - 1) if param.shape[-1] % 2 == 0 else None


def _train_all(folder):
    for case, (base, frozen, settings) in enumerate(CASES):
        model = _sharded(frozen=frozen, shard_placement_fn=_along_the_last if base == "nesterov" else None)
        opt = _optimizer(model, base, **settings)
        _train(model, opt, *_half(), STEPS)
        assert opt._refreshes == 3
        np.save(folder / f"{case}-{dist.get_rank()}.npy", _outcome(model, opt))
    rows = {name: p.to_local().shape[0] for name, p in model.named_parameters()}
    assert list(rows.values()) == ([1, 1, 2, 2, 1, 1] if dist.get_rank() == 0 else [0, 1, 1, 1, 0, 0])


def test_shards_train_as_one(tmp_path):
    two_processes(_train_all, tmp_path)
    for case, (base, frozen, settings) in enumerate(CASES):
        first, second = (np.load(tmp_path / f"{case}-{rank}.npy") for rank in range(2))
        np.testing.assert_array_equal(first, second)
        model = Net(frozen=frozen)
        opt = _optimizer(model, base, **settings)
        _train(model, opt, *_data(), STEPS)
        assert opt.spectrum.accepted.all()
        np.testing.assert_allclose(first, _outcome(model, opt), rtol=1e-8, atol=1e-9, err_msg=base)


def _saved(model, opt):
    model_state, optimizer_state = get_state_dict(model, opt)
    return {"model": model_state, "opt": optimizer_state}


def _loaded(model, opt, folder, **how):
    state = _saved(model, opt)
    dcp.load(state, checkpoint_id=folder, **how)
    set_state_dict(model, opt, model_state_dict=state["model"], optim_state_dict=state["opt"])


def _save_and_resume(folder):
    for base in ("heavy-ball", "adamw"):
        model = _sharded()
        opt = _optimizer(model, base)
        _train(model, opt, *_half(), 4)
        dcp.save(_saved(model, opt), checkpoint_id=folder / base)
        piece, weight = opt.state_dict()["state"][2]["fosi_basis"], model.first.weight
        assert piece.placements == (Shard(1),) and piece.shape == (4, *weight.shape)
        assert piece.to_local().shape == (4, *weight.to_local().shape)
        _train(model, opt, *_half(), STEPS - 4)

        other = _sharded(seed=1)
        resumed = _optimizer(other, base)
        _loaded(other, resumed, folder / base)
        _train(other, resumed, *_half(), STEPS - 4)
        for one, two in zip(opt.state_dict()["state"].values(), resumed.state_dict()["state"].values(), strict=True):
            assert one.keys() == two.keys()
            assert all(torch.equal(_full(one[name]), _full(two[name])) for name in one)
        np.testing.assert_array_equal(_outcome(other, resumed), _outcome(model, opt))
        np.save(folder / f"{base}.npy", _outcome(model, opt))

        # A checkpoint of whole tensors: each process takes its shards out of it.
        whole = opt.state_dict()
        for entries in whole["state"].values():
            entries["fosi_basis"] = _full(entries["fosi_basis"])
        resumed.load_state_dict(whole)
        for i, vectors in enumerate(resumed.spectrum.eigenvectors):
            assert torch.equal(_full(vectors), whole["state"][i]["fosi_basis"])


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # a distributed checkpoint in one process
def test_a_distributed_checkpoint_resumes_in_shards_and_in_one_process(tmp_path):
    two_processes(_save_and_resume, tmp_path)
    for base in ("heavy-ball", "adamw"):
        model = Net(seed=1)
        opt = _optimizer(model, base)
        _loaded(model, opt, tmp_path / base, no_dist=True)
        _train(model, opt, *_data(), STEPS - 4)
        np.testing.assert_allclose(_outcome(model, opt), np.load(tmp_path / f"{base}.npy"), rtol=1e-8, atol=1e-9)


# What a refresh leaves behind.


def _settings(model):
    """Everything that FSDP keeps about its groups of parameters, as far as it is numbers, flags, or a mesh."""
    plain = (bool, int, float, str, type(None))
    found = []
    for m in model.modules():
        if isinstance(m, FSDPModule):
            state = m._get_fsdp_state()
            group = state._fsdp_param_group
            found.append({name: x for name, x in vars(group).items() if isinstance(x, plain)})
            found.append({"state": group._training_state, "mesh": group.post_forward_mesh_info})
            found.append({name: x for name, x in vars(state).items() if isinstance(x, plain)})
    return found


def _gradients(model, x, y, between=None):
    model.zero_grad()
    loss = _loss(model, x, y)
    if between is not None:
        between()
    loss.backward()
    return [_full(p.grad).clone() for p in model.parameters()]


def _refresh_and_look():
    x, y = _half()
    plain, model = _sharded(), _sharded()
    opt = _optimizer(model, "adamw", warmup=0)
    params = list(model.parameters())
    expected = _gradients(plain, x, y)
    whole = Net()
    for got, p in zip(expected, whole.parameters(), strict=True):
        (grad,) = torch.autograd.grad(_loss(whole, *_data()), p)
        torch.testing.assert_close(got, grad)  # reduced over both processes

    def refresh():
        return opt.refresh(lambda: _loss(model, x, y))

    def same(found):
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        assert all(a is b for a, b in zip(model.parameters(), params, strict=True))
        assert all(isinstance(p, DTensor) and isinstance(p.grad, DTensor) for p in params)

    assert _optimizer(model, "adamw", num_matvecs=None).schedule.num_matvecs == 16  # here are fewer parameters
    spectrum = refresh()  # before any pass of the model: FSDP makes up its mind in here
    same(_gradients(model, x, y))
    assert _settings(model) == _settings(plain)
    kept = [p.grad for p in params]
    before = _settings(model)
    refresh()
    assert all(p.grad is grad for p, grad in zip(params, kept, strict=True))
    same([_full(grad) for grad in kept])
    assert _settings(model) == before
    same(_gradients(model, x, y))
    same(_gradients(model, x, y, between=refresh))  # between the passes of the training itself
    assert _settings(model) == before

    # What the user has set stays, and the gradients that wait for the last micro-batch do.
    for one in (plain, model):
        one.zero_grad()
        one.last.set_reshard_after_backward(False)
        one.set_requires_gradient_sync(False)
        _loss(one, x, y).backward()
    before = _settings(model)
    refresh()
    assert _settings(model) == before
    for one in (plain, model):
        one.set_requires_gradient_sync(True)
        _loss(one, x, y).backward()
        one.reshard(), one.last.reshard()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(_full(p.grad), _full(q.grad), rtol=1e-12, atol=0)

    def backward():
        loss = _loss(model, x, y)
        loss.backward()
        return _loss(model, x, y)

    model.last.set_reshard_after_backward(True)
    same(_gradients(model, x, y))
    with pytest.raises(ValueError, match=r"changed \.grad"):
        opt.refresh(backward)
    with pytest.raises(ValueError, match="without a graph"):
        opt.refresh(lambda: _loss(model, x, y).detach())
    same(_gradients(model, x, y))

    # In micro-batches, and by name without any optimizer.
    halves = [lambda x=x, y=y: _loss(model, x, y) for x, y in zip(x.chunk(2), y.chunk(2), strict=True)]
    torch.testing.assert_close(opt.refresh(halves).eigenvalues, spectrum.eigenvalues, rtol=1e-9, atol=1e-11)
    with torch.no_grad():
        model(x)  # FSDP leaves its root's whole parameters in place
    named = estimate_spectrum(lambda: _loss(model, x, y), model, k=3, ell=1, num_matvecs=18, precision="float64")
    torch.testing.assert_close(named.eigenvalues, spectrum.eigenvalues, rtol=1e-9, atol=1e-11)
    assert list(named.eigenvectors) == [name for name, _ in model.named_parameters()]
    for name, p in model.named_parameters():
        assert named.eigenvectors[name].placements == (Shard(1),)
        assert named.eigenvectors[name].shape == (4, *p.shape)

    # A first step at learning rate 0 counts in every process, also in one that holds nothing of the only gradient.
    lone = nn.Linear(2, 1, bias=False).double()
    fully_shard(lone)
    still = FOSI(torch.optim.SGD(lone.parameters(), lr=0.0), model=lone, k=1)
    _loss(lone, x, y).backward()
    still.step()
    assert still._count == 1

    # Products run in what FSDP computes in, and are trusted as far as that goes.
    coarse = _sharded(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    rough = estimate_spectrum(lambda: _loss(coarse, x, y.bfloat16()), coarse, k=1)
    assert rough.resolution >= 10 * torch.finfo(torch.bfloat16).eps * rough.extremes.abs().max()
    torch.testing.assert_close(rough.eigenvalues[0], spectrum.eigenvalues[0], rtol=0.05, atol=0)


def test_a_refresh_leaves_fsdp_as_it_was():
    two_processes(_refresh_and_look)


# What is not supported says so.


def _raises(message, params, model=None):
    with pytest.raises(ValueError, match=re.escape(message)):
        opt = FOSI(torch.optim.SGD(params, lr=0.1), model=model, k=1, warmup=0)
        opt.refresh(lambda: _loss(model, *_half()))


def _try_what_is_not_supported():
    mesh = init_device_mesh("cpu", (2,))
    _raises("pass model=", _sharded().parameters())
    _raises("not one that fully_shard cut for this model", _sharded().parameters(), _sharded())
    hybrid = _sharded(mesh=init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard")))
    _raises("hybrid sharding and tensor parallelism are not supported", hybrid.parameters(), hybrid)
    replicated = nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Replicate()]))
    _raises("with placements (Replicate(),)", [replicated])
    square = init_device_mesh("cpu", (2, 1))
    twice = nn.Parameter(distribute_tensor(torch.ones(4, 4), square, [Shard(0), Shard(1)]))
    _raises("with placements (Shard(dim=0), Shard(dim=1))", [twice])
    half = Net()
    fully_shard(half.first)
    _raises("a plain one of shape (1, 3)", half.parameters(), half)
    tensor_parallel = nn.Linear(3, 4)
    for name, p in list(tensor_parallel.named_parameters()):
        setattr(tensor_parallel, name, nn.Parameter(distribute_tensor(p, mesh, [Shard(0)])))
    _raises("not one that fully_shard cut for this model", tensor_parallel.parameters(), tensor_parallel)


def test_other_ways_to_shard_are_errors_that_name_them():
    two_processes(_try_what_is_not_supported)
