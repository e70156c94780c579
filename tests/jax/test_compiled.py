"""What the compiled programs hold: no copy of basis or momentum in a step, and a refresh within its memory."""

import re

import jax
import jax.numpy as jnp
import pytest

from fosi.jax import fosi_adam, fosi_sgd

N = 40_000
K = 6


def loss_fn(params, batch):
    return jnp.sum(jnp.tanh(batch @ params["a"] @ params["b"]) ** 2)


def problem():
    keys = jax.random.split(jax.random.key(0), 3)
    params = {"a": jax.random.normal(keys[0], (100, 200)), "b": jax.random.normal(keys[1], (200, 100))}
    return params, jax.random.normal(keys[2], (2, 100))


@pytest.mark.parametrize(
    "make",
    [lambda **o: fosi_sgd(0.1, loss_fn, momentum=0.9, **o), lambda **o: fosi_adam(0.1, loss_fn, **o)],
    ids=["heavy-ball", "adam"],
)
def test_an_inline_step_does_not_copy_the_basis(make):
    params, batch = problem()
    opt = make(k=K)
    step = jax.jit(lambda grads, state: opt.update(grads, state, params, batch=batch), donate_argnums=1)
    program = step.lower(params, opt.init(params)).compile().as_text()
    assert f"f32[{K},{N}]" in program
    assert not re.search(rf"f32\[{K},{N}\]\S* copy\(", program)


@pytest.mark.parametrize("nesterov", [False, True])
def test_an_inline_step_writes_sgds_momentum_in_place(nesterov):
    params, batch = problem()
    opt = fosi_sgd(0.1, loss_fn, momentum=0.9, nesterov=nesterov, k=K)
    step = jax.jit(lambda grads, state: opt.update(grads, state, params, batch=batch), donate_argnums=1)
    program = step.lower(params, opt.init(params)).compile().as_text()
    assert not re.search(rf"f32\[{N}\]\S* copy\(", program)
    (results,) = re.findall(r"= \((.*)\) conditional\(", program)
    assert f"f32[{K},{N}]" in results and f"f32[{N}]" not in results


@pytest.mark.parametrize("k", [1, 6])
def test_a_refresh_keeps_to_its_memory(k):
    """At most (m + k + ell + 4) n float32 beyond the linearised loss and the V already held."""
    params, batch = problem()
    opt = fosi_adam(0.1, loss_fn, k=k, precision="float32", refresh="external")
    state = opt.init(params)

    def size(function, *args):
        memory = jax.jit(function).lower(*args).compile().memory_analysis()
        return memory.temp_size_in_bytes + memory.output_size_in_bytes

    def product(params, batch, v):
        return jax.linearize(lambda p: jax.grad(loss_fn)(p, batch), params)[1](v)

    whole = size(lambda s, p, b: opt.refresh(s, p, batch=b)._replace(base=None), state, params, batch)
    one = size(product, params, batch, params)
    m = opt.schedule(params).num_matvecs
    assert whole > one > 0
    assert whole - one <= (m + k + 4) * N * 4
