"""Diagnoses held against measurements: against which runs, and that no task helps to predict itself."""

import json
import math

import numpy as np
import pytest

pytest.importorskip("flax")

from fosi import prediction
from fosi.experiments.tasks import predictions
from fosi.experiments.tasks.plan import Plan
from fosi.experiments.tasks.predictions import Pair
from fosi.experiments.tasks.ratios import Ratio

NOTHING = dict.fromkeys(prediction.NAMES[1:], 0.0)


def pair(task, measured, base="adam", mode="", **features):
    ratio = Ratio(measured, 0, 1, measured, measured)
    return Pair(task, mode, base, {**NOTHING, **features}, ratio, None, "test")


def save(where, plan, losses, pace=1.0, device="test"):
    """A finished run in its file, a round a ``pace`` of seconds."""
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
            "refreshes": 0,
            "refresh_seconds": 0.0,
            "lr_scale": 1.0,
            "eigenvalues": [],
        }
        for i, loss in enumerate(losses, 1)
    ]
    done = {"kind": "done", "gradient_seconds": 0.1, "peak_memory": None, "diverged": False, "compile_seconds": 1.0}
    path.write_text("".join(json.dumps(line) + "\n" for line in (environment, *points, done)))


def foretell(where, plan, **features):
    """A line of a diagnosis."""
    path = where / plan.task / "diagnosis.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    line = {"plan": plan.record(), "features": {**NOTHING, **features}, "device": "test"}
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
    assert [p.features["rate"] for p in found] == [1.0, 1.0] and found[0].validation is None
    assert predictions.write(tmp_path) == []  # of so few tasks nothing is fitted


def test_estimates_on_a_part_come_before_those_on_all(tmp_path):
    save(tmp_path, Plan("burgers", "adam", seconds=4), [4.0, 3.0, 2.0, 1.0])
    save(tmp_path, Plan("burgers", "fosi-adam", seconds=4), [1.0])
    save(tmp_path, Plan("burgers", "fosi-adam", seconds=4, curvature="part"), [4.0, 1.0])
    foretell(tmp_path, Plan("burgers", "adam"))
    (found,) = predictions.pairs(tmp_path)
    assert found.measured.median == 0.5


def test_the_longest_runs_count_and_a_miss_counts_two(tmp_path):
    for seconds, ours in ((2, [0.5]), (4, [4.0, 3.0])):
        save(tmp_path, Plan("burgers", "adam", seconds=seconds), [4.0] * (seconds - 1) + [1.0])
        save(tmp_path, Plan("burgers", "fosi-adam", seconds=seconds), ours)
    foretell(tmp_path, Plan("burgers", "adam"))
    (found,) = predictions.pairs(tmp_path)
    assert math.isinf(found.measured.median) and found.ratio == 2.0
    assert pair("a", 2.5).ratio == 2.0 and pair("a", 1.5).ratio == 1.5  # late is no worse than never
    assert predictions.by_task([found], [found.ratio]) == pytest.approx({"burgers": 2.0})
    some = found._replace(measured=Ratio(math.inf, 2, 3, 0.5, math.inf))
    said = predictions.text([some, found._replace(task="wave")], np.array([0.5, 1.0]))
    assert "| never (2 of 3) |" in "\n".join(said)


def test_the_papers_tasks_have_both_targets_and_one_mode(tmp_path):
    for optimizer, losses in (("adam", [4.0, 3.0, 2.0, 1.0]), ("fosi-adam", [4.0, 1.0, 1.0, 1.0])):
        save(tmp_path, Plan("lm", optimizer), losses)
    foretell(tmp_path, Plan("lm", "adam"))
    (found,) = predictions.pairs(tmp_path)
    assert found.measured.median == 0.5 and found.validation.median == 0.5
    foretell(tmp_path, Plan("lm", "adam", batch_size=64), rate=1.0)
    assert predictions.pairs(tmp_path) == [found]


def test_a_report_of_four_tasks_is_written_and_not_over_a_file_of_someones_own(tmp_path):
    for task, pace in (("wave", 0.25), ("burgers", 0.5), ("reaction", 0.75), ("convection", 1.0)):
        save(tmp_path, Plan(task, "adam", seconds=4), [4.0, 3.0, 2.0, 1.0])
        save(tmp_path, Plan(task, "fosi-adam", seconds=4), [4.0, 3.0, 2.0, 1.0], pace)
        foretell(tmp_path, Plan(task, "adam"), rate=-math.log(pace))
    written = predictions.write(tmp_path)
    assert [path.name for path in written] == ["diagnosis.md", "diagnosis.png", "diagnosis.pdf"]
    assert all(path.stat().st_size > 0 for path in written)
    said = written[0].read_text()
    assert said.startswith(predictions.TITLE) and "**1.00** over 4 tasks" in said and "| wave | adam |" in said
    written[0].write_text("mine")
    with pytest.raises(ValueError, match="is not a report"):
        predictions.write(tmp_path)


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
    said = "\n".join(predictions.text(found, apart))
    fit = prediction.fit([p.features for p in found], [0.5, 0.6, 1.2, 1.1, 2.0])["constant"]
    # By task 0.5, 0.85, 1.1, 2 and 0.4, 0.79, 1, 1.5: in order; by pair 1.1 and 1.2 change places.
    assert "**1.00** over 4 tasks" in said and "**0.90** over 5 pairs" in said
    assert "| b | gd |" in said and f"the coefficients are constant {fit:.2f}," in said
    assert predictions.spread(found, np.array(predictions._ratios(found)) * 2) == pytest.approx(math.log(2))
    labels = [text.get_text() for text in predictions.draw(found, apart).axes[0].texts]
    assert labels == ["a", "b", "b", "c", "d"]
