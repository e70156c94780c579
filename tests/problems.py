"""Problems whose gradient and dense Hessian are known: in NumPy for the oracle, as a loss for any backend."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np


class Problem(NamedTuple):
    """A function of a flat vector and a batch.

    Attributes:
      value: (theta, batch, xp) -> scalar, in the namespace ``xp``: ``numpy``, ``jax.numpy`` or ``torch``.
      gradient: (theta, batch) -> (n,), NumPy float64.
      hessian: (theta, batch) -> (n, n), NumPy float64.
      start: theta at the start, NumPy float64.
      batch: tree of NumPy float64 arrays.
      shapes: the parameters as a tree of dicts: shapes in the order in which they lie in theta.
      k: how many of the largest eigenvalues are well separated from the others.
      ell: how many of the smallest are.
    """

    value: Callable[..., Any]
    gradient: Callable[[np.ndarray, Any], np.ndarray]
    hessian: Callable[[np.ndarray, Any], np.ndarray]
    start: np.ndarray
    batch: Any
    shapes: dict
    k: int
    ell: int


def orthogonal(n, seed=0):
    """A random orthogonal matrix, by QR with the signs that make it uniform."""
    q, r = np.linalg.qr(np.random.default_rng(seed).normal(size=(n, n)))
    return q * np.sign(np.diag(r))


def symmetric(eigenvalues, seed=0):
    """A symmetric matrix with these eigenvalues and a random orthogonal eigenbasis."""
    basis = orthogonal(len(eigenvalues), seed)
    matrix = (basis * np.asarray(eigenvalues, float)) @ basis.T
    return (matrix + matrix.T) / 2


def quadratic(largest=(90.0, 60.0, 40.0), smallest=(0.5, 0.2), seed=1):
    """½ θᵀAθ − bᵀθ, convex."""
    eigenvalues = [*largest, 8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.5, *smallest]
    n = len(eigenvalues)
    rng = np.random.default_rng(seed)
    batch = {"A": symmetric(eigenvalues, seed), "b": rng.normal(size=n)}
    return Problem(
        value=lambda theta, batch, xp: 0.5 * theta @ (batch["A"] @ theta) - batch["b"] @ theta,
        gradient=lambda theta, batch: batch["A"] @ theta - batch["b"],
        hessian=lambda theta, batch: batch["A"],
        start=rng.normal(size=n),
        batch=batch,
        shapes={"a": (2, 3), "b": {"x": (n - 7,), "y": ()}},
        k=len(largest),
        ell=len(smallest),
    )


def rotating(largest=(95.0, 66.0, 40.0), smallest=(-30.0, -45.0), seed=2, strength=14.0, frequency=3.0):
    """½ θᵀAθ − bᵀθ − Σ cᵢ sin(ω wᵢᵀθ) / ω²: negative curvature, and a Hessian that turns as θ moves.

    The sines, along directions of their own, add at most ``strength`` to the Hessian: less than half the gaps
    that set the extreme eigenvalues of A apart, so which pairs are the extreme ones is never in doubt.
    """
    eigenvalues = [*largest, 10.0, 9.5, 9.0, 8.5, 8.0, 7.0, 6.0, 5.0, 4.5, 4.0, 3.5, *smallest]
    n = len(eigenvalues)
    rng = np.random.default_rng(seed)
    batch = {
        "A": symmetric(eigenvalues, seed),
        "W": frequency * orthogonal(n, seed + 100),
        "b": 3 * rng.normal(size=n),
        "c": strength * rng.uniform(0.6, 1.0, size=n) / frequency**2,
    }

    def value(theta, batch, xp):
        z = batch["W"] @ theta
        return 0.5 * theta @ (batch["A"] @ theta) - batch["b"] @ theta - (batch["c"] * xp.sin(z)).sum()

    def gradient(theta, batch):
        W, c = batch["W"], batch["c"]
        return batch["A"] @ theta - batch["b"] - W.T @ (c * np.cos(W @ theta))

    def hessian(theta, batch):
        W, c = batch["W"], batch["c"]
        return batch["A"] + W.T @ ((c * np.sin(W @ theta))[:, None] * W)

    return Problem(
        value=value,
        gradient=gradient,
        hessian=hessian,
        start=0.7 * rng.normal(size=n),
        batch=batch,
        shapes={"deep": {"s": (), "t": (1, 3, 2)}, "left": (4,), "right": (5, 1)},
        k=len(largest),
        ell=len(smallest) if smallest[0] < 0 else 0,
    )


def network(seed=3, rows=32, data_seed=4):
    """A small tanh network with mean squared error on a fixed batch; derivatives by JAX in float64."""
    inputs, hidden, outputs = 3, 4, 2
    b1, w1, b2, w2 = flat = [(hidden,), (inputs, hidden), (outputs,), (hidden, outputs)]
    x = np.random.default_rng(data_seed).normal(size=(rows, inputs)) * np.array([3.0, 1.0, 0.5])
    y = np.stack([np.sin(x[:, 0]) + 1.0, 0.5 * x[:, 1] * x[:, 2] - 1.0], axis=1)

    def value(theta, batch, xp):
        pieces, end = [], 0
        for shape in flat:
            pieces.append(theta[end : end + math.prod(shape)].reshape(shape))
            end += math.prod(shape)
        b1, w1, b2, w2 = pieces
        out = xp.tanh(batch["x"] @ w1 + b1[None]) @ w2 + b2[None]
        return ((out - batch["y"]) ** 2).sum() / len(batch["y"])

    n = sum(math.prod(shape) for shape in flat)
    derivatives = _by_jax(value)
    return Problem(
        value=value,
        gradient=lambda theta, batch: derivatives(theta, batch)[0],
        hessian=lambda theta, batch: derivatives(theta, batch)[1],
        start=0.6 * np.random.default_rng(seed).normal(size=n),
        batch={"x": x, "y": y},
        shapes={"first": {"b": b1, "w": w1}, "second": {"b": b2, "w": w2}},
        k=4,
        ell=0,
    )


def _by_jax(value):
    compiled = None

    def derivatives(theta, batch):
        nonlocal compiled
        import jax
        import jax.numpy as jnp

        if compiled is None:
            compiled = jax.jit(
                lambda theta, batch: (
                    jax.grad(lambda th: value(th, batch, jnp))(theta),
                    jax.hessian(lambda th: value(th, batch, jnp))(theta),
                )
            )
        with jax.enable_x64(True):
            gradient, hessian = compiled(theta, batch)
        return np.asarray(gradient), np.asarray(hessian)

    return derivatives


PROBLEMS = {"quadratic": quadratic, "rotating": rotating, "network": network}
