"""`fosi diagnose` and `fosi spectrum`: the curvature of a training task at one point of its training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from fosi.cli.curvature_tables import diagnosis_table, pairs_table
from fosi.cli.options import at_least, print_figures
from fosi.cli.tasks import DataDir, Download, Mode, Out, TaskName, Tiny

Optimizer = Annotated[str, typer.Option(help="The base: gd, heavy-ball, nesterov, adam or adamw.")]
RoundsBefore = Annotated[
    int | None,
    typer.Option(help="Train so many rounds with the base first, else 1: spectra at the start mislead.", min=0),
]
Steps = Annotated[int | None, typer.Option(help="Train so many steps first, in the place of rounds.", min=0)]
Checkpoint = Annotated[
    Path | None,
    typer.Option(help="Look at a run under way: OUT/TASK/checkpoints/NAME, which also says which optimizer."),
]
BatchCount = Annotated[
    int, typer.Option("--batches", help="How many of the next batches to look at.", callback=at_least(1))
]
Pairs = Annotated[int, typer.Option(help="How many of the largest eigenpairs.", callback=at_least(0))]
Smallest = Annotated[int, typer.Option(help="How many of the smallest.", callback=at_least(0))]
_ITS_OWN = "else as many as FOSI has on the task, which it has in a race in any case"
Matvecs = Annotated[
    int | None, typer.Option(help="Hessian-vector products of an estimate; else as many as FOSI takes for the pairs.")
]
Rounds = Annotated[
    int | None, typer.Option(help="Rounds of the whole run that is asked about; else the task's.", min=1)
]
RateFactor = Annotated[float, typer.Option(help="Multiplies the base's learning rate.")]
Seed = Annotated[int, typer.Option(help="Of the weights and of the batches.", callback=at_least(0))]
_OUT = Path("fosi-results")
_RACE = 0.2
"""Of the run: a tenth is not enough to rank the tasks by, see docs/diagnose.md."""
_SO_FAR = (
    "This is one point of a training, and ranks tasks only roughly. A race tells more: --race 0.2 trains base and FOSI "
    "side by side first, for a fifth of the run."
)


def diagnose(
    context: typer.Context,
    task: TaskName,
    optimizer: Optimizer = "adam",
    rounds_before: Annotated[
        int | None,
        typer.Option(
            help="Train so many rounds with the base first, from the start, and look there; else where the race ends, "
            "or after 1 with --race 0.",
            min=0,
        ),
    ] = None,
    steps: Steps = None,
    checkpoint: Checkpoint = None,
    batches: BatchCount = 4,
    curvature_batches: Annotated[
        int,
        typer.Option(
            help="Take the curvature on the first so many of the batches; where a step sees all data, FOSI's part of "
            "it is taken.",
            callback=at_least(1),
        ),
    ] = 1,
    timed: Annotated[
        bool | None,
        typer.Option("--timed/--counted", help="Measure what a gradient and an estimate take; else after a race."),
    ] = None,
    k: Annotated[
        int | None, typer.Option(help=f"How many of the largest eigenpairs; {_ITS_OWN}.", callback=at_least(0))
    ] = None,
    ell: Annotated[
        int | None, typer.Option(help=f"How many of the smallest; {_ITS_OWN}.", callback=at_least(0))
    ] = None,
    num_matvecs: Matvecs = None,
    refresh_every: Annotated[
        int | None,
        typer.Option(
            help="Steps between two estimates, for the cost; else the task's, or by the budget for other pairs."
        ),
    ] = None,
    race: Annotated[
        float | None,
        typer.Option(
            help="Train base and FOSI, with the task's settings, side by side first, for this part of the run, and "
            f"look at where the base then is; 0 for none. {_RACE:g} where it is not given, none with --checkpoint."
        ),
    ] = None,
    rounds: Rounds = None,
    rate_factor: RateFactor = 1.0,
    seed: Seed = 0,
    mode: Mode = None,
    tiny: Tiny = False,
    data_dir: DataDir = None,
    download: Download = False,
    out: Out = _OUT,
) -> None:
    """Say whether FOSI is likely to help on a task, by how much, and with which settings.

    Writes into OUT/TASK: a line in diagnosis.jsonl, and a figure; the two runs of a race into OUT/races/TASK.
    """
    console = Console()
    share = (_RACE if checkpoint is None else 0.0) if race is None else race
    from fosi.experiments import figures
    from fosi.experiments.tasks import diagnosing
    from fosi.experiments.tasks import race as races

    with _errors():
        if share:
            races.check(share)
    wanted = {"optimizer": optimizer, "rate_factor": rate_factor, "seed": seed, "mode": mode, "tiny": tiny}
    wanted |= {"task": task, "rounds": rounds}
    if checkpoint is None:
        plan, problem = _built(wanted, data_dir, download)
    else:
        probe = _resumed(context, checkpoint, data_dir, download, wanted)
        plan, problem = probe.plan, probe.engine.problem
    plan, own = diagnosing.own(plan, problem)
    if k is not None or ell is not None:  # products and T follow from the pairs
        own = {"k": own["k"], "ell": own["ell"]}
    asked = {"k": k, "ell": ell, "num_matvecs": num_matvecs, "refresh_every": refresh_every}
    options: dict[str, Any] = own | {name: value for name, value in asked.items() if value is not None}
    with _errors():
        diagnosing.check(problem, **options)  # before anything is trained
        if curvature_batches > batches:
            raise ValueError(
                f"curvature_batches is {curvature_batches}; give from 1 to the {batches} batches looked at"
            )
    held = _held(console, plan, problem, out, share) if share else None
    if checkpoint is None:
        probe = _trained(console, plan, problem, rounds_before, steps, held)
    probe = replace(probe, plan=plan)
    options |= {"curvature_batches": curvature_batches, "timed": bool(share) if timed is None else timed}
    if held is not None:
        options["raced"] = _seen(console, held)
    with _errors(), console.status("estimates the spectrum ..."):
        found = diagnosing.diagnose(probe, batches, **options)
    numbers = out / plan.task / "diagnosis.jsonl"
    diagnosing.write(numbers, "diagnose", probe, found.record())
    title = _title(probe)
    drawn = figures.save(diagnosing.draw(title, found), _beside(numbers, "diagnosis", probe), ("png",))
    console.print(diagnosis_table(found, title))
    console.print(found.explain(), soft_wrap=True, highlight=False, markup=False)
    if held is None:
        console.print(_SO_FAR, soft_wrap=True, highlight=False)
    console.print()
    console.print(f"Numbers: {numbers}", soft_wrap=True, highlight=False)
    if held is not None:
        console.print(f"Race:    {held.alone.path.parent}", soft_wrap=True, highlight=False)
    print_figures(console, drawn)


def _held(console: Console, plan: Any, problem: Any, out: Path, share: float) -> Any:
    """A race, with words on how far it is."""
    from fosi.experiments.tasks import race

    console.print(
        f"{plan.base} and FOSI train side by side first, each for {share:.0%} of the run and FOSI's warm-up; --race 0 "
        "looks at one point alone.",
        soft_wrap=True,
        highlight=False,
    )
    with _errors(), console.status("trains base and FOSI side by side ...") as status:

        def show(point: Any, engine: Any, steps: int) -> None:
            status.update(f"{'base' if engine.schedule is None else 'FOSI'}: step {point.step} of {steps}")

        return race.hold(plan, problem, out, share, show)


def _seen(console: Console, held: Any) -> float:
    """What a race says; a FOSI that diverged counts as in a report."""
    from fosi.experiments.tasks.ratios import MISS

    if held.ratio.misses:
        console.print(f"In the race FOSI diverged, which counts {MISS:g}.", style="yellow")
    return float(held.ratio.median)


def spectrum(
    context: typer.Context,
    task: TaskName,
    optimizer: Optimizer = "adam",
    rounds_before: RoundsBefore = None,
    steps: Steps = None,
    checkpoint: Checkpoint = None,
    batches: BatchCount = 1,
    k: Pairs = 10,
    ell: Smallest = 0,
    num_matvecs: Matvecs = None,
    rate_factor: RateFactor = 1.0,
    seed: Seed = 0,
    mode: Mode = None,
    tiny: Tiny = False,
    data_dir: DataDir = None,
    download: Download = False,
    out: Out = _OUT,
) -> None:
    """Show the extreme eigenvalues of a task's Hessian, and how far each can be trusted.

    Writes into OUT/TASK: a line in spectrum.jsonl, and a figure.
    """
    console = Console()
    wanted = {"optimizer": optimizer, "rate_factor": rate_factor, "seed": seed, "mode": mode, "tiny": tiny}
    wanted |= {"task": task}
    if checkpoint is not None:
        probe = _resumed(context, checkpoint, data_dir, download, wanted)
    else:
        plan, problem = _built(wanted, data_dir, download)
        probe = _trained(console, plan, problem, rounds_before, steps)
    from fosi.experiments import figures
    from fosi.experiments.tasks import diagnosing

    with _errors(), console.status("estimates the spectrum ..."):
        estimate = diagnosing.spectrum(probe, batches, k=k, ell=ell, num_matvecs=num_matvecs)
        found = diagnosing.as_record(estimate)
    numbers = out / probe.plan.task / "spectrum.jsonl"
    diagnosing.write(numbers, "spectrum", probe, {"batches": batches, "k": k, "ell": ell, **found})
    title = _title(probe)
    drawn = figures.save(diagnosing.draw_spectrum(title, found), _beside(numbers, "spectrum", probe), ("png",))
    console.print(pairs_table(found, title))
    largest, smallest = found["extremes"]
    console.print(
        f"All Ritz values lie from {smallest:.4g} to {largest:.4g}. Accepted: the residual is at most 0.1 |λ|, and "
        f"|λ| above {found['resolution']:.2g}, what the products can resolve.",
        style="dim",
        highlight=False,
    )
    console.print(f"Numbers: {numbers}", soft_wrap=True, highlight=False)
    print_figures(console, drawn)


# The library is imported inside, so that --help does not wait for JAX.
def _built(wanted: Mapping[str, Any], data_dir: Path | None, download: bool) -> tuple[Any, Any]:
    """The plan of a base's training, and its problem."""
    from fosi.experiments.tasks import probing
    from fosi.experiments.tasks.plan import Plan

    with _errors():
        plan = Plan(**wanted)
        probing.check(plan)
        return plan, plan.build(data_dir, download)


def _trained(console: Console, plan: Any, problem: Any, rounds: int | None, steps: int | None, held: Any = None) -> Any:
    """Where training stands after so much of it; where neither is said, at the end of a race, or after a round."""
    from fosi.experiments.tasks import probing

    if held is not None and rounds is None and steps is None:
        with _errors(), console.status("goes back to where the race left the base ..."):
            return probing.after(held, plan, problem)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with _errors(), Progress(*columns, console=console) as bar:
        row = bar.add_task(f"{plan.optimizer}, steps", total=None)

        def show(done: int, of: int) -> None:
            bar.update(row, completed=done, total=of)

        return probing.train(plan, problem, 1 if rounds is None else rounds, steps, show)


def _resumed(
    context: typer.Context, checkpoint: Path, data_dir: Path | None, download: bool, wanted: Mapping[str, Any]
) -> Any:
    """Where a run under way stands."""
    from fosi.experiments.tasks import probing

    with _errors():
        plan = probing.planned(checkpoint)
        if plan.task != wanted["task"]:
            raise ValueError(f"{checkpoint} is of the task {plan.task}, not of {wanted['task']}")
        other = [name for name, value in wanted.items() if value != getattr(plan, name)] + ["rounds_before", "steps"]
        told = [x for x in other if getattr(context.get_parameter_source(x), "name", "DEFAULT") != "DEFAULT"]
        if told:
            options = " and ".join(f"--{name.replace('_', '-')}" for name in told)
            raise ValueError(f"{options} cannot be given beside --checkpoint, which says otherwise; leave it out")
        return probing.resume(plan, plan.build(data_dir, download), checkpoint)


class _errors:
    """Inside it, what is wrong with the input becomes a message of the command."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, (ValueError, TypeError)):  # a DataError too
            raise typer.BadParameter(str(error)) from error


def _title(probe: Any) -> str:
    plan = probe.plan
    faster = "" if plan.rate_factor == 1 else f" at {plan.rate_factor:g}x rate"
    made = " (tiny, made data)" if plan.tiny else ""
    return f"{plan.of.title}{made}: {plan.optimizer}{faster} after {probe.step} steps"


def _beside(numbers: Path, kind: str, probe: Any) -> Path:
    # Without dots: what follows the last one would be taken for a suffix.
    return numbers.with_name(f"{kind}-{probe.name.replace('.', '-')}")
