"""Races of a base and FOSI, on runs made by hand: when they begin and end, and what counts."""

import math
from types import SimpleNamespace

import pytest

pytest.importorskip("flax")

from fosi.experiments.tasks import TASKS, predictions, race, runs
from fosi.experiments.tasks.plan import Plan
from fosi.experiments.tasks.standings import Entry
from tests.experiments.test_predictions import foretell, save


def entries(where, alone, ours, pace=1.0, diverged=False):
    """FOSI's, with an estimate after two rounds, and the base's."""
    plans = Plan("burgers", "fosi-adam"), Plan("burgers", "adam")
    save(where, plans[0], ours, pace, before=2, diverged=diverged)
    save(where, plans[1], alone)
    read = (runs.read(where / "burgers" / "curves" / f"{plan.name}.jsonl") for plan in plans)
    return [Entry(curve.plan.optimizer, "", {0: curve}) for curve in read]


def test_a_race_begins_at_the_first_estimate_and_ends_where_it_is_told_to(tmp_path):
    # After two rounds alike the base has 3, 2, 1, 0.5 at 1 to 4 seconds, and FOSI, twice as long a round, what comes
    # at 2, 4 and 6.
    two = entries(tmp_path, [9.0, 8.0, 3.0, 2.0, 1.0, 0.5], [9.0, 8.0, 2.0, 0.5, 0.1], pace=2.0)
    assert race.race(*two).median == 1.0  # 0.5, both after 4
    assert race.race(*two, 0.5).median == 1.0  # 2, both after 2, of the 3 seconds that are half of the base's 6
    slow = entries(tmp_path, [9.0, 8.0, 3.0, 2.0, 1.0, 0.5], [9.0, 8.0, 7.0, 3.0, 0.1], pace=2.0)
    # 0.5 after 4 + 2 · 2.5/2.9 and after 4; of that from 2 on, which is a half of the base's, a quarter: half at least.
    assert race.race(*slow).median == pytest.approx((4 + 5 / 2.9) / 4 / math.sqrt(2))
    assert race.race(*slow, 0.7).median == 4.0  # 3, after 4 and after 1, of 4.2 seconds
    late = entries(tmp_path, [9.0, 8.0, 3.0, 2.0], [9.0, 8.0, 3.0], pace=50.0)
    assert race.race(*late).median == 50.0 and race.race(*late, 1.0) is None  # in which FOSI has no round


def test_a_race_counts_how_it_stands_and_how_it_goes_on(tmp_path):
    two = entries(tmp_path, [9.0, 8.0, 3.0, 2.0, 1.0, 0.5], [9.0, 8.0, 6.0, 3.0, 1.5, 0.5], pace=2.0)
    # 0.5 after 8 and after 4; 2, which is the base's after 2, after 4 + 2 · 1/1.5.
    second = (8 - (4 + 2 / 1.5)) / 2
    assert race.race(*two).median == pytest.approx(math.sqrt(2 * second))
    up_and_down = entries(tmp_path, [9.0, 8.0, 3.0, 2.0, 5.0, 1.0, 4.0, 0.5], [9.0, 8.0, 6.0, 7.0, 3.0, 1.5, 0.5])
    # Rounds that are higher than one before do not count: 0.5 after 5 and 6, 1.5 after 4 and 3.
    assert race.race(*up_and_down).median == pytest.approx(math.sqrt(5 / 6 * (5 - 4) / 3 * 1.25))


def test_what_diverges_in_a_race_is_a_miss_and_what_does_later_is_not(tmp_path):
    losses = [9.0, 8.0, 3.0, 2.0, 1.0, math.nan]
    two = entries(tmp_path, [9.0, 8.0, 3.0, 2.0, 1.5, 1.2], losses, diverged=True)
    assert race.race(*two).median == math.inf and race.race(*two).misses == 1
    # After 3 of 6 seconds nobody knows: 1.5 after 2.5 and 3, and 2.5 after 1.5 of each.
    assert race.race(*two, 0.5).median == pytest.approx(math.sqrt(2.5 / 3 * 1.0 / 1.5))


def made_by_hand(monkeypatch, where, alone, ours, asked, diverged=False, **environment):
    """Runs that are not trained: `runs.run` finds them."""

    def run(plan, problem, out, on_point, engine, keep=False):
        asked.append(plan)
        assert out == where / "races" and keep == (not plan.optimizer.startswith("fosi"))
        fosi = plan.optimizer.startswith("fosi")
        save(out, plan, ours if fosi else alone, before=2 if fosi else math.inf, diverged=diverged)
        found = runs.read(out / plan.task / "curves" / f"{plan.name}.jsonl")
        found.environment.update({"shared": False} | (environment if fosi else {}))
        return found

    monkeypatch.setattr(race.runs, "run", run)
    engine = SimpleNamespace(schedule=SimpleNamespace(warmup=20), steps_a_round=10, device_name="test")
    monkeypatch.setattr(Plan, "engine", lambda self, problem: engine)


def test_both_run_as_long_as_the_warm_up_and_the_part(monkeypatch, tmp_path):
    asked = []
    made_by_hand(monkeypatch, tmp_path, [9.0, 8.0, 4.0, 3.0, 2.0], [9.0, 8.0, 2.0], asked)
    full, batches = SimpleNamespace(part=lambda data: data), SimpleNamespace(part=None)
    plan = Plan("wave", "fosi-adam", 3, mode="quick", rounds=40, rate_factor=3.0, options={"k": 3})
    found = race.hold(plan, full, tmp_path, 0.2)
    assert found.ratio.median == pytest.approx(1 / 3)  # 2, after one round and after three
    assert found.checkpoint == tmp_path / "races" / "wave" / "checkpoints" / asked[0].name
    assert asked == [
        Plan("wave", "adam", 3, mode="quick", rounds=2 + 8, rate_factor=3.0),
        Plan("wave", "fosi-adam", 3, mode="quick", rounds=2 + 8, rate_factor=3.0, curvature="part"),
    ]
    race.hold(Plan("lr", "heavy-ball", seconds=9.0), batches, tmp_path, 0.01)
    rounds = 2 + math.ceil(0.01 * TASKS["lr"].rounds)
    assert asked[2:] == [Plan("lr", name, rounds=rounds) for name in ("heavy-ball", "fosi-heavy-ball")]


def test_what_is_no_race_is_named(monkeypatch, tmp_path):
    problem, plan = SimpleNamespace(part=None), Plan("lr", "adam", rounds=10)
    for share in (0.0, -1.0, 1.5):
        with pytest.raises(ValueError, match=f"race is {share:g}; give a part of the run"):
            race.hold(plan, problem, tmp_path, share)
    asked = []
    made_by_hand(monkeypatch, tmp_path, [9.0, 8.0, math.nan], [9.0, 8.0, 2.0], asked)
    with pytest.raises(ValueError, match="adam diverged in the race, after 30 steps"):
        race.hold(plan, problem, tmp_path, 0.2)
    assert [one.optimizer for one in asked] == ["adam"]  # FOSI is not trained then
    made_by_hand(monkeypatch, tmp_path, [9.0, 8.0, 3.0], [9.0, 8.0, 2.0], [], device="other")
    with pytest.raises(ValueError, match=r"fosi-adam.*has device other, and here it is test: remove it to race anew"):
        race.hold(plan, problem, tmp_path, 0.2)
    made_by_hand(monkeypatch, tmp_path, [9.0, 8.0, 3.0], [9.0, 8.0, 2.0], [], shared=True)
    with pytest.raises(ValueError, match="has shared True, and here it is False"):
        race.hold(plan, problem, tmp_path, 0.2)
    with pytest.raises(ValueError, match="first estimate after 2 rounds, and the whole run has 2: there is nothing"):
        race.hold(Plan("lr", "adam", rounds=2), problem, tmp_path, 0.2)
    made_by_hand(monkeypatch, tmp_path, [9.0, 8.0, 3.0], [9.0, 8.0, math.nan], [], diverged=True)
    assert race.hold(plan, problem, tmp_path, 0.2).ratio.median == math.inf


def test_a_report_takes_races_that_were_held_apart_with_seeds_that_no_run_has(tmp_path):
    losses = [9.0, 8.0, *(5.0 * 0.9**i for i in range(38))]
    for optimizer, seeds in (("adam", (0, 1, 2)), ("fosi-adam", (0, 1))):
        for seed in seeds:
            save(tmp_path, Plan("burgers", optimizer, seed, seconds=4), losses, before=2)
    foretell(tmp_path, Plan("burgers", "adam"), raced=0.1)  # which that line knew: a report holds races alike

    def hold(seed, rounds, losses, diverged=False, **other):
        for optimizer, mine in (("adam", [9.0, 8.0, 5.0, 2.0]), ("fosi-adam", losses)):
            fosi = optimizer != "adam"
            plan = Plan("burgers", optimizer, seed, rounds=rounds, **other)
            save(tmp_path / race.FOLDER, plan, mine, before=2 if fosi else math.inf, diverged=diverged and fosi)

    # Two rounds before the first estimate, and then 8 of 40 are a fifth.
    hold(1, 10, [9.0, 8.0, 0.5])  # seeds that were measured
    hold(2, 10, [9.0, 8.0, 0.5])
    hold(7, 10, [9.0, 8.0, 2.0])
    hold(7, 9, [9.0, 8.0, 5.0])  # shorter and longer ones of the same
    hold(7, 11, [9.0, 8.0, 5.0])
    hold(8, 11, [9.0, 8.0, 5.0])
    hold(9, 22, [9.0, 8.0, 2.0])  # half of the run
    hold(14, 9, [9.0, 8.0, 2.0])  # of two as far off the longer one
    hold(14, 11, [9.0, 8.0, 5.0])
    hold(10, 10, [9.0, 8.0, 2.0], mode="quick")  # another task
    hold(11, 10, [9.0, 8.0, 2.0], rate_factor=3.0)
    save(tmp_path / race.FOLDER, Plan("burgers", "fosi-adam", 12, rounds=10), [9.0, 8.0, 2.0], before=2)  # against none
    (found,) = predictions.pairs(tmp_path)
    assert found.held == {7: 0.5, 8: 1.0, 14: 1.0} and "raced" not in found.features
    (ran,) = predictions.raced([found])
    assert ran.features["raced"] == 0.0
    assert predictions.raced([found], 8)[0].features["raced"] == 0.0 and predictions.raced([found], 9) == []
    other = Plan("burgers", "fosi-adam", 7, rounds=10)
    save(tmp_path / race.FOLDER, other, [9.0, 8.0, 2.0], device="other", before=2)
    hold(13, 10, [9.0, 8.0, math.nan], diverged=True)
    assert predictions.pairs(tmp_path)[0].held == {7: 1.0, 8: 1.0, 13: 2.0, 14: 1.0}  # of one on the runs' device


def test_a_base_that_diverged_is_raced_by_none(tmp_path):
    two = entries(tmp_path, [9.0, 8.0, 3.0, math.nan], [9.0, 8.0, 3.0, 2.0])
    assert race.race(*two) is None
