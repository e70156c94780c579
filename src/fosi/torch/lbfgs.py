"""FOSI around L-BFGS as a torch optimizer, for losses without noise: physics-informed networks, full batches."""

from __future__ import annotations

import inspect
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
from fosi.torch import space as sp
from fosi.torch.curvature import Closure, Closures
from fosi.torch.distributed import replicas
from fosi.torch.pairs import Metric, Pairs, flattest
from fosi.torch.search import Trial, search
from fosi.torch.spectrum import Estimate, Spectrum, estimate

_PER_PAIR = ("eigenvalues", "residuals", "accepted")


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
      tolerance_change: a call ends where neither the loss nor a parameter has changed by more.
      history_size: how many pairs are kept.
      line_search_fn: ``"strong_wolfe"``; None takes ``lr`` times the step, whatever the loss.
      model: as for ``fosi.torch.FOSI``: a refresh leaves its buffers and modes as they are.
      curvature_loss: a function without arguments that computes the loss to take the curvature of, without backward, on
        all points or on a part of them.
      alpha: α, 1 for Newton's own step inside the subspace.
      scaling: how γ is read off the last pair (s, y), less what lies in the subspace: ``"geometric"``, |s|/|y|, and no
        less than 0.1 of the longest α/|λ| of the k largest; or ``"usual"``, sᵀy/yᵀy.
      **options: FOSI's settings, see ``fosi.options.Options``; ``fosi.presets.deterministic("lbfgs")`` has good ones.
        Warm-up and T count iterations, not calls. There is no ``lr_rule`` and no ``momentum``.

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
        for name, value in {"max_iter": max_iter, "history_size": history_size, "max_eval": max_eval}.items():
            if not (_is_count(value) or (value is None and name == "max_eval")):
                raise ValueError(f"{name} must be an integer ≥ 1, got {value!r}")
        for name, number in {"lr": lr, "tolerance_grad": tolerance_grad, "tolerance_change": tolerance_change}.items():
            if not (isinstance(number, numbers.Real) and number >= 0):
                raise ValueError(f"{name} must be a number ≥ 0, got {number!r}")
        if line_search_fn not in ("strong_wolfe", None):
            raise ValueError(f"line_search_fn must be 'strong_wolfe' or None, got {line_search_fn!r}")
        if curvature_loss is not None and not callable(curvature_loss):
            raise TypeError(f"curvature_loss must be a function without arguments or None, got {curvature_loss!r}")
        self.options = settle(Options, {"alpha": alpha, **options})
        quasi_newton.check(self.options, scaling)
        defaults = {"lr": lr, "max_iter": max_iter, "max_eval": max_eval, "history_size": history_size}
        defaults |= {"tolerance_grad": tolerance_grad, "tolerance_change": tolerance_change}
        super().__init__(params, {**defaults, "line_search_fn": line_search_fn})
        if len(self.param_groups) != 1:
            raise ValueError(f"params has {len(self.param_groups)} groups; FosiLBFGS takes one, as torch.optim.LBFGS")
        self.model, self.curvature_loss, self.scaling = model, curvature_loss, scaling
        self._lay_out()
        self._forget()

    def _lay_out(self) -> None:
        self._space = sp.Space(self.param_groups[0]["params"])
        dtypes = {p.dtype for p in self._space.params}
        if len(dtypes) > 1 or not dtypes <= {torch.float32, torch.float64}:
            found = ", ".join(sorted(map(str, dtypes)))
            raise ValueError(f"params are {found}; FosiLBFGS needs all of them float32, or all float64")
        if self._space.sharding is not None or replicas(self.model) is not None:
            raise ValueError(
                "params are trained by several processes, of which each would search by itself; FosiLBFGS runs in one"
            )
        self.schedule: Schedule = self.options.schedule(self._space.dimension)

    def _forget(self) -> None:
        self._count = self._refreshes = 0
        self._due = self.schedule.warmup
        self._estimate: Estimate | None = None
        self._pairs = Pairs(self._space, self.param_groups[0]["history_size"])
        self._size = 1.0
        self._last: tuple[Tensor, Tensor] | None = None

    # The curvature.

    @property
    def refresh_due(self) -> bool:
        """Whether an iteration has come before which an estimate is due, and none was made for it yet."""
        return self._count >= self._due

    @property
    def spectrum(self) -> Spectrum | None:
        """The estimate in use; eigenvectors in the order of the parameters. None before the first."""
        return None if self._estimate is None else self._estimate.spectrum(self._space)

    def refresh(self, closure: Closures) -> Spectrum:
        """Estimates the spectrum anew, at the parameters as they are; see ``fosi.torch.FOSI.refresh``."""
        self._lay_out()
        found = estimate(closure, self._space, self.options, self._refreshes, model=self.model)
        self._refreshes += 1
        since = self._count - self.schedule.warmup
        if since >= 0:
            self._due = self._count + self.schedule.every - since % self.schedule.every
        if found.usable:
            self._estimate = found
        return found.spectrum(self._space)

    def _metric(self) -> Metric | None:
        found, alpha = self._estimate, self.options.alpha
        if found is None:
            return None
        alpha = float(alpha(self._count) if callable(alpha) else alpha)
        lengths = alpha / np.maximum(np.abs(found.eigenvalues), self.options.eps)
        used = np.flatnonzero(found.accepted)
        basis = found.basis if found.accepted.all() else found.basis[torch.as_tensor(used, device=self._space.device)]
        newton = torch.as_tensor(lengths[used], dtype=self._space.dtype, device=self._space.device)
        largest = [float(length) for length in lengths[used[used < self.options.k]]]
        return Metric(basis, basis.t(), newton, flattest(largest))

    # The step.

    @torch.no_grad()
    def step(self, closure: Callable[[], Any]) -> Any:  # type: ignore[override]
        """``max_iter`` iterations; ``closure`` evaluates the loss and its gradients, as in torch.optim.

        Returns:
          The loss before the first of them.
        """
        if closure is None:
            raise ValueError("closure is None, but a line search evaluates the loss: pass a function that does")
        group = self.param_groups[0]
        self._calls = 0
        before = self._call(closure)
        now = Trial(0.0, float(before), 0.0, self._gradient())
        metric = self._metric()
        for _ in range(group["max_iter"]):
            enough = group["max_eval"] is not None and self._calls >= group["max_eval"]
            if enough or float(now.gradient.abs().max()) <= group["tolerance_grad"]:
                break
            if self.curvature_loss is not None and self.refresh_due:
                self.refresh(self.curvature_loss)
                metric = self._metric()
            elif callable(self.options.alpha):
                metric = self._metric()
            place = self._place()
            self._learn(metric, place, now.gradient)
            found = self._search(closure, metric, place, now, group)
            self._count += 1
            if found is None:
                if not self._pairs.used:
                    break  # not even the first guess leads down: as low as the loss's own rounding lets it be
                self._pairs.forget()
                continue
            changed, now = abs(found.value - now.value), found
            if changed <= (least := group["tolerance_change"]) and float((self._place() - place).abs().max()) <= least:
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

    def _search(
        self, closure: Callable[[], Any], metric: Metric | None, place: Tensor, now: Trial, group: dict[str, Any]
    ) -> Trial | None:
        """Goes along the step; None, and where it was, where the loss is nowhere lower."""
        direction = self._pairs.times(metric, now.gradient).neg_()
        for view, p in zip(self._space.views(direction), self._space.params, strict=True):
            if p.grad is None:  # it stays, as in torch.optim; an eigenvector's part there is rounding
                view.zero_()

        def at(size: float) -> Trial:
            self._go(torch.add(place, direction, alpha=size))
            value, gradient = float(self._call(closure)), self._gradient()
            return Trial(size, value, float(torch.dot(gradient, direction)), gradient)

        if group["line_search_fn"] is None:
            return at(float(group["lr"]))
        start = Trial(0.0, now.value, float(torch.dot(now.gradient, direction)), now.gradient)
        begin = 1.0 if self.scaling == "usual" else min(1.0, GROWTH * self._size)
        found = search(at, start, begin) if start.slope < 0 else None
        self._size = 1.0 if found is None else found.size
        end = start if found is None else found
        self._go(torch.add(place, direction, alpha=end.size), end.gradient)
        return found

    def _call(self, closure: Callable[[], Any]) -> Any:
        self._calls += 1
        with torch.enable_grad():
            return closure()

    def _place(self) -> Tensor:
        return self._flat([p.detach() for p in self._space.params])

    def _gradient(self) -> Tensor:
        return self._flat([torch.zeros_like(p) if p.grad is None else p.grad for p in self._space.params])

    def _flat(self, tensors: list[Tensor]) -> Tensor:
        buffer = self._space.buffer()
        sp.write(buffer.views, tensors)
        return buffer.vector

    def _go(self, place: Tensor, gradient: Tensor | None = None) -> None:
        """Sets the parameters, and their gradients, which a trial elsewhere has left."""
        params = self._space.params
        sp.write([p.data for p in params], self._space.views(place))
        if gradient is not None:
            for p, view in zip(params, self._space.views(gradient), strict=True):
                if p.grad is not None:
                    p.grad.copy_(view)

    # Saving and loading: torch's own, with what is ours in the state of the first parameter.

    def state_dict(self) -> dict[str, Any]:
        """As torch's: pairs, spectrum and counters are the state of the first parameter."""
        self.state[self._space.params[0]] = self._packed()
        try:
            return super().state_dict()
        finally:
            self.state.clear()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what ``state_dict`` gave; the same k, ell and history_size must have been given."""
        super().load_state_dict(state_dict)
        found = dict(self.state.pop(self._space.params[0], {}))
        self.state.clear()
        self._lay_out()
        self._forget()
        if found:
            self._unpack(found)

    def _packed(self) -> dict[str, Any]:
        packed: dict[str, Any] = {"count": self._count, "refreshes": self._refreshes, "due": self._due}
        packed |= {"size": self._size, **self._pairs.packed()}
        if self._last is not None:
            packed |= {"place": self._last[0], "gradient": self._last[1]}
        if (found := self._estimate) is not None:
            packed |= {name: getattr(found, name).tolist() for name in (*_PER_PAIR, "extremes")}
            packed |= {"basis": found.basis, "resolution": float(found.resolution)}
        return packed

    def _unpack(self, found: dict[str, Any]) -> None:
        rank = self.options.rank
        kept, memory = len(found["steps"]), len(self._pairs.steps)
        if kept != memory or ("basis" in found and len(found["basis"]) != rank):
            eigenpairs = len(found["basis"]) if "basis" in found else rank
            raise ValueError(
                f"the checkpoint holds {kept} pairs and {eigenpairs} eigenpairs, this optimizer {memory} and {rank}: "
                "build it with the history_size, k and ell of the checkpoint"
            )
        self._count, self._refreshes, self._due = found["count"], found["refreshes"], found["due"]
        self._size = found["size"]
        self._pairs.unpack(found)
        if "place" in found:
            self._last = found["place"].clone(), found["gradient"].clone()
        if "basis" in found:
            values = {name: np.array(found[name]) for name in (*_PER_PAIR, "extremes")}
            self._estimate = Estimate(**values, basis=found["basis"].clone(), resolution=found["resolution"])

    def __getstate__(self) -> dict[str, Any]:
        kept = ("defaults", "param_groups", "options", "model", "curvature_loss", "scaling", "schedule")
        ours = ("_space", "_count", "_refreshes", "_due", "_estimate", "_pairs", "_size", "_last")
        return {"state": self.state, **{name: self.__dict__[name] for name in (*kept, *ours)}}


def _is_count(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool) and int(value) >= 1


# As it is called: without ``self``, which stands first.
_signature = inspect.signature(FosiLBFGS.__init__)
FosiLBFGS.__signature__ = _signature.replace(parameters=list(_signature.parameters.values())[1:])  # type: ignore[attr-defined]
