"""Which run: a task, an optimizer, a seed, and what is set otherwise than in the paper. Its files bear its name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from fosi.experiments.tasks import TASKS, pinn, settings
from fosi.experiments.tasks.engine import Engine
from fosi.experiments.tasks.task import Task

IN_TORCH = ("lr", "lm", *pinn.TASKS)
"""The tasks that exist in PyTorch too."""
ENDLESS = 10**6
"""Rounds, where seconds end a run."""
CONTROL = 3.0
"""The base alone at so many times its rate: what the learning-rate scaling alone could do."""


@dataclass(frozen=True)
class Plan:
    """One run.

    Attributes:
      task: its name.
      optimizer: its name.
      seed: of the weights and of the batches.
      backend: ``"jax"`` or ``"torch"``.
      rate_factor: multiplies the paper's learning rate.
      curvature: what estimates are made on; see ``engine.CURVATURES``.
      mode: one of the task's modes; None for its first.
      rounds: how many; None for as many as in the paper, or as fit into ``seconds``.
      seconds: on the clock, after which no further round is begun; None to go on to the last.
      batch_size: examples in a batch; None for the task's own, which is what its own number becomes.
      tiny: on made data, in seconds.
      options: FOSI's settings, or the optimizer's, in the place of the paper's.
    """

    task: str
    optimizer: str
    seed: int = 0
    backend: str = "jax"
    rate_factor: float = 1.0
    curvature: str = "fixed"
    mode: str | None = None
    rounds: int | None = None
    seconds: float | None = None
    batch_size: int | None = None
    tiny: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Checks the names."""
        if self.task not in TASKS:
            raise ValueError(f"task is {self.task!r}; give one of {', '.join(TASKS)}")
        if self.optimizer not in settings.NAMES:
            raise ValueError(f"optimizer is {self.optimizer!r}; give one of {', '.join(settings.NAMES)}")
        if self.backend not in ("jax", "torch"):
            raise ValueError(f"backend is {self.backend!r}; give jax or torch")
        if self.backend == "torch" and self.task not in IN_TORCH:
            known = ", ".join(IN_TORCH)
            raise ValueError(f"backend is 'torch', in which there are the tasks {known}; {self.task} is in jax only")
        modes = TASKS[self.task].modes
        if self.mode is not None and self.mode not in modes:
            known = f"give one of {', '.join(modes)}" if modes else f"{self.task} has none"
            raise ValueError(f"mode is {self.mode!r}; {known}")
        if self.rounds is not None and self.rounds < 1:
            raise ValueError(f"rounds is {self.rounds}; give 1 or more")
        if self.seconds is not None and not 0 < self.seconds < math.inf:
            raise ValueError(f"seconds is {self.seconds}; give a number above 0")
        self._check_batch_size()
        if taken := [name for name in self.options if name in ("seed", "rate_factor", "curvature", "task", "name")]:
            raise ValueError(f"{taken[0]} is no setting of the optimizer here: a run has its own, give it apart")
        if not self.rate_factor > 0:
            raise ValueError(f"rate_factor is {self.rate_factor}; give a number above 0")

    def _check_batch_size(self) -> None:
        if self.batch_size is None:
            return
        if not self.of.resizes:
            known = ", ".join(name for name, task in TASKS.items() if task.resizes)
            raise ValueError(
                f"batch_size is {self.batch_size}, which is for the tasks {known}; {self.task} has its own"
            )
        if self.batch_size < 1:
            raise ValueError(f"batch_size is {self.batch_size}; give 1 or more")
        if self.batch_size == self.of.batch_size and not self.tiny:
            object.__setattr__(self, "batch_size", None)  # the same run, so that a sweep finds it under its one name

    @property
    def name(self) -> str:
        """A name that no run with other settings has."""
        parts = [self.optimizer]
        if self.backend != "jax":
            parts.append(self.backend)
        if self.rate_factor != 1:
            parts.append(f"rate-x{self.rate_factor:g}")
        if self.curvature != "fixed":
            parts.append(f"curvature-{self.curvature}")
        if self.mode is not None:
            parts.append(self.mode)
        if self.rounds is not None:
            parts.append(f"rounds-{self.rounds}")
        if self.seconds is not None:
            parts.append(f"seconds-{self.seconds:g}")
        if self.batch_size is not None:
            parts.append(f"batch-{self.batch_size}")
        parts += [f"{key.replace('_', '-')}-{value}" for key, value in sorted(self.options.items())]
        if self.tiny:
            parts.append("tiny")
        return ".".join([*parts, f"seed-{self.seed}"])

    @property
    def base(self) -> str | None:
        """The base optimizer's name; None for peers such as K-FAC and L-BFGS, which have none."""
        return None if self.optimizer in settings.PEERS else settings.without_fosi(self.optimizer)

    @property
    def reference(self) -> Plan:
        """The run that sets this one's target: its base with the task's settings; Heavy-Ball where there is none."""
        base, alike = self.base or "heavy-ball", settings.of_relay(self.optimizer, self.options)
        return replace(self, optimizer=base, rate_factor=1.0, curvature="fixed", options=alike)

    @property
    def other_mode(self) -> str:
        """The mode, where it is not the task's first: None and the first are the same run."""
        return "" if self.mode in (None, *self.of.modes[:1]) else str(self.mode)

    def with_seed(self, seed: int) -> Plan:
        """The same with another seed."""
        return replace(self, seed=seed)

    @property
    def of(self) -> Task:
        """The task."""
        return TASKS[self.task]

    @property
    def length(self) -> int:
        """How many rounds at the most."""
        if self.rounds is not None:
            return self.rounds
        return self.of.rounds_in(self.batch_size) if self.seconds is None else ENDLESS

    def record(self) -> dict[str, Any]:
        """All of it, for a results file."""
        return asdict(self)

    def build(self, data_dir: Any, download: bool) -> Any:
        """The problem to train on."""
        given = {"mode": self.mode, "batch_size": self.batch_size}
        extra = {name: value for name, value in given.items() if value is not None}
        if self.backend == "torch":
            from fosi.experiments.tasks import torch_tasks

            return torch_tasks.build(self.task, data_dir, download, self.seed, self.tiny, **extra)
        return self.of.build(data_dir, download, self.seed, self.tiny, **extra)

    def engine(self, problem: Any) -> Engine:
        """What trains it.

        Raises:
          ValueError: if the optimizer has no such settings.
        """
        try:
            return self._engine(problem)
        except TypeError as error:  # of the optimizer's constructor, which names the setting
            raise ValueError(f"{self.optimizer} with {dict(self.options)}: {error}") from error

    def _engine(self, problem: Any) -> Engine:
        given = {"rate_factor": self.rate_factor, **self.options}
        if self.optimizer == "kfac":
            from fosi.experiments.tasks.kfac_engine import KfacEngine

            return KfacEngine(self.of, problem, self.optimizer, self.seed, **given)
        given["curvature"] = self.curvature
        if self.backend == "torch":
            from fosi.experiments.tasks.torch_engine import TorchEngine

            return TorchEngine(self.of, problem, self.optimizer, self.seed, **given)
        from fosi.experiments.tasks.jax_engine import JaxEngine

        return JaxEngine(self.of, problem, self.optimizer, self.seed, **given)
