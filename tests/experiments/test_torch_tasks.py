"""The tasks in PyTorch: the models, losses and optimizers of those in JAX, driven by the same loop."""

import io

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax")
pytest.importorskip("torch")

import torch

from fosi.experiments.tasks import TASKS, settings, torch_tasks, training
from fosi.experiments.tasks.jax_engine import JaxEngine
from fosi.experiments.tasks.torch_engine import TorchEngine
from tests.experiments.test_tasks import FOSI, softmax_largest

torch.set_num_threads(1)

OURS = [name for name in settings.NAMES if settings.is_wrappable(name)]


def built(task, seed=0):
    return torch_tasks.build(task, None, False, seed, True)


def trained(task, name, rounds, **options):
    engine = TorchEngine(TASKS[task], built(task), name, 0, **options)
    run = training.start(engine)
    return engine, run, list(training.train(engine, run, rounds))


def leaves(tree):
    """The arrays of a model in flax by the names that PyTorch has for them, and its way round."""
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        keys = [str(getattr(key, "key", getattr(key, "name", ""))) for key in path]
        words = [key for key in keys if key not in ("value", "")]
        array = np.asarray(leaf)
        kind = "weight" if words[-1] == "kernel" else "bias"
        if len(words) == 1:
            name = kind
        elif words[-1] == "before":
            name = f"{words[0]}.weight_hh_l0"
        elif "inputs" in words:
            name = f"{words[0]}.{kind}_ih_l0"
        else:
            name = f"{words[0]}.{kind}"
        found[name] = array.T
    return found


def pair(task):
    """The task in JAX and in PyTorch, both with the weights that flax drew."""
    ours, theirs = TASKS[task].build(None, False, 0, True), built(task)
    trained = {name: p for name, p in theirs.model.named_parameters() if p.requires_grad}
    given = leaves(ours.params)
    assert given.keys() == trained.keys()
    with torch.no_grad():
        for name, p in trained.items():
            p.copy_(torch.tensor(given[name]))
    return ours, theirs


@pytest.mark.parametrize("task", ["lr", "lm"])
def test_loss_gradient_and_metric_are_those_of_jax(task):
    ours, theirs = pair(task)
    indices = np.asarray(ours.order(jax.random.key(3))[1])
    batch = ours.batch(ours.data, jnp.asarray(indices))
    (value, _), grads = jax.value_and_grad(ours.loss, has_aux=True)(ours.params, ours.state, batch)
    loss = theirs.loss(theirs.model, theirs.batch(theirs.data, torch.tensor(indices)))
    loss.backward()
    assert loss.item() == pytest.approx(float(value), rel=1e-5)
    for name, wanted in leaves(grads).items():
        got = theirs.model.get_parameter(name).grad.numpy()
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5 * np.abs(wanted).max(), err_msg=name)
    metric = float(ours.validate(ours.params, ours.state))
    assert float(theirs.validate(theirs.model)) == pytest.approx(metric, rel=1e-5)


@pytest.mark.parametrize(
    ("task", "name"),
    [
        *(("lr", name) for name in ("heavy-ball", "nesterov", "fosi-heavy-ball", "fosi-adamw")),
        *(("lm", name) for name in ("heavy-ball", "fosi-heavy-ball")),
    ],
)
def test_run_is_that_of_jax(task, name):
    # As many pairs as there are large ones, and enough products for them to be exact.
    options = {"k": 9, "num_matvecs": 60, "warmup": 4, "refresh_every": 100} if name.startswith("fosi") else {}
    ours, theirs = pair(task)
    start = leaves(ours.params)
    kwargs = {"rate_factor": 0.1 if task == "lr" else 1.0, "curvature": "current", **options}
    jaxed = JaxEngine(TASKS[task], ours, name, 0, **kwargs)
    torched = TorchEngine(TASKS[task], theirs, name, 0, **kwargs)
    assert (torched.rate, torched.schedule) == (jaxed.rate, jaxed.schedule)
    order = jnp.concatenate([jaxed.order(0), jaxed.order(1)])[:10]
    orders, losses, runs = (order, torch.tensor(np.asarray(order))), [], []
    for engine, order in zip((jaxed, torched), orders, strict=True):
        run, first = engine.advance(engine.start(), order, 0, 4)
        if options:
            run = engine.refresh(run, order, 4)
        run, second = engine.advance(run, order, 4, 10)
        losses.append((first, second))
        runs.append(run)
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
    wanted, got = jaxed.estimate(runs[0]), torched.estimate(runs[1])
    assert got.lr_scale == pytest.approx(wanted.lr_scale, rel=1e-3)
    assert got.eigenvalues == pytest.approx(wanted.eigenvalues, rel=1e-3)
    assert len(got.eigenvalues) == (9 if options else 0)
    for leaf, end in leaves(runs[0].params).items():
        moved, difference = end - start[leaf], runs[1].model.get_parameter(leaf).detach().numpy() - end
        assert np.linalg.norm(difference) < 1e-3 * np.linalg.norm(moved), leaf


@pytest.mark.parametrize("name", OURS)
def test_every_optimizer_trains_and_estimates_when_due(name):
    fosi = name.startswith("fosi-")
    factor = 3.0 if "adam" in name else 0.1  # tiny data is ill-conditioned for the paper's rates
    engine, run, points = trained("lr", name, 5, rate_factor=factor, **(FOSI if fosi else {}))
    steps = engine.steps_a_round
    assert [p.step for p in points] == [steps * (i + 1) for i in range(5)]
    assert points[-1].train_loss < points[0].train_loss and not run.diverged
    assert run.refreshes == (len([t for t in range(5 * steps) if t >= 6 and (t - 6) % 7 == 0]) if fosi else 0)
    assert len(points[-1].eigenvalues) == (3 if fosi else 0) and 0 <= run.refresh_seconds <= run.seconds
    scaled = fosi and "adam" not in name
    assert (points[-1].lr_scale > 1) == scaled
    assert engine.rate == pytest.approx(factor * (1e-3 if "adam" in name else 0.1))


def test_paper_settings():
    fosi = TorchEngine(TASKS["lr"], built("lr"), "fosi-heavy-ball", 0)
    assert fosi.schedule == (5, 800, 40)  # W one epoch of the tiny data, T, m
    options = fosi.start().optimizer.options
    wanted = (10, 0, 0.01, 3.0, "all", "float64")
    assert (options.k, options.ell, options.alpha, options.max_lr_scale, options.accept, options.precision) == wanted
    assert TorchEngine(TASKS["lm"], built("lm"), "fosi-adam", 0).schedule == (800, 800, 40)
    group = TorchEngine(TASKS["lm"], built("lm"), "adamw", 0).start().optimizer.param_groups[0]
    assert group["weight_decay"] == 1e-4  # optax's, not torch's
    for name in ("kfac", "soap"):
        with pytest.raises(ValueError, match=f"optimizer is '{name}', which is there only in JAX"):
            TorchEngine(TASKS["lr"], built("lr"), name, 0)
    for name in ("lbfgs", "fosi-lbfgs", "adam-lbfgs"):
        with pytest.raises(ValueError, match=f"optimizer is '{name}', which wants all data in every step; lr has"):
            TorchEngine(TASKS["lr"], built("lr"), name, 0)
    with pytest.raises(ValueError, match="optimizer is 'sgd'; give one of gd, heavy-ball"):
        TorchEngine(TASKS["lr"], built("lr"), "sgd", 0)
    with pytest.raises(ValueError, match="k given, which are settings of FOSI; adam has none"):
        TorchEngine(TASKS["lr"], built("lr"), "adam", 0, k=3)
    with pytest.raises(ValueError, match="curvature is 'best'; give one of fixed, current, larger, average"):
        TorchEngine(TASKS["lr"], built("lr"), "adam", 0, curvature="best")
    with pytest.raises(ValueError, match="task is 'ae', which is not there in PyTorch; give one of lr, lm"):
        built("ae")


def test_settings_are_the_tasks_and_then_those_given():
    base, rate, given = settings.settle("fosi-nesterov", TASKS["ae"], 7, 3.0, {"k": 4})
    assert (base, rate) == ("nesterov", pytest.approx(0.003))
    assert (given["max_lr_scale"], given["warmup"], given["k"], given["alpha"]) == (1.0, None, 4, 0.01)
    given = settings.settle("fosi-adam", TASKS["ae"], 7, 1.0, {}).fosi
    assert (given["max_lr_scale"], given["k"]) == (3.0, 10)
    assert settings.settle("fosi-gd", TASKS["lr"], 7, 1.0, {}).fosi["warmup"] == 7
    assert settings.settle("gd", TASKS["lr"], 7, 1.0, {}).fosi is None
    with pytest.raises(ValueError, match="optimizer is 'kfac', which is neither a base"):
        settings.settle("kfac", TASKS["lr"], 7, 1.0, {})


@pytest.mark.parametrize("name", ["fosi-heavy-ball", "fosi-adam", "adam"])
def test_run_goes_on_from_its_bytes(name):
    options = FOSI if name.startswith("fosi") else {}
    engine, whole, _ = trained("lm", name, 4, **options)
    half = training.start(engine)
    list(training.train(engine, half, 2))
    raw = engine.dump(half.run)
    list(training.train(engine, half, 3))  # writes over what was dumped
    fresh = TorchEngine(TASKS["lm"], built("lm", seed=1), name, 0, **options)
    again = training.Progress(fresh.load(raw), half.curve[1].step, refreshes=half.curve[1].refreshes)
    again.curve = half.curve[:2]
    list(training.train(fresh, again, 4))
    assert [p.train_loss for p in again.curve] == [p.train_loss for p in whole.curve]
    assert [p.metric for p in again.curve] == [p.metric for p in whole.curve]
    assert [p.eigenvalues for p in again.curve] == [p.eigenvalues for p in whole.curve]
    assert again.refreshes == whole.refreshes
    for other in (trained("lr", name, 0, **options)[0], trained("lm", "heavy-ball", 0)[0]):
        with pytest.raises(ValueError, match="of another model or another optimizer"):
            other.load(raw)


def test_order_and_weights_depend_on_seed_and_round_alone():
    engine, other = (TorchEngine(TASKS["lr"], built("lr"), "adam", seed) for seed in (0, 1))
    order = engine.order(2)
    assert order.shape == (5, 64) and len(set(order.flatten().tolist())) == 320
    torch.rand(3)
    assert torch.equal(engine.order(2), order)
    assert not torch.equal(engine.order(1), order) and not torch.equal(other.order(2), order)
    windows = TorchEngine(TASKS["lm"], built("lm"), "adam", 0)
    starts = torch.stack([windows.order(index) for index in range(100)])
    assert starts.shape == (100, 10, 4) and 0 <= starts.min() < 10 and 2304 - 16 - 10 <= starts.max() < 2304 - 16
    first, second, third = (built("lm", seed).model.first.weight_hh_l0 for seed in (0, 0, 1))
    assert torch.equal(first, second) and not torch.equal(first, third)


def test_estimates_are_made_on_the_batch_asked_for():
    ours, theirs = pair("lr")
    found = {}
    for name in ("fixed", "current", "larger", "average"):
        engine = TorchEngine(TASKS["lr"], theirs, "fosi-adam", 0, curvature=name, **FOSI)
        order = engine.order(1)
        run = engine.refresh(engine.start(), order, 2)
        chosen = {"fixed": engine.first[:1], "current": order[2:3], "larger": engine.first[:4]}
        rows = chosen.get(name, order[[2, 3, 4, 0]]).flatten().numpy()
        found[name] = engine.estimate(run).eigenvalues[0]
        assert found[name] == pytest.approx(softmax_largest(ours, rows), rel=1e-3)
    assert len({round(value, 5) for value in found.values()}) == 4


def test_gradient_is_clipped_before_the_optimizer_sees_it():
    model = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    problem = torch_tasks.TorchProblem(
        model,
        lambda model, batch: model(batch).sum(),
        torch.tensor([[5.0, -0.5]]),
        lambda data, indices: data[indices],
        lambda generator: torch.zeros(1, 1, dtype=torch.long),
        lambda model: model.weight.sum(),
    )
    engine = TorchEngine(TASKS["ae"], problem, "gd", 0)
    run, total = engine.advance(engine.start(), engine.first, 0, 1)
    np.testing.assert_allclose(run.model.weight.detach(), -TASKS["ae"].heavy_ball_rate * np.array([[1.0, -0.5]]))
    assert total == 0 and not problem.model.weight.any()


def test_weights_start_as_in_flax():
    text = torch_tasks.inputs.lm(None, False, True)
    model = torch_tasks.Lstm(256, torch.Generator().manual_seed(0))
    trained = [p for p in model.parameters() if p.requires_grad]
    assert sum(p.numel() for p in trained) == 1_018_240
    for weight in (model.first.weight_ih_l0, model.hidden.weight, model.out.weight):
        weight, fan_in = weight.detach(), weight.shape[1]
        assert float(weight.std()) == pytest.approx(fan_in**-0.5, rel=0.02) and abs(float(weight.mean())) < 1e-3
        assert float(weight.abs().max()) == pytest.approx(2 / 0.8796 * fan_in**-0.5, rel=0.01)
    onward = model.first.weight_hh_l0.detach()
    torch.testing.assert_close(onward.T @ onward, torch.eye(256), rtol=0, atol=1e-5)
    assert not any(p.any() for name, p in model.named_parameters() if "bias" in name)
    given = leaves(TASKS["lm"].build(None, False, 0, True).params)
    onward = given["first.weight_hh_l0"]
    np.testing.assert_allclose(onward.T @ onward, np.eye(text.width), atol=1e-5)
    assert not any(array.any() for name, array in given.items() if "bias" in name)


def test_second_bias_stays_zero():
    _, run, _ = trained("lm", "fosi-heavy-ball", 2, **FOSI)
    model = run.run.model
    assert not model.first.bias_hh_l0.any() and model.first.bias_ih_l0.any()
    assert sum(p.numel() for p in run.run.optimizer.param_groups[0]["params"]) == sum(
        p.size for p in jax.tree.leaves(TASKS["lm"].build(None, False, 0, True).params)
    )


def test_compiling_and_measuring_change_no_run():
    engine, _, points = trained("lr", "fosi-gd", 2, rate_factor=0.1, **FOSI)
    other = TorchEngine(TASKS["lr"], built("lr"), "fosi-gd", 0, rate_factor=0.1, **FOSI)
    before = training.start(other)
    other.compile()
    assert 0 < other.gradient_seconds() < 1 and (other.peak_memory() is None) == (other.device.type == "cpu")
    assert [p.train_loss for p in training.train(other, before, 2)] == [p.train_loss for p in points]
    assert torch.load(io.BytesIO(engine.dump(before.run)), weights_only=True)["name"] == "fosi-gd"
