"""FOSI for JAX: an optax transformation around any other, and the spectrum estimate it stands on."""

from fosi.jax.curvature import Batches, ModelLoss
from fosi.jax.optimizers import STATIC_ARGS, fosi, fosi_adam, fosi_adamw, fosi_sgd
from fosi.jax.own_params import OwnParamsState, without_params
from fosi.jax.spectrum import Spectrum, estimate_spectrum
from fosi.jax.transform import Fosi, FosiState, JaxOptions

__all__ = [
    "STATIC_ARGS",
    "Batches",
    "Fosi",
    "FosiState",
    "JaxOptions",
    "ModelLoss",
    "OwnParamsState",
    "Spectrum",
    "estimate_spectrum",
    "fosi",
    "fosi_adam",
    "fosi_adamw",
    "fosi_sgd",
    "without_params",
]
