"""The closed forms really are the fastest rates on quadratics, and their ratio is safe on any spectrum."""

import math
import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fosi.scaling import RULES, lr_scale, optimal_lr

SPECTRA = [(1.0, 0.5), (10.0, 0.1), (300.0, 2.0), (1e-3, 1e-5)]
FACTORS = np.concatenate([np.geomspace(0.2, 0.99, 40), np.geomspace(1.01, 5.0, 40)])

curvature = st.floats(1e-6, 1e6)
any_float = st.floats(allow_nan=True, allow_infinity=True)


@pytest.fixture(autouse=True)
def no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def contraction(rule, lr, beta, lam):
    """Spectral radius of the iteration the rule's optimizer makes of a quadratic with these eigenvalues."""
    lam = np.asarray(lam)
    if rule == "gd":
        return np.abs(1 - lr * lam).max()
    # Two-step methods: θ⁺ = a θ + b θ⁻ along each eigenvector, hence the companion matrix [[a, b], [1, 0]].
    step = 1 - lr * lam
    a, b = {
        "heavy_ball": (step + beta, np.full_like(lam, -beta)),
        "nesterov": ((1 + beta) * step, -beta * step),
    }[rule]
    companion = np.stack([np.stack([a, b], -1), np.stack([np.ones_like(a), np.zeros_like(a)], -1)], -2)
    return np.abs(np.linalg.eigvals(companion)).max()


def best_beta(rule, L, mu):
    kappa = L / mu
    root = math.sqrt(3 * kappa + 1)
    return {
        "gd": 0.0,
        "heavy_ball": ((math.sqrt(kappa) - 1) / (math.sqrt(kappa) + 1)) ** 2,
        "nesterov": (root - 2) / (root + 2),
    }[rule]


def known_rate(rule, L, mu):
    """Rates of Lessard, Recht and Packard, proposition 1."""
    kappa = L / mu
    return {
        "gd": (kappa - 1) / (kappa + 1),
        "heavy_ball": (math.sqrt(kappa) - 1) / (math.sqrt(kappa) + 1),
        "nesterov": 1 - 2 / math.sqrt(3 * kappa + 1),
    }[rule]


@pytest.mark.parametrize(("L", "mu"), SPECTRA)
@pytest.mark.parametrize("rule", RULES)
def test_the_optimal_rate_contracts_as_fast_as_the_theory_says(rule, L, mu):
    lam = np.linspace(mu, L, 50)
    rate = contraction(rule, optimal_lr(rule, L, mu), best_beta(rule, L, mu), lam)
    # Double roots of the companion matrix are found only to the root of machine precision.
    np.testing.assert_allclose(rate, known_rate(rule, L, mu), atol=1e-6)


@pytest.mark.parametrize(("L", "mu"), SPECTRA)
@pytest.mark.parametrize("rule", RULES)
def test_no_other_rate_contracts_faster(rule, L, mu):
    lam = np.linspace(mu, L, 50)
    best = known_rate(rule, L, mu)
    beta = best_beta(rule, L, mu)
    assert min(contraction(rule, f * optimal_lr(rule, L, mu), beta, lam) for f in FACTORS) > best + 1e-6


@pytest.mark.parametrize("rule", ["heavy_ball", "nesterov"])
def test_no_other_rate_and_momentum_together_contract_faster(rule):
    L, mu = 10.0, 0.1
    lam = np.linspace(mu, L, 50)
    best = known_rate(rule, L, mu)
    rates = [
        contraction(rule, f * optimal_lr(rule, L, mu), beta, lam)
        for f in FACTORS[::4]
        for beta in np.linspace(0, 0.99, 30)
    ]
    assert min(rates) > best


def test_rates_by_hand():
    assert optimal_lr("gd", 3, 1) == 0.5
    assert optimal_lr("heavy_ball", 9, 1) == 0.25
    assert optimal_lr("nesterov", 1, 1) == 1.0
    assert all(type(optimal_lr(rule, 3, 1)) is float for rule in RULES)


@pytest.mark.parametrize("rule", RULES)
def test_negative_curvature_counts_as_none(rule):
    assert optimal_lr(rule, 4.0, -2.0) == optimal_lr(rule, 4.0, 0.0)
    assert optimal_lr(rule, -1.0, -2.0) == optimal_lr(rule, 0.0, 0.0) == math.inf


@given(L=curvature, mu=curvature, c=st.floats(1e-3, 1e3), rule=st.sampled_from(list(RULES)))
def test_rates_scale_inversely_with_curvature(L, mu, c, rule):
    np.testing.assert_allclose(optimal_lr(rule, c * L, c * mu), optimal_lr(rule, L, mu) / c, rtol=1e-12)


def test_a_callable_gets_curvature_that_is_not_negative():
    seen = []

    def rule(lam_max, lam_min):
        seen.append((lam_max, lam_min))
        return 1 / lam_max

    assert optimal_lr(rule, 4.0, -3.0) == 0.25
    assert lr_scale(rule, 8.0, -3.0, 4.0, -2.0, 10.0) == 2.0
    assert seen == [(4.0, 0.0), (8.0, 0.0), (4.0, 0.0)]


@pytest.mark.parametrize("call", [lambda rule: optimal_lr(rule, 1, 1), lambda rule: lr_scale(rule, 1, 1, 1, 1, 3)])
def test_unknown_rules_are_named(call):
    with pytest.raises(ValueError, match=r"rule='adam'.*'gd', 'heavy_ball', 'nesterov'"):
        call("adam")
    with pytest.raises(TypeError, match=r"rule=3.*'gd', 'heavy_ball', 'nesterov'"):
        call(3)


@given(
    data=st.lists(curvature, min_size=4, max_size=4).map(sorted),
    cap=st.floats(1, 1e3),
    rule=st.sampled_from(list(RULES)),
)
def test_scale_is_the_ratio_of_optimal_rates_up_to_the_cap(data, cap, rule):
    whole_min, rest_min, rest_max, whole_max = data
    ratio = optimal_lr(rule, rest_max, rest_min) / optimal_lr(rule, whole_max, whole_min)
    scale = lr_scale(rule, whole_max, whole_min, rest_max, rest_min, math.inf)
    assert type(scale) is float
    np.testing.assert_allclose(scale, max(ratio, 1), rtol=1e-12)
    assert lr_scale(rule, whole_max, whole_min, rest_max, rest_min, cap) == min(scale, cap)
    assert lr_scale(rule, whole_max, whole_min, rest_max, rest_min, 1) == 1


def test_the_rest_is_never_slowed_down():
    # An estimate may put the rest's curvature above the whole's; the paper's ratio is at least 1.
    assert lr_scale("gd", 1.0, 0.1, 2.0, 0.5, 3.0) == 1.0


@given(values=st.tuples(any_float, any_float, any_float, any_float), rule=st.sampled_from(list(RULES)))
def test_scale_stays_within_one_and_the_cap_whatever_the_spectrum(values, rule):
    assert 1 <= lr_scale(rule, *values, 3.0) <= 3
    assert 1 <= lr_scale(rule, *values, math.inf) < math.inf


@pytest.mark.parametrize("rule", RULES)
def test_spectra_without_positive_curvature(rule):
    assert lr_scale(rule, 10.0, -1.0, 0.0, -1.0, 3.0) == 3.0
    assert lr_scale(rule, 10.0, -1.0, -0.5, -1.0, 3.0) == 3.0
    assert lr_scale(rule, 10.0, -1.0, -0.5, -1.0, math.inf) == 1.0
    assert lr_scale(rule, 0.0, 0.0, 0.0, 0.0, 3.0) == 1.0
    assert lr_scale(rule, -1.0, -2.0, -1.5, -2.0, 3.0) == 1.0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", range(4))
def test_curvature_that_is_no_number_scales_nothing(where, bad):
    values = [10.0, 0.1, 1.0, 0.2]
    assert lr_scale("gd", *values, 3.0) == 3.0
    values[where] = bad
    assert lr_scale("gd", *values, 3.0) == 1.0
    assert lr_scale(lambda lam_max, lam_min: 1 / (1 + lam_min * 0), *values, 3.0) == 1.0


def test_no_rule_means_no_scaling():
    assert lr_scale(None, 10.0, 0.1, 1.0, 0.2, 3.0) == 1.0
    assert type(lr_scale(None, 10, 0, 1, 0, 3)) is float


@pytest.mark.parametrize("cap", [0.5, 0, -3.0, math.nan, np.float32(0.9)])
@pytest.mark.parametrize("rule", ["gd", None])
def test_a_cap_below_one_is_refused(rule, cap):
    with pytest.raises(ValueError, match=r"cap=.*at least 1"):
        lr_scale(rule, 10.0, 0.1, 1.0, 0.2, cap)


def test_arrays_elementwise_in_their_own_dtype():
    whole = np.array([10.0, 10.0, 0.0], dtype=np.float32)
    rest = np.array([4.0, -1.0, 0.0], dtype=np.float32)
    zero = np.zeros(3, dtype=np.float32)
    for cap in (3.0, np.float64(3.0)):
        scale = lr_scale("gd", whole, zero, rest, zero, cap)
        assert scale.dtype == np.float32
        np.testing.assert_array_equal(scale, np.array([2.5, 3.0, 1.0], dtype=np.float32))


CASES = [
    (10.0, 0.5, 4.0, 0.7),
    (10.0, -1.0, 1.0, -1.0),
    (10.0, 0.0, 0.0, 0.0),
    (0.0, 0.0, 0.0, 0.0),
    (-1.0, -2.0, -1.5, -2.0),
    (math.nan, 0.0, 1.0, 0.0),
    (10.0, 0.1, math.nan, 0.2),
    (1.0, 0.1, 2.0, 0.5),
]


@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize("cap", [1.0, np.float64(3.0), math.inf])
@pytest.mark.parametrize("rule", [*RULES, None, lambda lam_max, lam_min: 2 / (lam_max + lam_min)])
def test_traced_by_jax_it_is_the_same_in_float32(rule, cap, x64):
    jax = pytest.importorskip("jax")
    jnp = jax.numpy

    @jax.jit
    def traced(traced_cap, whole_max, whole_min, rest_max, rest_min):
        values = whole_max, whole_min, rest_max, rest_min
        scale = lr_scale(rule, *values, cap, xp=jnp)
        lr = scale if rule is None else optimal_lr(rule, whole_max, whole_min, xp=jnp)
        return scale, lr_scale(rule, *values, traced_cap, xp=jnp), lr

    with jax.enable_x64(x64):
        scale, scale_traced_cap, lr = traced(jnp.float32(cap), *jnp.array(CASES, dtype=jnp.float32).T)
        assert scale.dtype == lr.dtype == jnp.float32
        np.testing.assert_allclose(scale, [lr_scale(rule, *case, cap) for case in CASES], rtol=1e-6)
        np.testing.assert_array_equal(scale_traced_cap, scale)
        if rule is not None:
            np.testing.assert_allclose(lr, [optimal_lr(rule, *case[:2]) for case in CASES], rtol=1e-6)


@pytest.mark.parametrize("rule", RULES)
def test_no_curvature_trips_no_nan_debugger(rule):
    jax = pytest.importorskip("jax")
    with jax.debug_nans(True):
        for case in CASES[:5]:
            lr_scale(rule, *map(jax.numpy.float32, case), 3.0, xp=jax.numpy)
