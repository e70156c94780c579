"""Study 4: learning rates and momenta on the function b = 1.12, ζ = 90; FOSI with its rate unscaled and scaled."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.figure import Figure

from fosi.experiments import figures
from fosi.experiments.quadratic.descent import MOMENTUM, Method, descent
from fosi.experiments.quadratic.functions import functions, powers, rotated_basis, start
from fosi.experiments.quadratic.study import Table, Unit, at_least, ends, measurements
from fosi.experiments.records import Record

NAME = "learning-rate"
B, ZETA = 1.12, 90
CONSTANTS = {"k": 10, "alpha": 1.0, "b": B, "zeta": ZETA}
METHODS = (
    Method("gd"),
    Method("fosi-gd", c=1.0),
    Method("fosi-gd"),
    Method("heavy-ball"),
    Method("fosi-heavy-ball", c=1.0),
    Method("fosi-heavy-ball"),
    Method("adam"),
    Method("fosi-adam"),
)

Curves = dict[tuple[str, float | str | None], dict[float, float]]


@dataclass(frozen=True)
class Settings:
    """How finely rates in [1e-5, 10] and momenta in [0.7, 1) are tried; 0.9 is always among the momenta."""

    n: int = 100
    rates_per_decade: int = 10
    momenta: int = 30
    seed: int = 0
    iterations: int = 200
    backend: str = "jax"

    def __post_init__(self) -> None:
        at_least(ZETA, n=self.n)
        at_least(1, rates_per_decade=self.rates_per_decade, momenta=self.momenta, iterations=self.iterations)
        at_least(0, seed=self.seed)
        descent(self.backend)

    @property
    def etas(self) -> list[float]:
        """The learning rates."""
        return [float(f"{eta:.6g}") for eta in np.logspace(-5, 1, 6 * self.rates_per_decade + 1)]

    @property
    def betas(self) -> list[float]:
        """The momenta."""
        return sorted({MOMENTUM, *(round(float(x), 4) for x in np.linspace(0.7, 1, self.momenta, endpoint=False))})


def units(settings: Settings) -> list[Unit]:
    """One unit for each optimizer and cap: all rates and momenta in one program."""
    return [
        Unit(_label(m.optimizer, "inf" if m.c == np.inf else m.c), functools.partial(_run, settings, m))
        for m in METHODS
    ]


def _run(settings: Settings, method: Method) -> Iterable[Record]:
    betas = [MOMENTUM] if method.base == "gd" else settings.betas
    cells = [(eta, beta) for eta in settings.etas for beta in betas]
    lam = np.broadcast_to(powers(settings.n, B), (len(cells), settings.n))
    family = functions([rotated_basis(settings.n, ZETA, settings.seed)], lam, start(settings.n, settings.seed))
    eta, beta = np.array(cells).T
    curves = descent(settings.backend)(method, family, eta, beta, settings.iterations)[0]
    function = {"n": settings.n, "b": B, "zeta": ZETA}
    for (eta_, beta_), curve in zip(cells, curves, strict=True):
        end = [(settings.iterations, curve[-1])]
        yield from measurements(NAME, method, end, eta=eta_, momentum=beta_, seed=settings.seed, **function)


def fixed(records: Sequence[Record]) -> Curves:
    """Values of f at the end over the learning rate, momentum 0.9, by (optimizer, c)."""
    return tuned([r for r in records if r["momentum"] in (MOMENTUM, None)])


def tuned(records: Sequence[Record]) -> Curves:
    """Values of f at the end over the learning rate, at the best momentum for each, by (optimizer, c)."""
    found: Curves = {}
    for (name, c, eta, _), value in ends(records, "optimizer", "c", "eta", "momentum").items():
        line = found.setdefault((name, c), {})
        line[eta] = min(line.get(eta, np.inf), value)
    return found


def before(records: Sequence[Record]) -> float:
    """Returns f(θ₀)."""
    n, seed = records[0]["n"], records[0]["seed"]
    return 0.5 * float(np.sum(powers(n, B) * start(n, seed) ** 2))


def converging(line: dict[float, float], below: float) -> tuple[float, float]:
    """The smallest and the largest rate that end below this value."""
    good = [eta for eta, value in sorted(line.items()) if value < below]
    return (good[0], good[-1]) if good else (np.nan, np.nan)


def draw(records: Sequence[Record]) -> dict[str, Figure]:
    """Values of f at the end over the learning rate: momentum 0.9 on the left, the best one on the right."""
    made, axes = figures.figure(1, 2, 9.2, 5.0, sharey=True)
    start_value = before(records)
    for ax, curves, title in zip(
        axes, (fixed(records), tuned(records)), (f"momentum {MOMENTUM:g}", "the best momentum in [0.7, 1)"), strict=True
    ):
        for (name, c), line in curves.items():
            etas = sorted(line)
            style = figures.look(name, len(etas))
            style["label"] = _label(name, c)
            if c == 1.0:
                style |= {"linestyle": (0, (1, 1.2)), "markerfacecolor": "0.6"}
            ax.plot(etas, [min(line[eta], 1e3 * start_value) for eta in etas], **style)
        ax.axhline(start_value, color="black", linewidth=1, linestyle=":", label="f(θ₀)")
        ax.set_xscale("log")
        ax.set_yscale("log")
        ax.set_ylim(top=30 * start_value)
        ax.set_xlabel("learning rate η")
        ax.set_title(title)
    axes[0].set_ylabel("f(θ) after the last iteration")
    figures.legend(made, axes[0], columns=3)
    return {NAME: made}


def table(records: Sequence[Record]) -> Table:
    """Best value and rate, and the rates that converge."""
    below = before(records)
    rows = []
    best = tuned(records)
    for key, line in fixed(records).items():
        eta = min(line, key=lambda e: line[e])
        top = converging(line, below)[1]
        rows.append((_label(*key), f"{line[eta]:.3g}", f"{eta:.2g}", f"{top:.2g}", f"{min(best[key].values()):.3g}"))
    headings = ("optimizer", "best f", "at rate", "largest rate that ends below f(θ₀)", "best f, momentum tuned")
    return Table("After the last iteration", headings, rows)


def _label(name: str, c: float | str | None) -> str:
    scaled = name.startswith("fosi-") and name != "fosi-adam"
    return f"{name}, c = {'∞' if c == 'inf' else format(c, 'g')}" if scaled and c is not None else name
