"""The scripts in examples/jax run, at a smaller size than a reader would run them."""

import runpy
from pathlib import Path

import jax

FOLDER = Path(__file__).parents[2] / "examples" / "jax"


def test_every_script_is_tested():
    tests = {name.removeprefix("test_") for name in globals()}
    assert {path.stem for path in FOLDER.glob("*.py")} <= tests


def test_pinn():
    script = runpy.run_path(str(FOLDER / "pinn.py"), run_name="example")
    script["FOSI"].update(k=5, num_matvecs=15, warmup=20, refresh_every=20)
    # So few steps take no time; compiling them as if they were many would take most of it.
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        with jax.numpy_rank_promotion("allow"):  # the script is as its users write: they do not forbid broadcasting
            results = script["main"](steps=60)
    finally:
        jax.config.update("jax_disable_most_optimizations", False)
    assert len(results) == 3
    adam, longer, ours = results.values()
    assert longer[0] < adam[0]
    assert ours[0] < adam[0]
    assert ours[1] < 2
