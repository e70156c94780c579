"""Torch optimizers on a problem in PyTorch: eager steps, estimates between them."""

from __future__ import annotations

import copy
import functools
import io
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn, optim

from fosi.experiments.tasks import engine, settings, torch_optimizers
from fosi.experiments.tasks.engine import Estimate
from fosi.experiments.tasks.torch_optimizers import Leg
from fosi.experiments.tasks.torch_problem import TorchProblem
from fosi.schedule import Schedule
from fosi.torch import FOSI, FosiLBFGS

if TYPE_CHECKING:  # it brings JAX with it
    from fosi.experiments.tasks.task import Task


CALL = 20
"""Steps of a search in one call of L-BFGS, as many as torch's own takes: a call evaluates the loss once more."""


class TorchRun(NamedTuple):
    """A model and its optimizer, which steps write over, and how many steps have been taken."""

    model: nn.Module
    optimizer: optim.Optimizer
    step: int = 0


class TorchEngine:
    """Trains one problem with one of the optimizers that are ``settings.in_torch``; see ``Engine``."""

    backend = "torch"
    looks = 1

    def __init__(
        self,
        task: Task,
        problem: TorchProblem,
        name: str,
        seed: int,
        rate_factor: float = 1.0,
        curvature: str = "fixed",
        operator: str = "hessian",
        **options: Any,
    ) -> None:
        """Chooses the optimizer's settings and checks them.

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
        settings.check_operator(operator, name)
        if operator == "gauss_newton":
            if problem.split is None:
                raise ValueError(f"operator is {operator!r}, but this task does not say what its loss is made of")
            options["curvature"] = operator
        self.operator = operator
        self.problem, self.name, self.seed, self.clip = problem, name, seed, task.clip
        self.device = next(problem.model.parameters()).device
        self.first = self.order(0)
        self.steps_a_round = len(self.first)
        self._curvature = engine.curvature(curvature, task.batch_size)
        full_batch = problem.part is not None  # only where every batch is all data is there a part of it to choose
        self._legs = torch_optimizers.build(name, task, self.steps_a_round, full_batch, rate_factor, options)
        self.rate = self._legs[0].rate
        self._schedules = [self._schedule(leg) for leg in self._legs]
        self.schedule = next((schedule for schedule in self._schedules if schedule is not None), None)

    def take(self, problem: TorchProblem, seed: int) -> None:
        """Goes over to the same task built with another seed."""
        self.problem, self.seed = problem, seed
        self.first = self.order(0)

    def compile(self) -> None:
        """Goes once through all that runs on the clock, on copies: libraries load, and choose what they call."""
        for leg, schedule in zip(self._legs, self._schedules, strict=True):
            run = self._at(leg.since)
            if schedule is not None:
                run = self.refresh(run, self.first, 0)
            run, _ = self.advance(run, self.first, 0, min(2, self.steps_a_round))
        self.validate(run)

    def due(self, step: int) -> bool:
        """Whether an estimate precedes this step."""
        index = self._leg(step)
        schedule = self._schedules[index]
        return schedule is not None and bool(schedule.due(step - self._legs[index].since))

    def start(self) -> TorchRun:
        """The run before its first step."""
        return self._at(0)

    def _at(self, step: int) -> TorchRun:
        """A run of the form that one has after so many steps."""
        # Moved to where it is: a copy has an LSTM's weights scattered, and cuDNN wants them in one piece.
        model = copy.deepcopy(self.problem.model).to(self.device)
        return TorchRun(model, self._legs[self._leg(step)].make(_trained(model), model), step)

    def _schedule(self, leg: Leg) -> Schedule | None:
        optimizer = self._at(leg.since).optimizer
        return optimizer.schedule if leg.estimates and isinstance(optimizer, FOSI | FosiLBFGS) else None

    def _leg(self, step: int) -> int:
        """Which of the optimizers takes this step."""
        return sum(leg.since <= step for leg in self._legs) - 1

    def order(self, index: int) -> Tensor:
        """The batches of a round."""
        seed = np.random.SeedSequence((self.seed, index)).generate_state(1, np.uint64)
        order = self.problem.order(torch.Generator().manual_seed(int(seed[0])))
        self._wait()
        return order

    def advance(self, run: TorchRun, order: Tensor, start: int, stop: int) -> tuple[TorchRun, float]:
        """Takes the steps of the round from ``start`` up to ``stop``; the sum of their losses."""
        total = torch.zeros((), device=self.device)
        while start < stop:
            index = self._leg(run.step)
            later = [leg.since for leg in self._legs[index + 1 :]]
            end = min([stop, *(start + since - run.step for since in later)])
            searches = self._legs[index].searches
            total += self._searches(run, order[start], end - start) if searches else self._steps(run, order[start:end])
            run = run._replace(step=run.step + end - start)
            if run.step in later:
                run = run._replace(optimizer=self._legs[index + 1].make(_trained(run.model), run.model))
            start = end
        self._wait()
        return run, float(total)

    def _steps(self, run: TorchRun, order: Tensor) -> Tensor:
        total = torch.zeros((), device=self.device)
        params = _trained(run.model)
        for indices in order:
            run.optimizer.zero_grad()
            loss = self.problem.loss(run.model, self.problem.batch(self.problem.data, indices))
            loss.backward()
            if self.clip is not None:
                nn.utils.clip_grad_value_(params, self.clip)
            run.optimizer.step()
            total += loss.detach()
        return total

    def _searches(self, run: TorchRun, indices: Tensor, steps: int) -> Tensor:
        """Takes so many steps of a search on all data; each counts the loss at the beginning of its call.

        A call that ends before, where nothing lower is found, counts as all of its steps.
        """
        total = torch.zeros((), device=self.device)
        batch = self.problem.batch(self.problem.data, indices)

        def closure() -> Tensor:
            run.optimizer.zero_grad()
            loss = self.problem.loss(run.model, batch)
            loss.backward()
            return loss

        for begun in range(0, steps, CALL):
            count = min(CALL, steps - begun)
            run.optimizer.param_groups[0]["max_iter"] = count
            before: Any = run.optimizer.step(closure)  # type: ignore[arg-type]  # a tensor, as torch's own want it
            total += count * before.detach()
        return total

    def refresh(self, run: TorchRun, order: Tensor, index: int) -> TorchRun:
        """Estimates anew before step ``index`` of the round."""
        assert isinstance(run.optimizer, FOSI | FosiLBFGS)
        batches = self._curvature(self.problem, self.first, order, index)
        losses = [self._closure(run.model, batch) for batch in batches]
        run.optimizer.refresh(losses[0] if len(losses) == 1 else losses)
        self._wait()
        return run

    def _closure(self, model: nn.Module, batch: Any) -> Callable[[], Any]:
        """The loss in the form that FOSI takes the operator of."""
        split = self.problem.split
        if self.operator == "hessian" or split is None:
            return functools.partial(self.problem.loss, model, batch)
        return split(model, batch)

    def validate(self, run: TorchRun) -> float:
        """The metric on the validation data."""
        return float(self.problem.validate(run.model))

    def estimate(self, run: TorchRun) -> Estimate:
        """What FOSI works with."""
        if not isinstance(run.optimizer, FOSI | FosiLBFGS) or (found := run.optimizer.spectrum) is None:
            return Estimate()
        scale = run.optimizer.lr_scale if isinstance(run.optimizer, FOSI) else 1.0
        return Estimate(scale, tuple(found.eigenvalues[found.accepted].tolist()))

    def solution(self, run: TorchRun) -> None:
        """Nothing to draw: figures are made of what was found in JAX."""

    def gradient_seconds(self) -> float:
        """How long one gradient of a batch takes: the least of three times as many as fit into a round, at most 20."""
        count, model = min(20, self.steps_a_round), self.start().model
        params = _trained(model)

        def all_of_them() -> None:
            for index in range(count):
                loss = self.problem.loss(model, self.problem.batch(self.problem.data, self.first[index]))
                torch.autograd.grad(loss, params)
            self._wait()

        return engine.least_seconds(all_of_them) / count

    @property
    def device_name(self) -> str:
        """What it trains on."""
        return torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else self.device.type

    def peak_memory(self) -> int | None:
        """The most bytes that the process has held on the device, as torch's allocator counts; None on a CPU."""
        return torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else None

    def dump(self, run: TorchRun) -> bytes:
        """The model's and the optimizer's state as ``torch.save`` writes them."""
        stream = io.BytesIO()
        model, optimizer = run.model.state_dict(), run.optimizer.state_dict()
        found = {
            "name": self.name,
            "leg": self._leg_name(run),
            "step": run.step,
            "model": model,
            "optimizer": optimizer,
        }
        torch.save(found, stream)
        return stream.getvalue()

    def load(self, raw: bytes) -> TorchRun:
        """The run of such bytes."""
        found = torch.load(io.BytesIO(raw), map_location=self.device, weights_only=True)
        run = self._at(found.get("step", 0))  # there was none in those of before
        leg = self._leg_name(run)
        alike = (found["name"], found.get("leg", leg)) == (self.name, leg)
        if not alike or _shapes(found["model"]) != _shapes(run.model.state_dict()):
            raise ValueError("the checkpoint is of another model or another optimizer")
        run.model.load_state_dict(found["model"])
        run.optimizer.load_state_dict(found["optimizer"])
        return run

    def _leg_name(self, run: TorchRun) -> str:
        """What takes a run's next step, and since when: another ``switch_at`` has others."""
        return f"{type(run.optimizer).__name__} since {self._legs[self._leg(run.step)].since}"

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def _shapes(state: dict[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in state.items()}
