"""What an import needs: NumPy for ``fosi``, jax and optax on top for ``fosi.jax``, torch for ``fosi.torch``."""

import subprocess
import sys

import pytest

FRAMEWORKS = {
    *("jax", "jaxlib", "optax", "flax", "equinox", "chex"),
    *("torch", "lightning", "pytorch_lightning", "accelerate", "torchvision", "curvlinops", "deepxde"),
}
TOOLS = {"matplotlib", "typer", "rich", "sklearn", "scipy", "hypothesis", "pytest"}

# No finder finds a blocked package, however deep the import: to ask for it gives None, to import it raises.
BLOCK = """
import sys

class Block:
    def __init__(self, finder):
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in {blocked!r}:
            return self.finder.find_spec(name, path, target)

sys.meta_path[:] = map(Block, sys.meta_path)
"""


def run(code, blocked):
    """Runs the code in an interpreter of its own, in which some packages are as good as not installed."""
    program = BLOCK.format(blocked=set(blocked)) + code
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)


def test_fosi_needs_numpy_alone():
    done = run(
        """
import fosi
assert fosi.schedule.num_matvecs(10, 0, 1000) == 40
assert fosi.scaling.optimal_lr("gd", 3.0, 1.0) == 0.5
assert fosi.presets.paper()["accept"] == "all"
assert fosi.Trace(0.9).update(0.0, 1.0) == 1.0
fosi.analysis.condition_numbers
files = {name.partition(".")[0]: getattr(m, "__file__", None) or "" for name, m in sys.modules.items()}
print(sorted({name for name, file in files.items() if "site-packages" in file} - {"numpy", "fosi"}))
""",
        FRAMEWORKS | TOOLS,
    )
    assert done.returncode == 0, done.stderr
    # What the environment itself puts into every interpreter (.pth files) is not ours.
    own = run(
        """
files = {name.partition(".")[0]: getattr(m, "__file__", None) or "" for name, m in sys.modules.items()}
print(sorted({name for name, file in files.items() if "site-packages" in file} - {"numpy", "fosi"}))
""",
        (),
    )
    assert done.stdout == own.stdout


def test_fosi_jax_needs_jax_and_optax_alone():
    done = run(
        """
import jax.numpy as jnp
import fosi.jax
opt = fosi.jax.fosi_adam(0.1, k=1, warmup=0)
params = jnp.ones(3)
updates, state = opt.update(params, opt.init(params), params, value_fn=lambda p: jnp.sum(p**2))
assert int(state.refreshes) == 1
""",
        (FRAMEWORKS - {"jax", "jaxlib", "optax"}) | (TOOLS - {"scipy"}),  # jax itself needs scipy
    )
    assert done.returncode == 0, done.stderr


def test_fosi_torch_needs_torch_alone():
    done = run(
        """
import torch
import fosi.torch
model = torch.nn.Linear(3, 1)
opt = fosi.torch.FOSI(torch.optim.Adam(model.parameters(), lr=0.1), model=model, k=1, warmup=0)
loss_fn = lambda: model(torch.eye(3)).square().sum()
loss_fn().backward()
assert opt.refresh_due
opt.refresh(loss_fn)
opt.step()
assert opt.spectrum is not None
""",
        (FRAMEWORKS - {"torch"}) | TOOLS,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("backend", "own"), [("jax", {"jax", "jaxlib", "optax"}), ("torch", {"torch"})])
def test_a_backend_leaves_other_frameworks_unimported_where_they_are_installed(backend, own):
    # Blocking would not find an import that is tried and forgiven. What the framework itself tries is not ours.
    done = run(
        f"""
import importlib
for name in {sorted(own)}:
    importlib.import_module(name)
before = set(sys.modules)
import fosi.{backend}
print(sorted({{name.partition(".")[0] for name in set(sys.modules) - before}} & {FRAMEWORKS - own}))
""",
        (),
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(("backend", "missing"), [("jax", "jax"), ("jax", "optax"), ("torch", "torch")])
def test_without_its_framework_the_backend_names_what_is_missing(backend, missing):
    done = run(f"import fosi\nimport fosi.{backend}\n", {missing})
    assert done.returncode != 0
    assert f"No module named '{missing}" in done.stderr.splitlines()[-1]


def test_flax_is_needed_only_where_it_is_asked_for():
    done = run("import fosi.jax\nimport fosi.jax.flax\n", {"flax"})
    assert "No module named 'flax" in done.stderr.splitlines()[-1]
    assert "fosi.jax.flax" in done.stderr or "fosi/jax/flax.py" in done.stderr
