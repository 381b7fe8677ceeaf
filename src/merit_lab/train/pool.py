"""What the runs of one process share: models, compiled and ready to train, and data."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from merit_lab.data import Dataset
from merit_lab.models import AnyModelConfig, Model, ModelConfig, build
from merit_lab.train.config import TrainConfig
from merit_lab.train.parallel import Ranks, share
from merit_optim.optim.torch_private import compile_or_fail

_CPU_TOKENS = 16384  # larger micro-batches are no faster on a CPU
_SHARE_OF_MEMORY = 0.9
_COPIES_TO_COME = 3  # copies of the weights that are allocated later: two moments, and the buffers of DDP


class Prepared(NamedTuple):
    """A model with the initial weights of a run, ready to train."""

    model: Model
    module: nn.Module  # what is called: the model, wrapped for the ranks
    micro_batch: int
    is_compiled: bool
    is_bf16: bool


class Pool:
    """Models by their configuration, and data by their folder: a later run costs what its steps cost.

    Runs of one shape share the model, its compiled code, its micro-batch and the tokens on the device. A run
    has the bits of a run alone: its weights are drawn on the CPU from its own seed, as those of a new model
    are, and copied into the parameters that are there. To observe attention takes another graph, so it is
    observed only if a run asks for it: intervals that are left open are 0.

    Example:
        pool = Pool()
        for seed in range(5):
            train(replace(config, seed=seed), folder / f"seed{seed}", pool=pool)

    Args:
        is_shared: whether several runs use it; then all tokens of the data are kept on the device too.
    """

    def __init__(self, *, is_shared: bool = True) -> None:
        self.is_shared = is_shared
        self._has_told = False
        self.clear()

    def clear(self) -> None:
        """Forget all models and data."""
        self._models: dict[tuple[AnyModelConfig, bool], tuple[Model, nn.Module]] = {}
        self._micro_batches: dict[object, int] = {}
        self._data: dict[Path, tuple[object, Dataset]] = {}

    def adapt(self, config: TrainConfig, ranks: Ranks) -> TrainConfig:
        """Return the configuration of one run of several."""
        if not self.is_shared:
            return config
        if not self._has_told and not can_be_reused(config, ranks):
            self._has_told = True
            if ranks.is_first:
                why = "models of transformers" if ranks.size == 1 else "models on several ranks"
                print(f"{why} are built anew for every run: they cannot be reused", file=sys.stderr)
        return as_in_pool(config)

    def prepare(self, config: TrainConfig, ranks: Ranks) -> Prepared:
        """Return the model of a run with its initial weights."""
        on_cuda = ranks.device.type == "cuda"
        is_compiled = on_cuda if config.compile is None else config.compile
        is_bf16 = on_cuda if config.precision == "auto" else config.precision == "bf16"
        torch.manual_seed(config.seed)
        model = build(config.model)
        if not can_be_reused(config, ranks):
            micro_batch = choose_micro_batch(config, model, ranks, bf16=is_bf16)
            return Prepared(
                model, _placed(model, config, ranks, is_compiled), micro_batch, is_compiled, is_bf16
            )
        shape = (config.model, config.batch, config.micro_batch, is_bf16)
        if shape not in self._micro_batches:  # tried on the new model, which is not compiled yet
            self._micro_batches[shape] = choose_micro_batch(config, model, ranks, bf16=is_bf16)
        key = (config.model, is_compiled)
        kept = self._models.get(key)
        if kept is not None and _is_like(kept[0], model):
            kept[0].load_state_dict(model.state_dict())
            kept[0].zero_grad()
        else:
            kept = self._models[key] = model, _placed(model, config, ranks, is_compiled)
        return Prepared(*kept, self._micro_batches[shape], is_compiled, is_bf16)

    def open(self, folder: Path) -> Dataset:
        """Open a folder of data, once while its files stay as they are."""
        folder = folder.resolve()
        files = sorted(folder.iterdir()) if folder.is_dir() else []
        state = [(file.name, (about := file.stat()).st_size, about.st_mtime_ns) for file in files]
        if folder not in self._data or self._data[folder][0] != state:
            self._data[folder] = state, Dataset.open(folder)
        return self._data[folder][1]


def as_in_pool(config: TrainConfig) -> TrainConfig:
    """Return a configuration that observes attention only where it was asked to."""
    measure = config.measure
    every: Any = {name: 0 for name in ("attention_every", "entropy_every") if getattr(measure, name) is None}
    return dataclasses.replace(config, measure=dataclasses.replace(measure, **every))


def can_be_reused(config: TrainConfig, ranks: Ranks) -> bool:
    """Whether the model of a run can be that of a later run too.

    Models of transformers have state that their weights do not show, and the wrappers of several ranks keep
    buffers of their own.
    """
    return isinstance(config.model, ModelConfig) and ranks.size == 1


def _placed(model: Model, config: TrainConfig, ranks: Ranks, is_compiled: bool) -> nn.Module:
    if is_compiled:
        compile_or_fail()
    return share(model, config.parallel, ranks, compiled=is_compiled)


def _is_like(kept: Model, new: Model) -> bool:
    """Whether an optimizer has left the parameters as they are made: their layout, and no hooks on them."""

    def layout(model: Model) -> list[object]:
        return [(name, p.shape, p.stride(), p.dtype, p.requires_grad) for name, p in model.named_parameters()]

    hooks = ("_backward_hooks", "_post_accumulate_grad_hooks")
    is_hooked = any(getattr(parameter, hook, None) for parameter in kept.parameters() for hook in hooks)
    return layout(kept) == layout(new) and not is_hooked


def choose_micro_batch(config: TrainConfig, model: Model, ranks: Ranks, *, bf16: bool) -> int:
    """Return the configured size, or the largest power of two that fits; the same on every rank.

    Call this before the model is wrapped for several ranks: until then a rank that runs out of memory does
    not leave others waiting.
    """
    begin, end = ranks.rows(config.batch)
    rows = end - begin
    if config.micro_batch is not None:
        return min(config.micro_batch, rows)
    if ranks.device.type == "cpu":
        return max(1, min(rows, _CPU_TOKENS // config.model.context))
    size = 1 << (rows.bit_length() - 1)
    while size > 1 and not _fits(model, size, ranks.device, bf16=bf16):
        size //= 2
    return -ranks.maximum(-size)[0]


def _fits(model: Model, size: int, device: torch.device, *, bf16: bool) -> bool:
    """Whether a forward and backward pass leave room; tried uncompiled, which needs more than compiled."""
    model.to(device)
    tokens = torch.zeros(size, model.config.context, dtype=torch.int64, device=device)
    torch.cuda.reset_peak_memory_stats(device)
    try:
        with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
            loss = model(tokens, tokens).loss
        assert loss is not None
        loss.backward()
    except torch.cuda.OutOfMemoryError:
        return False
    finally:
        peak = torch.cuda.max_memory_allocated(device)
        model.zero_grad()
        torch.cuda.empty_cache()
    weights = sum(parameter.nbytes for parameter in model.parameters())
    total = torch.cuda.get_device_properties(device).total_memory
    share = torch.cuda.get_per_process_memory_fraction(device)  # below 1 where workers share the GPU
    return peak + _COPIES_TO_COME * weights < _SHARE_OF_MEMORY * share * total
