"""FOSI as an optax transformation: the state, when to refresh it, and what a refresh changes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeVar, get_args

import jax
import jax.numpy as jnp
import optax

from fosi import scaling
from fosi.jax import space as sp
from fosi.jax import spectrum as ese
from fosi.jax.curvature import Loss
from fosi.jax.spectrum import ValueFn
from fosi.jax.steps import Step, Subspace, TreeMap
from fosi.options import Options
from fosi.schedule import Schedule

Refresh = Literal["inline", "external"]
Kind = TypeVar("Kind")


@dataclasses.dataclass(frozen=True, kw_only=True)
class JaxOptions(Options):
    """FOSI's settings, and those that only the JAX backend has.

    Attributes:
      refresh: ``"inline"`` estimates inside ``update`` when it is due; ``"external"`` leaves it to the caller, who
        calls ``opt.refresh`` when ``opt.schedule(params).due(step)``: no branch and no extra memory in the step.
      has_aux: whether the loss returns (scalar, aux).
      mask: True for the leaves that span the subspace; the others are left to the base optimizer.
      micro_batches: cut the curvature batch into so many pieces, to save memory; the loss must be a mean over it.
      layout: how vectors are laid out; ``"auto"`` is flat unless ``init`` sees sharded parameters.
    """

    refresh: Refresh = "inline"
    has_aux: bool = False
    mask: sp.Mask | None = None
    micro_batches: int = 1
    layout: sp.Layout = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.refresh not in get_args(Refresh):
            raise ValueError(f"refresh must be 'inline' or 'external', got {self.refresh!r}")
        sp.check_layout(self.layout)


class FosiState(NamedTuple):
    """FOSI's state: arrays only, so that jit, scan, donation and checkpoints work on it.

    Attributes:
      count: updates done.
      refreshes: estimates made, the unusable ones counted in.
      seed: with ``refreshes`` it determines the next start vector.
      eigenvalues: (k + ell,), descending; 0 before the first estimate.
      residuals: (k + ell,).
      accepted: (k + ell,), the pairs in use.
      basis: V with zero rows for pairs not in use: (k + ell, n), or one array a leaf for sharded parameters.
      lr_scale: factor on the base's learning rate.
      momentum: what the Newton part sees of past gradients. With ``fosi_sgd`` a vector of the space, which is also the
        base's momentum of the leaves that span it; else k + ell numbers in the subspace. None without momentum.
      base: the base optimizer's state; with ``fosi_sgd`` that of the leaves outside the space.
    """

    count: jax.Array  # type: ignore[assignment]
    refreshes: jax.Array
    seed: jax.Array
    eigenvalues: jax.Array
    residuals: jax.Array
    accepted: jax.Array
    basis: sp.Basis
    lr_scale: jax.Array
    momentum: sp.Vector | None
    base: Any


class Fosi(optax.GradientTransformationExtraArgs):
    """An optax transformation that also knows when a refresh is due and how to make one."""

    schedule: Callable[[sp.Tree], Schedule]
    refresh: Callable[..., Any]
    spectrum: Callable[..., ese.Spectrum]
    _core: _Core

    def __new__(cls, core: _Core) -> Fosi:
        """Binds the functions of ``core``."""
        made = super().__new__(cls, core.init, core.update)
        made.schedule = core.schedule
        made.refresh = core.refresh
        made.spectrum = core.spectrum
        made._core = core
        return made

    @property
    def external(self) -> bool:
        """Whether refreshes are left to the caller."""
        return self._core.options.refresh == "external"

    def moved(self, state: FosiState, place: sp.Tree, steps: TreeMap, gradients: TreeMap) -> FosiState:
        """The state in other coordinates, without an estimate; for what stands around FOSI and changes them.

        Args:
          state: in the old coordinates.
          place: the old ones where the new ones are 0.
          steps: the linear map of steps from the old ones to the new.
          gradients: that of gradients, the inverse of its transpose.

        Returns:
          The state before the first estimate, which goes on where the base can carry over what it has: L-BFGS its
          pairs and its line search, and the count of steps with them.
        """
        return self._core.moved(state, place, steps, gradients)

    def __getnewargs__(self) -> tuple[_Core]:
        """A copy is made of the core, not of the tuple's two functions."""
        return (self._core,)


@dataclasses.dataclass(frozen=True, eq=False)
class _Core:
    """The pure functions behind one optimizer."""

    step: Step
    loss: Loss
    options: JaxOptions

    def schedule(self, params: sp.Tree) -> Schedule:
        """Warm-up, interval and number of products as plain numbers, for these parameters."""
        return self.options.schedule(self._space(params).size)

    def init(self, params: sp.Tree) -> FosiState:
        """The state before the first update; ``params`` may be arrays, tracers or shapes."""
        space = sp.span(params, self.options.mask, self.options.layout, empty=True)
        if space.shapes:  # optax.tree.map_params asks for a state of no parameters at all
            self.options.schedule(space.size)
        rank, dtype = self.options.rank, space.dtype
        return FosiState(
            count=jnp.zeros((), jnp.int32),
            refreshes=jnp.zeros((), jnp.int32),
            seed=jnp.asarray(self.options.seed, jnp.uint32),
            eigenvalues=jnp.zeros(rank, dtype),
            residuals=jnp.zeros(rank, dtype),
            accepted=jnp.zeros(rank, bool),
            basis=space.zeros(dtype, rank),
            lr_scale=jnp.ones((), dtype),
            momentum=self.step.init_momentum(space, rank),
            base=self.step.init(space, params),
        )

    def update(
        self,
        updates: sp.Tree,
        state: FosiState,
        params: sp.Tree | None = None,
        *,
        batch: Any = None,
        value_fn: ValueFn | None = None,
        **extra_args: Any,
    ) -> tuple[sp.Tree, FosiState]:
        """One step; with ``refresh="inline"`` it refreshes first when that is due."""
        if params is None:
            raise ValueError("params must be passed to update: FOSI estimates the curvature at them, got None")
        space = self._space(params, state.basis)
        if self.options.refresh == "inline":
            due = self.options.schedule(space.size).due(state.count)
            # A line search has its value_fn whatever the estimate is made of; where a batch comes too, it is of that.
            searched = self.step.searches and batch is not None
            state = self._refresh_if(due, space, state, params, batch, None if searched else value_fn)
        alpha = self.options.alpha
        alpha = alpha(state.count) if callable(alpha) else alpha
        # Nothing, not 1/eps, for the pairs not in use: an injected eps is 0 in float16, and ∞ times a zero row NaN.
        newton = jnp.where(state.accepted, alpha / jnp.maximum(jnp.abs(state.eigenvalues), self.options.eps), 0)
        if self.step.searches:
            extra_args = {**extra_args, "value_fn": value_fn}
        updates, base, momentum = self.step(
            space,
            Subspace(state.basis, newton.astype(space.dtype), state.lr_scale),
            updates,
            state.base,
            state.momentum,
            params,
            state.count,
            extra_args,
        )
        count = optax.safe_increment(state.count)
        return updates, state._replace(count=count, momentum=momentum, base=base)

    def refresh(self, state: Any, params: sp.Tree, *, batch: Any = None, value_fn: ValueFn | None = None) -> Any:
        """A new estimate at ``params``; ``state`` is FOSI's or one that holds it, such as ``optax.chain``'s."""
        ours = own_state(state)
        fresh = self._refreshed(self._space(params, ours.basis), ours, params, batch, value_fn)
        return jax.tree.map(lambda s: fresh if _is_ours(s) else s, state, is_leaf=_is_ours)

    def moved(self, state: FosiState, place: sp.Tree, steps: TreeMap, gradients: TreeMap) -> FosiState:
        """See ``Fosi``."""
        base = self.step.moved(self._space(place, state.basis), state.base, place, steps, gradients)
        fresh = self.init(place)._replace(refreshes=state.refreshes, seed=state.seed)  # no start vector twice
        return fresh if base is None else fresh._replace(base=base, count=state.count)

    def spectrum(self, state: Any, params: sp.Tree) -> ese.Spectrum:
        """The estimate in use as a ``Spectrum`` of trees (extremes and resolution are not kept: NaN)."""
        state = own_state(state)
        space = self._space(params, state.basis)
        unknown = jnp.full((), jnp.nan, space.dtype)
        kept = ese.Spectrum(
            state.eigenvalues, state.basis, state.residuals, state.accepted, jnp.stack([unknown, unknown]), unknown
        )
        return ese.as_trees(kept, space)

    def _space(self, params: sp.Tree, basis: sp.Basis | None = None) -> sp.Space:
        return sp.span(params, self.options.mask, self.options.layout, basis)

    def _refresh_if(
        self, due: Any, space: sp.Space, state: FosiState, params: sp.Tree, batch: Any, value_fn: ValueFn | None
    ) -> FosiState:
        if batch is None and value_fn is None:
            self.loss.operator(space, params)  # raises, naming both
        if not isinstance(due, jax.core.Tracer):  # outside jit a switch would be compiled anew in every step
            return self._refreshed(space, state, params, batch, value_fn) if due else state
        # What a refresh leaves alone does not go through the branch. A switch with the no-op first: as the true branch
        # of a cond it copies the whole basis in every step.
        turning = self.step.in_subspace(state.momentum)
        carried = jax.lax.switch(
            jnp.asarray(due, jnp.int32),
            [lambda s: s, lambda s: self._refreshed(space, s, params, batch, value_fn)],
            state._replace(momentum=turning, base=None),
        )
        momentum = state.momentum if turning is None else carried.momentum
        return carried._replace(momentum=momentum, base=state.base)

    def _refreshed(
        self, space: sp.Space, state: FosiState, params: sp.Tree, batch: Any, value_fn: ValueFn | None
    ) -> FosiState:
        key = ese.start_key(state.seed, state.refreshes)
        new = ese.Job.of(self.loss, space, self.options).run(params, batch, value_fn, key)
        return _compiled_adopt(self, state, new)

    def _adopt(self, state: FosiState, new: ese.Spectrum) -> FosiState:
        # An estimate that is not finite, or in which nothing deserves trust, leaves the previous one in place.
        usable = jnp.all(jnp.isfinite(new.eigenvalues)) & jnp.any(new.accepted)

        def keep(fresh: jax.Array, old: jax.Array) -> jax.Array:
            return jnp.where(usable, fresh, old)

        momentum, turning = state.momentum, self.step.in_subspace(state.momentum)
        if turning is not None:
            velocity = sp.combine(state.basis, turning)
            # A velocity that is not finite cannot be carried over. That the choice of basis waits for it also has the
            # old basis read before it is written over: else XLA copies it, in every step of an inline refresh.
            usable &= jnp.isfinite(sp.norm(velocity))
        basis = sp.rows_where(usable, sp.rows_where(new.accepted, new.eigenvectors), state.basis)
        if turning is not None:
            # The subspace form of a velocity in all n dimensions: what lies outside the new V is lost.
            momentum = keep(sp.products(basis, velocity).astype(turning.dtype), turning)
        return state._replace(
            refreshes=optax.safe_increment(state.refreshes),
            eigenvalues=keep(jnp.where(new.accepted, new.eigenvalues, 0), state.eigenvalues),
            residuals=keep(new.residuals, state.residuals),
            accepted=keep(new.accepted, state.accepted),
            basis=basis,
            lr_scale=keep(self._lr_scale(new).astype(state.lr_scale.dtype), state.lr_scale),
            momentum=momentum,
        )

    def _lr_scale(self, new: ese.Spectrum) -> jax.Array:
        """§3.6, with the last accepted pair on either side in the place of the paper's λ_k and λ_{n−ℓ+1}."""
        if self.options.lr_rule is None:
            return jnp.ones(())
        k, infinity = self.options.k, jnp.inf
        whole_max, whole_min = new.extremes[0], new.extremes[1]
        top, bottom = new.eigenvalues[:k], new.eigenvalues[k:]
        rest_max = jnp.min(jnp.where(new.accepted[:k], top, infinity), initial=infinity)
        rest_min = jnp.max(jnp.where(new.accepted[k:], bottom, -infinity), initial=-infinity)
        rest_max = jnp.where(jnp.isfinite(rest_max), rest_max, whole_max)
        rest_min = jnp.where(jnp.isfinite(rest_min), rest_min, whole_min)
        return scaling.lr_scale(
            self.options.lr_rule, whole_max, whole_min, rest_max, rest_min, self.options.max_lr_scale, xp=jnp
        )


# Inside a trace this is inlined; a refresh called from outside is compiled all the same.
_compiled_adopt = jax.jit(_Core._adopt, static_argnums=0)


def _is_ours(node: Any) -> bool:
    return isinstance(node, FosiState)


def own_state(state: Any) -> FosiState:
    """FOSI's own state out of one that holds it."""
    return only(state, FosiState)


def only(state: Any, kind: type[Kind]) -> Kind:
    """The one state of a kind out of one that holds it, such as ``optax.chain``'s."""
    found = [s for s in jax.tree.leaves(state, is_leaf=lambda s: isinstance(s, kind)) if isinstance(s, kind)]
    if len(found) != 1:
        raise ValueError(f"state must hold exactly one {kind.__name__}, found {len(found)} in {type(state).__name__}")
    return found[0]


def build(step: Step, loss_fn: Callable[..., Any] | None, options: JaxOptions) -> Fosi:
    """An optimizer out of a step, a loss and settings."""
    loss = Loss(loss_fn, options.has_aux, options.curvature, options.micro_batches)
    return Fosi(_Core(step, loss, options))
