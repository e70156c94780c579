"""Who is first where curvature rules: tuned optimizers by their lowest loss, and how soon FOSI has the best peer's."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fosi.experiments.tasks import settings
from fosi.experiments.tasks.ratios import Ratio
from fosi.experiments.tasks.runs import Curve
from fosi.experiments.tasks.summary import best, first
from fosi.experiments.tasks.training import Point

ASIDE = ("newton-cg",)
"""Where it stands is shown, but on a PINN it sets no target: that is first-order and quasi-Newton optimizers'."""

CONTROL = " (control)"

Published = Mapping[str, tuple[float, float]]
"""Loss and error by optimizer."""

PUBLISHED: dict[str, Published] = {
    "convection": {
        "adam": (1.4e-4, 6.0e-2),
        "lbfgs": (1.5e-5, 8.3e-3),
        "adam-lbfgs": (6.0e-6, 4.2e-3),
        "newton-cg": (3.6e-7, 1.9e-3),
    },
    "reaction": {
        "adam": (4.7e-6, 2.1e-2),
        "lbfgs": (8.9e-6, 3.8e-2),
        "adam-lbfgs": (3.3e-6, 1.9e-2),
        "newton-cg": (2.9e-7, 9.9e-3),
    },
    "wave": {
        "adam": (2.0e-2, 3.5e-1),
        "lbfgs": (1.8e-2, 3.4e-1),
        "adam-lbfgs": (1.1e-3, 5.5e-2),
        "newton-cg": (6.1e-5, 1.3e-2),
    },
}
"""Loss and error of Rathore et al. (ICML 2024), 41,000 steps, the best of their sweeps; newton-cg is their NysNewton-CG
after Adam and L-BFGS."""


@dataclass(frozen=True)
class Entry:
    """One optimizer with one setting, over its seeds.

    Attributes:
      optimizer: its name.
      settings: what is set otherwise than for the task, in words.
      runs: one a seed.
    """

    optimizer: str
    settings: str
    runs: Mapping[int, Curve]

    @property
    def control(self) -> bool:
        """Whether it is L-BFGS as it is inside FOSI, without FOSI's estimates: against it FOSI has its metric alone."""
        given = [curve.plan.options for curve in self.runs.values()]
        inside = any(options.get("scaling") == "geometric" or "layers" in options for options in given)
        return inside and not settings.with_fosi(self.optimizer)

    @property
    def name(self) -> str:
        """The optimizer's, and whether it is a control."""
        return f"{self.optimizer}{CONTROL}" if self.control else self.optimizer

    @property
    def loss(self) -> float | None:
        """The lowest training loss of a round, the median over the seeds; None where half of them have none."""
        return middle(best(curve.points, "train_loss", -1) for curve in self.runs.values())

    @property
    def metric(self) -> float | None:
        """The metric where the loss is lowest, the median over the seeds."""
        found = (lowest(curve) for curve in self.runs.values())
        return middle(None if point is None else point.metric for point in found)

    @property
    def typical(self) -> Curve:
        """The run with the median metric where the loss is lowest; the better of the two in the middle."""

        def metric(curve: Curve) -> float:
            point = lowest(curve)
            return math.inf if point is None else -curve.plan.of.sign * point.metric

        in_order = sorted(self.runs.values(), key=lambda curve: (metric(curve), curve.plan.seed))
        return in_order[(len(in_order) - 1) // 2]

    @property
    def seconds(self) -> float | None:
        """Of the whole run, the median over the seeds."""
        return middle(curve.points[-1].seconds for curve in self.runs.values())

    def seconds_to(self, loss: float) -> float | None:
        """When a round has a loss as low, the median over the seeds; None where half of them never have."""
        found = (reached(curve, loss) for curve in self.runs.values())
        return middle(None if point is None else point.seconds for point in found)

    def ratio(self, peer: Entry) -> Ratio | None:
        """Its seconds to the lowest loss of a peer over the peer's own, the same seed against the same seed.

        What never gets there is later than whatever does: infinite, and so is the median where half of them are.
        """
        return self._ratio(peer, lambda ours, theirs: theirs)

    def ratio_to_both(self, peer: Entry) -> Ratio | None:
        """The same to the lowest loss that both come to: where it never has the peer's, how much later it is.

        Infinite for a run that diverged, whatever it had before, and so is the median where half of them did.
        """
        return self._ratio(peer, max, to_the_end=True)

    def _ratio(self, peer: Entry, target: Callable[[float, float], float], to_the_end: bool = False) -> Ratio | None:
        found, misses = [], 0
        for seed, curve in self.runs.items():
            low, lowest_peer = lowest(curve), lowest(peer.runs[seed]) if seed in peer.runs else None
            if lowest_peer is None or not math.isfinite(lowest_peer.seconds):
                continue
            wanted = target(math.inf if low is None else low.train_loss, lowest_peer.train_loss)
            ours, theirs = reached(curve, wanted), reached(peer.runs[seed], wanted)
            if low is None or ours is None or (to_the_end and curve.done is not None and curve.done["diverged"]):
                misses += 1
            elif theirs is not None and math.isfinite(ours.seconds):
                found.append(ours.seconds / theirs.seconds)
        return Ratio.of(found, misses, math.inf)


class Kind(NamedTuple):
    """What runs must have in common to be compared.

    Attributes:
      tiny: whether on made data.
      mode: one of the task's modes; empty for its first.
      backend: of the runs.
      device: they ran on.
      seconds: that each was given; 0 where it was rounds.
    """

    tiny: bool
    mode: str
    backend: str
    device: str
    seconds: float

    @classmethod
    def of(cls, curve: Curve) -> Kind:
        """That of a run."""
        plan = curve.plan
        return cls(plan.tiny, plan.other_mode, plan.backend, curve.environment["device"], plan.seconds or 0.0)

    @property
    def words(self) -> str:
        """What is not as usual; nothing where all is."""
        return ", ".join([*self._names, *([f"{self.seconds:g} s"] if self.seconds else [])])

    @property
    def ending(self) -> str:
        """The same, for the end of a file's name."""
        return "".join(f"-{word}" for word in [*self._names, *([f"{self.seconds:g}s"] if self.seconds else [])])

    @property
    def _names(self) -> list[str]:
        said = ("tiny" if self.tiny else "", self.mode, "" if self.backend == "jax" else self.backend)
        return [word for word in said if word]


def kinds(curves: Iterable[Curve]) -> dict[Kind, list[Entry]]:
    """The finished runs of one task by what they have in common; tiny ones only where there are no others."""
    found: dict[Kind, list[Curve]] = {}
    for curve in curves:
        if curve.done is not None:
            found.setdefault(Kind.of(curve), []).append(curve)
    real = {kind: runs for kind, runs in found.items() if not kind.tiny} or found
    return {kind: entries(real[kind]) for kind in sorted(real)}


def entries(curves: Sequence[Curve]) -> list[Entry]:
    """The runs of one kind by optimizer and setting: those that are as long as the longest.

    What searches takes longer steps than the others, so it may have been given fewer rounds, or more. Runs that the
    clock ended are as long as each other.
    """
    even = [c.plan.length for c in curves if settings.is_first_order(c.plan.optimizer)]
    length = max(even or (c.plan.length for c in curves))
    found: dict[tuple[str, str], dict[int, Curve]] = {}
    for curve in curves:
        plan = curve.plan
        if plan.seconds is not None or plan.length == length or not settings.is_first_order(plan.optimizer):
            found.setdefault((plan.optimizer, words(curve, length)), {})[plan.seed] = curve
    return [Entry(*names, runs) for names, runs in found.items()]


def words(curve: Curve, length: int) -> str:
    """What is set otherwise than for the task, and how many rounds it has where that is not the length."""
    plan = curve.plan
    said = [f"{plan.rate_factor:g}× rate"] if plan.rate_factor != 1 else []
    said += [f"{name} {value}" for name, value in sorted(plan.options.items())]
    said += [f"estimates on {plan.curvature}"] if plan.curvature != "fixed" else []
    other = plan.rounds is not None if plan.seconds is not None else plan.length != length
    return ", ".join([*said, *([f"{plan.length} rounds"] if other else [])])


def tuned(known: Sequence[Entry]) -> dict[str, Entry]:
    """The setting of each optimizer with the lowest loss, by the optimizer's name, the lowest first; controls apart.

    Of those with as many seeds as any other of the same optimizer: one seed may be lucky.
    """
    seeds: dict[str, int] = {}
    for entry in known:
        seeds[entry.name] = max(seeds.get(entry.name, 0), len(entry.runs))
    able = [e for e in known if e.loss is not None and len(e.runs) == seeds[e.name]]
    found: dict[str, Entry] = {}
    for entry in sorted(able, key=lambda entry: entry.loss or 0.0):
        found.setdefault(entry.name, entry)
    return found


def best_peer(known: Sequence[Entry], aside: tuple[str, ...] = ()) -> Entry | None:
    """The optimizer other than FOSI, at its best setting, with the lowest loss; None where there is none.

    Args:
      known: the runs of one task.
      aside: ends of names that set no target.
    """
    peers = [e for name, e in tuned(known).items() if not settings.with_fosi(name) and not name.endswith(aside)]
    return next((entry for entry in peers if not entry.control), None)


def best_control(known: Sequence[Entry]) -> Entry | None:
    """The control with the lowest loss; None where there is none."""
    return next((entry for entry in tuned(known).values() if entry.control), None)


def lowest(curve: Curve) -> Point | None:
    """The round with the lowest loss; None where no loss is a number."""
    loss = best(curve.points, "train_loss", -1)
    return None if loss is None else first(curve.points, lambda point: point.train_loss == loss)


def reached(curve: Curve, loss: float) -> Point | None:
    """The first round with a loss as low."""
    return first(curve.points, lambda point: point.train_loss <= loss)


def middle(values: Iterable[float | None]) -> float | None:
    """The median; None where half of them are missing or not known."""
    known = [math.inf if value is None or math.isnan(value) else value for value in values]
    found = statistics.median(known) if known else math.inf
    return found if math.isfinite(found) else None
