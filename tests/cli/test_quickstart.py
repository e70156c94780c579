"""`fosi quickstart` as a person runs it, with few steps."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from matplotlib.image import imread
from typer.testing import CliRunner, Result

from fosi.cli.app import app

NAMES = ["heavy-ball", "fosi-heavy-ball", "adam", "fosi-adam"]


def invoke(*arguments: str) -> Result:
    # A wide terminal, so that no word of a table or a message is broken over two lines.
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, list(arguments))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, Path, list[dict]]:
    out = tmp_path_factory.mktemp("results") / "made" / "by-the-command"
    result = invoke("quickstart", "--steps", "30", "--seed", "3", "--out", str(out))
    assert result.exit_code == 0, result.output
    lines = (out / "quickstart.jsonl").read_text(encoding="utf-8").splitlines()
    return result, out, [json.loads(line) for line in lines]


def test_prints_every_optimizer_and_where_the_results_are(finished):
    result, out, _ = finished
    for name in NAMES:
        assert f" {name} " in result.output
    assert str(out / "quickstart.jsonl") in result.output
    assert str(out / "quickstart.png") in result.output
    assert "not a tuned comparison" in result.output


def test_first_record_is_the_environment(finished):
    environment = finished[2][0]
    assert environment["kind"] == "environment"
    assert environment["seed"] == 3 and environment["steps"] == 30
    for name in ("fosi", "jax", "optax", "numpy", "python", "platform", "device"):
        assert environment[name]


def test_records_hold_the_four_optimizers(finished):
    runs = {record["optimizer"]: record for record in finished[2] if record["kind"] == "run"}
    assert list(runs) == NAMES
    for name, run in runs.items():
        assert run["steps"] == 30
        assert run["curve"][0][0] == 0 and run["curve"][-1] == [30, run["train_loss"]]
        assert run["train_loss"] < run["curve"][0][1]
        assert 0 <= run["validation_accuracy"] <= 1
        assert (run["refreshes"] > 0) == name.startswith("fosi-")
    for base in ("heavy-ball", "adam"):
        # The same weights, and FOSI before its first estimate is the base optimizer.
        first, fosi_first = ([loss for _, loss in runs[name]["curve"][:5]] for name in (base, f"fosi-{base}"))
        assert fosi_first == pytest.approx(first)


def test_heavy_ball_has_the_best_of_three_rates(finished):
    kept = [record for record in finished[2] if record["kind"] == "run"]
    rejected = [record for record in finished[2] if record["kind"] == "rejected_rate"]
    assert {record["optimizer"] for record in rejected} == {"heavy-ball"}
    assert {kept[0]["learning_rate"], *(r["learning_rate"] for r in rejected)} == {0.1, 0.01, 0.001}
    assert all(kept[0]["train_loss"] <= record["train_loss"] for record in rejected)
    assert kept[1]["learning_rate"] == kept[0]["learning_rate"]


def test_steps_to_base_best_is_read_off_the_curves(finished):
    runs = {record["optimizer"]: record for record in finished[2] if record["kind"] == "run"}
    for base in ("heavy-ball", "adam"):
        best = min(loss for _, loss in runs[base]["curve"])
        reached = [step for step, loss in runs[f"fosi-{base}"]["curve"] if loss <= best]
        assert runs[f"fosi-{base}"]["steps_to_base_best"] == (reached[0] if reached else None)
        assert runs[base]["steps_to_base_best"] is None


def test_figure_is_an_image(finished):
    pixels = imread(finished[1] / "quickstart.png")
    assert pixels.ndim == 3 and min(pixels.shape[:2]) > 400
    assert pixels[..., :3].std() > 0


def test_help_shows_an_example():
    assert "quickstart" in invoke("--help").output
    shown = invoke("quickstart", "--help")
    assert shown.exit_code == 0
    assert "Example" in shown.output and "fosi quickstart --steps" in shown.output


@pytest.mark.parametrize(
    ("steps", "told"),
    [("0", "0 is too small; give 1 or more"), ("-4", "-4 is too small"), ("many", "valid integer")],
)
def test_bad_steps_are_named(tmp_path, steps, told):
    result = invoke("quickstart", "--steps", steps, "--out", str(tmp_path / "none"))
    assert result.exit_code == 2
    assert "--steps" in result.output and told in result.output
    assert not (tmp_path / "none").exists()


def test_out_that_is_a_file_is_named(tmp_path):
    (tmp_path / "taken").write_text("here already", encoding="utf-8")
    result = invoke("quickstart", "--out", str(tmp_path / "taken"))
    assert result.exit_code == 2
    assert "--out" in result.output and "is a file" in result.output


@pytest.mark.parametrize("package", ["typer", "sklearn"])
def test_without_an_optional_package_one_line_says_what_to_install(package):
    # None in sys.modules is Python's own way to say that a package is not there.
    script = f"import sys; sys.modules[{package!r}] = None; from fosi.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", script, "quickstart"], capture_output=True, text=True)
    assert done.returncode == 1
    assert 'pip install "fosi[experiments]"' in done.stderr
    assert len(done.stderr.splitlines()) == 1
