"""One training as numbers: what the experiments return and what the reports, tables and figures read."""

import math
from dataclasses import dataclass


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
