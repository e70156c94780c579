"""`fosi.torch.diagnose` against dense matrices in NumPy, and against `fosi.jax.diagnose`."""

import dataclasses
import functools

import numpy as np
import pytest
import torch

from fosi import prediction
from fosi.stability import SINCE
from fosi.torch import diagnose, estimate_spectrum
from tests import measuring
from tests.measuring import BATCHES, CLOSE, ELL, RATE, K
from tests.torch.running import as_params, loss_of


def found(dtype=torch.float64, nu=None, **given):
    problem = measuring.problem()
    params = as_params(problem, problem.start, dtype)
    losses = [loss_of(problem, params, batch) for batch in BATCHES]
    pieces = None if nu is None else [p.detach() for p in as_params(problem, nu, dtype)]
    name = str(dtype).removeprefix("torch.")
    options = {"k": K, "ell": ELL, "num_matvecs": 26, "precision": name, **given}
    return diagnose(losses, params, learning_rate=RATE, nu=pieces, **options)


def test_everything_as_dense_matrices_have_it():
    plain, divided = measuring.wanted()
    got = found(base="heavy-ball")
    assert got.accepted == (True,) * (K + ELL)
    for name, value in plain.items():
        assert getattr(got, name) == pytest.approx(value, **CLOSE), name
    assert (got.sharpness, got.sharpness_left) == (got.eigenvalues[0], got.bulk_edge)

    adam = found(base="adam")
    for name, value in {**plain, **divided}.items():
        assert getattr(adam, name) == pytest.approx(value, **CLOSE), name


def test_an_interval_that_is_given():
    got = found(base="gd", refresh_every=13)
    assert (got.refresh_every, got.overhead) == (13, 2 * 26 / 13)


def test_adams_own_second_moments_and_epsilon():
    nu = measuring.second_moments()
    _, divided = measuring.wanted(nu, eps=0.3)
    got = found(base="adamw", nu=nu, adam_eps=0.3)
    for name, value in divided.items():
        assert getattr(got, name) == pytest.approx(value, **CLOSE), name


def test_how_far_adam_will_go_along_a_path():
    nu, problem = measuring.second_moments(), measuring.problem()
    path = [as_params(problem, x, torch.float64) for x in measuring.points()]
    got = found(base="adam", nu=nu, adam_eps=0.3, path=path)
    wanted = [measuring.wanted_growth(nu, since, 0.3) for since in SINCE]
    assert got.growth == pytest.approx(wanted, **CLOSE) and {type(x) for x in got.growth} == {float}
    assert found(base="adam", nu=nu, adam_eps=0.3).growth != pytest.approx(got.growth, rel=1e-2)
    assert found(base="gd", path=path).growth is None


def test_parameters_are_back_from_a_path_whatever_happens():
    w = torch.ones(3, requires_grad=True)

    def loss(limit):
        if float(w.sum().detach()) > limit:
            raise ArithmeticError
        return (torch.tensor([3.0, 2.0, 1.0]) * w**2).sum()

    path = [[torch.full((3,), 2.0)], [torch.full((3,), 9.0)]]
    before = loss(99.0)
    around = [
        diagnose(loss, [w], [99.0], learning_rate=0.1, k=1, path=[*path, x]).growth for x in ([w], [torch.ones(3)])
    ]
    assert around[0] == around[1]  # a point may be the parameters themselves
    before.backward()  # a graph from before is whole
    assert diagnose(loss, [w], [99.0], learning_rate=0.1, k=1, path=path).growth is not None
    assert w.tolist() == [1.0, 1.0, 1.0]
    with pytest.raises(ArithmeticError):
        diagnose(loss, [w], [20.0], learning_rate=0.1, k=1, path=path)
    assert w.tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("base", ["nesterov", "adam"])
def test_jax_says_the_same(base):
    pytest.importorskip("jax")
    from tests.jax.test_diagnose import found as by_jax

    ours, theirs = found(base=base), by_jax(base=base)
    for field in dataclasses.fields(ours):
        value, other = getattr(ours, field.name), getattr(theirs, field.name)
        if field.name != "residuals":  # bounds, down at rounding
            assert value == other or value == pytest.approx(other, **CLOSE), field.name
    assert ours.features == pytest.approx(theirs.features, **CLOSE)
    assert ours.explain() == theirs.explain()


def test_pairs_that_are_not_accepted_are_left_to_the_base():
    got = found(base="heavy-ball", ell=0, num_matvecs=4)
    assert 0 < got.used < K, "or nothing is tested"
    assert got.bulk_edge == max(v for v, a in zip(got.eigenvalues, got.accepted, strict=True) if not a)
    problem = measuring.problem()
    params = as_params(problem, problem.start, torch.float64)
    losses = [loss_of(problem, params, batch) for batch in BATCHES]
    pairs = estimate_spectrum(losses, params, k=K, num_matvecs=4, precision="float64")
    rows = torch.cat([x.reshape(K, -1) for x in pairs.eigenvectors], dim=1).numpy()
    used = rows[np.asarray(got.accepted)]
    mean = np.mean([problem.gradient(problem.start, batch) for batch in BATCHES], axis=0)
    assert got.gradient_inside == pytest.approx(np.sum((used @ mean) ** 2) / np.sum(mean**2))


def test_a_module_with_batches_and_second_moments_by_name():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    batches = [torch.randn(16, 3) for _ in range(2)]
    running = model[1].running_mean.clone()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    nu = {name: torch.ones_like(p) for name, p in model.named_parameters()}
    given = {"learning_rate": 1e-3, "k": 2, "seed": 3}
    got = diagnose(lambda x: model(x).square().mean(), model, batches, nu=nu, timed=True, step_seconds=9.0, **given)
    assert got.seconds.step == 9.0 and got.n == sum(p.numel() for p in model.parameters()) and min(got.seconds) > 0
    # With ν = 1 the division is by 1 + ε: Adam sees the Hessian itself.
    assert got.sharpness == pytest.approx(got.eigenvalues[0], rel=1e-4)
    assert torch.equal(model[1].running_mean, running) and all((p.grad == 1).all() for p in model.parameters())
    losses = [functools.partial(lambda x: model(x).square().mean(), x) for x in batches]
    assert diagnose(losses, model, nu=nu, **given).eigenvalues == got.eigenvalues


def test_the_same_batch_twice_says_that_there_is_no_noise():
    w, shift = torch.ones(3, requires_grad=True), torch.zeros(3)
    scales = torch.tensor([9.0, 2.0, 1.0])
    got = diagnose(
        lambda s: 0.5 * (scales * (w - s) ** 2).sum(), [w], [shift, shift], base="gd", learning_rate=0.1, k=1
    )
    assert got.noise_inside == got.noise_outside == 0.0 and got.bulk_edge == pytest.approx(2.0)


def test_what_a_race_said_is_believed():
    w, given = torch.ones(3, requires_grad=True), {"base": "gd", "learning_rate": 0.1, "k": 1}
    alone, slow = (diagnose(lambda s: ((w - s) ** 2).sum(), [w], [0.0], raced=raced, **given) for raced in (None, 3.0))
    assert alone.raced is None and "raced" not in alone.features
    assert slow.raced == 3.0 and slow.features == pytest.approx({**alone.features, "raced": np.log(3)})
    assert slow.ratio == pytest.approx(prediction.predict(slow.features, prediction.COEFFICIENTS_RACED))


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"timed": True, "step_seconds": -1.0}, ValueError, "step_seconds must be a finite number > 0, .* got -1.0"),
        ({"step_seconds": 0.1}, ValueError, "step_seconds=0.1 needs timed=True"),
        ({"steps_left": 0}, ValueError, "steps_left must be a whole number ≥ 1, or None for many, got 0"),
        ({"raced": 0.0}, ValueError, "raced must be a number > 0, FOSI's seconds over the base's, got 0.0"),
        ({"base": "sgd"}, ValueError, "base must be one of .* got 'sgd'"),
        (
            {"batches": None},
            TypeError,
            "closure must be a sequence of functions without arguments, or come with batches=",
        ),
        ({"closure": 3}, TypeError, r"closure must be callable as closure\(batch\)"),
        ({"batches": torch.zeros(2)}, TypeError, "batches must be a list of at least one batch, got Tensor"),
        ({"nu": [torch.ones(2)]}, ValueError, r"nu must hold finite numbers ≥ 0 in the shapes of params, \[\(3,\)\]"),
        ({"nu": {"w": torch.ones(3)}}, ValueError, "nu must have the names of params"),
        ({"path": [[torch.ones(2)]]}, ValueError, r"path must hold finite numbers in the shapes of params, \[\(3,\)\]"),
        ({"path": [[1.0]]}, TypeError, "path must be tensors, one for each parameter"),
        ({"curvature_batches": 0}, ValueError, "curvature_batches must be from 1 to the 1 batches"),
        ({"curvature_batches": []}, TypeError, "curvature_batches must be a list of at least one batch, got list"),
    ],
)
def test_bad_input_is_named(given, error, message):
    w = torch.ones(3, requires_grad=True)
    usual = {"closure": lambda s: ((w - s) ** 2).sum(), "params": [w], "batches": [0.0], "learning_rate": 0.1, "k": 1}
    with pytest.raises(error, match=message):
        diagnose(**{**usual, **given})


def test_the_curvature_of_batches_of_its_own():
    w, scales = torch.ones(3, dtype=torch.float64, requires_grad=True), torch.tensor([3.0, 2.0, 1.0])
    given = {"learning_rate": 0.1, "k": 1, "base": "gd", "timed": True}

    def loss(factor):
        return factor * (scales * w**2).sum() / 2

    for own in (
        diagnose(loss, [w], [1.0, 2.0], curvature_batches=[10.0, 30.0], **given),
        diagnose(
            [lambda: loss(1.0), lambda: loss(2.0)],
            [w],
            curvature_batches=[lambda: loss(10.0), lambda: loss(30.0)],
            **given,
        ),
    ):
        assert own.sharpness == pytest.approx(60) and own.batches == 2
    assert diagnose(loss, [w], [1.0, 2.0], **given).sharpness == pytest.approx(4.5)
    with pytest.raises(TypeError, match="curvature_batches must be a sequence of functions"):
        diagnose([lambda: loss(1.0)], [w], curvature_batches=[10.0], **given)


def test_every_batch_draws_its_own_dropout():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
    x = torch.randn(16, 6)
    batches = [x.clone() for _ in range(4)]  # the same data: all noise is the dropout's
    before = torch.random.get_rng_state()
    found = diagnose(lambda b: model(b).square().mean(), model, batches, learning_rate=1e-3, k=2)
    assert found.noise_inside + found.noise_outside > 0.01 * (found.signal_inside + found.signal_outside)
    assert torch.equal(torch.random.get_rng_state(), before)
    same = diagnose(lambda b: model(b).square().mean(), model, [x, x], learning_rate=1e-3, k=2)
    assert same.noise_inside == same.noise_outside == 0


def test_the_timed_gradient_is_trainings_own():
    """A refresh computes eagerly and in full precision; a training step need not, and is what time is counted in."""
    seen = []
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
    x = torch.randn(8, 4)

    def loss():
        seen.append(torch.is_autocast_enabled("cpu"))
        return model(x).float().square().mean()

    buffers = [buffer.clone() for buffer in model.buffers()]
    with torch.autocast("cpu", torch.bfloat16):
        diagnose([loss], model, learning_rate=1e-3, k=2, timed=True)
    assert True in seen and False in seen
    assert all(torch.equal(a, b) for a, b in zip(buffers, model.buffers(), strict=True))
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("nu", [1.0, [1.0, 2.0]])
def test_nu_of_no_tensors_is_named(nu):
    w = torch.ones(3, requires_grad=True)
    with pytest.raises(TypeError, match="nu must be tensors"):
        diagnose([lambda: w.square().sum()], [w], learning_rate=1e-3, k=1, nu=nu)
