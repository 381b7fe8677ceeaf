"""One rank of tests/optim/engines/test_sharded_checkpoints.py.

    python forked_ranks.py 4 sharded_checkpoint_worker.py save=FOLDER load=FOLDER fresh full die=FOLDER

A checkpoint is written after three steps by torch.distributed.checkpoint, and read into other layouts;
three more steps must give the bits of six steps in one process that never stopped.
"""

import os
import signal
import sys
from collections.abc import Callable, Collection, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from sharded_cases import report, same, set_gradients, whole
from sharded_worker import Network, fsdp, fsdp_and_tp, fsdp_by_columns, hsdp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.optim import Optimizer

from merit_optim import LAMB, MERIT, SOAPMERIT, Lion, MaxLAMB, NorMuon, OrScale, SophiaG, param_groups
from merit_optim.optim.groups import divided


class Model(Network):
    """With stacked matrices, whose number is not divisible by any number of ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.randn(5, 4, 6))


SHAPES = [tuple(p.shape) for p in Model().parameters()]
MAKE: dict[str, Callable[[nn.Module], Optimizer]] = {
    "MERIT": lambda network: MERIT(
        param_groups(network, weight_decay=0.1), kinds={"vector": {"rate_scale": 3.0}}
    ),
    "MERIT corrected": lambda network: MERIT(network.parameters(), bias_correction=True),
    "MaxLAMB": lambda network: MaxLAMB(network.named_parameters()),
    "LAMB": lambda network: LAMB(network.parameters()),
    "Lion": lambda network: Lion(network.parameters()),
    "SophiaG": lambda network: SophiaG(network.parameters()),
    "NorMuon": lambda network: NorMuon(by_kind(network)),
    "OrScale": lambda network: OrScale(by_kind(network), kinds={"vector": {"rate_scale": 3.0}}),
    "SOAPMERIT": lambda network: SOAPMERIT(by_kind(network), precondition_frequency=2),
}


def by_kind(network: nn.Module) -> list[dict[str, Any]]:
    params = list(network.parameters())
    kinds = {1: "vector", 2: "hidden", 3: "experts"}
    return divided({"params": params}, {param: {"kind": kinds[param.ndim]} for param in params})


LAYOUTS = {way.__name__: way for way in (fsdp, fsdp_by_columns, hsdp, fsdp_and_tp)}

Case = tuple[str, torch.dtype, bool]
"""Optimizer, dtype of the weights, whether the optimizer's state dict is flattened."""
CASES: dict[str, Case] = {
    "merit": ("MERIT", torch.float32, False),
    "merit-bf16": ("MERIT", torch.bfloat16, False),
    "merit-flattened": ("MERIT corrected", torch.float32, True),
    "maxlamb": ("MaxLAMB", torch.float32, False),
    "lion": ("Lion", torch.float32, False),
    "normuon-bf16": ("NorMuon", torch.bfloat16, False),
    "orscale-flattened": ("OrScale", torch.float32, True),
    "soap-merit": ("SOAPMERIT", torch.float32, False),
}


def build(case: Case, layout: str | None, seed: int) -> tuple[nn.Module, Optimizer]:
    name, dtype, _ = case
    torch.manual_seed(seed)
    network = Model().to(dtype)
    if layout is not None:
        LAYOUTS[layout](network, dist.get_world_size())
    return network, MAKE[name](network)


def take_steps(network: nn.Module, optimizer: Optimizer, steps: range) -> None:
    for step in steps:
        set_gradients(list(network.parameters()), SHAPES, step)
        optimizer.step()
    optimizer.zero_grad()


def state_of(case: Case, network: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    options = StateDictOptions(flatten_optimizer_state_dict=case[2])
    model_state, optimizer_state = get_state_dict(network, optimizer, options=options)
    return {"model": model_state, "optimizer": optimizer_state}


def save(folder: Path, layout: str | None, names: Collection[str] = CASES) -> None:
    for name in names:
        network, optimizer = build(CASES[name], layout, seed=0)
        take_steps(network, optimizer, range(3))
        dcp.save(state_of(CASES[name], network, optimizer), checkpoint_id=folder / str(layout) / name)


def continued(folder: Path, name: str, layout: str | None) -> list[str]:
    """Load a checkpoint, take three more steps, and compare with a run in one process."""
    case = CASES[name]
    network, optimizer = build(case, layout, seed=1)
    state = state_of(case, network, optimizer)
    dcp.load(state, checkpoint_id=folder / name)
    options = StateDictOptions(flatten_optimizer_state_dict=case[2])
    set_state_dict(
        network,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
        options=options,
    )
    take_steps(network, optimizer, range(3, 6))
    return differences(case, network, optimizer)


@cache
def never_stopped(case: Case) -> tuple[nn.Module, Optimizer]:
    """Six steps in one process."""
    network, optimizer = build(case, None, seed=0)
    take_steps(network, optimizer, range(6))
    return network, optimizer


def differences(case: Case, network: nn.Module, optimizer: Optimizer) -> list[str]:
    """The weights and states that differ from those of whole parameters."""
    reference, reference_optimizer = never_stopped(case)
    wrong = []
    pairs = zip(network.named_parameters(), reference.parameters(), strict=True)
    for (param_name, param), full in pairs:
        wrong += [] if same(case[0], param, full) else [param_name]
        for key, expected in reference_optimizer.state[full].items():
            actual = optimizer.state[param][key]
            is_same = actual.dtype == expected.dtype and same(case[0], actual, expected)
            wrong += [] if is_same else [f"{param_name} {key}"]
    return wrong


def load(folder: Path, layouts: list[str]) -> Iterator[tuple[str, list[str]]]:
    for saved_in in sorted(folder.iterdir()):
        for layout in layouts:
            for name in sorted(case.name for case in saved_in.iterdir()):
                yield f"{name}: {saved_in.name} -> {layout}", continued(saved_in, name, layout)


def fresh() -> Iterator[tuple[str, list[str]]]:
    """For the state dict of an optimizer without state, torch takes a step, which must change no weight."""
    for name in MAKE:
        for dtype in (torch.float32, torch.bfloat16):
            case = name, dtype, False
            network, optimizer = build(case, "fsdp", seed=0)
            with torch.no_grad():
                next(network.parameters()).zero_()  # 0 / 0, were it not guarded
            before = [whole(p).clone() for p in network.parameters()]
            state_of(case, network, optimizer)
            after = [whole(p) for p in network.parameters()]
            bits = {torch.float32: torch.int32, torch.bfloat16: torch.int16}[dtype]
            pairs = enumerate(zip(before, after, strict=True))
            wrong = [str(i) for i, (x, y) in pairs if not torch.equal(x.view(bits), y.view(bits))]
            yield f"{name}, {dtype}", wrong


def through_whole_states() -> Iterator[tuple[str, list[str]]]:
    """Save full tensors on the CPU of the first rank, which sends them to the others on loading."""
    saving = StateDictOptions(full_state_dict=True, cpu_offload=True)
    loading = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    for name, case in CASES.items():
        if case[2]:
            continue  # torch does not send flattened states, not even AdamW's
        network, optimizer = build(case, "fsdp", seed=0)
        take_steps(network, optimizer, range(3))
        model_state, optimizer_state = get_state_dict(network, optimizer, options=saving)
        other, other_optimizer = build(case, "fsdp_by_columns", seed=1)
        # One after the other: with both, torch assumes that a rank without weights loads none.
        set_model_state_dict(other, model_state, options=loading)
        set_optimizer_state_dict(other, other_optimizer, optimizer_state, options=loading)
        take_steps(other, other_optimizer, range(3, 6))
        yield f"{name}, whole", differences(case, other, other_optimizer)


def die_in_a_step(folder: Path) -> None:
    """Save after three steps; in the fifth, one rank is killed while the others wait for its sizes."""
    case = CASES["merit"]
    network, optimizer = build(case, "fsdp", seed=0)
    take_steps(network, optimizer, range(3))
    dcp.save(state_of(case, network, optimizer), checkpoint_id=folder / "killed" / "merit")
    take_steps(network, optimizer, range(3, 4))
    if dist.get_rank() == 1:
        dist.all_reduce = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
    take_steps(network, optimizer, range(4, 5))
    raise AssertionError("a step ended without one of its ranks")


def main() -> None:
    compared: dict[str, list[str]] = {}
    for argument in sys.argv[1:]:
        section, _, folder = argument.partition("=")
        if section == "save":
            for layout in ["fsdp", *(["hsdp", "fsdp_and_tp"] if dist.get_world_size() == 4 else [])]:
                save(Path(folder), layout)
        elif section == "load":
            compared |= dict(load(Path(folder), ["fsdp", "fsdp_by_columns"]))
        elif section == "fresh":
            compared |= dict(fresh())
        elif section == "full":
            compared |= dict(through_whole_states())
        elif section == "die":
            die_in_a_step(Path(folder))
    report(compared)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
