"""The commands: each parses its options, calls an experiment, and prints what came out and where it is."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from fosi.cli import diagnose, quadratic, tasks
from fosi.cli.options import at_least, print_figures

app = typer.Typer(
    name="fosi",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_show_locals=False,
)
app.add_typer(quadratic.app, name="quadratic")
app.command(epilog="[bold]Example[/bold]: fosi train lm --optimizer fosi-adam --data-dir data --download")(tasks.train)
app.command(epilog="[bold]Example[/bold]: fosi compare lr --data-dir data --download")(tasks.compare)
app.command(epilog="[bold]Example[/bold]: fosi diagnose lr --optimizer heavy-ball --data-dir data --download")(
    diagnose.diagnose
)
app.command(epilog="[bold]Example[/bold]: fosi spectrum wave --mode quick --rounds-before 3 --ell 3")(diagnose.spectrum)


@app.callback()
def root() -> None:
    """FOSI: wrap any first-order optimizer with second-order information."""


@app.command(epilog="[bold]Example[/bold]: fosi quickstart --steps 500 --seed 1 --out fosi-results/quickstart-1")
def quickstart(
    out: Annotated[Path, typer.Option(help="Folder for the numbers and the figure.", file_okay=False)] = Path(
        "fosi-results/quickstart"
    ),
    steps: Annotated[int, typer.Option(help="Training steps for each optimizer.", callback=at_least(1))] = 2000,
    seed: Annotated[int, typer.Option(help="Of the weights and of the batches.", callback=at_least(0))] = 0,
) -> None:
    """Train Heavy-Ball and Adam on scikit-learn's digits, with and without FOSI.

    Writes quickstart.jsonl and quickstart.png into the folder OUT. Takes under two minutes on two cores.
    """
    # Imported here so that --help does not wait for JAX.
    from fosi.cli.tables import runs_table
    from fosi.experiments import digits, records, report
    from fosi.experiments import quickstart as experiment

    console = Console()
    out.mkdir(parents=True, exist_ok=True)
    layers = "-".join(str(width) for width in digits.LAYERS)
    console.print(f"Digits, network {layers}, batches of {experiment.BATCH_SIZE}, {steps} steps, seed {seed}.")

    columns = (
        TextColumn("{task.description:<24}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        total = progress.add_task("all trainings", total=experiment.trainings() * steps)
        tasks: dict[str, TaskID] = {}
        before = 0

        def show(event: experiment.Event) -> None:
            nonlocal before
            if event.label not in tasks:
                tasks[event.label] = progress.add_task(event.label, total=event.steps)
                before = 0
            progress.update(tasks[event.label], completed=event.done)
            progress.advance(total, event.done - before)
            before = event.done

        result = experiment.quickstart(steps, seed, show)

    settings = {"command": "quickstart", "seed": seed, "steps": steps, "batch_size": experiment.BATCH_SIZE}
    environment = records.environment(**settings, caption=experiment.caption())
    lines = [environment, *(run.record() for run in result.runs)]
    lines += [run.record(chosen=False) for run in result.rejected]
    numbers = out / "quickstart.jsonl"
    records.write_jsonl(numbers, lines)
    drawn = report.redraw(numbers)

    console.print()
    console.print(runs_table(result.runs, "Digits after training"))
    console.print(
        f"The paper's protocol, not a tuned comparison: {experiment.caption()}. On a problem this easy a larger "
        "rate alone can do as much as FOSI, at a lower cost a step: see the README's caveats.\n"
        f"Loss is over the whole training set, read {len(result.runs[0].curve) - 1} times in a run; "
        "ms per step includes refreshes, not compiling; \"steps to base's best\": '-' means never.",
        style="dim",
        highlight=False,
    )
    console.print(f"Numbers: {numbers}", soft_wrap=True, highlight=False)
    print_figures(console, drawn)


@app.command(epilog="[bold]Example[/bold]: fosi report results/quadratic")
def report(
    where: Annotated[Path, typer.Argument(help="A results file, or a folder with some.")] = Path("fosi-results"),
) -> None:
    """Write the report and draw the figures of results, from their numbers alone.

    Writes PNG and PDF beside each file of numbers; where there are runs of training tasks, README.md with their tables.
    """
    from fosi.experiments import report as experiment

    console = Console()
    try:
        found = experiment.results(where)
        written = experiment.tasks(where)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    failed = False
    if written:
        console.print(f"Report:  {written[0]}", soft_wrap=True, highlight=False)
        print_figures(console, written[1:])
    for path in found:
        try:
            drawn = experiment.redraw(path)
        except ValueError as error:  # the others are drawn all the same
            failed = True
            console.print(f"Skipped: {error}", soft_wrap=True, highlight=False, markup=False)
            continue
        console.print(f"Numbers: {path}", soft_wrap=True, highlight=False)
        print_figures(console, drawn)
    if failed:
        raise typer.Exit(1)
