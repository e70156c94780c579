"""FOSI for PyTorch: ``FOSI(torch.optim.AdamW(model.parameters(), lr=1e-3), model=model, k=10)``."""

from fosi.diagnosis import Diagnosis
from fosi.momentum import Ema, Trace
from fosi.torch.curvature import ModelLoss
from fosi.torch.diagnosis import diagnose
from fosi.torch.lbfgs import FosiLBFGS
from fosi.torch.optimizer import FOSI
from fosi.torch.spectrum import Spectrum, estimate_spectrum

__all__ = ["FOSI", "Diagnosis", "Ema", "FosiLBFGS", "ModelLoss", "Spectrum", "Trace", "diagnose", "estimate_spectrum"]
