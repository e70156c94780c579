"""What `fosi diagnose` and `fosi spectrum` measured, in the terminal."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich import box
from rich.table import Table


def diagnosis_table(found: Any, title: str) -> Table:
    """What a diagnosis measured, and what each number means."""
    table = _table(title, ("measured", "value", "meaning"))
    for row in _rows(found):
        table.add_row(*row)
    return table


def _rows(found: Any) -> Iterable[tuple[str, str, str]]:
    adam = found.base.startswith("adam")
    top = [value for value, used in zip(found.eigenvalues, found.accepted, strict=True) if used]
    yield (
        "pairs accepted",
        f"{found.used} of {found.k + found.ell}",
        f"m = {found.num_matvecs} products, n = {found.n:,}",
    )
    if top:
        yield "eigenvalues used", f"{top[0]:.3g} .. {top[-1]:.3g}", f"λ₁/λₖ = {_number(found.gap)}"
    yield "bulk edge", _number(found.bulk_edge), f"left to the base; λ₁ is {_number(found.bulk_gap)} times it"
    yield "smallest", _number(found.smallest), "the smallest Ritz value"
    yield "sharpness", _number(found.sharpness), "of P^(-1/2) H P^(-1/2), P = √ν + ε" if adam else "λ₁"
    yield "stability limit", _number(found.limit), f"of {found.base} at rate {found.learning_rate:g}"
    yield (
        "sharpness / limit",
        f"{found.of_limit:.3g}",
        f"{found.of_limit_left:.3g} with FOSI, at {found.lr_scale:.3g}x rate",
    )
    yield "gradient inside", f"{found.gradient_inside:.1%}", "of the mean gradient's square"
    signal, noise = (found.signal_inside, found.signal_outside), (found.noise_inside, found.noise_outside)
    for where, s, n in zip(("inside", "outside"), signal, noise, strict=True):
        yield f"noise {where}", _number(n), f"a batch; signal {s:.3g}, from {found.batches} batches"
    cost = "counted as 2m" if found.seconds is None else f"{1000 * found.seconds.refresh:.3g} ms, measured"
    yield "refresh", f"{found.refresh_gradients:.3g} gradients", cost
    every = "no T meets the budget" if found.refresh_every is None else f"T = {found.refresh_every}"
    yield "overhead", f"{found.overhead:.1%}", every
    if found.raced is not None:
        yield "race", f"{found.raced:.2f}", "FOSI's seconds over the base's"
    later = "" if found.raced is None else ", whole run"
    yield "predicted ratio", f"{found.ratio:.2f}", f"FOSI's seconds over the base's{later}"


def pairs_table(found: dict[str, Any], title: str) -> Table:
    """A spectrum's eigenvalues, with how far each can be trusted."""
    table = _table(title, ("pair", "eigenvalue", "residual", "accepted"))
    rows = zip(found["eigenvalues"], found["residuals"], found["accepted"], strict=True)
    for index, (value, residual, accepted) in enumerate(rows, 1):
        table.add_row(str(index), f"{value:.5g}", f"{residual:.2g}", "yes" if accepted else "no")
    return table


def _table(title: str, headings: tuple[str, ...]) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for heading in headings:
        table.add_column(heading, justify="left" if heading in ("measured", "meaning") else "right")
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
