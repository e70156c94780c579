"""newton-cg against Levenberg and Marquardt's method with dense matrices in NumPy, and its laws: it never leads up."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax")

from fosi.experiments.tasks import settings
from fosi.experiments.tasks.newton_cg import backtrack, conjugate_gradients, newton_cg
from fosi.jax import ModelLoss

TIMES = np.linspace(0.0, 2.0, 15)
WANTED = 2.0 * np.exp(-1.5 * TIMES) * np.cos(3.0 * TIMES + 0.2)
START = np.array([1.0, 1.0, 2.0, 0.0])


def model(p, batch):
    return p["a"][0] * jnp.exp(-p["a"][1] * batch[0]) * jnp.cos(p["b"][0] * batch[0] + p["b"][1])


LOSS = ModelLoss(model, lambda out, batch: jnp.mean((out - batch[1]) ** 2))


def program(loss, batch, opt):
    """One step, compiled, as an engine takes it."""

    @jax.jit
    def step(params, state):
        value, grads = jax.value_and_grad(loss)(params, batch)
        extra = {"value": value, "value_fn": lambda p: loss(p, batch), "grad": grads, "batch": batch}
        updates, state = opt.update(grads, state, params, **extra)
        return jax.tree.map(jnp.add, params, updates), state, value

    return step


class Dense:
    """The same problem with its Jacobian, solved with numpy.linalg.solve, in float64."""

    def __init__(self, damping):
        self.p, self.damping = START.copy(), damping

    def out(self, p):
        return p[0] * np.exp(-p[1] * TIMES) * np.cos(p[2] * TIMES + p[3])

    def loss(self, p):
        return np.mean((self.out(p) - WANTED) ** 2)

    def step(self):
        a, b, c, d = self.p
        decay, angle = np.exp(-b * TIMES), c * TIMES + d
        jacobian = np.stack(
            [
                decay * np.cos(angle),
                -TIMES * a * decay * np.cos(angle),
                -TIMES * a * decay * np.sin(angle),
                -a * decay * np.sin(angle),
            ],
            1,
        )
        matrix = 2 / len(TIMES) * jacobian.T @ jacobian
        gradient = 2 / len(TIMES) * jacobian.T @ (self.out(self.p) - WANTED)
        step = np.linalg.solve(matrix + self.damping * np.eye(4), -gradient)
        before, size = self.loss(self.p), 1.0
        ratio = (self.loss(self.p + step) - before) / (gradient @ step + step @ matrix @ step / 2)
        while self.loss(self.p + size * step) > before + 1e-4 * size * (gradient @ step):
            size /= 2
        self.p = self.p + size * step
        self.damping *= 1.5 if ratio < 0.25 else 1 / 1.5 if ratio > 0.75 else 1.0
        return size, ratio


@pytest.mark.parametrize("damping", [1.0, 1e-3])
def test_steps_are_levenberg_and_marquardts(damping):
    with jax.enable_x64(True):
        params = {"a": jnp.asarray(START[:2]), "b": jnp.asarray(START[2:])}
        opt, dense = newton_cg(LOSS, damping, max_cg=60, tolerance=1e-13), Dense(damping)
        step, state = program(LOSS, (jnp.asarray(TIMES), jnp.asarray(WANTED)), opt), opt.init(params)
        seen = []
        while len(seen) < 15 and dense.loss(dense.p) > 1e-12:  # beyond, the ratio is of rounding errors
            params, state, _ = step(params, state)
            seen.append(dense.step())
            np.testing.assert_allclose(np.concatenate([params["a"], params["b"]]), dense.p, rtol=1e-6, atol=1e-9)
            assert float(state.damping) == pytest.approx(dense.damping)
            assert float(state.ratio) == pytest.approx(seen[-1][1], rel=1e-4)
    if damping < 1:  # so that all the rules were needed
        assert min(size for size, _ in seen) < 1 and min(ratio for _, ratio in seen) < 0.25
    assert max(ratio for _, ratio in seen) > 0.75 and len(seen) > 5


def quadratic(n=12):
    rng = np.random.default_rng(0)
    matrix = rng.normal(size=(2 * n, n)) * np.geomspace(1, 30, n)
    batch = (jnp.asarray(matrix, jnp.float32), jnp.asarray(matrix @ rng.normal(size=n), jnp.float32))
    loss = ModelLoss(lambda p, b: jnp.matmul(b[0], p), lambda out, b: jnp.sum((out - b[1]) ** 2))
    return loss, batch, jnp.zeros(n)


def test_quadratic_is_solved_at_once():
    loss, batch, params = quadratic()
    opt = newton_cg(loss, damping=1e-6, tolerance=1e-6, max_cg=100)
    step, state = program(loss, batch, opt), opt.init(params)
    start = float(loss(params, batch))
    for _ in range(2):
        params, state, _ = step(params, state)
    assert float(loss(params, batch)) < 1e-9 * start
    assert state.products < 80 and float(state.damping) < 1e-6


def test_last_solution_helps_the_next():
    loss, batch, params = quadratic()

    def products(warm_start):
        opt = newton_cg(loss, damping=1e6, tolerance=1e-4, max_cg=100, damping_factor=1.0, warm_start=warm_start)
        # So short are the steps under this damping that the next one is nearly the same.
        step, state = program(loss, batch, opt), opt.init(params)
        at = params
        for _ in range(6):
            at, state, value = step(at, state)
        return int(state.products), float(value)

    (warm, one), (cold, other) = products(1.0), products(0.0)
    assert warm < cold and one < float(loss(params, batch)) and other < float(loss(params, batch))


@pytest.mark.parametrize("max_cg", [2, 50])
def test_loss_never_rises(max_cg):
    """However roughly a step is solved, and however wrong the damping is at first."""
    params = {"a": jnp.array([1.0, -2.0]), "b": jnp.array([9.0, 2.0])}
    opt = newton_cg(LOSS, damping=1e-6, max_cg=max_cg, tolerance=0.5)
    batch = (jnp.asarray(TIMES, jnp.float32), jnp.asarray(WANTED, jnp.float32))
    step, state, losses = program(LOSS, batch, opt), opt.init(params), []
    for _ in range(40):
        params, state, value = step(params, state)
        losses.append(float(value))
    assert np.all(np.diff(losses) <= 0) and losses[-1] < 0.5 * losses[0]


def test_conjugate_gradients_solve_and_stop():
    rng = np.random.default_rng(0)
    root = rng.normal(size=(9, 9))
    matrix, wanted = root @ root.T + 0.1 * np.eye(9), rng.normal(size=9)
    with jax.enable_x64(True):
        product = lambda v: jnp.asarray(matrix) @ v  # noqa: E731
        zero = jnp.zeros(9)
        whole = conjugate_gradients(product, jnp.asarray(wanted), zero, 100, 1e-12)
        np.testing.assert_allclose(whole.x, np.linalg.solve(matrix, wanted), rtol=1e-8)
        some = conjugate_gradients(product, jnp.asarray(wanted), zero, 4, 1e-12)
        # Three steps of it: the best of Krylov's space of three dimensions.
        space = np.linalg.qr(np.stack([wanted, matrix @ wanted, matrix @ matrix @ wanted], 1))[0]
        best = space @ np.linalg.solve(space.T @ matrix @ space, space.T @ wanted)
        np.testing.assert_allclose(some.x, best, rtol=1e-8)
        assert some.products == 4
        rough = conjugate_gradients(product, jnp.asarray(wanted), zero, 100, 0.5)
        assert np.linalg.norm(matrix @ rough.x - wanted) <= 0.5 * np.linalg.norm(wanted) and rough.products < 9
        # From the solution there is nothing to do; from a bad start it begins at zero.
        there = conjugate_gradients(product, jnp.asarray(wanted), whole.x, 100, 1e-6)
        assert there.products == 1
        bad = conjugate_gradients(product, jnp.asarray(wanted), -9 * whole.x, 4, 1e-12)
        np.testing.assert_allclose(bad.x, some.x, rtol=1e-12)


def test_no_curvature_is_the_end_of_it():
    found = conjugate_gradients(lambda v: 0 * v, jnp.ones(3), jnp.zeros(3), 50, 1e-3)
    assert not np.any(found.x) and found.products == 2


def test_step_is_halved_until_it_leads_down():
    # 1 → 4, ½ → 1, ¼ → ¼, against the value 0.9 at 0.
    size, whole = backtrack(lambda t: 4 * t**2, jnp.array(0.9), jnp.array(-0.5))
    assert (float(size), float(whole)) == (0.25, 4.0)
    size, _ = backtrack(lambda t: jnp.where(t > 0.1, jnp.nan, 0.5), jnp.array(0.9), jnp.array(-0.5))
    assert float(size) == 0.0625
    size, _ = backtrack(lambda t: 1 + t, jnp.array(0.9), jnp.array(-0.5))
    assert float(size) == 0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"damping": 0.0}, "damping is 0.0; give a number above 0"),
        ({"max_cg": 0}, "max_cg is 0; give a whole number, 1 or more"),
        ({"tolerance": 1.0}, "tolerance is 1.0; give a number from 0 up to"),
        ({"warm_start": 2.0}, "warm_start is 2.0; give a number from 0 to 1"),
        ({"damping_factor": 0.5}, "damping_factor is 0.5; give a number of 1 or more"),
        ({"min_damping": 3.0}, "min_damping is 3.0; give a number from 0 to damping, 1"),
    ],
)
def test_bad_settings(given, message):
    with pytest.raises(ValueError, match=message):
        newton_cg(LOSS, **given)


def test_relays_know_all_its_settings():
    assert settings.SECONDS["newton-cg"] == tuple(inspect.signature(newton_cg).parameters)[1:]
