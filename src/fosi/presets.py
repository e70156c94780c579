"""Ready sets of keyword arguments."""

from typing import Any, Literal, get_args

Base = Literal["adam", "lbfgs"]


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


def deterministic(base: Base = "adam") -> dict[str, Any]:
    """Keyword arguments for losses without noise: physics-informed networks, full batches.

    They are advice by measurement, not the paper's; the ablations are in ``docs/pinns.md``. Without noise an estimate
    every 200 steps pays. Around L-BFGS the Newton part takes whole steps and more pairs are kept, with fewer products
    for each: its line search bears pairs that are not exact. Around the others α is the paper's: where a training
    leaves a plateau, what was estimated 50 steps before is no measure for a step ten times as long. Estimates on a part
    of the batch cost a part.

    Args:
      base: what FOSI goes around: ``"lbfgs"`` for ``fosi.jax.fosi_lbfgs`` and ``fosi.torch.FosiLBFGS``, whose line
        search takes α = 1 and an estimate at once, or ``"adam"`` for that and all other first-order optimizers.

    Returns:
      A new dict at each call.

    Raises:
      ValueError: if ``base`` is none of these.

    Example:
      >>> deterministic("lbfgs")["alpha"]
      1.0
    """
    if base not in get_args(Base):
        raise ValueError(f"base must be 'lbfgs', or 'adam' for all first-order optimizers, got {base!r}")
    shared: dict[str, Any] = {"accept": "converged", "precision": "float32", "refresh_every": 200}
    if base == "lbfgs":
        return {**shared, "k": 40, "num_matvecs": 60, "alpha": 1.0, "warmup": 1}
    return {**shared, "k": 10, "num_matvecs": 40, "alpha": 0.01, "warmup": 200}
