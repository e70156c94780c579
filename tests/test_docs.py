"""Every example a reader can copy runs: doctests of the package, python blocks of the README and the docs."""

import doctest
import importlib
import importlib.util
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fosi
from fosi import prediction

ROOT = Path(__file__).parents[1]
MODULES = [
    "fosi",
    *(m.name for m in pkgutil.walk_packages(fosi.__path__, "fosi.") if not m.name.startswith("fosi.cli")),
]
BLOCK = re.compile(r"^```python[^\n]*\n(.*?)^```", re.DOTALL | re.MULTILINE)
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]


def blocks():
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for found in BLOCK.finditer(text):
            line = text.count("\n", 0, found.start()) + 2
            yield pytest.param(page, line, found[1], id=f"{page.relative_to(ROOT)}:{line}")


@pytest.mark.parametrize("name", MODULES)
def test_doctests(name):
    if name == "fosi.torch.lightning":
        pytest.importorskip("lightning")
    result = doctest.testmod(importlib.import_module(name))
    assert result.failed == 0


def test_the_functions_users_call_have_an_example():
    import fosi.jax
    import fosi.jax.flax
    import fosi.torch
    from fosi import scaling, schedule

    finder = doctest.DocTestFinder(recurse=False)
    for called in (
        fosi.jax.fosi,
        fosi.jax.fosi_sgd,
        fosi.jax.fosi_adam,
        fosi.jax.fosi_adamw,
        fosi.jax.diagnose,
        fosi.jax.estimate_spectrum,
        fosi.jax.without_params,
        fosi.jax.flax.TrainState,
        fosi.jax.flax.refresh_nnx,
        fosi.jax.flax.value_fn_nnx,
        fosi.torch.FOSI,
        fosi.torch.diagnose,
        fosi.torch.estimate_spectrum,
        fosi.presets.deterministic,
        fosi.presets.paper,
        schedule.num_matvecs,
        schedule.refresh_interval,
        schedule.measured_refresh_interval,
        scaling.optimal_lr,
        scaling.lr_scale,
    ):
        assert any(test.examples for test in finder.find(called)), called


@pytest.mark.parametrize(("page", "line", "code"), list(blocks()))
def test_blocks_run(page, line, code, tmp_path, monkeypatch):
    for package in ("lightning", "accelerate"):
        if f"import {package}" in code or f"from {package}" in code:
            pytest.importorskip(package)
    if "import deepxde" in code:  # which chooses one backend for its whole process, and may set a default device
        if importlib.util.find_spec("deepxde") is None:  # not imported here, see above
            pytest.skip("DeepXDE is not installed: pip install deepxde")
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return
    monkeypatch.chdir(tmp_path)  # where an example writes, it writes there
    padded = "\n" * (line - 1) + code  # so that a traceback shows the page's own lines
    exec(compile(padded, str(page), "exec"), {"__name__": "example"})


def test_the_readme_has_blocks():
    assert len(BLOCK.findall(PAGES[0].read_text(encoding="utf-8"))) >= 2


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8")):
        assert "://" in target or (page.parent / target).exists(), target


def test_the_rule_in_use_is_the_one_that_the_results_give():
    """The coefficients are numbers in the code; a report that changes them must change these too."""
    text = (ROOT / "results" / "diagnosis.md").read_text(encoding="utf-8")
    in_use = {"": prediction.COEFFICIENTS, " after a race": prediction.COEFFICIENTS_RACED}
    for after, numbers in in_use.items():
        line = text.split(f"the coefficients{after} are ")[1].split("\n")[0].rstrip(".")
        found = dict(part.rsplit(" ", 1) for part in line.split(", "))
        assert {name: float(value) for name, value in found.items()} == numbers
