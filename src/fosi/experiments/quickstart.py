"""The quickstart: Heavy-Ball and Adam with and without FOSI on the digits, same start and batches for all."""

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from textwrap import fill
from typing import Any

import jax
import optax
from matplotlib.figure import Figure

from fosi.experiments import digits, figures
from fosi.experiments.records import Record
from fosi.experiments.results import Run
from fosi.jax import fosi_adam, fosi_sgd

BATCH_SIZE = 128
MOMENTUM = 0.9
EIGENPAIRS = 10
MAX_LR_SCALE = 3.0
# The paper's protocol (§4): Adam as it comes, Heavy-Ball at the best of three.
ADAM_RATE = 1e-3
HEAVY_BALL_RATES = (0.1, 0.01, 0.001)
_EVALUATIONS = 100


@dataclass(frozen=True)
class Event:
    """Progress of one training: `done` of `steps` steps taken; the last event carries the result."""

    label: str
    done: int
    steps: int
    run: Run | None = None


@dataclass(frozen=True)
class Result:
    """The four runs in the order of the table, and the Heavy-Ball runs that lost the choice of a rate."""

    runs: tuple[Run, ...]
    rejected: tuple[Run, ...]


def trainings() -> int:
    """Returns how many trainings `quickstart` makes."""
    return len(HEAVY_BALL_RATES) + 3


def quickstart(steps: int, seed: int, on_event: Callable[[Event], None] = lambda event: None) -> Result:
    """Trains the four optimizers and compares each FOSI run with its base.

    Args:
        steps: training steps for each optimizer, at least 1.
        seed: of the network's weights and of the batches; the split of the data does not depend on it.
        on_event: called as each training goes on.

    Returns:
        The four runs, and the Heavy-Ball runs at the rates that were not chosen.
    """
    if steps < 1:
        raise ValueError(f"steps is {steps}; give at least 1")
    if seed < 0:
        raise ValueError(f"seed is {seed}; give 0 or more")
    data = digits.load()

    def train(name: str, rate: float, label: str) -> Run:
        for event in _train(name, rate, label, data, steps, seed):
            on_event(event)
        assert event.run is not None
        return event.run

    candidates = [train("heavy-ball", rate, f"heavy-ball, rate {rate:g}") for rate in HEAVY_BALL_RATES]
    heavy_ball = min(candidates, key=_finite_train_loss)
    fosi_heavy_ball = train("fosi-heavy-ball", heavy_ball.learning_rate, "fosi-heavy-ball")
    adam = train("adam", ADAM_RATE, "adam")
    adam_with_fosi = train("fosi-adam", ADAM_RATE, "fosi-adam")
    return Result(
        runs=(heavy_ball, _against(heavy_ball, fosi_heavy_ball), adam, _against(adam, adam_with_fosi)),
        rejected=tuple(run for run in candidates if run is not heavy_ball),
    )


def caption() -> str:
    """Returns how the runs were set up, in one line."""
    rates = ", ".join(f"{rate:g}" for rate in HEAVY_BALL_RATES)
    return (
        f"heavy-ball at the best of {rates}; adam untuned at {ADAM_RATE:g}; "
        f"fosi-heavy-ball scales its rate up to {MAX_LR_SCALE:g}×"
    )


def draw(records: Iterable[Record]) -> dict[str, Figure]:
    """Draws training loss over steps."""
    made, axes = figures.figure()
    said = ""
    for record in records:
        said = record.get("caption", said)
        if record.get("kind") == "run":
            run = Run.of(record)
            style = figures.look(run.optimizer, len(run.curve))
            style["label"] += f" (rate {run.learning_rate:g})"
            axes.plot(*zip(*run.curve, strict=True), **style)
    axes.set_yscale("log")
    axes.set_xlabel(f"step\n\n{fill(said, width=80, break_on_hyphens=False)}")
    axes.set_ylabel("training loss")
    axes.set_title("Training loss on the digits")
    axes.legend(frameon=False)
    return {"quickstart": made}


def _finite_train_loss(run: Run) -> float:
    return run.train_loss if math.isfinite(run.train_loss) else math.inf


def _against(base: Run, run: Run) -> Run:
    reached = (step for step, loss in run.curve if loss <= base.best_train_loss)
    return replace(run, steps_to_base_best=next(reached, None))


def _optimizer(name: str, rate: float, warmup: int) -> Any:
    options: dict[str, Any] = {
        "k": EIGENPAIRS,
        "max_lr_scale": MAX_LR_SCALE,
        "warmup": warmup,
        "refresh": "external",
    }
    match name:
        case "heavy-ball":
            return optax.sgd(rate, momentum=MOMENTUM)
        case "fosi-heavy-ball":
            return fosi_sgd(rate, digits.loss, momentum=MOMENTUM, **options)
        case "adam":
            return optax.adam(rate)
        case "fosi-adam":
            return fosi_adam(rate, digits.loss, **options)
    raise ValueError(f"optimizer is {name!r}; give heavy-ball, fosi-heavy-ball, adam or fosi-adam")


def _train(name: str, rate: float, label: str, data: digits.Digits, steps: int, seed: int) -> Iterator[Event]:
    one_epoch = len(data.train.labels) // BATCH_SIZE  # the paper's warm-up
    opt = _optimizer(name, rate, warmup=one_epoch)
    params = digits.init(seed)
    state = opt.init(params)
    with_fosi = name.startswith("fosi-")
    schedule = opt.schedule(params) if with_fosi else None
    refresh = opt.refresh if with_fosi else None

    @jax.jit
    def step(params: digits.Params, state: Any, batch: digits.Batch) -> tuple[digits.Params, Any]:
        grads = jax.grad(digits.loss)(params, batch)
        updates, state = opt.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    evaluate = jax.jit(digits.loss)
    stream = list(digits.batches(data.train, BATCH_SIZE, steps, seed))

    # Compile before the clock starts; the functions are pure, so what these calls return can be dropped.
    yield Event(label, 0, steps)
    jax.block_until_ready(step(params, state, stream[0]))
    if refresh is not None:
        jax.block_until_ready(refresh(state, params, batch=stream[0]))

    curve = [(0, float(evaluate(params, data.train)))]
    every = max(1, steps // _EVALUATIONS)
    seconds, refreshes = 0.0, 0
    clock = time.perf_counter()
    for index, batch in enumerate(stream):
        if schedule is not None and refresh is not None and schedule.due(index):
            state = refresh(state, params, batch=batch)
            refreshes += 1
        params, state = step(params, state, batch)
        done = index + 1
        if done % every == 0 or done == steps:
            jax.block_until_ready((params, state))
            seconds += time.perf_counter() - clock
            curve.append((done, float(evaluate(params, data.train))))
            if done < steps:
                yield Event(label, done, steps)
            clock = time.perf_counter()

    accuracy = float(digits.accuracy(params, data.validation))
    run = Run(name, rate, steps, tuple(curve), accuracy, seconds, refreshes)
    yield Event(label, steps, steps, run)
