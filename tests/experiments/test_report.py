"""The report on the training tasks: ratios, medians and means by hand, and a report that is the runs' own numbers."""

import math

import pytest

pytest.importorskip("flax")

from fosi.experiments.tasks import PAPER, markdown, peers, ratios, report, summary
from fosi.experiments.tasks.ratios import Group

HEAD = {"task": "lr", "backend": "jax", "mode": None, "backbone": None, "rounds": 100, "tiny": False, "device": "test"}
PLAIN = {"rate_factor": 1.0, "curvature": "fixed", "options": {}, "diverged": False}


def line(optimizer, seed, to_target, **more):
    timed = {"seconds_to_target": to_target, "steps_to_target": to_target, "gradients_to_target": to_target}
    timed |= {"target_train": 0.1, "steps_to_train_target": to_target}
    cost = {"ms_per_step": 10.0, "ms_per_refresh": 400.0, "ms_per_gradient": 8.0, "overhead_measured": 0.07}
    found = {"best_val": 0.9, "best_val_round": 5, "target_val": 0.9, "best_train": 0.1, "seconds": 9.0}
    rest = {"peak_memory": None, "refresh_every": 800, "seconds_to_train_target": to_target, "curve": ""}
    base = None if optimizer in ("kfac", "lbfgs") else optimizer.removeprefix("fosi-")
    return {
        **HEAD,
        **PLAIN,
        **timed,
        **cost,
        **found,
        **rest,
        "optimizer": optimizer,
        "base": base,
        "seed": seed,
        **more,
    }


def three(optimizer, *times, **more):
    return [line(optimizer, seed, time, **more) for seed, time in enumerate(times)]


def test_ratio_is_of_the_same_seed_and_a_miss_counts_two():
    group = Group("lr", three("adam", 10.0, 20.0, 40.0) + three("fosi-adam", 8.0, 10.0, None))
    # 0.8, 0.5 and a miss.
    assert group.ratio(group.pick("fosi-adam"), "adam") == (0.8, 1, 3, 0.5, math.inf)
    assert markdown.ratio(group.ratio(group.pick("fosi-adam"), "adam")) == "0.80 (0.50, 1 of 3 never)"
    group = Group("lr", three("adam", 10.0, 20.0, 40.0) + three("fosi-adam", 8.0, None, None))
    assert group.ratio(group.pick("fosi-adam"), "adam") == (2.0, 2, 3, 0.8, math.inf)
    assert group.median(group.pick("fosi-adam"), "seconds_to_target") is None
    assert markdown.ratio(group.ratio(group.pick("fosi-adam"), "adam")) == "2.00 (0.80, 2 of 3 never)"
    assert group.ratio(group.pick("fosi-heavy-ball"), "heavy-ball") is None
    # Seeds that the base has not are no ratio.
    group = Group("lr", [line("adam", 1, 10.0), line("fosi-adam", 0, 1.0), line("fosi-adam", 1, 5.0)])
    assert group.ratio(group.pick("fosi-adam"), "adam") == (0.5, 0, 1, 0.5, 0.5)


def test_settings_other_than_the_papers_are_kept_apart():
    lines = [
        line("fosi-adam", 0, 1.0),
        line("fosi-adam", 0, 2.0, rate_factor=3.0),
        line("fosi-adam", 0, 3.0, curvature="current"),
        line("fosi-adam", 0, 4.0, options={"k": 4}),
    ]
    group = Group("lr", lines)
    assert [x["seconds_to_target"] for x in group.pick("fosi-adam").values()] == [1.0]
    assert group.pick("fosi-adam", 3.0)[0]["seconds_to_target"] == 2.0
    assert group.pick("fosi-adam", curvature="current")[0]["seconds_to_target"] == 3.0
    assert group.pick("fosi-adam", options={"k": 4})[0]["seconds_to_target"] == 4.0


def test_means_over_tasks_and_bases():
    lines = three("heavy-ball", 10.0) + three("fosi-heavy-ball", 5.0) + three("adam", 10.0) + three("fosi-adam", None)
    lines += three("adam", 2.5, rate_factor=3.0)
    text = markdown.summary({"lr": Group("lr", lines)})
    # (0.5 + 2) / 2 and √(0.5 · 2); the control is 0.25.
    assert "| seconds to the validation target | 1.25 | 1.00 | 2 | 0.75 | 0.25 | 0.25 | 1 |" in text
    assert Group("lr", lines).best_against_best() == 0.5


def test_overhead_in_the_papers_words():
    lines = three("adam", 1.0, ms_per_step=10.0, ms_per_refresh=None, overhead_measured=None)
    lines += three("fosi-adam", 1.0, ms_per_step=10.2)
    found = Group("lr", lines).overhead("adam")
    # T = τ₃ / (1.1 τ₁ − τ₂) = 400 / 0.8.
    assert found[:3] == (10.0, 10.2, 400.0) and found.measured_every == 500 and found.every == 800
    lines[1] = line("fosi-adam", 0, 1.0, ms_per_step=11.5)
    assert Group("lr", lines).overhead("adam").measured_every is None
    assert Group("lr", three("adam", 1.0)).overhead("adam") is None


def test_papers_ratios_are_the_papers():
    mean = [ratios.paper_ratio(task, base) for task in ratios.PAPER for base in ratios.BASES]
    assert sum(mean) / len(mean) == pytest.approx(0.75, abs=0.01)
    mean = [ratios.paper_ratio(task, base, train=True) for task in ratios.PAPER for base in ratios.BASES]
    assert sum(mean) / len(mean) == pytest.approx(0.78, abs=0.01)
    best = [ratios.paper_best_against_best(task) for task in ratios.PAPER]
    assert (round(min(best), 2), round(max(best), 2)) == (0.48, 0.77)


def test_runs_that_cannot_be_compared_are_kept_apart():
    lines = (
        three("adam", 1.0, 2.0, 3.0) + three("fosi-adam", 1.0, device="another") + three("adam", 1.0, backend="torch")
    )
    assert [x["seed"] for x in ratios.groups(lines)["lr"].lines] == [0, 1, 2]


def test_runs_in_other_batches_are_not_the_papers():
    lm = {"task": "lm"}
    lines = three("adam", 1.0, **lm) + three("adam", 1.0, 2.0, **lm, batch_size=1024)
    assert [x.get("batch_size") for x in ratios.groups(lines)["lm"].lines] == [None]
    assert ratios.groups(lines[1:]) == {}


def test_papers_runs_come_before_more_of_others():
    tl = {"task": "tl", "rounds": 20}
    lines = three("adam", 1.0, **tl) + three("fosi-adam", 2.0, **tl, mode="loop")
    lines += three("adam", 1.0, 2.0, 3.0, **tl, mode="cached") + three("nesterov", 1.0, 2.0, 3.0, task="tl", rounds=10)
    shown = ratios.groups(lines)["tl"].lines
    assert [x["optimizer"] for x in shown] == ["adam", "fosi-adam"]


def test_what_is_not_as_in_the_paper_is_said():
    full, second = three("adam", 1.0), [line("kfac", 0, 1.0, rounds=6)]
    assert markdown.shorter({"lr": Group("lr", second + full)}) == ""
    tl = three("adam", 1.0, task="tl", rounds=4, mode="cached")
    text = markdown.shorter({"lr": Group("lr", three("adam", 1.0, rounds=6)), "tl": Group("tl", tl)})
    assert "LR for 6 rounds of the paper's 100, TL for 4 rounds of the paper's 20, TL in the mode cached." in text


def test_what_is_unknown_is_neither_a_miss_nor_a_ratio():
    unknown = [line("fosi-adam", 0, None, steps_to_target=10), line("fosi-adam", 1, 10.0)]
    group = Group("lr", three("adam", 10.0, 20.0) + unknown)
    assert group.ratio(group.pick("fosi-adam"), "adam") == (0.5, 0, 1, 0.5, 0.5)
    assert markdown.seconds(None, {0: unknown[0]}, "seconds_to_target") == "-"
    assert markdown.seconds(None, {0: line("fosi-adam", 0, None)}, "seconds_to_target") == "never"
    assert markdown.seconds(None, {0: line("fosi-adam", 0, None, target_val=None)}, "seconds_to_target") == "-"
    lines = three("adam", 1.0) + three("heavy-ball", 1.0) + three("fosi-adam", None) + three("fosi-heavy-ball", None)
    assert "| LR | **never** | 0.67 |" in markdown.best_against_best({"lr": Group("lr", lines)})


def test_other_settings_and_other_batches():
    lines = three("adam", 10.0, 10.0) + three("fosi-adam", 8.0, 8.0) + three("fosi-adam", 5.0, curvature="current")
    lines += three("fosi-adam", 4.0, options={"alpha": 0.1}) + three("fosi-adam", 2.0, rate_factor=3.0)
    lines += three("fosi-adam", 1.0, options={"alpha": 0.1}, curvature="average")
    lines += three("adam", 7.0, 9.0, rate_factor=3.0)  # the control: of the one seed that the others have
    groups = {"lr": Group("lr", lines)}
    text = markdown.curvature(groups)
    assert "| LR | Adam | fixed | 0.80 | 90.0% | 400 | 1 |" in text  # of the one seed that both have
    assert "| LR | Adam | current | 0.50 | 90.0% | 400 | 1 |" in text
    text = markdown.ablations(groups)
    assert "| LR | fosi-adam | alpha 0.1 | 0.40 | 0.40 | 0.70 | 0.70 | 90.0% | 1 |" in text
    assert "| LR | fosi-adam | 3× rate | 0.20 | 0.20 | 0.70 | 0.70 | 90.0% | 1 |" in text
    assert "| LR | fosi-adam | alpha 0.1, estimates on average | 0.10 | 0.10 | 0.70 | 0.70 | 90.0% | 1 |" in text
    assert len(text.splitlines()) == 5


def test_tuned_second_order_is_shown_at_its_best():
    lines = [
        line("kfac", 0, None, best_val=0.5, options={"momentum": 0.9}),
        line("kfac", 0, None, best_val=0.8, options={"momentum": 0.5}),
        line("kfac", 0, None, best_val=0.9, options={"momentum": 0.1}, diverged=True),
    ]
    group = Group("lr", lines)
    assert peers.best_of(group, "kfac")["options"] == {"momentum": 0.5}
    assert peers.best_of(group, "lbfgs") is None
    assert "| LR | kfac | momentum 0.5 | 100 | 80.0% | 0.1 | 9 | 10 | never |" in peers.beside_fosi({"lr": group})


def test_all_settings_that_were_tried_are_shown_beside_the_best():
    lines = [
        line("kfac", 0, 3.0, best_val=0.8, options={"momentum": 0.9, "learning_rate": 0.1}, steps_to_target=58),
        line("kfac", 0, None, best_val=0.95, options={"momentum": 0.5}, rounds=40),
        line("kfac", 0, None, best_val=0.99, options={"momentum": 0.5}, rounds=6),  # a short one, to be timed
        line("kfac", 0, None, best_val=0.9, rounds=60, diverged=True, steps=7),
        line("lbfgs", 0, None, best_val=0.6),  # one setting alone, though with two seeds, is no search
        line("lbfgs", 1, None, best_val=0.7),
        line("fosi-adam", 0, None, best_val=0.9, options={"alpha": 0.1}),
    ]
    rows = peers.tried({"lr": Group("lr", lines)}).splitlines()[2:]
    assert rows == [
        "| LR | kfac |  | diverged in step 7 | 90.0% | 0.1 | never | never |",
        "| LR | kfac | learning_rate 0.1, momentum 0.9 | 100 | 80.0% | 0.1 | 58 | 3 |",
        "| LR | kfac | momentum 0.5 | 40 | **95.0%** | 0.1 | not in 40 | not in 40 |",
    ]
    assert peers.tried({"lr": Group("lr", lines[4:])}) == ""


def test_a_best_that_was_not_timed_has_the_best_that_was_beside_it():
    best = line("lbfgs", 0, None, best_val=0.9, options={"memory_size": 100}, seconds=None, steps_to_target=58)
    timed, worse = line("lbfgs", 0, 4.0, best_val=0.8), line("lbfgs", 0, 4.0, best_val=0.7, options={"memory_size": 30})
    group = Group("lr", [worse, timed, best])
    assert peers.shown(group, "lbfgs") == [best, timed] and peers.best_of(group, "lbfgs") is best
    rows = peers.tried({"lr": group}).splitlines()
    assert "| LR | lbfgs | memory_size 100 | 100 | **90.0%** | 0.1 | 58 | - |" in rows
    assert peers.shown(Group("lr", [worse, timed]), "lbfgs") == [timed] and peers.shown(Group("lr", []), "kfac") == []


def test_memory_is_the_least_of_the_papers_settings():
    lines = [
        line("adam", 0, 1.0, peak_memory=3 * 2**20),
        line("adam", 1, 1.0, peak_memory=2 * 2**20),
        line("adam", 1, 1.0, peak_memory=2**20, rate_factor=3.0),
        line("fosi-adam", 0, 1.0, peak_memory=9 * 2**20),
        line("fosi-adam", 0, 1.0, peak_memory=5 * 2**20, options={"k": 3}),
        line("lbfgs", 0, 1.0, best_val=0.8, peak_memory=4 * 2**20),
        line("lbfgs", 0, 1.0, best_val=0.9, peak_memory=7 * 2**20, options={"memory_size": 100}),
        line("kfac", 0, 1.0, best_val=0.8, peak_memory=6 * 2**20),
        line("kfac", 0, 1.0, best_val=0.9, peak_memory=8 * 2**20, options={"momentum": 0.9}),
    ]
    assert peers.memory({"lr": Group("lr", lines)}).splitlines()[2] == "| LR | - | - | 2 | 9 | 6 | 4 |"


def test_second_order_may_have_fewer_rounds_and_a_base_may_not():
    lines = [*three("heavy-ball", 10.0, 10.0), line("kfac", 0, 1.0, rounds=6), line("heavy-ball", 0, 1.0, rounds=6)]
    found = ratios.groups([*lines, line("lbfgs", 0, 1.0, rounds=200), line("lbfgs", 0, 1.0, rounds=6, device="other")])
    assert [(x["optimizer"], x["rounds"]) for x in found["lr"].lines] == [*[("heavy-ball", 100)] * 2, ("kfac", 6)]


def test_best_round_and_a_run_of_nothing_but_nan():
    class P:
        def __init__(self, metric):
            self.metric = metric

    points = [P(0.5), P(0.9), P(math.nan), P(0.9)]
    assert summary.best_round(points, 1) == 2 and summary.best_round(points, -1) == 1
    assert summary.best_round([P(math.nan)], 1) is None


def test_nothing_to_report(tmp_path):
    assert report.write(tmp_path) == [] and list(tmp_path.iterdir()) == []
    assert set(report.ORDER) == set(PAPER)
