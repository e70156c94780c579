"""Runs of the optimizer under test on the known problems, in the dtype asked for."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree


def x64(dtype):
    """The context in which arrays of this dtype can be made; everything about a run happens inside it."""
    return jax.enable_x64(True) if np.dtype(dtype) == np.float64 else contextlib.nullcontext()


def as_tree(problem, theta, dtype):
    """A flat vector in the problem's shapes."""
    shapes, treedef = jax.tree.flatten(problem.shapes, is_leaf=lambda x: isinstance(x, tuple))
    ends = np.cumsum([int(np.prod(shape)) for shape in shapes])
    pieces = np.split(np.asarray(theta), ends[:-1])
    leaves = [jnp.asarray(piece.reshape(shape), dtype) for piece, shape in zip(pieces, shapes, strict=True)]
    return treedef.unflatten(leaves)


def as_arrays(batch, dtype):
    return jax.tree.map(lambda x: jnp.asarray(x, dtype), batch)


def flat(tree):
    return ravel_pytree(tree)[0]


def loss_fn(problem):
    """The problem as users write losses: of a tree of parameters and a batch."""
    return _loss_fn(problem.value)


@functools.cache  # one function a problem, so that what was compiled for it serves every optimizer
def _loss_fn(value):
    return lambda params, batch: value(flat(params), batch, jnp)


def run_inline(opt, problem, steps, dtype, by_value_fn=False):
    """θ₀ … θ_steps as rows, and the last state; the whole run in one compiled scan."""
    with x64(dtype):
        params, batch = as_tree(problem, problem.start, dtype), as_arrays(problem.batch, dtype)
        gradient = jax.grad(loss_fn(problem))

        @jax.jit
        def run(params, batch):
            def body(carry, _):
                params, state = carry
                of = {"value_fn": lambda p: loss_fn(problem)(p, batch)} if by_value_fn else {"batch": batch}
                updates, state = opt.update(gradient(params, batch), state, params, **of)
                params = optax.apply_updates(params, updates)
                return (params, state), flat(params)

            (_, state), path = jax.lax.scan(body, (params, opt.init(params)), None, length=steps)
            return path, state

        path, state = run(params, batch)
        assert path.dtype == dtype
        return np.concatenate([problem.start[None], np.asarray(path, np.float64)]), state


class External:
    """As `run_inline` with the refreshes outside the step; compiled once for runs on any schedule."""

    def __init__(self, opt, problem, dtype):
        self.opt, self.problem, self.dtype = opt, problem, dtype
        gradient = jax.grad(loss_fn(problem))

        @jax.jit
        def step(params, state, batch):
            updates, state = opt.update(gradient(params, batch), state, params)
            return optax.apply_updates(params, updates), state

        self.step = step

    def __call__(self, steps, warmup, refresh_every, batches=None, curvature_batches=None):
        """``batches[t]`` is for the gradient of step t, ``curvature_batches[t]`` for a refresh before it."""
        problem, dtype = self.problem, self.dtype
        batches = [problem.batch] * steps if batches is None else batches
        curvature_batches = batches if curvature_batches is None else curvature_batches
        with x64(dtype):
            params = as_tree(problem, problem.start, dtype)
            state, path = self.opt.init(params), [problem.start]
            for t in range(steps):
                if t >= warmup and (t - warmup) % refresh_every == 0:
                    state = self.opt.refresh(state, params, batch=as_arrays(curvature_batches[t], dtype))
                params, state = self.step(params, state, as_arrays(batches[t], dtype))
                path.append(np.asarray(flat(params), np.float64))
        return np.stack(path), state
