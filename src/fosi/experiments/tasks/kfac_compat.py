"""kfac-jax on the JAX of today: its last release (0.0.8) is older than what JAX 0.10 and 0.11 changed."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import warnings
from types import ModuleType, SimpleNamespace
from typing import Any

import jax
import jax.core
import jax.extend as jex
import jax.numpy as jnp

MOVED = ("DebugInfo", "DropVar", "Effects", "gensym", "new_jaxpr_eqn", "no_effects")
"""What kfac-jax looks for in jax.core, and JAX 0.11 has in jax.extend.core alone."""


@functools.cache
def load() -> Any:
    """Imports kfac-jax, made to work with the installed JAX.

    Raises:
      ModuleNotFoundError: kfac-jax is not installed.
    """
    if importlib.util.find_spec("kfac_jax") is None:
        raise ModuleNotFoundError(
            "optimizer is 'kfac', which needs kfac-jax: pip install 'fosi[kfac]'", name="kfac_jax"
        )
    for name in MOVED:
        if name not in vars(jax.core):
            setattr(jax.core, name, getattr(jex.core, name))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TensorFlow Probability, which it imports, uses what JAX deprecates
        kfac = importlib.import_module("kfac_jax")
        matcher = importlib.import_module("kfac_jax._src.tag_graph_matcher")
        tracer = importlib.import_module("kfac_jax._src.tracer")
    _bind(matcher)
    _close(matcher, tracer)
    return kfac


def _bind(matcher: ModuleType) -> None:
    """Since JAX 0.9.2 an equation's parameters include the functions in it, which kfac-jax would unpack apart."""

    def evaluate(equation: Any, values: list[Any]) -> list[Any]:
        parameters = equation.primitive.get_bind_params(equation.params)
        with jex.source_info_util.user_context(equation.source_info.traceback):
            out = equation.primitive.bind(*values, **parameters)
        return list(out) if equation.primitive.multiple_results else [out]

    matcher.eval_jaxpr_eqn = evaluate  # type: ignore[attr-defined]


def _close(matcher: ModuleType, tracer: ModuleType) -> None:
    """Since JAX 0.11 a Jaxpr may have its constants in it, and ClosedJaxpr is another name of the same class."""
    if not issubclass(jex.core.ClosedJaxpr, jex.core.Jaxpr):
        return

    def closed(jaxpr: Any, consts: Any) -> Any:
        return jex.core.ClosedJaxpr(jaxpr, consts)

    matcher.ClosedJaxpr = closed  # type: ignore[attr-defined]
    matcher.to_closed_jaxpr = lambda jaxpr: jaxpr  # type: ignore[attr-defined]
    tracer.jex = SimpleNamespace(core=SimpleNamespace(**{**vars(jex.core), "ClosedJaxpr": closed}))  # type: ignore[attr-defined]


def convolution_block(kfac: Any) -> Any:
    """Returns K-FAC's block of a convolution, right for dilated inputs too.

    A transposed convolution is one over its inputs with zeros between them. kfac-jax takes it for one over the inputs
    as they are: wrong patches, and a quarter as many places where the stride is 2.
    """

    class Convolution(kfac.Conv2DTwoKroneckerFactored):
        @property
        def _dilation(self) -> tuple[int, ...]:
            return tuple(self._layer_tag_eq.params["lhs_dilation"])

        @property
        def inputs_spatial_shape(self) -> tuple[int, ...]:
            sizes = super().inputs_spatial_shape
            return tuple(1 + (size - 1) * step for size, step in zip(sizes, self._dilation, strict=True))

        def compute_inputs_stats(self, inputs: jax.Array, weighting_array: jax.Array | None = None) -> Any:
            zeros = [(0, 0, 0)] * inputs.ndim
            axes = self._layer_tag_eq.params["dimension_numbers"].lhs_spec[2:]
            for axis, step in zip(axes, self._dilation, strict=True):
                zeros[axis] = (0, 0, step - 1)
            spread = jax.lax.pad(inputs, jnp.zeros((), inputs.dtype), zeros)
            return super().compute_inputs_stats(spread, weighting_array)

    return Convolution
