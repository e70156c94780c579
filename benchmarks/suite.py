"""Who is first where curvature rules? All optimizers on the tasks that are not the paper's, each with the same seconds.

One process, one run after another, so that each has the device alone, and programs that seeds share are compiled once.
Runs that are there are not made again; ``fosi report`` writes the tables of what is there::

    python -m benchmarks.suite --tasks wave,burgers --seconds 15 --out results
    python -m benchmarks.suite --tasks wave --ablation torch --seconds 30 --out results
    python -m benchmarks.suite --tasks wave --only adam-lbfgs,adam-fosi-lbfgs --seeds 0,1,2 --seconds 60 --out results
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax

from fosi.experiments.tasks import TASKS, runs, standings
from fosi.experiments.tasks.engine import Engine
from fosi.experiments.tasks.plan import Plan

AFTER = {"switch_at": 1000}
PAIRS = {"memory_size": 300}
GAUSS_NEWTON = {"operator": "gauss_newton"}
AROUND_LBFGS = {**AFTER, **PAIRS, **GAUSS_NEWTON}
LAYERS = {"memory_size": 20, "layers": 20, "switch_at": 20}
"""L-BFGS in coordinates of the layers, which are estimated every 20 steps. No direction is flatter than the rest there
by design, so that the usual scaling does as well as the other."""
SLOWLY = 0.25
"""What the rate of what comes before it is multiplied by: a training that was hurried ends in a worse place."""
IN_LAYERS = {**GAUSS_NEWTON, "scaling": "usual"}
"""FOSI around that, whose estimates come with those of the coordinates."""
LONGER = {"alpha": 0.1}
"""Ten times the preset's Newton step around Adam, which was the preset's own until it was seen to diverge."""


class Entry(NamedTuple):
    """An optimizer and its settings.

    Attributes:
      optimizer: its name.
      options: its settings, or FOSI's.
      rate_factor: multiplies its rate.
      curvature: what estimates are made on.
    """

    optimizer: str
    options: Mapping[str, Any] = MappingProxyType({})
    rate_factor: float = 1.0
    curvature: str = "fixed"


ENTRIES = (
    *(Entry("adam", rate_factor=factor) for factor in (0.1, 0.3, 1.0, 3.0, 10.0)),
    *(Entry("soap", rate_factor=factor) for factor in (0.3, 1.0, 3.0)),
    *(Entry("muon", rate_factor=factor) for factor in (0.1, 0.3, 1.0)),
    Entry("lbfgs", {"memory_size": 100}),
    Entry("lbfgs", PAIRS),
    Entry("adam-lbfgs", {**AFTER, **PAIRS}),
    Entry("adam-lbfgs", {**AFTER, **PAIRS, "scaling": "geometric"}),
    Entry("soap-lbfgs", {**AFTER, **PAIRS}),
    *(Entry("soap-lbfgs", {**PAIRS, "switch_at": at}) for at in (2000, 4000)),
    *(Entry("soap-lbfgs", {**PAIRS, "switch_at": at}, rate_factor=0.3) for at in (1000, 2000)),
    *(Entry("adam-lbfgs", {**PAIRS, "switch_at": at}) for at in (500, 2000)),
    *(Entry("adam-lbfgs", {**AFTER, **PAIRS}, rate_factor=factor) for factor in (0.3, 3.0)),
    *(Entry("soap-lbfgs", {**PAIRS, "switch_at": at, "scaling": "geometric"}) for at in (1000, 2000)),
    Entry("adam-newton-cg", AFTER),
    Entry("fosi-adam", curvature="part"),
    Entry("fosi-adam", LONGER, curvature="part"),
    Entry("fosi-adam", {**LONGER, "eps": 1.0}, curvature="part"),
    Entry("fosi-adam", {**LONGER, "k": 40, "num_matvecs": 60, "refresh_every": 100, "eps": 1.0}),
    Entry("fosi-lbfgs", {**PAIRS, **GAUSS_NEWTON}, curvature="part"),
    *(Entry("adam-fosi-lbfgs", {**AROUND_LBFGS, "switch_at": at}, curvature="part") for at in (500, 1000)),
    Entry("soap-fosi-lbfgs", AROUND_LBFGS, curvature="part"),
    *(Entry("soap-fosi-lbfgs", {**AROUND_LBFGS, "switch_at": at}, curvature="part") for at in (500, 2000, 2500)),
    Entry("adam-fosi-lbfgs", {**AFTER, **PAIRS}, curvature="part"),
    Entry("adam-fosi-lbfgs", AROUND_LBFGS),
)
"""What peers are tuned over, the controls, FOSI, and FOSI with one thing otherwise."""

OTHERWISE: tuple[Mapping[str, Any], ...] = (
    {},
    {"k": 10, "num_matvecs": 40},
    {"k": 20, "num_matvecs": 40},
    {"k": 80, "num_matvecs": 120},
    {"num_matvecs": 160},
    {"refresh_every": 50},
    {"refresh_every": 800},
    {"alpha": 0.1},
    {"accept": "all"},
    {"precision": "float64"},
    {"operator": "hessian"},
    {"scaling": "usual"},
    {"memory_size": 30},
)
"""FOSI around L-BFGS as ``fosi.presets.deterministic("lbfgs")`` has it, and with one thing otherwise."""

TWENTY = {**LONGER, "k": 20}
"""What the preset had when this was run; that 10 is better, and α = 0.01 as good, is what it showed."""

AROUND_ADAM: tuple[Mapping[str, Any], ...] = (
    {},
    LONGER,
    TWENTY,
    {**LONGER, "k": 40, "num_matvecs": 60},
    {**TWENTY, "refresh_every": 50},
    {**TWENTY, "refresh_every": 800},
    {"k": 20},
    {**TWENTY, "alpha": 0.5},
    {**TWENTY, "eps": 1.0},
    {**TWENTY, "accept": "all"},
    {**TWENTY, **GAUSS_NEWTON},
)
"""The same around Adam: as ``deterministic("adam")`` has it, with a longer step, and around twice as many pairs."""

OFTEN = {**LONGER, "refresh_every": 50, "warmup": 20}
AROUND_SOAP: tuple[Mapping[str, Any], ...] = (
    LONGER,
    OFTEN,
    {**OFTEN, "k": 40, "num_matvecs": 80},
    {**OFTEN, "k": 40, "num_matvecs": 80, "alpha": 0.3, **GAUSS_NEWTON},
    {**OFTEN, "ell": 10, "num_matvecs": 80},
)
"""Around SOAP: as ``deterministic("adam")`` had it; sooner and more often; of more pairs; of Gauss and Newton's matrix
with a longer step; of the smallest too."""

IN_TORCH: tuple[Mapping[str, Any], ...] = (
    {},
    GAUSS_NEWTON,
    {**GAUSS_NEWTON, "k": 20, "num_matvecs": 40},
    {**GAUSS_NEWTON, "refresh_every": 800},
)
"""Around L-BFGS in PyTorch, where a product takes longer: of either matrix, of fewer products, and less often."""

ABLATIONS = {
    "lbfgs": (
        *(Entry("soap-fosi-lbfgs", {**AROUND_LBFGS, **x}, curvature="part") for x in OTHERWISE),
        Entry("soap-fosi-lbfgs", AROUND_LBFGS),
        Entry("adam-fosi-lbfgs", AROUND_LBFGS, curvature="part"),
        Entry("soap-lbfgs", {**AFTER, **PAIRS}),
        Entry("soap-lbfgs", {**AFTER, **PAIRS, "scaling": "geometric"}),
    ),
    "adam": (
        *(Entry("fosi-adam", x, curvature="part") for x in AROUND_ADAM),
        Entry("fosi-adam", TWENTY),
        Entry("adam"),
    ),
    "autoencoder": (
        *(Entry(name, rate_factor=factor) for name in ("adam", "soap", "muon") for factor in (1.0, 3.0)),
        Entry("soap", rate_factor=10.0),
        Entry("kfac", {"min_damping": 1e-8}),
        Entry("fosi-adam", curvature="part"),
        *(Entry("fosi-adam", LONGER, rate_factor=factor, curvature="part") for factor in (1.0, 3.0)),
        *(Entry("fosi-soap", x, rate_factor=3.0, curvature="part") for x in AROUND_SOAP),
        *(
            Entry(name, {"memory_size": 100, "switch_at": 200, **x}, rate_factor=factor, curvature=curvature)
            for factor in (1.0, 3.0)
            for name, x, curvature in (("soap-lbfgs", {}, "fixed"), ("soap-fosi-lbfgs", GAUSS_NEWTON, "part"))
        ),
        Entry("soap-fosi-lbfgs", {"memory_size": 100, "switch_at": 50, **GAUSS_NEWTON}, curvature="part"),
    ),
    "layers": (
        *(
            Entry("soap-fosi-lbfgs", {**LAYERS, **IN_LAYERS, "k": k, "num_matvecs": m}, SLOWLY, "part")
            for k, m in ((5, 8), (10, 15))
        ),
        Entry("soap-lbfgs", LAYERS, SLOWLY, "part"),
        *(Entry("soap", rate_factor=factor) for factor in (3.0, 1.0)),
        Entry("kfac", {"min_damping": 1e-8}),
        Entry("soap-lbfgs", {"memory_size": 100, "switch_at": 20}, SLOWLY),
    ),
    "first-leg": (
        Entry("soap-lbfgs", LAYERS, SLOWLY, "part"),
        *(
            Entry("soap-lbfgs", {**LAYERS, **x}, factor, "part")
            for factor, x in (
                (SLOWLY, {"scaling": "geometric"}),
                (SLOWLY, {"layers": 50, "memory_size": 50}),
                (0.5, {"switch_at": 50}),
                (1.0, {"switch_at": 50}),
                (1.0, {}),
            )
        ),
    ),
    "pairs": (
        *(
            Entry("fosi-lbfgs", {**GAUSS_NEWTON, "memory_size": size, "k": k, "num_matvecs": m}, curvature="part")
            for size, k, m in ((300, 200, 300), (300, 100, 150), (100, 400, 600), (100, 200, 300), (100, 100, 150))
        ),
        Entry("fosi-lbfgs", {**GAUSS_NEWTON, "memory_size": 100}, curvature="part"),
        *(Entry("lbfgs", {"memory_size": size}) for size in (300, 100)),
        Entry("lbfgs", {"memory_size": 300, "scaling": "geometric"}),
        Entry("kfac", {"min_damping": 1e-8}),
    ),
    "torch": (
        Entry("adam"),
        Entry("fosi-adam", curvature="part"),
        *(Entry("adam-lbfgs", {**AFTER, **PAIRS, **x}) for x in ({}, {"code": "torch"}, {"scaling": "geometric"})),
        *(Entry("adam-fosi-lbfgs", {**AFTER, **PAIRS, **x}, curvature="part") for x in IN_TORCH),
    ),
    "switch": tuple(
        entry
        for first in ("adam", "soap")
        for at in (100, 300, 500, 1000, 2000)
        for entry in (
            Entry(f"{first}-fosi-lbfgs", {**AROUND_LBFGS, "switch_at": at}, curvature="part"),
            Entry(f"{first}-lbfgs", {**PAIRS, "switch_at": at}),
            Entry(f"{first}-lbfgs", {**PAIRS, "switch_at": at, "scaling": "geometric"}),
        )
    ),
}
"""By what FOSI is around; by what it and its peers make of ``deep-ae``, in coordinates of the layers, and with what
comes before those, or their settings, otherwise; by how many pairs FOSI and L-BFGS have, for ``softmax-full``; what of
it there is in PyTorch too; and by how long Adam or SOAP goes before, of which L-BFGS has the same choice."""


def plans(
    tasks: Sequence[str],
    entries: Sequence[Entry],
    seeds: Sequence[int],
    seconds: float,
    mode: str | None,
    backend: str = "jax",
) -> list[Plan]:
    """The runs, those that differ in nothing but their seed one after another."""
    return [
        Plan(
            task,
            entry.optimizer,
            seed,
            backend=backend,
            rate_factor=entry.rate_factor,
            curvature=entry.curvature,
            mode=mode,
            seconds=seconds,
            options=dict(entry.options),
        )
        for task in tasks
        for entry in entries
        for seed in seeds
    ]


def make(wanted: Sequence[Plan], out: Path, data_dir: Path | None, deadline: float, shared: bool = False) -> None:
    """Makes the runs that are not there, until so many seconds have passed, and prints a line each."""
    begin = time.monotonic()
    engine: tuple[Plan, Engine] | None = None
    for plan in wanted:
        if runs.is_done(plan, out):
            continue
        if time.monotonic() - begin > deadline:
            print(f"no time for {plan.task} {plan.name}", flush=True)
            continue
        problem = plan.build(data_dir, False)
        if engine is not None and engine[0] == plan.with_seed(engine[0].seed):
            engine[1].take(problem, plan.seed)
        else:
            jax.clear_caches()  # else a CPU's process runs out of memory maps after some dozen programs
            engine = (plan, plan.engine(problem))
        curve = runs.run(plan, problem, out, checkpoint_seconds=float("inf"), shared=shared, engine=engine[1])
        low, last = standings.lowest(curve), curve.points[-1]
        found = "no loss" if low is None else f"loss {low.train_loss:.2e}, {plan.of.metric} {low.metric:.2e}"
        took = f"{last.step} steps, {last.refreshes} refreshes in {last.seconds:.1f} s"
        print(f"{time.monotonic() - begin:5.0f} s  {plan.task} {plan.name}: {found}; {took}", flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    """Parses, and makes the runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("fosi-results"), help="folder for the results")
    known = ",".join(name for name, task in TASKS.items() if task.fosi is not None)
    parser.add_argument("--tasks", default=known, help="with commas between; all where not given")
    parser.add_argument("--only", default="", help="optimizers, with commas between; all where not given")
    parser.add_argument(
        "--ablation",
        choices=tuple(ABLATIONS),
        help="around which base, on an autoencoder, in layers, after what, by pairs, in PyTorch, or after how much",
    )
    parser.add_argument("--seeds", default="0", help="with commas between")
    parser.add_argument("--seconds", type=float, default=15.0, help="that each run is given")
    parser.add_argument("--mode", default=None, help="of the tasks, such as quick")
    parser.add_argument("--data-dir", type=Path, default=None, help="folder with the datasets")
    parser.add_argument("--deadline", type=float, default=float("inf"), help="seconds after which no run is begun")
    args = parser.parse_args(argv)
    only = [name for name in args.only.split(",") if name]
    known_entries = ENTRIES if args.ablation is None else ABLATIONS[args.ablation]
    if unknown := [name for name in only if name not in {entry.optimizer for entry in known_entries}]:
        parser.error(f"--only has {unknown[0]}; give of {', '.join(dict.fromkeys(e.optimizer for e in known_entries))}")
    entries = [entry for entry in known_entries if not only or entry.optimizer in only]
    seeds, backend = [int(x) for x in args.seeds.split(",")], "torch" if args.ablation == "torch" else "jax"
    wanted = plans(args.tasks.split(","), entries, seeds, args.seconds, args.mode, backend)
    make(wanted, args.out, args.data_dir, args.deadline)


if __name__ == "__main__":
    main()
