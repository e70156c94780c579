"""Formulas of a diagnosis: limits by simulating each base, noise by its definition, the fit by hand and by scipy."""

import dataclasses
import json
import math

import numpy as np
import pytest
from scipy import optimize, stats

from fosi import diagnosis, prediction
from fosi.diagnosis import Base, Diagnosis, Measured, Seconds, signal_and_noise, spearman
from fosi.options import Options
from fosi.stability import SINCE, evenly
from tests.problems import orthogonal

ETA, BETA = 0.03, 0.8


def heavy_ball(gradient, x):
    velocity = np.zeros_like(x)
    while True:
        velocity = gradient(x) + BETA * velocity
        x = x - ETA * velocity
        yield x


def nesterov(gradient, x):
    velocity = np.zeros_like(x)
    while True:
        g = gradient(x)
        velocity = g + BETA * velocity
        x = x - ETA * (g + BETA * velocity)
        yield x


def gd(gradient, x):
    while True:
        x = x - ETA * gradient(x)
        yield x


def adam(gradient, x, divisor=1.0):
    """With second moments that stand still, as the limit takes them."""
    moment, t = np.zeros_like(x), 0
    while True:
        t += 1
        moment = BETA * moment + (1 - BETA) * gradient(x)
        x = x - ETA * moment / (1 - BETA**t) / divisor
        yield x


SIMULATIONS = {"gd": gd, "heavy-ball": heavy_ball, "nesterov": nesterov, "adam": adam, "adamw": adam}


def size_after(steps, path):
    return np.linalg.norm(next(x for i, x in enumerate(path, 1) if i == steps))


@pytest.mark.parametrize("name", SIMULATIONS)
def test_a_base_is_stable_just_below_its_limit_and_not_just_above(name):
    basis = orthogonal(4, 1)

    def final(sharpness):
        hessian = (basis * np.array([sharpness, 0.5 * sharpness, 0.1 * sharpness, 1.0])) @ basis.T
        return size_after(800, SIMULATIONS[name](lambda x: hessian @ x, basis @ np.ones(4)))

    limit = Base(name, ETA, BETA).limit
    assert final(0.99 * limit) < 1e-3
    assert final(1.01 * limit) > 1e3


def test_adams_limit_is_for_the_hessian_divided_on_both_sides():
    rng = np.random.default_rng(0)
    basis, nu = orthogonal(5, 2), rng.uniform(0.01, 4.0, 5) ** 2
    base = Base("adam", ETA, BETA, eps=0.1)
    divisor = np.sqrt(nu) + 0.1
    np.testing.assert_allclose(base.inverse_root(nu), divisor**-0.5)

    hessian = (basis * np.array([9.0, 5.0, 2.0, 1.0, 0.5])) @ basis.T
    root = base.inverse_root(nu)
    sharpness = np.linalg.eigvalsh(root[:, None] * hessian * root)[-1]
    for factor, stable in ((0.99, True), (1.01, False)):
        scaled = hessian * factor * base.limit / sharpness
        end = size_after(800, adam(lambda x, scaled=scaled: scaled @ x, np.ones(5), divisor))
        assert (end < 1e-2) if stable else (end > 1e3)


def test_the_familiar_limits():
    assert math.isclose(Base("adam", 1e-3).limit, 38 / 1e-3)
    assert math.isclose(Base("heavy-ball", 0.1, 0.9).limit, 2 * 1.9 / 0.1)
    assert Base("heavy-ball", 0.1, 0.0).limit == Base("nesterov", 0.1, 0.0).limit == Base("gd", 0.1).limit == 20.0


def test_signal_and_noise_by_their_definitions():
    gradients = np.random.default_rng(3).normal(size=(5, 8)) + 1.0
    signal, noise = signal_and_noise(gradients @ gradients.T)
    covariance = np.cov(gradients.T)  # unbiased
    assert math.isclose(noise, np.trace(covariance), rel_tol=1e-9)
    mean = gradients.mean(0)
    assert math.isclose(signal, mean @ mean - np.trace(covariance) / 5, rel_tol=1e-9)
    assert signal_and_noise(np.array([[4.0]])) == (4.0, None)
    assert signal_and_noise(np.full((3, 3), 2.0)) == (2.0, 0.0)


def test_signal_and_noise_are_unbiased():
    rng, true = np.random.default_rng(4), np.array([0.3, 0.1, 0.0])
    draws = [signal_and_noise(g @ g.T) for g in true + rng.normal(size=(4000, 3, 3)) * np.array([1.0, 2.0, 0.5])]
    signal, noise = np.mean(draws, axis=0)
    assert abs(signal - 0.1) < 0.1 and abs(noise - 5.25) < 0.2


def measured(**changes):
    """Four batches of gradients along e₁ and elsewhere; three pairs asked for, the last not accepted."""
    rng = np.random.default_rng(5)
    given = {
        "n": 100,
        "k": 3,
        "ell": 1,
        "num_matvecs": 16,
        "eigenvalues": np.array([8.0, 4.0, 1.5, -0.5]),
        "residuals": np.array([1e-3, 1e-3, 1.0, 1e-2]),
        "accepted": np.array([True, True, False, True]),
        "beyond": 1.0,
        "extremes": np.array([8.0, -0.5]),
        "sharpness": None,
        "sharpness_left": None,
        "inside": rng.normal(size=(4, 4)) * np.array([1.0, 1.0, 0.0, 1.0]),
        "outside": (lambda g: g @ g.T)(rng.normal(size=(4, 6)) + 2),
    }
    return Measured(**{**given, **changes})


def test_what_is_worked_out():
    m = measured()
    found = Diagnosis.of(Base("heavy-ball", 0.1), m)
    assert found.used == 3 and found.gap == 2.0
    assert found.bulk_edge == 1.5 and math.isclose(found.bulk_gap, 8 / 1.5)  # what was not accepted is left to the base
    assert found.sharpness == 8.0 and found.sharpness_left == 1.5
    assert math.isclose(found.lr_scale, 2.0)  # λ₁ / λ₂, the last accepted; negative curvature counts as 0
    assert math.isclose(found.of_limit, 8 / 38) and math.isclose(found.of_limit_left, 2 * 1.5 / 38)
    inside = m.inside.mean(0)
    whole = inside @ inside + m.outside.mean()
    assert math.isclose(found.gradient_inside, inside @ inside / whole)
    assert math.isclose(found.noise_inside, np.trace(np.cov(m.inside.T)))
    assert (found.signal_outside, found.noise_outside) == signal_and_noise(m.outside)
    assert found.refresh_gradients == 32 and found.refresh_every == 320 and math.isclose(found.overhead, 0.1)


def test_the_features_by_their_formulas():
    for base, rate, whole, left in (
        (Base("heavy-ball", 0.1), 2.0, 8 / 38, 3 / 38),  # log 2 is more than all the relief there is
        (Base("heavy-ball", 0.5), 2.0, 1.0, 3 / 7.6),  # beyond the limit is at the limit
        (Base("heavy-ball", 2.0), 2.0, 1.0, 3 / 1.9),  # beyond it with FOSI, at a larger rate, is a loss
        (Base("adam", 1.0), 1.0, 30 / 38, 3 / 38),
        (Base("adam", 5.0), 1.0, 1.0, 3 / 7.6),
        (Base("adam", 50.0), 1.0, 1.0, 1.0),  # and at the same rate none
    ):
        m = measured(**({} if rate > 1 else {"sharpness": 30.0, "sharpness_left": 3.0}))
        found = Diagnosis.of(base, m)
        relief = math.log((1 + whole) / (1 + left))
        if base.name == "adam":  # its steps grow by no more than √ν shrinks
            squares = np.sum(m.inside**2), np.trace(m.outside)
            relief = min(relief, 0.5 * math.log(1 + squares[0] / squares[1]))
        relief = max(relief - math.log(rate), 0) if relief > 0 else relief
        long = base.learning_rate * (10 if base.name == "heavy-ball" else 1)
        cost = long * (1.5 if rate > 1 else 3.0) * found.noise_outside / found.signal_outside
        share = cost / (cost + 50)
        expected = {
            "overhead": math.log(1.1),
            "rate": math.log(rate),
            "relief": relief,
            "noisy": share * (math.log(rate) + relief),
            "inside": found.gradient_inside,
        }
        assert found.features == pytest.approx(expected)
        if base.name == "adam":  # where next to all of the gradient is inside, the limit alone counts
            inside = dataclasses.replace(found, signal_outside=1e-9, noise_outside=0.0)
            assert math.isclose(inside.features["relief"], math.log((1 + whole) / (1 + left)))
    weights = prediction.COEFFICIENTS
    logs = weights["constant"] + sum(weights[name] * value for name, value in expected.items())
    assert math.isclose(found.ratio, math.exp(logs))


def test_adams_steps_grow_as_it_forgets():
    """Against Adam's own recurrence of ν with its bias correction, coordinate by coordinate, beside Adam alone."""
    random = np.random.default_rng(0)
    whole = random.uniform(0.1, 2.0, 6)
    left = whole * np.array([0.0, 0.01, 0.1, 0.2, 0.3, 1.1])  # a projection may make an entry larger
    ends = []
    for most, before, steps, old in (
        (9.0, 1000, 5000, whole),
        (1.2, 20, 5000, whole),
        (9.0, 200, 240, 30 * whole),
        (9.0, None, 300, whole / 30),
        (9.0, 200, 3000, random.uniform(0.01, 100.0, 6)),
    ):
        base, long = Base("adam", 0.1, eps=0.01), before or 20_000
        both = [old * (1 - 0.999**long)] * 2
        grown = []
        for step in range(long + 1, long + steps + 1):
            both = [0.999 * nu + 0.001 * squares for nu, squares in zip(both, (left, whole), strict=True)]
            ours, alone = (np.sum(left / (np.sqrt(nu / (1 - 0.999**step)) + 0.01)) for nu in both)
            grown.append(min(max(ours / alone, 1.0), most))
        halves = [(x[:2], x[2:].reshape(2, 2)) for x in (old, whole, left)]  # as leaves of any shape
        got = base.longer(most, base.growth(*halves), steps, before)
        assert got == pytest.approx(np.mean(grown), rel=5e-3)
        ends.append(grown[-1])
    assert max(ends) > 1.1
    adam = Base("adam", 0.1)
    assert adam.growth([whole], [whole], [whole]) == pytest.approx([1.0] * len(SINCE))
    assert adam.growth([whole], [whole], [0 * whole]) == (1.0,) * len(SINCE)
    assert all(map(math.isnan, adam.growth([whole], [whole + math.nan], [whole + math.nan])))
    assert evenly(0.75) == pytest.approx(adam.growth([whole], [whole], [whole / 4]), rel=1e-6)
    assert adam.longer(9.0, evenly(0.75), None) == 2.0 and adam.longer(1.5, evenly(1.0), None) == 1.5
    assert adam.longer(9.0, evenly(0.75), 10**8) == pytest.approx(2.0, rel=1e-2)
    assert adam.longer(3.0, evenly(1.0), 9, 1) < 3.0
    assert adam.longer(3.0, [0.5] * len(SINCE), None) == adam.longer(3.0, [0.5] * len(SINCE), 9, 1) == 1.0
    assert Base("heavy-ball", 0.1).longer(9.0, evenly(0.75), 10, 10) == 9.0


def test_a_diagnosis_counts_on_as_much_as_adam_forgets():
    m = measured(sharpness=300.0, sharpness_left=30.0, inside=np.full((4, 4), 100.0))
    cases = [(None, None), (1000, 100), (1000, 2000), (100, 2000)]
    said = [Diagnosis.of(Base("adam", 0.1), m, steps_left=left, steps_taken=taken) for left, taken in cases]
    assert said[0].features["relief"] > said[1].features["relief"] > said[2].features["relief"] > 0.1
    assert said[3].features["relief"] == pytest.approx(0.029, rel=0.05) and said[3].ratio > said[2].ratio
    assert (said[3].steps_left, said[3].steps_taken) == (100, 2000)
    # And on what was measured coordinate by coordinate, where it was.
    slow = Diagnosis.of(Base("adam", 0.1), m._replace(growth=(1.0,) * (len(SINCE) - 1) + (1.1,)), steps_left=10**9)
    assert slow.features["relief"] == pytest.approx(math.log(1.1), rel=0.01) and slow.ratio > said[2].ratio
    assert diagnosis.from_record(json.loads(json.dumps(slow.record()))) == slow
    with pytest.raises(ValueError, match="not finite"):
        Diagnosis.of(Base("adam", 0.1), m._replace(growth=(math.nan,) * len(SINCE)))


def test_what_noise_takes_by_its_formula():
    sgd = Base("gd", 0.1)
    for base in (sgd, Base("adam", 0.1), Base("heavy-ball", 0.01, 0.9), Base("nesterov", 0.05, 0.5)):
        assert math.isclose(base.noise_share(2.0, 1.0, 5.0), 1 / 51)  # all go as far in many steps
    assert math.isclose(sgd.noise_share(200.0, 2.0, 5.0), 50 / 100)
    assert sgd.noise_share(2.0, 1.0, 0.0) == 0.0
    assert sgd.noise_share(2.0, -1.0, 5.0) == sgd.noise_share(2.0, 0.05, 5.0) == 20 / 70


def test_a_scaled_rate_that_what_is_left_bears_less_well_is_less_of_a_gain():
    ratios = []
    for rate in (0.02, 0.2, 0.6):
        found = Diagnosis.of(Base("heavy-ball", rate), measured(beyond=7.0))
        assert found.of_limit < found.of_limit_left and found.features["relief"] < 0 < found.features["rate"]
        ratios.append(found.ratio)
    assert found.of_limit_left > 1 and ratios[0] < ratios[1] < ratios[2]


def test_a_record_is_read_back_and_what_follows_is_worked_out_anew():
    for seconds in (None, Seconds(1.0, 20.0, 0.05)):
        found = Diagnosis.of(Base("heavy-ball", 0.1), measured(seconds=seconds))
        line = json.loads(json.dumps({"name": "one", **found.record(), "features": {}, "ratio": 9.0}))
        assert diagnosis.from_record(line) == found
    old = {name: value for name, value in line.items() if not name.startswith("steps_")}  # as they were once
    del old["seconds"]["step"]
    assert diagnosis.from_record(old) == found
    del line["limit"]
    with pytest.raises(ValueError, match="record has no 'limit'"):
        diagnosis.from_record(line)


def test_adam_is_measured_on_its_own_matrix_and_not_scaled():
    found = Diagnosis.of(Base("adam", 0.1), measured(sharpness=300.0, sharpness_left=30.0))
    assert found.lr_scale == 1.0 and found.features["rate"] == 0.0
    assert (found.sharpness, found.sharpness_left) == (300.0, 30.0)
    assert math.isclose(found.of_limit, 300 / 380)
    assert "max_lr_scale" not in found.settings()


def test_times_set_the_interval():
    timed = Diagnosis.of(Base("gd", 0.1), measured(seconds=Seconds(1.0, 20.0, 0.05)))
    assert timed.refresh_gradients == 20.0 and timed.refresh_every == 400 and math.isclose(timed.overhead, 0.1)
    dear = Diagnosis.of(Base("gd", 0.1), measured(seconds=Seconds(1.0, 32.0, 0.2)))
    assert dear.refresh_every is None and math.isclose(dear.overhead, 0.2 + 32 / 320)
    assert "No refresh interval meets the budget" in dear.explain()
    # A step takes more than its gradient: what FOSI adds is a smaller part of it.
    whole = Diagnosis.of(Base("gd", 0.1), measured(seconds=Seconds(1.0, 32.0, 0.2, step=4.0)))
    assert whole.refresh_gradients == 32.0 and whole.refresh_every == 160 and math.isclose(whole.overhead, 0.1)


def test_an_interval_that_is_given_is_what_the_cost_is_of():
    options = Options(k=3, ell=1, refresh_every=64)
    counted = Diagnosis.of(Base("gd", 0.1), measured(), options)
    assert counted.refresh_every == 64 and math.isclose(counted.overhead, 32 / 64)
    timed = Diagnosis.of(Base("gd", 0.1), measured(seconds=Seconds(1.0, 32.0, 0.2)), options)
    assert timed.refresh_every == 64 and math.isclose(timed.overhead, 0.2 + 32 / 64)  # whatever the budget is
    assert timed.settings()["refresh_every"] == 64 and "budget" not in timed.explain()
    once = Diagnosis.of(Base("gd", 0.1), measured(), Options(k=3, ell=1, refresh_every=math.inf))
    assert once.overhead < 1e-6


def test_words():
    good = Diagnosis.of(
        Base("heavy-ball", 0.1),
        measured(
            eigenvalues=np.array([35.0, 9.0, 2.0, -0.5]),
            accepted=np.array([True, True, True, True]),
            extremes=np.array([35.0, -0.5]),
        ),
    )
    text = good.explain()
    assert text.startswith("FOSI is likely to help: about") and "max_lr_scale=3.0" in text
    assert "shaped on, eleven tasks" in text
    assert good.settings()["k"] == 3 and good.settings()["warmup"] == good.settings()["refresh_every"] == 320

    none = dataclasses.replace(good, accepted=(False,) * 4, lr_scale=1.0)
    assert none.explain().startswith("Do not use FOSI here: no eigenpair converged") and none.settings() == {}
    dear = dataclasses.replace(good, lr_scale=1.0, overhead=0.5, sharpness_left=35.0)
    assert dear.explain().startswith("Do not use FOSI here: about") and "If you try it all the same" in dear.explain()
    assert good.settings()["alpha"] == 0.01
    early = dataclasses.replace(good, smallest=-20.0)
    assert early.settings()["warmup"] == 640 and "it is early" in early.explain()
    unstable = dataclasses.replace(good, sharpness_left=20.0)
    assert unstable.settings()["max_lr_scale"] == 1.0
    flat = dataclasses.replace(good, eigenvalues=(9.0, 3.0, 2.9, -0.5), bulk_edge=2.85)
    assert flat.settings()["k"] == 1  # behind the last clear gap
    alone = dataclasses.replace(good, noise_inside=None, noise_outside=None, batches=1)
    assert "give two or more" in alone.explain() and alone.noise_share == 0.5
    assert alone.explain().startswith("FOSI is likely to help")  # what is not known decides nothing
    noisy = dataclasses.replace(good, noise_outside=100.0 * good.signal_outside)
    assert "as long as it allows" in noisy.explain() and "as long as it allows" not in good.explain()
    assert "try 3 times first" in dataclasses.replace(good, sharpness=3.8).explain()
    assert "beyond the edge of stability" in dataclasses.replace(good, sharpness=50.0).explain()


def test_a_record_is_plain():
    found = Diagnosis.of(Base("heavy-ball", 0.1), measured(seconds=Seconds(1.0, 20.0, 0.05)))
    record = json.loads(json.dumps(found.record(), allow_nan=False))
    assert record["seconds"] == {"gradient": 1.0, "refresh": 20.0, "projections": 0.05, "step": None}
    assert record["ratio"] == found.ratio and record["settings"] == found.settings()
    for value in dataclasses.asdict(found).values():
        assert type(value) in (int, float, str, tuple, type(None), Seconds), value


def rows(count, seed=0):
    drawn = np.random.default_rng(seed).normal(size=(count, 5))
    return [dict(zip(prediction.NAMES[1:], row.tolist(), strict=True)) for row in drawn]


def test_a_fit_minimises_what_it_says():
    features, ratios, prior = rows(8), np.random.default_rng(1).uniform(0.4, 2.0, 8), prediction.PHYSICAL
    matrix = np.array([[1.0, *row.values()] for row in features])
    start = np.array([prior[name] for name in prediction.NAMES])

    def cost(w):
        return np.sum((matrix @ w - np.log(ratios)) ** 2) + 0.7 * np.sum((w - start) ** 2)

    best = optimize.minimize(cost, start, tol=1e-12).x
    found = diagnosis.fit(features, ratios, ridge=0.7)
    np.testing.assert_allclose([found[name] for name in prediction.NAMES], best, atol=1e-5)
    far = diagnosis.fit(features, ratios, ridge=1e9)
    assert far == pytest.approx(dict(prior), abs=1e-6)


def test_after_a_race_the_rule_looks_at_it_and_at_what_reasoning_makes_of_the_rest():
    features, raced = rows(8), np.random.default_rng(2).uniform(-0.6, 0.6, 8)
    ran = [{**row, "raced": float(x)} for row, x in zip(features, raced, strict=True)]
    assert prediction.predict(ran[0], prediction.TOLD) == pytest.approx(math.exp(raced[0]))
    weights = prediction.COEFFICIENTS_RACED
    point = math.log(prediction.predict(features[0], prediction.PHYSICAL))
    logs = weights["constant"] + weights["raced"] * raced[0] + weights["point"] * point
    assert prediction.predict(ran[0]) == pytest.approx(math.exp(logs))
    # Where the race was right each time a fit believes it, and what is left out is predicted so.
    assert diagnosis.fit(ran, np.exp(raced))["raced"] == pytest.approx(1.0)
    np.testing.assert_allclose(diagnosis.leave_one_out(ran, np.exp(raced)), np.exp(raced))
    # Where it said nothing, it is not.
    wrong = diagnosis.fit(ran, np.ones(8), ridge=1e-6)
    assert abs(wrong["raced"]) < 1e-4
    # It counts 2 at the most, as one does that FOSI never ends.
    slow = [{**features[0], "raced": math.log(times)} for times in (2.0, 9.0)]
    assert prediction.predict(slow[0]) == prediction.predict(slow[1]) > prediction.predict({**slow[0], "raced": 0.6})
    with pytest.raises(ValueError, match="features has no finite 'raced'"):
        diagnosis.fit([ran[0], features[1]], [1.0, 1.0])
    with pytest.raises(ValueError, match="coefficients has no finite 'raced'"):
        prediction.predict(ran[0], prediction.PHYSICAL)


def test_a_fit_finds_the_rule_that_made_the_ratios():
    truth = {"constant": 0.1, "overhead": 0.8, "rate": -0.6, "relief": -0.3, "noisy": 0.2, "inside": 0.5}
    features = rows(40, 2)
    ratios = [diagnosis.predict(row, truth) for row in features]
    assert diagnosis.fit(features, ratios, ridge=1e-9) == pytest.approx(truth, abs=1e-6)
    np.testing.assert_allclose(diagnosis.leave_one_out(features, ratios, ridge=1e-9), ratios, rtol=1e-5)


def test_what_is_left_out_is_not_looked_at():
    features, ratios = rows(6, 3), np.random.default_rng(2).uniform(0.4, 2.0, 6)
    groups = ["a", "a", "b", "b", "c", "c"]
    found = diagnosis.leave_one_out(features, ratios, groups=groups)
    for i, group in enumerate(groups):
        others = [j for j in range(6) if groups[j] != group]
        weights = diagnosis.fit([features[j] for j in others], ratios[others])
        assert math.isclose(found[i], diagnosis.predict(features[i], weights))
    single = diagnosis.leave_one_out(features, ratios)
    assert math.isclose(single[0], diagnosis.predict(features[0], diagnosis.fit(features[1:], ratios[1:])))


@pytest.mark.parametrize("seed", range(5))
def test_spearman_is_scipys_with_ties(seed):
    rng = np.random.default_rng(seed)
    a, b = rng.integers(0, 5, 12), rng.integers(0, 5, 12)
    assert math.isclose(diagnosis.spearman(a, b), stats.spearmanr(a, b).statistic, abs_tol=1e-12)


def test_spearman_by_hand():
    assert diagnosis.spearman([1, 2, 3, 4], [10, 20, 30, 1]) == pytest.approx(1 - 6 * (1 + 1 + 1 + 9) / (4 * 15))
    assert math.isnan(diagnosis.spearman([1, 1], [1, 2]))


NOTHING = dict.fromkeys(prediction.NAMES[1:], 0.0)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: Base("sgd", 0.1), ValueError, "base must be one of 'gd', 'heavy-ball'.*got 'sgd'"),
        (lambda: Base("gd", 0.0), ValueError, "learning_rate must be a finite number > 0, got 0.0"),
        (lambda: Base("gd", math.inf), ValueError, "learning_rate .* got inf"),
        (lambda: Base("gd", lambda step: 0.1), TypeError, "learning_rate .*of a schedule, its value at this point"),
        (lambda: Base("heavy-ball", 0.1, 1.0), ValueError, "momentum must be at least 0 and below 1, got 1.0"),
        (lambda: Base("adam", 0.1, eps=0.0), ValueError, "adam_eps must be a finite number > 0, got 0.0"),
        (lambda: diagnosis.fit([NOTHING], [1.0, 2.0]), ValueError, "give one ratio for each"),
        (lambda: diagnosis.fit([], []), ValueError, "give one ratio for each"),
        (lambda: diagnosis.fit([NOTHING], [math.inf]), ValueError, "positive and finite; count one that diverged"),
        (lambda: diagnosis.fit([NOTHING], [1.0], ridge=0.0), ValueError, "ridge=0.0 is out of range"),
        (lambda: diagnosis.predict({"rate": 1.0}), ValueError, "features has no finite 'overhead'"),
        (lambda: diagnosis.leave_one_out([NOTHING], [1.0], groups="ab"), ValueError, "groups has 2 names"),
        (lambda: diagnosis.spearman([1.0], [1.0]), ValueError, "at least 2"),
    ],
)
def test_bad_input_is_named(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_settings_are_those_that_were_diagnosed():
    options = Options(k=3, ell=1, accept="all", precision="float64", overhead=0.2, num_matvecs=16)
    found = Diagnosis.of(Base("gd", 0.1), measured(seconds=Seconds(1.0, 32.0, 0.3)), options)
    made = found.settings()
    assert found.refresh_every is None and made["refresh_every"] == 160  # 2 m over the budget that was asked for
    assert (made["num_matvecs"], made["accept"], made["precision"]) == (16, "all", "float64")
    # FOSI counts from the largest on: to have the second it must ask for two.
    skipped = measured(eigenvalues=np.array([8.0, 4.0, 3.9, -0.5]), accepted=np.array([False, True, True, True]))
    assert Diagnosis.of(Base("gd", 0.1), skipped).settings()["k"] == 3
    skipped = skipped._replace(eigenvalues=np.array([8.0, 4.0, 1.1, -0.5]))
    assert Diagnosis.of(Base("gd", 0.1), skipped._replace(beyond=1.09)).settings()["k"] == 2


def test_only_the_smallest_pairs():
    few = {"k": 0, "ell": 2, "eigenvalues": np.array([0.5, -3.0]), "residuals": np.zeros(2), "beyond": 9.0}
    few |= {"accepted": np.array([True, True]), "extremes": np.array([9.0, -3.0]), "inside": np.ones((4, 2))}
    found = Diagnosis.of(Base("gd", 0.1), measured(**few))
    assert found.largest == found.bulk_edge == 9.0 and found.bulk_gap == 1.0 and found.gap is None
    assert "it is early" in found.explain()  # by the largest Ritz value, which is none of the pairs
    assert "it is early" not in Diagnosis.of(Base("gd", 0.1), measured(**few | {"extremes": [20.0, -3.0]})).explain()


@pytest.mark.parametrize("name", ["extremes", "inside", "outside", "sharpness"])
def test_what_is_not_finite_is_named_where_it_is_found(name):
    changes = {"sharpness": math.inf, "sharpness_left": 1.0} if name == "sharpness" else {}
    broken = measured(**changes)
    if name != "sharpness":
        broken = broken._replace(**{name: np.full_like(getattr(broken, name), np.nan)})
    with pytest.raises(ValueError, match="not finite at params"):
        Diagnosis.of(Base("gd", 0.1), broken)


def test_rates_as_schedules_return_them():
    assert Base("gd", np.float32(0.1)).limit == pytest.approx(20)
    assert Base("gd", np.array(0.1)).limit == pytest.approx(20)
    with pytest.raises(TypeError, match=r"learning_rate must be .* of a schedule, its value"):
        Base("gd", lambda step: 0.1)
    with pytest.raises(TypeError, match="learning_rate"):
        Base("gd", np.array([0.1, 0.2]))


def test_ranks_of_what_is_no_number():
    with pytest.raises(ValueError, match=r"b=.* must be finite"):
        spearman([1.0, 2.0], [1.0, math.nan])
