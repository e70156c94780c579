"""One style for all figures: lines differ in dash and marker as well as in colour, so that they print in grey."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FormatStrFormatter, LogLocator, NullFormatter
from matplotlib.transforms import Bbox

COLOURS = {
    "gd": "#0072B2",
    "heavy-ball": "#D55E00",
    "adam": "#009E73",
    "diagonal": "#CC79A7",
    "nesterov": "#E69F00",
    "adamw": "#56B4E9",
    "kfac": "#000000",
    "lbfgs": "#7F7F7F",
    "newton-cg": "#332288",
    "muon": "#882255",
    "soap": "#117733",
    "sophia": "#999933",
}
"""A colour a base optimizer, of Okabe and Ito's palette for the colour-blind; the last of Tol's."""

_GREY_WITH_FOSI = "#CC3311"
"""L-BFGS is grey; with FOSI inside, grey would hide what a figure is about."""

_MARKERS = dict(zip(COLOURS, "os^Dv<>PXph*", strict=True))
_STYLE: dict[Any, Any] = {
    "font.size": 10,
    "axes.titlesize": 10,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.xmargin": 0.01,
    "legend.frameon": False,
    "legend.handlelength": 3.2,
    "figure.dpi": 150,
    "pdf.fonttype": 42,  # text stays text in the PDF
    "svg.hashsalt": "fosi",
}


def figure(rows: int = 1, columns: int = 1, width: float = 7.5, height: float = 4.8, **axes: Any) -> tuple[Figure, Any]:
    """Returns a figure in the common style and its axes, as an array where there are several."""
    with matplotlib.rc_context(_STYLE):
        made = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasAgg(made)
        return made, made.subplots(rows, columns, **axes)


def look(optimizer: str, points: int = 0) -> dict[str, Any]:
    """Returns how a line of this optimizer looks: the base dashed with hollow markers, FOSI solid with filled ones.

    Args:
      optimizer: its name.
      points: how many points the line has; about eight of them are marked. 0: no markers.
    """
    base = optimizer.replace("fosi-", "")
    with_fosi = base != optimizer
    line: Any = "-" if with_fosi else (0, (4, 2))
    if base not in COLOURS:  # one after another, such as adam-lbfgs, in the colour of the second
        base = next(name for name in COLOURS if base.endswith(f"-{name}"))
        first, second = optimizer.startswith("fosi-"), "-fosi-" in optimizer
        dashes = {(0, 0): (6, 1, 1, 1), (1, 0): (8, 1), (0, 1): (8, 1, 2, 1), (1, 1): (16, 1)}[first, second]
        if "adam" not in optimizer:  # after another than Adam
            dashes = (2, 1) if second else (6, 1, 1, 1, 1, 1)
        line = (0, dashes)
    colour = _GREY_WITH_FOSI if with_fosi and base == "lbfgs" else COLOURS[base]
    style: dict[str, Any] = {
        "color": colour,
        "linestyle": line,
        "linewidth": 2.0 if with_fosi else 1.5,
        "label": optimizer,
    }
    if points:
        shift = list(COLOURS).index(base) * points // 32  # so that lines on top of each other still show both
        style |= {
            "marker": _MARKERS[base],
            "markevery": (shift, max(1, points // 8)),
            "markersize": 5,
            "markerfacecolor": colour if with_fosi else "white",
        }
    return style


def log_seconds(axis: Axes) -> None:
    """Makes the seconds logarithmic; over few decades with ticks at 1, 2 and 5 of each, whose names do not touch."""
    axis.set_xscale("log")
    least, most = axis.get_xlim()
    if most < 100 * least:
        axis.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.xaxis.set_major_formatter(FormatStrFormatter("%g"))
    axis.xaxis.set_minor_formatter(NullFormatter())


def legend(made: Figure, axes: Axes, columns: int = 6) -> None:
    """Puts the axes' legend below the whole figure."""
    handles, labels = axes.get_legend_handles_labels()
    with matplotlib.rc_context(_STYLE):
        made.legend(handles, labels, loc="outside lower center", ncols=columns)


def name_points(axis: Axes, names: Sequence[str], x: Sequence[float], y: Sequence[float], size: float = 7) -> None:
    """Writes a name beside each point, on the first side where it covers no other name and no mark.

    Args:
      axis: with its limits and scales as they will be.
      names: one a point; where every side is taken, on the right of it.
      x: of the points.
      y: of the points.
      size: of the letters.
    """
    renderer = FigureCanvasAgg(axis.figure).get_renderer()  # type: ignore[arg-type,no-untyped-call]
    axis.figure.draw_without_rendering()  # type: ignore[union-attr]
    marks = [Bbox.from_bounds(u - 6, v - 6, 12, 12) for u, v in axis.transData.transform(list(zip(x, y, strict=True)))]
    taken: list[Bbox] = []
    for index, (name, *point) in enumerate(zip(names, x, y, strict=True)):
        others = [*taken, *marks[:index], *marks[index + 1 :]]
        text = axis.annotate(name, (point[0], point[1]), (0, 0), textcoords="offset points", fontsize=size)
        for right, up in [*((side, up) for up in (0, 1, -1, 2, -2) for side in (True, False)), (True, 0)]:
            text.set(position=(5 if right else -5, up * (size + 1)), ha="left" if right else "right", va="center")
            box = text.get_window_extent(renderer)
            if not any(box.overlaps(other) for other in others):
                break
        taken.append(box)


def save(made: Figure, path: Path, formats: Sequence[str] = ("png", "pdf")) -> Iterable[Path]:
    """Writes the figure beside ``path``, once for each format, and returns where."""
    written = []
    with matplotlib.rc_context(_STYLE):
        for kind in formats:
            written.append(path.with_suffix(f".{kind}"))
            made.savefig(written[-1], dpi=150, metadata={"CreationDate": None} if kind == "pdf" else {})
    return written
