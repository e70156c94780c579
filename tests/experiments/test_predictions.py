"""Diagnoses held against measurements: against which runs, and that no task helps to predict itself."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("flax")

from fosi import prediction
from fosi.diagnosis import Base, Diagnosis, Measured, Seconds, from_record
from fosi.experiments.tasks import prediction_report, predictions
from fosi.experiments.tasks.plan import Plan
from fosi.experiments.tasks.predictions import Pair
from fosi.experiments.tasks.ratios import Ratio

NOTHING = dict.fromkeys(prediction.NAMES[1:], 0.0)


def pair(task, measured, base="adam", mode="", **features):
    ratio = Ratio(measured, 0, 1, measured, measured)
    return Pair(task, mode, base, "", {**NOTHING, **features}, ratio, ratio, None, {}, (1, 9), "test")


def save(where, plan, losses, pace=1.0, device="test", before=math.inf, diverged=False):
    """A finished run in its file, a round a ``pace`` of seconds, so many rounds of them before an estimate."""
    path = where / plan.task / "curves" / f"{plan.name}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    environment = {
        "kind": "environment",
        "command": "train",
        "plan": plan.record(),
        "device": device,
        "rate": 1e-3,
        "steps_a_round": 10,
    }
    points = [
        {
            "step": 10 * i,
            "seconds": pace * i,
            "train_loss": loss,
            "metric": loss,
            "refreshes": int(i > before),
            "refresh_seconds": 0.0,
            "lr_scale": 1.0,
            "eigenvalues": [],
        }
        for i, loss in enumerate(losses, 1)
    ]
    done = {"kind": "done", "gradient_seconds": 0.1, "peak_memory": None, "diverged": diverged, "compile_seconds": 1.0}
    path.write_text("".join(json.dumps(line) + "\n" for line in (environment, *points, done)))


def foretell(where, plan, rate=0.0, timed=True, **more):
    """A line of a diagnosis, in which FOSI has so much of a factor on the rate, in logarithms."""
    path = where / plan.task / "diagnosis.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    measured = Measured(
        n=9,
        k=1,
        ell=0,
        num_matvecs=3,
        eigenvalues=np.ones(1),
        residuals=np.zeros(1),
        accepted=np.ones(1, bool),
        beyond=0.5,
        extremes=np.array([1.0, 0.0]),
        sharpness=None,
        sharpness_left=None,
        inside=np.ones((2, 1)),
        outside=np.ones((2, 2)),
        seconds=Seconds(1.0, 9.0, 0.1) if timed else None,
    )
    found = replace(Diagnosis.of(Base("heavy-ball", 1e-3), measured), lr_scale=math.exp(rate))
    line = {"plan": plan.record(), **found.record(), "features": "old", "device": "test", "step": 7, **more}
    with path.open("a") as stream:
        stream.write(json.dumps(line) + "\n")


def test_a_diagnosis_is_held_against_the_runs_of_its_own_base_rate_mode_and_device(tmp_path):
    for mode, pace in ((None, 0.5), ("conditioned", 0.25)):
        save(tmp_path, Plan("softmax-full", "adam", mode=mode, seconds=4), [4.0, 3.0, 2.0, 1.0])
        save(tmp_path, Plan("softmax-full", "adam", mode=mode, seconds=4, rate_factor=3.0), [0.5])
        save(tmp_path, Plan("softmax-full", "fosi-adam", mode=mode, seconds=4), [4.0, 1.0], pace)
        # With other settings, at another rate and elsewhere it was sooner.
        save(tmp_path, Plan("softmax-full", "fosi-adam", mode=mode, seconds=4, options={"k": 3}), [0.1])
        save(tmp_path, Plan("softmax-full", "fosi-adam", mode=mode, seconds=4, rate_factor=3.0), [0.1])
        foretell(tmp_path, Plan("softmax-full", "adam", mode=mode), rate=9.0)
        foretell(tmp_path, Plan("softmax-full", "adam", mode=mode), rate=1.0)  # the later one
    for optimizer in ("adam", "fosi-adam"):
        save(tmp_path, Plan("softmax-full", optimizer, seconds=40), [1.0] * 40, device="other")
    foretell(tmp_path, Plan("softmax-full", "adam", rate_factor=3.0))  # at another rate
    foretell(tmp_path, Plan("softmax-full", "fosi-adam"), rate=7.0)  # inside FOSI
    foretell(tmp_path, Plan("softmax-full", "heavy-ball"))  # of which there is no run
    foretell(tmp_path, Plan("wave", "adam"))
    found = predictions.pairs(tmp_path)
    assert [(p.label, p.base, p.measured.median) for p in found] == [
        ("softmax-full", "adam", 0.25),
        ("softmax-full, conditioned", "adam", 0.125),
    ]
    assert {p.after for p in found} == {(7, 40)}
    assert [p.features["rate"] for p in found] == pytest.approx([1.0, 1.0]) and found[0].validation is None
    assert prediction_report.write(tmp_path) == []  # of so few tasks nothing is fitted


def test_a_diagnosis_is_held_against_estimates_on_the_same_data(tmp_path):
    save(tmp_path, Plan("burgers", "adam", seconds=4), [4.0, 3.0, 2.0, 1.0])
    save(tmp_path, Plan("burgers", "fosi-adam", seconds=4), [1.0])
    foretell(tmp_path, Plan("burgers", "adam", curvature="part"))
    assert predictions.pairs(tmp_path) == []
    save(tmp_path, Plan("burgers", "fosi-adam", seconds=4, curvature="part"), [4.0, 1.0])
    assert [found.ratio for found in predictions.pairs(tmp_path)] == [0.5]
    foretell(tmp_path, Plan("burgers", "adam"))
    assert [found.ratio for found in predictions.pairs(tmp_path)] == [0.25]


def test_a_diagnosis_may_name_settings_of_fosi_that_are_not_the_tasks_own(tmp_path):
    save(tmp_path, Plan("burgers", "adam", seconds=4), [4.0, 3.0, 2.0, 1.0])
    save(tmp_path, Plan("burgers", "fosi-adam", seconds=4), [4.0, 1.0])
    save(tmp_path, Plan("burgers", "fosi-adam", seconds=4, options={"alpha": 0.1}), [1.0])
    for settings in ({}, {"alpha": 0.1}, {"alpha": 0.3}):  # of the last there is no run
        foretell(tmp_path, Plan("burgers", "adam"), fosi_settings=settings)
    found = {pair.label: pair.ratio for pair in predictions.pairs(tmp_path)}
    assert found == {"burgers": 0.5, "burgers, alpha 0.1": 0.25}


def test_how_long_there_is_to_train_is_the_runs(tmp_path):
    save(tmp_path, Plan("burgers", "adam", seconds=4), [4.0, 3.0, 2.0, 1.0])
    save(tmp_path, Plan("burgers", "fosi-adam", seconds=4), [4.0, 1.0])
    at_the_limit = {"base": "adam", "sharpness": 38_000.0, "limit": 38_000.0, "lr_scale": 1.0, "steps_left": None}
    foretell(tmp_path, Plan("burgers", "adam"), **at_the_limit)
    (pair,) = predictions.pairs(tmp_path)
    assert pair.after == (7, 40)
    seen = from_record(json.loads((tmp_path / "burgers" / "diagnosis.jsonl").read_text()))
    assert pair.features == replace(seen, steps_left=33, steps_taken=7).features
    assert pair.features["relief"] < 0.9 * seen.features["relief"]  # which ν allows only once it has forgotten


def test_a_run_that_diverged_is_a_miss_whatever_it_had_before(tmp_path):
    save(tmp_path, Plan("burgers", "adam", seconds=4), [4.0, 3.0, 2.0, 1.0])
    foretell(tmp_path, Plan("burgers", "adam"))
    for losses in ([1.0, math.nan, math.nan], [math.nan] * 3, [4.0, math.nan, math.nan]):
        save(tmp_path, Plan("burgers", "fosi-adam", seconds=4), losses, before=1, diverged=True)
        (found,) = predictions.pairs(tmp_path)
        assert found.measured.misses == 1 and found.ratio == 2.0
        assert found.races == {0.5: 2.0}  # no number to race with, which breaks no report
        assert np.isfinite(predictions.predicted([found, pair("wave", 0.5)])).all()
    # A race that is over before does not know; one in which it happens does, whatever came before that.
    for losses, said in (([4.0, 2.0, 1.5, math.nan], 0.5), ([4.0, 2.0, math.nan], 2.0)):
        save(tmp_path, Plan("burgers", "fosi-adam", seconds=4), losses, before=1, diverged=True)
        assert predictions.pairs(tmp_path)[0].races == {0.5: said}


def test_what_is_no_diagnosis_is_named(tmp_path):
    save(tmp_path, Plan("burgers", "adam", seconds=4), [1.0])
    path = tmp_path / "burgers" / "diagnosis.jsonl"
    path.write_text(json.dumps({"plan": Plan("burgers", "adam", tiny=True).record()}) + "\n")
    assert predictions.pairs(tmp_path) == []
    path.write_text(json.dumps({"plan": Plan("burgers", "adam").record()}) + "\n")
    with pytest.raises(ValueError, match=r"diagnosis.jsonl: record has no 'base'.*diagnose it again"):
        predictions.pairs(tmp_path)


def test_the_longest_runs_count_and_a_miss_is_as_much_later_as_the_base_was_sooner(tmp_path):
    for seconds, ours in ((2, [0.5]), (4, [4.0, 4.0, 3.0])):
        save(tmp_path, Plan("burgers", "adam", seconds=seconds), [4.0, 3.0, 2.0, 1.0][-seconds:])
        save(tmp_path, Plan("burgers", "fosi-adam", seconds=seconds), ours)
    foretell(tmp_path, Plan("burgers", "adam"))
    (found,) = predictions.pairs(tmp_path)
    # FOSI's lowest is 3, which it has after three seconds and Adam after two; Adam's own it never has.
    assert found.ratio == 1.5 and math.isinf(found.target.median)
    some = found._replace(target=Ratio(math.inf, 2, 3, 0.5, math.inf))
    said = "\n".join(prediction_report.text([some, found._replace(task="wave")], np.array([0.5, 1.0])))
    assert "| 1.50 | never (2 of 3) | - |" in said and "| 1.50 | never | - |" in said


def test_a_diagnosis_without_times_is_held_against_the_device_with_most_runs(tmp_path):
    for optimizer, pace in (("adam", 1.0), ("fosi-adam", 0.5)):
        save(tmp_path, Plan("burgers", optimizer, seconds=4), [2.0, 1.0], pace, device="other")
        save(tmp_path, Plan("burgers", optimizer, seconds=4, rate_factor=3.0), [2.0, 1.0], device="other")
    save(tmp_path, Plan("burgers", "adam", seconds=8), [2.0, 1.0], device="yet another")
    foretell(tmp_path, Plan("burgers", "adam"))
    assert predictions.pairs(tmp_path) == []
    foretell(tmp_path, Plan("burgers", "adam"), timed=False)
    (found,) = predictions.pairs(tmp_path)
    assert found.ratio == 0.5 and found.device == "other"


def test_a_race_is_from_the_first_estimate_on_and_knows_nothing_of_what_comes_after(tmp_path):
    for later in ([2.0, 1.0], [2.0, 0.5, 0.1]):
        save(tmp_path, Plan("burgers", "adam", seconds=4), [5.0, 4.0, 3.0, 2.0, 1.0])
        save(tmp_path, Plan("burgers", "fosi-adam", seconds=4), [5.0, 3.0, *later], before=1)
        foretell(tmp_path, Plan("burgers", "adam"))
        (found,) = predictions.pairs(tmp_path)
        # After the first round Adam has 4 and 3 within 2 of its 5 seconds, and FOSI 3 after one; within one, 4 and 3.
        assert found.races[0.5] == 0.5 and found.races[0.2] == 1.0 and found.ratio == pytest.approx(0.8)
        assert set(found.races) == {0.2, 0.5}  # earlier there is no round
    save(tmp_path, Plan("burgers", "fosi-adam", seconds=4), [5.0, 3.0, 2.0, 1.0])  # no estimate, so nothing to race
    assert predictions.pairs(tmp_path)[0].races == {}


def test_predictions_after_a_race_know_of_it_and_of_no_run_of_the_task():
    measured = {"a": 0.5, "b": 0.7, "c": 1.0, "d": 1.3, "e": 2.0}
    found = [pair(task, ratio)._replace(held={7: ratio**0.5, 8: 9.0, 9: 0.01}) for task, ratio in measured.items()]
    found.append(pair("f", 0.1))  # which has run none
    ran = predictions.raced(found)
    assert [p.task for p in ran] == list(measured)
    assert [p.features["raced"] for p in ran] == pytest.approx([0.5 * math.log(x) for x in measured.values()])
    without = prediction.fit([p.features for p in ran[1:]], list(measured.values())[1:])
    assert predictions.predicted(ran)[0] == pytest.approx(prediction.predict(ran[0].features, without))
    said = "\n".join(prediction_report.after_race(found))
    assert "By the race alone: **1.00** over 5 tasks" in said and "the coefficients after a race are constant" in said
    half = abs(np.log(list(measured.values()))) / 2  # the race is off by as much
    assert f"the logarithms are {np.sqrt(np.mean(half**2)):.2f} apart" in said.split("By the race alone")[1]


def test_how_well_races_rank_is_said_by_seed_and_by_how_long_they_are():
    found = [
        pair(task, ratio)._replace(races={0.1: 1 / ratio, 0.2: ratio}, held={7: ratio, 8: 1 / ratio, 9: ratio} | more)
        for task, ratio, more in (("a", 0.5, {}), ("b", 0.6, {}), ("c", 0.9, {}), ("d", 1.1, {11: 1.0}))
    ]
    assert predictions.seeds(found) == [7, 8, 9] and predictions.seeds([*found, pair("e", 1.0)]) == []
    assert [p.task for p in predictions.raced(found, 11)] == ["d"]
    said = "\n".join(prediction_report.after_race(found)).split("\n")
    assert "| d | adam | 1.05 (1.10, 0.91, 1.10, 1.00) |" in "\n".join(said)
    rows = [row.split(" | ") for row in said if row.startswith(("| seed", "| the first"))]
    alone = {row[0].removeprefix("| "): (row[3:], float(row[1])) for row in rows}
    assert alone["seed 7 alone"][0] == alone["seed 9 alone"][0] == ["1.00", "1.00", "4 |"]
    assert alone["seed 8 alone"][0] == ["-1.00", "-1.00", "4 |"]
    assert alone["the first 10% of the runs themselves"][0] == ["-1.00", "-1.00", "4 |"]
    assert alone["the first 20% of the runs themselves"][0] == ["1.00", "1.00", "4 |"]
    assert not any("of the runs themselves" in row[0] for row in rows if "50%" in row[0])
    # By a rule that is fitted without the task, too.
    truth = [p.ratio for p in found]
    apart = predictions.predicted(predictions.raced(found, 8))
    assert alone["seed 8 alone"][1] == pytest.approx(prediction.spearman(apart, truth), abs=0.01)


def test_the_papers_tasks_have_both_targets_and_one_mode(tmp_path):
    for optimizer, losses in (("adam", [4.0, 3.0, 2.0, 1.0]), ("fosi-adam", [4.0, 1.0, 1.0, 1.0])):
        save(tmp_path, Plan("lm", optimizer), losses)
    foretell(tmp_path, Plan("lm", "adam"))
    (found,) = predictions.pairs(tmp_path)
    assert found.measured.median == 0.5 and found.validation.median == 0.5
    foretell(tmp_path, Plan("lm", "adam", batch_size=64), rate=1.0)
    assert predictions.pairs(tmp_path) == [found]
    for optimizer, losses in (("adam", [2.0, 1.0]), ("fosi-adam", [1.0, 1.0])):
        save(tmp_path, Plan("tl", optimizer, mode="loop"), losses)  # by its name the first mode is the same
        save(tmp_path, Plan("tl", optimizer, mode="cached"), [1.0])
    foretell(tmp_path, Plan("tl", "adam"))
    assert [(pair.label, pair.ratio) for pair in predictions.pairs(tmp_path)] == [("tl", 0.5), ("lm", 0.5)]


def test_a_report_of_four_tasks_is_written_and_not_over_a_file_of_someones_own(tmp_path):
    for task, pace in (("wave", 0.25), ("burgers", 0.5), ("reaction", 0.75), ("convection", 1.0)):
        save(tmp_path, Plan(task, "adam", seconds=4), [4.0, 3.0, 2.0, 1.0])
        save(tmp_path, Plan(task, "fosi-adam", seconds=4), [4.0, 3.0, 2.0, 1.0], pace)
        foretell(tmp_path, Plan(task, "adam"), rate=-math.log(pace))  # the same noise and cost, so the same order
    written = prediction_report.write(tmp_path)
    assert [path.name for path in written] == ["diagnosis.md", "diagnosis.png", "diagnosis.pdf"]
    assert all(path.stat().st_size > 0 for path in written)
    said = written[0].read_text()
    assert (
        said.startswith(prediction_report.TITLE)
        and "**1.00** over 4 tasks" in said
        and "| wave | adam | 7 of 40 |" in said
    )
    written[0].write_text("mine")
    with pytest.raises(ValueError, match="is not a report"):
        prediction_report.write(tmp_path)


def test_no_run_of_a_task_is_seen_when_it_is_predicted():
    others = [pair("a", 0.5, rate=1.0), pair("b", 0.6, rate=1.0), pair("c", 0.9)]
    one = [*others, pair("d", 0.3, rate=1.0), pair("d", 0.2, "heavy-ball", "other", rate=1.0)]
    other = [*others, pair("d", 2.0, rate=1.0), pair("d", 1.9, "heavy-ball", "other", rate=1.0)]
    assert predictions.predicted(one)[3:] == pytest.approx(predictions.predicted(other)[3:])
    assert predictions.predicted(one)[0] != pytest.approx(predictions.predicted(other)[0])
    fit = prediction.fit([p.features for p in others], [0.5, 0.6, 0.9])
    assert predictions.predicted(one)[3] == pytest.approx(prediction.predict(one[3].features, fit))


def test_what_is_said_is_of_the_pairs():
    found = [pair("a", 0.5, rate=1.0), pair("b", 0.6, rate=0.8), pair("b", 1.2, "gd"), pair("c", 1.1), pair("d", 2.0)]
    apart = np.array([0.4, 0.7, 0.9, 1.0, 1.5])
    assert predictions.by_task(found, apart)["b"] == pytest.approx(math.sqrt(0.7 * 0.9))
    said = "\n".join(prediction_report.text(found, apart))
    fit = prediction.fit([p.features for p in found], [0.5, 0.6, 1.2, 1.1, 2.0])["constant"]
    # By task 0.5, 0.85, 1.1, 2 and 0.4, 0.79, 1, 1.5: in order; by pair 1.1 and 1.2 change places.
    assert "**1.00** over 4 tasks" in said and "**0.90** over 5 pairs" in said
    # By reasoning 0.37, 0.45 and three times 1: ranks 1, 2, 4, 4, 4 for 1, 2, 4, 3, 5.
    assert "**0.89** over 5 pairs" in said.split("By reasoning alone")[1]
    assert "| b | gd | 1 of 9 |" in said and f"the coefficients are constant {fit:.2f}," in said
    assert predictions.spread(found, np.array(predictions.measured_ratios(found)) * 2) == pytest.approx(math.log(2))
    labels = [text.get_text() for text in prediction_report.drawn(found, apart).axes[0].texts]
    assert labels == ["a", "b", "b", "c", "d"]
