"""`fosi quadratic` and `fosi report` as a person runs them, on small sizes."""

import json
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread
from typer.testing import CliRunner, Result

from fosi.cli.app import app
from fosi.experiments.quadratic import STUDIES

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
    for field in ("optimizer", "n", "eta", "iteration", "value", "seed"):
        assert all(field in r for r in measured)

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
        (["report", "no-such-folder"], "no-such-folder does not exist; give a results file or a folder"),
    ],
)
def test_bad_options_are_named(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert message in result.output
    assert list(tmp_path.iterdir()) == []


def test_report_names_the_line_that_is_not_json(tmp_path):
    (tmp_path / "spectrum.jsonl").write_text('{"kind": "environment", "study": "spectrum"}\n{"study"\n')
    result = invoke("report", str(tmp_path))
    assert result.exit_code == 2 and "spectrum.jsonl, line 2 is not JSON" in result.output


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
