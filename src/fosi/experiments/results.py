"""One training as numbers: what the experiments return and what the reports, tables and figures read."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Run:
    """One optimizer's training: what was set, what it cost and where it got."""

    optimizer: str
    learning_rate: float
    steps: int
    curve: tuple[tuple[int, float], ...]
    """(steps taken, loss on the whole training set), from before the first step to after the last."""
    validation_accuracy: float
    seconds: float
    """Steps and refreshes; compiling and evaluating are left out."""
    refreshes: int
    steps_to_base_best: int | None = None
    """First evaluated step at the base's best training loss or below; None: never, or not a FOSI run."""

    @property
    def train_loss(self) -> float:
        """The loss on the whole training set after the last step."""
        return self.curve[-1][1]

    @property
    def best_train_loss(self) -> float:
        """The lowest finite loss of the curve; inf where there is none."""
        return min((loss for _, loss in self.curve if math.isfinite(loss)), default=math.inf)

    def record(self, chosen: bool = True) -> dict[str, Any]:
        """Returns the run as a record; `chosen` is false for a learning rate that was tried and not kept."""
        return {
            "kind": "run" if chosen else "rejected_rate",
            "optimizer": self.optimizer,
            "learning_rate": self.learning_rate,
            "steps": self.steps,
            "train_loss": self.train_loss,
            "best_train_loss": self.best_train_loss,
            "validation_accuracy": self.validation_accuracy,
            "seconds": self.seconds,
            "seconds_per_step": self.seconds / self.steps,
            "refreshes": self.refreshes,
            "steps_to_base_best": self.steps_to_base_best,
            "curve": [list(point) for point in self.curve],
        }

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> "Run":
        """Returns the run that `record` was made of; what was not finite there is NaN."""
        names = ("optimizer", "learning_rate", "steps", "validation_accuracy", "seconds", "refreshes")
        curve = tuple((step, math.nan if loss is None else loss) for step, loss in record["curve"])
        return cls(
            **{name: record[name] for name in names}, curve=curve, steps_to_base_best=record["steps_to_base_best"]
        )
