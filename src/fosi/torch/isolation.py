"""The surroundings of a refresh: second derivatives exist for everything, and nothing of the user's is changed."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from fosi.torch.convolution import CONVOLUTIONS
from fosi.torch.distributed import unsynchronised
from fosi.torch.normalization import NORMALIZATIONS

_RECURRENT = {torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu}


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    return v * (g / torch.norm_except_dim(v, 2, dim))


_REPLACED: dict[Any, Callable[..., Tensor | None]] = {
    **CONVOLUTIONS,
    **NORMALIZATIONS,
    torch._weight_norm: _weight_norm,
}
"""What is called in the place of a function of torch's; None of it means that the function itself is to be called."""


class _PlainLayers(TorchFunctionMode):
    """Layers whose own backward pass has no derivative, or a wrong or slow one, computed in another way.

    Recurrent layers run without cuDNN, which has none; all else keeps it. oneDNN has one, but the plain layers are the
    faster. The switches alone are set: the ``flags`` contexts of torch.backends touch TF32 too, and raise where the
    user has set ``fp32_precision``. Weight norm takes ‖v‖ for a constant there: its Hessian is not even symmetric.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _REPLACED:
            out = _REPLACED[func](*args, **(kwargs or {}))
            return func(*args, **(kwargs or {})) if out is None else out
        if func not in _RECURRENT:
            return func(*args, **(kwargs or {}))
        cudnn, mkldnn = torch._C._get_cudnn_enabled(), torch._C._get_mkldnn_enabled()
        try:
            torch._C._set_cudnn_enabled(False)
            torch._C._set_mkldnn_enabled(False)
            return func(*args, **(kwargs or {}))
        finally:
            torch._C._set_cudnn_enabled(cudnn)
            torch._C._set_mkldnn_enabled(mkldnn)


class Isolation(contextlib.AbstractContextManager["Isolation"]):
    """Within it a loss can be differentiated twice; gradients, buffers, random state and modes come out as they were.

    Args:
      params: whose gradients must stay as they are, and whose devices' random numbers are put back.
      model: whose buffers and modes are put back; None where the losses' modules are not known.

    Attributes:
      leaves: inside, the parameters as a loss sees them: what to differentiate with respect to.
    """

    def __init__(self, params: Sequence[Tensor], model: nn.Module | None = None) -> None:
        """Nothing happens before it is entered."""
        self.params, self.model = list(params), model
        self.leaves: list[Tensor] = []
        self._stack = contextlib.ExitStack()
        self._buffers: list[tuple[nn.Module, str, Tensor | None]] = []
        self._modes: list[tuple[nn.Module, bool]] = []

    def __enter__(self) -> Isolation:
        modules = list(self.model.modules()) if self.model is not None else []
        self._modes = [(m, m.training) for m in modules]
        self._buffers = [(m, name, b) for m in modules for name, b in m._buffers.items()]
        with contextlib.ExitStack() as stack:
            # Clones in the place of buffers: putting values back in place, while a graph that read them lives, raises.
            stack.callback(self._put_back)
            types = {p.device.type for p in self.params}
            for kind in types - {"cpu"}:
                devices = sorted({p.device.index or 0 for p in self.params if p.device.type == kind})
                stack.enter_context(torch.random.fork_rng(devices, device_type=kind))
            if types == {"cpu"}:
                stack.enter_context(torch.random.fork_rng(devices=[]))
            for kind in types | {"cpu"}:
                stack.enter_context(torch.autocast(kind, enabled=False))
            stack.enter_context(torch.enable_grad())
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))  # fused attention has no second derivative
            if "torch._dynamo" in sys.modules:  # nor have compiled models; without any, its import would take seconds
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(_PlainLayers())
            self.leaves = stack.enter_context(unsynchronised(self.params, self.model))
            watched = {*self.params, *self.leaves}
            self._gradients = [(p, p.grad, None if p.grad is None else p.grad._version) for p in watched]
            self._random = _random_states(self.params)
            self._swap()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        with self._stack:
            if kind is None:
                self._check_gradients()

    def rewind(self) -> None:
        """Random numbers and buffers as they were when it was entered, for a loss to come out the same again."""
        torch.set_rng_state(self._random[0])
        for kind, index, state in self._random[1]:
            torch.get_device_module(kind).set_rng_state(state, index)
        self._swap()

    def _swap(self) -> None:
        clones = {id(buffer): buffer.clone() for _, _, buffer in self._buffers if buffer is not None}
        for module, name, buffer in self._buffers:  # modules that share a buffer go on sharing it
            module._buffers[name] = None if buffer is None else clones[id(buffer)]

    def _put_back(self) -> None:
        for module, name, buffer in self._buffers:
            module._buffers[name] = buffer
        for module, mode in self._modes:
            module.training = mode

    def _check_gradients(self) -> None:
        for p, grad, version in self._gradients:
            if p.grad is not grad or (grad is not None and grad._version != version):
                raise ValueError(
                    "the closure changed .grad: it must return the loss and not call backward() or zero_grad(); "
                    "the gradients of this step are no longer those of your own backward pass"
                )


def _random_states(params: Sequence[Tensor]) -> tuple[Tensor, list[tuple[str, int, Tensor]]]:
    devices = {(p.device.type, p.device.index or 0) for p in params if p.device.type not in ("cpu", "meta")}
    states = [(kind, index, torch.get_device_module(kind).get_rng_state(index)) for kind, index in sorted(devices)]
    return torch.get_rng_state(), states
