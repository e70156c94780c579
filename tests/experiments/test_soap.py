"""SOAP against the paper's Algorithm 3 written literally in NumPy, and what must hold of it whatever the problem."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

pytest.importorskip("flax")

from fosi.experiments.tasks.soap import soap

B1, B2, SHAMPOO, EPS, RATE = 0.9, 0.8, 0.7, 1e-8, 0.05


class Oracle:
    """One parameter. The first gradient makes the basis and no step; a side is left alone where it is too large."""

    def __init__(self, weights, every, largest):
        self.w, self.every = np.array(weights, np.float64), every
        self.m, self.v, self.t = np.zeros_like(self.w), np.zeros_like(self.w), 0
        self.sorted = True
        sides = self.w.shape if self.w.ndim > 1 else ()
        self.gram = [np.zeros((n, n)) if n <= largest else None for n in sides]
        self.q = [np.eye(n) for n in sides]

    def into(self, x, back=False):
        if self.w.ndim == 2:
            left, right = self.q
            return left @ x @ right.T if back else left.T @ x @ right
        for side, q in enumerate(self.q):
            x = np.moveaxis(np.tensordot(q if back else q.T, x, axes=(1, side)), 0, side)
        return x

    def step(self, g):
        if self.t > 0:
            self.m = B1 * self.m + (1 - B1) * g
            self.v = B2 * self.v + (1 - B2) * self.into(g) ** 2
            m, v = self.into(self.m) / (1 - B1**self.t), self.v / (1 - B2**self.t)
            self.w = self.w - RATE * self.into(m / (np.sqrt(v) + EPS), back=True)
        for side, gram in enumerate(self.gram):
            if gram is None:
                continue
            unfolded = np.moveaxis(g, side, 0).reshape(len(gram), -1)
            self.gram[side] = gram = SHAMPOO * gram + (1 - SHAMPOO) * unfolded @ unfolded.T
            if self.t == 0:
                self.q[side] = np.linalg.eigh(gram)[1][:, ::-1]
            elif self.t % self.every == 0:
                order = np.argsort(-np.diag(self.q[side].T @ gram @ self.q[side]))
                self.sorted &= bool(np.all(np.diff(order) > 0))
                self.v = np.take(self.v, order, side)
                self.q[side] = np.linalg.qr(gram @ self.q[side][:, order])[0]
        self.t += 1


SHAPES = {"matrix": (4, 3), "vector": (5,), "wide": (3, 9), "kernel": (2, 3, 4), "number": ()}


def test_steps_are_the_papers():
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        params = {name: jnp.asarray(rng.normal(size=shape)) for name, shape in SHAPES.items()}
        oracles = {name: Oracle(leaf, every=3, largest=4) for name, leaf in params.items()}
        scale = {name: rng.uniform(0.1, 9.0, shape) for name, shape in SHAPES.items()}

        def gradient(name, w, noise):  # of a function in which all entries meet, on a batch of its own
            return scale[name] * w + w.sum() * w**2 + noise[name]

        opt = soap(RATE, B1, B2, EPS, SHAMPOO, precondition_every=3, max_precond_dim=4)
        state, update = opt.init(params), jax.jit(opt.update)
        assert state.factors[list(state.mu).index("wide")][1] is None  # nine is more than four
        for step in range(9):
            noise = {name: 2.0**step * rng.normal(size=shape) for name, shape in SHAPES.items()}
            grads = {name: jnp.asarray(gradient(name, np.asarray(leaf), noise)) for name, leaf in params.items()}
            updates, state = update(grads, state, params)
            params = optax.apply_updates(params, updates)
            for name, oracle in oracles.items():
                oracle.step(gradient(name, oracle.w, noise))
                np.testing.assert_allclose(params[name], oracle.w, rtol=1e-8, atol=1e-10, err_msg=name)
    assert all(oracle.t == 9 for oracle in oracles.values())
    assert not oracles["matrix"].sorted and not oracles["kernel"].sorted  # so that the order had to change


def test_vectors_have_adam_after_the_first_step():
    start = jnp.array([1.0, -2.0, 3.0])
    ours, adam = soap(0.1), optax.adam(0.1, 0.95, 0.95)
    a, b = start, start
    mine, theirs = ours.init(a), adam.init(b)
    updates, mine = ours.update(a**3, mine, a)
    assert not np.any(updates)
    for _ in range(5):
        updates, mine = ours.update(a**3, mine, a)
        a = a + updates
        updates, theirs = adam.update(b**3, theirs, b)
        b = b + updates
        np.testing.assert_allclose(a, b, rtol=1e-5)


def test_turned_coordinates_change_nothing():
    """Rotating a matrix's coordinates rotates its steps, which Adam's does not do."""
    rng = np.random.default_rng(1)
    left, right = (np.linalg.qr(rng.normal(size=(n, n)))[0].astype(np.float32) for n in (4, 3))
    start, *targets = rng.normal(size=(13, 4, 3)).astype(np.float32)

    def end(opt, turned):
        w = jnp.asarray(left @ start @ right if turned else start)

        def loss(w, target):
            x = left.T @ w @ right.T if turned else w
            return jnp.sum(jnp.sin(x - target) ** 2 * jnp.arange(1.0, 4.0)[None])

        @jax.jit
        def step(carry, target):
            updates, state = opt.update(jax.grad(loss)(carry[0], target), carry[1], carry[0])
            return (carry[0] + updates, state), None

        (w, _), _ = jax.lax.scan(step, (w, opt.init(w)), jnp.stack(targets))
        return left.T @ np.asarray(w) @ right.T if turned else np.asarray(w)

    np.testing.assert_allclose(end(soap(0.02), True), end(soap(0.02), False), atol=2e-3)
    assert not np.allclose(end(optax.adam(0.02), True), end(optax.adam(0.02), False), atol=2e-2)


def test_basis_stays_orthogonal_and_finds_the_eigenvectors():
    rng = np.random.default_rng(2)
    grads = rng.normal(size=(200, 6, 4)) * np.array([9.0, 5.0, 3.0, 2.0, 1.0, 0.5])[:, None]
    turn = np.linalg.qr(rng.normal(size=(6, 6)))[0]
    opt = soap(0.1, precondition_every=2)
    state, update = opt.init(jnp.zeros((6, 4))), jax.jit(opt.update)
    for grad in grads:
        _, state = update(jnp.asarray(turn @ grad, jnp.float32), state)
    gram, basis = (np.asarray(x, np.float64) for x in state.factors[0][0])
    np.testing.assert_allclose(basis.T @ basis, np.eye(6), atol=1e-5)
    inside = basis.T @ gram @ basis
    off = inside - np.diag(np.diag(inside))
    assert np.linalg.norm(off) < 0.3 * np.linalg.norm(gram - np.diag(np.diag(gram)))
    assert np.all(np.diff(np.diag(inside)) < 0)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"b1": 1.0}, "b1 is 1.0; give a number from 0 up to"),
        ({"shampoo_beta": -0.1}, "shampoo_beta is -0.1; give a number from 0"),
        ({"precondition_every": 0}, "precondition_every is 0; give a whole number"),
        ({"max_precond_dim": 1.5}, "max_precond_dim is 1.5; give a whole number"),
    ],
)
def test_bad_settings(given, message):
    with pytest.raises(ValueError, match=message):
        soap(0.1, **given)
