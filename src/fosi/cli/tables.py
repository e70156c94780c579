"""How results look in the terminal."""

from collections.abc import Iterable

from rich import box
from rich.table import Table

from fosi.experiments.results import Run

_HEADINGS = (
    "\nrate",
    "\nsteps",
    "train\nloss",
    "val.\nacc.",
    "ms per\nstep",
    "\nrefreshes",
    "steps to\nbase's best",
)


def runs_table(runs: Iterable[Run], title: str) -> Table:
    """Returns a table with one line a run."""
    # Two-line headings and no outer frame: the table fits a terminal of 80 columns.
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("\noptimizer", no_wrap=True)
    for heading in _HEADINGS:
        table.add_column(heading, justify="right", no_wrap=True)
    for run in runs:
        with_fosi = run.optimizer.startswith("fosi-")
        reached = run.steps_to_base_best
        table.add_row(
            run.optimizer,
            f"{run.learning_rate:g}",
            str(run.steps),
            f"{run.train_loss:.3g}",
            f"{run.validation_accuracy:.1%}",
            f"{1000 * run.seconds / run.steps:.2f}",
            str(run.refreshes) if with_fosi else "",
            ("-" if reached is None else str(reached)) if with_fosi else "",
            style="bold" if with_fosi else "",
        )
    return table
