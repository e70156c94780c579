"""FOSI: Newton's method on the extreme curvature, any first-order optimizer on the rest."""

from fosi import analysis, diagnosis, presets, scaling, schedule
from fosi.momentum import Ema, Trace

__version__ = "0.1.0"

__all__ = ["Ema", "Trace", "__version__", "analysis", "diagnosis", "presets", "scaling", "schedule"]
