"""What does FOSI add to a whole training step, and which layout of the basis is the right one on this device?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks import common, models
from fosi.jax import Fosi, fosi_adam, fosi_sgd

K = 10


class _Training:
    """A training loop of one batch: gradient, update and parameters in one compiled, donated step."""

    def __init__(self, opt: optax.GradientTransformation, problem: models.Problem, calls: int) -> None:
        params = jax.tree.map(jnp.array, problem.params)
        self.carry = (params, opt.init(params))
        if isinstance(opt, Fosi):
            self.carry = (params, _filled(self.carry[1]))
        self.calls = calls
        self.batch = problem.batch

        def step(carry: Any, batch: Any) -> Any:
            params, state = carry
            grads = jax.grad(problem.loss_fn)(params, batch)
            updates, state = opt.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        self.step = jax.jit(step, donate_argnums=0)

    def __call__(self) -> Any:
        for _ in range(self.calls):
            self.carry = self.step(self.carry, self.batch)
        return self.carry[1]


def _filled(state: Any) -> Any:
    """A state whose basis holds something: zeros could be faster than what comes in training."""
    scale = sum(rows.size for rows in jax.tree.leaves(state.basis)) ** -0.5
    basis = jax.tree.map(lambda rows: scale * jax.random.normal(jax.random.key(1), rows.shape), state.basis)
    return state._replace(basis=basis, eigenvalues=jnp.linspace(1e3, 1e2, K), accepted=jnp.ones(K, bool))


def measure(
    problem: models.Problem, repeats: int, calls: int, layouts: Sequence[str], bases: Sequence[str]
) -> list[dict[str, Any]]:
    """Milliseconds a step for the bases and for FOSI in each layout."""
    optimizers: dict[str, optax.GradientTransformation] = {
        "heavy-ball": optax.sgd(1e-4, momentum=0.9),
        "adam": optax.adam(1e-5),
    }
    for layout in layouts:
        shared = {"k": K, "refresh": "external", "layout": layout, "alpha": 1e-4}
        optimizers[f"fosi-heavy-ball {layout}"] = fosi_sgd(1e-4, None, momentum=0.9, **shared)
        optimizers[f"fosi-adam {layout}"] = fosi_adam(1e-5, None, **shared)
    runs = {name: _Training(opt, problem, calls) for name, opt in optimizers.items() if any(b in name for b in bases)}
    seconds = common.interleaved(runs, repeats)
    rows = []
    for name, value in seconds.items():
        optimizer, _, layout = name.partition(" ")
        base = seconds[optimizer.removeprefix("fosi-")]
        rows.append(
            {
                "model": problem.name,
                "n": problem.size,
                "leaves": len(jax.tree.leaves(problem.params)),
                "optimizer": optimizer,
                "layout": layout,
                "step_ms": 1e3 * value / calls,
                "over_base": value / base,
            }
        )
    return rows


def main(argv: list[str] | None = None) -> None:
    """Prints the table."""
    parser = common.parser(__doc__)
    parser.add_argument("--model", default="lstm", choices=["lstm", "mobilenet", "autoencoder"])
    parser.add_argument("--calls", type=int, default=None, help="steps in one timed run")
    parser.add_argument("--layouts", default="flat,leaves", help="comma-separated")
    parser.add_argument("--bases", default="heavy-ball,adam", help="comma-separated")
    args = parser.parse_args(argv)
    make = {"lstm": models.lstm, "mobilenet": models.mobilenet, "autoencoder": models.conv_autoencoder}[args.model]
    on_cpu = jax.default_backend() == "cpu"
    repeats, calls = args.repeats or (3 if on_cpu else 20), args.calls or (2 if on_cpu else 20)
    rows = measure(make(), repeats, calls, args.layouts.split(","), args.bases.split(","))
    common.table(
        "training step: gradient, update, new parameters",
        ["model", "n", "optimizer", "layout", "ms a step", "over base"],
        [(r["model"], r["n"], r["optimizer"], r["layout"], r["step_ms"], r["over_base"]) for r in rows],
    )
    common.record(args.out, "train_step", rows)


if __name__ == "__main__":
    main()
