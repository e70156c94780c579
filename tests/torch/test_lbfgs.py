"""FOSI around L-BFGS in torch against BFGS's textbook recursion from FOSI's metric, dense; its search, its state."""

import copy
import itertools
import math
import pickle

import numpy as np
import pytest
import torch
from torch import nn

import fosi
from fosi.torch import FOSI, FosiLBFGS
from fosi.torch.pairs import Metric, Pairs
from fosi.torch.search import Trial, search
from fosi.torch.space import Space
from tests.cases import SIZES, assert_same_path, expected_lbfgs_path, problem_named
from tests.torch.running import as_params, flat, loss_of
from tests.torch.test_wrapping import wrapped

EXACT = {"k": 2, "ell": 1, "accept": "all", "precision": "float64"}


def closure_of(opt, loss):
    def closure():
        opt.zero_grad()
        value = loss()
        value.backward()
        return value

    return closure


@pytest.mark.parametrize("scaling", ["geometric", "usual"])
@pytest.mark.parametrize("name", ["quadratic", "rotating", "network"])
def test_steps_are_bfgs_from_fosis_metric(name, scaling):
    problem = problem_named(name)
    expected, kept = expected_lbfgs_path(problem, 14, 3, 0.1, 3, 5, scaling)
    schedule = {"warmup": 3, "refresh_every": 5, "num_matvecs": len(problem.start), "scaling": scaling}
    settings = {"lr": 0.1, "history_size": 3, "line_search_fn": None, **schedule, **EXACT}

    def made(**more):
        params = as_params(problem, problem.start, torch.float64)
        loss = loss_of(problem, params)
        opt = FosiLBFGS(params, **settings, **({"curvature_loss": loss} | more))
        return opt, params, closure_of(opt, loss), loss

    opt, params, closure, _ = made(max_iter=1)
    found = [problem.start]
    for _ in range(14):
        opt.step(closure)
        found.append(flat(params).detach().numpy())
    assert_same_path(np.stack(found), expected, 1e-8)
    assert opt._pairs.used == kept == 3 and opt._refreshes == 3
    # All iterations in one call, and estimates of the caller's.
    opt, params, closure, _ = made(max_iter=14)
    before = opt.step(closure)
    assert before.item() == pytest.approx(float(problem.value(problem.start, problem.batch, np)), rel=1e-9)
    np.testing.assert_allclose(flat(params).detach(), expected[-1], rtol=1e-7)
    opt, params, closure, loss = made(max_iter=1, curvature_loss=None)
    asked = []
    for step in range(14):
        if opt.refresh_due:
            opt.refresh(loss)
            asked.append(step)
        opt.step(closure)
    assert asked == [3, 8, 13]
    np.testing.assert_allclose(flat(params).detach(), expected[-1], rtol=1e-7)


def test_an_estimate_is_due_once_its_iteration_has_come_and_no_other_was_made():
    w = torch.ones(4, requires_grad=True)

    def loss():
        return (torch.tensor([1.0, 2.0, 3.0, 4.0]) * w**4).sum()

    opt = FosiLBFGS([w], max_iter=4, warmup=3, refresh_every=5, k=1, num_matvecs=4)
    due = []
    for _ in range(5):
        due.append(opt.refresh_due)
        if opt.refresh_due:
            opt.refresh(loss)
            assert not opt.refresh_due
        opt.step(closure_of(opt, loss))
    # Before iterations 0, 4, 8, 12 and 16 of those that are due before 3, 8, 13 and 18.
    assert due == [False, True, True, False, True]
    once = FosiLBFGS([w], max_iter=4, warmup=2, refresh_every=math.inf, k=1, num_matvecs=4, curvature_loss=loss)
    for _ in range(3):
        once.step(closure_of(once, loss))
    assert once._refreshes == 1 and not once.refresh_due


def stiff(w):
    """A bent valley: thirty directions over six orders of magnitude, none of which is an axis for long."""
    return (torch.logspace(0, 6, 30, dtype=w.dtype) * (w + 0.3 * torch.sin(torch.roll(w, 1))) ** 2).sum()


def rosenbrock(w):
    return (100 * (w[1:] - w[:-1] ** 2) ** 2 + (1 - w[:-1]) ** 2).sum()


def descent(make, function, start):
    w = start.clone().requires_grad_()
    opt = make(w, lambda: function(w))
    calls, closure = [], closure_of(opt, lambda: function(w))
    opt.step(lambda: calls.append(0) or closure())
    return function(w).item(), len(calls), opt, w


def test_it_is_far_below_lbfgs_on_a_stiff_problem():
    start = torch.ones(30, dtype=torch.float64)
    settings = {"k": 10, "warmup": 0, "refresh_every": 20, "num_matvecs": 30, "history_size": 10, "max_iter": 60}
    ours, _, _, _ = descent(lambda w, loss: FosiLBFGS([w], curvature_loss=loss, **settings), stiff, start)
    options = {"history_size": 10, "max_iter": 60, "max_eval": 1000, "tolerance_grad": 0, "tolerance_change": 0}
    theirs, _, _, _ = descent(
        lambda w, loss: torch.optim.LBFGS([w], line_search_fn="strong_wolfe", **options), stiff, start
    )
    assert ours < 1e-2 * theirs


def test_steps_become_newtons_near_a_minimum_and_end_there():
    settings = {"k": 5, "warmup": 1, "refresh_every": 20, "num_matvecs": 10, "history_size": 20}
    start = torch.zeros(10, dtype=torch.float64)
    w, values, sizes = start.clone().requires_grad_(), [], []
    opt = FosiLBFGS([w], max_iter=1, curvature_loss=lambda: rosenbrock(w), **settings)
    while len(values) < 120 and (not values or values[-1] > 1e-20):
        values.append(opt.step(closure_of(opt, lambda: rosenbrock(w))).item())
        sizes.append(opt._size)
    near = [size for size, value in zip(sizes, values, strict=True) if value < 1e-6]
    assert values[-1] <= 1e-20 and min(sizes) < 0.1 and max(near) > 0.8
    # Long before so many iterations there is nothing lower; it stays, with the gradient of where it is.
    value, calls, _, w = descent(
        lambda w, loss: FosiLBFGS([w], max_iter=1000, curvature_loss=loss, **settings), rosenbrock, start
    )
    assert value < 1e-20 and calls < 600
    (gradient,) = torch.autograd.grad(rosenbrock(w), w)
    np.testing.assert_allclose(w.grad, gradient, atol=1e-9)


def test_limits_of_a_call():
    start = torch.zeros(10, dtype=torch.float64)

    def count(**limits):
        settings = {"k": 2, "warmup": 1, "num_matvecs": 10, "max_iter": 200, **limits}
        _, calls, opt, w = descent(lambda w, loss: FosiLBFGS([w], **settings), rosenbrock, start)
        return calls, opt._count, w

    calls, iterations, _ = count(max_eval=10)
    assert 10 <= calls < 20 and iterations < 10
    _, to_the_end, w = count()
    assert to_the_end < 200 and rosenbrock(w) < 1e-20  # there is nothing lower
    _, iterations, w = count(tolerance_grad=1e-2)
    (gradient,) = torch.autograd.grad(rosenbrock(w), w)
    assert iterations < to_the_end and 1e-6 < gradient.abs().max() <= 1e-2
    _, iterations, w = count(tolerance_change=1e-3)
    assert iterations < to_the_end and 1e-20 < rosenbrock(w) < 1


# The search.


def along(function, start=0.0):
    """Trials of a function of one number and its derivative."""
    tried = []

    def at(size):
        tried.append(size)
        x = torch.tensor(start + size, dtype=torch.float64, requires_grad=True)
        value = function(x)
        value.backward()
        return Trial(size, value.item(), x.grad.item(), size)

    return at, tried


@pytest.mark.parametrize("begin", [1e-4, 0.03, 1.0, 50.0, 1e4])
@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x - 1) ** 2,
        lambda x: (x - 1) ** 2 - 0.1 * torch.sin(30 * x),
        lambda x: -x / (x**2 + 2),
        lambda x: torch.exp(x) - 5 * x,
        lambda x: x - 2 * torch.log(x + 1e-3),
    ],
)
def test_a_search_ends_where_wolfes_conditions_hold(function, begin):
    at, tried = along(function)
    start = at(0.0)
    assert start.slope < 0
    found = search(at, start, begin)
    # Armijo's, or a loss that is no higher at the end of a way along which the slopes say that it fell.
    assert found.value <= start.value + 1e-4 * found.size * start.slope or found.value < start.value
    assert abs(found.slope) <= 0.9 * abs(start.slope)
    assert found.gradient == found.size == tried[-1] and len(tried) <= 1 + 20


def test_a_decrease_by_next_to_nothing_is_none():
    """Lower by less than noise, and steeper at the end: neither Armijo nor the slopes will have it."""
    places = {1.0: Trial(1.0, 1 - 5e-5, 0.95), 0.5: Trial(0.5, 0.4, 0.0)}
    found = search(lambda size: places.get(size, places[0.5])._replace(size=size), Trial(0.0, 1.0, -0.9), 1.0)
    assert found.value == 0.4


def test_of_those_that_are_lower_the_lowest_is_taken():
    def at(size):  # a jump: no place is both lower and flat
        return Trial(size, 1 - size if size < 0.4 else 1 - 1e-3, -1.0)

    assert search(at, Trial(0.0, 1.0, -1.0), 0.3).size == 0.3


def test_what_is_no_number_is_too_far():
    at, tried = along(lambda x: (x - 1) ** 2 if x < 1.5 else x * math.nan)
    assert search(at, at(0.0), 8.0).value < 1 and max(tried) == 8
    at, _ = along(lambda x: torch.where(x < 1.2, -x, torch.full_like(x, math.inf)))
    assert search(at, at(0.0), 1.0).size <= 1.2


def test_noise_of_the_loss_is_borne_and_more_is_not():
    """A quadratic, whose value at the start came out too low: by the slopes it has fallen."""
    at, _ = along(lambda x: 1 + 1e-6 * (x - 1) ** 2)
    start = at(0.0)
    assert search(at, start._replace(value=start.value - 5e-4), 1.0).size == 1
    assert search(at, start._replace(value=start.value - 2e-3), 1.0) is None


@pytest.mark.parametrize("scaling", ["geometric", "usual"])
@pytest.mark.parametrize("name", ["quadratic", "network"])
def test_scale_is_cut_after_a_search_that_ended_far_below_1_and_grows_back(name, scaling, monkeypatch):
    problem = problem_named(name)
    left = iter(SIZES)
    monkeypatch.setattr(fosi.torch.lbfgs, "search", lambda at, start, begin: at(next(left)))
    params = as_params(problem, problem.start, torch.float64)
    loss, found = loss_of(problem, params), [problem.start]
    schedule = {"warmup": 3, "refresh_every": 5, "num_matvecs": len(problem.start), "scaling": scaling}
    opt = FosiLBFGS(params, max_iter=1, history_size=20, curvature_loss=loss, **schedule, **EXACT)
    for _ in SIZES:
        opt.step(closure_of(opt, loss))
        found.append(flat(params).detach().numpy())
    expected, _ = expected_lbfgs_path(problem, len(SIZES), 20, None, 3, 5, scaling, SIZES)
    assert_same_path(np.stack(found), expected, 1e-8)
    assert opt._pairs.trust == pytest.approx(1 if scaling == "usual" else 1e-3 * 1.1**6)
    again = FosiLBFGS(params, history_size=20, scaling=scaling, **EXACT)
    again.load_state_dict(opt.state_dict())
    assert again._pairs.trust == opt._pairs.trust


def test_scale_is_cut_after_a_search_that_found_nothing_lower_and_not_lost_for_good():
    pairs = Pairs(Space([torch.zeros(3)]), 2)
    for wanted in (0.1, 0.01, 1e-3, 1e-4, 1e-5, 1e-6, 1e-6):
        pairs.after(0.0)
        assert pairs.trust == pytest.approx(wanted)
    for scaling, wanted in (("geometric", 0.1), ("usual", 1)):
        w = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
        opt = FosiLBFGS([w], max_iter=1, k=1, num_matvecs=3, scaling=scaling)
        start = w.detach().clone()

        def uphill(opt=opt, w=w, start=start):
            opt.zero_grad()
            (w**2).sum().backward()
            return torch.tensor(1.0) if torch.equal(w, start) else torch.tensor(2.0)

        opt.step(uphill)
        assert torch.equal(w, start) and opt._pairs.trust == pytest.approx(wanted)


def test_a_search_begins_near_where_the_last_one_ended():
    w = torch.ones(2, dtype=torch.float64, requires_grad=True)

    def loss():
        return (torch.tensor([1e3, 1.0], dtype=torch.float64) * w**2).sum()

    for scaling in ("geometric", "usual"):
        with torch.no_grad():
            w.fill_(1)
        opt = FosiLBFGS([w], max_iter=1, history_size=2, k=1, num_matvecs=2, scaling=scaling)
        found = []
        for _ in range(6):
            calls, closure = [], closure_of(opt, loss)
            opt.step(lambda calls=calls, closure=closure: calls.append(0) or closure())
            found.append((opt._size, len(calls) - 1))
        ends = [(before[0], after[0]) for before, after in itertools.pairwise(found) if after[1] == 1]
        wanted = [min(1, 1.1 * last) if scaling == "geometric" else 1 for last, _ in ends]
        assert ends and [end for _, end in ends] == pytest.approx(wanted)
    # Uphill whatever the size: nothing is taken, pairs are forgotten, and the next search begins at 1 again.
    before = w.detach().clone()

    def uphill():
        opt.zero_grad()
        (w**2).sum().backward()
        return torch.tensor(1.0) if torch.equal(w, before) else torch.tensor(2.0)

    opt.step(uphill)
    assert torch.equal(w, before) and opt._size == 1 and opt._pairs.used == 0
    np.testing.assert_allclose(w.grad, 2 * before)


# The pairs.


def test_a_pair_without_curvature_changes_nothing():
    pairs = Pairs(Space([torch.zeros(3)]), 2)
    pairs.add(torch.tensor([1.0, 0.0, 0.0]), torch.tensor([2.0, 0.0, 0.0]), None, "geometric")
    np.testing.assert_allclose(pairs.steps[0], [2**-0.5, 0, 0], rtol=1e-6)
    np.testing.assert_allclose(pairs.changes[0], [2**0.5, 0, 0], rtol=1e-6)
    before = {name: copy.deepcopy(value) for name, value in vars(pairs).items()}
    assert pairs.scale == pytest.approx(0.5) and pairs.used == pairs.next == 1
    for change in ([0.0, -1.0, 0.0], [0.0, 0.0, 0.0], [math.nan, 0.0, 0.0]):
        pairs.add(torch.tensor([0.0, 1.0, 0.0]), torch.tensor(change), None, "geometric")
    for name, value in vars(pairs).items():
        np.testing.assert_array_equal(value, before[name], err_msg=name)


def test_what_is_left_out_is_not_taken_for_much_steeper_than_the_largest_that_are_in():
    curvature = torch.tensor([4.0, 2.0, 1e4, 1e-6])  # since the estimate something steep has come up outside
    inside = torch.eye(4)[[0, 1, 3]]

    def scale(step, flattest, was=1.0):
        pairs = Pairs(Space([torch.zeros(4)]), 3)
        pairs.scale = was
        step = torch.tensor(step)
        pairs.add(step, curvature * step, Metric(inside, inside.t(), torch.ones(3), flattest), "geometric")
        assert pairs.used == 1
        return pairs.scale

    assert scale([1.0, 1.0, 1.0, 1.0], 0.5) == pytest.approx(0.1 / 2)
    assert scale([1.0, 1.0, 1.0, 1.0], 0.0) == pytest.approx(1e-4)
    # A step within says nothing of the rest: it is taken for as flat as the flattest of the largest, or as it was.
    assert scale([1.0, 1.0, 0.0, 1.0], 0.5) == 1
    assert scale([1.0, 1.0, 0.0, 1.0], 0.5, was=0.1) == 0.5


def test_the_flattest_is_of_the_largest_and_not_of_rounding():
    w = torch.ones(6, dtype=torch.float64, requires_grad=True)
    scales = torch.tensor([8.0, 4.0, 2.0, 1e-9, 0.1, -0.5], dtype=torch.float64)
    opt = FosiLBFGS([w], k=4, ell=1, num_matvecs=6, accept="all", precision="float64", alpha=lambda step: 1 + step)
    opt.refresh(lambda: 0.5 * (scales * w**2).sum())
    assert opt._metric().flattest == pytest.approx(1 / 0.1)
    np.testing.assert_allclose(opt._metric().newton, [1 / 8, 1 / 4, 1 / 2, 10, 2], rtol=1e-6)
    opt._count = 1
    assert opt._metric().flattest == pytest.approx(2 / 0.1)
    few = FosiLBFGS([w], k=6, num_matvecs=6, accept="all", precision="float64", eps=1e-12)
    few.refresh(lambda: 0.5 * (scales.clamp(min=0) * w**2).sum())
    assert few._metric().flattest == pytest.approx(1 / 0.1)  # not 1e9, nor 1e12


def test_steps_lead_down_whatever_rounding_makes_of_the_inverse():
    generator = torch.Generator().manual_seed(0)
    for wrong in (-40.0, 1.0, 40.0):
        pairs, vectors = Pairs(Space([torch.zeros(3)]), 2), torch.randn(5, 3, generator=generator)
        pairs.steps, pairs.changes, pairs.used = vectors[:2], vectors[2:4], 2
        pairs.inverse = torch.tensor([[1.0, wrong], [0.0, 1.0]])
        assert torch.dot(pairs.times(None, vectors[4]), vectors[4]) > 0


# As a torch optimizer.


def network():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))
    x = torch.randn(32, 2)

    def loss(dtype=torch.float32):
        return ((model(x.to(dtype)) - x.to(dtype).prod(1, keepdim=True)) ** 2).mean()

    return model, loss


SETTINGS = {"k": 3, "warmup": 2, "refresh_every": 4, "num_matvecs": 12, "history_size": 5, "max_iter": 3}


def trained(model, loss, calls=4, **settings):
    opt = FosiLBFGS(model.parameters(), model=model, curvature_loss=loss, **{**SETTINGS, **settings})
    for _ in range(calls):
        opt.step(closure_of(opt, loss))
    return opt


def test_a_checkpoint_goes_on_to_the_same_numbers(tmp_path):
    model, loss = network()
    opt = trained(model, loss)
    assert opt._refreshes == 3 and opt._pairs.used == 5
    torch.save([model.state_dict(), opt.state_dict()], tmp_path / "kept.pt")
    for _ in range(3):
        opt.step(closure_of(opt, loss))
    theirs, their_loss = network()
    weights, state = torch.load(tmp_path / "kept.pt", weights_only=True)
    theirs.load_state_dict(weights)
    resumed = FosiLBFGS(theirs.parameters(), model=theirs, curvature_loss=their_loss, **{**SETTINGS, "history_size": 9})
    resumed.load_state_dict(state)
    assert resumed.param_groups[0]["history_size"] == len(resumed._pairs.steps) == 5  # the checkpoint's, as in torch
    for _ in range(3):
        resumed.step(closure_of(resumed, their_loss))
    for mine, other in zip(model.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(mine, other)
    assert resumed._refreshes == opt._refreshes == 5
    fresh = FosiLBFGS(theirs.parameters(), **SETTINGS)
    fresh.load_state_dict(FosiLBFGS(theirs.parameters(), **SETTINGS).state_dict())
    assert fresh.spectrum is None and fresh._last is None


def test_a_checkpoint_that_does_not_fit_changes_nothing(caplog):
    model, loss = network()
    state = trained(model, loss, max_iter=5).state_dict()
    few = trained(model, loss, calls=2, k=2)
    before = few.spectrum.eigenvalues
    with pytest.raises(ValueError, match=r"fosi_basis of parameter 0 has shape \(3, 8, 2\).* \(2, 8, 2\)"):
        few.load_state_dict(state)
    assert torch.equal(few.spectrum.eigenvalues, before) and few.param_groups[0]["max_iter"] == 3
    assert few._pairs.used == 5
    # Of other optimizers the group is taken, as torch does, and the curvature starts anew.
    for other in (torch.optim.LBFGS, torch.optim.Adam):
        few.load_state_dict(other(model.parameters(), lr=0.5).state_dict())
        assert few.spectrum is None and few.param_groups[0]["lr"] == 0.5 and "start anew" in caplog.text
        few.step(closure_of(few, loss))


def test_a_checkpoint_knows_no_strides():
    torch.manual_seed(0)
    x = torch.randn(8, 3, 5, 5)

    def made(memory_format):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(36, 1))
        model = model.double().to(memory_format=memory_format)
        return model, lambda: (model(x.double()) - 1).square().mean()

    model, loss = made(torch.channels_last)
    opt = trained(model, loss)
    plain, their_loss = made(torch.contiguous_format)
    plain.load_state_dict(model.state_dict())
    theirs = FosiLBFGS(plain.parameters(), model=plain, curvature_loss=their_loss, **SETTINGS)
    theirs.load_state_dict(opt.state_dict())
    opt.step(closure_of(opt, loss)), theirs.step(closure_of(theirs, their_loss))
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("by", [copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))])
def test_a_copy_trains_what_it_copied(by):
    model, _ = network()
    x = torch.randn(32, 2)
    opt = FosiLBFGS(model.parameters(), **SETTINGS)

    def steps(model, opt, count):
        for _ in range(count):
            if opt.refresh_due:
                opt.refresh(lambda: model(x).square().mean())
            opt.step(closure_of(opt, lambda: model(x).square().mean()))
        return [p.detach().clone() for p in model.parameters()]

    steps(model, opt, 3)
    theirs = by((model, opt))
    before = [p.detach().clone() for p in model.parameters()]
    found = steps(*theirs, 2)
    assert all(torch.equal(p, q) for p, q in zip(before, model.parameters(), strict=True))
    assert all(torch.equal(p, q) for p, q in zip(found, steps(model, opt, 2), strict=True))
    assert "history_size: 5" in repr(opt) and "k=3" in repr(opt) and "scaling: geometric" in repr(opt)


def test_a_model_cast_after_the_optimizer_was_built():
    """As moved to its device in Accelerate's prepare(); the estimate goes along, and the pairs begin anew."""
    expected, loss = network()
    trained(expected.double(), lambda: loss(torch.float64), max_iter=1, warmup=0)
    model, loss = network()
    opt = FosiLBFGS(model.parameters(), model=model, **{**SETTINGS, "max_iter": 1, "warmup": 0})
    fresh = network()[0]
    with torch.no_grad():
        for p, q in zip(model.double().parameters(), fresh.parameters(), strict=True):
            p.copy_(q)
    for _ in range(4):
        if opt.refresh_due:
            opt.refresh(lambda: loss(torch.float64))
        opt.step(closure_of(opt, lambda: loss(torch.float64)))
    for mine, other in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(mine, other)
    model.float()
    opt.step(closure_of(opt, loss))
    assert all(p.dtype == torch.float32 for p in model.parameters()) and opt._pairs.used <= 1
    assert opt.spectrum.eigenvectors[0].dtype == torch.float32


@pytest.mark.parametrize("by", ["lightning", "fabric"])
def test_wrappers_that_inherit_from_what_they_wrap(by):
    model, loss = network()
    opt = FosiLBFGS(model.parameters(), k=2, warmup=0)
    wrapper = wrapped(opt, model, by)
    assert wrapper.refresh_due
    wrapper.refresh(loss)
    assert not wrapper.refresh_due and not opt.refresh_due
    saved = copy.deepcopy(opt.state_dict())
    opt.step(closure_of(opt, loss))
    wrapper.load_state_dict(saved)
    assert opt._count == 0 and not vars(opt).keys() & vars(wrapper).keys()


def test_a_refresh_leaves_buffers_and_modes_and_what_has_no_gradient_stays():
    model, loss = network()
    idle = nn.Parameter(torch.ones(3))
    opt = FosiLBFGS([*model.parameters(), idle], model=model, **SETTINGS)
    opt.step(closure_of(opt, loss))
    buffers = [b.clone() for b in model.buffers()]
    opt.refresh(loss)
    assert all(torch.equal(a, b) for a, b in zip(buffers, model.buffers(), strict=True))
    before = loss().item()
    assert any(not torch.equal(a, b) for a, b in zip(buffers, model.buffers(), strict=True))  # as the loss itself does
    opt.step(closure_of(opt, loss))
    assert loss().item() < before and idle.grad is None and torch.equal(idle, torch.ones(3))
    assert opt.spectrum.eigenvalues.shape == (3,) and opt.spectrum.eigenvectors[-1].shape == (3, 3)


def test_frozen_parameters_stay():
    model, loss = network()
    model[0].weight.requires_grad_(False)
    before = model[0].weight.clone()
    opt = trained(model, loss)
    assert torch.equal(model[0].weight, before) and opt.spectrum.accepted.any()


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_a_gradient_that_is_no_number_moves_nothing(wrong):
    model, loss = network()
    opt = trained(model, loss)
    before = [p.detach().clone() for p in model.parameters()]

    def closure():
        opt.zero_grad()
        value = loss()
        value.backward()
        model[0].weight.grad[0, 0] = wrong
        return value

    opt.step(closure)
    assert all(torch.equal(p, q) for p, q in zip(before, model.parameters(), strict=True))
    assert opt.step(closure_of(opt, loss)).item() > loss().item()  # and it goes on


def test_without_a_search_a_call_looks_once_an_iteration():
    w = torch.ones(3, requires_grad=True)
    calls = []
    opt = FosiLBFGS([w], lr=0.1, max_iter=4, line_search_fn=None, k=1)
    closure = closure_of(opt, lambda: (w**2).sum())
    opt.step(lambda: calls.append(w.detach().clone()) or closure())
    assert len(calls) == 4 and not torch.equal(w, calls[-1])


def test_a_graph_from_before_a_step_is_refused():
    """Parameters are written where autograd sees it, as by every optimizer of torch's."""
    w = torch.ones(3, requires_grad=True)
    opt = FosiLBFGS([w], max_iter=1, k=1)
    old = (w**3).sum()
    opt.step(closure_of(opt, lambda: (w**2).sum()))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        old.backward()


def test_float32_reaches_what_float32_can():
    torch.manual_seed(0)
    x = torch.linspace(-1, 1, 64)[:, None]
    model = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))

    def loss():
        return ((model(x) - torch.sin(4 * x)) ** 2).mean()

    settings = fosi.presets.deterministic("lbfgs") | {"k": 10, "num_matvecs": 30}
    opt = FosiLBFGS(model.parameters(), max_iter=400, curvature_loss=loss, **settings)
    opt.step(closure_of(opt, loss))
    assert loss().item() < 1e-6


def test_what_it_cannot_do_is_named():
    w = nn.Parameter(torch.zeros(3))
    for given, words in {
        ("max_iter", 0): "max_iter must be an integer ≥ 1, got 0",
        ("history_size", True): "history_size must be an integer ≥ 1, got True",
        ("max_eval", 0.5): "max_eval must be an integer ≥ 1, got 0.5",
        ("lr", -1.0): "lr must be a number ≥ 0, got -1.0",
        ("tolerance_grad", "small"): "tolerance_grad must be a number ≥ 0, got 'small'",
        ("line_search_fn", "armijo"): "line_search_fn must be 'strong_wolfe' or None, got 'armijo'",
        ("scaling", "mean"): "scaling must be 'geometric' or 'usual', got 'mean'",
        ("lr_rule", "gd"): "lr_rule has no meaning for FOSI around L-BFGS",
        ("momentum", fosi.Ema(0.9)): "momentum has no meaning for FOSI around L-BFGS",
    }.items():
        with pytest.raises(ValueError, match=words):
            FosiLBFGS([w], **dict([given]))
    with pytest.raises(TypeError, match=r"curvature_loss must be a function without arguments.*, got 3"):
        FosiLBFGS([w], curvature_loss=3)
    with pytest.raises(TypeError, match="refresh_evry=3 is not a setting of FOSI; did you mean 'refresh_every'"):
        FosiLBFGS([w], refresh_evry=3)
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module or None, got 'net'"):
        FosiLBFGS([w], model="net")
    another = {"params": [nn.Parameter(torch.zeros(2))]}
    with pytest.raises(ValueError, match="more than one group; FosiLBFGS takes one"):
        FosiLBFGS([{"params": [w]}, another])
    with pytest.raises(ValueError, match="more than one group; FosiLBFGS takes one"):
        FosiLBFGS([w], k=1).add_param_group(another)
    for other in (torch.float64, torch.bfloat16):
        with pytest.raises(ValueError, match="needs all of them float32, or all float64"):
            FosiLBFGS([w, nn.Parameter(torch.zeros(2, dtype=other))])
    opt = FosiLBFGS([w], k=1)
    with pytest.raises(ValueError, match="closure is None"):
        opt.step(None)
    with pytest.raises(RuntimeError, match="closure left no gradient on any parameter"):
        opt.step(lambda: (w**2).sum())
    for returned in (None, torch.ones(3)):
        with pytest.raises(TypeError, match="closure must return the loss, one number, got"):
            opt.step(lambda returned=returned: returned)
    assert opt.step(lambda: closure_of(opt, lambda: ((w - 1) ** 2).sum())().item()) == 3  # a float will do
    table = nn.Embedding(4, 2, sparse=True)
    rows = FosiLBFGS(table.parameters(), k=1)
    with pytest.raises(ValueError, match="FOSI takes dense gradients"):
        rows.step(closure_of(rows, lambda: table(torch.tensor([1])).sum()))
    with pytest.raises(TypeError, match="base is a FosiLBFGS, which has FOSI inside"):
        FOSI(opt)


def test_several_processes_are_refused(monkeypatch):
    monkeypatch.setattr("fosi.torch.lbfgs.replicas", lambda model: object())
    with pytest.raises(ValueError, match="params are trained by several processes"):
        FosiLBFGS([nn.Parameter(torch.zeros(3))], k=1)
