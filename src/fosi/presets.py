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

    They are advice by measurement, not the paper's: the ablations are in ``docs/pinns.md``. Without noise an estimate
    stays true in more directions and for less long than the paper's settings suppose: more pairs, with few products
    for each and only those used that converged, and a refresh far more often than the run-time budget of 10% has it.

    Args:
      base: what FOSI goes around: ``"lbfgs"`` for ``fosi.jax.fosi_lbfgs``, whose line search takes α = 1 and an
        estimate at once, or ``"adam"`` for first-order optimizers.

    Returns:
      A new dict at each call.

    Raises:
      ValueError: if ``base`` is none of these.

    Example:
      >>> deterministic("lbfgs")["alpha"]
      1.0
    """
    if base not in get_args(Base):
        raise ValueError(f"base must be 'adam' or 'lbfgs', got {base!r}")
    shared: dict[str, Any] = {"k": 40, "num_matvecs": 60, "accept": "converged", "precision": "float32"}
    if base == "lbfgs":
        return {**shared, "alpha": 1.0, "refresh_every": 200, "warmup": 1}
    return {**shared, "alpha": 0.1, "eps": 1.0, "refresh_every": 200, "warmup": 200}
