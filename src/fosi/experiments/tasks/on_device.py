"""A problem on the device, and a run of it there: what engines in JAX share, whatever makes their steps."""

from __future__ import annotations

import io
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fosi.experiments.tasks.engine import least_seconds
from fosi.experiments.tasks.task import Problem, whole


class JaxRun(NamedTuple):
    """Arrays on the device, and how many steps have been taken."""

    params: Any
    state: Any
    opt_state: Any
    step: int = 0


class OnDevice(ABC):
    """Trains one problem; see ``Engine``. What makes its steps is the subclass's."""

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
        params = jax.tree.map(own, self.problem.params)  # steps write over theirs
        state = jax.tree.map(own, self.problem.state)
        # Copied too: optax.lbfgs has one array twice in its state, which cannot be given away twice.
        return JaxRun(params, state, jax.tree.map(own, self._init(params, state)))

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

        return least_seconds(all_of_them) / count

    def peak_memory(self) -> int | None:
        """The most bytes that the process has held on the device, as its allocator counts; None on a CPU."""
        stats = jax.devices()[0].memory_stats()
        return None if not stats else int(stats["peak_bytes_in_use"])

    def dump(self, run: JaxRun) -> bytes:
        """The run as an .npz file."""
        stream = io.BytesIO()
        np.savez(stream, *(np.asarray(_plain(leaf)) for leaf in jax.tree.leaves(run[:-1])), step=run.step)
        return stream.getvalue()

    def load(self, raw: bytes) -> JaxRun:
        """The run of such bytes."""
        with np.load(io.BytesIO(raw)) as found:
            step = int(found["step"]) if "step" in found.files else 0  # there was none in those of before
            arrays = [found[name] for name in found.files if name != "step"]
        like, tree = jax.tree.flatten(self._at(step)[:-1])
        shapes = [(array.shape, array.dtype) for array in arrays]
        if shapes != [(_plain(leaf).shape, _plain(leaf).dtype) for leaf in like]:
            raise ValueError("the checkpoint is of another model or another optimizer")
        loaded = [_as_was(array, leaf) for array, leaf in zip(arrays, like, strict=True)]
        params, state, opt_state = jax.tree.unflatten(tree, loaded)
        return JaxRun(params, state, opt_state, step)

    def _at(self, step: int) -> JaxRun:
        """A run of the form that one has after so many steps."""
        return self.start()._replace(step=step)

    @abstractmethod
    def _init(self, params: Any, state: Any) -> Any:
        """The optimizer's state before the first step."""


def own(leaf: Any) -> jax.Array:
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
