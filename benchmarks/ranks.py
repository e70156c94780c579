"""What do the choices behind a predicted ratio do to the ranks of the tasks? From the results alone, in seconds.

Each line is Spearman's correlation over tasks of predicted and measured: by a rule fitted to the other tasks, and by
the coefficients that one would expect (after a race: by that alone). `docs/diagnose.md` has the table::

    python -m benchmarks.ranks results
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np

from fosi import diagnosis, prediction, stability
from fosi.experiments import records
from fosi.experiments.tasks import predictions
from fosi.experiments.tasks.plan import Plan
from fosi.experiments.tasks.predictions import Pair
from fosi.experiments.tasks.race import SHARES

DRAWS = 2000
RUNS = {"adam": 0.37, "heavy-ball": 0.23}
"""What FOSI adds to a step of `lr`, refreshes and all, in its runs on the H200; its diagnosis counts it."""


def known(where: Path, pair: Pair) -> list[diagnosis.Diagnosis]:
    """All diagnoses of the pair, in the order of their steps, as long before the end of the base's run as they were."""
    found = []
    for line in records.read_jsonl(where / pair.task / "diagnosis.jsonl"):
        plan = Plan(**line["plan"])
        same = (plan.other_mode, plan.optimizer) == (pair.mode, pair.base) and plan.rate_factor == 1
        if same and bool(line.get("fosi_settings")) == bool(pair.settings):
            steps = {"steps_left": max(pair.after[1] - line["step"], 1), "steps_taken": max(line["step"], 1)}
            found.append((line["step"], replace(diagnosis.from_record(line), **steps)))
    return [one for _, one in sorted(found, key=lambda some: some[0])]


def again(
    where: Path, found: Sequence[Pair], features: Callable[[list[diagnosis.Diagnosis]], dict[str, float]]
) -> list[Pair]:
    """The pairs with other features."""
    return [pair._replace(features=features(known(where, pair))) for pair in found]


def line(name: str, found: Sequence[Pair], ratios: Sequence[float] | None = None) -> str:
    """What the ranks are, in a line."""
    measured = [pair.ratio for pair in found] if ratios is None else ratios
    features, names = [pair.features for pair in found], [pair.task for pair in found]
    fitted = prediction.leave_one_out(features, measured, groups=names)
    told = prediction.TOLD if any(prediction.RACED in one for one in features) else prediction.PHYSICAL
    expected = np.array([prediction.predict(one, told) for one in features])
    truth = predictions.by_task(found, measured)
    said = [
        prediction.spearman([*predictions.by_task(found, one).values()], [*truth.values()])
        for one in (fitted, expected)
    ]
    return f"{name:60} {said[0]:5.2f} {said[1]:5.2f}   {len(truth)} tasks, {len(found)} pairs"


def drawn(found: Sequence[Pair]) -> str:
    """How the fitted rule ranks them where each has one race, at random of those that it has."""
    rng, ranks = np.random.default_rng(0), []
    for _ in range(DRAWS):
        held = [pair._replace(held={0: float(rng.choice(list(pair.held.values())))}) for pair in found]
        ran = predictions.raced(held)
        truth, said = predictions.measured_ratios(ran), predictions.predicted(ran)
        both = [list(predictions.by_task(ran, some).values()) for some in (said, truth)]
        ranks.append(prediction.spearman(*both))
    low, high = np.quantile(ranks, (0.05, 0.95))
    enough = np.mean(np.array(ranks) >= 0.7)
    return f"mean {np.mean(ranks):.2f}, nine tenths from {low:.2f} to {high:.2f}, 0.7 or more in {enough:.0%}"


def main(argv: Sequence[str] | None = None) -> None:
    """Parses, and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("where", type=Path, help="folder with the results")
    where = parser.parse_args(argv).where
    found = predictions.pairs(where)
    print(line("as it is", found))
    for device in sorted({pair.device for pair in found}):
        print(line(f"on {device} alone", [pair for pair in found if pair.device == device]))
    paper = {pair.task for pair in found} - {pair.task for pair in found if pair.device == "cpu"}
    print(line("small ones alone, where there are", [p for p in found if p.device == "cpu" or p.task in paper]))
    never = [2.0 if pair.target.misses * 2 > pair.target.seeds else pair.target.median for pair in found]
    print(line("a target that is never reached counts 2", found, never))
    overheads = [
        pair._replace(features={**pair.features, "overhead": math.log1p(RUNS[pair.base])})
        if pair.task == "lr"
        else pair
        for pair in found
    ]
    print(line("lr with the overhead of its runs", overheads))
    for constant in (10.0, 20.0, 100.0, 200.0):
        with mock.patch.object(stability, "_BEARABLE", constant):
            print(line(f"noise: c / (c + {constant:g})", again(where, found, lambda some: some[-1].features)))
    print(
        line("as if Adam forgot at once", again(where, found, lambda some: replace(some[-1], steps_left=None).features))
    )
    print(line("the first diagnosis of each", again(where, found, lambda some: some[0].features)))
    for task in dict.fromkeys(pair.task for pair in found):
        print(line(f"without {task}", [pair for pair in found if pair.task != task]))
    print(line("Adam alone", [pair for pair in found if pair.base == "adam"]))
    ran = predictions.raced(found)
    if ran:
        print(line("after a race held apart, the median of its seeds", ran))
        for device in sorted({pair.device for pair in ran}):
            print(line(f"after a race held apart on {device} alone", [p for p in ran if p.device == device]))
    for task in dict.fromkeys(pair.task for pair in ran):
        print(line(f"after a race held apart, without {task}", [pair for pair in ran if pair.task != task]))
    for device in ("", *sorted({pair.device for pair in ran})):
        some = [pair for pair in ran if device in ("", pair.device)]
        print(f"one race of each pair, drawn {DRAWS} times{f', on {device} alone' if device else ''}: {drawn(some)}")
    for seed in predictions.seeds(ran):
        print(line(f"after a race held apart, seed {seed} alone", predictions.raced(found, seed)))
        for device in sorted({pair.device for pair in ran}):
            some = [pair for pair in predictions.raced(found, seed) if pair.device == device]
            print(line(f"after a race held apart, seed {seed} alone, on {device} alone", some))
    for share in SHARES:
        print(line(f"after the first {share:.0%} of the runs themselves", predictions.begun(found, share)))


if __name__ == "__main__":
    main()
