"""SOAP: Adam in the eigenbasis of Shampoo's preconditioner, written from the paper of Vyas et al. (2024), Algorithm 3.

Where the algorithm leaves a choice open, this is what its authors' own program does:

- The first update is zero: the first gradient only makes the first eigenbasis, so that no gradient is ever rotated by a
  basis that it made alone. Adam's bias correction counts from the second.
- The basis is sorted, largest eigenvalue first, before each power iteration: QR keeps the first column's direction and
  bends the others, so the order says which directions settle first. Adam's second moments move with their columns.

One thing is as in Adam everywhere else: ε is added to the root of the corrected second moment.

On a full batch the first gradient comes twice; in its own eigenbasis most entries of it are rounding alone, and Adam
makes one step of the rate's size of each.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

B1 = B2 = 0.95
EPS = 1e-8
_FULL = jax.lax.Precision.HIGHEST


class Factor(NamedTuple):
    """One side of a parameter's preconditioner.

    Attributes:
      gram: the moving average of G Gᵀ, the gradient unfolded along this side.
      basis: its eigenvectors, as columns.
    """

    gram: jax.Array
    basis: jax.Array


class SoapState(NamedTuple):
    """The state.

    Attributes:
      count: updates made.
      mu: the moving average of gradients, in the parameters' own coordinates.
      nu: the moving average of their squares, in the eigenbasis.
      factors: for each parameter and each of its sides, the side's factor, or None where it has none.
    """

    count: jax.Array  # type: ignore[assignment]
    mu: Any
    nu: Any
    factors: tuple[tuple[Factor | None, ...], ...]


def soap(
    learning_rate: float,
    b1: float = B1,
    b2: float = B2,
    eps: float = EPS,
    shampoo_beta: float = 0.95,
    precondition_every: int = 10,
    max_precond_dim: int = 10_000,
) -> optax.GradientTransformation:
    """Returns SOAP as an optax transformation.

    Args:
      learning_rate: of Adam in the eigenbasis.
      b1: decay of the average of gradients.
      b2: decay of the average of their squares.
      eps: added to the root of the latter.
      shampoo_beta: decay of the averages of G Gᵀ and Gᵀ G.
      precondition_every: steps between two power iterations, f in the paper.
      max_precond_dim: a side that is larger has no factor, and is left as it is.
    """
    for name, value in (("b1", b1), ("b2", b2), ("shampoo_beta", shampoo_beta)):
        if not 0 <= value < 1:
            raise ValueError(f"{name} is {value!r}; give a number from 0 up to, but not including, 1")
    for name, count in (("precondition_every", precondition_every), ("max_precond_dim", max_precond_dim)):
        if not isinstance(count, int) or count < 1:
            raise ValueError(f"{name} is {count!r}; give a whole number, 1 or more")

    def init(params: Any) -> SoapState:
        zeros = jax.tree.map(jnp.zeros_like, params)
        factors = tuple(_factors(leaf, max_precond_dim) for leaf in jax.tree.leaves(params))
        return SoapState(jnp.zeros((), jnp.int32), zeros, jax.tree.map(jnp.zeros_like, params), factors)

    def update(updates: Any, state: SoapState, params: Any = None) -> tuple[Any, SoapState]:
        grads, tree = jax.tree.flatten(updates)
        leaves = zip(grads, jax.tree.leaves(state.mu), jax.tree.leaves(state.nu), state.factors, strict=True)
        steps, mu, nu, factors = zip(*(one(state.count, *leaf) for leaf in leaves), strict=True)
        count = optax.safe_increment(state.count)
        step, mu, nu = (jax.tree.unflatten(tree, leaves) for leaves in (steps, mu, nu))
        return step, SoapState(count, mu, nu, factors)

    def one(count: jax.Array, grad: jax.Array, mu: jax.Array, nu: jax.Array, factors: tuple[Factor | None, ...]) -> Any:
        """The step of one parameter, and its part of the state."""
        first = count == 0
        rotated = _rotate(grad, factors)
        # The first gradient counts for the preconditioner alone: with no mean of gradients there is no step.
        mu = jnp.where(first, mu, b1 * mu + (1 - b1) * grad)
        nu = jnp.where(first, nu, b2 * nu + (1 - b2) * rotated**2)
        age = jnp.maximum(count, 1).astype(mu.dtype)
        mean, square = _rotate(mu, factors) / (1 - b1**age), nu / (1 - b2**age)
        step = -learning_rate * _rotate(mean / (jnp.sqrt(square) + eps), factors, back=True)

        factors = tuple(
            factor and factor._replace(gram=shampoo_beta * factor.gram + (1 - shampoo_beta) * _gram(grad, side))
            for side, factor in enumerate(factors)
        )
        if any(factors):
            branch = jnp.where(first, 0, jnp.where(count % precondition_every == 0, 1, 2))
            factors, nu = jax.lax.switch(branch, (_begun, _turned, lambda *same: same), factors, nu)
        return step.astype(grad.dtype), mu, nu, factors

    return optax.GradientTransformation(init, update)


def inverse_root(state: SoapState, x: Any) -> Any:
    """P^(−½) x with P what steps are divided by after at least two of them, x a tree in the eigenbasis.

    Of SOAP with the usual b2 and ε.
    """
    leaves, tree = jax.tree.flatten(x)
    correction = 1 - B2 ** (state.count - 1).astype(jnp.float32)
    roots = (jnp.sqrt(nu / correction) + EPS for nu in jax.tree.leaves(state.nu))
    divided = (leaf / jnp.sqrt(root) for leaf, root in zip(leaves, roots, strict=True))
    return jax.tree.unflatten(tree, [_rotate(z, f, back=True) for z, f in zip(divided, state.factors, strict=True)])


def _factors(leaf: jax.Array, largest: int) -> tuple[Factor | None, ...]:
    """Those of a parameter before the first gradient; a vector has none, nor has a side of one entry."""
    if leaf.ndim < 2:
        return (None,) * leaf.ndim
    return tuple(
        Factor(jnp.zeros((size, size), leaf.dtype), jnp.eye(size, dtype=leaf.dtype)) if 1 < size <= largest else None
        for size in leaf.shape
    )


def _gram(grad: jax.Array, side: int) -> jax.Array:
    """G Gᵀ of the gradient unfolded along one side."""
    others = [axis for axis in range(grad.ndim) if axis != side]
    return jnp.tensordot(grad, grad, axes=(others, others), precision=_FULL)


def _rotate(x: jax.Array, factors: tuple[Factor | None, ...], back: bool = False) -> jax.Array:
    """Into the eigenbasis, QᵀX along every side, or back out of it."""
    for side, factor in enumerate(factors):
        if factor is not None:
            turned = jnp.tensordot(x, factor.basis, axes=(side, 1 if back else 0), precision=_FULL)
            x = jnp.moveaxis(turned, -1, side)
    return x


def _begun(factors: tuple[Factor | None, ...], nu: jax.Array) -> tuple[tuple[Factor | None, ...], jax.Array]:
    """The first basis: all eigenvectors; they are sorted before they are turned."""
    begun = (factor and factor._replace(basis=jnp.linalg.eigh(factor.gram)[1]) for factor in factors)
    return tuple(begun), nu


def _turned(factors: tuple[Factor | None, ...], nu: jax.Array) -> tuple[tuple[Factor | None, ...], jax.Array]:
    """One power iteration on each side, and the second moments in the order of the columns."""
    turned: list[Factor | None] = []
    for side, factor in enumerate(factors):
        if factor is None:
            turned.append(None)
            continue
        power = jnp.matmul(factor.gram, factor.basis, precision=_FULL)
        order = jnp.argsort(-jnp.sum(factor.basis * power, axis=0))  # Rayleigh quotients
        turned.append(factor._replace(basis=jnp.linalg.qr(power[:, order])[0]))
        nu = jnp.take(nu, order, axis=side)
    return tuple(turned), nu
