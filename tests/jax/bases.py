"""Every base optimizer of the shared cases as the JAX backend has it."""

import jax
import jax.numpy as jnp
import optax

import fosi
from fosi.jax import fosi as wrap
from fosi.jax import fosi_adam, fosi_adamw, fosi_sgd
from tests.cases import BETA, LINEAR, RATES, diagonal
from tests.jax.running import as_tree, loss_fn


def scale_by_diagonal(problem, dtype):
    """A fixed diagonal preconditioner as an optax transformation."""
    q = as_tree(problem, diagonal(len(problem.start)), dtype)
    return optax.stateless(lambda updates, params: jax.tree.map(jnp.multiply, updates, q))


def ours(base, problem, dtype, rate=None, loss="of the problem", **options):
    """The optimizer under test, with all Lanczos products and all pairs unless ``options`` say otherwise."""
    rate = RATES[base][0] if rate is None else rate
    loss = loss_fn(problem) if loss == "of the problem" else loss
    options = {
        "k": problem.k,
        "ell": problem.ell,
        "alpha": RATES[base][1],
        "accept": "all",
        "num_matvecs": len(problem.start),
        **options,
    }
    if base == "adam":
        return fosi_adam(rate, loss, **options)
    if base == "adamw":
        return fosi_adamw(rate, loss, **options)
    if base in LINEAR:
        options = {"lr_rule": None, **options}
        if options["lr_rule"] == "default":
            del options["lr_rule"]
        momentum = None if base == "gd" else BETA
        return fosi_sgd(rate, loss, momentum=momentum, nesterov=base == "nesterov", **options)
    nesterov = base == "diagonal-nesterov"
    trace = optax.identity() if base == "diagonal" else optax.trace(BETA, nesterov)
    chain = optax.chain(trace, scale_by_diagonal(problem, dtype), optax.scale_by_learning_rate(rate))
    return wrap(chain, loss, momentum=None if base == "diagonal" else fosi.Trace(BETA, nesterov), **options)
