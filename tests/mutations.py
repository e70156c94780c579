"""Does a test fail when the algorithm is broken? Breaks it in one place at a time, in a copy, and runs tests on that.

    make mutations

Each break must make at least one of the claims about quadratic functions, or of the comparisons with the paper's
algorithm in NumPy, fail; without a break all of them must pass. Ends with an error where one does not.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
CLAIMS = "tests/experiments/test_quadratic_claims.py"
LITERAL = "tests/experiments/test_quadratic.py::test_curves_are_those_of_the_paper_written_literally"


class Break(NamedTuple):
    """Replaces ``old``, which the file under src/fosi holds exactly once, by ``new``."""

    what: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


CAP = "tests/experiments/test_quadratic.py::test_cap_on_the_scaling_is_kept"
JAX = (LITERAL, CAP, CLAIMS, "tests/jax/test_oracle.py")
LBFGS = ("tests/jax/test_lbfgs.py",)
TORCH_LBFGS = ("tests/torch/test_lbfgs.py",)
TORCH = (LITERAL, "tests/torch/test_oracle.py")
BREAKS = (
    Break(
        "projection: the base sees the whole gradient",
        "jax/steps.py",
        "rest = jax.tree.map(jnp.subtract, gradient, sp.combine(basis, inside))",
        "rest = gradient",
        JAX,
    ),
    Break(
        "projection: the base's step keeps its part in V",
        "jax/steps.py",
        "taken = scale * sp.products(basis, vector) + subspace.newton * inside",
        "taken = subspace.newton * inside",
        JAX,
    ),
    Break(
        "projection: the same, gradient descent and Heavy-Ball",
        "jax/steps.py",
        "inside = (rate * scale - subspace.newton) * sp.products(subspace.basis, mean)",
        "inside = -subspace.newton * sp.products(subspace.basis, mean)",
        JAX,
    ),
    Break(
        "Newton scaling: α instead of α / |λ|",
        "jax/transform.py",
        "alpha / jnp.maximum(jnp.abs(state.eigenvalues), self.options.eps)",
        "alpha",
        JAX,
    ),
    Break("learning rate: never scaled", "jax/transform.py", "if self.options.lr_rule is None:", "if True:", JAX),
    Break(
        "learning rate: the cap is ignored",
        "scaling.py",
        "xp.clip(rest / whole, 1, cap)",
        "xp.maximum(rest / whole, 1)",
        JAX,
    ),
    Break(
        "acceptance: whatever Lanczos found",
        "jax/spectrum.py",
        "accepted &= (residuals <= _RESIDUAL * magnitude) & (magnitude > resolution)",
        "pass",
        ("tests/jax/test_spectrum.py", *JAX),
    ),
    Break(
        "projection: the base sees the whole gradient",
        "torch/steps.py",
        "    sp.subtract(rest.vector, subspace.columns, inside)\n",
        "",
        TORCH,
    ),
    Break(
        "projection: the base's step keeps its part in V",
        "torch/steps.py",
        "torch.addcmul(along if scale == 1 else scale * along, subspace.inverse",
        "torch.addcmul(torch.zeros_like(along), subspace.inverse",
        TORCH,
    ),
    Break(
        "projection: the same, SGD",
        "torch/steps.py",
        "torch.addcmul(rate * scale * inside, subspace.inverse",
        "torch.addcmul(torch.zeros_like(inside), subspace.inverse",
        TORCH,
    ),
    Break(
        "Newton scaling: α instead of α / |λ|",
        "torch/optimizer.py",
        "inverse = used / np.maximum(np.abs(found.eigenvalues[:rows]), self.options.eps)",
        "inverse = used",
        TORCH,
    ),
    Break("learning rate: never scaled", "torch/optimizer.py", "self._lr_scale = self._scale(found)", "pass", TORCH),
    Break(
        "acceptance: whatever Lanczos found",
        "torch/spectrum.py",
        "accepted &= (residuals <= _RESIDUAL * magnitude) & (magnitude > resolution)",
        "pass",
        ("tests/torch/test_spectrum.py", *TORCH),
    ),
    Break(
        "L-BFGS: its first guess does not know the subspace",
        "jax/pairs.py",
        "inside = (subspace.newton - scale) * sp.products(subspace.basis, rest)",
        "inside = 0 * sp.products(subspace.basis, rest)",
        LBFGS,
    ),
    Break(
        "L-BFGS: γ of the whole change of the gradient, not of what lies outside",
        "jax/pairs.py",
        "        change = outside(change)\n",
        "",
        LBFGS,
    ),
    Break(
        "L-BFGS: γ has all of the step, not what lies outside",
        "jax/pairs.py",
        "sp.norm(outside(step)) / jnp.sqrt(size)",
        "sp.norm(step) / jnp.sqrt(size)",
        LBFGS,
    ),
    Break(
        "L-BFGS: a search begins at 1, whatever the scaling",
        "jax/quasi_newton.py",
        'initial_guess_strategy="one" if usual else "keep"',
        'initial_guess_strategy="one"',
        LBFGS,
    ),
    Break(
        "L-BFGS: after a search that failed the next one begins where it was lost",
        "jax/quasi_newton.py",
        "jnp.where(lower & (size > 0), size, 1)",
        "size",
        LBFGS,
    ),
    Break(
        "L-BFGS: a search begins where the last one ended, and never comes back to 1",
        "quasi_newton.py",
        "GROWTH = 1.1",
        "GROWTH = 1.0",
        (*LBFGS, *TORCH_LBFGS),
    ),
    Break(
        "L-BFGS: γ is never cut",
        "quasi_newton.py",
        "SHORT, CUT = 0.01, 0.1",
        "SHORT, CUT = 0.01, 1.0",
        (*LBFGS, *TORCH_LBFGS),
    ),
    Break(
        "L-BFGS: γ is never cut in JAX",
        "jax/quasi_newton.py",
        "LbfgsState(pairs.after(size, self.scaling), search)",
        "LbfgsState(pairs, search)",
        LBFGS,
    ),
    Break(
        "L-BFGS: γ is never cut in torch",
        "torch/lbfgs.py",
        "self._pairs.after(0.0 if found is None else found.size)",
        "pass",
        TORCH_LBFGS,
    ),
    Break(
        "L-BFGS: a search that found nothing lower is one that ended at 1",
        "jax/quasi_newton.py",
        "return updates, search, jnp.where(lower, size, 0)",
        "return updates, search, jnp.where(lower, size, 1)",
        LBFGS,
    ),
    Break(
        "L-BFGS: γ is lost where noise ends every search",
        "quasi_newton.py",
        "LEAST_TRUST = 1e-6",
        "LEAST_TRUST = 0.0",
        (*LBFGS, *TORCH_LBFGS),
    ),
    Break(
        "L-BFGS: a γ that was cut stays so",
        "quasi_newton.py",
        "LONG, REGROWTH = 0.02, 1.1",
        "LONG, REGROWTH = 0.02, 1.0",
        (*LBFGS, *TORCH_LBFGS),
    ),
    Break(
        "L-BFGS: the pair that another has taken the place of still counts",
        "torch/pairs.py",
        "inverse[at], inverse[:, at] = 0, 0",
        "pass",
        TORCH_LBFGS,
    ),
    Break(
        "L-BFGS: a new pair does not know of the others",
        "torch/pairs.py",
        "column = sp.products(inverse, sp.products(self.steps[: self.used], change)).neg_()",
        "column = torch.zeros_like(inverse[0])",
        TORCH_LBFGS,
    ),
    Break(
        "L-BFGS: its first guess does not know the subspace",
        "torch/pairs.py",
        "inside = (metric.newton - scale) * sp.products(metric.basis, rest)",
        "inside = 0 * sp.products(metric.basis, rest)",
        TORCH_LBFGS,
    ),
    Break(
        "L-BFGS: γ has all of the step and of the change, not what lies outside",
        "torch/pairs.py",
        "step, change = metric.outside(step), metric.outside(change)",
        "pass",
        TORCH_LBFGS,
    ),
    Break(
        "L-BFGS: a search begins at 1, whatever the scaling",
        "torch/lbfgs.py",
        'begin = 1.0 if self.scaling == "usual" else min(1.0, GROWTH * self._size)',
        "begin = 1.0",
        TORCH_LBFGS,
    ),
    Break(
        "L-BFGS: a search starts from where the last one ended, as if it had not moved",
        "torch/lbfgs.py",
        "start = now._replace(size=0.0, slope",
        "start = now._replace(slope",
        TORCH_LBFGS,
    ),
    Break(
        "L-BFGS: γ no less than a part of the lengths of the smallest eigenvalues too",
        "torch/lbfgs.py",
        "lengths[used < self.options.k]",
        "lengths",
        TORCH_LBFGS,
    ),
    Break(
        "L-BFGS: a search takes whatever is flat",
        "torch/search.py",
        "        lower = _lower(trial, start)\n",
        "        lower = True\n",
        TORCH_LBFGS,
    ),
    Break(
        "L-BFGS: the pair that another has taken the place of still counts",
        "jax/pairs.py",
        "left = jnp.where(others[:, None] & others[None], self.inverse, 0)",
        "left = self.inverse",
        LBFGS,
    ),
    Break(
        "L-BFGS: a new pair does not know of the others",
        "jax/pairs.py",
        "column = jnp.where(others, -_times(left, self._of_pairs(products)), 1)",
        "column = jnp.where(others, 0, 1)",
        LBFGS,
    ),
    Break(
        "L-BFGS: nothing is forgotten where a search has failed",
        "jax/pairs.py",
        "jnp.where(forgotten, 0, inverse)",
        "inverse",
        LBFGS,
    ),
    Break(
        "L-BFGS: γ, and what it is no less than, of the smallest eigenvalues too",
        "jax/pairs.py",
        "lengths = subspace.newton[:largest]",
        "lengths = subspace.newton",
        LBFGS,
    ),
)


def failed(source: Path, tests: tuple[str, ...]) -> str | None:
    """The first test that fails with the package as it is under ``source``; None where all pass."""
    environment = {**os.environ, "PYTHONPATH": str(source)}
    where = [sys.executable, "-c", "import fosi; print(fosi.__file__)"]
    found = subprocess.run(where, env=environment, capture_output=True, text=True, check=True).stdout
    if not found.startswith(str(source)):
        raise SystemExit(f"the tests would run on {found.strip()} and not on the copy in {source}")
    command = [sys.executable, "-m", "pytest", "-n", "2", "-x", "-q", "--no-header", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    names = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    # 1: tests failed; 2: so many of them that xdist was stopped. All else is no answer.
    if done.returncode not in (0, 1, 2) or (done.returncode == 2 and not names):
        raise SystemExit(f"pytest gave {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return names[0] if done.returncode else None


def main() -> None:
    missed = []
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "src"

        def copy() -> None:
            shutil.rmtree(source, ignore_errors=True)
            shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))

        copy()
        every = tuple(dict.fromkeys(test for b in BREAKS for test in b.tests))
        culprit = failed(source, every)
        if culprit:
            raise SystemExit(f"{culprit} fails without any break")
        print("nothing broken: all pass", flush=True)
        for b in BREAKS:
            copy()
            path = source / "fosi" / b.file
            text = path.read_text(encoding="utf-8")
            if text.count(b.old) != 1:
                raise SystemExit(f"{b.file} holds {b.old!r} {text.count(b.old)} times and not once: mend {__file__}")
            path.write_text(text.replace(b.old, b.new), encoding="utf-8")
            begin = time.perf_counter()
            culprit = failed(source, b.tests)
            took = time.perf_counter() - begin
            print(
                f"{b.file}, {b.what}: {f'fails {culprit}' if culprit else 'NOTHING FAILS'} ({took:.0f} s)", flush=True
            )
            if not culprit:
                missed.append(b.what)
    if missed:
        raise SystemExit(f"{len(missed)} of {len(BREAKS)} breaks went unseen")
    print(f"each of {len(BREAKS)} breaks is seen")


if __name__ == "__main__":
    main()
