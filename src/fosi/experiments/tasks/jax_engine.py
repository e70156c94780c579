"""Optax optimizers on a problem in JAX: steps compiled into one loop, estimates between them."""

from __future__ import annotations

from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fosi.experiments.tasks import engine, optimizers, settings
from fosi.experiments.tasks.engine import Estimate
from fosi.experiments.tasks.on_device import JaxRun, OnDevice, own
from fosi.experiments.tasks.optimizers import Leg
from fosi.experiments.tasks.task import Problem, Task, whole
from fosi.jax import Batches, FosiState, ModelLoss

_LOOKS = 20
"""How often newton-cg is looked at, on a full batch, where others are once: a step of it takes dozens of products."""


class JaxEngine(OnDevice):
    """Trains one problem with one optimizer that ``optimizers.build`` knows; see ``Engine``."""

    def __init__(
        self,
        task: Task,
        problem: Problem,
        name: str,
        seed: int,
        rate_factor: float = 1.0,
        curvature: str = "fixed",
        operator: str = "hessian",
        **options: Any,
    ) -> None:
        """Builds the optimizer and compiles nothing yet.

        Args:
          task: which.
          problem: the task, built.
          name: of the optimizer.
          seed: of the order of the batches.
          rate_factor: multiplies the base's learning rate.
          curvature: what estimates are made on, one of ``engine.CURVATURES``.
          operator: what they are of, ``"hessian"`` or ``"gauss_newton"``.
          **options: FOSI's settings in the place of the paper's, or the optimizer's own.
        """
        inner = settings.second_of(name) == "newton-cg"
        self.looks = _LOOKS if inner and problem.batch is whole else 1
        super().__init__(problem, seed)
        self._curvature = engine.curvature(curvature, task.batch_size)
        loss = self._operator(operator, name, task.l2)
        model = None
        if inner or "layers" in options:
            argument, value = ("optimizer", name) if inner else ("layers", options["layers"])
            model = self._model_loss(argument, value, task.l2)
        self.built = optimizers.build(name, task, loss, self.steps_a_round, rate_factor, model, **options)
        self.rate = self.built.rate
        legs = self.built.legs
        self._schedules = [None if leg.fosi is None else leg.fosi.schedule(problem.params) for leg in legs]
        self.schedule = next((schedule for schedule in self._schedules if schedule is not None), None)

    @cached_property
    def _steps(self) -> list[Any]:
        """A program for each leg: what the one has no use for the other need not carry along."""
        steps = self._many if self.looped else self._one
        return [jax.jit(partial(steps, leg), donate_argnums=(0, 1)) for leg in self.built.legs]

    def compile(self) -> None:
        """Compiles all that runs on the clock, on copies."""
        for leg in self.built.legs:
            run = self._at(leg.since)
            if leg.fosi is not None:
                run = self.refresh(run, self.first, 0)
            run, _ = self.advance(run, self.first, 0, min(2, self.steps_a_round))
        self.validate(run)

    def advance(self, run: JaxRun, order: jax.Array, start: int, stop: int) -> tuple[JaxRun, float]:
        """Takes the steps of the round from ``start`` up to ``stop``; the sum of their losses."""
        total = 0.0
        while start < stop:
            index = self._leg(run.step)
            later = [leg.since for leg in self.built.legs[index + 1 :]]
            end = min([stop, *(start + since - run.step for since in later)])
            run, part = self._advanced(run, self._steps[index], order, start, end)
            if run.step in later:
                run = run._replace(opt_state=_begun(self.built.legs[index + 1], run.params))
            total, start = total + part, end
        return run, total

    def _advanced(self, run: JaxRun, steps: Any, order: jax.Array, start: int, stop: int) -> tuple[JaxRun, float]:
        arrays, total = run[:3], jnp.zeros(())
        if self.looped:
            arrays, total = steps(arrays, total, self.problem.data, order, start, stop)
        else:
            for index in range(start, stop):
                arrays, total = steps(arrays, total, self.problem.data, order[index])
        # The sum comes out of the same program as the run: where it is there, the run is.
        return JaxRun(*arrays, run.step + stop - start), float(total)

    def order(self, index: int) -> jax.Array:
        """The batches of a round."""
        rows = super().order(index)
        return rows[: -(-len(rows) // self.looks)]

    def due(self, step: int) -> bool:
        """Whether an estimate precedes this step."""
        index = self._leg(step)
        schedule = self._schedules[index]
        return schedule is not None and bool(schedule.due(step - self.built.legs[index].since))

    def refresh(self, run: JaxRun, order: jax.Array, index: int) -> JaxRun:
        """Estimates anew before step ``index`` of the round."""
        fosi = self.built.legs[self._leg(run.step)].fosi
        assert fosi is not None
        batches = [(run.state, examples) for examples in self._curvature(self.problem, self.first, order, index)]
        batch = batches[0] if len(batches) == 1 else Batches(batches)
        state = fosi.refresh(run.opt_state, run.params, batch=batch)
        return run._replace(opt_state=jax.block_until_ready(state))

    def _leg(self, step: int) -> int:
        """Which of the optimizer's takes this step."""
        return sum(leg.since <= step for leg in self.built.legs) - 1

    def estimate(self, run: JaxRun) -> Estimate:
        """What FOSI works with."""
        if self.built.legs[self._leg(run.step)].fosi is None:
            return Estimate()
        ours = [s for s in jax.tree.leaves(run.opt_state, is_leaf=_is_fosi) if _is_fosi(s)]
        if not ours:  # coordinates alone are estimated
            return Estimate()
        used = np.asarray(ours[0].accepted)
        return Estimate(float(ours[0].lr_scale), tuple(float(x) for x in np.asarray(ours[0].eigenvalues)[used]))

    def _init(self, params: Any, state: Any) -> Any:
        return self.built.legs[0].transform.init(params)

    def _at(self, step: int) -> JaxRun:
        run, index = super()._at(step), self._leg(step)
        return run if index == 0 else run._replace(opt_state=_begun(self.built.legs[index], run.params))

    def _operator(self, operator: str, name: str, l2: float) -> Any:
        """The loss in the form that FOSI takes the operator of."""
        settings.check_operator(operator, name)
        return self._loss if operator == "hessian" else self._model_loss("operator", operator, l2)

    def _model_loss(self, argument: str, value: Any, l2: float) -> ModelLoss:
        """The loss as a model and a convex loss of its outputs, which the argument asks for."""
        outputs = self.problem.outputs
        if outputs is None:
            raise ValueError(f"{argument} is {value!r}, but this task does not say what its loss is made of")

        def loss(found: tuple[jax.Array, Any], batch: Any) -> jax.Array:
            predicted, params = found
            # What is wanted does not depend on the parameters; the network that runs here is never computed.
            fit = outputs(self.problem.params, *batch)._replace(predicted=predicted).loss()
            return fit + l2 / 2 * optax.tree.norm(params, squared=True) if l2 else fit

        # Where the loss has a term of the parameters alone they count among what is predicted: the matrix has it too.
        return ModelLoss(lambda params, batch: (outputs(params, *batch).predicted, params if l2 else None), loss)

    def _loss(self, params: Any, batch: Any) -> tuple[jax.Array, Any]:
        state, examples = batch
        return self.problem.loss(params, state, examples)

    def _one(self, leg: Leg, arrays: Any, total: jax.Array, data: Any, indices: jax.Array) -> tuple[Any, jax.Array]:
        params, was, opt_state = arrays
        batch = self.problem.batch(data, indices)

        def value_fn(params: Any) -> jax.Array:
            return self.problem.loss(params, was, batch)[0]

        if leg.remembers and self.still:
            value, grads = optax.value_and_grad_from_state(value_fn)(params, state=opt_state)
            state = was
        else:
            (value, state), grads = jax.value_and_grad(self.problem.loss, has_aux=True)(params, was, batch)
        extra: dict[str, Any] = {}
        if leg.searches:  # a line search evaluates the loss elsewhere, on the same batch
            extra = {"value": value, "grad": grads, "value_fn": value_fn}
        if leg.multiplies:
            extra["batch"] = (was, batch)
        updates, opt_state = leg.transform.update(grads, opt_state, params, **extra)
        return (optax.apply_updates(params, updates), state, opt_state), total + value

    def _many(self, leg: Leg, arrays: Any, total: jax.Array, data: Any, order: Any, start: Any, stop: Any) -> Any:
        def body(index: Any, carry: tuple[Any, jax.Array]) -> tuple[Any, jax.Array]:
            return self._one(leg, *carry, data, order[index])

        return jax.lax.fori_loop(start, stop, body, (arrays, total))


def _begun(leg: Leg, params: Any) -> Any:
    """Its state before its first step, to be given away."""
    return jax.tree.map(own, leg.transform.init(params))


def _is_fosi(node: Any) -> bool:
    return isinstance(node, FosiState)
