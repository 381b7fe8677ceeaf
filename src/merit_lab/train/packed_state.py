"""Convert the state of any optimizer to JSON and named tensors, and back, without running code on loading.

Its structure is stored too: an optimizer from outside may have other state later than after its first step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from merit_lab.train.steps import weights_of
from merit_optim.optim.base import SafeOptimizer

Tensors = dict[str, Tensor]

_PLAIN = (type(None), bool, int, float, str)
# Entries of a parameter group that are not options, and the learning rate, which follows from the step.
_NOT_SAVED = frozenset({"params", "param_names", "kind", "lr"})


class _CannotPack(ValueError):
    """A value that cannot be stored in a checkpoint."""


def pack(optimizer: Optimizer, tensors: Tensors) -> Any:
    """Return ``optimizer.state_dict()`` as JSON, and add its tensors to ``tensors``.

    Values in parameter groups that cannot be packed are left out: options, which the configuration sets.
    """
    saved, trial = optimizer.state_dict(), _Packer(optimizer, {})
    if _is_usual(saved):
        saved["param_groups"] = [
            {key: value for key, value in group.items() if key not in _NOT_SAVED and trial.can_pack(value)}
            for group in saved["param_groups"]
        ]
    try:
        return _Packer(optimizer, tensors).pack(saved)
    except _CannotPack as error:
        raise ValueError(
            f"{type(optimizer).__name__} keeps {error} in its state; checkpoints hold tensors, numbers and "
            "strings, and lists, tuples and dictionaries of them, so keep it elsewhere"
        ) from None


def to_read_into(optimizer: Optimizer, packed: Any, module: nn.Module) -> Tensors:
    """Return tensors to read a packed state into, on the devices and ranks of the weights."""
    made: Tensors = {}
    if _is_of_this_package(optimizer):  # alone it knows how its state is placed on ranks
        get_optimizer_state_dict(module, optimizer)  # makes the state, in a step that changes nothing
        pack(optimizer, made)
    weights = weights_of(optimizer)
    return {
        spec["tensor"]: made[spec["tensor"]] if spec["tensor"] in made else _empty(spec, weights)
        for spec in _specs(packed)
    }


def unpack(optimizer: Optimizer, packed: Any, tensors: Tensors) -> None:
    """Load a packed state into an optimizer."""
    saved = _unpack(packed, tensors)
    if not _is_usual(saved):
        optimizer.load_state_dict(saved)
        return
    groups = zip(optimizer.state_dict()["param_groups"], saved["param_groups"], strict=True)
    optimizer.load_state_dict({**saved, "param_groups": [{**group, **options} for group, options in groups]})
    # torch casts state to the weight's dtype, which our optimizers prevent, and breaks strings.
    weights, ours = weights_of(optimizer), isinstance(optimizer, SafeOptimizer)
    for key, state in saved["state"].items():
        place = weights[key] if type(key) is int else key
        if ours and isinstance(state, dict):
            loaded = {name: item for name, item in optimizer.state[place].items() if isinstance(item, Tensor)}
            state = {**state, **loaded}
        optimizer.state[place] = state


def names_of(optimizer: Optimizer) -> list[str]:
    """Return the names of the parameters, or their indices if they have none."""
    names = [name for group in optimizer.param_groups for name in group.get("param_names", ())]
    return names or [str(number) for number in range(len(weights_of(optimizer)))]


def _is_usual(saved: dict[str, Any]) -> bool:
    """Whether a state dict has torch's format; those of wrappers may have their own."""
    return {"state", "param_groups"} <= saved.keys()


def _is_of_this_package(optimizer: Optimizer) -> bool:
    """Whether an optimizer is one of ours, and not a subclass from outside."""
    is_ours = type(optimizer).__module__.partition(".")[0] == SafeOptimizer.__module__.partition(".")[0]
    return is_ours and isinstance(optimizer, SafeOptimizer)


class _Packer:
    """Converts values to JSON and collects their tensors."""

    def __init__(self, optimizer: Optimizer, tensors: Tensors) -> None:
        self._names, self._weights = names_of(optimizer), weights_of(optimizer)
        self._is_ours = _is_of_this_package(optimizer)
        self._tensors = tensors
        self._seen: dict[object, str] = {}

    def can_pack(self, value: Any) -> bool:
        """Whether a value of a parameter group can be stored."""
        try:
            self.pack(value, ("param_groups",))
        except _CannotPack:
            return False
        return True

    def pack(self, value: Any, path: tuple[Any, ...] = ()) -> Any:
        """Return the value at a path of the state dict, as JSON."""
        if isinstance(value, Tensor):
            return self._pack_tensor(value, path)
        if type(value) is float and not math.isfinite(value):  # which JSON has not
            return {"float": str(value)}
        if type(value) in _PLAIN:
            return value
        if type(value) in (list, tuple):
            return {type(value).__name__: [self.pack(item, (*path, i)) for i, item in enumerate(value)]}
        if type(value) is dict and all(type(key) in _PLAIN for key in value):
            return {"dict": [[key, self.pack(item, (*path, key))] for key, item in value.items()]}
        raise _CannotPack(f"a {type(value).__name__} as {str(path[-1])!r}")

    def _pack_tensor(self, value: Tensor, path: tuple[Any, ...]) -> dict[str, Any]:
        of_weight = path[0] == "state" and type(path[1]) is int
        place = path[1] if of_weight else 0
        weight, last = self._weights[place], str(path[-1])
        if value.layout is not torch.strided or value.is_complex() or value.is_quantized:
            raise _CannotPack(f"a {value.dtype} tensor of layout {value.layout} as {last!r}")
        # Ours know how their state is placed; that of others is placed by its shape when it is loaded.
        is_cut = isinstance(weight, DTensor) and value.ndim > 0 and not self._is_ours
        if is_cut and not _is_placed_by_its_shape(value, weight):
            raise _CannotPack(
                f"{last!r} of shape {tuple(value.shape)}, neither sharded as its weight of "
                f"{tuple(weight.shape)} is nor whole and of another shape,"
            )
        parts = (self._names[place], *path[2:]) if of_weight else path
        return {
            "tensor": self._name(value, ".".join(["optimizer", *map(str, parts)])),
            "weight": place,
            "shape": list(value.shape),
            "dtype": str(value.dtype).removeprefix("torch."),
            # With another memory layout, products of the same numbers can differ in their last bits.
            "strides": [] if isinstance(value, DTensor) else list(torch.empty_like(value).stride()),
            "on_host": value.device.type == "cpu" != weight.device.type,
        }

    def _name(self, value: Tensor, name: str) -> str:
        """Return a unique name for a tensor; one that groups share has one name."""
        is_shared = not isinstance(value, DTensor) and value.numel()
        place: object = (value.data_ptr(), value.shape, value.stride(), value.dtype) if is_shared else name
        if place not in self._seen:
            while name in self._tensors:
                name += "_"
            self._seen[place] = name
            # A scalar cannot be read in slices from safetensors.
            self._tensors[name] = value.reshape(-1) if value.ndim == 0 else value.contiguous()
        return self._seen[place]


def _is_placed_by_its_shape(value: Tensor, weight: Tensor) -> bool:
    if isinstance(value, DTensor) and isinstance(weight, DTensor):
        return value.shape == weight.shape and value.placements == weight.placements
    return value.shape != weight.shape


def _specs(packed: Any) -> Iterator[dict[str, Any]]:
    """Yield the tensors in a packed value."""
    if isinstance(packed, dict) and "tensor" in packed:
        yield packed
    elif isinstance(packed, dict | list):
        for item in packed.values() if isinstance(packed, dict) else packed:
            yield from _specs(item)


def _empty(spec: dict[str, Any], weights: list[Tensor]) -> Tensor:
    weight, dtype, shape = weights[spec["weight"]], getattr(torch, spec["dtype"]), spec["shape"]
    if isinstance(weight, DTensor) and shape and torch.Size(shape) == weight.shape:
        return torch.zeros_like(weight, dtype=dtype)
    return torch.zeros(shape or [1], dtype=dtype, device="cpu" if spec["on_host"] else weight.device)


def _unpack(packed: Any, tensors: Tensors) -> Any:
    if not isinstance(packed, dict):
        return packed
    if "tensor" in packed:
        return _unpack_tensor(tensors[packed["tensor"]], packed)
    ((kind, items),) = packed.items()
    if kind == "float":
        return float(items)
    if kind == "dict":
        return {key: _unpack(item, tensors) for key, item in items}
    unpacked = [_unpack(item, tensors) for item in items]
    return tuple(unpacked) if kind == "tuple" else unpacked


def _unpack_tensor(tensor: Tensor, spec: dict[str, Any]) -> Tensor:
    if isinstance(tensor, DTensor):
        return tensor
    tensor = tensor.reshape(spec["shape"])
    if not spec["strides"] or list(tensor.stride()) == spec["strides"]:
        return tensor
    laid_out = torch.empty_strided(spec["shape"], spec["strides"], dtype=tensor.dtype, device=tensor.device)
    return laid_out.copy_(tensor)
