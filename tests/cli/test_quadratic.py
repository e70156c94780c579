"""`fosi quadratic` and `fosi report` as a person runs them, on small sizes."""

import json
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread
from typer.testing import CliRunner, Result

from fosi.cli import quadratic
from fosi.cli.app import app
from fosi.experiments.quadratic import QUICK, STUDIES

COMMANDS = {
    "spectrum": "spectrum --n 12 --lambda1 5 --lambda1 50 --seeds 2 --iterations 5",
    "condition": "condition --n 20 --seeds 2 --iterations 5 --backend torch",
    "rotation": "rotation --n 100 --b 1.1 --b 1.12 --zeta-step 50 --seeds 1 --iterations 3",
    "learning-rate": "learning-rate --rates-per-decade 1 --momenta 2 --iterations 3",
    "stochastic": "stochastic --n 12 --beta 0.7 --seeds 2 --iterations 20",
    "illustration": "illustration --iterations 2",
}


def invoke(*arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, list(arguments))


def pictures(out: Path) -> dict[str, np.ndarray]:
    return {path.name: imread(path) for path in sorted(out.glob("*.png"))}


def test_there_is_a_command_for_every_study():
    assert list(COMMANDS) == list(STUDIES)


@pytest.mark.parametrize("name", COMMANDS)
def test_study_writes_numbers_and_figures_which_report_draws_again(name, tmp_path, monkeypatch):
    out = tmp_path / "made" / "by-the-command"
    result = invoke("quadratic", *COMMANDS[name].split(), "--out", str(out))
    assert result.exit_code == 0, result.output
    numbers = out / f"{name}.jsonl"
    assert f"Numbers: {numbers}" in result.output and f"Figure:  {out / name}.png and .pdf" in result.output
    records = [json.loads(line) for line in numbers.read_text().splitlines()]
    assert records[0]["kind"] == "environment" and records[0]["study"] == name
    for field in ("device", "platform", "python", "fosi", "jax", "numpy"):
        assert records[0][field]
    measured = [r for r in records if "kind" not in r]
    assert {r["study"] for r in measured} == {name}
    for field in ("optimizer", "n", "eta", "momentum", "c", "iteration", "value", "seed"):
        assert all(field in r for r in measured)
    assert all("lambda1" in r or {"b", "zeta"} <= r.keys() for r in measured)

    drawn = pictures(out)
    assert f"{name}.png" in drawn and (out / f"{name}.pdf").read_bytes().startswith(b"%PDF")
    assert all(picture[..., :3].std() > 0.02 for picture in drawn.values())  # something is on them
    for path in [*out.glob("*.png"), *out.glob("*.pdf")]:
        path.unlink()
    study = STUDIES[name]
    monkeypatch.setattr(study, "units", lambda settings: pytest.fail("computed again"))
    again = invoke("report", str(out))
    assert again.exit_code == 0, again.output
    redrawn = pictures(out)
    assert redrawn.keys() == drawn.keys()
    assert all(np.array_equal(redrawn[key], drawn[key]) for key in drawn)


def test_same_command_again_goes_on_and_another_one_is_refused(tmp_path):
    command = ["quadratic", *COMMANDS["illustration"].split(), "--out", str(tmp_path)]
    assert invoke(*command).exit_code == 0
    before = (tmp_path / "illustration.jsonl").read_text()
    assert invoke(*command).exit_code == 0
    assert (tmp_path / "illustration.jsonl").read_text() == before
    other = invoke("quadratic", "illustration", "--iterations", "3", "--out", str(tmp_path))
    assert other.exit_code == 2 and "holds results with iterations 2, not iterations 3" in other.output
    assert (tmp_path / "illustration.jsonl").read_text() == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["quadratic", "spectrum", "--n", "5"], "n is 5; give 11 or more"),
        (["quadratic", "rotation", "--block", "middle"], "block is 'middle'; give one of ends, largest, smallest"),
        (["quadratic", "stochastic", "--beta", "0.4"], "the lemma is about exponents between 0.5 and 1"),
        (["report", "."], "holds no results"),
        (["report", "no-such-folder"], "no-such-folder does not exist; give a results file or a folder"),
    ],
)
def test_bad_options_are_named(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert message in result.output
    assert list(tmp_path.iterdir()) == []


def test_report_draws_what_it_can_and_names_the_rest(tmp_path):
    assert invoke("quadratic", *COMMANDS["illustration"].split(), "--out", str(tmp_path)).exit_code == 0
    lines = (tmp_path / "illustration.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "illustration.png").unlink()
    (tmp_path / "bad.jsonl").write_text('{"kind": "environment", "command": "quadratic", "study": "spectrum"}\n{"stu\n')
    (tmp_path / "other.jsonl").write_text('{"name": "refresh"}\n')
    (tmp_path / "benchmarks.jsonl").write_text('{"benchmark": "refresh"}\n')
    (tmp_path / "begun.jsonl").write_text("".join(lines[: len(lines) // 2 + 2]))
    result = invoke("report", str(tmp_path))
    assert result.exit_code == 1
    assert "bad.jsonl, line 2 is not JSON" in result.output
    assert "other.jsonl has no figures" in result.output and "benchmarks.jsonl" not in result.output
    assert "begun.jsonl is unfinished, 1 of 2 units: the same command goes on with it" in result.output
    assert (tmp_path / "illustration.png").exists()


def test_backend_that_is_not_there_leaves_the_folder_usable(tmp_path):
    command = ["quadratic", "condition", "--n", "20", "--seeds", "1", "--iterations", "2", "--out", str(tmp_path)]
    wrong = invoke(*command, "--backend", "numpy")
    assert wrong.exit_code == 2 and "backend is 'numpy'; give one of jax, torch" in wrong.output
    assert invoke(*command).exit_code == 0


@pytest.mark.parametrize("name", COMMANDS)
def test_options_default_to_the_papers_settings(name, monkeypatch):
    shown = []
    monkeypatch.setattr(quadratic, "_show", lambda name, settings, out: shown.append((name, settings)))
    assert invoke("quadratic", name).exit_code == 0
    assert shown == [(name, STUDIES[name].Settings())]


def test_all_runs_every_study(tmp_path, monkeypatch):
    shown = []
    monkeypatch.setattr(quadratic, "_show", lambda name, settings, out: shown.append((name, settings, out)))
    assert invoke("quadratic", "all", "--quick", "--out", str(tmp_path)).exit_code == 0
    assert shown == [(name, QUICK[name], tmp_path) for name in STUDIES]
    shown.clear()
    assert invoke("quadratic", "all").exit_code == 0
    assert shown == [(name, study.Settings(), Path("fosi-results/quadratic")) for name, study in STUDIES.items()]


def test_interrupted_command_says_how_to_go_on(tmp_path, monkeypatch):
    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(STUDIES["illustration"], "_run", interrupted)
    result = invoke("quadratic", "illustration", "--out", str(tmp_path))
    assert result.exit_code == 130 and "The same command goes on from here" in result.output
    assert list(tmp_path.iterdir()) == []


def test_report_draws_the_quickstart_too(tmp_path):
    assert invoke("quickstart", "--steps", "5", "--out", str(tmp_path)).exit_code == 0
    drawn = pictures(tmp_path)
    (tmp_path / "quickstart.png").unlink()
    assert invoke("report", str(tmp_path / "quickstart.jsonl")).exit_code == 0
    assert np.array_equal(pictures(tmp_path)["quickstart.png"], drawn["quickstart.png"])


def test_every_command_has_help_with_an_example():
    for name in [*COMMANDS, "all"]:
        result = invoke("quadratic", name, "--help")
        assert result.exit_code == 0 and f"Example: fosi quadratic {name}" in result.output
