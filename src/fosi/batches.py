"""The batches that a diagnosis is given: the same checks and the same reading in every framework."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

T = TypeVar("T")


def checked(batches: Any, name: str = "batches") -> list[Any]:
    """The batches as a list.

    Raises:
      TypeError: if they are no list: a single batch, which may be a tuple, is easily given in its place.
    """
    if not isinstance(batches, Sequence) or isinstance(batches, (str, tuple)) or not batches:
        raise TypeError(f"{name} must be a list of at least one batch, got {type(batches).__name__}: {batches!r:.80}")
    return list(batches)


def distinct(drawn: Sequence[T], count: int | None) -> list[T]:
    """The first so many, None for all; the same object twice, which says that there is no noise, only once.

    Raises:
      ValueError: if there are not so many.
    """
    if count is not None and not (isinstance(count, int) and 1 <= count <= len(drawn)):
        raise ValueError(
            f"curvature_batches must be from 1 to the {len(drawn)} batches, a list of others or None, got {count!r:.80}"
        )
    return list({id(one): one for one in drawn[:count]}.values())
