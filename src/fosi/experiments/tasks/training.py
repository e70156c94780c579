"""One training run on the clock: steps and refreshes are timed, evaluation and compiling are not."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fosi.experiments.tasks.engine import Engine


class Point(NamedTuple):
    """Where a run stands after a round.

    Attributes:
      step: steps taken.
      seconds: on the clock: steps and refreshes.
      train_loss: mean over the round's batches.
      metric: on the validation data.
      refreshes: made so far.
      refresh_seconds: how many of the seconds they took.
      lr_scale: FOSI's factor on the base's rate; 1 for a base.
      eigenvalues: of the pairs in use.
    """

    step: int
    seconds: float
    train_loss: float
    metric: float
    refreshes: int
    refresh_seconds: float
    lr_scale: float
    eigenvalues: tuple[float, ...]

    @property
    def diverged(self) -> bool:
        """Whether the round's loss is not a number any more."""
        return not math.isfinite(self.train_loss)


@dataclass
class Progress:
    """A run, and how far it has come.

    Attributes:
      run: what the engine trains.
      step: steps taken.
      seconds: on the clock.
      refreshes: made so far.
      refresh_seconds: how many of the seconds they took.
      curve: a point a round.
    """

    run: Any
    step: int = 0
    seconds: float = 0.0
    refreshes: int = 0
    refresh_seconds: float = 0.0
    curve: list[Point] = field(default_factory=list)

    @property
    def round(self) -> int:
        """Rounds done."""
        return len(self.curve)

    @property
    def diverged(self) -> bool:
        """Whether the last round's loss is not a number any more."""
        return bool(self.curve) and self.curve[-1].diverged


def start(engine: Engine) -> Progress:
    """A run before its first step."""
    return Progress(engine.start())


def train(engine: Engine, progress: Progress, rounds: int, seconds: float = math.inf) -> Iterator[Point]:
    """Trains on until so many rounds are done, the clock shows so many seconds or it diverged; yields after a round."""
    while progress.round < rounds and progress.seconds < seconds and not progress.diverged:
        order = engine.order(progress.round)
        total, at = 0.0, 0
        while at < engine.steps_a_round:
            if engine.due(progress.step):
                begin = time.perf_counter()
                progress.run = engine.refresh(progress.run, order, at)
                took = time.perf_counter() - begin
                progress.seconds += took
                progress.refresh_seconds += took
                progress.refreshes += 1
            stop = _next_stop(engine, progress.step, at)
            begin = time.perf_counter()
            progress.run, part = engine.advance(progress.run, order, at, stop)
            progress.seconds += time.perf_counter() - begin
            progress.step += stop - at
            total, at = total + part, stop
        metric = engine.validate(progress.run)
        estimate = engine.estimate(progress.run)
        progress.curve.append(
            Point(
                progress.step,
                progress.seconds,
                total / engine.steps_a_round,
                metric,
                progress.refreshes,
                progress.refresh_seconds,
                *estimate,
            )
        )
        yield progress.curve[-1]


def _next_stop(engine: Engine, step: int, at: int) -> int:
    """The end of the round, or the next step before which an estimate is due."""
    rest = range(1, engine.steps_a_round - at)
    return next((at + ahead for ahead in rest if engine.due(step + ahead)), engine.steps_a_round)
