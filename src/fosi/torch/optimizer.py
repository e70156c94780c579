"""FOSI as a torch optimizer around another: when to refresh, what a refresh changes, and what is saved."""

from __future__ import annotations

import dataclasses
import inspect
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn, optim

from fosi import scaling
from fosi.options import Momentum, Options, settle, takes
from fosi.schedule import Schedule
from fosi.torch import bases, checkpoint, steps
from fosi.torch import space as sp
from fosi.torch.curvature import Closure, Closures, check_closures
from fosi.torch.distributed import replicas
from fosi.torch.lbfgs import FosiLBFGS
from fosi.torch.spectrum import Estimate, Spectrum, estimate, warn_of_hooks
from fosi.torch.wrapper import Around, on_itself

_log = logging.getLogger("fosi")


class FOSI(Around):
    """FOSI around any torch optimizer.

    Every T steps the k largest and ell smallest eigenpairs (λ, V) of the Hessian are estimated; each step is
    d₁ + d₂ with d₁ = −α V diag(1/|λ|) Vᵀ g, a scaled Newton step inside the subspace, and d₂ = (I − V Vᵀ) d_b, where
    the base makes d_b of g − V Vᵀ g (the paper's Algorithm 2). Around SGD the learning rate is also scaled (§3.6).

    It is used as the base would be: ``param_groups`` and ``state`` are the base's, learning-rate schedulers, gradient
    clipping, accumulation, ``GradScaler`` and checkpoints work on it. What is new is the refresh: call
    ``refresh(closure)`` when ``refresh_due``, or hand ``curvature_loss`` over and ``step()`` does it.

    Args:
      base: the optimizer that takes the step outside the subspace; it goes on owning parameters and settings.
      model: the module the loss is computed with, whose buffers (BatchNorm's statistics) and modes a refresh then
        leaves as they are. Needed where it is sharded (FSDP2).
      curvature_loss: a function without arguments that computes the loss to take the curvature of, without backward;
        ``step()`` then refreshes by itself. A ``ModelLoss`` for ``curvature="gauss_newton"``.
      lr_rule: as in ``fosi.Options``; ``"auto"`` is SGD's own closed form and None for every other base.
      **options: FOSI's settings, see ``fosi.options.Options``. ``momentum="auto"`` reads the base's param_groups.

    Example:
      >>> import torch
      >>> from fosi.torch import FOSI
      >>> w, scales = torch.ones(4, requires_grad=True), torch.tensor([100.0, 50.0, 2.0, 1.0])
      >>> opt = FOSI(torch.optim.SGD([w], lr=0.1), k=2, alpha=1.0, warmup=0, max_lr_scale=1)
      >>> loss = lambda: 0.5 * (scales * w**2).sum()
      >>> loss().backward()
      >>> if opt.refresh_due:
      ...     spectrum = opt.refresh(loss)
      >>> opt.step()
      >>> [round(abs(x), 3) for x in w.tolist()]
      [0.0, 0.0, 0.8, 0.9]

    References:
      Sivan, Gabel and Schuster, FOSI: Hybrid First and Second Order Optimization, ICLR 2024.
    """

    @takes(Options)
    def __init__(
        self,
        base: optim.Optimizer,
        model: nn.Module | None = None,
        *,
        curvature_loss: Closure | None = None,
        lr_rule: str | Callable[[Any, Any], Any] | None = "auto",
        **options: Any,
    ) -> None:
        """See the class."""
        if isinstance(base, FOSI):
            raise TypeError("base is a FOSI already: put it around the bare optimizer, once")
        if isinstance(base, FosiLBFGS):
            raise TypeError("base is a FosiLBFGS, which has FOSI inside: take it as the optimizer")
        bases.check(base)
        if model is not None and not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module or None, got {model!r}")
        super().__init__(base)
        self.model, self.curvature_loss = model, curvature_loss
        self._own_rule = lr_rule == "auto"
        self.options = settle(Options, {"lr_rule": None if self._own_rule else lr_rule, **options})
        if curvature_loss is not None:
            check_closures(self.options.curvature, curvature_loss, name="curvature_loss")
        self._lay_out()
        self._forget()

    def _lay_out(self) -> None:
        if self.options.momentum == "auto" and not bases.is_linear(self.base):
            bases.momentum_rule(self.base)  # raises where the groups disagree
        self._space = sp.Space(bases.parameters(self.base))
        self._work = steps.Workspace(self._space)
        self.schedule: Schedule = self.options.schedule(self._space.dimension)

    def _forget(self) -> None:
        self._count = self._refreshes = 0
        self._refreshed = False
        self._estimate: Estimate | None = None
        self._subspace: steps.Subspace | None = None
        self._lr_scale = 1.0
        self._momentum: Tensor | None = None
        self._was_linear = False

    @on_itself
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group to the base; its parameters join the subspace at the next refresh."""
        bases.check_group(len(self.base.param_groups), param_group)
        before = self._space.size
        self.base.add_param_group(param_group)
        try:
            self._lay_out()
        except ValueError:
            self.base.param_groups.pop()
            raise
        if self._estimate is not None:
            longer = (0, self._space.size - before)
            self._use(self._estimate._replace(basis=nn.functional.pad(self._estimate.basis, longer)))

    # The curvature.

    @property
    def refresh_due(self) -> bool:
        """Whether the coming step is one before which the paper estimates, and no refresh was made for it yet."""
        return bool(self.schedule.due(self._count)) and not self._refreshed

    @property
    def spectrum(self) -> Spectrum | None:
        """The estimate in use; eigenvectors in the order of the base's parameters. None before the first."""
        return None if self._estimate is None else self._estimate.spectrum(self._space)

    @property
    def lr_scale(self) -> float:
        """Factor on the base's learning rate outside the subspace (§3.6)."""
        return self._lr_scale

    @on_itself
    def refresh(self, closure: Closures) -> Spectrum:
        """Estimates the spectrum anew, at the parameters as they are.

        Gradients, buffers, random numbers and modes are left as they were. An estimate that is not finite, or in which
        no pair deserves trust, leaves the previous one in place.

        Args:
          closure: a function without arguments that computes the loss, without backward; called once. A sequence of
            such functions stands for the mean of their losses, their graphs built one at a time for every product.

        Returns:
          The new estimate, in use or not; ``spectrum`` is the one in use.
        """
        self._lay_out()  # the model may have been moved or cast since
        if not self._refreshes:
            warn_of_hooks(self._space.params)
        found = estimate(
            closure,
            self._space,
            self.options,
            self._refreshes,
            model=self.model,
            decay=self._penalties(),
            group=replicas(self.model),
        )
        self._refreshes += 1
        self._refreshed = True
        if found.usable:
            self._adopt(found)
        return found.spectrum(self._space)

    def _penalties(self) -> list[float] | None:
        """The curvature of the base's own L2 penalty, which the closure's loss does not have."""
        by_group = {id(d.group): float(d.strength) for d in bases.decays(self.base) if d.kind == "coupled"}
        each = [by_group.get(id(group), 0.0) for group in self.param_groups for _ in group["params"]]
        return each if any(each) else None

    @torch.no_grad()
    def _adopt(self, found: Estimate) -> None:
        if self._momentum is not None and self._estimate is not None:
            # The subspace form of a velocity in all n dimensions: what lies outside the new V is lost.
            velocity = sp.combine(self._estimate.basis.t(), self._momentum)
            used = torch.as_tensor(found.accepted, dtype=velocity.dtype, device=velocity.device)
            self._momentum = sp.products(found.basis, velocity, self._space.group) * used
        self._lr_scale = self._scale(found)
        self._use(found)

    def _use(self, found: Estimate) -> None:
        self._estimate = found
        rows = int(np.flatnonzero(found.accepted)[-1]) + 1  # those below are not used: a step need not read them
        used = found.accepted[:rows].astype(float)
        inverse = used / np.maximum(np.abs(found.eigenvalues[:rows]), self.options.eps)
        small = torch.as_tensor(np.stack([used, inverse]), dtype=self._space.dtype, device=self._space.device)
        self._subspace = steps.Subspace(
            basis=found.basis[:rows],
            columns=found.basis[:rows].t(),
            rows=rows,
            used=None if used.all() else small[0],
            inverse=small[1],
            lr_scale=self._lr_scale,
        )

    def _scale(self, found: Estimate) -> float:
        """§3.6, with the last accepted pair on either side in the place of the paper's λ_k and λ_{n−ℓ+1}."""
        k, values, accepted = self.options.k, found.eigenvalues, found.accepted
        top, bottom = values[:k][accepted[:k]], values[k:][accepted[k:]]
        largest, smallest = (float(x) for x in found.extremes)
        rule = bases.learning_rate_rule(self.base) if self._own_rule else self.options.lr_rule
        return float(
            scaling.lr_scale(
                rule,
                largest,
                smallest,
                float(top.min()) if len(top) else largest,
                float(bottom.max()) if len(bottom) else smallest,
                self.options.max_lr_scale,
            )
        )

    # The step.

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; ``closure`` means what it means in torch.optim: it evaluates the loss and its gradients."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._is_rehearsal():
            self.base.step()
            return loss
        if self.curvature_loss is not None and self.refresh_due:
            self.refresh(self.curvature_loss)
        present = steps.parts(self._space)
        if self._subspace is None or self._refreshed:  # not in every step: it takes as long as a kernel
            steps.check_dense(present.grads)
        if self._subspace is None:
            self.base.step()
        else:
            alpha = self.options.alpha
            alpha = float(alpha(self._count) if callable(alpha) else alpha)
            # Once the Newton part has a momentum of its own, the base's lacks that part: there is no way back.
            if bases.is_linear(self.base) and self.options.momentum == "auto" and self._momentum is None:
                steps.linear_step(self.base, present, self._subspace, self._work, alpha)
                self._was_linear = True
            else:
                self._momentum = self._projected(present, self._subspace, alpha)
        self._count += 1
        self._refreshed = False
        return loss

    def _projected(self, present: steps.Parts, subspace: steps.Subspace, alpha: float) -> Tensor | None:
        rule: Momentum = self.options.momentum if self.options.momentum != "auto" else bases.momentum_rule(self.base)
        if self._was_linear and rule is not None:
            # The groups' learning rates have parted: the base's momentum of the whole gradient is split up.
            self._momentum = steps.momentum_inside(self.base, subspace, self._work)
        self._was_linear = False
        momentum, missing = self._momentum, self.options.rank - subspace.rows
        if missing and momentum is not None:
            momentum = momentum[: subspace.rows]
        momentum = steps.projected_step(self.base, present, subspace, self._work, alpha, rule, momentum, self._count)
        return nn.functional.pad(momentum, (0, missing)) if missing and momentum is not None else momentum

    def _is_rehearsal(self) -> bool:
        """Whether this is the step with which distributed checkpoints have an optimizer without state make it.

        SGD without momentum never has any: every checkpoint of it takes such a step.
        """
        if self.base.state:
            return False
        if any(bases.number(group.get("lr", 1.0)) for group in self.param_groups):
            return False
        grads = [p.grad for p in self._space.params if p.grad is not None]
        return bool(grads) and not self._space.anywhere(grads)

    # Saving and loading.

    def state_dict(self) -> dict[str, Any]:
        """The base's, with FOSI's tensors in it: the spectrum (k + ell numbers for each parameter) and counters."""
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)
        momentum = self._momentum
        if momentum is None:
            momentum = torch.zeros(self.options.rank, dtype=self._space.dtype, device=self._space.device)
        small = {
            "step": self._count,
            "refreshes": self._refreshes,
            "refreshed": self._refreshed,
            "lr_scale": torch.tensor(self._lr_scale, dtype=torch.float64),
            "momentum": momentum,
        }
        merged = checkpoint.merge(self.base.state_dict(), self._space, self.options.rank, self._estimate, small)
        for post in self._optimizer_state_dict_post_hooks.values():
            merged = post(self, merged) or merged
        return merged

    @on_itself
    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads FOSI's own checkpoint, or one of the bare base: the curvature then starts empty."""
        state_dict = state_dict.copy()  # hooks may write to it, as in torch's own
        for pre in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = pre(self, state_dict) or state_dict
        theirs, pieces, small = checkpoint.split(state_dict)
        self._lay_out()  # the model may have been moved or cast since
        found = checkpoint.restore(self._space, self.options.rank, pieces["basis"], small) if small else None
        self.base.load_state_dict(theirs)
        self._forget()
        if not small:
            # Also what is left when a tool knows the base's entries alone, as DCP with flattened states does.
            _log.warning("FOSI: the checkpoint holds no FOSI state: warm-up and curvature start anew")
        else:
            self._count, self._refreshes = int(small["step"]), int(small["refreshes"])
            self._refreshed = bool(small["refreshed"])
            self._lr_scale = float(small["lr_scale"])
        if found is not None:
            self._use(found)
            momentum = small["momentum"].to(self._space.device, self._space.dtype, copy=True)
            self._momentum = momentum if momentum.any() else None
        for post in self._optimizer_load_state_dict_post_hooks.values():
            post(self)

    def __getstate__(self) -> dict[str, Any]:
        # Ours by name: schedulers patch step() on the instance, and hooks are not copied, as in torch's optimizers.
        return {name: self.__dict__[name] for name in _KEPT}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._work = steps.Workspace(self._space)
        self._subspace = None
        if self._estimate is not None:
            self._use(self._estimate)

    def __repr__(self) -> str:
        settings = ", ".join(f"{f.name}={getattr(self.options, f.name)!r}" for f in dataclasses.fields(self.options))
        return f"FOSI({self.base!r}, {settings})"


_KEPT = (
    *("base", "model", "curvature_loss", "options", "schedule", "_space", "_own_rule", "_was_linear"),
    *("_count", "_refreshes", "_refreshed", "_estimate", "_lr_scale", "_momentum"),
)

# As it is called: without ``self``, which stands first.
_signature = inspect.signature(FOSI.__init__)
FOSI.__signature__ = _signature.replace(parameters=list(_signature.parameters.values())[1:])  # type: ignore[attr-defined]
