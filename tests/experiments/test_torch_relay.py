"""L-BFGS, FOSI around it and relays in PyTorch: the steps are those of the same optimizers called by hand."""

import pytest

pytest.importorskip("flax")
pytest.importorskip("torch")

import torch

from fosi.experiments.tasks import TASKS, settings, torch_tasks, training
from fosi.experiments.tasks.plan import Plan
from fosi.experiments.tasks.torch_engine import TorchEngine
from fosi.torch import FosiLBFGS

torch.set_num_threads(1)

FOSI = {"k": 3, "num_matvecs": 12, "warmup": 2, "refresh_every": 4}
DUE = {  # of 20 steps, where the second goes on at 7 and counts from there
    "fosi-lbfgs": [2, 6, 10, 14, 18],
    "lbfgs": [],
    "adam-fosi-lbfgs": [9, 13, 17],
    "fosi-adam-fosi-lbfgs": [2, 6, 9, 13, 17],
    "adam-lbfgs": [],
    "fosi-adam-lbfgs": [2, 6],
}
ONLY_IN_JAX = ("soap-lbfgs", "soap-fosi-lbfgs", "newton-cg", "adam-newton-cg", "fosi-soap")


def wave(name, steps=5, **options):
    """The engine of a tiny PINN in rounds of so many steps."""
    problem = torch_tasks.build("wave", None, False, 0, True)
    problem = problem._replace(order=lambda generator: torch.zeros(steps, 1, dtype=torch.long))
    return TorchEngine(TASKS["wave"], problem, name, 0, **options)


def trained(engine, rounds):
    progress = training.start(engine)
    list(training.train(engine, progress, rounds))
    return progress


def losses(progress):
    return [point.train_loss for point in progress.curve]


def flat(run):
    return torch.nn.utils.parameters_to_vector(run.model.parameters()).detach()


def by_hand(optimizer, model, problem, calls, due=(), points=None):
    """Calls of so many steps, estimates before those that begin when due; the loss before each call."""

    def closure():
        optimizer.zero_grad()
        loss = problem.loss(model, problem.data)
        loss.backward()
        return loss

    before = []
    for index, count in enumerate(calls):
        if sum(calls[:index]) in due:
            assert optimizer.refresh_due
            optimizer.refresh(problem.split(model, points))
        before.append(problem.loss(model, problem.data).item())
        optimizer.param_groups[0]["max_iter"] = count
        optimizer.step(closure)
    return before


@pytest.mark.parametrize("name", DUE)
def test_every_search_and_relay_trains_and_estimates_when_due(name):
    at = 7 if name in settings.RELAYS else 0
    engine = wave(name, **(FOSI if settings.with_fosi(name) else {}), **({"switch_at": at} if at else {}))
    progress = trained(engine, 4)
    first, second, third, last = losses(progress)
    assert first > second > third > last and last < 0.7 * first
    assert [p.step for p in progress.curve] == [5, 10, 15, 20] and progress.run.step == 20
    assert [step for step in range(20) if engine.due(step)] == DUE[name]
    assert [p.refreshes for p in progress.curve] == [sum(step < end for step in DUE[name]) for end in (5, 10, 15, 20)]
    assert int(progress.run.optimizer.state_dict()["state"][0]["fosi_count"]) == 20 - at
    assert [len(p.eigenvalues) for p in progress.curve[1:]] == 3 * [3 if name.endswith("fosi-lbfgs") else 0]
    assert progress.curve[-1].lr_scale == 1 and engine.rate == (1e-3 if at else 1)


@pytest.mark.parametrize(
    ("first", "curvature", "operator"),
    [
        ("adam", "fixed", "hessian"),
        ("adam", "part", "gauss_newton"),
        ("fosi-adam", "fixed", "gauss_newton"),
        ("fosi-adam", "part", "hessian"),
    ],
)
def test_steps_are_the_firsts_alone_and_then_fosis_around_lbfgs(first, curvature, operator):
    """Bit for bit, where 20 steps, a round of 30 and an estimate end a call; α given to FOSI around Adam is its own."""
    given = {**FOSI, "refresh_every": 25, "alpha": 0.5, "curvature": curvature, "operator": operator}
    alone = trained(wave(first, 7, **(given if first != "adam" else {})), 1).run
    name, given = f"{first}-fosi-lbfgs", {**given, "switch_at": 7, "memory_size": 6}
    arrived = trained(wave(name, 7, **given), 1).run
    assert torch.equal(flat(arrived), flat(alone)) and isinstance(arrived.optimizer, FosiLBFGS)
    engine = wave(name, 30, **given)
    run, problem = trained(engine, 2).run, engine.problem
    points = problem.part(problem.data) if curvature == "part" else problem.data
    options = {**settings.AROUND_LBFGS, **FOSI, "refresh_every": 25, "alpha": 0.5 if first == "adam" else 1.0}
    options["curvature"] = operator
    optimizer = FosiLBFGS(alone.model.parameters(), history_size=6, model=alone.model, **options)
    by_hand(optimizer, alone.model, problem, (2, 20, 1, 4, 20, 5, 1), (2, 27, 52), points)
    assert torch.equal(flat(run), flat(alone))
    assert engine.estimate(run).eigenvalues == tuple(optimizer.spectrum.eigenvalues.tolist())


@pytest.mark.parametrize("code", ["fosi", "torch"])
def test_steps_are_adams_and_then_lbfgs_whose_calls_count_their_first_loss(code):
    adam, engine = trained(wave("adam", 7), 1), wave("adam-lbfgs", 30, switch_at=7, memory_size=6, code=code)
    progress, run = trained(engine, 2), adam.run
    optimizer = FosiLBFGS(run.model.parameters(), history_size=6, scaling="usual")
    if code == "torch":  # ended by no tolerance and by no count of evaluations
        endless = {"tolerance_grad": 0.0, "tolerance_change": 0.0, "max_eval": 10**9}
        optimizer = torch.optim.LBFGS(run.model.parameters(), history_size=6, line_search_fn="strong_wolfe", **endless)
    first, second, third, fourth = by_hand(optimizer, run.model, engine.problem, (20, 3, 20, 10))
    assert torch.equal(flat(progress.run), flat(run)) and first > 1.1 * second
    sums = 7 * losses(adam)[0] + 20 * first + 3 * second, 20 * third + 10 * fourth
    assert [30 * loss for loss in losses(progress)] == pytest.approx(sums, rel=1e-5)
    found, wanted = (each.state_dict()["state"][0] for each in (progress.run.optimizer, optimizer))
    assert code == "fosi" or (found["n_iter"], found["func_evals"]) == (53, wanted["func_evals"])


def test_lbfgs_is_that_of_fosi_which_never_estimates():
    ends = {}
    for scaling, given in (("usual", {}), ("geometric", {"scaling": "geometric"})):
        engine = wave("lbfgs", 30, memory_size=6, **given)
        progress, run = trained(engine, 1), engine.start()
        by_hand(FosiLBFGS(run.model.parameters(), history_size=6, scaling=scaling), run.model, engine.problem, (20, 10))
        ends[scaling] = flat(progress.run)
        assert torch.equal(ends[scaling], flat(run)) and progress.refreshes == 0
    assert not torch.allclose(ends["usual"], ends["geometric"], rtol=1e-2, atol=1e-2)
    assert wave("lbfgs").start().optimizer.param_groups[0]["history_size"] == 100


@pytest.mark.parametrize(("at", "rounds"), [(7, 1), (10, 2), (7, 3)])
@pytest.mark.parametrize("name", ["adam-fosi-lbfgs", "fosi-adam-lbfgs", "adam-lbfgs"])
def test_run_goes_on_from_its_bytes(name, at, rounds):
    """In the middle of the first, where the second has just been made, and in the middle of the second."""
    given = {**(FOSI if settings.with_fosi(name) else {"code": "torch"}), "switch_at": at, "memory_size": 4}
    engine, fresh = wave(name, **given), wave(name, **given)
    whole, half = trained(engine, 5), trained(engine, rounds)
    raw = engine.dump(half.run)
    list(training.train(engine, half, rounds + 1))  # writes over what was dumped
    fresh.problem = fresh.problem._replace(model=torch_tasks.build("wave", None, False, 1, True).model)
    kept, point = fresh.load(raw), half.curve[rounds - 1]
    assert kept.step == point.step == 5 * rounds
    again = training.Progress(kept, point.step, refreshes=point.refreshes, curve=half.curve[:rounds])
    list(training.train(fresh, again, 5))
    assert losses(again) == losses(whole) and again.refreshes == whole.refreshes
    assert [p.eigenvalues for p in again.curve] == [p.eigenvalues for p in whole.curve]
    assert torch.equal(flat(again.run), flat(whole.run)) and again.run.step == whole.run.step == 25
    sooner_or_later = wave(name, **{**given, "switch_at": 1 if 5 * rounds < at else at - 1})
    for other in (wave("adam"), wave("fosi-adam-fosi-lbfgs", switch_at=at), sooner_or_later):
        with pytest.raises(ValueError, match="of another model or another optimizer"):
            other.load(raw)


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        *((name, {"switch_at": 7}, f"optimizer is '{name}', which is there only in JAX") for name in ONLY_IN_JAX),
        ("lbfgs", {"code": "scipy"}, "code is 'scipy'; give fosi or torch"),
        ("lbfgs", {"code": "torch", "scaling": "usual"}, "scaling is 'usual', which torch.optim.LBFGS does not"),
        ("adam-lbfgs", {}, "adam-lbfgs wants switch_at: after how many steps lbfgs goes on"),
        ("adam-fosi-lbfgs", {"switch_at": 0}, "switch_at is 0; give 1 or more steps, a whole number"),
        ("adam-lbfgs", {"switch_at": 2.5}, "switch_at is 2.5; give 1 or more steps, a whole number"),
        *((name, {"rate_factor": 3.0}, f"rate_factor is 3, but {name} finds") for name in ("lbfgs", "fosi-lbfgs")),
    ],
)
def test_what_there_is_not_in_pytorch(name, given, message):
    with pytest.raises(ValueError, match=message):
        wave(name, **given)


@pytest.mark.parametrize("given", [{"k": 3}, {"alpha": 0.5}, {"warmup": 0}])
def test_no_setting_of_fosi_is_taken_where_there_is_none_and_none_of_what_would_leave_it_out(given):
    for name, options in (("lbfgs", given), ("fosi-lbfgs", {"code": "torch"})):
        with pytest.raises(ValueError, match=f"{name} with .*{next(iter(options))}"):
            Plan("wave", name, backend="torch", tiny=True, options=options).engine(wave("adam").problem)


@pytest.mark.parametrize(("task", "name"), [("wave", "adam-fosi-lbfgs"), ("lr", "fosi-adam")])
def test_taking_another_seed_is_as_if_built_with_it_and_compiling_changes_no_run(task, name):
    given = {**FOSI, "switch_at": 7} if task == "wave" else FOSI
    problems = [torch_tasks.build(task, None, False, seed, True) for seed in (0, 1)]
    engine, fresh = (TorchEngine(TASKS[task], problems[seed], name, seed, **given) for seed in (0, 1))
    before, wanted = trained(engine, 3), trained(fresh, 3)
    engine.take(problems[1], 1)
    begun = training.start(engine)
    engine.compile()
    list(training.train(engine, begun, 3))
    assert torch.equal(flat(begun.run), flat(wanted.run)) and not torch.equal(flat(begun.run), flat(before.run))
    assert losses(begun) == losses(wanted) == losses(trained(engine, 3)) != losses(before)


def test_which_options_of_a_relay_are_whose_and_what_they_are_without():
    ours, its = {"k": 3, "alpha": 0.5}, {"memory_size": 6, "scaling": "geometric", "code": "fosi"}
    more = {"memory_size": 6, **ours}
    assert settings.relay("fosi-adam-lbfgs", {"switch_at": 7, **ours, **its}) == ("fosi-adam", "lbfgs", 7, ours, its)
    assert settings.relay("adam-fosi-lbfgs", {"switch_at": 8, **more}) == ("adam", "fosi-lbfgs", 8, {}, more)
    both = settings.relay("fosi-adam-fosi-lbfgs", {"switch_at": 9, **more})
    assert both == ("fosi-adam", "fosi-lbfgs", 9, ours, {"memory_size": 6, "k": 3})
    assert wave("adam-fosi-lbfgs", switch_at=7).schedule == (1, 200, 60)  # the preset's


def test_which_optimizers_are_in_pytorch():
    assert [name for name in settings.NAMES if settings.in_torch(name)] == [
        *("gd", "heavy-ball", "nesterov", "adam", "adamw"),
        *("fosi-gd", "fosi-heavy-ball", "fosi-nesterov", "fosi-adam", "fosi-adamw", "fosi-lbfgs", "lbfgs"),
        *("adam-fosi-lbfgs", "fosi-adam-fosi-lbfgs", "adam-lbfgs", "fosi-adam-lbfgs"),
    ]
