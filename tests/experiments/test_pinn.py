"""Physics-informed networks: equations that their exact solutions solve, losses by hand, Gauss and Newton's matrix."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax")

from fosi.experiments.tasks import TASKS, equations, pinn, training
from fosi.experiments.tasks.equations import EQUATIONS
from fosi.experiments.tasks.jax_engine import JaxEngine


def places(equation, count=200):
    rng = np.random.default_rng(0)
    return rng.uniform(equation.left, equation.right, count), rng.uniform(0.1, 0.9 * equation.end, count)


def by_differences(name, u, x, t, h=1e-4):
    """The equations as they are written, their derivatives by central differences in float64."""
    u_t = (u(x, t + h) - u(x, t - h)) / (2 * h)
    u_x = (u(x + h, t) - u(x - h, t)) / (2 * h)
    u_tt = (u(x, t + h) - 2 * u(x, t) + u(x, t - h)) / h**2
    u_xx = (u(x + h, t) - 2 * u(x, t) + u(x - h, t)) / h**2
    match name:
        case "wave":
            return u_tt - 4 * u_xx
        case "convection":
            return u_t + 40 * u_x
        case "reaction":
            return u_t - 5 * u(x, t) * (1 - u(x, t))
        case _:
            return u_t + u(x, t) * u_x - 0.01 / np.pi * u_xx


@pytest.mark.parametrize("name", EQUATIONS)
def test_exact_solution_solves_its_equation(name):
    equation = EQUATIONS[name]
    x, t = places(equation)
    found = by_differences(name, equation.exact, x, t)
    # The shock of Burgers' equation is 100 times steeper than the rest.
    assert np.max(np.abs(found)) < 5e-3


@pytest.mark.parametrize("name", EQUATIONS)
def test_residual_is_the_equation(name):
    equation = EQUATIONS[name]
    x, t = places(equation, 20)

    def u(x, t, m=np):
        return m.sin(1.3 * x + 0.4) * m.exp(0.7 * t) + 0.2 * x * t**2

    found = equation.residual(lambda x, t: u(x, t, jnp))(*jnp.asarray([x, t], jnp.float32))
    np.testing.assert_allclose(found, by_differences(name, u, x, t), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", EQUATIONS)
def test_exact_solution_meets_its_conditions(name):
    equation = EQUATIONS[name]
    x = jnp.linspace(equation.left, equation.right, 41)
    t = jnp.linspace(0, equation.end, 31)

    def u(x, t):  # with a derivative in time, by differences
        def value(x, t):
            return equation.exact(np.asarray(x, np.float64), np.asarray(t, np.float64)).astype(np.float32)

        @jax.custom_jvp
        def call(x, t):
            return jax.pure_callback(value, jax.ShapeDtypeStruct(x.shape, jnp.float32), x, t)

        @call.defjvp
        def _(at, along):
            # Only ever asked at time zero, where the wave stands still.
            after, before = (call(at[0], at[1] + h) for h in (1e-2, -1e-2))
            return call(*at), (after - before) / 2e-2 * along[1]

        return call(x, t)

    for condition in equation.initial(u):
        np.testing.assert_allclose(condition(x), 0, atol=1e-5)
    for condition in equation.boundary(u):
        np.testing.assert_allclose(condition(t), 0, atol=1e-5)


def test_conditions_are_not_met_by_anything():
    for equation in EQUATIONS.values():
        u = lambda x, t: x + 2 * t + 1  # noqa: E731
        x = jnp.linspace(equation.left, equation.right, 5)
        conditions = [c(x) for c in (*equation.initial(u), *equation.boundary(u))]
        assert all(float(jnp.max(jnp.abs(c))) > 0.5 for c in conditions)
        assert len(conditions) == {"wave": 4, "convection": 2, "reaction": 2, "burgers": 3}[equation.name]


def test_size_is_the_published_one():
    problem = TASKS["wave"].build(None, False, 0, False)
    assert sum(leaf.size for leaf in jax.tree.leaves(problem.params)) == 2 * 200 + 2 * 200 * 200 + 4 * 200 + 1
    points = problem.data
    assert (points.x.shape, points.initial.shape, points.boundary.shape) == ((10_000,), (257,), (101,))
    inside = (points.x > 0) & (points.x < 1) & (points.t > 0) & (points.t <= 1)
    assert bool(jnp.all(inside)) and len({*zip(points.x.tolist(), points.t.tolist(), strict=True)}) == 10_000
    assert points.t.min() == pytest.approx(0.01) and points.x.min() == pytest.approx(1 / 256)
    quick = TASKS["wave"].build(None, False, 0, False, mode="quick")
    assert quick.facts == {
        "width": 50,
        "places": 65,
        "times": 33,
        "residuals": 1000,
        "steps": 100,
        "dtype": "float32",
        "batch_size": 1000,
    }


def test_loss_is_the_sum_of_mean_squares():
    problem = TASKS["wave"].build(None, False, 0, True)
    points = problem.data
    kernel = [np.asarray(layer["kernel"][...], np.float64) for layer in problem.params["layers"].values()]

    def u(x, t):
        y = np.stack([x, t], -1)
        for matrix in kernel[:-1]:  # biases are zero at the start
            y = np.tanh(y @ matrix)
        return (y @ kernel[-1])[..., 0]

    x, t, first, ends = (np.asarray(a, np.float64) for a in points)
    still = (u(first, np.full_like(first, 1e-5)) - u(first, np.full_like(first, -1e-5))) / 2e-5
    start = np.sin(np.pi * first) + 0.5 * np.sin(5 * np.pi * first)
    parts = [
        by_differences("wave", u, x, t),
        u(first, 0 * first) - start,
        still,
        u(0 * ends, ends),
        u(0 * ends + 1, ends),
    ]
    wanted = sum(np.mean(part**2) for part in parts)
    assert float(problem.loss(problem.params, problem.state, points)[0]) == pytest.approx(wanted, rel=1e-4)
    grid = np.meshgrid(np.linspace(0, 1, 9), np.linspace(0, 1, 7), indexing="ij")
    exact = EQUATIONS["wave"].exact(*grid)
    error = np.linalg.norm(u(*grid) - exact) / np.linalg.norm(exact)
    assert float(problem.validate(problem.params, problem.state)) == pytest.approx(error, rel=1e-4)


@pytest.mark.parametrize("task", ["wave", "lr", "tl", "ac", "softmax-full"])
def test_loss_is_what_its_outputs_say(task):
    problem = TASKS[task].build(None, False, 0, True)
    batch = problem.batch(problem.data, problem.order(jax.random.key(0))[0])
    wanted = jax.jit(lambda p, s, b: problem.loss(p, s, b)[0])(problem.params, problem.state, batch)
    found = jax.jit(lambda p, s, b: problem.outputs(p, s, b).loss())(problem.params, problem.state, batch)
    assert float(found) == pytest.approx(float(wanted), rel=1e-5)


@pytest.mark.parametrize("curvature", ["fixed", "part"])
def test_gauss_newton_estimates_are_of_its_matrix(curvature):
    problem = TASKS["reaction"].build(None, False, 0, True)
    given = {"operator": "gauss_newton", "k": 4, "num_matvecs": 40, "curvature": curvature}
    engine = JaxEngine(TASKS["reaction"], problem, "fosi-adam", 0, **given)
    run = engine.refresh(engine.start(), engine.first, 0)
    flat, shape = jax.flatten_util.ravel_pytree(problem.params)
    points = problem.data  # 30 inside, of which a quarter are 8
    if curvature == "part":
        points = points._replace(x=points.x[:8], t=points.t[:8])
    jacobian = jax.jacobian(lambda p: problem.outputs(shape(p), problem.state, points).predicted[0])(flat)
    wanted = np.linalg.eigvalsh(2 * np.asarray(jacobian.T @ jacobian, np.float64))[::-1]
    found = engine.estimate(run).eigenvalues
    np.testing.assert_allclose(found, wanted[: len(found)], rtol=1e-3)
    assert len(found) == 4


@pytest.mark.parametrize(
    ("task", "name", "operator", "message"),
    [
        ("wave", "fosi-adam", "fisher", "operator is 'fisher'; give hessian or gauss_newton"),
        ("wave", "adam", "gauss_newton", "a setting of FOSI; adam has none"),
        ("lm", "fosi-adam", "gauss_newton", "does not say what its loss is made of"),
    ],
)
def test_operators_that_there_are_not(task, name, operator, message):
    with pytest.raises(ValueError, match=message):
        JaxEngine(TASKS[task], TASKS[task].build(None, False, 0, True), name, 0, operator=operator)


def test_mode_that_there_is_not():
    assert TASKS["wave"].modes == pinn.MODES and equations.SPEED == 40
    with pytest.raises(ValueError, match="mode is 'slow'; give one of full, quick"):
        TASKS["wave"].build(None, False, 0, False, mode="slow")


def test_in_double_precision():
    with pytest.raises(ValueError, match="mode is 'float64', but JAX has no float64: set JAX_ENABLE_X64=1"):
        TASKS["wave"].build(None, False, 0, True, mode="float64")
    single = TASKS["wave"].build(None, False, 0, True)
    with jax.enable_x64(True):
        double = TASKS["wave"].build(None, False, 0, True, mode="float64")
        assert {leaf.dtype for leaf in jax.tree.leaves((double.params, double.data))} == {np.dtype(np.float64)}
        assert double.facts == {**single.facts, "dtype": "float64"}
        # The same weights in more digits: the loss is the float32 one's to its rounding, and is rounded finer.
        same = jax.tree.map(lambda leaf: leaf.astype(jnp.float64), single.params)
        value = jax.jit(double.loss)(same, {}, double.data)[0]
        assert value.dtype == jnp.float64 and value.item() == pytest.approx(
            single.loss(single.params, {}, single.data)[0].item(), rel=1e-5
        )
        engine = JaxEngine(TASKS["wave"], double, "fosi-lbfgs", 0, k=3, num_matvecs=12)
        run = training.start(engine)
        losses = [point.train_loss for point in training.train(engine, run, 2)]
        assert losses[-1] < losses[0] and {x.dtype for x in jax.tree.leaves(run.run.params)} == {np.dtype(np.float64)}


def test_solution_is_what_the_error_is_of():
    problem = TASKS["reaction"].build(None, False, 0, True)
    x, t, exact, found = (np.asarray(problem.solution(problem.params)[name]) for name in ("x", "t", "exact", "found"))
    assert x.shape == t.shape == exact.shape == found.shape == (9, 7)
    np.testing.assert_allclose(exact, EQUATIONS["reaction"].exact(x, t), rtol=1e-5)
    error = np.linalg.norm(found - exact) / np.linalg.norm(exact)
    assert error == pytest.approx(float(problem.validate(problem.params, problem.state)), rel=1e-5)
