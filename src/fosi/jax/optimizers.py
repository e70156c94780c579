"""The optimizers users build: FOSI around any optax transformation, and ready-made SGD, Adam and AdamW."""

from __future__ import annotations

import dataclasses
import logging
import numbers
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from fosi.jax import space as sp
from fosi.jax.quasi_newton import LbfgsStep, line_search
from fosi.jax.steps import Decay, LinearStep, ProjectedStep, decoupled_decay
from fosi.jax.transform import Fosi, JaxOptions, build
from fosi.momentum import Ema
from fosi.options import settle, takes
from fosi.quasi_newton import Scaling, check

_log = logging.getLogger("fosi")

LossFn = Callable[..., Any]
LearningRate = float | jax.Array | Callable[[Any], Any]

STATIC_ARGS = (
    "loss_fn",
    *(f.name for f in dataclasses.fields(JaxOptions) if f.name not in {"alpha", "eps", "max_lr_scale"}),
)
"""What ``optax.inject_hyperparams`` must be told not to inject: everything but rates, floors and caps. That
includes ``fosi_sgd``'s momentum, whose name is that of an option; leave it out of the tuple to inject it."""


@takes(JaxOptions)
def fosi(base: optax.GradientTransformation, loss_fn: LossFn | None = None, **options: Any) -> Fosi:
    """FOSI around any optax transformation.

    Every T steps the k largest and ell smallest eigenpairs (λ, V) of the Hessian are estimated; each step is
    d₁ + d₂ with d₁ = −α V diag(1/|λ|) Vᵀ g, a scaled Newton step inside the subspace, and d₂ = (I − V Vᵀ) d_b, where
    the base makes d_b of g − V Vᵀ g (the paper's Algorithm 2).

    The Newton part should see the same momentum as the base (§3.4). An optax transformation does not tell which it
    has: name it (``from fosi import Ema``, ``momentum=Ema(0.9)``), or take ``fosi_sgd``, ``fosi_adam`` and
    ``fosi_adamw``, which know. Weight decay inside the base is projected away along V: put
    ``optax.add_decayed_weights(-learning_rate * strength)`` after ``fosi`` in a chain instead. A base with a line
    search (``optax.lbfgs``) has no place here: it would search along a direction that FOSI then changes; for that one
    there is ``fosi_lbfgs``.

    Args:
      base: what takes the step outside the subspace; it is handed gradients in the parameters' shapes.
      loss_fn: loss_fn(params, batch) -> scalar, or (scalar, aux) with ``has_aux=True``; None where ``value_fn``
        comes with ``update``.
      **options: FOSI's settings, see ``fosi.jax.JaxOptions``.

    Returns:
      An ``optax.GradientTransformationExtraArgs`` that takes ``batch=`` or ``value_fn=`` in ``update`` and also
      carries ``schedule(params)``, ``refresh(state, params, batch=)`` and ``spectrum(state, params)``.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> import fosi.jax
      >>> def loss_fn(w, scales):
      ...     return 0.5 * jnp.sum(scales * w**2)
      >>> opt = fosi.jax.fosi(optax.sgd(0.1), loss_fn, k=2, alpha=1.0, warmup=0, momentum=None)
      >>> w, scales = jnp.ones(4), jnp.array([100.0, 50.0, 2.0, 1.0])
      >>> state = opt.init(w)
      >>> updates, state = opt.update(jax.grad(loss_fn)(w, scales), state, w, batch=scales)
      >>> w = optax.apply_updates(w, updates)
      >>> [round(abs(float(x)), 3) for x in w]
      [0.0, 0.0, 0.8, 0.9]

    References:
      Sivan, Gabel and Schuster, FOSI: Hybrid First and Second Order Optimization, ICLR 2024.
    """
    if not (callable(getattr(base, "init", None)) and callable(getattr(base, "update", None))):
        raise TypeError(f"base must be an optax transformation such as optax.adam(1e-3), got {base!r}")
    settings = settle(JaxOptions, options)
    momentum = settings.momentum
    if momentum == "auto":
        _log.warning(
            "fosi(): the base's momentum is not known, the Newton part takes none; name it with momentum=Ema(b1) "
            "or momentum=Trace(decay), both of fosi"
        )
        momentum = None
    if _moves_without_gradient(base):
        _log.warning(
            "fosi(): the base moves parameters whose gradient is zero (weight decay?): FOSI projects that away along "
            "its eigenvectors; chain optax.add_decayed_weights(-learning_rate * strength) after it, or use fosi_adamw"
        )
    return build(ProjectedStep(optax.with_extra_args_support(base), momentum), loss_fn, settings)


@takes(JaxOptions)
def fosi_sgd(
    learning_rate: LearningRate,
    loss_fn: LossFn | None = None,
    *,
    momentum: float | None = None,
    nesterov: bool = False,
    lr_rule: str | Callable[[Any, Any], Any] | None = "auto",
    **options: Any,
) -> Fosi:
    """FOSI around gradient descent, Heavy-Ball or Nesterov, its learning rate scaled by the matching rule.

    The base is linear in the gradients, so V is read twice a step instead of four times, and one momentum serves
    both parts: −η m̄ + V((η − α/|λ|) ⊙ Vᵀ m̄), with η the scaled learning rate.

    Args:
      learning_rate: a number or an optax schedule.
      loss_fn: loss_fn(params, batch) -> scalar; None where ``value_fn`` comes with ``update``.
      momentum: None for gradient descent, a float for Heavy-Ball or Nesterov.
      nesterov: Nesterov's momentum instead of Heavy-Ball's.
      lr_rule: as in ``fosi.jax.JaxOptions``; ``"auto"`` is the optimizer's own closed form.
      **options: FOSI's settings, see ``fosi.jax.JaxOptions``.

    Returns:
      As ``fosi.jax.fosi``.

    Example:
      >>> from fosi.jax import fosi_sgd
      >>> opt = fosi_sgd(0.1, lambda params, batch: (params * batch).sum() ** 2, momentum=0.9, k=5)
    """
    if momentum is None:
        if nesterov:
            raise ValueError("nesterov=True needs momentum, got momentum=None")
        rule = "gd"
    else:
        _check_decay("momentum", momentum)
        rule = "nesterov" if nesterov else "heavy_ball"
    settings = settle(JaxOptions, {"lr_rule": rule if lr_rule == "auto" else lr_rule, **options})
    return build(LinearStep(learning_rate, momentum, nesterov), loss_fn, settings)


@takes(JaxOptions)
def fosi_adam(
    learning_rate: LearningRate,
    loss_fn: LossFn | None = None,
    *,
    b1: float = 0.9,
    b2: float = 0.999,
    adam_eps: float = 1e-8,
    **options: Any,
) -> Fosi:
    """FOSI around Adam; the Newton part sees Adam's bias-corrected first moment, the learning rate is not scaled.

    Args:
      learning_rate: a number or an optax schedule.
      loss_fn: loss_fn(params, batch) -> scalar; None where ``value_fn`` comes with ``update``.
      b1: decay of the first moment, also of the Newton part's.
      b2: decay of the second moment.
      adam_eps: Adam's ε (``eps`` is FOSI's floor on |λ|).
      **options: FOSI's settings, see ``fosi.jax.JaxOptions``.

    Returns:
      As ``fosi.jax.fosi``.

    Example:
      >>> from fosi.jax import fosi_adam
      >>> opt = fosi_adam(1e-3, lambda params, batch: (params * batch).sum() ** 2, k=10)
    """
    return _adam(learning_rate, loss_fn, b1, b2, adam_eps, None, options)


@takes(JaxOptions)
def fosi_adamw(
    learning_rate: LearningRate,
    loss_fn: LossFn | None = None,
    *,
    b1: float = 0.9,
    b2: float = 0.999,
    adam_eps: float = 1e-8,
    weight_decay: float = 1e-4,
    weight_decay_mask: sp.Mask | None = None,
    **options: Any,
) -> Fosi:
    """FOSI around AdamW: as ``fosi_adam``, with decoupled weight decay that is not projected away.

    Args:
      learning_rate: a number or an optax schedule; it also multiplies the decay.
      loss_fn: loss_fn(params, batch) -> scalar; None where ``value_fn`` comes with ``update``.
      b1: decay of the first moment, also of the Newton part's.
      b2: decay of the second moment.
      adam_eps: Adam's ε (``eps`` is FOSI's floor on |λ|).
      weight_decay: strength of the decay.
      weight_decay_mask: True for the leaves that decay; all where None (``mask`` is FOSI's, for the subspace).
      **options: FOSI's settings, see ``fosi.jax.JaxOptions``.

    Returns:
      As ``fosi.jax.fosi``.

    Example:
      >>> from fosi.jax import fosi_adamw
      >>> opt = fosi_adamw(1e-3, lambda params, batch: (params * batch).sum() ** 2, weight_decay=0.01)
    """
    decay = decoupled_decay(learning_rate, weight_decay, weight_decay_mask)
    return _adam(learning_rate, loss_fn, b1, b2, adam_eps, decay, options)


@takes(JaxOptions)
def fosi_lbfgs(
    loss_fn: LossFn | None = None,
    *,
    memory_size: int = 100,
    alpha: float | Callable[[Any], Any] = 1.0,
    scaling: Scaling = "geometric",
    linesearch: optax.GradientTransformation | None = None,
    **options: Any,
) -> Fosi:
    """FOSI around L-BFGS, for losses without noise: physics-informed networks, full batches.

    L-BFGS's first guess of the inverse Hessian is FOSI's metric, V diag(α/|λ|) Vᵀ + γ(I − V Vᵀ), and its pairs correct
    it; a line search goes along the whole step. Called as ``optax.lbfgs`` is, with a ``value_fn`` of the parameters
    alone; where the loss is the same in every step ``optax.value_and_grad_from_state`` saves a gradient a step. To
    ``optax.inject_hyperparams`` name ``memory_size``, ``scaling`` and ``linesearch`` beside ``STATIC_ARGS``.

    Args:
      loss_fn: loss_fn(params, batch) -> scalar, where estimates are made of a ``batch=``; None where they are made of
        ``value_fn``.
      memory_size: how many pairs are kept.
      alpha: α, 1 for Newton's own step inside the subspace.
      scaling: how γ is read off the last pair (s, y), less what lies in the subspace: ``"geometric"``, |s|/|y|, and no
        less than 0.1 of the longest α/|λ| of the k largest, but cut where searches end below 0.01; or ``"usual"``,
        sᵀy/yᵀy, which without an estimate makes it L-BFGS as everybody knows it.
      linesearch: an optax line search; None for that of ``optax.lbfgs``, made to bear the noise of float32, which
        begins a tenth above where the last one ended, or at 1 with the usual scaling.
      **options: FOSI's settings, see ``fosi.jax.JaxOptions``; there is no ``mask``, and no ``lr_rule``.

    Returns:
      As ``fosi.jax.fosi``; ``update`` also takes ``value=``, ``grad=`` and ``value_fn=``.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from fosi.jax import fosi_lbfgs
      >>> def loss(w):
      ...     return jnp.sum(jnp.array([1e4, 1e2, 1.0]) * (w - 1) ** 2)
      >>> opt = fosi_lbfgs(k=2, warmup=0)
      >>> w = jnp.zeros(3)
      >>> state = opt.init(w)
      >>> value_and_grad = optax.value_and_grad_from_state(loss)
      >>> for _ in range(3):
      ...     value, grad = value_and_grad(w, state=state)
      ...     updates, state = opt.update(grad, state, w, value=value, grad=grad, value_fn=loss)
      ...     w = optax.apply_updates(w, updates)
      >>> print(f"{loss(w):.4f}")
      0.0000
    """
    if not isinstance(memory_size, numbers.Integral) or isinstance(memory_size, bool) or memory_size < 1:
        raise ValueError(f"memory_size must be an integer ≥ 1, got {memory_size!r}")
    settings = settle(JaxOptions, {"alpha": alpha, **options})
    check(settings, scaling)
    search = line_search(scaling) if linesearch is None else linesearch
    step = LbfgsStep(int(memory_size), optax.with_extra_args_support(search), settings.k, scaling)
    return build(step, loss_fn, settings)


def _adam(
    learning_rate: LearningRate,
    loss_fn: LossFn | None,
    b1: float,
    b2: float,
    adam_eps: float,
    decay: Decay | None,
    options: dict[str, Any],
) -> Fosi:
    settings = settle(JaxOptions, options)
    _check_decay("b1", b1)
    momentum = Ema(b1) if settings.momentum == "auto" else settings.momentum
    base = optax.with_extra_args_support(optax.adam(learning_rate, b1, b2, adam_eps))
    return build(ProjectedStep(base, momentum, decay), loss_fn, settings)


def _check_decay(name: str, value: Any) -> None:
    if isinstance(value, numbers.Real) and not 0 <= float(value) < 1:
        raise ValueError(f"{name} must be at least 0 and below 1, got {value!r}")
    if not isinstance(value, (numbers.Real, jax.Array)):  # an array may be traced, and cannot be looked at
        raise TypeError(f"{name} must be a number at least 0 and below 1, got {value!r}")


def _moves_without_gradient(base: optax.GradientTransformation) -> bool:
    """Whether a base moves a parameter whose gradient is zero, tried on a tree of its own."""
    params = {"w": jnp.ones((2, 2))}
    grads = {"w": jnp.zeros((2, 2))}
    try:
        with jax.ensure_compile_time_eval():
            state = base.init(params)
            for _ in range(2):  # a warm-up schedule starts at 0
                updates, state = base.update(grads, state, params)
                if bool(jnp.any(updates["w"] != 0)):
                    return True
    except Exception:  # a base made for another tree, or for extra arguments: nothing is known of it
        return False
    return False
