"""Training tasks: the paper's (§5.1, §5.2), and PINNs; a module each, and the loop that trains them on the clock."""

from fosi.experiments.tasks import ac, ae, lm, lr, pinn, tl
from fosi.experiments.tasks.task import Task

PAPER: dict[str, Task] = {module.TASK.name: module.TASK for module in (lr, tl, ae, lm, ac)}
"""The paper's, by name."""

TASKS: dict[str, Task] = {**PAPER, **pinn.TASKS}
"""All of them."""

__all__ = ["PAPER", "TASKS", "Task"]
