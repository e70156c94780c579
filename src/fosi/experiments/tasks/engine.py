"""What trains: an optimizer on a problem, compiled, in one framework or the other. The loop and the clock drive it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from fosi.schedule import Schedule

Run = Any
"""All that a training changes: parameters, the model's state, the optimizer's. Its form is the engine's own."""

Curvature = Callable[[Any, Any, int, int], list[Any]]
"""curvature(first, order, index, own) -> the examples of each batch that an estimate before step ``index`` of the round
``order`` is made on; ``first`` is the order of the first round, ``own`` how many examples the task's own batch has."""


def quarter(count: int) -> int:
    """A quarter of so many, one at least."""
    return -(-count // 4)


def least_seconds(work: Callable[[], None]) -> float:
    """The least of three times that the work takes, after one that compiles it, or in which libraries load."""
    work()
    times = []
    for _ in range(3):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return min(times)


CURVATURES: dict[str, Curvature] = {
    "fixed": lambda first, order, index, own: [first[0]],
    "current": lambda first, order, index, own: [order[index]],
    "larger": lambda first, order, index, own: [first[:4].reshape(-1)],
    "average": lambda first, order, index, own: [order[(index + ahead) % len(order)] for ahead in range(4)],
    "part": lambda first, order, index, own: [first[0][: quarter(len(first[0]))]],
    "own": lambda first, order, index, own: [first[0][:own]],
}
"""One batch for all estimates, as in the paper; the one about to be trained on; one for all of four times the size; the
mean over the one about to be trained on and the three after it; a quarter of the first, or of all where every batch is
all of the data (the problem's own ``part``); as much of the first as the task's own batches have, so that in larger
ones an estimate costs no more."""


def curvature(name: str, own: int) -> Callable[[Any, Any, Any, int], list[Any]]:
    """Returns what gives the batches that an estimate is made on, for a problem and a step of a round.

    Args:
      name: one of ``CURVATURES``.
      own: how many examples the task's own batches have.
    """
    if name not in CURVATURES:
        raise ValueError(f"curvature is {name!r}; give one of {', '.join(CURVATURES)}")

    def batches(problem: Any, first: Any, order: Any, index: int) -> list[Any]:
        if name == "part" and problem.part is not None:
            return [problem.part(problem.data)]
        return [problem.batch(problem.data, indices) for indices in CURVATURES[name](first, order, index, own)]

    return batches


class Estimate(NamedTuple):
    """What FOSI works with at the moment.

    Attributes:
      lr_scale: its factor on the base's rate; 1 for a base.
      eigenvalues: of the pairs in use.
    """

    lr_scale: float = 1.0
    eigenvalues: tuple[float, ...] = ()


class Engine(Protocol):
    """Trains one problem with one optimizer. What ``advance`` and ``refresh`` return is computed, not under way.

    Attributes:
      backend: ``"jax"`` or ``"torch"``.
      rate: the base's learning rate.
      steps_a_round: steps in an epoch, or between two evaluations.
      looks: how many of its rounds are one of the others', whose steps are short.
      schedule: when estimates are due; None where there are none.
    """

    backend: str
    rate: float
    steps_a_round: int
    looks: int
    schedule: Schedule | None

    @property
    def device_name(self) -> str:
        """What it trains on."""

    def take(self, problem: Any, seed: int) -> None:
        """Goes over to the same task built with another seed: nothing that is compiled is compiled again."""

    def compile(self) -> None:
        """Compiles all that runs on the clock, and changes no run."""

    def start(self) -> Run:
        """The run before its first step."""

    def order(self, index: int) -> Any:
        """The batches of a round, on the device: the same whenever it is asked for."""

    def advance(self, run: Run, order: Any, start: int, stop: int) -> tuple[Run, float]:
        """Takes the steps of the round from ``start`` up to ``stop``; returns the run and the sum of their losses.

        The run that is passed in may be written over.
        """

    def due(self, step: int) -> bool:
        """Whether an estimate precedes this step."""

    def refresh(self, run: Run, order: Any, index: int) -> Run:
        """Estimates anew before step ``index`` of the round."""

    def validate(self, run: Run) -> float:
        """The metric on the validation data."""

    def estimate(self, run: Run) -> Estimate:
        """What FOSI works with."""

    def solution(self, run: Run) -> Mapping[str, Any] | None:
        """What the model has found, for a figure: arrays of one shape by name; None where it is nothing to draw."""

    def gradient_seconds(self) -> float:
        """How long one gradient of a batch takes, nothing else."""

    def peak_memory(self) -> int | None:
        """The most bytes that the process has held on the device; None where nobody counts them."""

    def dump(self, run: Run) -> bytes:
        """The run as bytes, for a checkpoint."""

    def load(self, raw: bytes) -> Run:
        """The run of such bytes."""
