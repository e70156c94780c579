"""How much of the time to a best accuracy is chance? Transfer learning on cached features, looked at more often.

The paper's target is the best of all accuracies of the base. Accuracies of 10,000 images differ by a few from one look
to the next, so the best of twenty is a lottery, and of a hundred more so. The mean over the last epoch's five looks is
less of one. Steps to either, of Adam and of FOSI on Adam, from the same runs.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks import common
from fosi.experiments.tasks import TASKS, training
from fosi.experiments.tasks.jax_engine import JaxEngine
from fosi.experiments.tasks.task import Problem

LOOKS = 5
EPOCHS = 20


class OftenLooked(JaxEngine):
    """Rounds of a fifth of an epoch, in the epoch's own order."""

    def order(self, index: int) -> jax.Array:
        """The batches of a round."""
        whole = super().order(index // LOOKS)
        steps = len(whole) // LOOKS
        return whole[index % LOOKS * steps :][:steps]


def accuracies(problem: Problem, optimizer: str, seed: int) -> list[tuple[int, float]]:
    """Steps taken and the accuracy then, of one run."""
    # The first estimate after one epoch, as everywhere on this task: the engine would take a round for one.
    options = {"warmup": len(problem.order(jax.random.key(0)))} if optimizer.startswith("fosi-") else {}
    engine = OftenLooked(TASKS["tl"], problem, optimizer, seed, **options)
    engine.compile()
    run = training.start(engine)
    return [(point.step, point.metric) for point in training.train(engine, run, EPOCHS * LOOKS)]


def smoothed(looks: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """The mean over the last epoch."""
    values = np.convolve([accuracy for _, accuracy in looks], np.ones(LOOKS) / LOOKS, "valid")
    return [(step, float(value)) for (step, _), value in zip(looks[LOOKS - 1 :], values, strict=True)]


def steps_to(looks: Sequence[tuple[int, float]], target: float) -> int | None:
    """When it is first reached."""
    return next((step for step, accuracy in looks if accuracy >= target), None)


def measure(data: Path, seeds: int) -> list[dict[str, Any]]:
    """One row a seed."""
    rows = []
    for seed in range(seeds):
        problem = TASKS["tl"].build(data, False, seed, False, mode="cached")
        base, ours = (accuracies(problem, name, seed) for name in ("adam", "fosi-adam"))
        row: dict[str, Any] = {"task": "tl", "seed": seed}
        for name, look in (("best", list), ("mean", smoothed)):
            target = max(accuracy for _, accuracy in look(base))
            row |= {f"{name}_target": target, f"{name}_adam": steps_to(look(base), target)}
            row |= {f"{name}_fosi": steps_to(look(ours), target)}
        rows.append(row)
        print(row, flush=True)
    return rows


def main() -> None:
    """Measures, prints and records."""
    parser = common.parser(__doc__.splitlines()[0])
    parser.add_argument("--data-dir", type=Path, required=True, help="the folder with the datasets")
    parser.add_argument("--seeds", type=int, default=7)
    asked = parser.parse_args()
    rows = measure(asked.data_dir, asked.seeds)
    shown = [
        [row["seed"], *(row[f"{x}_{y}"] for x in ("best", "mean") for y in ("target", "adam", "fosi"))] for row in rows
    ]
    columns = ["seed", "best", "Adam", "FOSI-Adam", "mean over an epoch", "Adam", "FOSI-Adam"]
    common.table("Steps to the best accuracy of Adam, and to its best mean over an epoch", columns, shown)
    for name in ("best", "mean"):
        middle = [statistics.median(row[f"{name}_{x}"] or np.inf for row in rows) for x in ("adam", "fosi")]
        print(f"{name}: median of Adam {middle[0]:g}, of FOSI-Adam {middle[1]:g}, ratio {middle[1] / middle[0]:.2f}")
    common.record(asked.out, "target_noise", rows)


if __name__ == "__main__":
    main()
