"""How far do steps keep falling as batches grow? Each optimizer at several rates in batches of several sizes.

All see as many examples. FOSI's estimates come at the same examples in every size, on as many as the task's own batches
have, so that they cost the same share of the work; its α is raised with the rate, or kept. Runs that are there are not
made again; ``fosi report`` writes the tables of what is there::

    python -m benchmarks.batches --tasks lm --sizes 256,1024 --rates 1,3,10 --out results
    python -m benchmarks.batches --tasks lm --only fosi-adam --rates 3,10 --keep-alpha --out results
    python -m benchmarks.batches --tasks lm,ac --best --seeds 1,2 --shared --out results
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks.suite import make
from fosi import presets, schedule
from fosi.experiments.tasks import TASKS, settings, standings, summary, sweeps
from fosi.experiments.tasks.plan import Plan
from fosi.experiments.tasks.runs import Curve

SIZES = {"lm": (32, 256, 1024), "ac": (256, 1024, 4096)}
"""The task's own first."""
PAPER = presets.paper()
EVERY = schedule.refresh_interval(4 * PAPER["k"], PAPER["overhead"])
"""Steps between two estimates in the task's own batches, of as many products as FOSI makes for so many pairs."""
OPTIMIZERS = ("heavy-ball", "fosi-heavy-ball", "adam", "fosi-adam")


def plan(
    task: str,
    optimizer: str,
    size: int,
    rate: float,
    seed: int,
    rounds: int | None = None,
    keep_alpha: bool = False,
) -> Plan:
    """One run.

    Args:
      task: its name.
      optimizer: its name.
      size: of the batches.
      rate: multiplies the base's rate.
      seed: of weights and batches.
      rounds: fewer than as many examples as the task's own take, to time it.
      keep_alpha: FOSI's is the paper's; else multiplied by the rate too.
    """
    own = TASKS[task].batch_size
    options = {}
    if settings.with_fosi(optimizer):
        if size != own:
            options["refresh_every"] = max(1, round(EVERY * own / size))
        if rate != 1 and not keep_alpha:
            options["alpha"] = rate * PAPER["alpha"]
    curvature = "own" if options.get("refresh_every") else "fixed"  # which in the task's own batches are the same
    return Plan(
        task,
        optimizer,
        seed,
        rate_factor=rate,
        curvature=curvature,
        batch_size=size,
        rounds=rounds,
        options=options,
    )


def best(task: str, curves: Sequence[Curve], seeds: Sequence[int]) -> list[Plan]:
    """What is best for each optimizer and size of the runs that are there, for either goal, with other seeds."""
    of = TASKS[task]
    found: dict[str, Plan] = {}
    for goal in sweeps.GOALS:
        for sweep in sweeps.sweeps(of, curves, goal):
            for curve in curves:
                plan = curve.plan
                cell = sweep.best.get(plan.batch_size or of.batch_size)
                is_it = cell is not None and standings.words(curve, plan.length) == cell.settings
                if plan.optimizer == sweep.optimizer and plan.length == of.rounds_in(plan.batch_size) and is_it:
                    found[plan.with_seed(0).name] = plan
    return [plan.with_seed(seed) for _, plan in sorted(found.items()) for seed in seeds]


def main(argv: Sequence[str] | None = None) -> None:
    """Parses, and makes the runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("fosi-results"), help="folder for the results")
    parser.add_argument("--tasks", default=",".join(SIZES), help="with commas between")
    parser.add_argument("--sizes", default="", help="of batches, with commas between; else the task's own and larger")
    parser.add_argument("--only", default=",".join(OPTIMIZERS), help="optimizers, with commas between")
    parser.add_argument("--rates", default="1,3,10", help="times the optimizer's own, with commas between")
    parser.add_argument("--keep-alpha", action="store_true", help="FOSI's α is not raised with the rate")
    parser.add_argument("--best", action="store_true", help="not these rates but the best of the runs that are there")
    parser.add_argument("--seeds", default="0", help="with commas between")
    parser.add_argument("--rounds", type=int, default=None, help="fewer than the task's, to time it")
    parser.add_argument("--data-dir", type=Path, default=None, help="folder with the datasets")
    parser.add_argument("--deadline", type=float, default=float("inf"), help="seconds after which no run is begun")
    parser.add_argument("--shared", action="store_true", help="other work shares the device: only steps count")
    args = parser.parse_args(argv)
    seeds = [int(x) for x in args.seeds.split(",")]
    only = args.only.split(",")
    wanted: list[Plan] = []
    for task in args.tasks.split(","):
        sizes = [int(x) for x in args.sizes.split(",")] if args.sizes else SIZES[task]
        if args.best:
            known = best(task, summary.curves(args.out / task), seeds)
            wanted += [x for x in known if x.optimizer in only and (x.batch_size or TASKS[task].batch_size) in sizes]
        else:
            wanted += [
                plan(task, optimizer, size, rate, seed, args.rounds, args.keep_alpha)
                for size in sizes
                for rate in (float(x) for x in args.rates.split(","))
                for optimizer in only
                for seed in seeds
            ]
    make(wanted, args.out, args.data_dir, args.deadline, args.shared)


if __name__ == "__main__":
    main()
