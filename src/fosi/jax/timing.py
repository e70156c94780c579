"""What a gradient, an estimate and the products with its eigenvectors take, compiled, where they run."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fosi.diagnosis import Base, Seconds
from fosi.jax import space as sp
from fosi.jax.curvature import Loss
from fosi.jax.gradients import gradient as one_gradient
from fosi.jax.gradients import projected
from fosi.jax.spectrum import Job, start_key

_LONG, _MANY = 1e-2, 100
"""What takes more seconds than the one is timed call by call; what takes fewer, so many times in one program, in loops
whose length is known when they are compiled: else a GPU asks the host after every turn."""


def seconds(
    job: Job, optimizer: Base, params: sp.Tree, batch: Any, estimated: Any, gradient: sp.Vector, used: sp.Basis
) -> Seconds:
    """Times of compiled functions, the least of some calls."""
    passes = 2 if optimizer.adaptive else 1  # V is read four times a step, or twice where the base is linear
    given = (job.loss, job.space, params, batch)
    return Seconds(
        gradient=_each(lambda: one_gradient(*given), lambda: _gradients(*given)),
        refresh=_least(lambda: job.run(params, estimated, None, start_key(0, 0)), 1),
        projections=passes * _each(lambda: projected(used, gradient), lambda: _projections(used, gradient)),
    )


@functools.partial(jax.jit, static_argnums=(0, 1))
def _gradients(loss: Loss, space: sp.Space, params: sp.Tree, batch: Any) -> sp.Vector:
    """Many, each where the last one led; the step is 0 times it, which no compiler may leave out."""
    leaves = space.leaves(params)

    def follow(_: jax.Array, slope: sp.Vector) -> sp.Vector:
        moved = [x + (0 * g).astype(x.dtype) for x, g in zip(leaves, space.unpack(slope), strict=True)]
        return space.pack(loss.gradient(space, space.merge(moved, params), batch), space.dtype)

    start = space.pack([jnp.zeros_like(x) for x in leaves], space.dtype)
    return jax.lax.fori_loop(0, _MANY, follow, start)


@jax.jit
def _projections(rows: sp.Basis, vector: sp.Vector) -> sp.Vector:
    return jax.lax.fori_loop(0, _MANY, lambda _, x: projected(rows, x), vector)


def _each(one: Callable[[], Any], many: Callable[[], Any]) -> float:
    """Seconds of one call inside a compiled step: of a short one, from Python, most is the call itself."""
    alone = _least(one, 5)
    return alone if alone > _LONG else min(alone, _least(many, 3) / _MANY)


def _least(call: Callable[[], Any], times: int) -> float:
    jax.block_until_ready(call())  # compiles
    taken = []
    for _ in range(times):
        begin = time.perf_counter()
        jax.block_until_ready(call())
        taken.append(time.perf_counter() - begin)
    return min(taken)
