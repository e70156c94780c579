"""FOSI for JAX: an optax transformation around any other, and the spectrum estimate it stands on."""

from fosi.diagnosis import Diagnosis
from fosi.jax.curvature import Batches, ModelLoss, gauss_newton
from fosi.jax.diagnosis import diagnose
from fosi.jax.layered import Layered, LayeredState, in_layers
from fosi.jax.optimizers import STATIC_ARGS, fosi, fosi_adam, fosi_adamw, fosi_lbfgs, fosi_sgd
from fosi.jax.own_params import OwnParamsState, without_params
from fosi.jax.spectrum import Spectrum, estimate_spectrum
from fosi.jax.transform import Fosi, FosiState, JaxOptions

__all__ = [
    "STATIC_ARGS",
    "Batches",
    "Diagnosis",
    "Fosi",
    "FosiState",
    "JaxOptions",
    "Layered",
    "LayeredState",
    "ModelLoss",
    "OwnParamsState",
    "Spectrum",
    "diagnose",
    "estimate_spectrum",
    "fosi",
    "fosi_adam",
    "fosi_adamw",
    "fosi_lbfgs",
    "fosi_sgd",
    "gauss_newton",
    "in_layers",
    "without_params",
]
