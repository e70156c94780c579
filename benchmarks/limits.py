"""How many directions stand at the limit of a base? The sharpest as it sees them, on tasks that it has trained a while.

`fosi report` draws what is there::

    python -m benchmarks.limits --tasks wave,deep-ae:quick --bases adam,soap --steps 500 --data-dir data --out results
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

import jax

from fosi.experiments.tasks import diagnosing, limits, probing
from fosi.experiments.tasks.plan import Plan


def main(argv: Sequence[str] | None = None) -> None:
    """Parses, trains, and measures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("fosi-results"), help="folder for the results")
    parser.add_argument("--tasks", required=True, help="with commas between; TASK:MODE for a mode of one")
    parser.add_argument("--bases", default="adam", help=f"with commas between, of {', '.join(limits.KNOWN)}")
    parser.add_argument("--steps", type=int, required=True, help="of the base before")
    parser.add_argument("--rate-factor", type=float, default=1.0, help="multiplies its rate")
    parser.add_argument("--data-dir", type=Path, default=None, help="folder with the datasets")
    parser.add_argument("--tiny", action="store_true", help="made data, to try it")
    args = parser.parse_args(argv)
    begin = time.monotonic()
    for name in args.tasks.split(","):
        task, _, mode = name.partition(":")
        for base in args.bases.split(","):
            jax.clear_caches()  # else a CPU's process runs out of memory maps after some dozen programs
            plan = Plan(task, base, mode=mode or None, rate_factor=args.rate_factor, tiny=args.tiny)
            probe = probing.train(plan, plan.build(args.data_dir, False), steps=args.steps, known=limits.KNOWN)
            found = limits.measure(probe)
            diagnosing.write(args.out / task / limits.FILE, "limits", probe, found)
            of_limit = [value / found["limit"] for value in found["eigenvalues"]]
            seen = ", ".join(f"{of_limit[n]:.3f}" for n in (0, 1, 4, *limits.AT) if n < len(of_limit))
            print(
                f"{time.monotonic() - begin:5.0f} s  {name} {base} after {args.steps}: {seen} of the limit", flush=True
            )


if __name__ == "__main__":
    main()
