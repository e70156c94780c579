"""What does `fosi diagnose` say of every task? All of them from one process, timed where they run, or counted.

`fosi report` then holds them against what was measured::

    python -m benchmarks.foretell --data-dir data --out results
    python -m benchmarks.foretell --tasks wave,burgers --bases adam --out results
    python -m benchmarks.foretell --tasks wave::82 --bases adam --race 0.2 --only-race --seeds 7,8,9 --out results
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax

from fosi.experiments.tasks import TASKS, diagnosing, probing, race
from fosi.experiments.tasks.plan import Plan
from fosi.experiments.tasks.task import Problem

BATCHES = 4
"""Enough to tell noise from signal; the curvature is of one, as FOSI's estimates are."""


def foretell(
    plan: Plan,
    problem: Problem,
    out: Path,
    steps: int | None = None,
    timed: bool = True,
    share: float = 0.0,
    only_race: bool = False,
    others: Mapping[str, Any] = MappingProxyType({}),
) -> str:
    """Diagnoses one base on one task as `fosi diagnose` does, writes it beside the task's runs, and says it in a line.

    With the pairs, the products and the T that FOSI has on the task, where a race of this share of the run has left the
    base, or where FOSI would make its first estimate. A report holds it against runs with the task's own settings of
    FOSI, or with these others; and races of seeds that those runs have not, which are on disk, too.
    """
    plan, own = diagnosing.own(plan, problem)
    if share:
        held = race.hold(plan, problem, out, share)
        if only_race:
            return f"{held.ratio.median:.2f} in a race of {held.alone.points[-1].step} steps"
        probe = probing.after(held, plan, problem) if steps is None else probing.train(plan, problem, steps=steps)
        own["raced"] = held.ratio.median
    else:
        ours = replace(plan, optimizer=f"fosi-{plan.optimizer}").engine(problem)
        assert ours.schedule is not None
        probe = probing.train(plan, problem, steps=ours.schedule.warmup if steps is None else steps)
    found = diagnosing.diagnose(probe, BATCHES, curvature_batches=1, timed=timed, **own)
    record = found.record() | ({"fosi_settings": dict(others)} if others else {})
    diagnosing.write(out / plan.task / "diagnosis.jsonl", "diagnose", probe, record)
    raced = "" if found.raced is None else f"raced {found.raced:.2f}; "
    seen = ", ".join(f"{name} {value:.2f}" for name, value in found.features.items())
    counts = f"{found.used} of {found.k} pairs, {found.of_limit:.2g} of the limit"
    return f"after {probe.step} steps: {raced}predicted {found.ratio:.2f}; {counts}; {seen}"


def main(argv: Sequence[str] | None = None) -> None:
    """Parses, and diagnoses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("fosi-results"), help="folder for the results")
    said = "with commas between; TASK:MODE for a mode of one, TASK:MODE:ROUNDS for a run so long"
    parser.add_argument("--tasks", default=",".join(TASKS), help=said)
    parser.add_argument("--bases", default="adam,heavy-ball", help="with commas between")
    parser.add_argument("--seeds", default="0", help="with commas between")
    parser.add_argument("--race", type=float, default=0.0, help="train base and FOSI side by side for this part first")
    parser.add_argument("--only-race", action="store_true", help="which is on disk then, and look at nothing after it")
    parser.add_argument("--steps", type=int, default=None, help="of the base before; else the race, or FOSI's warm-up")
    parser.add_argument("--data-dir", type=Path, default=None, help="folder with the datasets")
    parser.add_argument("--count", action="store_true", help="count what a refresh takes, for runs on another device")
    parser.add_argument("--alpha", type=float, default=None, help="of the runs that it is held against; the task's own")
    parser.add_argument("--deadline", type=float, default=math.inf, help="seconds after which none is begun")
    parser.add_argument("--tiny", action="store_true", help="made data, to try it")
    args = parser.parse_args(argv)
    if args.only_race and not args.race:
        parser.error("--only-race wants --race, the part of the run: 0.2")
    if args.race:
        race.check(args.race)
    begin = time.monotonic()
    others = {} if args.alpha is None else {"alpha": args.alpha}
    for seed in (int(x) for x in args.seeds.split(",")):
        for name in args.tasks.split(","):
            task, mode, rounds = [*name.split(":"), "", ""][:3]
            plan = Plan(task, "adam", seed, mode=mode or None, rounds=int(rounds) if rounds else None, tiny=args.tiny)
            problem: Problem | None = None  # the same for every base: images take longer to read than to diagnose
            for base in args.bases.split(","):
                took = time.monotonic() - begin
                if took > args.deadline:
                    print(f"{took:5.0f} s  no time for {name} {base}, seed {seed}", flush=True)
                    continue
                jax.clear_caches()  # else a CPU's process runs out of memory maps after some dozen programs
                try:
                    problem = problem or plan.build(args.data_dir, False)
                    around = replace(plan, optimizer=base)
                    said = foretell(
                        around, problem, args.out, args.steps, not args.count, args.race, args.only_race, others
                    )
                except (ValueError, ImportError) as error:  # it diverged, or something is missing: others are not lost
                    said = f"nothing: {error}"
                print(f"{time.monotonic() - begin:5.0f} s  {name} {base}, seed {seed}: {said}", flush=True)


if __name__ == "__main__":
    main()
