"""One training run on the clock: steps and refreshes are timed, evaluation and compiling are not."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fosi.experiments.tasks import optimizers
from fosi.experiments.tasks.task import Problem, Task
from fosi.jax import FosiState


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
      accepted: eigenpairs in use.
      eigenvalues: of those.
    """

    step: int
    seconds: float
    train_loss: float
    metric: float
    refreshes: int
    refresh_seconds: float
    lr_scale: float
    accepted: int
    eigenvalues: tuple[float, ...]


@dataclass
class Progress:
    """All that a run needs to go on: arrays on the device, and the clock."""

    params: Any
    state: Any
    opt_state: Any
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
        return bool(self.curve) and not math.isfinite(self.curve[-1].train_loss)


class Trainer:
    """Trains one problem with one optimizer.

    Attributes:
      compile_seconds: what compiling took, beside the clock.
    """

    def __init__(
        self,
        task: Task,
        problem: Problem,
        name: str,
        seed: int,
        rate_factor: float = 1.0,
        curvature: Callable[[Problem, jax.Array, jax.Array], Any] | None = None,
        **options: Any,
    ) -> None:
        """Builds the optimizer and compiles nothing yet.

        Args:
          task: which.
          problem: the task, built.
          name: of the optimizer.
          seed: of the order of the batches.
          rate_factor: multiplies the base's learning rate.
          curvature: curvature(problem, fixed, current) -> the batch that estimates are made on, of the indices of one
            fixed batch and those of the current one; the fixed one where None, as in the paper.
          **options: FOSI's settings in the place of the paper's.
        """
        self.task, self.problem, self.seed = task, problem, seed
        self.key = jax.random.key(seed)
        self.first = problem.order(jax.random.fold_in(self.key, 0))
        self.steps_a_round = len(self.first)
        self.curvature = curvature or (lambda problem, fixed, current: problem.batch(problem.data, fixed))
        self.built = optimizers.build(name, task, self._loss, self.steps_a_round, rate_factor, **options)
        fosi = self.built.fosi
        self.schedule = None if fosi is None else fosi.schedule(problem.params)
        # XLA leaves convolutions inside a loop unoptimised on a CPU; on a GPU the loop saves the host's time a step.
        self.looped = jax.default_backend() != "cpu"
        self._steps = jax.jit(self._many if self.looped else self._one, donate_argnums=(0, 1, 2, 3))
        self.compile_seconds = 0.0

    def start(self) -> Progress:
        """The run before its first step."""
        params = jax.tree.map(jnp.copy, self.problem.params)  # steps write over theirs
        state = jax.tree.map(jnp.copy, self.problem.state)
        return Progress(params, state, self.built.transform.init(params))

    def compile(self) -> None:
        """Compiles all that runs on the clock, on copies."""
        begin = time.perf_counter()
        run = self.start()
        if self.built.fosi is not None:
            run.opt_state = self._refresh(run, self.first[0])
        jax.block_until_ready(self._advance(run, self.first, 0, min(2, self.steps_a_round)))
        jax.block_until_ready(self.problem.validate(self.problem.params, self.problem.state))
        self.compile_seconds = time.perf_counter() - begin

    def rounds(self, run: Progress, rounds: int) -> Iterator[Point]:
        """Trains on until so many rounds are done or it diverged; yields after each of them."""
        while run.round < rounds and not run.diverged:
            order = jax.block_until_ready(self.problem.order(jax.random.fold_in(self.key, run.round)))
            total, at = jnp.zeros(()), 0
            while at < self.steps_a_round:
                stop = self._next_stop(run.step, at)
                if self.schedule is not None and self.schedule.due(run.step):
                    begin = time.perf_counter()
                    run.opt_state = jax.block_until_ready(self._refresh(run, order[at]))
                    took = time.perf_counter() - begin
                    run.seconds += took
                    run.refresh_seconds += took
                    run.refreshes += 1
                begin = time.perf_counter()
                part = jax.block_until_ready(self._advance(run, order, at, stop))
                run.seconds += time.perf_counter() - begin
                run.step += stop - at
                total, at = total + part, stop
            metric = float(self.problem.validate(run.params, run.state))
            run.curve.append(self._point(run, float(total) / self.steps_a_round, metric))
            yield run.curve[-1]

    def _next_stop(self, step: int, at: int) -> int:
        """The end of the round, or the next step before which an estimate is due."""
        if self.schedule is not None:
            for ahead in range(1, self.steps_a_round - at):
                if self.schedule.due(step + ahead):
                    return at + ahead
        return self.steps_a_round

    def _loss(self, params: Any, batch: Any) -> tuple[jax.Array, Any]:
        state, examples = batch
        return self.problem.loss(params, state, examples)

    def _refresh(self, run: Progress, current: jax.Array) -> Any:
        assert self.built.fosi is not None
        batch = self.curvature(self.problem, self.first[0], current)
        return self.built.fosi.refresh(run.opt_state, run.params, batch=(run.state, batch))

    def _advance(self, run: Progress, order: jax.Array, start: int, stop: int) -> jax.Array:
        """Takes the steps of the round from ``start`` up to ``stop``; the sum of their losses."""
        carry = (run.params, run.state, run.opt_state, jnp.zeros(()))
        if self.looped:
            carry = self._steps(*carry, self.problem.data, order, start, stop)
        else:
            for index in range(start, stop):
                carry = self._steps(*carry, self.problem.data, order[index])
        run.params, run.state, run.opt_state, total = carry
        return total

    def _one(self, params: Any, state: Any, opt_state: Any, total: jax.Array, data: Any, indices: jax.Array) -> Any:
        batch = self.problem.batch(data, indices)
        (value, state), grads = jax.value_and_grad(self.problem.loss, has_aux=True)(params, state, batch)
        updates, opt_state = self.built.transform.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), state, opt_state, total + value

    def _many(
        self, params: Any, state: Any, opt_state: Any, total: jax.Array, data: Any, order: Any, start: Any, stop: Any
    ) -> Any:
        def body(index: Any, carry: Any) -> Any:
            params, state, opt_state, total = carry
            return self._one(params, state, opt_state, total, data, order[index])

        return jax.lax.fori_loop(start, stop, body, (params, state, opt_state, total))

    def _point(self, run: Progress, train_loss: float, metric: float) -> Point:
        ours = [s for s in jax.tree.leaves(run.opt_state, is_leaf=_is_fosi) if _is_fosi(s)]
        scale = 1.0
        eigenvalues: tuple[float, ...] = ()
        if ours:
            used = np.asarray(ours[0].accepted)
            scale = float(ours[0].lr_scale)
            eigenvalues = tuple(float(x) for x in np.asarray(ours[0].eigenvalues)[used])
        return Point(
            run.step,
            run.seconds,
            train_loss,
            metric,
            run.refreshes,
            run.refresh_seconds,
            scale,
            len(eigenvalues),
            eigenvalues,
        )


def _is_fosi(node: Any) -> bool:
    return isinstance(node, FosiState)
