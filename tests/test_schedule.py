"""Laws of the refresh schedule: how many products, how often, and when."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fosi.schedule import (
    NEVER_AGAIN,
    Schedule,
    check_pairs,
    measured_refresh_interval,
    num_matvecs,
    plan,
    refresh_interval,
)

counts = st.integers(0, 200)
times = st.floats(1e-3, 1e3)


@pytest.mark.parametrize(
    ("k", "ell", "n", "m"),
    [
        (10, 0, 10**6, 40),
        (5, 5, 10**6, 40),
        (1, 0, 10**9, 42),  # 2 ln 1e9 = 41.4…, rounded up
        (1, 1, 10**4, 19),
        (10, 0, 25, 25),  # no more products than dimensions
        (1, 0, 1, 1),
        (3, 0, 4, 4),
    ],
)
def test_number_of_products(k, ell, n, m):
    assert num_matvecs(k, ell, n) == m
    assert type(num_matvecs(np.int64(k), np.int32(ell), np.int64(n))) is int


@given(k=counts, ell=counts, n=st.integers(1, 10**12))
def test_number_of_products_is_enough_and_never_above_n(k, ell, n):
    m = num_matvecs(k, ell, n)
    assert m <= n
    if m < n:
        assert m >= 4 * (k + ell)
        assert m >= 2 * math.log(n)
        assert m == 4 * (k + ell) or m - 1 < 2 * math.log(n)


def test_the_papers_interval_is_800():
    assert refresh_interval(40, 0.1) == 800


@pytest.mark.parametrize("overhead", [0.01, 0.02, 0.05, 0.1, 0.2, 0.7 - 0.6, 1.1 - 1, 0.3 - 0.2])
@pytest.mark.parametrize("m", [1, 3, 7, 40, 44, 123])
def test_interval_that_is_whole_up_to_rounding_is_not_bumped(m, overhead):
    assert refresh_interval(m, overhead) == round(2 * m / overhead)


@given(m=st.integers(1, 10**4), overhead=st.floats(1e-4, 100))
def test_interval_is_the_shortest_within_budget(m, overhead):
    T = refresh_interval(m, overhead)
    assert type(T) is int
    assert T >= 1
    assert overhead * T >= 2 * m * (1 - 1e-9)
    if T > 1:
        assert overhead * (T - 1) < 2 * m


def test_tiny_overhead_overflows_nothing():
    assert refresh_interval(40, 1e-320) > 10**300
    assert plan(10, 0, 10**6, overhead=1e-320) == (NEVER_AGAIN, NEVER_AGAIN, 40)


@given(base=times, extra=st.floats(0, 0.9), refresh=times, overhead=st.floats(0.01, 10))
def test_measured_interval_is_the_shortest_within_budget(base, extra, refresh, overhead):
    fosi = base * (1 + extra * overhead)
    T = measured_refresh_interval(base, fosi, refresh, overhead)
    assert type(T) is int

    def slack(T):
        return (1 + overhead) * T * base - (T * fosi + refresh)

    rounding = 1e-9 * (1 + overhead) * T * base
    assert slack(T) >= -rounding
    if T > 1:
        assert slack(T - 1) < rounding


@given(m=st.integers(1, 1000), base=times, overhead=st.sampled_from([0.01, 0.05, 0.1, 0.25, 1.0]))
def test_measured_interval_agrees_with_the_heuristic_under_its_assumptions(m, base, overhead):
    assert measured_refresh_interval(base, base, 2 * m * base, overhead) == refresh_interval(m, overhead)


@pytest.mark.parametrize(("base", "fosi"), [(1.0, 1.2), (1.0, 1.1), (3.0, 3.3), (3.0, 1.1 * 3.0)])
def test_measured_interval_refuses_a_budget_that_no_interval_meets(base, fosi):
    with pytest.raises(ValueError, match=rf"overhead=0\.1.*fosi_step={fosi}.*base_step={base}.*above 0\.[12]"):
        measured_refresh_interval(base, fosi, 80.0, 0.1)


@pytest.mark.parametrize("bad", [0.0, -1.0, math.inf, math.nan])
@pytest.mark.parametrize("name", ["base_step", "fosi_step", "refresh", "overhead"])
def test_measured_interval_names_what_is_wrong(name, bad):
    values = {"base_step": 1.0, "fosi_step": 1.0, "refresh": 80.0, "overhead": 0.1}
    with pytest.raises(ValueError, match=f"{name}={bad}.*positive, finite"):
        measured_refresh_interval(**{**values, name: bad})


@pytest.mark.parametrize(("warmup", "every"), [(0, 1), (0, 5), (7, 3), (3, 7), (4, 4), (2, NEVER_AGAIN)])
def test_due_is_every_t_th_step_from_the_warmup_on(warmup, every):
    schedule = Schedule(warmup, every, 40)
    wanted = set(range(warmup, 50, every))
    for step in range(50):
        assert schedule.due(step) is (step in wanted)
    for dtype in (np.int32, np.int64, np.uint32):
        np.testing.assert_array_equal(schedule.due(np.arange(50, dtype=dtype)), [step in wanted for step in range(50)])


def test_due_can_be_traced():
    jax = pytest.importorskip("jax")
    schedule = plan(10, 0, 10**6, refresh_every=math.inf, warmup=3)
    due = jax.jit(schedule.due)(jax.numpy.arange(10))
    np.testing.assert_array_equal(due, np.arange(10) == 3)


@pytest.mark.parametrize(
    ("given_", "wanted"),
    [
        ({}, (800, 800, 40)),
        ({"overhead": 0.2}, (400, 400, 40)),
        ({"num_matvecs": 20}, (400, 400, 20)),
        ({"refresh_every": 100}, (100, 100, 40)),
        ({"refresh_every": 100, "warmup": 0}, (0, 100, 40)),
        ({"warmup": 7}, (7, 800, 40)),
        ({"refresh_every": math.inf}, (800, NEVER_AGAIN, 40)),
        ({"refresh_every": np.inf, "overhead": 1.0}, (80, NEVER_AGAIN, 40)),
        ({"refresh_every": math.inf, "warmup": 5}, (5, NEVER_AGAIN, 40)),
        ({"refresh_every": 10**12}, (NEVER_AGAIN, NEVER_AGAIN, 40)),
        ({"num_matvecs": np.int64(10), "refresh_every": np.int32(9), "warmup": np.int8(1)}, (1, 9, 10)),
    ],
)
def test_plan_fills_in_what_was_left_open(given_, wanted):
    schedule = plan(10, 0, 10**6, **given_)
    assert schedule == Schedule(*wanted)
    assert all(type(number) is int for number in schedule)


def test_plan_takes_no_more_products_than_dimensions():
    assert plan(2, 1, 6, num_matvecs=100).num_matvecs == 6
    assert plan(2, 1, 6).num_matvecs == 6
    assert plan(3, 3, 6, num_matvecs=6).num_matvecs == 6


def test_one_estimate_only_means_one():
    schedule = plan(1, 0, 100, refresh_every=math.inf, warmup=2)
    assert [step for step in range(10**4) if schedule.due(step)] == [2]


@pytest.mark.parametrize(
    ("k", "ell", "n", "options", "error", "message"),
    [
        (-1, 2, 10, {}, ValueError, "k=-1.*at least 0"),
        (1, -1, 10, {}, ValueError, "ell=-1.*at least 0"),
        (0, 0, 10, {}, ValueError, "k=0 and ell=0.*from 1 to n=10"),
        (6, 5, 10, {}, ValueError, "k=6 and ell=5.*from 1 to n=10"),
        (1, 0, 0, {}, ValueError, "n=0.*at least 1"),
        (True, 0, 10, {}, TypeError, "k=True.*int"),
        (1, False, 10, {}, TypeError, "ell=False.*int"),
        (1.0, 0, 10, {}, TypeError, "k=1.0.*int"),
        ("1", 0, 10, {}, TypeError, "k='1'.*int"),
        (math.nan, 0, 10, {}, ValueError, "k=nan.*int"),
        (3, 2, 10, {"num_matvecs": 4}, ValueError, r"num_matvecs=4.*at least k \+ ell = 5"),
        (3, 2, 10, {"num_matvecs": 0}, ValueError, "num_matvecs=0.*at least 1"),
        (3, 2, 10, {"num_matvecs": 6.0}, TypeError, "num_matvecs=6.0.*int"),
        (1, 0, 10, {"overhead": 0}, ValueError, "overhead=0.*positive"),
        (1, 0, 10, {"overhead": -0.1}, ValueError, "overhead=-0.1.*positive"),
        (1, 0, 10, {"overhead": math.inf}, ValueError, "overhead=inf.*finite"),
        (1, 0, 10, {"overhead": math.nan}, ValueError, "overhead=nan.*finite"),
        (1, 0, 10, {"overhead": "0.1"}, TypeError, "overhead='0.1'.*number"),
        (1, 0, 10, {"overhead": True}, TypeError, "overhead=True.*number"),
        (1, 0, 10, {"overhead": -1, "refresh_every": 5}, ValueError, "overhead=-1.*positive"),
        (1, 0, 10, {"refresh_every": 0}, ValueError, "refresh_every=0.*at least 1.*math.inf"),
        (1, 0, 10, {"refresh_every": -math.inf}, ValueError, "refresh_every=-inf.*math.inf"),
        (1, 0, 10, {"refresh_every": math.nan}, ValueError, "refresh_every=nan.*math.inf"),
        (1, 0, 10, {"refresh_every": 10.5}, TypeError, "refresh_every=10.5.*int.*math.inf"),
        (1, 0, 10, {"refresh_every": True}, TypeError, "refresh_every=True.*int"),
        (1, 0, 10, {"warmup": -1}, ValueError, "warmup=-1.*at least 0"),
        (1, 0, 10, {"warmup": 2.0}, TypeError, "warmup=2.0.*int"),
        (1, 0, 10, {"warmup": math.inf}, ValueError, "warmup=inf.*int"),
    ],
)
def test_plan_names_what_is_wrong(k, ell, n, options, error, message):
    with pytest.raises(error, match=message):
        plan(k, ell, n, **options)


@given(k=counts, ell=counts, n=st.integers(1, 300))
def test_pairs_fit_exactly_when_a_plan_exists(k, ell, n):
    if 1 <= k + ell <= n:
        assert check_pairs(k, ell, n) == (k, ell, n)
        assert k + ell <= plan(k, ell, n).num_matvecs <= n
    else:
        with pytest.raises(ValueError, match=r"k \+ ell must be from 1 to"):
            plan(k, ell, n)
