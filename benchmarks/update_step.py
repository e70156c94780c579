"""How much faster is an update than the paper written plainly? And what does it add to the base's?"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks import common, models
from benchmarks.literal import Literal, literal_fosi
from fosi import Ema, Trace
from fosi.jax import Fosi, fosi_adam, fosi_sgd

K = 10
ALPHA = 0.01


class _Timed:
    """An optimizer whose state is donated from call to call, as in a training loop."""

    def __init__(self, update: Any, state: Any) -> None:
        self.state = state
        self.update = jax.jit(update, donate_argnums=1)

    def __call__(self, grads: Any) -> Any:
        updates, self.state = self.update(grads, self.state)
        return updates


def _with_basis(state: Any, n: int) -> Any:
    """A state as after a refresh: orthonormal rows and eigenvalues."""
    rows = jnp.linalg.qr(jax.random.normal(jax.random.key(5), (n, K)))[0].T
    values = jnp.linspace(10.0, 1.0, K)
    if hasattr(state, "V"):
        return state._replace(V=jnp.array(rows), u=1 / values)
    return state._replace(basis=jnp.array(rows), eigenvalues=values, accepted=jnp.ones(K, bool))


def _fosi(opt: Fosi, problem: models.Problem) -> _Timed:
    state = _with_basis(opt.init(problem.params), problem.size)
    return _Timed(lambda grads, state: opt.update(grads, state, problem.params), state)


def _literal(opt: Literal, problem: models.Problem) -> _Timed:
    return _Timed(opt.update, _with_basis(opt.init(problem.params), problem.size))


def _base(opt: optax.GradientTransformation, problem: models.Problem) -> _Timed:
    return _Timed(partial(opt.update, params=problem.params), opt.init(problem.params))


def measure(problem: models.Problem, repeats: int) -> list[dict[str, Any]]:
    """Milliseconds of a whole update, the gradient given, for the base, the literal version and ours."""
    grads = jax.jit(jax.grad(problem.loss_fn))(problem.params, problem.batch)
    heavy_ball = optax.sgd(0.1, momentum=0.9)
    adam = optax.adam(1e-3)
    contenders = {
        "heavy-ball": (
            _base(heavy_ball, problem),
            _literal(literal_fosi(heavy_ball, Trace(0.9), K, ALPHA), problem),
            _fosi(fosi_sgd(0.1, None, momentum=0.9, k=K, alpha=ALPHA, refresh="external"), problem),
        ),
        "adam": (
            _base(adam, problem),
            _literal(literal_fosi(adam, Ema(0.9), K, ALPHA), problem),
            _fosi(fosi_adam(1e-3, None, k=K, alpha=ALPHA, refresh="external"), problem),
        ),
    }
    rows = []
    for name, (base, literal, ours) in contenders.items():
        runs = {label: partial(run, grads) for label, run in (("base", base), ("literal", literal), ("fosi", ours))}
        seconds = common.interleaved(runs, repeats)
        rows.append(
            {
                "model": problem.name,
                "n": problem.size,
                "k": K,
                "base": name,
                "base_ms": 1e3 * seconds["base"],
                "literal_ms": 1e3 * seconds["literal"],
                "fosi_ms": 1e3 * seconds["fosi"],
                "literal_over_fosi": seconds["literal"] / seconds["fosi"],
            }
        )
    return rows


def main(argv: list[str] | None = None) -> None:
    """Prints the table."""
    args = common.parser(__doc__).parse_args(argv)
    rows = measure(models.lstm(), args.repeats or 60)
    common.table(
        "update step, gradient given, state donated (ms)",
        ["base", "n", "base alone", "literal", "fosi", "literal / fosi"],
        [(r["base"], r["n"], r["base_ms"], r["literal_ms"], r["fosi_ms"], r["literal_over_fosi"]) for r in rows],
    )
    common.record(args.out, "update_step", rows)


if __name__ == "__main__":
    main()
