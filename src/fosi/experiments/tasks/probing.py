"""A training stopped at some point, for its curvature to be looked at: trained that far, or out of a checkpoint."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

from fosi.experiments.tasks import runs, settings
from fosi.experiments.tasks.jax_engine import JaxEngine
from fosi.experiments.tasks.on_device import JaxRun, own
from fosi.experiments.tasks.plan import Plan
from fosi.experiments.tasks.race import Held

_log = logging.getLogger(__name__)

_CHUNK = 10
_TIMED = 50
_B2 = 0.999
_POINTS, _APART = 20, 7
"""Of `Probe.path`: over some of the swings of a training at its limit, and apart by an odd number but at the ends of
rounds, since the fastest of those go back and forth from step to step."""


@dataclass(frozen=True)
class Probe:
    """Where a training stands.

    Attributes:
      plan: which.
      engine: what trained it.
      run: parameters, the model's state and the optimizer's.
      step: steps taken.
    """

    plan: Plan
    engine: JaxEngine
    run: JaxRun
    step: int

    @property
    def name(self) -> str:
        """A name that no other point of any training has."""
        return f"{self.plan.name}.step-{self.step}"

    @property
    def base(self) -> str:
        """The base optimizer's name."""
        assert self.plan.base is not None
        return self.plan.base

    def loss(self, params: Any, batch: Any) -> Any:
        """The training loss of (state, examples), and the next state."""
        state, examples = batch
        return self.engine.problem.loss(params, state, examples)

    def batches(self, count: int) -> list[Any]:
        """The next batches that training would see; one that comes again is the same object again."""
        engine, made, found = self.engine, {}, []
        order = np.asarray(engine.order(self.step // engine.steps_a_round))
        for index in range(count):
            indices = order[(self.step + index) % len(order)]
            key = indices.tobytes()
            if key not in made:
                made[key] = (self.run.state, engine.problem.batch(engine.problem.data, indices))
            found.append(made[key])
        return found

    def step_seconds(self) -> float | None:
        """What a step of the base takes, with its batch and its update, of some that lead nowhere; None inside FOSI.

        The least of some rounds, as everything that a diagnosis times; the first one compiles.
        """
        if settings.with_fosi(self.plan.optimizer):
            return None
        engine, run, taken = self.engine, self.run, []
        count = min(engine.steps_a_round, _TIMED)
        for _ in range(4):
            params, state, opt_state = jax.tree.map(own, run[:3])  # a step gives its arrays away
            begin = time.perf_counter()
            engine.advance(JaxRun(params, state, opt_state, run.step), engine.first, 0, count)
            taken.append(time.perf_counter() - begin)
        return min(taken[1:]) / count

    def path(self) -> list[Any]:
        """Parameters at some points of the steps to come, which lead nowhere; none where there is no second moment."""
        if self.second_moments() is None:
            return []
        engine, index = self.engine, self.step // self.engine.steps_a_round
        at, order, found = self.step % engine.steps_a_round, engine.order(index), []
        params, state, opt_state = jax.tree.map(own, self.run[:3])  # a step gives its arrays away
        run = JaxRun(params, state, opt_state, self.run.step)
        for _ in range(_POINTS):
            found.append(jax.tree.map(own, run.params))
            stop = min(at + _APART, engine.steps_a_round)
            run, total = engine.advance(run, order, at, stop)
            if not np.isfinite(total):  # it diverges: what came before will do
                break
            if (at := stop) == engine.steps_a_round:
                at, index = 0, index + 1
                order = engine.order(index)
        return found

    def second_moments(self) -> Any:
        """Adam's, bias-corrected; None for a base without, before the first step, and inside FOSI.

        There they are of what FOSI leaves to Adam, not of the gradients that Adam alone would see.
        """
        if settings.with_fosi(self.plan.optimizer):
            return None
        leaves = jax.tree.leaves(self.run.opt_state, is_leaf=_is_adam)
        adam = next((leaf for leaf in leaves if _is_adam(leaf)), None)
        if adam is None or int(adam.count) == 0:
            return None
        return jax.tree.map(lambda x: x / (1 - _B2 ** int(adam.count)), adam.nu)


def check(plan: Plan, known: Sequence[str] = settings.BASES) -> None:
    """Raises where a plan is not of one of these alone, in JAX."""
    if plan.optimizer not in known or plan.backend != "jax":
        raise ValueError(f"optimizer is {plan.optimizer!r}; give a base, in jax: {', '.join(known)}")


def train(
    plan: Plan,
    problem: Any,
    rounds: int = 1,
    steps: int | None = None,
    on_step: Callable[[int, int], None] = lambda done, of: None,
    known: Sequence[str] = settings.BASES,
) -> Probe:
    """Trains from the start.

    Args:
      plan: which training, with a base alone, in JAX.
      problem: of ``plan.build``.
      rounds: how many.
      steps: how many, in the place of rounds.
      on_step: called with steps done and steps in all.
      known: bases that will do.

    Raises:
      ValueError: if the plan is not of such a base alone, or training diverged.
    """
    check(plan, known)
    engine = plan.engine(problem)
    assert isinstance(engine, JaxEngine)
    wanted = rounds * engine.steps_a_round if steps is None else steps
    run, done, total = engine.start(), 0, 0.0
    on_step(0, wanted)
    while done < wanted:
        at = done % engine.steps_a_round
        order = engine.order(done // engine.steps_a_round)
        stop = min(at + _CHUNK, engine.steps_a_round, at + wanted - done)
        run, total = engine.advance(run, order, at, stop)
        if not np.isfinite(total):
            raise ValueError(f"training with {plan.optimizer} diverged after {done} steps: there is nothing to look at")
        done += stop - at
        on_step(done, wanted)
    return Probe(plan, engine, run, done)


def planned(checkpoint: Path) -> Plan:
    """The plan of a run under way, of which this is the checkpoint.

    Raises:
      ValueError: if it is not there, or is not one of JAX's with a base or FOSI around one.
    """
    curve = checkpoint.parent.parent / "curves" / f"{checkpoint.name}.jsonl"
    if not (checkpoint.is_file() and curve.is_file()):
        raise ValueError(f"{checkpoint} is not the checkpoint of a run under way: it or {curve} is not there")
    plan = runs.read(curve).plan
    if plan.backend != "jax" or not settings.is_wrappable(plan.optimizer):
        raise ValueError(f"{checkpoint} is of {plan.optimizer} in {plan.backend}; only bases and FOSI in jax will do")
    return plan


def resume(plan: Plan, problem: Any, checkpoint: Path) -> Probe:
    """A run under way as its checkpoint has it."""
    engine = plan.engine(problem)
    assert isinstance(engine, JaxEngine)
    progress = runs.load_checkpoint(checkpoint, engine)
    return Probe(plan, engine, progress.run, progress.step)


def after(held: Held, plan: Plan, problem: Any) -> Probe:
    """Where a race has left its base: as its checkpoint has it, or trained that far again.

    Args:
      held: the race.
      plan: of the base's whole training.
      problem: of ``plan.build``.
    """
    assert isinstance(held.engine, JaxEngine)
    end = held.alone.points[-1].step
    if held.checkpoint.exists():
        try:
            progress = runs.load_checkpoint(held.checkpoint, held.engine)
        except ValueError as error:
            _log.warning("%s; trains %d steps again", error, end)
        else:
            if progress.step == end:  # else a run that was killed has left it
                return Probe(plan, held.engine, progress.run, end)
    return train(plan, problem, steps=end)


def _is_adam(node: Any) -> bool:
    return isinstance(node, optax.ScaleByAdamState)
