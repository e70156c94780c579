"""Races of two trainings, in plain numbers: what they say, worked out by hand, and what is no race."""

import math

import numpy as np
import pytest

from fosi.diagnosis import race

BASE = [(1.0, 3.0), (2.0, 2.0), (3.0, 1.0), (4.0, 0.5)]


def slower(rounds, times):
    return [(times * seconds, loss) for seconds, loss in rounds]


def test_whoever_is_so_many_times_slower_is():
    assert race(BASE, BASE) == 1.0
    for times in (0.2, 0.7, 3.0):
        assert race(BASE, slower(BASE, times)) == pytest.approx(times)
        assert race(slower(BASE, times), BASE) == pytest.approx(1 / times)
    # Also where the first round takes most of the base's time.
    assert race([(10, 3), (11, 2), (12, 1)], [(20, 3), (22, 2), (24, 1)]) == pytest.approx(2.0)
    assert race([(1, 3), (2, 2)], [(2, 3), (3.2, 2.4)]) == pytest.approx(2.0)


def test_it_counts_how_it_stands_and_how_it_goes_on():
    # 0.5 after 8 and 4 seconds; 2, which is the base's after 2, after 4 + 2 / 1.5.
    ours = [(2.0, 6.0), (4.0, 3.0), (6.0, 1.5), (8.0, 0.5)]
    assert race(BASE, ours) == pytest.approx(math.sqrt(2.0 * (8 - 4 - 2 / 1.5) / 2))
    # A second half of next to no time counts half of how it stands, and one of far more twice.
    assert race(BASE, [(3.0, 3.1), (3.9, 2.01), (4.0, 0.5)]) == pytest.approx(math.sqrt(1.0 * 0.5))
    assert race(BASE, [(0.1, 3.0), (0.2, 2.0), (32.0, 0.5)]) == pytest.approx(math.sqrt(8.0 * (32 - 0.2) / 2))
    assert race([(3.0, 3.0), (4.0, 0.5)], [(0.1, 3.0), (40.0, 0.5)]) == pytest.approx(math.sqrt(10.0 * 20.0))


def test_where_there_is_one_round_to_go_by_it_says_how_it_stands():
    assert race(BASE, [(1.5, 2.0)]) == 0.75  # FOSI's first round is as low as the base's second
    assert race(BASE, [(0.5, 0.1)]) == 0.125
    assert race(BASE[:1], [(1.0, 9.0), (2.0, 3.0)]) == 2.0
    assert race(BASE, [(2.0, 9.0)]) == 2.0  # higher than the base ever is


def test_rounds_above_an_earlier_one_and_those_without_a_number_do_not_count():
    worse = [(1.0, 3.0), (1.5, 7.0), (2.0, 2.0), (2.5, math.nan), (3.0, 1.0), (3.5, math.inf), (4.0, 0.5), (5.0, 0.6)]
    assert race(BASE, worse) == race(worse, BASE) == 1.0
    assert race(BASE, [(1.0, math.nan), *BASE[1:]]) == race(BASE, BASE[1:])


def test_what_diverged_never_comes():
    assert race(BASE, [*BASE, (5.0, math.nan)]) == math.inf
    with pytest.raises(ValueError, match="base has a last loss that is not finite"):
        race([*BASE, (5.0, math.inf)], BASE)


@pytest.mark.parametrize(
    ("rounds", "message"),
    [
        ([], r"has shape \(0,\); give \(seconds, loss\) of one round or more"),
        ([1.0, 2.0], r"has shape \(2,\); give"),
        (np.ones((2, 3)), r"has shape \(2, 3\); give"),
        ([(0.0, 1.0)], r"has seconds \[0.0\]; they must rise, from above 0"),
        ([(1.0, 2.0), (1.0, 1.0)], r"has seconds \[1.0, 1.0\]; they must rise"),
        ([(math.nan, 2.0)], r"has seconds \[nan\]; they must rise"),
    ],
)
def test_what_is_no_training_is_named(rounds, message):
    with pytest.raises(ValueError, match=f"base {message}"):
        race(rounds, BASE)
    with pytest.raises(ValueError, match=f"fosi {message}"):
        race(BASE, rounds)
