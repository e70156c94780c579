"""Optax optimizers on a problem in JAX: steps compiled into one loop, estimates between them."""

from __future__ import annotations

import io
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fosi.experiments.tasks import engine, optimizers, settings
from fosi.experiments.tasks.engine import Estimate
from fosi.experiments.tasks.task import Problem, Task, whole
from fosi.jax import Batches, FosiState, ModelLoss

_LOOKS = 20
"""How often newton-cg is looked at, on a full batch, where others are once: a step of it takes dozens of products."""


class JaxRun(NamedTuple):
    """Arrays on the device."""

    params: Any
    state: Any
    opt_state: Any


class OnDevice(ABC):
    """A problem on the device: what engines in JAX share, whatever makes their steps."""

    backend = "jax"
    looks = 1

    def __init__(self, problem: Problem, seed: int) -> None:
        """Takes the problem, and the seed of the order of its batches."""
        self.problem = problem
        self.key = jax.random.key(seed)
        self.first = self.order(0)
        self.steps_a_round = len(self.first)
        # XLA leaves convolutions inside a loop unoptimised on a CPU; on a GPU the loop saves the host's time a step.
        self.looped = jax.default_backend() != "cpu"
        # Where every step has the same loss, a line search need not be followed by another gradient at its end.
        self.still = problem.batch is whole

    def take(self, problem: Problem, seed: int) -> None:
        """Goes over to the same task built with another seed: nothing that is compiled is compiled again.

        Losses must differ in what they are given alone, not in what they close over.
        """
        mine = self.problem
        self.problem = problem._replace(loss=mine.loss, batch=mine.batch, order=mine.order, outputs=mine.outputs)
        self.key = jax.random.key(seed)
        self.first = self.order(0)

    def start(self) -> JaxRun:
        """The run before its first step."""
        params = jax.tree.map(_copy, self.problem.params)  # steps write over theirs
        state = jax.tree.map(_copy, self.problem.state)
        # Copied too: optax.lbfgs has one array twice in its state, which cannot be given away twice.
        return JaxRun(params, state, jax.tree.map(_copy, self._init(params, state)))

    @property
    def device_name(self) -> str:
        """What it trains on."""
        return jax.devices()[0].device_kind

    def order(self, index: int) -> jax.Array:
        """The batches of a round."""
        return jax.block_until_ready(self.problem.order(jax.random.fold_in(self.key, index)))

    def due(self, step: int) -> bool:
        """Whether an estimate precedes this step."""
        return False

    def validate(self, run: JaxRun) -> float:
        """The metric on the validation data."""
        return float(self.problem.validate(run.params, run.state))

    def solution(self, run: JaxRun) -> Mapping[str, jax.Array] | None:
        """What the model has found, for a figure."""
        return None if self.problem.solution is None else self.problem.solution(run.params)

    def gradient_seconds(self) -> float:
        """How long one gradient of a batch takes: the least of three times as many as fit into a round, at most 20."""
        count = min(20, self.steps_a_round)

        def add(index: Any, total: Any, params: Any, state: Any, data: Any, order: Any) -> Any:
            batch = self.problem.batch(data, order[index])
            grads = jax.grad(self.problem.loss, has_aux=True)(params, state, batch)[0]
            return jax.tree.map(jnp.add, total, grads)

        @jax.jit
        def many(params: Any, state: Any, data: Any, order: Any) -> Any:
            def body(index: Any, total: Any) -> Any:
                return add(index, total, params, state, data, order)

            return jax.lax.fori_loop(0, count, body, jax.tree.map(jnp.zeros_like, params))

        single = jax.jit(add, donate_argnums=1)

        def all_of_them() -> None:
            arrays = self.problem.params, self.problem.state, self.problem.data, self.first
            if self.looped:
                jax.block_until_ready(many(*arrays))
                return
            total = jax.tree.map(jnp.zeros_like, self.problem.params)
            for index in range(count):
                total = single(index, total, *arrays)
            jax.block_until_ready(total)

        all_of_them()  # compiles
        times = []
        for _ in range(3):
            begin = time.perf_counter()
            all_of_them()
            times.append(time.perf_counter() - begin)
        return min(times) / count

    def peak_memory(self) -> int | None:
        """The most bytes that the process has held on the device, as its allocator counts; None on a CPU."""
        stats = jax.devices()[0].memory_stats()
        return None if not stats else int(stats["peak_bytes_in_use"])

    def dump(self, run: JaxRun) -> bytes:
        """The run's arrays as an .npz file."""
        stream = io.BytesIO()
        np.savez(stream, *(np.asarray(_plain(leaf)) for leaf in jax.tree.leaves(run)))
        return stream.getvalue()

    def load(self, raw: bytes) -> JaxRun:
        """The run of such bytes."""
        like, tree = jax.tree.flatten(self.start())
        with np.load(io.BytesIO(raw)) as found:
            arrays = [found[f"arr_{index}"] for index in range(len(found.files))]
        shapes = [(array.shape, array.dtype) for array in arrays]
        if shapes != [(_plain(leaf).shape, _plain(leaf).dtype) for leaf in like]:
            raise ValueError("the checkpoint is of another model or another optimizer")
        return jax.tree.unflatten(tree, [_as_was(x, leaf) for x, leaf in zip(arrays, like, strict=True)])

    @abstractmethod
    def _init(self, params: Any, state: Any) -> Any:
        """The optimizer's state before the first step."""


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
        self._curvature = engine.curvature(curvature)
        loss = self._operator(operator, name, task.l2)
        model = self._model_loss("optimizer", name, task.l2) if inner else None
        self.built = optimizers.build(name, task, loss, self.steps_a_round, rate_factor, model, **options)
        self.rate = self.built.rate
        self._schedules = [phase.fosi.schedule(problem.params) for phase in self.built.phases]
        self.schedule = next(iter(self._schedules), None)
        self._steps = jax.jit(self._many if self.looped else self._one, donate_argnums=(0, 1))

    def compile(self) -> None:
        """Compiles all that runs on the clock, on copies."""
        run = self.start()
        for phase in self.built.phases:
            run = self._refreshed(run, phase, self.first, 0)
        run, _ = self.advance(run, self.first, 0, min(2, self.steps_a_round))
        self.validate(run)

    def advance(self, run: JaxRun, order: jax.Array, start: int, stop: int) -> tuple[JaxRun, float]:
        """Takes the steps of the round from ``start`` up to ``stop``; the sum of their losses."""
        total = jnp.zeros(())
        if self.looped:
            run, total = self._steps(run, total, self.problem.data, order, start, stop)
        else:
            for index in range(start, stop):
                run, total = self._steps(run, total, self.problem.data, order[index])
        # The sum comes out of the same program as the run: where it is there, the run is.
        return run, float(total)

    def order(self, index: int) -> jax.Array:
        """The batches of a round."""
        rows = super().order(index)
        return rows[: -(-len(rows) // self.looks)]

    def due(self, step: int) -> bool:
        """Whether an estimate precedes this step."""
        both = zip(self.built.phases, self._schedules, strict=True)
        return any(phase.at(step) and bool(schedule.due(step - phase.since)) for phase, schedule in both)

    def refresh(self, run: JaxRun, order: jax.Array, index: int) -> JaxRun:
        """Estimates anew before step ``index`` of the round."""
        phase = self._phase(run)
        assert phase is not None
        return self._refreshed(run, phase, order, index)

    def _refreshed(self, run: JaxRun, phase: optimizers.Phase, order: jax.Array, index: int) -> JaxRun:
        batches = [(run.state, examples) for examples in self._curvature(self.problem, self.first, order, index)]
        batch = batches[0] if len(batches) == 1 else Batches(batches)
        state = phase.fosi.refresh(phase.state(run.opt_state), run.params, batch=batch)
        opt_state = state if phase.part is None else run.opt_state._replace(**{phase.part: state})
        return run._replace(opt_state=jax.block_until_ready(opt_state))

    def _phase(self, run: JaxRun) -> optimizers.Phase | None:
        """The FOSI in use, if there is one: in a relay it depends on how far the run has come."""
        relay = any(phase.part for phase in self.built.phases)
        step = int(run.opt_state.count) if relay else 0
        return next((phase for phase in self.built.phases if phase.at(step)), None)

    def estimate(self, run: JaxRun) -> Estimate:
        """What FOSI works with."""
        phase = self._phase(run)
        if phase is None:
            return Estimate()
        ours = [s for s in jax.tree.leaves(phase.state(run.opt_state), is_leaf=_is_fosi) if _is_fosi(s)]
        used = np.asarray(ours[0].accepted)
        return Estimate(float(ours[0].lr_scale), tuple(float(x) for x in np.asarray(ours[0].eigenvalues)[used]))

    def _init(self, params: Any, state: Any) -> Any:
        return self.built.transform.init(params)

    def _operator(self, operator: str, name: str, l2: float) -> Any:
        """The loss in the form that FOSI takes the operator of."""
        if operator not in ("hessian", "gauss_newton"):
            raise ValueError(f"operator is {operator!r}; give hessian or gauss_newton")
        if operator == "hessian":
            return self._loss
        if not settings.with_fosi(name):
            raise ValueError(f"operator is {operator!r}, which is a setting of FOSI; {name} has none")
        return self._model_loss("operator", operator, l2)

    def _model_loss(self, argument: str, value: str, l2: float) -> ModelLoss:
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

    def _one(self, run: JaxRun, total: jax.Array, data: Any, indices: jax.Array) -> tuple[JaxRun, jax.Array]:
        batch = self.problem.batch(data, indices)

        def value_fn(params: Any) -> jax.Array:
            return self.problem.loss(params, run.state, batch)[0]

        if self.built.remembers and self.still:
            value, grads = optax.value_and_grad_from_state(value_fn)(run.params, state=run.opt_state)
            state = run.state
        else:
            (value, state), grads = jax.value_and_grad(self.problem.loss, has_aux=True)(run.params, run.state, batch)
        extra: dict[str, Any] = {}
        if self.built.searches:  # a line search evaluates the loss elsewhere, on the same batch
            extra = {"value": value, "grad": grads, "value_fn": value_fn}
        if self.built.multiplies:
            extra["batch"] = (run.state, batch)
        updates, opt_state = self.built.transform.update(grads, run.opt_state, run.params, **extra)
        return JaxRun(optax.apply_updates(run.params, updates), state, opt_state), total + value

    def _many(self, run: JaxRun, total: jax.Array, data: Any, order: Any, start: Any, stop: Any) -> Any:
        def body(index: Any, carry: tuple[JaxRun, jax.Array]) -> tuple[JaxRun, jax.Array]:
            return self._one(*carry, data, order[index])

        return jax.lax.fori_loop(start, stop, body, (run, total))


def _is_fosi(node: Any) -> bool:
    return isinstance(node, FosiState)


def _copy(leaf: Any) -> jax.Array:
    """A copy of strong type, as a step returns it: from a weak one the second step would be compiled anew, timed."""
    return jnp.copy(leaf) if _is_key(leaf) else jnp.array(leaf, dtype=leaf.dtype)


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _plain(leaf: Any) -> Any:
    return jax.random.key_data(leaf) if _is_key(leaf) else leaf


def _as_was(array: Any, leaf: Any) -> jax.Array:
    if _is_key(leaf):
        return jax.random.wrap_key_data(jnp.asarray(array), impl=jax.random.key_impl(leaf))
    return jnp.asarray(array)
