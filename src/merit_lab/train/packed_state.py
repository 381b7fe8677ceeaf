"""Convert the state of any optimizer to JSON and named tensors, and back, without running code on loading.

An optimizer of this package creates its state in a step that changes nothing, and checkpoints are read into
it. An external optimizer, including a subclass of ours, may have different state later than after such a
step, so the structure of its state is stored as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from merit_lab.train.steps import weights_of
from merit_optim.optim.base import SafeOptimizer
from merit_optim.optim.kinds import MARKS

Tensors = dict[str, Tensor]

_PLAIN = (type(None), bool, int, float, str)
# Entries of a parameter group that are not options, and the learning rate, which follows from the step.
_NOT_SAVED = frozenset({"params", "param_names", *MARKS, "lr"})


class _CannotPack(ValueError):
    """A value that cannot be stored in a checkpoint."""


def is_of_this_package(optimizer: object) -> TypeGuard[SafeOptimizer]:
    """Whether an optimizer is one of ours, whose state is only tensors, and not an external subclass."""
    is_ours = type(optimizer).__module__.partition(".")[0] == SafeOptimizer.__module__.partition(".")[0]
    return is_ours and isinstance(optimizer, SafeOptimizer)


def pack(optimizer: Optimizer, tensors: Tensors) -> dict[str, Any]:
    """Return ``optimizer.state_dict()`` as JSON, and add its tensors to ``tensors``.

    Values in parameter groups that cannot be packed are left out: options, which the configuration sets.
    """
    try:
        return _pack(optimizer, _Packer(tensors))
    except _CannotPack as error:
        raise ValueError(
            f"{type(optimizer).__name__} keeps {error} in its state; checkpoints hold tensors, numbers and "
            "strings, and lists, tuples and dictionaries of them, so keep it elsewhere"
        ) from None


def _pack(optimizer: Optimizer, packing: _Packer) -> dict[str, Any]:
    saved = optimizer.state_dict()
    names, weights = names_of(optimizer), weights_of(optimizer)
    if not {"state", "param_groups"} <= saved.keys():  # a custom format, as wrappers may have
        return {"state": [], "others": packing.pack({"all": saved}, "optimizer", weights[0])}
    state = []
    for key, value in saved.pop("state").items():
        of_weight = type(key) is int
        name, weight = (names[key], weights[key]) if of_weight else (str(key), weights[0])
        state.append([key, packing.pack(value, f"optimizer.{name}", weight)])
    groups = [
        {key: value for key, value in group.items() if key not in _NOT_SAVED and _can_be_packed(value)}
        for group in saved.pop("param_groups")
    ]
    others = packing.pack({"groups": groups, "others": saved}, "optimizer", weights[0])
    return {"state": state, "others": others}


def to_read_into(optimizer: Optimizer, packed: dict[str, Any]) -> Tensors:
    """Return empty tensors for a packed state, on the devices and ranks of the weights."""
    weights = weights_of(optimizer)
    tensors = {spec["tensor"]: _empty(spec, weights[0]) for spec in _specs(packed["others"])}
    for key, value in packed["state"]:
        weight = weights[key] if type(key) is int else weights[0]
        tensors |= {spec["tensor"]: _empty(spec, weight) for spec in _specs(value)}
    return tensors


def unpack(optimizer: Optimizer, packed: dict[str, Any], tensors: Tensors) -> None:
    """Load a packed state into an optimizer."""
    state = {key: _unpack(value, tensors) for key, value in packed["state"]}
    others = _unpack(packed["others"], tensors)
    if "all" in others:
        optimizer.load_state_dict(others["all"])
        return
    groups = [
        {**group, **saved}
        for group, saved in zip(optimizer.state_dict()["param_groups"], others["groups"], strict=True)
    ]
    optimizer.load_state_dict({**others["others"], "state": state, "param_groups": groups})
    # torch casts state to the weight's dtype, which our optimizers prevent, and breaks strings.
    weights, ours = weights_of(optimizer), isinstance(optimizer, SafeOptimizer)
    for key, saved in state.items():
        place = weights[key] if type(key) is int else key
        loaded = {
            name: item for name, item in optimizer.state[place].items() if ours and isinstance(item, Tensor)
        }
        optimizer.state[place] = {**saved, **loaded}


def names_of(optimizer: Optimizer) -> list[str]:
    """Return the names of the parameters, or their indices if they have none."""
    names = [name for group in optimizer.param_groups for name in group.get("param_names", ())]
    return names or [str(number) for number in range(len(weights_of(optimizer)))]


class _Packer:
    """Converts values to JSON and collects their tensors."""

    def __init__(self, tensors: Tensors) -> None:
        self._tensors = tensors
        self._seen: dict[object, str] = {}

    def pack(self, value: Any, name: str, weight: Tensor) -> Any:
        """Return a value that belongs to a weight, as JSON."""
        if isinstance(value, Tensor):
            return self._pack_tensor(value, name, weight)
        if type(value) in _PLAIN:
            return value
        if type(value) in (list, tuple):
            items = [self.pack(item, f"{name}.{i}", weight) for i, item in enumerate(value)]
            return {type(value).__name__: items}
        if type(value) is dict and all(type(key) in _PLAIN for key in value):
            return {"dict": [[key, self.pack(item, f"{name}.{key}", weight)] for key, item in value.items()]}
        raise _CannotPack(f"a {type(value).__name__} as {_last(name)!r}")

    def _pack_tensor(self, value: Tensor, name: str, weight: Tensor) -> dict[str, Any]:
        if value.layout is not torch.strided or value.is_complex() or value.is_quantized:
            raise _CannotPack(f"a {value.dtype} tensor of layout {value.layout} as {_last(name)!r}")
        if isinstance(weight, DTensor) and value.ndim and not _is_placed_by_its_shape(value, weight):
            raise _CannotPack(
                f"{_last(name)!r} of shape {tuple(value.shape)}, neither sharded as its weight of "
                f"{tuple(weight.shape)} is nor whole and of another shape,"
            )
        return {
            "tensor": self._name(value, name),
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


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _is_placed_by_its_shape(value: Tensor, weight: DTensor) -> bool:
    if isinstance(value, DTensor):
        return value.shape == weight.shape and value.placements == weight.placements
    return value.shape != weight.shape


def _can_be_packed(value: Any) -> bool:
    try:
        _Packer({}).pack(value, "", torch.empty(0))
    except _CannotPack:
        return False
    return True


def _specs(packed: Any) -> Iterator[dict[str, Any]]:
    """Yield the tensors in a packed value."""
    if isinstance(packed, dict) and "tensor" in packed:
        yield packed
    elif isinstance(packed, dict | list):
        for item in packed.values() if isinstance(packed, dict) else packed:
            yield from _specs(item)


def _empty(spec: dict[str, Any], weight: Tensor) -> Tensor:
    dtype = getattr(torch, spec["dtype"])
    shape = spec["shape"] or [1]
    if isinstance(weight, DTensor) and spec["shape"] and torch.Size(shape) == weight.shape:
        return torch.zeros_like(weight, dtype=dtype)
    return torch.zeros(shape, dtype=dtype, device="cpu" if spec["on_host"] else weight.device)


def _unpack(packed: Any, tensors: Tensors) -> Any:
    if not isinstance(packed, dict):
        return packed
    if "tensor" in packed:
        return _unpack_tensor(tensors[packed["tensor"]], packed)
    ((kind, items),) = packed.items()
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
