"""Intercept the attention calls of a model without changing them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from merit_optim.monitor.arguments import AttentionArguments, of_multi_head, of_scaled_dot_product
from merit_optim.monitor.observation import observe_attention
from merit_optim.optim.torch_private import leave_function_mode


def merge(one: Tensor, other: Tensor) -> Tensor:
    """Combine two observations of (3, heads) from :func:`observe_attention`."""
    return torch.cat([torch.maximum(one[:1], other[:1]), one[1:] + other[1:]])


class Interception(TorchFunctionMode):
    """While entered, observes the calls of torch's attention functions by the modules on ``path``.

    This is a torch function mode: it sees calls no matter how the function was imported, torch.compile traces
    it into the graph and keeps one graph with it and one without, and it has no effect once it is left.

    Observations are stored on the module that called attention, as its attribute ``name``, so that blocks
    compiled one by one can share a graph, which reads the tensor of the module it runs for. As Python state,
    each block's observation would be a constant of a separate graph.
    """

    _names_in_use: ClassVar[set[str]] = set()

    def __init__(self, *, entropy: bool) -> None:
        super().__init__()
        self.entropy = entropy
        self.path: list[nn.Module] = []
        self.name = ""

    def __enter__(self) -> Interception:
        # The first free name: torch.compile makes a graph for every name.
        names = (f"_merit_attention_seen_{index}" for index in itertools.count())
        self.name = next(name for name in names if name not in self._names_in_use)
        self._names_in_use.add(self.name)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *_: Any) -> None:
        self._names_in_use.discard(self.name)
        leave_function_mode(self)  # other modes may have been entered after this one

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if self.path:
            if func is F.scaled_dot_product_attention:
                self.observe(of_scaled_dot_product(*args, **kwargs))
            elif func is F.multi_head_attention_forward:
                self.observe(of_multi_head(*args, **kwargs))
            elif func is torch.ops.higher_order.flex_attention and _gives_max_scores(*args):
                return self._flex(*args)
        if func is Tensor.unflatten:
            # The method calls super(), which torch.compile cannot trace inside a mode.
            return torch.unflatten(*args, **kwargs)
        return func(*args, **kwargs)

    def observe(self, arguments: AttentionArguments | None) -> None:
        """Observe an attention call; None is one that cannot be observed."""
        if arguments is not None:
            query, key, mask, options = arguments
            mask = None if mask is None else mask.detach()
            options = {"entropy": self.entropy} | options
            self._record(observe_attention(query.detach(), key.detach(), mask, **options))

    def _flex(self, *args: Any) -> Any:
        """Call flex_attention with the largest logits as an extra output. It cannot return the entropy."""
        result = torch.ops.higher_order.flex_attention(
            *args[:6], {**args[6], "OUTPUT_MAX": True}, *(buffers for buffers in args[7:] if buffers)
        )
        largest = result[2].detach().amax(dim=(0, 2)) * math.log(2)  # the kernel uses base 2
        self._record(torch.stack([largest, torch.zeros_like(largest), torch.zeros_like(largest)]))
        return result

    def _record(self, observation: Tensor) -> None:
        """Add an observation to those of the module that is running."""
        module = self.path[-1]
        seen = getattr(module, self.name, None)
        if seen is None:
            object.__setattr__(module, self.name, observation)
        elif seen.shape != observation.shape:
            raise RuntimeError(
                f"{type(module).__name__} called attention with {seen.shape[1]} heads and then with "
                f"{observation.shape[1]}; the number of heads must be the same in every call. "
                "Monitor a part of the model without this module."
            )
        elif torch.compiler.is_compiling():
            seen.copy_(merge(seen, observation))  # in place, as a graph may be replayed
        else:
            object.__setattr__(module, self.name, merge(seen, observation))


def _gives_max_scores(*args: Any) -> bool:
    query, kernel_options = args[0], args[6]
    return bool(query.is_cuda) and kernel_options.get("BACKEND") != "FLASH"
