"""A physics-informed network in plain JAX and optax: the wave equation u_tt = 4 u_xx, with and without FOSI.

The network is a list of arrays, the residuals are nested derivatives, the points are fixed: nothing here knows of FOSI
but the lines marked below. What people do, Adam and then L-BFGS, becomes Adam and then L-BFGS from FOSI's metric. The
loss is written as a model, the residuals, and a convex loss of its outputs, so that estimates can be of Gauss and
Newton's matrix, and they are made on a quarter of the points: both make a refresh cheap.
"""

import itertools
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fosi.jax import ModelLoss, fosi_adam, fosi_lbfgs

AROUND_ADAM = {"k": 40, "num_matvecs": 60, "refresh_every": 100, "warmup": 200, "alpha": 0.1, "eps": 1.0}
AROUND_LBFGS = {"k": 40, "num_matvecs": 60, "refresh_every": 200, "warmup": 1, "curvature": "gauss_newton"}


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


def equation(params, x, t):
    u_xx = jax.jacfwd(jax.grad(u, 1), 1)(params, x, t)
    u_tt = jax.jacfwd(jax.grad(u, 2), 2)(params, x, t)
    return u_tt - 4 * u_xx


def exact(x, t):
    return jnp.sin(jnp.pi * x) * jnp.cos(2 * jnp.pi * t)


def residuals(params, points):
    at = jax.vmap(u, (None, 0, 0))
    x, t = points["inside"].T
    s, zero = points["line"], jnp.zeros_like(points["line"])
    return {
        "equation": jax.vmap(equation, (None, 0, 0))(params, x, t),
        "start": 10 * (at(params, s, zero) - exact(s, zero)),
        "velocity": jax.vmap(jax.grad(u, 2), (None, 0, 0))(params, s, zero),
        "left": 10 * at(params, zero, s),
        "right": 10 * at(params, zero + 1, s),
    }


def sum_of_mean_squares(residuals, points):
    return sum(jnp.mean(r**2) for r in residuals.values())


loss_fn = ModelLoss(residuals, sum_of_mean_squares)  # loss_fn(params, points), as any other


@jax.jit
def report(params, points):
    x, t = (a.reshape(-1) for a in jnp.meshgrid(jnp.linspace(0, 1, 41), jnp.linspace(0, 1, 41)))
    wrong = jax.vmap(u, (None, 0, 0))(params, x, t) - exact(x, t)
    return loss_fn(params, points), jnp.linalg.norm(wrong) / jnp.linalg.norm(exact(x, t))


def first_order(opt, params, points, steps, **more):
    @jax.jit
    def step(params, state):
        updates, state = opt.update(jax.grad(loss_fn)(params, points), state, params, **more)
        return optax.apply_updates(params, updates), state

    state = opt.init(params)
    for _ in range(steps):
        params, state = step(params, state)
    return params


def quasi_newton(opt, params, points, steps, **more):
    def value_fn(params):
        return loss_fn(params, points)

    value_and_grad = optax.value_and_grad_from_state(value_fn)  # what the line search ended with

    @jax.jit
    def step(params, state):
        value, grad = value_and_grad(params, state=state)
        updates, state = opt.update(grad, state, params, value=value, grad=grad, value_fn=value_fn, **more)
        return optax.apply_updates(params, updates), state

    state = opt.init(params)
    for _ in range(steps):
        params, state = step(params, state)
    return params


def main(steps=2000, lr=5e-3, width=24, num_points=200):
    inside = jnp.asarray(np.random.default_rng(0).random((num_points, 2), dtype=np.float32))
    points = {"inside": inside, "line": jnp.linspace(0, 1, 50)}
    part = {**points, "inside": inside[::4]}
    start = init(jax.random.key(0), [2, width, width, 1])
    adam, rest = optax.adam(lr), steps - steps // 4

    def then(opt, **more):
        return quasi_newton(opt, first_order(adam, start, points, steps // 4), points, rest, **more)

    around_adam = fosi_adam(lr, loss_fn, **AROUND_ADAM)  # new; was: optax.adam(lr)
    around_lbfgs = fosi_lbfgs(loss_fn, **AROUND_LBFGS)  # new; was: optax.lbfgs(memory_size=100)
    trainings = {
        "Adam": lambda: first_order(adam, start, points, steps),
        "FOSI around Adam": lambda: first_order(around_adam, start, points, steps, batch=points),  # new: batch=
        "Adam, then L-BFGS": lambda: then(optax.lbfgs(memory_size=100)),
        "Adam, then FOSI around L-BFGS": lambda: then(around_lbfgs, batch=part),  # new: batch=
    }
    results = {}
    for name, train in trainings.items():
        began = time.perf_counter()
        loss, error = (float(value) for value in report(train(), points))
        results[name] = loss, error, time.perf_counter() - began
    return results


if __name__ == "__main__":
    for name, (loss, error, seconds) in main().items():
        print(f"{name:30} loss {loss:.2e}   relative error {error:.2e}   {seconds:5.1f} s, compilation included")
