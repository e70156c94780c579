"""`fosi.jax.diagnose` against dense matrices in NumPy, on a network of 26 parameters."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fosi import prediction
from fosi.diagnosis import from_record
from fosi.jax import Batches, ModelLoss, diagnose, estimate_spectrum, gradients, timing
from fosi.jax import space as sp
from fosi.jax.curvature import Loss
from fosi.stability import SINCE
from tests import measuring
from tests.jax.running import as_arrays, as_tree, flat, loss_fn, x64
from tests.measuring import BATCHES, CLOSE, ELL, RATE, K
from tests.problems import network


def found(dtype=np.float64, nu=None, **given):
    problem = measuring.problem()
    with x64(dtype):
        params = as_tree(problem, problem.start, dtype)
        batches = [as_arrays(batch, dtype) for batch in BATCHES]
        tree = None if nu is None else as_tree(problem, nu, dtype)
        options = {"k": K, "ell": ELL, "num_matvecs": 26, "precision": np.dtype(dtype).name, **given}
        return diagnose(loss_fn(problem), params, batches, learning_rate=RATE, nu=tree, **options)


def test_everything_as_dense_matrices_have_it():
    plain, divided = measuring.wanted()
    got = found(base="heavy-ball")
    assert got.accepted == (True,) * (K + ELL)
    for name, value in plain.items():
        assert getattr(got, name) == pytest.approx(value, **CLOSE), name
    assert (got.sharpness, got.sharpness_left) == (got.eigenvalues[0], got.bulk_edge)
    assert got.limit == pytest.approx(3.8 / RATE) and (got.n, got.num_matvecs, got.batches) == (26, 26, 3)

    adam = found(base="adam")
    for name, value in {**plain, **divided}.items():
        assert getattr(adam, name) == pytest.approx(value, **CLOSE), name
    assert adam.limit == pytest.approx(38 / RATE)
    assert abs(divided["sharpness_left"] / divided["sharpness"] - 1) > 0.1  # or the test would not tell them apart


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
    with x64(np.float64):
        path = [as_tree(problem, x, np.float64) for x in measuring.points()]
    got = found(base="adam", nu=nu, adam_eps=0.3, path=path)
    wanted = [measuring.wanted_growth(nu, since, 0.3) for since in SINCE]
    assert got.growth == pytest.approx(wanted, **CLOSE) and {type(x) for x in got.growth} == {float}
    here = found(base="adam", nu=nu, adam_eps=0.3).growth
    assert here != pytest.approx(got.growth, rel=1e-2) and here[0] == got.growth[0] == 1.0
    assert found(base="gd", path=path).growth is None


def test_float32_is_as_good_as_its_products():
    plain, _ = measuring.wanted()
    got = found(np.float32, base="gd")
    for name, value in plain.items():
        assert getattr(got, name) == pytest.approx(value, rel=2e-3, abs=1e-4), name
    assert {type(x) for x in got.eigenvalues} == {float}


def test_the_curvature_of_the_first_batches():
    plain, _ = measuring.wanted(taken=BATCHES[:1])
    got = found(base="gd", curvature_batches=1)
    for name, value in plain.items():
        assert getattr(got, name) == pytest.approx(value, **CLOSE), name


def test_the_curvature_of_batches_of_its_own():
    """Another one than those of the gradients: as with the curvature of that one, and noise as with all of them."""
    problem, other = measuring.problem(), network(data_seed=9).batch
    plain, _ = measuring.wanted(taken=[other])
    with x64(np.float64):
        params, few = as_tree(problem, problem.start, np.float64), as_arrays(other, np.float64)
        batches = [as_arrays(batch, np.float64) for batch in BATCHES]
        given = {"k": K, "ell": ELL, "num_matvecs": 26, "precision": "float64", "learning_rate": RATE, "base": "gd"}
        got = diagnose(loss_fn(problem), params, batches, curvature_batches=[few], timed=True, **given)
    assert got.batches == len(BATCHES) and got.sharpness != pytest.approx(found(base="gd").sharpness, rel=1e-3)
    for name, value in plain.items():
        assert getattr(got, name) == pytest.approx(value, **CLOSE), name


def test_pairs_that_are_not_accepted_are_left_to_the_base():
    got = found(base="gd", ell=0, num_matvecs=4)
    assert 0 < got.used < K, "or nothing is tested"
    assert got.bulk_edge == max(v for v, a in zip(got.eigenvalues, got.accepted, strict=True) if not a)
    problem = measuring.problem()
    with x64(np.float64):
        params, batches = as_tree(problem, problem.start, np.float64), [as_arrays(b, np.float64) for b in BATCHES]
        given = {"k": K, "num_matvecs": 4, "precision": "float64"}
        pairs = estimate_spectrum(loss_fn(problem), params, Batches(batches), **given)
        rows = np.concatenate([np.asarray(x).reshape(K, -1) for x in jax.tree.leaves(pairs.eigenvectors)], axis=1)
    used = rows[np.asarray(got.accepted)]
    mean = np.mean([problem.gradient(problem.start, batch) for batch in BATCHES], axis=0)
    assert got.gradient_inside == pytest.approx(np.sum((used @ mean) ** 2) / np.sum(mean**2))


def quadratic(w, shift):
    return 0.5 * jnp.sum(jnp.array([100.0, 50.0, 2.0, 1.0]) * (w - shift) ** 2)


def test_one_batch_tells_no_noise_and_the_same_one_twice_that_there_is_none():
    shift = jnp.full(4, 0.5)
    once = diagnose(quadratic, jnp.ones(4), [shift], base="gd", learning_rate=0.01, k=2)
    assert once.noise_inside is None and once.noise_outside is None
    twice = diagnose(quadratic, jnp.ones(4), [shift, shift], base="gd", learning_rate=0.01, k=2)
    assert twice.noise_inside == twice.noise_outside == 0.0 and twice.eigenvalues == once.eigenvalues
    assert twice.signal_outside == pytest.approx(0.25 * (4 + 1), rel=1e-5)


def test_without_anything_left_to_the_base():
    whole = diagnose(quadratic, jnp.ones(4), [jnp.zeros(4)], base="gd", learning_rate=0.01, k=4)
    assert whole.bulk_edge is None and whole.sharpness_left is None and whole.of_limit_left == 0.0
    assert isinstance(whole.explain(), str)


def test_masks_and_gauss_newton():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 16, 3)), jnp.float32)
    params = {"w": jnp.ones(3), "free": jnp.ones(())}
    loss = ModelLoss(lambda p, batch: p["free"] * (batch @ p["w"]), lambda out, batch: jnp.mean(out**2))
    given = {"base": "heavy-ball", "learning_rate": 0.01, "k": 1}
    got = diagnose(loss, params, list(x), curvature="gauss_newton", mask={"w": True, "free": False}, **given)
    gram = 2 * np.mean([np.asarray(b).T @ np.asarray(b) / 16 for b in x], axis=0)
    assert got.n == 3 and got.sharpness == pytest.approx(np.linalg.eigvalsh(gram)[-1], rel=1e-4)


def test_times_are_measured_where_asked_for_and_nothing_of_the_users_is_changed():
    def loss(params, batch):
        return quadratic(params["w"], batch), "aux"

    params = {"w": jnp.arange(4.0)}
    given = {"has_aux": True, "base": "adam", "learning_rate": 0.01, "k": 2, "timed": True}
    timed = diagnose(loss, params, [jnp.zeros(4)], step_seconds=9.0, **given)
    assert flat(params).tolist() == [0.0, 1.0, 2.0, 3.0] and not jax.config.jax_enable_x64
    assert timed.seconds is not None and min(timed.seconds) > 0
    assert timed.refresh_gradients == pytest.approx(timed.seconds.refresh / timed.seconds.gradient)
    assert timed.seconds.step == 9.0 and diagnose(loss, params, [jnp.zeros(4)], **given).seconds.step is None


def test_what_a_race_said_is_believed():
    given = {"learning_rate": 0.1, "k": 2, "base": "gd"}
    alone, slow = (diagnose(quadratic, jnp.ones(4), [jnp.zeros(4)], raced=raced, **given) for raced in (None, 3.0))
    assert alone.raced is None and "raced" not in alone.features
    assert slow.raced == 3.0 and slow.features == pytest.approx({**alone.features, "raced": np.log(3)})
    assert slow.ratio == pytest.approx(prediction.predict(slow.features, prediction.COEFFICIENTS_RACED))
    diverged = diagnose(quadratic, jnp.ones(4), [jnp.zeros(4)], raced=math.inf, **given)
    assert diverged.raced == 2.0 and diverged.ratio == pytest.approx(slow.ratio)  # more counts no more
    assert from_record(slow.record()) == slow


def test_what_is_timed_in_a_loop_is_the_gradient_and_the_projection():
    params, batch = {"w": jnp.arange(4.0)}, jnp.ones(4)
    space = sp.span(params)
    given = (Loss(lambda p, x: jnp.sum((p["w"] - x) ** 4)), space, params, batch)
    gradient = gradients.gradient(*given)
    assert jax.tree.map(np.asarray, space.unpack(timing._gradients(*given)))[0].tolist() == [-4.0, 0.0, 4.0, 32.0]
    rows = jax.tree.map(lambda x: jnp.zeros_like(x, shape=(1, *x.shape)).at[0, ..., -1].set(1), gradient)
    left = [space.unpack(found(rows, gradient))[0] for found in (timing._projections, gradients.projected)]
    assert np.asarray(left[0]).tolist() == np.asarray(left[1]).tolist() != [-4.0, 0.0, 4.0, 32.0]


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"base": "sgd"}, ValueError, "base must be one of .* got 'sgd'"),
        ({"learning_rate": -1.0}, ValueError, "learning_rate must be .* got -1.0"),
        ({"batches": []}, TypeError, "batches must be a list of at least one batch, got list"),
        ({"batches": jnp.zeros((2, 4))}, TypeError, "batches must be a list"),
        ({"batches": [jnp.zeros(4), jnp.zeros(1)]}, ValueError, "batches must be of one structure"),
        ({"nu": jnp.ones(3)}, ValueError, r"nu must hold finite numbers ≥ 0 in the shapes of params, \(\(4,\),\)"),
        ({"nu": -jnp.ones(4)}, ValueError, "nu must hold finite numbers ≥ 0"),
        ({"nu": {"w": jnp.ones(4)}}, ValueError, "nu must be a tree of arrays like params"),
        ({"path": [jnp.ones(3)]}, ValueError, r"path must hold finite numbers in the shapes of params, \(\(4,\),\)"),
        ({"path": [jnp.full(4, jnp.nan)]}, ValueError, "path must hold finite numbers in"),
        ({"path": [{"w": jnp.ones(4)}]}, ValueError, "path must be a tree of arrays like params"),
        ({"k": 0}, ValueError, "k"),
        ({"curvature_batches": 3}, ValueError, "curvature_batches must be from 1 to the 1 batches"),
        ({"curvature_batches": []}, TypeError, "curvature_batches must be a list of at least one batch, got list"),
        ({"curvature_batches": jnp.zeros(4)}, ValueError, "curvature_batches must be .* a list of others or None"),
        ({"loss_fn": None}, ValueError, "loss_fn"),
        ({"timed": True, "step_seconds": 0.0}, ValueError, "step_seconds must be a finite number > 0, .* got 0.0"),
        ({"step_seconds": 0.1}, ValueError, "step_seconds=0.1 needs timed=True"),
        ({"steps_left": 0}, ValueError, "steps_left must be a whole number ≥ 1, or None for many, got 0"),
        ({"raced": 0.0}, ValueError, "raced must be a number > 0, FOSI's seconds over the base's, got 0.0"),
    ],
)
def test_bad_input_is_named(given, error, message):
    usual = {"loss_fn": quadratic, "params": jnp.ones(4), "batches": [jnp.zeros(4)], "learning_rate": 0.1, "k": 2}
    with pytest.raises(error, match=message):
        diagnose(**{**usual, **given})
