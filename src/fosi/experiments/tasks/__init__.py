"""The paper's training tasks (§5.1, §5.2): a module each, and the loop that trains them on the clock."""

from fosi.experiments.tasks import ac, ae, lm, lr, tl
from fosi.experiments.tasks.task import Task

TASKS: dict[str, Task] = {module.TASK.name: module.TASK for module in (lr, tl, ae, lm, ac)}
"""The tasks by name."""

__all__ = ["TASKS", "Task"]
