"""What a training task is: a model, a loss, data on the device, a metric, and the settings for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from fosi.experiments.tasks.engine import quarter

Params = Any
State = Any
Batch = Any


class Outputs(NamedTuple):
    """What a loss is made of, for optimizers that look inside it.

    Attributes:
      kind: ``"softmax"``: cross-entropy of logits, mean over examples. ``"sigmoid"``: the same of labels of which an
        example may have several, mean over examples and labels. ``"pixels"``: the same of values in [0, 1], summed over
        what an example consists of, mean over examples. ``"squared"``: squared error, summed and averaged likewise.
        ``"residuals"``: one row, squares summed, each of which may take several passes through the network and its
        derivatives.
      predicted: the model's, an example in each row.
      wanted: the classes of ``"softmax"``; for the others of the shape of ``predicted``.
    """

    kind: str
    predicted: jax.Array
    wanted: jax.Array

    def loss(self) -> jax.Array:
        """The loss, less what it has of the parameters alone (``Task.l2``); convex in what is predicted."""
        if self.kind == "softmax":
            return cross_entropy(self.predicted, self.wanted)
        if self.kind == "sigmoid":
            return jnp.mean(optax.losses.sigmoid_binary_cross_entropy(self.predicted, self.wanted))
        if self.kind == "pixels":
            found = optax.losses.sigmoid_binary_cross_entropy(self.predicted, self.wanted)
            return jnp.sum(found) / len(self.predicted)
        return jnp.sum((self.predicted - self.wanted) ** 2) / len(self.predicted)


class Problem(NamedTuple):
    """A task ready to be trained.

    Attributes:
      params: what is trained.
      state: what else training changes: BatchNorm's statistics; and frozen weights, which must be an argument of what
        is compiled. Empty where there are none.
      loss: loss(params, state, batch) -> (mean loss of the batch, the next state), as in training.
      data: the training data, on the device.
      batch: batch(data, indices) -> what ``loss`` takes.
      order: order(key) -> the indices of one round, (steps, batch size): an epoch in an order of its own.
      validate: validate(params, state) -> the metric on the validation data.
      facts: what a results file should say of how it was built.
      outputs: outputs(params, state, batch) -> what ``loss`` is made of, as in training; None where nobody gives it.
      solution: solution(params) -> what the model has found, for a figure: arrays of one shape, ``x``, ``t``, ``exact``
        and ``found``; None where it is nothing to draw.
      part: part(data) -> a quarter of the examples as ``loss`` takes them, for estimates, where a batch is all of them;
        None where it is not.
    """

    params: Params
    state: State
    loss: Callable[[Params, State, Batch], tuple[jax.Array, State]]
    data: Any
    batch: Callable[[Any, jax.Array], Batch]
    order: Callable[[jax.Array], jax.Array]
    validate: Callable[[Params, State], jax.Array]
    facts: Mapping[str, Any] = MappingProxyType({})
    outputs: Callable[[Params, State, Batch], Outputs] | None = None
    solution: Callable[[Params], Mapping[str, jax.Array]] | None = None
    part: Callable[[Any], Batch] | None = None


@dataclass(frozen=True)
class Task:
    """A task and what is set for it: by the paper (its §4 and appendix), or by whoever has it from elsewhere.

    Attributes:
      name: as on the command line.
      title: for tables and figures.
      metric: ``"accuracy"`` (higher is better), ``"loss"``, or ``"error"``: of a solution, relative to its size, or of
        a reconstruction, squared.
      build: build(data_dir, download, seed, tiny) -> Problem; with ``mode=`` one of ``modes``, where there are any, and
        with ``batch_size=`` where it ``resizes``.
      rounds: how many rounds (epochs) of training.
      batch_size: examples in a batch.
      warmup_rounds: rounds before the first estimate; None for as many steps as lie between two.
      heavy_ball_rate: the best of 0.1, 0.01 and 0.001, as published.
      max_lr_scale: c of FOSI-Heavy-Ball.
      clip: bound on every entry of the gradient, before any optimizer sees it; None for none.
      modes: ways to build it, such as on one dataset or another, the paper's or else the usual one first.
      fosi: settings of FOSI in the place of the paper's, where the task is not of the paper.
      lbfgs_memory: how many pairs L-BFGS keeps.
      l2: half of it, times the sum of the squares of all parameters, is a part of the loss.
      resizes: whether it can be trained in batches of another size.
      extra: further settings that a results file should name.
    """

    name: str
    title: str
    metric: str
    build: Callable[..., Problem]
    rounds: int
    batch_size: int
    warmup_rounds: int | None = 1
    heavy_ball_rate: float = 0.1
    max_lr_scale: float = 3.0
    clip: float | None = None
    modes: tuple[str, ...] = ()
    fosi: Mapping[str, Any] | None = None
    lbfgs_memory: int = 10
    l2: float = 0.0
    resizes: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def sign(self) -> int:
        """+1 where a higher metric is better, −1 where a lower one is."""
        return 1 if self.metric == "accuracy" else -1

    @property
    def measured(self) -> str:
        """The metric in words that tell it from the training loss."""
        return "validation loss" if self.metric == "loss" else self.metric

    def rounds_in(self, batch_size: int | None) -> int:
        """How many rounds see as many examples as the task's own do, in batches of that size; None for its own.

        A round that is an epoch stays one. One that is so many steps has, of larger batches, as many fewer as fit.
        """
        steps = self.extra.get("steps_a_round")
        if batch_size is None or steps is None:
            return self.rounds
        examples = steps * self.batch_size
        return max(1, round(self.rounds * examples / (batch_size * resized(examples, batch_size))))


def split_model(model: nnx.Module) -> tuple[Any, Params, State]:
    """Returns the model without its arrays, its parameters and its other state."""
    graph, *states = nnx.split(model, nnx.Param, ...)
    params, state = states
    return graph, params, state


def epochs(examples: int, batch_size: int, nearest: bool = False) -> Callable[[jax.Array], jax.Array]:
    """Returns the order of an epoch: all examples once, shuffled; what does not fill a batch is left out.

    Args:
      examples: how many there are.
      batch_size: how many a step sees.
      nearest: for batches so large that what is left out would count: as many batches as come nearest to all examples;
        the last one is filled up from the first, so that none has an example twice.
    """
    if examples < batch_size:
        raise ValueError(f"batch_size is {batch_size}, but there are only {examples} examples")
    steps = round(examples / batch_size) if nearest else examples // batch_size

    def order(key: jax.Array) -> jax.Array:
        shuffled = jax.random.permutation(key, examples)
        return jnp.resize(shuffled, (steps, batch_size))

    return order


def resized(examples: int, batch_size: int) -> int:
    """How many steps of a batch size see that many examples: at least one, and no more than fit."""
    return max(1, examples // batch_size)


def every_step_sees_all(steps: int) -> Callable[[jax.Array], jax.Array]:
    """Returns the order of a round on the full batch: so many steps, and nothing to choose."""
    return lambda key: jnp.zeros((steps, 1), jnp.int32)


def whole(data: Any, indices: jax.Array) -> Batch:
    """All examples, whatever the indices: the full batch."""
    return data


def quarter_of(data: Any) -> Batch:
    """A quarter of the examples of arrays that have one in each row."""
    return jax.tree.map(lambda x: x[: quarter(len(x))], data)


def rows(data: Any, indices: jax.Array) -> Batch:
    """The examples with these indices."""
    return jax.tree.map(lambda x: x[indices], data)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """The mean over all labels."""
    shifted = jax.nn.log_softmax(logits.astype(jnp.promote_types(logits.dtype, jnp.float32)))
    return -jnp.mean(jnp.take_along_axis(shifted, labels[..., None].astype(jnp.int32), axis=-1))


def mean_over(
    measure: Callable[[Params, State, Batch], jax.Array], data: Any, batch_size: int
) -> Callable[[Params, State], jax.Array]:
    """Returns a metric over a whole dataset, as the mean over its examples, a batch at a time.

    ``measure`` gives one number for each example of a batch.
    """
    examples = len(jax.tree.leaves(data)[0])
    size = min(batch_size, examples)
    steps = -(-examples // size)
    # The last batch is filled up with examples that do not count.
    indices = jnp.minimum(jnp.arange(steps * size), examples - 1).reshape(steps, size)
    counts = (jnp.arange(steps * size) < examples).reshape(steps, size)

    @jax.jit
    def validate(params: Params, state: State, data: Any) -> jax.Array:
        def add(total: jax.Array, chosen: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
            which, count = chosen
            return total + jnp.sum(jnp.where(count, measure(params, state, rows(data, which)), 0)), None

        total, _ = jax.lax.scan(add, jnp.zeros((), jnp.float32), (indices, counts))
        return total / examples

    return lambda params, state: validate(params, state, data)
