"""Bad input gets an error that names the argument and shows the value; what was passed in is still good."""

import logging
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fosi
import fosi.jax as fj


def loss_fn(params, batch):
    return 0.5 * jnp.sum(batch * params**2)


PARAMS = jnp.array([1.0, 2.0, 3.0])
BATCH = jnp.array([4.0, 2.0, 1.0])

FACTORIES = {
    "fosi": lambda **options: fj.fosi(optax.sgd(0.1), loss_fn, **{"momentum": None, **options}),
    "fosi_sgd": lambda **options: fj.fosi_sgd(0.1, loss_fn, **options),
    "fosi_adam": lambda **options: fj.fosi_adam(0.1, loss_fn, **options),
    "fosi_adamw": lambda **options: fj.fosi_adamw(0.1, loss_fn, **options),
}


def says(*words):
    """A pattern that wants each of the words, in this order."""
    return "(?s)" + ".*".join(re.escape(word) for word in words)


# The argument's name must be in the message, and then the value.
BAD_OPTIONS = [
    ({"k": 0, "ell": 0}, ValueError, ("k=0", "ell=0")),
    ({"refresh_evry": 5}, TypeError, ("refresh_evry=5", "refresh_every")),
    ({"k": -1}, ValueError, ("k=-1",)),
    ({"k": 2.5}, TypeError, ("k=2.5",)),
    ({"k": True}, TypeError, ("k=True",)),
    ({"k": None}, TypeError, ("k=None",)),
    ({"ell": -2}, ValueError, ("ell=-2",)),
    ({"ell": "1"}, TypeError, ("ell='1'",)),
    ({"k": 3, "num_matvecs": 2}, ValueError, ("num_matvecs=2", "k=3")),
    ({"k": 2, "ell": 2, "num_matvecs": 3}, ValueError, ("num_matvecs=3", "k=2", "ell=2")),
    ({"num_matvecs": 0}, ValueError, ("num_matvecs=0",)),
    ({"num_matvecs": 20.5}, TypeError, ("num_matvecs=20.5",)),
    ({"alpha": -0.1}, ValueError, ("alpha", "-0.1")),
    ({"alpha": math.nan}, ValueError, ("alpha", "nan")),
    ({"alpha": math.inf}, ValueError, ("alpha", "inf")),
    ({"alpha": np.float32(-1)}, ValueError, ("alpha", "-1")),
    ({"alpha": "0.1"}, TypeError, ("alpha", "'0.1'")),
    ({"alpha": None}, TypeError, ("alpha", "None")),
    ({"eps": 0.0}, ValueError, ("eps", "0.0")),
    ({"eps": -1e-8}, ValueError, ("eps", "-1e-08")),
    ({"eps": math.inf}, ValueError, ("eps", "inf")),
    ({"max_lr_scale": 0.5}, ValueError, ("max_lr_scale", "0.5")),
    ({"max_lr_scale": math.nan}, ValueError, ("max_lr_scale", "nan")),
    ({"overhead": 0}, ValueError, ("overhead=0",)),
    ({"overhead": -0.1}, ValueError, ("overhead=-0.1",)),
    ({"overhead": math.nan}, ValueError, ("overhead=nan",)),
    ({"overhead": math.inf}, ValueError, ("overhead=inf",)),
    ({"overhead": "10%"}, TypeError, ("overhead='10%'",)),
    ({"refresh_every": 0}, ValueError, ("refresh_every=0",)),
    ({"refresh_every": 2.5}, TypeError, ("refresh_every=2.5",)),
    ({"refresh_every": math.nan}, ValueError, ("refresh_every=nan",)),
    ({"warmup": -1}, ValueError, ("warmup=-1",)),
    ({"warmup": 0.5}, TypeError, ("warmup=0.5",)),
    ({"precision": "float16"}, ValueError, ("precision", "'float32'", "'float64'", "'float16'")),
    ({"precision": 64}, ValueError, ("precision", "64")),
    ({"accept": "some"}, ValueError, ("accept", "'converged'", "'all'", "'some'")),
    ({"refresh": "never"}, ValueError, ("refresh", "'inline'", "'external'", "'never'")),
    ({"lr_rule": "adam"}, ValueError, ("lr_rule", "'gd'", "'heavy_ball'", "'nesterov'", "'adam'")),
    ({"layout": "rows"}, ValueError, ("layout", "'auto'", "'flat'", "'leaves'", "'rows'")),
    ({"curvature": "fisher"}, ValueError, ("curvature", "'hessian'", "'gauss_newton'", "'fisher'")),
    ({"curvature": "gauss_newton"}, ValueError, ("curvature='gauss_newton'", "ModelLoss")),
    ({"micro_batches": 0}, ValueError, ("micro_batches", "0")),
    ({"micro_batches": 2.0}, ValueError, ("micro_batches", "2.0")),
    ({"seed": -1}, ValueError, ("seed", "-1")),
    ({"seed": 2**32}, ValueError, ("seed", str(2**32))),
    ({"seed": 0.5}, TypeError, ("seed", "0.5")),
    ({"wamrup": 3}, TypeError, ("wamrup",)),
]


@pytest.mark.parametrize("factory", FACTORIES)
@pytest.mark.parametrize(
    ("options", "error", "words"), BAD_OPTIONS, ids=lambda x: str(x) if isinstance(x, dict) else ""
)
def test_a_bad_option_is_named_when_the_optimizer_is_built(factory, options, error, words):
    with pytest.raises(error, match=says(*words)):
        FACTORIES[factory](**options)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        bad
        for bad in BAD_OPTIONS
        if bad[0].keys() <= {"k", "ell", "num_matvecs", "precision", "accept", "seed", "layout"}
    ],
)
def test_estimate_spectrum_names_it_too(options, error, words):
    with pytest.raises(error, match=says(*words)):
        fj.estimate_spectrum(loss_fn, PARAMS, BATCH, **{"k": 1, **options})


@pytest.mark.parametrize("momentum", ["heavy", 0.9, {"decay": 0.9}])
def test_momentum_is_a_rule_or_none(momentum):
    with pytest.raises(ValueError, match=says("momentum", "fosi.Trace", repr(momentum))):
        fj.fosi(optax.sgd(0.1), loss_fn, momentum=momentum)
    with pytest.raises(ValueError, match=says("momentum", "fosi.Ema", repr(momentum))):
        fj.fosi_adam(0.1, loss_fn, momentum=momentum)


def test_a_decay_outside_its_range_is_named():
    with pytest.raises(ValueError, match=says("decay=1.0")):
        fosi.Trace(1.0)
    with pytest.raises(ValueError, match=says("b1", "-0.1")):
        fj.fosi_adam(0.1, loss_fn, b1=-0.1)


def test_nesterov_needs_momentum():
    with pytest.raises(ValueError, match=says("nesterov=True", "momentum=None")):
        fj.fosi_sgd(0.1, loss_fn, nesterov=True)


@pytest.mark.parametrize("base", [0.1, "adam", optax.adam, None, lambda g: g])
def test_the_base_must_be_an_optax_transformation(base):
    with pytest.raises(TypeError, match=says("base", "optax", repr(base)[:20])):
        fj.fosi(base, loss_fn, k=1)


def test_the_loss_must_be_callable():
    with pytest.raises(TypeError, match=says("loss_fn", "3.0")):
        fj.fosi_adam(0.1, 3.0, k=1)


@pytest.mark.parametrize("factory", FACTORIES)
def test_more_pairs_than_parameters(factory):
    with pytest.raises(ValueError, match=says("k=3", "ell=1", "n=3")):
        FACTORIES[factory](k=3, ell=1).init(PARAMS)
    with pytest.raises(ValueError, match=says("k=10", "n=3")):
        fj.estimate_spectrum(loss_fn, PARAMS, BATCH)


def test_an_overhead_that_no_interval_can_meet():
    with pytest.raises(ValueError, match=says("overhead=0.1", "fosi_step=1.2", "base_step=1.0")):
        fosi.schedule.measured_refresh_interval(base_step=1.0, fosi_step=1.2, refresh=80.0, overhead=0.1)


BAD_PARAMS = [
    ({"w": jnp.ones(2, jnp.complex64)}, ("params", "complex64", "complex parameters are not supported")),
    ({"w": jnp.ones(2), "z": jnp.ones(2, jnp.complex64)}, ("params", "complex64")),
    ({"w": jnp.arange(3)}, ("params", "float", "int32")),
    ({"w": jnp.ones(2, bool)}, ("params", "float", "bool")),
]


@pytest.mark.parametrize(("params", "words"), BAD_PARAMS)
def test_parameters_that_cannot_span_a_subspace(params, words):
    for call in (
        lambda: FACTORIES["fosi_sgd"](k=1).init(params),
        lambda: FACTORIES["fosi_sgd"](k=1).schedule(params),
        lambda: fj.estimate_spectrum(lambda p, b: 0.0, params, BATCH, k=1),
    ):
        with pytest.raises(ValueError, match=says(*words)):
            call()


def test_no_parameters_at_all():
    with pytest.raises(ValueError, match=says("params", "no leaves")):
        FACTORIES["fosi_sgd"](k=1).schedule({})
    with pytest.raises(ValueError, match=says("params", "no leaves")):
        fj.estimate_spectrum(loss_fn, {}, BATCH, k=1)


def test_masks():
    with pytest.raises(ValueError, match=says("params", "mask")):
        FACTORIES["fosi_sgd"](k=1, mask=False).init(PARAMS)
    with pytest.raises(ValueError, match=says("mask")):
        FACTORIES["fosi_sgd"](k=1, mask={"v": True}).init({"w": PARAMS})


OPTIONS = {"k": 1, "warmup": 0}


def broken_updates():
    """What can go wrong in an update with an inline refresh: the optimizer, the arguments, what is said."""
    good, aux = fj.fosi_sgd(0.1, loss_fn, **OPTIONS), fj.fosi_sgd(0.1, loss_fn, has_aux=True, **OPTIONS)
    return {
        "params None": (good, {"params": None, "batch": BATCH}, ("params", "None")),
        "neither": (good, {}, ("batch=", "value_fn=")),
        "no loss": (fj.fosi_sgd(0.1, **OPTIONS), {"batch": BATCH}, ("loss_fn is None", "value_fn=")),
        "vector loss": (good, {"value_fn": lambda p: p}, ("loss", "one real number", "(3,)")),
        "integer loss": (good, {"value_fn": lambda p: jnp.zeros((), jnp.int32)}, ("loss", "float", "int32")),
        "complex loss": (good, {"value_fn": lambda p: jnp.sum(p) + 1j}, ("loss", "real", "complex64")),
        "no loss returned": (good, {"value_fn": lambda p: None}, ("loss", "one real number", "None")),
        "aux not announced": (good, {"value_fn": lambda p: (jnp.sum(p), p)}, ("has_aux=True",)),
        "vector loss with aux": (aux, {"value_fn": lambda p: (p, p)}, ("loss", "one real number", "(3,)")),
        "micro-batches that do not divide": (
            fj.fosi_sgd(0.1, loss_fn, micro_batches=2, **OPTIONS),
            {"batch": BATCH},
            ("micro_batches=2", "(3,)"),
        ),
    }


@pytest.mark.parametrize("case", broken_updates())
@pytest.mark.parametrize("compiled", [False, True])
def test_a_broken_update_says_so_and_loses_nothing(case, compiled):
    opt, arguments, words = broken_updates()[case]
    arguments = {"params": PARAMS, **arguments}
    state = opt.init(PARAMS)
    before = jax.tree.map(np.array, state)

    def update(state):
        return opt.update(PARAMS, state, **arguments)

    with pytest.raises(ValueError, match=says(*words)):
        (jax.jit(update) if compiled else update)(state)
    jax.tree.map(np.testing.assert_array_equal, state, before)


def test_training_goes_on_after_an_error():
    opt = fj.fosi_sgd(0.1, loss_fn, momentum=0.9, **OPTIONS)
    state = opt.init(PARAMS)
    update = jax.jit(lambda g, s, p, b: opt.update(g, s, p, batch=b), donate_argnums=1)
    _, state = update(PARAMS, state, PARAMS, BATCH)
    with pytest.raises(ValueError, match="params"):
        opt.update(PARAMS, state, None, batch=BATCH)
    with pytest.raises(ValueError, match="batch="):
        opt.refresh(state, PARAMS)
    updates, state = update(PARAMS, state, PARAMS, BATCH)
    assert int(state.count) == 2 and bool(jnp.all(jnp.isfinite(updates)))


def test_refresh_and_estimate_need_a_loss_too():
    opt = fj.fosi_sgd(0.1, loss_fn, k=1, refresh="external")
    with pytest.raises(ValueError, match=says("batch=", "value_fn=")):
        opt.refresh(opt.init(PARAMS), PARAMS)
    with pytest.raises(ValueError, match=says("batch=", "value_fn=")):
        fj.estimate_spectrum(loss_fn, PARAMS, k=1)
    with pytest.raises(ValueError, match=says("params", "None")):
        opt.refresh(opt.init(PARAMS), None, batch=BATCH)
    with pytest.raises(ValueError, match=says("one real number", "(3,)")):
        fj.estimate_spectrum(lambda p, b: p, PARAMS, BATCH, k=1)


def test_refresh_wants_exactly_one_of_our_states():
    opt = fj.fosi_sgd(0.1, loss_fn, k=1, refresh="external")
    state = opt.init(PARAMS)
    for wrong, found in (
        (optax.adam(0.1).init(PARAMS), "found 0"),
        ((state, state), "found 2"),
        (None, "found 0"),
    ):
        with pytest.raises(ValueError, match=says("state", "FosiState", found, type(wrong).__name__)):
            opt.refresh(wrong, PARAMS, batch=BATCH)


def test_parameters_that_are_not_those_of_the_state():
    opt = fj.fosi_sgd(0.1, loss_fn, k=1, refresh="external")
    state = opt.init(PARAMS)
    other = jnp.ones(5)
    with pytest.raises(ValueError, match=says("params", "5", "3")):
        opt.update(other, state, other)
    with pytest.raises(ValueError, match=says("params", "5", "3")):
        opt.refresh(state, other, batch=jnp.ones(5))
    opt = fj.fosi_sgd(0.1, loss_fn, k=1, refresh="external", layout="leaves")
    with pytest.raises(ValueError, match=says("params", "(3, 1)", "(3,)")):
        opt.update(PARAMS[:, None], opt.init(PARAMS), PARAMS[:, None])


def test_gauss_newton_takes_a_batch():
    loss = fj.ModelLoss(lambda w, b: b * w, lambda out, b: jnp.sum(out**2))
    opt = fj.fosi_sgd(0.1, loss, k=1, curvature="gauss_newton", warmup=0)
    with pytest.raises(ValueError, match=says("gauss_newton", "batch=", "value_fn=")):
        opt.update(PARAMS, opt.init(PARAMS), PARAMS, value_fn=lambda p: jnp.sum(p**2))


def test_batches_must_be_alike():
    with pytest.raises(ValueError, match="at least one"):
        fj.Batches([])
    with pytest.raises(ValueError, match="same shapes"):
        fj.Batches([jnp.ones(2), jnp.ones(3)])


def logged(caplog, make):
    with caplog.at_level(logging.INFO, logger="fosi"):
        caplog.clear()
        make()
    return [(r.levelname, r.getMessage()) for r in caplog.records if r.name.startswith("fosi")]


def test_an_unknown_momentum_is_logged_in_one_line(caplog):
    lines = logged(caplog, lambda: fj.fosi(optax.sgd(0.1), loss_fn, k=1))
    assert len(lines) == 1 and "momentum" in lines[0][1] and "\n" not in lines[0][1]
    for momentum in (None, fosi.Trace(0.9), fosi.Ema(0.9)):
        assert logged(caplog, lambda momentum=momentum: fj.fosi(optax.sgd(0.1), k=1, momentum=momentum)) == []


def test_weight_decay_inside_the_base_is_warned_of(caplog):
    lines = logged(caplog, lambda: fj.fosi(optax.adamw(0.1, weight_decay=0.1), k=1, momentum=fosi.Ema(0.9)))
    assert [level for level, _ in lines] == ["WARNING"]
    assert "weight decay" in lines[0][1] and "fosi_adamw" in lines[0][1]
    schedule = optax.linear_schedule(0.0, 0.1, 10)
    assert logged(caplog, lambda: fj.fosi(optax.adamw(schedule), k=1, momentum=fosi.Ema(0.9))) != []
    assert logged(caplog, lambda: fj.fosi(optax.adam(0.1), k=1, momentum=fosi.Ema(0.9))) == []


def test_the_ready_made_optimizers_log_nothing(caplog):
    def make():
        fj.fosi_sgd(0.1, loss_fn, momentum=0.9)
        fj.fosi_adam(0.1, loss_fn)
        fj.fosi_adamw(0.1, loss_fn, weight_decay=0.1)

    assert logged(caplog, make) == []
