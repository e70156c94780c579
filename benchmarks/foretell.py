"""What does `fosi diagnose` say of every task? All of them from one process, timed where they run, or counted.

`fosi report` then holds them against what was measured::

    python -m benchmarks.foretell --data-dir data --out results
    python -m benchmarks.foretell --tasks wave,burgers --bases adam --out results
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax

from fosi.experiments.tasks import TASKS, diagnosing, probing, settings
from fosi.experiments.tasks.jax_engine import JaxEngine
from fosi.experiments.tasks.plan import Plan
from fosi.experiments.tasks.task import Problem

BATCHES = 4
"""Enough to tell noise from signal; the curvature is of one, as FOSI's estimates are."""


def foretell(
    plan: Plan,
    problem: Problem,
    out: Path,
    steps: int | None,
    timed: bool = True,
    others: Mapping[str, Any] = MappingProxyType({}),
) -> str:
    """Diagnoses one base on one task, writes it beside the task's runs, and returns it in a line.

    With the pairs, the products and the T that FOSI has on the task, where it would make its first estimate, and on a
    part of the data where every step sees all of it. A report holds it against runs with the task's own settings of
    FOSI, or with these others.
    """
    if problem.part is not None:
        plan = replace(plan, curvature="part")
    ours = replace(plan, optimizer=f"fosi-{plan.optimizer}").engine(problem)
    assert isinstance(ours, JaxEngine) and ours.schedule is not None
    probe = probing.train(plan, problem, steps=ours.schedule.warmup if steps is None else steps)
    fosi = settings.settle(f"fosi-{plan.optimizer}", plan.of, ours.steps_a_round, 1.0, {}).fosi or {}
    given = {"k": fosi["k"], "num_matvecs": ours.schedule.num_matvecs, "refresh_every": ours.schedule.every}
    found = diagnosing.diagnose(probe, BATCHES, curvature_batches=1, timed=timed, **given)
    record = found.record() | ({"fosi_settings": dict(others)} if others else {})
    diagnosing.write(out / plan.task / "diagnosis.jsonl", "diagnose", probe, record)
    seen = ", ".join(f"{name} {value:.2f}" for name, value in found.features.items())
    return f"predicted {found.ratio:.2f}; {found.used} of {found.k} pairs, {found.of_limit:.2g} of the limit; {seen}"


def main(argv: Sequence[str] | None = None) -> None:
    """Parses, and diagnoses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("fosi-results"), help="folder for the results")
    parser.add_argument("--tasks", default=",".join(TASKS), help="with commas between; TASK:MODE for a mode of one")
    parser.add_argument("--bases", default="adam,heavy-ball", help="with commas between")
    parser.add_argument("--steps", type=int, default=None, help="of the base before; FOSI's warm-up where not given")
    parser.add_argument("--data-dir", type=Path, default=None, help="folder with the datasets")
    parser.add_argument("--count", action="store_true", help="count what a refresh takes, for runs on another device")
    parser.add_argument("--alpha", type=float, default=None, help="of the runs that it is held against; the task's own")
    parser.add_argument("--tiny", action="store_true", help="made data, to try it")
    args = parser.parse_args(argv)
    begin = time.monotonic()
    others = {} if args.alpha is None else {"alpha": args.alpha}
    for name in args.tasks.split(","):
        task, _, mode = name.partition(":")
        problem: Problem | None = None  # the same for every base: images take longer to read than to diagnose
        for base in args.bases.split(","):
            jax.clear_caches()  # else a CPU's process runs out of memory maps after some dozen programs
            plan = Plan(task, base, mode=mode or None, tiny=args.tiny)
            try:
                problem = problem or plan.build(args.data_dir, False)
                said = foretell(plan, problem, args.out, args.steps, not args.count, others)
            except (ValueError, ImportError) as error:  # it diverged, or something is missing: the others are not lost
                said = f"nothing: {error}"
            print(f"{time.monotonic() - begin:5.0f} s  {name} {base}: {said}", flush=True)


if __name__ == "__main__":
    main()
