"""The yardstick: the paper's algorithms written plainly in JAX, as a first implementation would have them.

Flat vectors, a float64 Lanczos basis, one jvp of the gradient per product, six products with V a step, and a velocity
of n numbers for the Newton part. It is compiled as a whole and keeps no needless copies: slow only where plain is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree

from fosi.momentum import Ema, Trace

_FULL = jax.lax.Precision.HIGHEST


class LiteralState(NamedTuple):
    """V as (k, n), 1/|λ|, the Newton part's velocity, the base's state and the count of steps."""

    V: jax.Array
    u: jax.Array
    velocity: jax.Array
    base: Any
    count: jax.Array


class Literal(NamedTuple):
    """An optimizer out of the two procedures of Algorithm 2."""

    init: Callable[[Any], LiteralState]
    update: Callable[[Any, LiteralState], tuple[Any, LiteralState]]


def literal_fosi(base: optax.GradientTransformation, momentum: Trace | Ema, k: int, alpha: float) -> Literal:
    """UpdateStep of Algorithm 2 with the momentum of §3.4, around a base that works on the flat vector."""

    def init(params: Any) -> LiteralState:
        theta, _ = ravel_pytree(params)
        zeros = jnp.zeros((k, theta.size))
        return LiteralState(zeros, jnp.zeros(k), jnp.zeros(theta.size), base.init(theta), jnp.zeros((), jnp.int32))

    def update(grads: Any, state: LiteralState) -> tuple[Any, LiteralState]:
        g, unravel = ravel_pytree(grads)
        V, u = state.V, state.u

        def dot(a: jax.Array, b: jax.Array) -> jax.Array:
            return jnp.dot(a, b, precision=_FULL)

        g1 = dot(dot(V, g), V)
        g2 = g - g1
        count = state.count + 1
        velocity = momentum.update(state.velocity, g1)
        g1_mean = momentum.read(velocity, g1, count.astype(g.dtype))
        d1 = -alpha * dot(dot(V, g1_mean) * u, V)
        db, base_state = base.update(g2, state.base)
        d2 = db - dot(dot(V, db), V)
        return unravel(d1 + d2), LiteralState(V, u, velocity, base_state, count)

    return Literal(init, update)


def literal_ese(
    loss_fn: Callable[[Any, Any], jax.Array], params: Any, batch: Any, key: jax.Array, *, k: int, num_matvecs: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Algorithm 1 with ℓ = 0: eigenvalues, eigenvectors (k, n) and residuals, float32 products, float64 basis."""
    theta, unravel = ravel_pytree(params)
    start = jax.random.normal(key, theta.shape)
    grad = jax.grad(lambda p: loss_fn(p, batch))
    m, n = num_matvecs, theta.size

    def hvp(v: jax.Array) -> jax.Array:
        with jax.enable_x64(False):
            return ravel_pytree(jax.jvp(grad, (params,), (unravel(v),))[1])[0]

    with jax.enable_x64(True):

        def step(j: Any, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            Q, v, alphas, betas = carry
            Q = jax.lax.dynamic_update_index_in_dim(Q, v, j, 0)
            w = hvp(v.astype(jnp.float32)).astype(jnp.float64)
            alphas = alphas.at[j].set(jnp.dot(w, v))
            w = w - jnp.dot(jnp.dot(Q, w), Q)
            w = w - jnp.dot(jnp.dot(Q, w), Q)
            beta = jnp.linalg.norm(w)
            return Q, w / beta, alphas, betas.at[j].set(beta)

        v = start.astype(jnp.float64)
        zeros = jnp.zeros(m, jnp.float64)
        carry = (jnp.zeros((m, n), jnp.float64), v / jnp.linalg.norm(v), zeros, zeros)
        Q, _, alphas, betas = jax.lax.fori_loop(0, m, step, carry)
        values, vectors = jnp.linalg.eigh(jnp.diag(alphas) + jnp.diag(betas[:-1], 1) + jnp.diag(betas[:-1], -1))
        top = vectors[:, ::-1][:, :k]
        residuals = betas[-1] * jnp.abs(top[-1])
        V = jnp.dot(top.T, Q)
        return values[::-1][:k].astype(jnp.float32), V.astype(jnp.float32), residuals.astype(jnp.float32)
