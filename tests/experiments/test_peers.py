"""What FOSI is compared with, in the harness: it trains, goes on after a kill, is reported, and names what is wrong."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

pytest.importorskip("flax")

from fosi.experiments.tasks import TASKS, optimizers, report, runs, settings, summary, training
from fosi.experiments.tasks.jax_engine import JaxEngine
from fosi.experiments.tasks.plan import Plan

# Eigenvectors of 784 pixels would take seconds.
OPTIONS = {"muon": {}, "soap": {"max_precond_dim": 64, "precondition_every": 3}, "sophia": {}, "newton-cg": {}}
LR, REACTION = (TASKS[name].build(None, False, 0, True) for name in ("lr", "reaction"))


@pytest.mark.parametrize(("name", "options"), [*OPTIONS.items(), ("adam-newton-cg", {"switch_at": 7})])
def test_loss_falls_and_a_run_goes_on_from_its_checkpoint_to_the_same_numbers(name, options):
    engine = Plan("lr", name, tiny=True, options=options).engine(LR)
    whole = training.start(engine)
    points = list(training.train(engine, whole, 2))
    saved = engine.dump(whole.run)
    points += training.train(engine, whole, 4)
    assert points[-1].train_loss < points[0].train_loss
    again = training.Progress(engine.load(saved), step=points[1].step, curve=points[:2])
    found = [(p.step, p.train_loss, p.metric) for p in training.train(engine, again, 4)]
    assert found == [(p.step, p.train_loss, p.metric) for p in points[2:]]


def test_report_has_them(tmp_path):
    plans = [Plan("lr", name, tiny=True, rounds=2) for name in ("heavy-ball", "muon", "newton-cg")]
    for plan in plans:
        runs.run(plan, LR, tmp_path)
    lines = {line["optimizer"]: line for line in summary.write(tmp_path / "lr")}
    assert lines["muon"]["base"] is lines["newton-cg"]["base"] is None
    assert lines["muon"]["target_val"] == lines["heavy-ball"]["best_val"]
    written = report.write(tmp_path)
    text = (tmp_path / "README.md").read_text()
    assert "## Other optimizers" in text and "| LR | newton-cg |" in text and "| LR | muon |" in text
    assert tmp_path / "lr" / "second-order.png" in written


def test_what_a_step_counts():
    # One gradient, or as long as it takes.
    counted = {name: settings.is_first_order(name) for name in (*OPTIONS, "adam-newton-cg")}
    assert counted == {"muon": True, "soap": True, "sophia": True, "newton-cg": False, "adam-newton-cg": False}
    found = [settings.second_of(name) for name in ("newton-cg", "adam-newton-cg", "fosi-adam-lbfgs", "adam", "kfac")]
    assert found == ["newton-cg", "newton-cg", "lbfgs", None, None]


def test_rates():
    loss = lambda p, b: (jnp.sum(p), None)  # noqa: E731
    built = {name: optimizers.build(name, TASKS["wave"], loss, 100, 3.0) for name in settings.RATES}
    rates = {"muon": 0.06, "soap": 9e-3, "sophia": 3e-3}
    assert {name: one.rate for name, one in built.items()} == pytest.approx(rates)
    # Muon's steps on a matrix are nearly orthogonal times the rate, on a vector Adam's; both at three times the rate.
    params = {"matrix": jnp.eye(4), "vector": jnp.ones(3)}
    grads = {"matrix": jnp.diag(jnp.array([9.0, 3.0, 2.0, 1.0])), "vector": jnp.array([2.0, -1.0, 5.0])}
    updates, _ = built["muon"].legs[0].transform.update(grads, built["muon"].legs[0].transform.init(params), params)
    np.testing.assert_allclose(np.abs(jnp.diag(updates["matrix"])), 0.06, rtol=0.5)
    adam = optax.adamw(3e-3, weight_decay=0.0, nesterov=True)
    wanted, _ = adam.update(grads["vector"], adam.init(params["vector"]), params["vector"])
    np.testing.assert_allclose(updates["vector"], wanted, rtol=1e-5)


def test_clipped_where_first_order():
    """On ae, where every entry of a gradient is clipped to [−1, 1]."""
    built = optimizers.build("soap", TASKS["ae"], lambda p, b: (jnp.sum(p), None), 1, b1=0.0, b2=0.5)
    state, update = built.legs[0].transform.init(jnp.zeros(2)), built.legs[0].transform.update
    for grad in ([7.0, 0.1], [7.0, 0.1], [1.0, 0.1]):
        updates, state = update(jnp.array(grad), state, jnp.zeros(2))
    # 7 counts as 1, so the entry's second moment is 1 throughout.
    np.testing.assert_allclose(updates, -3e-3, rtol=1e-5)


def test_sophia_sees_the_losss_own_hessian():
    scale = jnp.array([1.0, 10.0, 200.0])
    built = optimizers.build("sophia", TASKS["wave"], lambda p, b: (jnp.sum(p), None), 1, gamma=1.0, b2=0.0)
    start = jnp.full(3, 1e-3)
    params, state = start, built.legs[0].transform.init(start)

    def loss(p):
        return jnp.sum(scale * p**2) / 2

    assert built.legs[0].searches and not built.legs[0].multiplies
    for _ in range(2):
        grads = jax.grad(loss)(params)
        extra = {"value": loss(params), "grad": grads, "value_fn": loss}
        updates, state = built.legs[0].transform.update(grads, state, params, **extra)
        params = start  # so that the mean of gradients is the gradient
    np.testing.assert_allclose(updates, -1e-3 * start, rtol=1e-4)  # Newton's step, times the rate


def test_newton_cg_multiplies_with_the_tasks_own_matrix():
    """One step of it with a solution to the end, against the dense matrix of the same task; then some more."""
    engine = JaxEngine(TASKS["reaction"], REACTION, "newton-cg", 0, max_cg=400, tolerance=1e-5, damping=10.0)
    # It is looked at more often than the others, whose steps are short: a twentieth of five steps is one.
    other = JaxEngine(TASKS["reaction"], REACTION, "lbfgs", 0)
    assert [(e.steps_a_round, e.looks) for e in (engine, other)] == [(1, 20), (5, 1)]
    flat, shape = jax.flatten_util.ravel_pytree(REACTION.params)
    out = lambda p: REACTION.outputs(shape(p), REACTION.state, REACTION.data).predicted[0]  # noqa: E731
    residual, jacobian = jax.jit(lambda p: (out(p), jax.jacfwd(out)(p)))(flat)
    jacobian, residual = np.asarray(jacobian, np.float64), np.asarray(residual, np.float64)
    wanted = np.linalg.solve(2 * jacobian.T @ jacobian + 10 * np.eye(flat.size), -2 * jacobian.T @ residual)
    run, start = engine.advance(engine.start(), engine.first, 0, 1)
    found = np.asarray(jax.flatten_util.ravel_pytree(run.params)[0] - flat)
    np.testing.assert_allclose(found, wanted, atol=1e-3 * np.abs(wanted).max())
    run, end = engine.advance(run, engine.first, 0, 5)
    assert end / 5 < 0.9 * start


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("soap", {"betas": 1}, "soap with .*unexpected keyword argument 'betas'"),
        ("muon", {"momentum": 1}, "muon with .*unexpected keyword argument 'momentum'"),
        ("sophia", {"k": 1}, "sophia with .*unexpected keyword argument 'k'"),
        ("newton-cg", {"memory_size": 1}, "newton-cg with .*unexpected keyword argument 'memory_size'"),
        ("newton-cg", {"operator": "gauss_newton"}, "operator is 'gauss_newton', which is a setting of FOSI"),
        ("adam-newton-cg", {"switch_at": 3, "k": 2}, "k given, which are settings of FOSI; adam has none"),
        ("adam-newton-cg", {}, "adam-newton-cg wants switch_at: after how many steps newton-cg goes on"),
    ],
)
def test_unknown_settings_are_named(name, options, message):
    with pytest.raises(ValueError, match=message):
        Plan("reaction", name, tiny=True, options=options).engine(REACTION)


def test_where_they_cannot_be():
    with pytest.raises(ValueError, match="rate_factor is 3, but newton-cg finds its rate by a line search: give 1"):
        Plan("reaction", "newton-cg", tiny=True, rate_factor=3.0).engine(REACTION)
    with pytest.raises(ValueError, match="optimizer is 'newton-cg', but this task does not say what its loss is made"):
        Plan("reaction", "newton-cg", tiny=True).engine(REACTION._replace(outputs=None))
    with pytest.raises(ValueError, match="newton-cg wants model"):
        optimizers.build("newton-cg", TASKS["wave"], lambda p, b: (jnp.sum(p), None), 1)


@pytest.mark.parametrize("name", settings.AROUND)
def test_fosi_around_a_peer_is_newtons_step_inside_and_the_peers_outside(name):
    """Two steps after an estimate, with the paper's Algorithm 2 and an average of 0.95 on the Newton part, by hand."""
    sizes = np.geomspace(100.0, 0.1, 12).reshape(4, 3)
    loss = lambda p, b: (0.5 * jnp.sum(b * p["w"] ** 2), None)  # noqa: E731
    given = {"k": 2, "warmup": 0, "alpha": 0.3, "num_matvecs": 12}
    built = optimizers.build(f"fosi-{name}", TASKS["wave"], loss, 100, 2.0, **given)
    assert built.rate == 2 * settings.RATES[name] and Plan("wave", f"fosi-{name}").reference.optimizer == name
    alone = optimizers.build(name, TASKS["wave"], loss, 100, 2.0).legs[0].transform
    scales, params = jnp.asarray(sizes, jnp.float32), {"w": jnp.asarray(np.sin(1.0 + sizes), jnp.float32)}
    state, theirs = built.legs[0].transform.init(params), alone.init(params)
    state = built.legs[0].fosi.refresh(state, params, batch=scales)
    inside = np.zeros_like(sizes)
    inside.flat[:2] = 1  # the two largest curvatures are those of the first two entries
    average = 0.0
    for step in (1, 2):
        # Of another batch each: in the basis that one gradient made alone, most entries of it are rounding.
        batch = scales * jnp.asarray(1 + 0.5 * np.cos(step + np.arange(12.0)).reshape(4, 3), jnp.float32)
        grads = jax.grad(loss, has_aux=True)(params, batch)[0]
        updates, state = built.legs[0].transform.update(grads, state, params)
        outside = {"w": grads["w"] * jnp.asarray(1 - inside, jnp.float32)}
        found, theirs = alone.update(outside, theirs, params)
        average = 0.95 * average + 0.05 * inside * np.asarray(grads["w"])
        newton = -0.3 * average / (1 - 0.95**step) / sizes
        np.testing.assert_allclose(updates["w"], newton + (1 - inside) * np.asarray(found["w"]), rtol=2e-3, atol=2e-5)
        params = optax.apply_updates(params, updates)
