"""The scripts in examples/torch run as a reader would run them, and what they print is so."""

import re
import runpy
from pathlib import Path

import pytest
import torch

from fosi.torch import estimate_spectrum

FOLDER = Path(__file__).parents[2] / "examples" / "torch"


def printed(name, capsys):
    """The numbers a script prints."""
    runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
    text = capsys.readouterr().out
    return text, [float(x) for x in re.findall(r"-?\d+\.\d+(?:e-?\d+)?", text)]


def test_every_script_is_tested():
    tests = {name.removeprefix("test_") for name in globals()}
    assert {path.stem for path in FOLDER.glob("*.py")} <= tests


def test_plain_loop(capsys):
    text, (alone, ours) = printed("plain_loop", capsys)
    assert ours < alone
    assert "6 refreshes" in text


def test_gradient_accumulation(capsys):
    text, (whole, parts) = printed("gradient_accumulation", capsys)
    assert abs(whole - parts) < 1e-3
    assert parts < 0.5
    assert "2 refreshes" in text


def test_mixed_precision(capsys):
    text, (loss,) = printed("mixed_precision", capsys)
    assert loss < 1.0
    assert "3 refreshes" in text
    assert re.search(r"[1-5] of 5 eigenpairs in use", text)


def test_lr_schedule(capsys):
    _, (first, highest, last, loss) = printed("lr_schedule", capsys)
    assert last < first < highest == 1e-2
    assert loss < 0.5


def test_lightning_automatic(capsys):
    pytest.importorskip("lightning")
    text, (loss, *eigenvalues) = printed("lightning_automatic", capsys)
    assert loss < 1.5
    assert "90 steps" in text
    assert len(eigenvalues) == 5 and eigenvalues == sorted(eigenvalues, reverse=True) and eigenvalues[-1] > 0


@pytest.fixture
def accelerate():
    """Accelerate's state is global: a fresh one before and after."""
    state = pytest.importorskip("accelerate.state")
    state.AcceleratorState._reset_state(reset_partial_state=True)
    yield pytest.importorskip("accelerate")
    state.AcceleratorState._reset_state(reset_partial_state=True)


def test_accelerate_loop(capsys, accelerate):
    text, (first, last) = printed("accelerate_loop", capsys)
    assert last < 0.75 * first
    assert "3 refreshes in 87 batches" in text


def test_accelerate_with_mixed_precision(accelerate):
    train = runpy.run_path(str(FOLDER / "accelerate_loop.py"), run_name="example")["train"]
    losses, refreshes = train(mixed_precision="bf16", epochs=2)
    assert losses[-1] < losses[0]
    assert refreshes == 2


def test_accelerate_puts_autocast_where_a_refresh_cannot_reach_it(accelerate):
    # What the example and the docs tell the reader to keep model.forward for.
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    x = torch.randn(64, 6)
    expected = estimate_spectrum(lambda: model(x).square().mean(), model, k=3)
    forward = model.forward
    prepared = accelerate.Accelerator(mixed_precision="bf16").prepare(model)
    kept = estimate_spectrum(lambda: forward(x).square().mean(), model, k=3)
    cast = estimate_spectrum(lambda: prepared(x).square().mean(), model, k=3)
    assert torch.equal(kept.eigenvalues, expected.eigenvalues)
    assert not torch.allclose(cast.eigenvalues, expected.eigenvalues, rtol=1e-4)


def test_deepxde_pinn(monkeypatch):
    monkeypatch.setenv("DDE_BACKEND", "pytorch")  # the script sets it too; this puts it back
    pytest.importorskip("deepxde", reason="DeepXDE is not installed: pip install deepxde")
    torch.set_default_device("cpu")  # DeepXDE's import sets it to a GPU where there is one
    try:
        script = runpy.run_path(str(FOLDER / "deepxde_pinn.py"), run_name="example")
        script["SETTINGS"].update(k=5, num_matvecs=20, warmup=10, refresh_every=15)
        monkeypatch.setitem(script["dde"].optimizers.LBFGS_options, "iter_per_step", 20)
        results = script["main"](iterations=30, polish=20)
        script["dde"].optimizers.set_LBFGS_options()
    finally:
        torch.set_default_device(None)
    # So few steps show that it runs and refreshes, not what it gains.
    assert len(results) == 8
    assert all(loss < 1e5 and error < 10 for loss, error, _ in results.values())
    assert results["FOSI around Adam"][0] != results["Adam"][0]
    for name in ("Adam", "FOSI around Adam"):
        assert results[f"{name}, then L-BFGS"][0] < results[name][0]
    assert results["Adam, then FOSI around L-BFGS"][0] < results["Adam"][0]


def test_spectrum(capsys):
    text, numbers = printed("spectrum", capsys)
    eigenvalues, residuals = numbers[::2], numbers[1::2]
    assert len(eigenvalues) == 8 and eigenvalues == sorted(eigenvalues, reverse=True)
    assert max(residuals[:6]) < 1e-3 * eigenvalues[0]
    assert text.count("yes") >= 6
