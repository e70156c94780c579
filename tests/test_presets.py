"""The paper's settings and those for losses without noise, and that the formulas need NumPy alone."""

import subprocess
import sys

import pytest

from fosi.options import Options
from fosi.presets import deterministic, paper
from fosi.schedule import plan


def test_the_papers_settings():
    assert paper() == {
        "k": 10,
        "ell": 0,
        "alpha": 0.01,
        "eps": 1e-8,
        "max_lr_scale": 3.0,
        "overhead": 0.1,
        "accept": "all",
        "precision": "float64",
    }


@pytest.mark.parametrize("n", [5130, 7850, 500_000, 4_000_000])  # TL, LR, AE and AC of section 4.1
def test_the_papers_settings_refresh_every_800_steps(n):
    settings = paper()
    schedule = plan(settings["k"], settings["ell"], n, overhead=settings["overhead"])
    assert schedule == (800, 800, 40)


def test_each_call_gives_a_dict_of_its_own():
    paper()["k"] = 20
    assert paper()["k"] == 10


def test_the_options_take_the_papers_settings():
    taken = Options(**paper())
    assert all(getattr(taken, name) == value for name, value in paper().items())


def test_the_example_in_the_docstring_builds_an_optimizer():
    pytest.importorskip("jax")
    pytest.importorskip("optax")
    from fosi.jax import fosi_adam

    fosi_adam(1e-3, lambda params, batch: (params**2).sum(), **paper())


@pytest.mark.parametrize(
    ("base", "own"),
    [
        ("adam", {"k": 10, "num_matvecs": 40, "alpha": 0.01, "warmup": 200}),
        ("lbfgs", {"k": 40, "num_matvecs": 60, "alpha": 1.0, "warmup": 1}),
    ],
)
def test_settings_for_losses_without_noise(base, own):  # those of the tables in docs/pinns.md
    made = deterministic(base)
    assert made == {"accept": "converged", "precision": "float32", "refresh_every": 200, **own}
    assert all(getattr(Options(**made), name) == value for name, value in made.items())
    made["k"] = 1
    assert deterministic(base)["k"] == own["k"]


def test_settings_for_losses_without_noise_build_optimizers():
    pytest.importorskip("jax")
    pytest.importorskip("optax")
    from fosi.jax import fosi_adam, fosi_lbfgs, fosi_sgd

    def loss_fn(params, batch):
        return (params**2).sum()

    fosi_lbfgs(loss_fn, memory_size=300, **deterministic("lbfgs"))
    fosi_adam(1e-3, loss_fn, **deterministic())
    fosi_sgd(1e-3, loss_fn, momentum=0.9, **deterministic("adam"))


def test_settings_for_losses_without_noise_build_an_optimizer_of_torch():
    torch = pytest.importorskip("torch")
    from fosi.torch import FOSI

    weights = torch.ones(50, requires_grad=True)
    made = FOSI(torch.optim.Adam([weights], lr=1e-3), **deterministic())
    assert made.options.k == 10


def test_a_base_without_settings_is_named():
    with pytest.raises(ValueError, match="base must be 'lbfgs', or 'adam' for all first-order optimizers, got 'sgd'"):
        deterministic("sgd")


def test_formulas_import_no_array_framework_but_numpy():
    code = (
        "import sys, fosi, fosi.analysis, fosi.momentum, fosi.presets, fosi.scaling, fosi.schedule\n"
        "assert not {'jax', 'torch', 'optax'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
