"""K-FAC, as kfac-jax has it, on a problem in JAX: what FOSI is compared with among second-order optimizers."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from fosi.experiments.tasks import kfac_compat
from fosi.experiments.tasks.engine import Estimate
from fosi.experiments.tasks.on_device import JaxRun, OnDevice
from fosi.experiments.tasks.task import Outputs, Problem, Task
from fosi.schedule import Schedule

NOISE = 2**32 - 1
"""Folded into the run's key where K-FAC draws its random numbers: no round has this number."""
WORKS_ON = "lr, tl, ae, ac, deep-ae or softmax-full"


class KfacEngine(OnDevice):
    """Trains one problem with K-FAC; see ``Engine``.

    Its curvature is estimated anew at every step and inverted every fifth, within the step: there are no refreshes.
    Gradients are not clipped: its model of the loss is made of the true ones.
    """

    schedule: Schedule | None = None

    def __init__(
        self,
        task: Task,
        problem: Problem,
        name: str,
        seed: int,
        rate_factor: float = 1.0,
        learning_rate: float | None = None,
        momentum: float | None = None,
        initial_damping: float = 1.0,
        min_damping: float | None = None,
        l2_reg: float | None = None,
        **options: Any,
    ) -> None:
        """Builds the optimizer and compiles nothing yet.

        Args:
          task: which.
          problem: the task, built.
          name: ``"kfac"``.
          seed: of the order of the batches and of K-FAC's random numbers.
          rate_factor: multiplies ``learning_rate``.
          learning_rate: fixed; None to take what is best for K-FAC's quadratic model, at every step.
          momentum: likewise.
          initial_damping: where adaptive damping begins. It follows the scale of the loss.
          min_damping: what it never falls below; None for a tenth of where it begins. kfac-jax's own is 1e-8, and the
            damping gets there: it is adapted by how well the model predicts the loss of the batch that it was made on.
            Softmax regression on MNIST with batches of 1024 then climbs to losses of 1e5; with this it does not.
            On a full batch, where there is no noise to guard against, give less.
          l2_reg: what the loss has of it, if anything; None for the task's own.
          **options: others of ``kfac_jax.Optimizer``.
        """
        if name != "kfac":
            raise ValueError(f"optimizer is {name!r}; this engine has kfac alone")
        if problem.outputs is None:
            raise ValueError(
                f"task {task.name!r} has no outputs for K-FAC to register: its curvature blocks are for layers that "
                "an example goes through once, which an LSTM's are not, and the paper's authors did not get it to work "
                f"on theirs either; give {WORKS_ON}"
            )
        if learning_rate is None and rate_factor != 1:
            raise ValueError(f"rate_factor is {rate_factor:g}, but K-FAC finds its rate itself: give learning_rate too")
        super().__init__(problem, seed)
        self.rate = 0.0 if learning_rate is None else rate_factor * learning_rate
        self._kfac = kfac_compat.load()
        self._trees = [jax.tree.structure(tree) for tree in (problem.params, problem.state)]
        self._has_state = bool(jax.tree.leaves(problem.state))
        chosen = {"num_burnin_steps": 10, "damping_adaptation_interval": 5, "curvature_update_period": 1, **options}
        self._burnin = int(chosen["num_burnin_steps"])
        # A step that adapts the damping, or estimates the curvature, is a program of its own.
        self._period = math.lcm(int(chosen["damping_adaptation_interval"]), int(chosen["curvature_update_period"]))
        self.optimizer = self._kfac.Optimizer(
            value_and_grad_func=jax.value_and_grad(self.value, has_aux=self._has_state),
            value_func_has_state=self._has_state,
            l2_reg=task.l2 if l2_reg is None else l2_reg,
            use_adaptive_learning_rate=learning_rate is None,
            use_adaptive_momentum=momentum is None,
            use_adaptive_damping=True,
            initial_damping=initial_damping,
            min_damping=initial_damping / 10 if min_damping is None else min_damping,
            layer_tag_to_block_ctor={"conv2d": kfac_compat.convolution_block(self._kfac)},
            **chosen,
        )
        fixed = {"learning_rate": None if learning_rate is None else self.rate, "momentum": momentum}
        self._fixed = {key: jnp.asarray(value) for key, value in fixed.items() if value is not None}
        self._draw = jax.jit(self._drawn)

    def value(self, params: Any, *state_and_batch: Any) -> Any:
        """The loss, of parameters and state as lists of arrays, with its outputs registered; the next state too."""
        *given, batch = state_and_batch
        params = jax.tree.unflatten(self._trees[0], params)
        state = jax.tree.unflatten(self._trees[1], given[0] if given else [])
        assert self.problem.outputs is not None
        # The model is run twice here but not on the device: the loss does not depend on what is registered.
        register(self._kfac, self.problem.outputs(params, state, batch))
        loss, state = self.problem.loss(params, state, batch)
        return (loss, jax.tree.leaves(state)) if given else loss

    def compile(self) -> None:
        """Compiles all that runs on the clock, on copies."""
        run, left = self.start(), self._period
        while left > 0:
            stop = min(left, self.steps_a_round)
            run, _ = self.advance(run, self.first, 0, stop)
            left -= stop
        self.validate(run)

    def advance(self, run: JaxRun, order: jax.Array, start: int, stop: int) -> tuple[JaxRun, float]:
        """Takes the steps of the round from ``start`` up to ``stop``; the sum of their losses."""
        params, opt_state = jax.tree.leaves(run.params), run.opt_state
        state = jax.tree.leaves(run.state) if self._has_state else None
        before = int(opt_state.step_counter) - start
        total = jnp.zeros(())
        for index in range(start, stop):
            batch, key = self._draw(self.problem.data, order, index, before + index)
            with warnings.catch_warnings():
                if before + index == 0:
                    # K-FAC gives the burn-in's batches away to be written over, and they fit nothing.
                    warnings.filterwarnings("ignore", "Some donated buffers were not usable")
                    source = {"data_iterator": self._with_burnin(order, batch)}
                else:
                    source = {"batch": batch}
                params, opt_state, *new, stats = self.optimizer.step(
                    params, opt_state, key, func_state=state, global_step_int=before + index, **source, **self._fixed
                )
            state = new[0] if new else None
            total = total + stats["loss"]
        params = jax.tree.unflatten(self._trees[0], params)
        # The last loss comes out of the same program as the run: where the sum is there, the run is.
        state = jax.tree.unflatten(self._trees[1], state or [])
        return JaxRun(params, state, opt_state, run.step + stop - start), float(total)

    def refresh(self, run: JaxRun, order: jax.Array, index: int) -> JaxRun:
        """There is none."""
        raise ValueError("K-FAC estimates within its steps; it has no refresh")

    def estimate(self, run: JaxRun) -> Estimate:
        """What FOSI works with: nothing here."""
        return Estimate()

    def _init(self, params: Any, state: Any) -> Any:
        batch, key = self._draw(self.problem.data, self.first, 0, 0)
        return self.optimizer.init(
            jax.tree.leaves(params), key, batch, jax.tree.leaves(state) if self._has_state else None
        )

    def _drawn(self, data: Any, order: jax.Array, index: jax.Array, step: jax.Array) -> tuple[Any, jax.Array]:
        key = jax.random.fold_in(jax.random.fold_in(self.key, NOISE), step)
        return self.problem.batch(data, order[index]), key

    def _with_burnin(self, order: jax.Array, batch: Any) -> Iterator[Any]:
        """The round's first batches, on which curvature alone is estimated, then the one that is trained on."""
        for index in itertools.islice(itertools.cycle(range(len(order))), self._burnin):
            yield self._draw(self.problem.data, order, index, 0)[0]
        yield batch


def register(kfac: Any, outputs: Outputs) -> None:
    """Tells K-FAC, while it traces the loss, what the loss is made of."""
    kind, predicted, wanted = outputs
    match kind:
        case "softmax":
            kfac.register_softmax_cross_entropy_loss(predicted, wanted.astype(jnp.int32))
        case "sigmoid":  # K-FAC's is the sum over labels
            wanted = wanted.astype(jnp.int32)
            kfac.register_sigmoid_cross_entropy_loss(predicted, wanted, weight=1 / predicted.shape[-1])
        case "pixels":
            kfac.register_sigmoid_cross_entropy_loss(predicted, wanted)
        case "squared":
            kfac.register_squared_error_loss(predicted, wanted)
        case "residuals":
            raise ValueError(
                "K-FAC's curvature blocks are for layers that an example goes through once, but a residual of a "
                f"differential equation goes through all of them several times; give {WORKS_ON}"
            )
        case _:
            raise ValueError(f"kind of the outputs is {kind!r}; give softmax, sigmoid, pixels or squared")
