"""What FOSI around L-BFGS goes by in every framework: the scale outside the subspace, and where a line search begins.

Of a pair (s, y), the last step and the change of the gradient along it, less what lies in the subspace, the usual scale
is γ = sᵀy/yᵀy: of the curvatures that the step met it follows the largest, so that all directions of which neither V
nor a pair knows are taken for as steep. Here it is |s|/|y|, the geometric mean of that and of sᵀs/sᵀy, which follows
the smallest (Dai, Al-Baali and Yang, 2015, for gradient descent). The step is then too long as a whole, by much the
same as the last: a search begins near where that ended, not at 1. Where it ends at a hundredth, the subspace and the
pairs, which know better, go at a hundredth too: γ is then cut, and grows back as long as searches bear it.
"""

from typing import Any, Literal, get_args

from fosi.options import Options

Scaling = Literal["geometric", "usual"]

LEAST_SHARE = 1e-3
"""Of the curvature along a step, how much must lie outside the subspace for γ to be read off it."""

LEAST_SCALE = 0.1
"""γ as measured is no less than this part of the longest α/|λ| of the largest eigenvalues. Were the estimate still
true, all that it leaves out would be flatter than those, and γ larger; what has left the subspace since makes a pair's
γ smaller."""

RESOLVED = 1e6
"""By how much |λ| may fall below the largest: what is smaller is rounding's, and its α/|λ| no length for a step."""

LOSS_NOISE = 1e-3
"""By how much of itself a loss may be higher where the slopes say that it is lower. In float32 the loss of a
physics-informed network is off by 1e-5 of itself and, where it is small, by more: its residuals are differences of
large numbers. One value that is too low by chance, and a search that asks for less hardly moves again: on a reaction
equation at a loss of 1e-7 it took 3.5 trials a step with 1e-4, and 1.8 with 1e-3 or 1e-2."""

GROWTH = 1.1
"""A search begins at this many times where the last one ended, at 1 at most. A step that is ten times too short still
satisfies a search, so one that began where the last ended would never find its way back to 1, and Newton's rate near a
minimum would be lost. Of four small networks for equations, one seed each, all needed fewer gradients with 1.1 than
with 1 (2 to 23%); with 1.5 and 2 some needed fewer still, and one more than with 1."""

SHORT, CUT = 0.01, 0.1
"""Whenever a search ends below the one, or finds no lower loss, γ is multiplied by the other from then on."""

LONG, REGROWTH = 0.02, 1.1
"""Whenever one ends above the one, what γ is multiplied by grows by the other, to 1 at most. On four equations, small
networks and two seeds, after 2,000 gradients, FOSI around L-BFGS is so as low as with γ as measured or lower in seven
of eight (on burgers by factors of 7 and 2,000), and a fifth higher in one; cut below 0.02 likewise. Where searches are
to end near 1 (cut below 0.2 or 0.5) it is slower than either: all that neither V nor a pair knows then crawls."""

LEAST_TRUST = 1e-6
"""What γ is multiplied by is no less: where noise ends every search, γ should not be lost for good."""

MAX_TRIALS = 20
"""Of one search."""


def check(settings: Options, scaling: Any) -> None:
    """Raises for settings that mean nothing around L-BFGS."""
    momentum = None if settings.momentum == "auto" else settings.momentum
    given = {"mask": getattr(settings, "mask", None), "lr_rule": settings.lr_rule, "momentum": momentum}
    for name, value in given.items():
        if value is not None:
            raise ValueError(f"{name} has no meaning for FOSI around L-BFGS, got {value!r}; leave it out")
    if scaling not in get_args(Scaling):
        raise ValueError(f"scaling must be 'geometric' or 'usual', got {scaling!r}")
