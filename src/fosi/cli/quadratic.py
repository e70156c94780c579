"""`fosi quadratic`: the paper's studies on quadratic functions."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from fosi.cli.options import print_figures

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="The paper's six studies on quadratic functions: numbers as JSON lines, figures as PNG and PDF.",
    epilog="[bold]Example[/bold]: fosi quadratic all --quick",
)

Out = Annotated[Path, typer.Option(help="Folder for the numbers and the figures.", file_okay=False)]
Seeds = Annotated[int, typer.Option(help="How many starts: the paper's, and others drawn at random.")]
Iterations = Annotated[int, typer.Option(help="Steps of each optimizer.")]
Backend = Annotated[str, typer.Option(help="jax (all functions in one program) or torch (one after the other).")]

_OUT = Path("fosi-results/quadratic")
# The paper's; lists, for typer knows no tuples of any length.
_N = [100, 1500]
_LAMBDA1 = [5.0, 10.0, 20.0, 50.0, 200.0]
_B = [1.1, 1.11, 1.12, 1.13, 1.14, 1.15, 1.16, 1.17]
_BETAS = [0.6, 0.75, 0.9]


def _example(arguments: str) -> str:
    return f"[bold]Example[/bold]: fosi quadratic {arguments}"


@app.command(epilog=_example("spectrum --n 100 --lambda1 5 --lambda1 200 --seeds 3"))
def spectrum(
    n: Annotated[list[int], typer.Option(help="Dimension; repeat for several.")] = _N,
    lambda1: Annotated[list[float], typer.Option(help="Largest eigenvalue; repeat for several.")] = _LAMBDA1,
    seeds: Seeds = 11,
    iterations: Iterations = 200,
    backend: Backend = "jax",
    out: Out = _OUT,
) -> None:
    """Study 1: six optimizers as dimension and largest eigenvalue grow."""
    _run("spectrum", out, n=tuple(n), lambda1=tuple(lambda1), seeds=seeds, iterations=iterations, backend=backend)


@app.command(epilog=_example("condition --seeds 3"))
def condition(
    n: Annotated[int, typer.Option(help="Dimension.")] = 100,
    seeds: Seeds = 11,
    iterations: Iterations = 200,
    backend: Backend = "jax",
    out: Out = _OUT,
) -> None:
    """Study 2: FOSI converges faster though it raises the effective condition number."""
    _run("condition", out, n=n, seeds=seeds, iterations=iterations, backend=backend)


@app.command(epilog=_example("rotation --zeta-step 10 --block largest --out fosi-results/quadratic-largest"))
def rotation(
    n: Annotated[int, typer.Option(help="Dimension.")] = 100,
    b: Annotated[list[float], typer.Option(help="Growth of the eigenvalues; repeat for several.")] = _B,
    zeta_step: Annotated[int, typer.Option(help="ζ runs from 0 to n in steps of this.", min=1)] = 1,
    block: Annotated[str, typer.Option(help="Which eigenvalues are mixed: ends, largest or smallest.")] = "ends",
    seeds: Seeds = 3,
    iterations: Iterations = 200,
    backend: Backend = "jax",
    out: Out = _OUT,
) -> None:
    """Study 3: a grid of functions, ill-conditioned (b) and rotated away from the axes (ζ)."""
    zeta = tuple(range(0, n + 1, zeta_step))
    _run("rotation", out, n=n, b=tuple(b), zeta=zeta, block=block, seeds=seeds, iterations=iterations, backend=backend)


@app.command(epilog=_example("learning-rate --rates-per-decade 5 --momenta 6"))
def learning_rate(
    n: Annotated[int, typer.Option(help="Dimension.")] = 100,
    rates_per_decade: Annotated[int, typer.Option(help="Learning rates in each decade of [1e-5, 10].")] = 10,
    momenta: Annotated[int, typer.Option(help="Momenta in [0.7, 1).")] = 30,
    seed: Annotated[int, typer.Option(help="Of the rotation; 0 has the paper's start.")] = 0,
    iterations: Iterations = 200,
    backend: Backend = "jax",
    out: Out = _OUT,
) -> None:
    """Study 4: learning rates and momenta, with FOSI's scaling of the rate off (c = 1) and on (c = ∞)."""
    settings = {"rates_per_decade": rates_per_decade, "momenta": momenta, "seed": seed}
    _run("learning-rate", out, n=n, **settings, iterations=iterations, backend=backend)


@app.command(epilog=_example("stochastic --beta 0.6 --beta 0.9 --iterations 10000"))
def stochastic(
    n: Annotated[int, typer.Option(help="Dimension.")] = 100,
    lambda1: Annotated[float, typer.Option(help="Largest eigenvalue.")] = 10.0,
    beta: Annotated[list[float], typer.Option(help="Exponent of the step size; repeat for several.")] = _BETAS,
    seeds: Annotated[int, typer.Option(help="How many runs with noise of their own.")] = 16,
    iterations: Iterations = 100_000,
    out: Out = _OUT,
) -> None:
    """Study 5: noisy gradients, and the rate of Lemma 2."""
    _run("stochastic", out, n=n, lambda1=lambda1, betas=tuple(beta), seeds=seeds, iterations=iterations)


@app.command(epilog=_example("illustration --iterations 4"))
def illustration(
    iterations: Annotated[int, typer.Option(help="Steps that are drawn.")] = 6,
    out: Out = _OUT,
) -> None:
    """Study 6: f = f₁ + f₂ in two dimensions, with the steps as arrows."""
    _run("illustration", out, iterations=iterations)


@app.command("all", epilog=_example("all --quick --out fosi-results/quadratic-quick"))
def everything(
    quick: Annotated[bool, typer.Option("--quick", help="Small sizes: about a minute instead of several.")] = False,
    out: Annotated[
        Path | None, typer.Option(help=f"Folder; {_OUT} where not given, {_OUT}-quick with --quick.", file_okay=False)
    ] = None,
) -> None:
    """All six studies."""
    from fosi.experiments.quadratic import QUICK, STUDIES

    folder = out or (Path(f"{_OUT}-quick") if quick else _OUT)
    for name, study in STUDIES.items():
        _show(name, QUICK[name] if quick else study.Settings(), folder)


def _run(name: str, out: Path, **settings: Any) -> None:
    # Imported here so that --help does not wait for JAX.
    from fosi.experiments.quadratic import STUDIES

    try:
        made = STUDIES[name].Settings(**settings)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    _show(name, made, out)


def _show(name: str, settings: Any, out: Path) -> None:
    """Runs a study, shows its progress and its table, draws its figures."""
    from fosi.experiments import report
    from fosi.experiments.quadratic import STUDIES
    from fosi.experiments.quadratic import study as running

    console = Console()
    columns = (
        TextColumn("{task.description:<36}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(elapsed_when_finished=False),
    )
    try:
        with Progress(*columns, console=console) as bar:
            task = bar.add_task(name, total=None)

            def advance(progress: running.Progress) -> None:
                label = f"{name}: {progress.unit}" if progress.unit else name
                bar.update(task, total=progress.total, completed=progress.done, description=label)

            records = running.run(STUDIES[name], settings, out, advance)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    except KeyboardInterrupt:
        console.print("Stopped. The same command goes on from here.")
        raise typer.Exit(130) from None
    console.print(_table(STUDIES[name].table(records)))
    numbers = out / f"{name}.jsonl"
    console.print(f"Numbers: {numbers}", soft_wrap=True, highlight=False)
    drawn = report.redraw(numbers)
    print_figures(console, drawn)
    if not drawn:
        console.print("No figure: contours need at least two values of b and of ζ.")
    console.print()


def _table(of: Any) -> Table:
    table = Table(title=of.title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for index, heading in enumerate(of.headings):
        table.add_column(heading, justify="right" if index else "left")
    for row in of.rows:
        table.add_row(*row, style="bold" if row[0].startswith("fosi-") else "")
    return table
