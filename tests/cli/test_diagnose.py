"""`fosi diagnose` and `fosi spectrum` as a person runs them, at tiny size."""

import json
import math
import shutil
from dataclasses import replace

import jax
import numpy as np
import pytest
from typer.testing import CliRunner

pytest.importorskip("flax")

from fosi.cli.app import app
from fosi.experiments.tasks import TASKS, diagnosing, probing, race, runs
from fosi.experiments.tasks.plan import Plan
from fosi.experiments.tasks.ratios import Ratio

SMALL = ["--k", "2", "--num-matvecs", "8", "--tiny"]


def invoke(*arguments):
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "300", "FOSI_DATA": ""})


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_diagnose_writes_and_says_where(tmp_path):
    command = ["diagnose", "lr", *SMALL, "--optimizer", "heavy-ball", "--batches", "2", "--out", str(tmp_path)]
    result = invoke(*command, "--steps", "3", "--race", "0")
    assert result.exit_code == 0, result.output
    told = "heavy-ball after 3 steps", "stability limit", "predicted ratio", "Settings: k=", "--race 0.2 trains"
    for words in (*told, "diagnosis.jsonl"):
        assert words in result.output, result.output
    (line,) = lines(tmp_path / "lr" / "diagnosis.jsonl")
    assert (line["step"], line["base"], line["batches"], len(line["eigenvalues"])) == (3, "heavy-ball", 2, 2)
    assert line["limit"] == pytest.approx(38.0) and line["plan"]["tiny"] and line["jax"]
    assert (tmp_path / "lr" / "diagnosis-heavy-ball-tiny-seed-0-step-3.png").stat().st_size > 10_000
    assert line["seconds"] is None and line["raced"] is None
    result = invoke(*command, "--steps", "3", "--race", "0", "--curvature-batches", "2")
    (other,) = lines(tmp_path / "lr" / "diagnosis.jsonl")
    assert other["eigenvalues"] != line["eigenvalues"]


def test_a_run_under_way_by_its_checkpoint(tmp_path, monkeypatch):
    # A checkpoint is removed when its run is done: keep the last.
    kept = tmp_path / "kept"
    save = runs._save

    def keep(path, engine, progress):
        save(path, engine, progress)
        shutil.copyfile(path, kept)

    monkeypatch.setattr(runs, "_save", keep)
    train = ["train", "lr", "--optimizer", "adam", "--tiny", "--rounds", "2", "--checkpoint-every", "0"]
    assert invoke(*train, "--out", str(tmp_path)).exit_code == 0
    checkpoint = tmp_path / "lr" / "checkpoints" / "adam.rounds-2.tiny.seed-0"
    shutil.copyfile(kept, checkpoint)

    given = ["--checkpoint", str(checkpoint), "--out", str(tmp_path)]
    result = invoke("spectrum", "lr", *SMALL, "--ell", "1", *given)
    assert result.exit_code == 0, result.output
    assert "adam after 10 steps" in result.output and "All Ritz values lie from" in result.output
    (line,) = lines(tmp_path / "lr" / "spectrum.jsonl")
    assert line["step"] == 10 and len(line["eigenvalues"]) == len(line["residuals"]) == len(line["accepted"]) == 3
    assert line["eigenvalues"] == sorted(line["eigenvalues"], reverse=True)
    assert line["eigenvalues"][0] == line["extremes"][0]
    assert (tmp_path / "lr" / "spectrum-adam-rounds-2-tiny-seed-0-step-10.png").stat().st_size > 10_000

    # A diagnosis looks at it as well, and races where it is told to alone.
    result = invoke("diagnose", "lr", *SMALL, *given)
    assert result.exit_code == 0 and "A race tells more" in result.output, result.output
    (line,) = lines(tmp_path / "lr" / "diagnosis.jsonl")
    assert (line["step"], line["raced"], line["seconds"]) == (10, None, None)
    assert not (tmp_path / "races").exists()

    # Parameters and second moments are those of the same training, by another way.
    plan = probing.planned(checkpoint)
    problem = plan.build(None, False)
    saved, trained = probing.resume(plan, problem, checkpoint), probing.train(plan, problem, rounds=2)
    assert saved.step == trained.step == 10
    for one, other in ((saved.run.params, trained.run.params), (saved.second_moments(), trained.second_moments())):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), one, other)
    adam = jax.tree.leaves(saved.run.opt_state, is_leaf=lambda node: hasattr(node, "nu"))[0]
    corrected = jax.tree.leaves(adam.nu)[0] / (1 - 0.999**10)
    np.testing.assert_allclose(jax.tree.leaves(saved.second_moments())[0], corrected, rtol=1e-5)

    result = invoke("diagnose", "lm", "--checkpoint", str(checkpoint))
    assert result.exit_code == 2 and "is of the task lr, not of lm" in result.output
    result = invoke("spectrum", "lr", "--checkpoint", str(checkpoint), "--seed", "1", "--rounds-before", "3")
    assert result.exit_code == 2
    assert "--seed and --rounds-before cannot be given beside --checkpoint" in " ".join(result.output.split())
    # What was written is no results file that a report would draw.
    result = invoke("report", str(tmp_path))
    assert result.exit_code == 0 and "Skipped" not in result.output, result.output


def test_batches_are_the_next_ones_and_a_full_batch_is_the_same_again(tmp_path):
    plan = Plan("wave", "heavy-ball", tiny=True)
    probe = probing.train(plan, plan.build(None, False), steps=0)
    assert len({id(batch) for batch in probe.batches(3)}) == 1 and probe.second_moments() is None
    for number in (1, 2):  # the second in the place of the first
        diagnosing.write(tmp_path / "some.jsonl", "spectrum", probe, {"number": number})
    assert [line["number"] for line in lines(tmp_path / "some.jsonl")] == [2]

    plan = Plan("lr", "heavy-ball", tiny=True)
    probe = probing.train(plan, plan.build(None, False), steps=7)
    order = probe.engine.order(1)
    for batch, indices in zip(probe.batches(2), order[2:4], strict=True):
        np.testing.assert_array_equal(batch[1][1], probe.engine.problem.data[1][indices])
    before = jax.tree.map(np.array, probe.run)
    assert probe.step_seconds() > 0
    found = diagnosing.diagnose(probe, 2, k=2, num_matvecs=8, timed=True)
    assert found.seconds.step > 0 and found.steps_left == plan.length * probe.engine.steps_a_round - 7
    assert diagnosing.diagnose(probe, 2, k=2, num_matvecs=8, timed=True, step_seconds=9.0).seconds.step == 9.0
    assert probing.Probe(replace(plan, optimizer="fosi-adam"), probe.engine, probe.run, 7).step_seconds() is None
    jax.tree.map(np.testing.assert_array_equal, before, probe.run)  # the training has not gone on


def test_a_path_is_of_the_steps_to_come():
    """The same points as a training that is stopped at each, over the ends of its rounds, and it has not gone on."""
    plan = Plan("lr", "adam", tiny=True)
    problem = plan.build(None, False)
    probe = probing.train(plan, problem, steps=4)
    before = jax.tree.map(np.array, probe.run)
    path = probe.path()
    jax.tree.map(np.testing.assert_array_equal, before, probe.run)
    size, steps, at = probe.engine.steps_a_round, 4, []
    for _ in range(3):
        at.append(steps)
        steps = min(steps + 7, (steps // size + 1) * size)
    for step, point in zip(at, path, strict=False):
        there = probing.train(plan, problem, steps=step).run.params
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-7), there, point)
    assert len(path) == 20 and at[-1] > size
    found = diagnosing.diagnose(probe, 2, k=2, num_matvecs=8)
    assert found.growth is not None and found.growth[0] == 1.0 != found.growth[-1]
    alone = Plan("lr", "heavy-ball", tiny=True)
    assert probing.train(alone, alone.build(None, False), steps=1).path() == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["diagnose", "xor"], "task is 'xor'; give one of lr, "),
        (["diagnose", "lr", "--tiny", "--optimizer", "fosi-adam"], "optimizer is 'fosi-adam'; give a base, in jax: gd"),
        (["spectrum", "lr", "--tiny", "--optimizer", "kfac"], "optimizer is 'kfac'; give a base"),
        (["diagnose", "lr", "--tiny", "--batches", "0"], "0 is too small; give 1 or more"),
        (["diagnose", "lr", "--tiny", "--steps", "0", "--k", "0"], "k + ell must be from 1"),
        (["diagnose", "lr", "--tiny", "--checkpoint", "nowhere"], "nowhere is not the checkpoint of a run under way"),
        (["diagnose", "lr"], "no data folder: give one with --data-dir, or set FOSI_DATA"),
    ],
)
def test_bad_input_is_named_and_leaves_nothing(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = invoke(*arguments)
    assert result.exit_code == 2 and message in result.output, result.output
    assert list(tmp_path.iterdir()) == []


def kill(point, engine):
    raise KeyboardInterrupt


def test_a_race_is_run_first_and_believed(tmp_path, monkeypatch):
    """Two short runs, on disk as others are, and a prediction that knows of them."""
    fosi = dict(TASKS["wave"].fosi, warmup=5, refresh_every=5, k=2, num_matvecs=8)
    monkeypatch.setitem(TASKS, "wave", replace(TASKS["wave"], fosi=fosi))
    command = ["diagnose", "wave", "--tiny", "--batches", "2", "--out", str(tmp_path), "--rounds", "10"]
    with monkeypatch.context() as patch:
        patch.setattr(probing, "train", None)  # the checkpoint is there
        result = invoke(*command)
    assert result.exit_code == 0, result.output
    (line,) = lines(tmp_path / "wave" / "diagnosis.jsonl")
    where = tmp_path / "races" / "wave"
    curves = {path.name: runs.read(path) for path in (where / "curves").iterdir()}
    # One round of five steps before the first estimate, and two of ten.
    ours = curves["fosi-adam.curvature-part.rounds-3.tiny.seed-0.jsonl"]
    assert set(curves) == {"adam.rounds-3.tiny.seed-0.jsonl", ours.path.name}
    assert [point.refreshes for point in ours.points] == [0, 1, 2]
    assert f"race {line['raced']:.2f}" in " ".join(result.output.split())
    assert f"In the race it was {line['raced']:.2f}." in result.output
    assert f"Race:    {where / 'curves'}" in result.output
    assert "adam and FOSI train side by side first" in result.output and "A race tells more" not in result.output
    # It looks at where the race has left the base, with FOSI's own numbers on the task, timed.
    assert (line["step"], line["steps_left"], line["plan"]["rounds"]) == (15, 10 * 5 - 15, 10)
    assert (line["k"], line["num_matvecs"], line["refresh_every"]) == (2, 8, 5) and line["seconds"] is not None
    assert line["plan"]["curvature"] == "part"
    trained = Plan("wave", "adam", tiny=True)
    gradient = trained.build(None, False)
    there = probing.train(trained, gradient, steps=15).run.params
    held = race.hold(replace(trained, rounds=10), gradient, tmp_path, 0.2)  # which is there
    left = probing.after(held, trained, gradient).run.params
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), there, left)
    # Without it, with one of before, which a run that was killed may leave, and with a broken one it is trained again.
    runs.run(replace(held.alone.plan, rounds=2), gradient, tmp_path, keep=True)
    early = runs.Files.of(replace(held.alone.plan, rounds=2), tmp_path).checkpoint.read_bytes()
    for left_behind in (None, early, b"{}", early[:-9], b"nothing"):
        held.checkpoint.unlink(missing_ok=True)
        if left_behind is not None:
            held.checkpoint.write_bytes(left_behind)
        again = probing.after(held, trained, gradient)
        assert again.step == 15
        jax.tree.map(lambda x, y: np.testing.assert_array_equal(x, y), there, again.run.params)
    with pytest.raises(ValueError, match=r"adam\.rounds-3\.tiny\.seed-0 cannot be gone on from: "):
        runs.load_checkpoint(held.checkpoint, held.engine)
    # The end of a run whose curve was removed is not what a new one goes on from, were it killed or not.
    begun, plan = [], replace(held.alone.plan, rounds=2)
    runs.Files.of(plan, tmp_path).curve.unlink()
    with pytest.raises(KeyboardInterrupt):
        runs.run(plan, gradient, tmp_path, on_point=kill)
    runs.run(plan, gradient, tmp_path, on_point=lambda point, engine: begun.append(point.step))
    assert begun == [5, 10]

    monkeypatch.setattr(race, "hold", lambda *args: replace(held, ratio=Ratio(math.inf, 1, 1, math.inf, math.inf)))
    result = invoke(*command, "--race", "0.3", *SMALL, "--steps", "10", "--counted")
    assert "In the race FOSI diverged, which counts 2." in result.output, result.output
    (line,) = (x for x in lines(tmp_path / "wave" / "diagnosis.jsonl") if x["step"] == 10)
    assert (line["raced"], line["k"], line["seconds"]) == (2, 2, None)
    # What is wrong is said before anything is trained.
    monkeypatch.setattr(race, "hold", None)
    for wrong, said in (
        ("--race=1.5", "race is 1.5; give a part of the run"),
        ("--k=0", "k + ell must be from 1"),
        ("--curvature-batches=3", "curvature_batches is 3; give from 1 to the 2 batches looked at"),
    ):
        result = invoke(*command, wrong)
        assert result.exit_code == 2 and said in " ".join(result.output.split())


def test_other_pairs_than_the_tasks_have_products_and_a_t_of_their_own(tmp_path):
    command = ["diagnose", "wave", "--tiny", "--steps", "2", "--race", "0", "--out", str(tmp_path)]
    assert invoke(*command, "--k", "3").exit_code == 0
    (line,) = lines(tmp_path / "wave" / "diagnosis.jsonl")
    assert (line["k"], line["ell"], line["num_matvecs"]) == (3, 0, 12) and line["refresh_every"] != 200


def test_help_says_what_a_race_is_where_none_is_asked_for():
    said = " ".join(invoke("diagnose", "--help").output.replace("│", " ").split())
    assert "0 for none. 0.2 where it is not given, none with --checkpoint" in said
