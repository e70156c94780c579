"""Training tasks: the paper's (§5.1, §5.2), and others where curvature matters; and the loop that trains them."""

from fosi.experiments.tasks import ac, ae, deep_ae, lm, lr, pinn, softmax_full, tl
from fosi.experiments.tasks.task import Task

PAPER: dict[str, Task] = {module.TASK.name: module.TASK for module in (lr, tl, ae, lm, ac)}
"""The paper's, by name."""

TASKS: dict[str, Task] = {
    **PAPER,
    **pinn.TASKS,
    **{module.TASK.name: module.TASK for module in (deep_ae, softmax_full)},
}
"""All of them."""

__all__ = ["PAPER", "TASKS", "Task"]
