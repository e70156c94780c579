"""How long base and FOSI must be trained side by side until it shows which is sooner: a measure for any prediction."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fosi.experiments.tasks.ratios import Ratio
from fosi.experiments.tasks.runs import Curve
from fosi.experiments.tasks.standings import Entry
from fosi.experiments.tasks.training import Point

SHARES = (0.03, 0.1, 0.2, 0.5)
"""Of the seconds of the base's whole run, that a race is given."""


def race(ours: Entry, alone: Entry, share: float) -> Ratio | None:
    """FOSI's seconds over the base's from the first estimate on, to the lowest loss that both come to in so long.

    Args:
      ours: FOSI's runs.
      alone: those of its base.
      share: of the seconds of the base's whole run, after which the race is over.

    Returns:
      The ratio over the seeds that both have; None where no seed has a round of both in there.
    """
    cuts = {seed: found for seed, curve in ours.runs.items() for found in _cut(curve, alone.runs.get(seed), share)}
    first = replace(ours, runs={seed: cut[0] for seed, cut in cuts.items()})
    return first.ratio_to_both(replace(alone, runs={seed: cut[1] for seed, cut in cuts.items()}))


def _cut(ours: Curve, alone: Curve | None, share: float) -> Iterator[tuple[Curve, Curve]]:
    """The two runs between the last round before an estimate and the race's end, on a clock that starts there."""
    before = [point for point in ours.points if point.refreshes == 0]
    if alone is None or len(before) == len(ours.points):
        return
    step, length = before[-1].step if before else 0, share * alone.points[-1].seconds
    found = tuple(replace(curve, points=_between(curve.points, step, length)) for curve in (ours, alone))
    if all(curve.points for curve in found):
        yield found[0], found[1]


def _between(points: tuple[Point, ...], step: int, length: float) -> tuple[Point, ...]:
    start = max((point.seconds for point in points if point.step <= step), default=0.0)
    later = (point._replace(seconds=point.seconds - start) for point in points if point.step > step)
    return tuple(point for point in later if point.seconds <= length)
