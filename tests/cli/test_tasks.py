"""`fosi train`, `fosi compare` and `fosi report` on training tasks, as a person runs them, at tiny size."""

import json
import shutil

import pytest
from typer.testing import CliRunner

pytest.importorskip("flax")

from fosi.cli import tasks
from fosi.cli.app import app
from fosi.experiments.data import mnist

FOSI = ["--set", "k=3", "--set", "num_matvecs=12", "--set", "warmup=6", "--set", "refresh_every=7"]


def invoke(*arguments):
    # Wide enough that no message is wrapped.
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "300", "FOSI_DATA": ""})


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_compare_then_report(tmp_path):
    command = ["compare", "lr", "--tiny", "--rounds", "3", "--seeds", "0,1", "--out", str(tmp_path)]
    result = invoke(*command, "--optimizers", "adam,fosi-adam")
    assert result.exit_code == 0, result.output
    assert "adam, 3x rate" in result.output and "runs.jsonl" in result.output
    runs = lines(tmp_path / "lr" / "runs.jsonl")
    assert sorted((r["optimizer"], r["rate_factor"], r["seed"]) for r in runs) == [
        (name, factor, seed) for name, factor in (("adam", 1.0), ("adam", 3.0), ("fosi-adam", 1.0)) for seed in (0, 1)
    ]
    assert all((tmp_path / "lr" / run["curve"]).exists() for run in runs)
    assert len(list((tmp_path / "lr" / "tensorboard").glob("*/*tfevents*"))) == 6
    # Nothing is made twice.
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "lr" / "curves").iterdir()}
    assert invoke(*command, "--optimizers", "adam,fosi-adam").exit_code == 0
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "lr" / "curves").iterdir()}

    kfac = [*command[:6], "0", *command[7:]]
    assert invoke(*kfac, "--optimizers", "lbfgs").exit_code == 0
    (tmp_path / "lr" / "runs.jsonl").unlink()
    result = invoke("report", str(tmp_path))
    assert result.exit_code == 0, result.output
    text = (tmp_path / "README.md").read_text()
    for picture in ("lr/learning-curves.png", "lr/second-order.png"):
        assert f"({picture})" in text and (tmp_path / picture).stat().st_size > 10_000
    assert len(lines(tmp_path / "lr" / "runs.jsonl")) == 7
    best = max(p["metric"] for p in lines(tmp_path / "lr" / "curves" / "adam.rounds-3.tiny.seed-0.jsonl")[1:-1])
    other = max(p["metric"] for p in lines(tmp_path / "lr" / "curves" / "adam.rounds-3.tiny.seed-1.jsonl")[1:-1])
    assert f"| LR | - | - | - | **-** | 16 → 8, 0.50 | - | {(best + other) / 2:.1%} |" in text


def test_train_with_settings(tmp_path):
    given = ["train", "lr", "--optimizer", "fosi-heavy-ball", "--tiny", "--rounds", "3", "--rate-factor", "0.1"]
    result = invoke(*given, *FOSI, "--curvature", "current", "--seed", "4", "--out", str(tmp_path))
    assert result.exit_code == 0, result.output
    (run,) = lines(tmp_path / "lr" / "runs.jsonl")
    assert (run["seed"], run["curvature"], run["rate_factor"]) == (4, "current", 0.1)
    assert run["options"] == {"k": 3, "num_matvecs": 12, "warmup": 6, "refresh_every": 7}
    assert run["refreshes"] == 2 and run["target_val"] is None and run["seconds_to_target"] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "xor", "--optimizer", "adam"], "task is 'xor'; give one of lr, "),
        (["train", "lr", "--optimizer", "sgd"], "optimizer is 'sgd'; give one of gd, heavy-ball"),
        (["train", "lr", "--optimizer", "adam"], "no data folder: give one with --data-dir, or set FOSI_DATA"),
        (
            ["train", "lr", "--optimizer", "adam", "--data-dir", "nowhere"],
            "run again with --download, or put the file of",
        ),
        (["train", "lr", "--optimizer", "adam", "--tiny", "--set", "k"], "--set 'k' is not NAME=VALUE"),
        (["train", "lr", "--optimizer", "adam", "--tiny", "--set", "k=3"], "k given, which are settings of FOSI"),
        (["train", "lr", "--optimizer", "fosi-adam", "--tiny", "--set", "k=0"], "k + ell"),
        (["train", "lr", "--optimizer", "fosi-adam", "--tiny", "--set", "bogus=3"], "bogus"),
        (
            ["train", "lr", "--optimizer", "fosi-adam", "--tiny", "--set", "seed=1"],
            "seed is no setting of the optimizer",
        ),
        (["train", "lr", "--optimizer", "lbfgs", "--tiny", "--rate-factor", "3"], "finds its rate by a line search"),
        (["compare", "lr", "--seeds", "a"], "--seeds is 'a'; give whole numbers"),
        (["compare", "lr", "--backend", "mlx"], "backend is 'mlx'; give jax or torch"),
        (
            ["compare", "softmax-full", "--quick"],
            "--quick is for the tasks wave, convection, reaction, burgers, deep-ae; softmax-full has",
        ),
        (["train", "wave", "--optimizer", "adam", "--quick", "--mode", "full"], "--quick and --mode full given"),
        (["compare", "xor", "--quick"], "task is 'xor'; give one of lr, "),
        (["compare", "ae", "--batch-size", "8"], "batch_size is 8, which is for the tasks lm, ac; ae has its own"),
        (["train", "ac", "--optimizer", "adam", "--tiny", "--batch-size", "129"], "there are only 128 examples"),
    ],
)
def test_bad_input_is_named_and_leaves_nothing(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = invoke(*arguments)
    assert result.exit_code == 2 and message in result.output, result.output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (["--quick"], [("adam", 1.0, 0), ("adam", 3.0, 0), ("fosi-adam", 1.0, 0)]),
        (["--quick", "--no-control", "--seeds", "1,2"], [(x, 1.0, i) for i in (1, 2) for x in ("adam", "fosi-adam")]),
        (["--quick", "--optimizers", "lbfgs", "--rounds", "5"], [("lbfgs", 1.0, 0)]),
        (
            ["--mode", "quick", "--no-control"],
            [(x, 1.0, i) for i in (0, 1, 2) for x in ("heavy-ball", "fosi-heavy-ball", "adam", "fosi-adam")],
        ),
    ],
)
def test_what_compare_runs(given, wanted, monkeypatch):
    seen = []
    monkeypatch.setattr(tasks, "_run_all", lambda plans, *rest: seen.extend(plans))
    result = invoke("compare", "wave", *given)
    assert result.exit_code == 0, result.output
    assert [(plan.optimizer, plan.rate_factor, plan.seed) for plan in seen] == wanted
    length = 5 if "--rounds" in given else 30 if "--quick" in given else 410
    assert {(plan.mode, plan.length) for plan in seen} == {("quick", length)}


def test_compare_takes_no_setting_that_nothing_has():
    result = invoke("compare", "wave", "--quick", "--optimizers", "soap,fosi-soap", "--no-control", "--set", "max_cg=5")
    assert result.exit_code == 2 and "max_cg is a setting of none of soap,fosi-soap" in " ".join(result.output.split())


def test_quick_and_batch_size(tmp_path):
    pytest.importorskip("torch")
    common = ["--optimizer", "adam", "--tiny", "--backend", "torch", "--out", str(tmp_path)]
    result = invoke("train", "wave", *common, "--quick", "--rounds", "1")
    assert result.exit_code == 0, result.output
    (run,) = lines(tmp_path / "wave" / "runs.jsonl")
    assert (run["mode"], run["curve"]) == ("quick", "curves/adam.torch.quick.rounds-1.tiny.seed-0.jsonl")
    result = invoke("train", "lm", *common, "--batch-size", "8", "--rounds", "2")
    assert result.exit_code == 0, result.output
    (run,) = lines(tmp_path / "lm" / "runs.jsonl")
    assert (run["batch_size"], run["protocol"], run["steps"]) == (8, "own", 10)
    first, *_ = lines(tmp_path / "lm" / run["curve"])
    assert first["batch_size"] == 8 and run["curve"] == "curves/adam.torch.rounds-2.batch-8.tiny.seed-0.jsonl"
    result = invoke("report", str(tmp_path))
    assert result.exit_code == 0, result.output
    report = (tmp_path / "curvature.md").read_text(encoding="utf-8")
    assert "## PINN: u_tt = 4 u_xx, tiny, quick, torch" in report and "| adam |" in report
    assert (tmp_path / "wave" / "standings-tiny-quick-torch.png").exists() and not (tmp_path / "README.md").exists()
    shutil.rmtree(tmp_path / "wave")
    result = invoke("report", str(tmp_path))
    assert result.exit_code == 2 and "in batches of another size are not reported on yet" in result.output


def test_report_overwrites_nothing_else_and_says_where_runs_are(tmp_path):
    given = ["train", "lr", "--optimizer", "fosi-adam", "--tiny", "--rounds", "3", *FOSI, "--out", str(tmp_path)]
    result = invoke(*given)
    assert result.exit_code == 0 and "no base" in result.output, result.output
    (tmp_path / "README.md").write_text("# Mine")
    result = invoke("report", str(tmp_path))
    assert result.exit_code == 2 and "is not a report, and a report would overwrite it" in result.output
    assert (tmp_path / "README.md").read_text() == "# Mine"
    (tmp_path / "README.md").unlink()
    result = invoke("report", str(tmp_path / "lr"))
    assert result.exit_code == 2 and "give the folder above it" in result.output
    assert invoke("report", str(tmp_path)).exit_code == 0
    text = (tmp_path / "README.md").read_text()
    assert "never" not in text.partition("## ")[2] and "(lr/learning-curves.png)" not in text


def test_corrupted_data_is_named_with_what_to_do(tmp_path):
    for file in mnist.FILES:
        path = tmp_path / file.path
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"not MNIST")
    result = invoke("train", "lr", "--optimizer", "adam", "--data-dir", str(tmp_path), "--out", str(tmp_path / "out"))
    assert result.exit_code == 2
    assert (
        "is not the file it should be: its SHA-256 is" in result.output and "remove it and run again" in result.output
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["train", "compare"])
def test_help_has_an_example(name):
    result = invoke(name, "--help")
    assert result.exit_code == 0 and f"Example: fosi {name}" in result.output
