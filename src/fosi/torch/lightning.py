"""FOSI with Lightning: a callback that refreshes, since Lightning owns the loop and its closure's loss has no graph.

Import it by name, ``from fosi.torch.lightning import RefreshCallback``; it needs ``lightning`` or
``pytorch_lightning``, which ``fosi.torch`` itself does not.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fosi.torch.optimizer import FOSI

_log = logging.getLogger("fosi")
_LOGGING: tuple[str, ...] = ("log", "log_dict")


def _lightning() -> Any:
    """Lightning under the name the user imported it by; both may be installed."""
    names = sorted(("lightning.pytorch", "pytorch_lightning"), key=lambda name: name not in sys.modules)
    for name in names:
        with contextlib.suppress(ModuleNotFoundError):
            return importlib.import_module(name)
    raise ImportError("fosi.torch.lightning needs Lightning: pip install lightning (or pytorch_lightning)")


_Callback: Any = _lightning().Callback


class RefreshCallback(_Callback):
    """Refreshes every FOSI among the Trainer's optimizers, before the steps for which it is due.

    The curvature is that of the loss the step descends: of the current batch, and with ``accumulate_grad_batches`` of
    the mean over the batches whose gradients are in it. Without this callback (or FOSI's ``curvature_loss``) nothing
    refreshes, and every step is the base optimizer's.

    Args:
      loss: a function of the module and a batch that returns the loss, without backward. By default ``training_step``
        is called once more. Give one where ``training_step`` changes something that a refresh does not put back, and
        with manual optimization, where it takes steps. In both cases ``self.log`` and ``self.log_dict`` are silent and
        the module's torchmetrics see nothing.

    Example:
      >>> import lightning.pytorch as pl
      >>> import torch
      >>> from fosi.torch import FOSI
      >>> from fosi.torch.lightning import RefreshCallback
      >>> class Model(pl.LightningModule):
      ...     def __init__(self):
      ...         super().__init__()
      ...         self.layer = torch.nn.Linear(3, 1)
      ...     def training_step(self, batch):
      ...         return (self.layer(batch) - 1).square().mean()
      ...     def configure_optimizers(self):
      ...         return FOSI(torch.optim.AdamW(self.parameters(), lr=1e-3), model=self, k=2, warmup=0)
      >>> quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
      >>> trainer = pl.Trainer(max_steps=2, accelerator="cpu", callbacks=[RefreshCallback()], **quiet)
      >>> trainer.fit(Model(), torch.utils.data.DataLoader(torch.randn(16, 3), batch_size=8))
      >>> int(trainer.optimizers[0].spectrum.accepted.sum())
      2
    """

    def __init__(self, loss: Callable[[Any, Any], Tensor] | None = None) -> None:
        """See the class."""
        super().__init__()
        if loss is not None and not callable(loss):
            raise TypeError(f"loss must be a function of the module and a batch or None, got {loss!r}")
        self.loss = loss
        self._current: tuple[Any, int] | None = None
        self._gathered: list[tuple[Any, int]] = []

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Says what will not work before the first step instead of at the first refresh."""
        if not any(isinstance(optimizer, FOSI) for optimizer in trainer.optimizers):
            _log.warning("FOSI: none of the Trainer's optimizers is a FOSI, RefreshCallback has nothing to do")
        if self.loss is None and not pl_module.automatic_optimization:
            raise ValueError(
                "RefreshCallback needs loss=, a function of the module and a batch, with manual optimization: "
                "training_step takes steps there. Or call self.optimizers().refresh(closure) in it"
            )
        if "dataloader_iter" in inspect.signature(pl_module.training_step).parameters:
            raise ValueError("RefreshCallback cannot see the batches of a training_step(dataloader_iter)")

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Holds the batch, for as long as it is the current one."""
        self._current = batch, batch_idx

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Lets go of the batch."""
        self._current = None

    def on_before_zero_grad(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Forgets the batches whose gradients are thrown away now. Not called in manual optimization."""
        self._gathered.clear()

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        """Keeps the batch whose gradient comes now, where a refresh will ask for it."""
        due = any(isinstance(optimizer, FOSI) and optimizer.refresh_due for optimizer in trainer.optimizers)
        if due and pl_module.automatic_optimization and self._current is not None:
            self._gathered.append(self._current)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Refreshes ``optimizer`` if it is a FOSI and due."""
        optimizer = vars(optimizer).get("_optimizer", optimizer)
        if not isinstance(optimizer, FOSI) or not optimizer.refresh_due:
            return
        batches = self._gathered
        if not pl_module.automatic_optimization and self._current is not None:
            batches = [self._current]
        if not batches:  # training_step returned None: there is no loss
            return
        closures = [functools.partial(self._evaluate, trainer, pl_module, batch) for batch in batches]
        if optimizer.model is None:
            optimizer.model = pl_module  # its buffers must not change, and here it is known
        optimizer.refresh(closures)

    def _evaluate(self, trainer: Any, pl_module: Any, current: tuple[Any, int]) -> Any:
        batch, index = current
        # The plugin's context for what it sets besides autocast, which stays off: products need the precision.
        full_precision = torch.autocast(pl_module.device.type, enabled=False)
        with trainer.precision_plugin.train_step_context(), full_precision, _silent(pl_module):
            if self.loss is not None:
                return self.loss(pl_module, batch)
            output = pl_module.training_step(*_arguments(pl_module.training_step, batch, index))
        return output["loss"] if isinstance(output, Mapping) else output


def _arguments(step: Callable[..., Any], batch: Any, index: int) -> tuple[Any, ...]:
    """With the batch's index where training_step takes it, as Lightning does."""
    try:
        inspect.signature(step).bind(batch, index)
    except TypeError:
        return (batch,)
    return batch, index


@contextlib.contextmanager
def _silent(module: nn.Module) -> Iterator[None]:
    """The module with its logging switched off and copies in the place of its metrics."""
    from torchmetrics import Metric, MetricCollection  # Lightning itself needs it, so it is there

    metrics = [
        (parent, name, child)
        for parent in module.modules()
        if not isinstance(parent, (Metric, MetricCollection))
        for name, child in parent._modules.items()
        if isinstance(child, (Metric, MetricCollection))
    ]
    instance = vars(module)
    own = {name: instance[name] for name in _LOGGING if name in instance}
    try:
        for parent, name, metric in metrics:
            parent._modules[name] = metric.clone()
        instance.update(dict.fromkeys(_LOGGING, _nothing))
        yield
    finally:
        for name in _LOGGING:
            instance.pop(name, None)
        instance.update(own)
        for parent, name, metric in metrics:
            parent._modules[name] = metric


def _nothing(*args: Any, **kwargs: Any) -> None:
    """What ``log`` is while a refresh asks for the loss."""
