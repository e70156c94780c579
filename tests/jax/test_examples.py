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
    for settings in (script["AROUND_ADAM"], script["AROUND_LBFGS"]):
        settings.update(k=5, num_matvecs=15, warmup=10, refresh_every=20)
    # So few steps take no time; compiling them as if they were many would take most of it.
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        with jax.numpy_rank_promotion("allow"):  # the script is as its users write: they do not forbid broadcasting
            results = script["main"](steps=80, lr=1e-2, width=12, num_points=40)
    finally:
        jax.config.update("jax_disable_most_optimizations", False)
    adam, ours, lbfgs, ours_after = (loss for loss, _, _ in results.values())
    assert ours < adam and lbfgs < adam and ours_after < adam
    assert all(0 < error < 2 and seconds > 0 for _, error, seconds in results.values())
