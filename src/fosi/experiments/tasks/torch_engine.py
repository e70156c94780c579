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

from fosi.experiments.tasks import engine, settings
from fosi.experiments.tasks.engine import Estimate
from fosi.experiments.tasks.settings import MOMENTUM, WEIGHT_DECAY
from fosi.experiments.tasks.torch_problem import TorchProblem
from fosi.torch import FOSI

if TYPE_CHECKING:  # it brings JAX with it
    from fosi.experiments.tasks.task import Task


class TorchRun(NamedTuple):
    """A model and its optimizer, which steps write over."""

    model: nn.Module
    optimizer: optim.Optimizer


class TorchEngine:
    """Trains one problem with a base of ``settings.BASES`` or FOSI around one; see ``Engine``."""

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
          **options: FOSI's settings in the place of the paper's.
        """
        settings.check(name)
        if not settings.is_wrappable(name):
            raise ValueError(f"optimizer is {name!r}, which is there only in JAX; in PyTorch give a base or fosi-BASE")
        self.problem, self.name, self.seed, self.clip = problem, name, seed, task.clip
        self.device = next(problem.model.parameters()).device
        self.first = self.order(0)
        self.steps_a_round = len(self.first)
        self._curvature = engine.curvature(curvature, task.batch_size)
        self._settings = settings.settle(name, task, self.steps_a_round, rate_factor, options)
        self.rate = self._settings.rate
        optimizer = self.start().optimizer
        self.schedule = optimizer.schedule if isinstance(optimizer, FOSI) else None

    def compile(self) -> None:
        """Goes once through all that runs on the clock, on copies: libraries load, and choose what they call."""
        run = self.start()
        if self.schedule is not None:
            run = self.refresh(run, self.first, 0)
        run, _ = self.advance(run, self.first, 0, min(2, self.steps_a_round))
        self.validate(run)

    def due(self, step: int) -> bool:
        """Whether an estimate precedes this step."""
        return self.schedule is not None and bool(self.schedule.due(step))

    def start(self) -> TorchRun:
        """The run before its first step."""
        # Moved to where it is: a copy has an LSTM's weights scattered, and cuDNN wants them in one piece.
        model = copy.deepcopy(self.problem.model).to(self.device)
        base = _base(self._settings.base, _trained(model), self.rate)
        # FOSI reads the base's momentum, and the closed form of its best rate, off the base.
        return TorchRun(model, base if self._settings.fosi is None else FOSI(base, model, **self._settings.fosi))

    def order(self, index: int) -> Tensor:
        """The batches of a round."""
        seed = np.random.SeedSequence((self.seed, index)).generate_state(1, np.uint64)
        order = self.problem.order(torch.Generator().manual_seed(int(seed[0])))
        self._wait()
        return order

    def advance(self, run: TorchRun, order: Tensor, start: int, stop: int) -> tuple[TorchRun, float]:
        """Takes the steps of the round from ``start`` up to ``stop``; the sum of their losses."""
        total = torch.zeros((), device=self.device)
        params = _trained(run.model)
        for index in range(start, stop):
            run.optimizer.zero_grad()
            loss = self.problem.loss(run.model, self.problem.batch(self.problem.data, order[index]))
            loss.backward()
            if self.clip is not None:
                nn.utils.clip_grad_value_(params, self.clip)
            run.optimizer.step()
            total += loss.detach()
        self._wait()
        return run, float(total)

    def refresh(self, run: TorchRun, order: Tensor, index: int) -> TorchRun:
        """Estimates anew before step ``index`` of the round."""
        assert isinstance(run.optimizer, FOSI)
        batches = self._curvature(self.problem, self.first, order, index)
        losses = [functools.partial(self.problem.loss, run.model, batch) for batch in batches]
        run.optimizer.refresh(losses[0] if len(losses) == 1 else losses)
        self._wait()
        return run

    def validate(self, run: TorchRun) -> float:
        """The metric on the validation data."""
        return float(self.problem.validate(run.model))

    def estimate(self, run: TorchRun) -> Estimate:
        """What FOSI works with."""
        if not isinstance(run.optimizer, FOSI) or run.optimizer.spectrum is None:
            return Estimate()
        found = run.optimizer.spectrum
        return Estimate(run.optimizer.lr_scale, tuple(found.eigenvalues[found.accepted].tolist()))

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
        torch.save({"name": self.name, "model": model, "optimizer": optimizer}, stream)
        return stream.getvalue()

    def load(self, raw: bytes) -> TorchRun:
        """The run of such bytes."""
        found = torch.load(io.BytesIO(raw), map_location=self.device, weights_only=True)
        run = self.start()
        if found["name"] != self.name or _shapes(found["model"]) != _shapes(run.model.state_dict()):
            raise ValueError("the checkpoint is of another model or another optimizer")
        run.model.load_state_dict(found["model"])
        run.optimizer.load_state_dict(found["optimizer"])
        return run

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def _shapes(state: dict[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in state.items()}


def _base(base: str, params: list[nn.Parameter], rate: float) -> optim.Optimizer:
    make: dict[str, Callable[[], optim.Optimizer]] = {
        "gd": lambda: optim.SGD(params, rate),
        "heavy-ball": lambda: optim.SGD(params, rate, momentum=MOMENTUM),
        "nesterov": lambda: optim.SGD(params, rate, momentum=MOMENTUM, nesterov=True),
        "adam": lambda: optim.Adam(params, rate),
        "adamw": lambda: optim.AdamW(params, rate, weight_decay=WEIGHT_DECAY),
    }
    return make[base]()
