"""The paper's training tasks (§5.1, §5.2): a module each, and the loop that trains them on the clock."""

from fosi.experiments.tasks import ac, ae, lm, lr
from fosi.experiments.tasks.task import Task

TASKS: dict[str, Task] = {module.TASK.name: module.TASK for module in (lr, ae, lm, ac)}
"""The tasks by name. Transfer learning (tl) is not there yet."""

__all__ = ["TASKS", "Task"]
