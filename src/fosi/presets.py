"""Ready sets of keyword arguments."""

from typing import Any


def paper() -> dict[str, Any]:
    """Keyword arguments that give the paper's method to the letter, as in its section 4.1.

    k = 10, ℓ = 0, α = 0.01, c = 3 and ρ = 1.1, hence T = 800 up to 4.8e8 parameters; every pair Lanczos
    returns is used, and Lanczos runs in float64. ``warmup`` is left at its default, W = T; the paper takes
    one epoch where there are epochs. Every value can be overridden: ``{**paper(), "k": 20}``.

    With JAX::

        from fosi.jax import fosi_adam
        from fosi.presets import paper

        opt = fosi_adam(1e-3, loss_fn, **paper())

    Returns:
      A new dict at each call.

    Example:
      >>> paper()["alpha"]
      0.01

    References:
      Sections 3.2, 3.6, 3.7 and 4.1 of the paper.
    """
    return {
        "k": 10,
        "ell": 0,
        "alpha": 0.01,
        "eps": 1e-8,
        "max_lr_scale": 3.0,
        "overhead": 0.1,
        "accept": "all",
        "precision": "float64",
    }
