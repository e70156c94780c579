"""A diagnosis in words, and the settings that follow from it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from fosi import prediction, schedule
from fosi.options import Options

if TYPE_CHECKING:  # it has `explain`, which calls this
    from fosi.diagnosis import Diagnosis

HELPS, HINDERS = 0.9, 1.05
"""Below the one a predicted ratio is a gain, above the other a loss; between them neither can be told."""

_CLEAR_GAP = 1.2
_SUSPECT = 0.3


def settings(found: Diagnosis) -> dict[str, Any]:
    """Keyword arguments for FOSI that suit a diagnosis.

    ``k``: up to the last clear gap, λ_i ≥ 1.2 λ_{i+1}, among the accepted: below it the eigenvectors mix with the next
    ones and turn between two estimates. ``alpha``: the paper's; ten times that is sooner on some, later on others, and
    may diverge where the curvature changes within T steps. ``refresh_every``: T by the budget. ``warmup``: T, or 2T
    where negative curvature is large: the point is still far from where a quadratic model means anything.
    ``max_lr_scale``: 1 where a faster base would be unstable.

    Args:
      found: the diagnosis.

    Returns:
      A new dict; empty where there is nothing to use.
    """
    if not found.used:
        return {}
    every = found.refresh_every or schedule.refresh_interval(found.num_matvecs, found.budget)
    made: dict[str, Any] = {
        "k": _pairs(found),
        "ell": found.ell,
        "alpha": Options.alpha,
        "refresh_every": every,
        "warmup": 2 * every if _far(found) else every,
        "num_matvecs": found.num_matvecs,  # what the pairs were judged by, and T is for; fewer pairs would take fewer
        "accept": found.accept,
        "precision": found.precision,
    }
    if _scales(found.base):
        made["max_lr_scale"] = found.max_lr_scale if found.of_limit_left < 1 else 1.0
    return made


def explain(found: Diagnosis) -> str:
    """A few plain sentences on a diagnosis.

    Args:
      found: the diagnosis.

    Returns:
      Lines: the verdict, the reasons, the settings.
    """
    return "\n".join([_verdict(found), *_reasons(found), _advice(found)])


def _verdict(found: Diagnosis) -> str:
    if not found.used:
        return (
            "Do not use FOSI here: no eigenpair converged. Train longer with the base first, or give the estimate more "
            "products (num_matvecs)."
        )
    ratio, spread = found.ratio, math.exp(prediction.SPREAD)
    range_ = f"about {ratio:.2f} of the base's time to the same target ({ratio / spread:.2f} to {ratio * spread:.2f})"
    if ratio < HELPS:
        said = f"FOSI is likely to help: {range_}."
    elif ratio <= HINDERS:
        said = f"FOSI is likely to make little difference: {range_}."
    else:
        said = f"Do not use FOSI here: {range_}."
    said += f" In the race it was {found.raced:.2f}." if found.raced is not None else ""
    return (
        f"{said} The rule is fitted to, and was shaped on, eleven tasks; a new one may be further off than the range."
    )


def _reasons(found: Diagnosis) -> list[str]:
    said = [_spectrum(found), _stability(found), _noise(found)]
    if found.refresh_every is None:
        said.append(
            f"No refresh interval meets the budget: products with the eigenvectors alone cost too much beside a "
            f"step this cheap; FOSI would take {found.overhead:.0%} more time a step."
        )
    return said


def _spectrum(found: Diagnosis) -> str:
    asked = found.k + found.ell
    if not found.used:
        return f"Of {asked} eigenpairs none can be trusted; the largest Ritz value is {found.largest:.3g}."
    said = f"{found.used} of {asked} eigenpairs can be trusted"
    if found.gap is not None:
        said += f", the largest {found.gap:.3g} times the last of them"
    if found.bulk_gap is not None:
        said += f" and {found.bulk_gap:.3g} times what is left to the base"
    said += "."
    if _far(found):
        said += f" The smallest, {found.smallest:.3g}, is as negative as these are large: it is early, train on first."
    return said


def _stability(found: Diagnosis) -> str:
    kind = "Divided by Adam's √ν, the sharpness" if found.base.startswith("adam") else "The sharpness"
    said = f"{kind} is {found.of_limit:.2g} of what {found.base} can bear at this rate"
    if found.sharpness_left is not None and found.used:
        said += f", and {found.of_limit_left:.2g} with FOSI"
        said += f" at {found.lr_scale:.2g} times the rate" if found.lr_scale > 1 else ""
    said += "."
    if 0 < found.of_limit < 1 / 3:
        times = f"up to {1 / found.of_limit:.2g}" if found.of_limit > 0.1 else "more than 10"
        said += f" Alone it could bear {times} times its rate: try 3 times first, which costs nothing."
    elif found.of_limit > 1:
        said += " It is beyond the edge of stability: steps along the sharpest directions go to and fro."
    return said


def _noise(found: Diagnosis) -> str:
    said = f"{found.gradient_inside:.0%} of the mean gradient's square lies in the subspace."
    if found.noise_inside is None or found.noise_outside is None:
        return said + " One batch does not tell noise from signal: give two or more."
    inside = _times(found.noise_inside, found.signal_inside)
    outside = _times(found.noise_outside, found.signal_outside)
    said += f" Noise of one batch is {inside} the signal inside and {outside} outside."
    if found.noise_share > 0.5:
        said += " Steps are about as long as it allows: longer ones would gain little."
    return said


def _advice(found: Diagnosis) -> str:
    made = settings(found)
    if not made:
        return "Settings: none."
    lead = "If you try it all the same: " if found.ratio > HINDERS else "Settings: "
    scaled = ""
    if not _scales(found.base):
        scaled = " The rate is not scaled with Adam."
    elif made["max_lr_scale"] < found.max_lr_scale:
        scaled = " Leave the rate as it is: scaled, the base would not bear what is left to it."
    return lead + ", ".join(f"{name}={value!r}" for name, value in made.items()) + "." + scaled


def _pairs(found: Diagnosis) -> int:
    """How many of the largest to ask for: FOSI counts them from the largest on, whether it can use them or not."""
    top = found.eigenvalues[: found.k]
    used = [i for i, accepted in enumerate(found.accepted[: found.k], 1) if accepted]
    if not used:
        return 0
    after = [*top[1:], -math.inf if found.bulk_edge is None else found.bulk_edge]
    clear = [i for i in used if top[i - 1] > 0 and top[i - 1] >= _CLEAR_GAP * after[i - 1]]
    return clear[-1] if clear else used[-1]


def _far(found: Diagnosis) -> bool:
    return found.smallest < -_SUSPECT * max(found.largest, 0.0)


def _scales(base: str) -> bool:
    return not base.startswith("adam")


def _times(noise: float, signal: float) -> str:
    if noise == 0:
        return "0 times"
    return f"{noise / signal:.2g} times" if signal > 0 else "beyond measure"
