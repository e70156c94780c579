"""The `fosi` command; here only its entry point, which survives without the optional packages."""

_OPTIONAL = {
    **dict.fromkeys(("typer", "rich", "matplotlib", "sklearn", "jax", "optax"), "experiments"),
    **dict.fromkeys(("flax", "soundfile"), "tasks"),
    "kfac_jax": "kfac",
    "torch": "torch",
}
"""The extra that brings each package."""


def main() -> None:
    """Runs the command line, or says in one line what to install for it."""
    try:
        from fosi.cli.app import app

        app()
    except ModuleNotFoundError as error:
        # Only our optional packages: anything else missing is a bug and deserves its traceback.
        package = (error.name or "").partition(".")[0]
        if package not in _OPTIONAL:
            raise
        raise SystemExit(
            f'The fosi command needs {package}, which is not installed: pip install "fosi[{_OPTIONAL[package]}]"'
        ) from None
