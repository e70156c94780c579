"""`fosi train` and `fosi compare`: the training tasks."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

TaskName = Annotated[
    str,
    typer.Argument(
        metavar="TASK",
        help="lr, tl, ae, lm, ac; wave, convection, reaction, burgers (PINNs); deep-ae, softmax-full.",
        show_default=False,
    ),
]
DataDir = Annotated[
    Path | None, typer.Option(help="Folder with the datasets; that of FOSI_DATA where not given.", file_okay=False)
]
Download = Annotated[bool, typer.Option("--download", help="Download what is missing there, from its official source.")]
Out = Annotated[Path, typer.Option(help="Folder for the results; a folder in it for each task.", file_okay=False)]
Tiny = Annotated[bool, typer.Option("--tiny", help="A small model on made data: seconds, and no data folder.")]
Rounds = Annotated[int | None, typer.Option(help="Epochs, or so many steps (lm, PINNs, full batch); else the task's.")]
Backend = Annotated[str, typer.Option(help="jax, or torch (lr, lm and PINNs).")]
Mode = Annotated[
    str | None,
    typer.Option(
        help="tl: loop or cached features; ac: esc50 or audioset; PINNs: full or quick; deep-ae: full, batch or quick; "
        "softmax-full: full or conditioned."
    ),
]
Quick = Annotated[
    bool, typer.Option("--quick", help="PINNs, deep-ae: --mode quick, a smaller network and less data, and 30 rounds.")
]
Seconds = Annotated[
    float | None,
    typer.Option(help="Of training, steps and refreshes: a run ends after the round in which they pass."),
]
BatchSize = Annotated[
    int | None, typer.Option(help="lm, ac: examples in a batch; the steps follow, so that epochs stay as they are.")
]
Curvature = Annotated[
    str, typer.Option(help="What estimates are made on: fixed, current, larger, average, part or own.")
]
Checkpoint = Annotated[float, typer.Option("--checkpoint-every", help="Seconds of training between two checkpoints.")]
Shared = Annotated[
    bool,
    typer.Option(
        "--shared",
        help="Other work shares the device: seconds are reckoned with the times of such runs that had it alone.",
    ),
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="NAME=VALUE", help="A setting of FOSI or of the optimizer; switch_at of adam-lbfgs; repeat."
    ),
]
_OUT = Path("fosi-results")
_QUICK_ROUNDS = 30  # by then FOSI is below Adam on `wave`, and a laptop has made the three runs within two minutes


def train(
    task: TaskName,
    optimizer: Annotated[str, typer.Option(help="Such as adam, fosi-adam, kfac, lbfgs, soap, newton-cg, adam-lbfgs.")],
    seed: Annotated[int, typer.Option(help="Of the weights and of the batches.")] = 0,
    rate_factor: Annotated[float, typer.Option(help="Multiplies the learning rate.")] = 1.0,
    curvature: Curvature = "fixed",
    settings: Set = None,
    mode: Mode = None,
    quick: Quick = False,
    rounds: Rounds = None,
    seconds: Seconds = None,
    batch_size: BatchSize = None,
    backend: Backend = "jax",
    tiny: Tiny = False,
    data_dir: DataDir = None,
    download: Download = False,
    out: Out = _OUT,
    checkpoint: Checkpoint = 30.0,
    shared: Shared = False,
) -> None:
    """Train one task with one optimizer, with the settings of the paper, or of the task, for both.

    Writes into OUT/TASK: a line a run in runs.jsonl, its curve in curves/, events for TensorBoard in tensorboard/.
    A run that was killed goes on when the same command is given again.
    """
    plan = _plan(
        task=task,
        optimizer=optimizer,
        seed=seed,
        rate_factor=rate_factor,
        curvature=curvature,
        options=_options(settings),
        mode=_mode(task, mode, quick),
        rounds=_QUICK_ROUNDS if quick and rounds is None and seconds is None else rounds,
        seconds=seconds,
        batch_size=batch_size,
        backend=backend,
        tiny=tiny,
    )
    _run_all([plan], data_dir, download, out, checkpoint, shared)


def compare(
    task: TaskName,
    optimizers: Annotated[
        str | None,
        typer.Option(
            help="Names, with commas between; FOSI is measured against its base. Else heavy-ball and adam with and "
            "without FOSI; with --quick adam alone."
        ),
    ] = None,
    seeds: Annotated[
        str | None, typer.Option(help="Whole numbers, with commas between; else 0,1,2, and 0 with --quick.")
    ] = None,
    control: Annotated[bool, typer.Option(help="Run each base at three times its rate too.")] = True,
    curvature: Curvature = "fixed",
    settings: Set = None,
    mode: Mode = None,
    quick: Quick = False,
    rounds: Rounds = None,
    seconds: Seconds = None,
    batch_size: BatchSize = None,
    backend: Backend = "jax",
    tiny: Tiny = False,
    data_dir: DataDir = None,
    download: Download = False,
    out: Out = _OUT,
    checkpoint: Checkpoint = 30.0,
    shared: Shared = False,
) -> None:
    """Train one task with several optimizers and seeds, and say how soon each reaches its base's best.

    Runs that are in OUT already are not made again. CURVATURE and --set are for FOSI alone, but for switch_at and
    such as memory_size and max_cg, which are for L-BFGS and newton-cg, alone and after another.
    """
    from fosi.experiments.tasks.plan import CONTROL
    from fosi.experiments.tasks.settings import for_one, with_fosi

    optimizers = optimizers or ("" if quick else "heavy-ball,fosi-heavy-ball,") + "adam,fosi-adam"
    seeds = seeds or ("0" if quick else "0,1,2")
    rounds = _QUICK_ROUNDS if quick and rounds is None and seconds is None else rounds
    if not all(seed.isdecimal() for seed in seeds.split(",")):
        raise typer.BadParameter(f"--seeds is {seeds!r}; give whole numbers with commas between, such as 0,1,2")
    given = _options(settings)
    common: dict[str, Any] = {"task": task, "mode": _mode(task, mode, quick), "rounds": rounds}
    common |= {"seconds": seconds, "batch_size": batch_size, "backend": backend, "tiny": tiny}
    plans = []
    for seed in map(int, seeds.split(",")):
        for name in optimizers.split(","):
            special: dict[str, Any] = {"options": for_one(name, given)}
            if with_fosi(name):
                special["curvature"] = curvature
            plans.append(_plan(**common, optimizer=name, seed=seed, **special))
            if control and plans[-1].base == name:
                plans.append(_plan(**common, optimizer=name, seed=seed, rate_factor=CONTROL, **special))
    if unused := [name for name in given if not any(name in plan.options for plan in plans)]:
        raise typer.BadParameter(
            f"--set {unused[0]} is a setting of none of {optimizers} here: compare sets FOSI's, and those of lbfgs and "
            "newton-cg; for another optimizer give it to fosi train"
        )
    _run_all(plans, data_dir, download, out, checkpoint, shared)


def _plan(**given: Any) -> Any:
    # Imported here so that --help does not wait for JAX.
    from fosi.experiments.tasks.plan import Plan

    try:
        return Plan(**given)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def _mode(task: str, mode: str | None, quick: bool) -> str | None:
    """The mode asked for, by its name or with --quick."""
    if not quick:
        return mode
    from fosi.experiments.tasks import TASKS

    if mode not in (None, "quick"):
        raise typer.BadParameter(f"--quick and --mode {mode} given; give one of them")
    if task in TASKS and "quick" not in TASKS[task].modes:  # a task that there is not is the plan's to name
        known = ", ".join(name for name, one in TASKS.items() if "quick" in one.modes)
        raise typer.BadParameter(f"--quick is for the tasks {known}; {task} has no quick mode")
    return "quick"


def _options(given: list[str] | None) -> dict[str, Any]:
    """Settings as NAME=VALUE, the value as JSON has it or else as a word."""
    found = {}
    for setting in given or ():
        name, equals, value = setting.partition("=")
        if not equals or not name.isidentifier():
            raise typer.BadParameter(f"--set {setting!r} is not NAME=VALUE")
        try:
            found[name] = json.loads(value)
        except json.JSONDecodeError:
            found[name] = value
    return found


def _run_all(
    plans: list[Any], data_dir: Path | None, download: bool, out: Path, checkpoint: float, shared: bool
) -> None:
    from fosi.experiments.tasks import runs, summary

    console = Console()
    columns: list[ProgressColumn] = [TextColumn("{task.description}"), TextColumn("{task.fields[shown]}")]
    if console.width >= 110:
        columns += [BarColumn(bar_width=20), TimeElapsedColumn()]
    columns += [TextColumn("left"), TimeRemainingColumn(compact=True, elapsed_when_finished=False)]
    problems: dict[Any, Any] = {}
    try:
        with Progress(*columns, console=console) as bar:
            for plan in plans:
                row = bar.add_task(_label(plan), total=plan.seconds or plan.length, shown="builds and compiles")

                def show(point: Any, engine: Any, row: Any = row, plan: Any = plan) -> None:
                    done = point.seconds if plan.seconds else point.step // (engine.looks * engine.steps_a_round)
                    bar.update(row, completed=done, shown=_shown(point, plan.of.metric))

                key = (plan.seed, plan.mode, plan.backend)
                if key not in problems and not runs.is_done(plan, out):
                    problems.clear()  # one at a time: data fill the device
                    problems[key] = plan.build(data_dir, download)
                curve = runs.run(plan, problems.get(key), out, show, checkpoint, shared)
                bar.update(row, completed=plan.seconds or plan.length, shown=_shown(curve.points[-1], plan.of.metric))
                summary.write(out / plan.task)
    except ValueError as error:  # a DataError too
        raise typer.BadParameter(str(error)) from error
    except KeyboardInterrupt:
        console.print("Stopped. The same command goes on from here.")
        raise typer.Exit(130) from None
    folder = out / plans[0].task
    known = {line["curve"]: line for line in summary.write(folder)}
    title = plans[0].of.title + (" (tiny, made data)" if plans[0].tiny else "")
    console.print(_table([known[f"curves/{plan.name}.jsonl"] for plan in plans], title))
    console.print(
        "Target: the best validation of the base with the same seed at its own rate. Seconds are of steps and "
        "refreshes, not of compiling and evaluating; '-' means never.",
        style="dim",
        highlight=False,
    )
    console.print(f"Runs:    {folder / 'runs.jsonl'}", soft_wrap=True, highlight=False)
    console.print(f"Curves:  {folder / 'curves'}", soft_wrap=True, highlight=False)
    console.print(f"Events:  tensorboard --logdir {folder / 'tensorboard'}", soft_wrap=True, highlight=False)


def _label(plan: Any) -> str:
    faster = "" if plan.rate_factor == 1 else f" {plan.rate_factor:g}x"
    return f"{plan.optimizer}{faster} #{plan.seed}"


def _shown(point: Any, metric: str) -> str:
    value = f"{point.metric:.1%}" if metric == "accuracy" else f"{point.metric:.4g}"
    refreshes = f", refreshed {point.refreshes}x" if point.refreshes else ""
    return f"step {point.step}, loss {point.train_loss:.4g}, val. {value}{refreshes}"


def _table(lines: Iterable[dict[str, Any]], title: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("\noptimizer", no_wrap=True)
    for heading in (
        "\nseed",
        "best\nval.",
        "best\ntrain",
        "ms per\nstep",
        "seconds\nin all",
        "seconds\nto target",
        "ratio",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    known = list(lines)
    own = {(x["optimizer"], x["seed"]): x["seconds_to_target"] for x in known if x["rate_factor"] == 1}
    for line in known:
        plain = line["rate_factor"] == 1
        name = line["optimizer"] if plain else f"{line['optimizer']}, {line['rate_factor']:g}x rate"
        base = own.get((line["base"] or "heavy-ball", line["seed"]))
        reached = line["seconds_to_target"]
        ratio = "" if base is None or (plain and line["optimizer"] == line["base"]) else "-"
        if ratio and base and reached is not None:
            ratio = f"{reached / base:.2f}"
        table.add_row(
            name,
            str(line["seed"]),
            f"{line['best_val']:.4g}" if line["best_val"] is not None else "-",
            f"{line['best_train']:.3g}" if line["best_train"] is not None else "-",
            "?" if line["ms_per_step"] is None else f"{line['ms_per_step']:.3g}",
            "?" if line["seconds"] is None else f"{line['seconds']:.3g}",
            f"{reached:.3g}" if reached is not None else "no base" if line["target_val"] is None else "-",
            ratio,
            style="bold" if "fosi" in name else "",
        )
    return table
