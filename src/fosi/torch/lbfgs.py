"""FOSI around L-BFGS as a torch optimizer, for losses without noise: physics-informed networks, full batches."""

from __future__ import annotations

import dataclasses
import inspect
import logging
import numbers
from collections.abc import Callable, Iterable
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn, optim

from fosi import quasi_newton
from fosi.options import Options, settle, takes
from fosi.quasi_newton import GROWTH, Scaling
from fosi.schedule import Schedule
from fosi.torch import checkpoint
from fosi.torch import space as sp
from fosi.torch.curvature import Closure, Closures, check_closures
from fosi.torch.distributed import replicas
from fosi.torch.pairs import Metric, Pairs, flattest
from fosi.torch.search import Trial, search
from fosi.torch.spectrum import Estimate, Spectrum, estimate, warn_of_hooks
from fosi.torch.walk import Walk
from fosi.torch.wrapper import on_itself

_log = logging.getLogger("fosi")


class FosiLBFGS(optim.Optimizer):
    """L-BFGS that starts from FOSI's metric, and a line search.

    L-BFGS makes an inverse Hessian out of a first guess and the last pairs of steps and of changes of the gradient. The
    usual guess is γI; here it is V diag(α/|λ|) Vᵀ + γ(I − V Vᵀ), of the k largest and ell smallest eigenpairs that are
    estimated every T iterations. It is called as ``torch.optim.LBFGS`` is, and takes its place after Adam.

    The closure that ``step`` calls has freed its graph when it returns, so estimates need a loss of their own: hand
    ``curvature_loss`` over, or call ``refresh(closure)`` when ``refresh_due``. Without either it is L-BFGS, with
    another scaling than usual.

    Parameters are of one dtype, float32 or float64, on one device, in one process.

    Args:
      params: what to train, as ``torch.optim.LBFGS`` takes it: one group.
      lr: the step, where there is no line search.
      max_iter: iterations in a call of ``step``.
      max_eval: no further iteration in that call once the closure has been called so often; None for no limit.
      tolerance_grad: a call ends where no entry of the gradient is larger.
      tolerance_change: a call ends where neither the loss nor a parameter has changed by more. Both are 0, other than
        torch's: small losses are what this is for.
      history_size: how many pairs are kept.
      line_search_fn: ``"strong_wolfe"``; None takes ``lr`` times the step, whatever the loss.
      model: as for ``fosi.torch.FOSI``: a refresh leaves its buffers and modes as they are.
      curvature_loss: a function without arguments that computes the loss to take the curvature of, without backward, on
        all points or on a part of them. A ``ModelLoss`` for ``curvature="gauss_newton"``.
      alpha: α, 1 for Newton's own step inside the subspace.
      scaling: how γ is read off the last pair (s, y), less what lies in the subspace: ``"geometric"``, |s|/|y|, and no
        less than 0.1 of the longest α/|λ| of the k largest, but cut where searches end below 0.01; or ``"usual"``,
        sᵀy/yᵀy.
      **options: FOSI's settings, see ``fosi.options.Options``. Warm-up and T count iterations, not calls, and are 800
        with the defaults; take ``fosi.presets.deterministic("lbfgs")``. There is no ``lr_rule`` and no ``momentum``.

    Example:
      >>> import torch
      >>> from fosi.torch import FosiLBFGS
      >>> w, scales = torch.zeros(3, requires_grad=True), torch.tensor([1e4, 1e2, 1.0])
      >>> loss = lambda: (scales * (w - 1) ** 2).sum()
      >>> opt = FosiLBFGS([w], max_iter=3, curvature_loss=loss, k=2, warmup=0)
      >>> def closure():
      ...     opt.zero_grad()
      ...     value = loss()
      ...     value.backward()
      ...     return value
      >>> before = opt.step(closure)
      >>> print(f"{before:.0f} {loss():.4f}")
      10101 0.0000
    """

    _last: tuple[Tensor, Tensor] | None  # the place and the gradient before the last step

    @takes(Options)
    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1.0,
        max_iter: int = 20,
        max_eval: int | None = None,
        tolerance_grad: float = 0.0,
        tolerance_change: float = 0.0,
        history_size: int = 100,
        line_search_fn: Literal["strong_wolfe"] | None = "strong_wolfe",
        *,
        model: nn.Module | None = None,
        curvature_loss: Closure | None = None,
        alpha: float | Callable[[int], float] = 1.0,
        scaling: Scaling = "geometric",
        **options: Any,
    ) -> None:
        """See the class."""
        defaults = {"lr": lr, "max_iter": max_iter, "max_eval": max_eval, "history_size": history_size}
        defaults |= {"tolerance_grad": tolerance_grad, "tolerance_change": tolerance_change}
        _check(**defaults, line_search_fn=line_search_fn)
        if model is not None and not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module or None, got {model!r}")
        self.options = settle(Options, {"alpha": alpha, **options})
        if curvature_loss is not None:
            check_closures(self.options.curvature, curvature_loss, name="curvature_loss")
        quasi_newton.check(self.options, scaling)
        super().__init__(params, {**defaults, "line_search_fn": line_search_fn})
        self.model, self.curvature_loss, self.scaling = model, curvature_loss, scaling
        self._lay_out()
        self._forget()

    @on_itself
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """For the first group, which the constructor adds; L-BFGS has one."""
        if self.param_groups:
            raise ValueError("params has more than one group; FosiLBFGS takes one, as torch.optim.LBFGS")
        super().add_param_group(param_group)

    def _lay_out(self) -> None:
        self._space = space = sp.Space(self.param_groups[0]["params"])
        dtypes = {p.dtype for p in space.params}
        if len(dtypes) > 1 or not dtypes <= {torch.float32, torch.float64}:
            found = ", ".join(sorted(map(str, dtypes)))
            raise ValueError(f"params are {found}; FosiLBFGS needs all of them float32, or all float64")
        if space.sharding is not None or replicas(self.model) is not None:
            raise ValueError(
                "params are trained by several processes, of which each would search by itself; FosiLBFGS runs in one"
            )
        self.schedule: Schedule = self.options.schedule(space.dimension)
        old = self.__dict__.get("_pairs")
        if old is not None and (old.steps.dtype, old.steps.device) != (space.dtype, space.device):
            # The model was moved or cast. Pairs are soon new; an estimate would not be.
            self._pairs, self._last = Pairs(space, len(old.steps)), None
            if self._estimate is not None:
                self._use(self._estimate._replace(basis=self._estimate.basis.to(space.device, space.dtype)))

    def _forget(self) -> None:
        self._count = self._refreshes = 0
        self._due = self.schedule.warmup
        self._estimate: Estimate | None = None
        self._pairs = Pairs(self._space, self.param_groups[0]["history_size"])
        self._size = 1.0
        self._last = None

    # The curvature.

    @property
    def refresh_due(self) -> bool:
        """Whether an iteration has come before which an estimate is due, and none was made for it yet."""
        return self._count >= self._due

    @property
    def spectrum(self) -> Spectrum | None:
        """The estimate in use; eigenvectors in the order of the parameters. None before the first."""
        return None if self._estimate is None else self._estimate.spectrum(self._space)

    @on_itself
    def refresh(self, closure: Closures) -> Spectrum:
        """Estimates the spectrum anew, at the parameters as they are; see ``fosi.torch.FOSI.refresh``."""
        self._lay_out()
        if not self._refreshes:
            warn_of_hooks(self._space.params)
        found = estimate(closure, self._space, self.options, self._refreshes, model=self.model)
        self._refreshes += 1
        since = self._count - self.schedule.warmup
        if since >= 0:
            self._due = self._count + self.schedule.every - since % self.schedule.every
        if found.usable:
            self._use(found)
        return found.spectrum(self._space)

    def _use(self, found: Estimate) -> None:
        self._estimate = found
        used = np.flatnonzero(found.accepted)
        rows = found.basis if found.accepted.all() else found.basis[torch.as_tensor(used, device=found.basis.device)]
        self._used = used, rows

    def _metric(self) -> Metric | None:
        if self._estimate is None:
            return None
        alpha, (used, basis) = self.options.alpha, self._used
        alpha = float(alpha(self._count) if callable(alpha) else alpha)
        lengths = alpha / np.maximum(np.abs(self._estimate.eigenvalues[used]), self.options.eps)
        newton = torch.as_tensor(lengths, dtype=basis.dtype, device=basis.device)
        return Metric(basis, basis.t(), newton, flattest(lengths[used < self.options.k].tolist()))

    # The step.

    @torch.no_grad()
    def step(self, closure: Callable[[], Any]) -> Any:  # type: ignore[override]
        """``max_iter`` iterations; ``closure`` evaluates the loss and its gradients, as in torch.optim.

        A call ends before where ``max_eval`` or a tolerance says so, or where not even the first guess of the inverse
        Hessian leads to a lower loss.

        Returns:
          The loss before the first of them.
        """
        if closure is None:
            raise ValueError(
                "closure is None, but L-BFGS evaluates the loss itself: pass a function that zeroes the gradients, "
                "runs backward and returns the loss"
            )
        self._lay_out()  # the model may have been moved or cast since
        group, walk = self.param_groups[0], Walk(self._space, closure)
        before, now = walk.look()
        metric = self._metric()
        for left in reversed(range(group["max_iter"])):
            enough = group["max_eval"] is not None and walk.calls >= group["max_eval"]
            if enough or float(now.gradient.abs().max()) <= group["tolerance_grad"]:
                break
            if self.curvature_loss is not None and self.refresh_due:
                self.refresh(self.curvature_loss)
                metric = self._metric()
            elif callable(self.options.alpha):
                metric = self._metric()
            place = walk.place()
            self._learn(metric, place, now.gradient)
            direction = self._direction(metric, now.gradient)
            self._count += 1
            if group["line_search_fn"] is None:
                walk.go(torch.add(place, direction, alpha=float(group["lr"])))
                if not left:  # what comes next looks there itself
                    break
                found: Trial | None = walk.look()[1]
            else:
                found = self._search(walk, place, direction, now)
            if found is None:
                if not self._pairs.used:
                    break
                self._pairs.forget()
                continue
            changed, now = abs(found.value - now.value), found
            if changed <= (least := group["tolerance_change"]) and float((walk.place() - place).abs().max()) <= least:
                break
        return before

    def _learn(self, metric: Metric | None, place: Tensor, gradient: Tensor) -> None:
        """Takes the pair of the step that led here."""
        if self._last is None:
            length = float(sp.norm(gradient))
            self._pairs.scale = 1 / length if length > 1 else 1.0
        else:
            self._pairs.add(place - self._last[0], gradient - self._last[1], metric, self.scaling)
        self._last = place, gradient

    def _direction(self, metric: Metric | None, gradient: Tensor) -> Tensor:
        direction = self._pairs.times(metric, gradient).neg_()
        for view, p in zip(self._space.views(direction), self._space.params, strict=True):
            if p.grad is None:  # it stays, as in torch.optim; an eigenvector's part there is rounding
                view.zero_()
        return direction

    def _search(self, walk: Walk, place: Tensor, direction: Tensor, now: Trial) -> Trial | None:
        """Goes along the direction; None, and back to where it was, where the loss is nowhere lower."""

        def at(size: float) -> Trial:
            walk.go(torch.add(place, direction, alpha=size))
            trial = walk.look()[1]
            return trial._replace(size=size, slope=float(torch.dot(trial.gradient, direction)))

        start = now._replace(size=0.0, slope=float(torch.dot(now.gradient, direction)))
        begin = 1.0 if self.scaling == "usual" else min(1.0, GROWTH * self._size)
        found = search(at, start, begin) if start.slope < 0 else None
        self._size = 1.0 if found is None else found.size
        if self.scaling == "geometric":
            self._pairs.after(0.0 if found is None else found.size)
        if found is None:
            walk.go(place, now.gradient)
        else:
            walk.go(torch.add(place, direction, alpha=found.size), found.gradient)
        return found

    # Saving and loading.

    def state_dict(self) -> dict[str, Any]:
        """As torch's, with pairs, spectrum and counters in it."""
        rows, small = self._pairs.saved()
        last = self._last or (torch.zeros_like(rows["steps"][0]),) * 2
        small |= {"count": self._count, "refreshes": self._refreshes, "due": self._due, "begun": self._last is not None}
        small["size"] = torch.tensor(self._size, dtype=torch.float64)
        rows["last"] = torch.stack(last)
        return checkpoint.merge(super().state_dict(), self._space, self.options.rank, self._estimate, small, rows)

    @on_itself
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what ``state_dict`` gave, or another optimizer's groups: pairs and curvature then start empty.

        As in torch, ``history_size`` and all else of the group are the checkpoint's; k and ell must be the same.
        """
        theirs, pieces, small = checkpoint.split(state_dict, ("steps", "changes", "last"))
        self._lay_out()
        if ours := "inverse" in small:  # what may not fit, before anything is changed
            found = checkpoint.restore(self._space, self.options.rank, pieces["basis"], small)
            pairs = Pairs.loaded(self._space, pieces, small)
            place, gradient = checkpoint.matrix(self._space, "last", pieces["last"], 2)
        super().load_state_dict({**theirs, "state": {}})
        for name, value in self.defaults.items():  # another optimizer's group lacks some
            self.param_groups[0].setdefault(name, value)
        self._forget()
        if not ours:
            _log.warning("FOSI: the checkpoint holds no state of FosiLBFGS: pairs and curvature start anew")
            return
        self._pairs, self._size = pairs, float(small["size"])
        self._count, self._refreshes, self._due = (int(small[name]) for name in ("count", "refreshes", "due"))
        self._last = (place.clone(), gradient.clone()) if small["begun"] else None
        if found is not None:
            self._use(found)

    def __getstate__(self) -> dict[str, Any]:
        return {"state": self.state, **{name: self.__dict__[name] for name in _KEPT}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if self._estimate is not None:
            self._use(self._estimate)

    def __repr__(self) -> str:
        settings = ", ".join(f"{f.name}={getattr(self.options, f.name)!r}" for f in dataclasses.fields(self.options))
        return f"{super().__repr__()[:-1]}    scaling: {self.scaling}\n    fosi: {settings}\n)"


_KEPT = (
    *("defaults", "param_groups", "options", "model", "curvature_loss", "scaling", "schedule", "_space", "_count"),
    *("_refreshes", "_due", "_estimate", "_pairs", "_size", "_last"),
)


def _check(line_search_fn: Any, **given: Any) -> None:
    for name in ("max_iter", "history_size", "max_eval"):
        value = given[name]
        good = isinstance(value, numbers.Integral) and not isinstance(value, bool) and int(value) >= 1
        if not (good or (value is None and name == "max_eval")):
            raise ValueError(f"{name} must be an integer ≥ 1, got {value!r}")
    for name in ("lr", "tolerance_grad", "tolerance_change"):
        if not (isinstance(given[name], numbers.Real) and given[name] >= 0):
            raise ValueError(f"{name} must be a number ≥ 0, got {given[name]!r}")
    if line_search_fn not in ("strong_wolfe", None):
        raise ValueError(f"line_search_fn must be 'strong_wolfe' or None, got {line_search_fn!r}")


# As it is called: without ``self``, which stands first.
_signature = inspect.signature(FosiLBFGS.__init__)
FosiLBFGS.__signature__ = _signature.replace(parameters=list(_signature.parameters.values())[1:])  # type: ignore[attr-defined]
