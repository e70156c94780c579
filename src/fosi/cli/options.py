"""What the commands share: checks of their options, and where figures went."""

from collections.abc import Callable, Iterable
from pathlib import Path

import typer
from rich.console import Console


def at_least(least: int) -> Callable[[int | None], int | None]:
    """Returns a check for an option, given or not; typer's own min= says what is allowed but not what was given."""

    def check(value: int | None) -> int | None:
        if value is not None and value < least:
            raise typer.BadParameter(f"{value} is too small; give {least} or more")
        return value

    return check


def print_figures(console: Console, paths: Iterable[Path]) -> None:
    """Says where figures are, those of one name on one line."""
    names: dict[Path, list[str]] = {}
    for path in paths:
        names.setdefault(path.with_suffix(""), []).append(path.suffix)
    for path, suffixes in names.items():
        console.print(f"Figure:  {path}{' and '.join(suffixes)}", soft_wrap=True, highlight=False)
