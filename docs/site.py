"""For mkdocs: figures of results lie outside docs/, where readers of the repository find them; the site gets a copy."""

import shutil
from pathlib import Path
from typing import Any


def on_post_build(config: Any) -> None:
    root = Path(config["docs_dir"]).parent
    for figure in (root / "results").rglob("*.png"):
        copy = Path(config["site_dir"]) / figure.relative_to(root)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(figure, copy)
