"""An optimizer around another, to torch's tools no different from the one inside."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from torch import optim

try:
    from torch._C._autograd import _profiler_enabled
    from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
except ImportError:  # private names: without them every step is taken as a watched one
    _CAN_TELL = False
else:
    _CAN_TELL = True

Method = TypeVar("Method", bound=Callable[..., Any])


def on_itself(method: Method) -> Method:
    """For methods that set attributes, called on a wrapper that pretends to be the optimizer.

    Lightning's and Fabric's wrappers inherit from the class of the optimizer they hold, and read what they lack from
    it: a method of ours would run, and set everything on the wrapper, where no step sees it.
    """

    @functools.wraps(method)
    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        return method(vars(self).get("_optimizer", self), *args, **kwargs)

    return called  # type: ignore[return-value]


class Around(optim.Optimizer):
    """What belongs to the base stays the base's: groups, state and defaults.

    They are properties, not references: the base replaces them when it loads a checkpoint.
    """

    def __init__(self, base: optim.Optimizer) -> None:
        self.base = base
        super().__setstate__({})  # hooks and all that Optimizer.__init__ makes but parameters, which are the base's

    @staticmethod
    def profile_hook_step(func: Callable[..., Any]) -> Callable[..., Any]:
        """What torch puts around ``step()``, hooks and a mark for profilers, where there is one to call or to mark for.

        It takes as long as two products of a small basis, and the base's step inside has it as well. An observer other
        than this thread's profiler sees the base's mark alone.
        """
        watched = optim.Optimizer.profile_hook_step(func)
        if not _CAN_TELL:
            return watched

        @functools.wraps(func)
        def step(self: Any, *args: Any, **kwargs: Any) -> Any:
            idle = not (
                self._optimizer_step_pre_hooks
                or self._optimizer_step_post_hooks
                or _global_optimizer_pre_hooks
                or _global_optimizer_post_hooks
                or _profiler_enabled()
            )
            if not idle:
                return watched(self, *args, **kwargs)
            out = func(self, *args, **kwargs)
            # A hook may have come meanwhile, from a closure.
            for hooks in (self._optimizer_step_post_hooks, _global_optimizer_post_hooks):
                for hook in list(hooks.values()):
                    hook(self, args, kwargs)
            return out

        return step

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The base's groups: learning rates and all other settings of the base are read and set there."""
        return self.base.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.base.param_groups = groups

    @property
    def state(self) -> Any:
        """The base's state."""
        return self.base.state

    @state.setter
    def state(self, state: Any) -> None:
        self.base.state = state

    @property
    def defaults(self) -> dict[str, Any]:
        """The base's defaults."""
        return self.base.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self.base.defaults = defaults

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the base does it."""
        self.base.zero_grad(set_to_none=set_to_none)
