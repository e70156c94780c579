"""A physics-informed network in plain JAX and optax: the wave equation u_tt = 4 u_xx, with Adam and with FOSI.

The network is a list of arrays, the residual nested derivatives, the points are fixed: nothing here knows of FOSI but
the two lines marked below. With fixed points there is no noise, so that many eigenpairs can be had and used: k = 40
instead of the default 10, and a refresh every 100 steps. ``eps`` is a floor on |λ|: without it the smallest of the
eigenvalues in use are divided by, and the training may blow up.
"""

import itertools
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fosi.jax import fosi_adam

FOSI = {"k": 40, "refresh_every": 100, "num_matvecs": 60, "warmup": 200, "alpha": 0.1, "eps": 1.0}


def init(key, sizes):
    keys = jax.random.split(key, len(sizes) - 1)
    shapes = list(itertools.pairwise(sizes))
    return [(jax.nn.initializers.glorot_normal()(k, s), jnp.zeros(s[1])) for k, s in zip(keys, shapes, strict=True)]


def u(params, x, t):
    h = jnp.stack([x, t])
    for w, b in params[:-1]:
        h = jnp.tanh(h @ w + b)
    w, b = params[-1]
    return (h @ w + b)[0]


def residual(params, x, t):
    u_xx = jax.jacfwd(jax.grad(u, 1), 1)(params, x, t)
    u_tt = jax.jacfwd(jax.grad(u, 2), 2)(params, x, t)
    return u_tt - 4 * u_xx


def exact(x, t):
    return jnp.sin(jnp.pi * x) * jnp.cos(2 * jnp.pi * t)


def loss_fn(params, points):
    at = jax.vmap(u, (None, 0, 0))
    x, t = points["inside"].T
    s, zero = points["line"], jnp.zeros_like(points["line"])
    physics = jnp.mean(jax.vmap(residual, (None, 0, 0))(params, x, t) ** 2)
    start = jnp.mean((at(params, s, zero) - exact(s, zero)) ** 2)
    velocity = jnp.mean(jax.vmap(jax.grad(u, 2), (None, 0, 0))(params, s, zero) ** 2)
    sides = jnp.mean(at(params, zero, s) ** 2 + at(params, zero + 1, s) ** 2)
    return physics + 100 * (start + sides) + velocity


@jax.jit
def report(params, points):
    x, t = (a.reshape(-1) for a in jnp.meshgrid(jnp.linspace(0, 1, 41), jnp.linspace(0, 1, 41)))
    wrong = jax.vmap(u, (None, 0, 0))(params, x, t) - exact(x, t)
    return loss_fn(params, points), jnp.linalg.norm(wrong) / jnp.linalg.norm(exact(x, t))


def train(opt, lengths, width=24, num_points=200, refreshed=False):
    """The loss, the relative error and the seconds after each of so many steps."""
    params = init(jax.random.key(0), [2, width, width, 1])
    inside = np.random.default_rng(0).random((num_points, 2), dtype=np.float32)
    points = {"inside": jnp.asarray(inside), "line": jnp.linspace(0, 1, 50)}
    state = opt.init(params)

    @jax.jit
    def step(params, state):
        grads = jax.grad(loss_fn)(params, points)
        more = {"batch": points} if refreshed else {}
        updates, state = opt.update(grads, state, params, **more)  # new: batch=points
        return optax.apply_updates(params, updates), state

    began = time.perf_counter()
    for i in range(1, max(lengths) + 1):
        params, state = step(params, state)
        if i in lengths:
            loss, error = (float(value) for value in report(params, points))
            yield loss, error, time.perf_counter() - began


def main(steps=2000, lr=1e-2):
    adam, longer = train(optax.adam(lr), (steps, 2 * steps))
    (ours,) = train(fosi_adam(lr, loss_fn, **FOSI), (steps,), refreshed=True)  # new: fosi_adam
    return {"Adam": adam, "Adam, twice as long": longer, "FOSI around Adam": ours}


if __name__ == "__main__":
    for name, (loss, error, seconds) in main().items():
        print(f"{name:20} loss {loss:.2e}   relative error {error:.2e}   {seconds:5.1f} s, compilation included")
