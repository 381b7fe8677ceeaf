"""The largest attention logits and entropies of any model."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from merit_optim.monitor.attention_registry import intercepted_registry
from merit_optim.monitor.interception import Interception, merge
from merit_optim.monitor.reading import AttentionReading, combine, of_all_ranks
from merit_optim.optim.names import COMPILED, plain
from merit_optim.optim.torch_private import is_compiled_in_place


class AttentionMonitor:
    """Observes the attention of a model in selected steps, without any effect in between.

    A step is a ``with`` block with one or several forward passes. Each reading covers the steps since the
    previous reading.

    It observes ``scaled_dot_product_attention``, ``nn.MultiheadAttention``, ``flex_attention`` on a GPU (only
    the largest logits), and the eager and flash functions of Hugging Face models. Observing does not change
    what the model computes, with one exception: in evaluation ``nn.TransformerEncoder`` leaves its fast path
    for padded sequences, as with any hooks, and returns other outputs at the padding.

    Args:
        model: The model, or a part of it. Layers are named as in ``model.named_modules()``.
        every: Observe one in this many steps, starting with the first.
        entropy: Whether to measure entropies too, which takes about three times as long.

    Examples:
        >>> import torch
        >>> layer = torch.nn.TransformerEncoderLayer(d_model=16, nhead=2, batch_first=True)
        >>> monitor = AttentionMonitor(layer, every=10)
        >>> for step in range(20):
        ...     with monitor:
        ...         loss = layer(torch.randn(4, 8, 16)).square().mean()
        ...     if reading := monitor.read():
        ...         print(step, {name: tuple(heads.shape) for name, heads in reading.max_logits.items()})
        0 {'self_attn': (2,)}
        10 {'self_attn': (2,)}
    """

    def __init__(self, model: nn.Module, *, every: int = 1, entropy: bool = True) -> None:
        if every < 1:
            raise ValueError(
                f"every must be at least 1 step, got {every}; to observe nothing, do not use a monitor"
            )
        self.model = model
        self.every = every
        self._interception = Interception(entropy=entropy)
        self._watched: ExitStack | None = None
        self._num_steps = 0
        self._seen: dict[str, Tensor] = {}
        self._has_looked = False

    def __enter__(self) -> AttentionMonitor:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Begin a step, like entering the ``with`` block, for callbacks that cannot use one."""
        if self._watched is not None:
            raise RuntimeError(
                "this monitor is already in a step; end it with stop(), or by leaving its with block"
            )
        self._start(running=None)

    def stop(self) -> None:
        """End a step, if one is open."""
        watched, self._watched = self._watched, None
        if watched is not None:
            watched.close()

    def attach(self) -> Callable[[], None]:
        """Make every forward pass of the model a step, for loops that cannot be changed.

        Returns a function that detaches the monitor.
        """
        if is_compiled_in_place(self.model):
            raise ValueError(
                f"{type(self.model).__name__} was compiled in place, so hooks would be compiled with it; "
                "put `with monitor:` around the forward pass instead"
            )

        def begin(model: nn.Module, _: Any) -> None:
            if model is self.model:  # a copy of the model has copies of these hooks
                self.stop()  # an interrupted pass did not call its hooks
                self._start(running=model)

        def end(model: nn.Module, *_: Any) -> None:
            if model is self.model:
                self.stop()

        hooks = [
            self.model.register_forward_pre_hook(begin),
            self.model.register_forward_hook(end, always_call=True),
        ]

        return partial(_remove, hooks)

    def read(self, group: dist.ProcessGroup | None = None) -> AttentionReading | None:
        """Return and reset the observations since the last reading; None if no step was observed.

        With a ``group``, the reading covers all its ranks: each of them must call this after the same steps,
        even if it observed other layers. Waits for the device.
        """
        seen, has_looked = self._seen, self._has_looked
        self.forget()
        if not has_looked:
            return None
        reading = combine(seen if group is None else of_all_ranks(seen, group, self._device))
        if reading is None:
            self._warn_of_nothing()
        return reading

    def take(self) -> dict[str, Tensor]:
        """Return and reset the observations of this rank only, without waiting for the device.

        By the layer's name, on the device, (3, heads): the largest logits, the sums of the queries' entropies
        and the number of these queries, as from :func:`observe_attention`. Empty if nothing was observed.
        """
        seen, has_looked = self._seen, self._has_looked
        self.forget()
        if has_looked and not seen:
            self._warn_of_nothing()
        return seen

    def _warn_of_nothing(self) -> None:
        warnings.warn(
            f"no attention was observed in {type(self.model).__name__}. A monitor observes torch's attention "
            "functions and those of Hugging Face models, not attention written as matrix products; and only "
            "in modules of its model, while a step is open.",
            stacklevel=3,
        )

    def forget(self) -> None:
        """Drop the observations since the last reading, for example after a failed step."""
        self._seen, self._has_looked = {}, False

    @property
    def _device(self) -> torch.device:
        return next((param.device for param in self.model.parameters()), torch.device("cpu"))

    def _start(self, *, running: nn.Module | None) -> None:
        """Begin a step, with a module ``running`` whose hooks must not be changed."""
        with ExitStack() as stack:
            if self._num_steps % self.every == 0:
                self._watch(stack, running)
            self._watched = stack.pop_all()
        self._num_steps += 1

    def _watch(self, stack: ExitStack, running: nn.Module | None) -> None:
        modules = {name: module for name, module in self.model.named_modules() if _may_attend(module)}
        path = self._interception.path
        path.clear()  # an interrupted pass may have left modules there

        def enter(module: nn.Module, _: Any) -> None:
            path.append(module)

        def leave(module: nn.Module, *_: Any) -> None:
            # Also remove inner modules that failed and never called this. (Hooks with always_call would do
            # that at once, but torch.compile makes a new graph whenever one is registered.)
            while path and path.pop() is not module:
                pass

        hooks: list[RemovableHandle] = []
        stack.callback(self._collect, modules)
        stack.callback(_remove, hooks)
        for module in modules.values():
            if running is not None and module is running:
                path.append(module)
            else:
                hooks.append(module.register_forward_pre_hook(enter))
                hooks.append(module.register_forward_hook(leave))
        stack.enter_context(intercepted_registry(self._interception))
        stack.enter_context(self._interception)

    def _collect(self, modules: dict[str, nn.Module]) -> None:
        self._has_looked = True
        # All are removed from the modules before any is processed: a failure must not reach the next step.
        attribute = self._interception.name
        observations = {name: module.__dict__.pop(attribute, None) for name, module in modules.items()}
        for name, observation in observations.items():
            if observation is not None:
                name = plain(name) or type(modules[name]).__name__
                before = self._seen.get(name)
                # A copy: a CUDA graph overwrites its tensor in the next replay.
                self._seen[name] = observation.clone() if before is None else merge(before, observation)


def _remove(hooks: list[RemovableHandle]) -> None:
    for hook in hooks:
        hook.remove()


def _may_attend(module: nn.Module) -> bool:
    """Whether a module may call attention itself. Of torch's modules, only one does."""
    if COMPILED in module._modules:  # the wrapper of torch.compile; hasattr would be slow
        return False
    return isinstance(module, nn.MultiheadAttention) or not type(module).__module__.startswith("torch.nn.")
