"""Runs on disk: what a line says, a killed run goes on to the same numbers, and what does not fit is named."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import jax
import pytest

pytest.importorskip("flax")

from fosi.experiments.tasks import ratios, runs, summary, training
from fosi.experiments.tasks.plan import Plan
from fosi.experiments.tasks.task import resized
from fosi.experiments.tasks.training import Point

FOSI = {"k": 3, "num_matvecs": 12, "warmup": 6, "refresh_every": 7}
FIELDS = [
    "task",
    "protocol",
    "backend",
    "optimizer",
    "base",
    "seed",
    "device",
    "steps",
    "seconds",
    "best_val",
    "best_train",
    "target_val",
    "seconds_to_target",
    "steps_to_target",
    "gradients_to_target",
    "seconds_to_train_target",
    "ms_per_step",
    "ms_per_refresh",
    "refreshes",
    "overhead_measured",
    "peak_memory",
    "diverged",
    "versions",
]


def plan(optimizer="fosi-heavy-ball", **changes):
    options = FOSI if optimizer.startswith("fosi-") else {}
    return Plan(**{"task": "lr", "optimizer": optimizer, "rounds": 5, "tiny": True, "options": options, **changes})


def untimed(points):
    return [(p.step, p.train_loss, p.metric, p.refreshes, p.lr_scale, p.eigenvalues) for p in points]


class Killed(Exception):
    pass


def test_interrupted_run_goes_on_to_the_same_numbers(tmp_path):
    which = plan(rate_factor=0.1)
    problem = which.build(None, False)
    whole = runs.run(which, problem, tmp_path / "whole")
    assert whole.done is not None and len(whole.points) == 5 and whole.points[-1].refreshes > 2
    assert not (tmp_path / "whole" / "lr" / "checkpoints" / which.name).exists()

    def kill(point, engine):
        if point.step == 4 * engine.steps_a_round:
            raise Killed

    with pytest.raises(Killed):
        runs.run(which, problem, tmp_path / "cut", kill, checkpoint_seconds=0)
    files = runs.Files.of(which, tmp_path / "cut")
    # The fourth point is written, its checkpoint is not; and the kill came in the middle of a line.
    with files.curve.open("a") as stream:
        stream.write('{"step": 2')
    assert runs.read(files.curve).done is None and len(runs.read(files.curve).points) == 4
    seen = []
    again = runs.run(which, problem, tmp_path / "cut", lambda point, engine: seen.append(point.step))
    assert seen == [20, 25]  # three of the rounds were saved
    assert untimed(again.points) == untimed(whole.points)
    seconds = [point.seconds for point in again.points]
    assert seconds == sorted(seconds) and again.points[-1].refresh_seconds < seconds[-1]
    # What is there is not made again.
    assert runs.run(which, None, tmp_path / "cut").points == again.points


def test_killed_command_goes_on_to_the_same_numbers(tmp_path):
    """The real thing: SIGKILL, while it trains."""
    which = Plan("lr", "fosi-adam", tiny=True, rounds=40, options=FOSI)
    curve = runs.Files.of(which, tmp_path / "killed").curve
    given = ["train", "lr", "--optimizer", "fosi-adam", "--tiny", "--rounds", "40", "--checkpoint-every", "0"]
    given += [f"--set={name}={value}" for name, value in FOSI.items()] + ["--out", str(tmp_path / "killed")]
    command = [sys.executable, "-c", "from fosi.cli import main; main()", *given]
    process = subprocess.Popen(command, env={**os.environ, "JAX_PLATFORMS": "cpu"}, stdout=subprocess.DEVNULL)
    try:
        while process.poll() is None and not (curve.exists() and curve.read_text().count("\n") > 4):
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == -signal.SIGKILL and runs.read(curve).done is None
    seen = []
    problem = which.build(None, False)
    again = runs.run(which, problem, tmp_path / "killed", lambda point, engine: seen.append(point))
    whole = runs.run(which, problem, tmp_path / "whole")
    assert 0 < len(seen) < 40 and len(whole.points) == 40
    assert untimed(again.points) == untimed(whole.points)


def test_seconds_end_a_run_after_the_round_in_which_they_pass(tmp_path):
    which = plan("adam", rounds=None, seconds=0.05)
    problem = which.build(None, False)
    engine = which.engine(problem)
    engine.advance = lambda run, *_: (run, time.sleep(0.02) or 1.0)  # however busy the machine is, no less
    found = list(training.train(engine, training.start(engine), 100, 0.05))
    assert 2 <= len(found) <= 3 and found[-1].seconds >= 0.05 > found[-2].seconds
    found = runs.run(which, problem, tmp_path)
    assert found.points[-1].seconds >= 0.05 and all(point.seconds < 0.05 for point in found.points[:-1])
    (line,) = summary.write(tmp_path / "lr")
    assert (line["rounds"], line["seconds_given"]) == (len(found.points), 0.05)
    assert ratios.groups([line]) == {}  # the paper's runs have rounds
    # A run that is gone on with has the seconds that it had.
    files = runs.Files.of(replace(which, seconds=1e6, rounds=3), tmp_path)

    def kill(point, engine):
        if point.step == 3 * engine.steps_a_round:
            raise Killed

    longer = replace(which, seconds=1e6, rounds=3)
    with pytest.raises(Killed):
        runs.run(longer, problem, tmp_path, kill, checkpoint_seconds=0)
    saved = runs.load_checkpoint(files.checkpoint, engine)
    assert saved.round == 2 and runs.run(longer, problem, tmp_path).points[1].seconds == saved.seconds > 0
    # Rounds end it too, where they are fewer.
    assert len(runs.run(plan("adam", rounds=2, seconds=1e6), problem, tmp_path).points) == 2
    assert which.reference.seconds == 0.05  # a base is given as many
    with pytest.raises(ValueError, match=r"seconds is 0\.05, but the device is shared: give rounds"):
        runs.run(which, problem, tmp_path / "other", shared=True)
    for seconds in (0, math.inf):
        with pytest.raises(ValueError, match=f"seconds is {seconds}; give a number above 0"):
            plan("adam", seconds=seconds)


def test_what_the_clock_ended_times_others_only_where_nothing_else_does():
    def one(seconds, rows, shared=False, **changes):
        made = curve(plan("adam", seconds=seconds, **changes), rows)
        return replace(made, environment={**made.environment, "shared": shared})

    slow, usual = (
        ((10.0 * i, 1.0, 0.5, 0, 0.0) for i in range(1, 4)),
        [(1.0, 1.0, 0.5, 0, 0.0), (2.0, 1.0, 0.5, 0, 0.0)],
    )
    busy, given = one(None, usual, shared=True, seed=1), one(5.0, list(slow))
    assert summary.retimed([busy, given, one(None, usual)])[0].points[-1].seconds == pytest.approx(2.0)
    assert summary.retimed([busy, given])[0].points[-1].seconds == pytest.approx(20.0)


def test_an_engine_goes_over_to_another_seed_and_compiles_nothing(tmp_path):
    which = Plan("reaction", "adam-fosi-lbfgs", tiny=True, rounds=4, curvature="part", options={"switch_at": 8, "k": 3})
    problems = [which.with_seed(seed).build(None, False) for seed in (0, 1)]
    engine = which.engine(problems[0])
    runs.run(which, problems[0], tmp_path / "both", engine=engine)
    compiled = [steps._cache_size() for steps in engine._steps]
    engine.take(problems[1], 1)
    found = runs.run(which.with_seed(1), problems[1], tmp_path / "both", engine=engine)
    assert [steps._cache_size() for steps in engine._steps] == compiled == [1, 1]
    wanted = runs.run(which.with_seed(1), problems[1], tmp_path / "alone")
    assert untimed(found.points) == untimed(wanted.points) and found.points[-1].refreshes > 0


def test_a_relay_that_the_clock_ends_before_its_second_says_so(tmp_path, caplog):
    which = Plan("reaction", "adam-lbfgs", tiny=True, seconds=1e-9, options={"switch_at": 50})
    runs.run(which, which.build(None, False), tmp_path)
    assert "ended after 5 steps, before switch_at, 50: all are the first's" in caplog.text


def test_line_has_all_fields_and_a_missed_target_is_null(tmp_path):
    for which in (plan("heavy-ball"), plan(), plan("heavy-ball", rate_factor=3.0), plan("lbfgs")):
        runs.run(which, which.build(None, False), tmp_path)
    lines = {x["curve"]: x for x in summary.write(tmp_path / "lr")}
    written = [json.loads(x) for x in (tmp_path / "lr" / "runs.jsonl").read_text().splitlines()]
    assert written == list(lines.values()) and len(written) == 4
    for line in written:
        assert set(FIELDS) <= set(line)
        assert (tmp_path / "lr" / line["curve"]).exists()
        assert line["versions"]["jax"] and line["device"]
    base = lines[f"curves/{plan('heavy-ball').name}.jsonl"]
    fosi = lines[f"curves/{plan().name}.jsonl"]
    assert base["base"] == fosi["base"] == "heavy-ball" and base["target_val"] == base["best_val"] == fosi["target_val"]
    assert base["steps_to_target"] is not None and base["overhead_measured"] is None
    assert fosi["overhead_measured"] is not None and fosi["refreshes"] > 0
    assert lines[f"curves/{plan('lbfgs').name}.jsonl"]["base"] is None


def points(*rows):
    return tuple(Point(10 * i, s, loss, metric, r, rs, 1.0, ()) for i, (s, loss, metric, r, rs) in enumerate(rows, 1))


def curve(which, rows, gradient=0.5, diverged=False):
    done = {"gradient_seconds": gradient, "peak_memory": None, "diverged": diverged, "compile_seconds": 1.0}
    environment = {"device": "test", "rate": 0.1}
    return runs.Curve(which, which, environment, points(*rows), done)


def test_targets_by_hand(tmp_path):
    class Named:
        name = "x.jsonl"

    def line(optimizer, rows, reference=None, **changes):
        made = curve(plan(optimizer, **changes), rows)
        made = runs.Curve(Named, *(getattr(made, f) for f in ("plan", "environment", "points", "done")))
        return summary.summary(made, reference or made)

    base_rows = ((1.0, 3.0, 0.5, 0, 0.0), (2.0, 1.0, 0.9, 0, 0.0), (3.0, 2.0, 0.8, 0, 0.0))
    base = curve(plan("heavy-ball"), base_rows)
    got = line("heavy-ball", base_rows)
    assert (got["target_val"], got["seconds_to_target"], got["steps_to_target"]) == (0.9, 2.0, 20)
    assert (got["target_train"], got["seconds_to_train_target"]) == (1.0, 2.0)
    assert got["ms_per_step"] == pytest.approx(100.0) and got["ms_per_refresh"] is None
    got = line("fosi-heavy-ball", ((1.5, 2.0, 0.9, 1, 0.5), (3.5, 0.5, 0.7, 2, 1.5), (4.5, 0.5, 0.6, 2, 1.5)), base)
    assert (got["seconds_to_target"], got["steps_to_target"], got["seconds_to_train_target"]) == (1.5, 10, 3.5)
    # Ten gradients, and a refresh that took as long as one.
    assert got["gradients_to_target"] == pytest.approx(11.0)
    assert got["ms_per_step"] == pytest.approx(100.0) and got["ms_per_refresh"] == pytest.approx(750.0)
    assert got["overhead_measured"] == pytest.approx(0.5)
    worse = ((1.0, 3.0, 0.5, 0, 0.0), (2.0, math.nan, math.nan, 0, 0.0))
    got = line("heavy-ball", worse, base, rate_factor=3.0)
    assert (got["best_val"], got["best_train"]) == (0.5, 3.0)
    assert got["seconds_to_target"] is got["steps_to_target"] is got["gradients_to_target"] is None
    assert got["seconds_to_train_target"] is None and got["target_val"] == 0.9
    # A step of K-FAC counts what it costs: 0.2 s are 0.4 gradients of 0.5 s.
    got = line("lbfgs", ((2.0, 3.0, 0.95, 0, 0.0),), base)
    assert got["gradients_to_target"] == pytest.approx(10 * 0.4)


def test_runs_that_shared_the_device_take_the_times_of_one_that_did_not():
    alone = curve(plan("fosi-adam"), ((2.0, 3.0, 0.5, 1, 1.0), (5.0, 1.0, 0.9, 2, 3.0)))  # 0.1 s, 1.5 s
    busy = curve(plan("fosi-adam", seed=1), ((9.0, 3.0, 0.5, 0, 0.0), (70.0, 1.0, 0.9, 1, 9.0)), gradient=7.0)
    busy.environment["shared"] = True
    other = curve(plan("adam", seed=1), ((9.0, 3.0, 0.5, 0, 0.0),))
    other.environment["shared"] = True
    short = curve(plan("fosi-adam", rounds=1, seed=2), ((9.0, 3.0, 0.5, 0, 0.0),))
    found = summary.retimed([alone, busy, other, short])
    assert found[0] is alone
    assert all(math.isnan(p.seconds) for p in found[2].points)  # no run of adam had the device alone
    assert [p.seconds for p in found[1].points] == pytest.approx([1.0, 3.5])
    assert [p.refresh_seconds for p in found[1].points] == pytest.approx([0.0, 1.5])
    assert found[1].done["gradient_seconds"] == 0.5 and found[1].points[1].metric == 0.9
    # The times may be those of a short run, or of one at another rate.
    alone = curve(plan("fosi-adam", rounds=2, rate_factor=3.0), ((2.0, 3.0, 0.5, 1, 1.0), (5.0, 1.0, 0.9, 2, 3.0)))
    assert [p.seconds for p in summary.retimed([busy, alone])[0].points] == pytest.approx([1.0, 3.5])
    # Of several, the median: here of steps of 0.1, 0.2 and 9 s, and of refreshes of 1.5, 2 and 1 s.
    slower = curve(plan("fosi-adam", seed=4), ((5.0, 3.0, 0.5, 1, 3.0), (8.0, 1.0, 0.9, 2, 4.0)), gradient=0.75)
    slowest = curve(plan("fosi-adam", seed=5), ((91.0, 3.0, 0.5, 1, 1.0), (182.0, 3.0, 0.5, 2, 2.0)), gradient=9.0)
    found = summary.retimed([busy, slower, alone, slowest])[0]
    assert [p.seconds for p in found.points] == pytest.approx([2.0, 5.5]) and found.done["gradient_seconds"] == 0.75


def test_what_costs_the_same_is_timed_alike_and_what_does_not_is_not():
    rows = ((2.0, 3.0, 0.5, 1, 1.0), (5.0, 1.0, 0.9, 2, 3.0))
    alone = curve(plan("fosi-adam"), rows)

    def seconds(**changes):
        busy = curve(plan(**{"optimizer": "fosi-adam", "seed": 1, **changes}), rows)
        busy.environment.update({"shared": True, **where})
        return summary.retimed([alone, busy])[1].points[-1].seconds

    where = {}
    assert seconds() == seconds(options={**FOSI, "alpha": 0.1}) == pytest.approx(5.0)
    for other in ({"options": {**FOSI, "k": 4}}, {"curvature": "average"}, {"optimizer": "fosi-gd"}):
        assert math.isnan(seconds(**other))
    where = {"device": "another"}
    assert math.isnan(seconds())
    # Which rate K-FAC is given costs nothing; to find it anew each step does.
    where = {}
    alone = curve(plan("kfac", options={"learning_rate": 0.1, "momentum": 0.9}), rows)
    assert seconds(optimizer="kfac", options={"learning_rate": 1.0, "momentum": 0.5}) == pytest.approx(5.0)
    assert math.isnan(seconds(optimizer="kfac", options={}))
    assert math.isnan(seconds(optimizer="kfac", options={"learning_rate": 0.1}))
    assert math.isnan(seconds(optimizer="kfac", options={"learning_rate": 0.1, "momentum": None}))
    # A line search takes as long as it takes.
    lbfgs, busy = curve(plan("lbfgs"), rows), curve(plan("lbfgs", seed=1), rows)
    busy.environment["shared"] = True
    assert math.isnan(summary.retimed([lbfgs, busy])[1].points[-1].seconds)


def test_unknown_seconds_are_null_and_no_miss(tmp_path):
    which = [plan("heavy-ball"), plan("heavy-ball", seed=1)]
    for one in which:
        runs.run(one, one.build(None, False), tmp_path, shared=True)
    for line in summary.write(tmp_path / "lr"):
        assert line["seconds"] is line["seconds_to_target"] is line["ms_per_step"] is None
        assert line["steps_to_target"] > 0 and not ratios.missed(line, "seconds_to_target")
    with pytest.raises(ValueError, match="was begun with shared True, this is False"):
        path = runs.Files.of(which[0], tmp_path).curve
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:3]))
        runs.run(which[0], which[0].build(None, False), tmp_path)


def test_target_is_of_the_same_device_and_network():
    base, fosi = curve(plan("adam"), ((2.0, 3.0, 0.5, 0, 0.0),)), curve(plan("fosi-adam"), ((2.0, 3.0, 0.5, 1, 1.0),))
    base, fosi = (replace(one, path=Path(one.plan.name)) for one in (base, fosi))
    assert summary.summarise([base, fosi])[1]["target_val"] == 0.5
    for change in ({"device": "another"}, {"backbone": "another"}):
        moved = replace(base, environment={**base.environment, **change})
        assert summary.summarise([moved, fosi])[1]["target_val"] is None


def test_second_order_with_fewer_rounds_has_the_full_length_as_its_target():
    def of(optimizer, metric, **changes):
        made = curve(plan(optimizer, **changes), ((2.0, 3.0, metric, 0, 0.0),))
        return replace(made, path=Path(made.plan.name))

    full, short = of("heavy-ball", 0.5, rounds=None), of("heavy-ball", 0.4, rounds=2)
    kfac, fosi = of("lbfgs", 0.9, rounds=2), of("fosi-heavy-ball", 0.9, rounds=2)
    targets = [line["target_val"] for line in summary.summarise([full, kfac, fosi])]
    assert targets == [0.5, 0.5, None]
    # Not of a short one, which may have been made to be timed alone.
    assert [line["target_val"] for line in summary.summarise([short, full, kfac])] == [0.4, 0.5, 0.5]
    assert [line["target_val"] for line in summary.summarise([short, kfac])] == [0.4, 0.4]


def test_lower_is_better_for_a_loss():
    class Named:
        name = "x.jsonl"

    rows = ((1.0, 3.0, 2.5, 0, 0.0), (2.0, 1.0, 1.9, 0, 0.0), (3.0, 1.0, 2.0, 0, 0.0))
    made = curve(plan("adam", task="lm"), rows)
    made = runs.Curve(Named, made.plan, made.environment, made.points, made.done)
    got = summary.summary(made, made)
    assert (got["best_val"], got["seconds_to_target"]) == (1.9, 2.0)


def test_names_differ_where_settings_do():
    plans = [
        plan("adam"),
        plan("adam", seed=1),
        plan("adam", rate_factor=3.0),
        plan("adam", backend="torch"),
        plan("adam", rounds=6),
        plan("adam", task="lm", batch_size=8),
        plan("adam", task="lm", batch_size=16),
        plan("adam", tiny=False),
        plan("fosi-adam"),
        plan("fosi-adam", curvature="current"),
        plan("fosi-adam", options={"k": 4}),
    ]
    assert len({one.name for one in plans}) == len(plans)
    assert plan("fosi-adam", curvature="current").reference == plan("adam")
    assert plan("adam", rate_factor=3.0, seed=2).reference == plan("adam", seed=2)
    assert plan("lbfgs").reference == plan("heavy-ball")
    assert plan("adam", task="lm", batch_size=8).name == "adam.rounds-5.batch-8.tiny.seed-0"
    assert plan("fosi-adam", task="lm", batch_size=8).reference == plan("adam", task="lm", batch_size=8)
    # The task's own size is no other one.
    assert plan("adam", task="lm", batch_size=32, tiny=False) == plan("adam", task="lm", tiny=False)


def test_target_is_of_the_same_batch_size_and_neither_is_the_papers():
    def of(optimizer, metric, **changes):
        made = curve(plan(optimizer, task="lm", **changes), ((2.0, 3.0, metric, 0, 0.0),))
        return replace(made, path=Path(made.plan.name))

    own, base, fosi = of("adam", 0.5), of("adam", 0.4, batch_size=8), of("fosi-adam", 0.3, batch_size=8)
    other = of("fosi-adam", 0.3, batch_size=16)
    lines = summary.summarise([own, base, fosi, other])
    assert [line["target_val"] for line in lines] == [0.5, 0.4, 0.4, None]
    assert [line["batch_size"] for line in lines] == [None, 8, 8, 16]
    assert [line["protocol"] for line in lines] == ["paper", "own", "own", "own"]
    changed = [
        of("adam", 0.5, rate_factor=3.0),
        of("fosi-adam", 0.5, options={"k": 3}),
        of("kfac", 0.5, rate_factor=2.0),
        of("fosi-soap", 0.5),
    ]
    assert [line["protocol"] for line in summary.summarise(changed)] == ["control", "ablation", "paper", "own"]
    # What a step takes depends on the batch.
    own.environment["shared"] = True
    assert math.isnan(summary.retimed([own, base])[0].points[-1].seconds)


@pytest.mark.parametrize(("size", "steps", "rounds"), [(16, 200, 100), (64, 50, 100), (1024, 3, 104), (4096, 1, 78)])
def test_larger_batches_see_as_many_examples(size, steps, rounds):
    which = Plan("lm", "adam", batch_size=size)
    assert which.length == rounds and resized(100 * 32, size) == steps
    assert size * steps * rounds == pytest.approx(10_000 * 32, rel=2e-3)
    assert Plan("lm", "adam", batch_size=size, rounds=7).length == 7
    assert Plan("ac", "adam", batch_size=size).length == 100  # epochs stay epochs


def test_batch_size_reaches_the_problem():
    tiny = plan("adam", task="lm", batch_size=8).build(None, False)
    assert tiny.order(jax.random.key(0)).shape == (5, 8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"task": "mnist"}, "task is 'mnist'; give one of lr, "),
        ({"optimizer": "sgd"}, "optimizer is 'sgd'; give one of gd, heavy-ball"),
        ({"backend": "numpy"}, "backend is 'numpy'; give jax or torch"),
        ({"task": "ae", "backend": "torch"}, "there are the tasks lr, lm, wave, .*, burgers; ae is in jax only"),
        ({"batch_size": 8}, "batch_size is 8, which is for the tasks lm, ac; lr has its own"),
        ({"task": "lm", "batch_size": 0}, "batch_size is 0; give 1 or more"),
        ({"mode": "cached"}, "mode is 'cached'; lr has none"),
        ({"rounds": 0}, "rounds is 0; give 1 or more"),
        ({"rate_factor": 0.0}, "rate_factor is 0.0; give a number above 0"),
        ({"options": {"rate_factor": 3}}, "rate_factor is no setting of the optimizer here"),
        ({"options": {"seed": 3}}, "seed is no setting of the optimizer here"),
    ],
)
def test_bad_plans(change, message):
    with pytest.raises(ValueError, match=message):
        plan(**change)


def test_other_settings_and_other_devices_are_refused(tmp_path):
    which = plan("adam")
    problem = which.build(None, False)
    runs.run(which, problem, tmp_path)
    path = runs.Files.of(which, tmp_path).curve
    text = path.read_text()
    path.write_text(text.replace('"seed": 0', '"seed": 7', 1))
    with pytest.raises(ValueError, match=r"is a run with \{'seed': 7}, not {'seed': 0}: give another folder"):
        runs.run(which, problem, tmp_path)
    first, rest = text.split("\n", 1)
    first = json.dumps({**json.loads(first), "device": "abacus"})
    path.write_text("\n".join([first, *rest.split("\n")[:2]]) + "\n")
    with pytest.raises(ValueError, match="was begun with device 'abacus', this is 'cpu'"):
        runs.run(which, problem, tmp_path)
    path.write_text('{"kind": "environment", "command": "quickstart"}\n')
    with pytest.raises(ValueError, match="is not the curve of a run"):
        runs.run(which, problem, tmp_path)
