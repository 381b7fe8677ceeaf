"""Private names of torch exist.

A failing test says which name a version of torch has removed, and where and for what ``merit_optim`` uses it.
No test imports ``merit_optim``: if that import fails, ``pytest --noconftest`` still runs this file. What a
name does is tested where it is used, or at the end where that needs a GPU or FSDP.
"""

import ast
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD

TORCH_PRIVATE = Path(__file__).parents[2] / "src" / "merit_optim" / "optim" / "torch_private.py"

# The location of each name in torch, and its use.
NAMES: dict[str, tuple[str, str]] = {
    "_disable_dynamo": ("torch._compile", "base.py keeps a step out of torch.compile with it"),
    "_use_grad_for_differentiable": ("torch.optim.optimizer", "base.py decorates every step with it"),
    "_accelerator_graph_capture_health_check": (
        "torch.optim.Optimizer",
        "base.py begins a step with it, to refuse a CUDA graph of one that is not capturable",
    ),
    "_get_current_function_mode_stack": (
        "torch.overrides",
        "interception.py finds its own mode in the stack of function modes with it",
    ),
    "_pop_mode": ("torch.overrides", "interception.py takes its function mode off the stack by it"),
    "_push_mode": (
        "torch.overrides",
        "interception.py restores the modes above its own with it",
    ),
    "_StridedShard": (
        "torch.distributed.tensor.placement_types",
        "placements.py recognizes by it parameters that FSDP2 shards after tensor parallelism",
    ),
    "_functional_collectives": ("torch.distributed", "placements.py waits for its AsyncCollectiveTensor"),
    "_local_tensor": ("DTensor", "placements.py updates a rank's part through it"),
    "_fsdp_flattened": ("a parameter of FSDP1", "trust.py refuses flat parameters by it"),
    "_python_dispatch": ("torch.utils", "the monitor knows tensors that are made of others by it"),
    "_compiled_call_impl": (
        "torch.nn.Module",
        "the monitor refuses modules that were compiled in place by it",
    ),
    "_is_alias_of": ("torch._C", "the eager engine finds by it which tensors it had to copy"),
    "_subclasses": ("torch", "a step knows by its fake_tensor which tensors have no values"),
    "_version": ("torch.Tensor", "the lab's closures know by it whether weights were changed"),
    "_dynamo": ("torch", "the lab raises its limit of compiled versions, which torch.compiler does not have"),
}
FOREACH_IS_FOR = "eager/foreach.py and gradients.py update many tensors in one launch with it"


def lost(name: str, how: str = "no longer has") -> str:
    """The message of a failing test."""
    where, use = NAMES.get(name, ("torch", FOREACH_IS_FOR))
    return (
        f"torch {torch.__version__} {how} {name} of {where}: {use}. Compare src/merit_optim/optim/"
        "torch_private.py with this version of torch."
    )


def changed(name: str) -> str:
    return lost(name, "has changed the behaviour of")


def in_torch(name: str) -> Any:
    """The object of this name in torch; the test fails with a message if there is none."""
    where, _ = NAMES.get(name, ("torch", ""))
    try:
        return pkgutil.resolve_name(f"{where}.{name}")
    except (ImportError, AttributeError):
        pytest.fail(lost(name))


def test_every_name_is_listed_here() -> None:
    """A name that is added to torch_private.py fails here until it is listed."""
    used: set[str] = set()
    for node in ast.walk(ast.parse(TORCH_PRIVATE.read_text())):
        if isinstance(node, ast.Attribute):
            used.add(node.attr)
        elif isinstance(node, ast.ImportFrom):
            used |= {alias.name for alias in node.names} | set((node.module or "").split("."))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            used.add(node.value)
    private = {name for name in used if name.isidentifier() and name[0] == "_" and name[:2] != "__"}
    foreach = {name for name in private if name.startswith("_foreach_")}
    assert private - foreach - {"_compile", "_C"} == NAMES.keys()
    for name in foreach:
        in_torch(name)


@pytest.mark.parametrize("name", [name for name, (where, _) in NAMES.items() if where.startswith("torch")])
def test_a_name_exists(name) -> None:
    in_torch(name)


def test_disable_dynamo_does_not_import_the_compiler() -> None:
    """The public torch.compiler.disable does: ``import merit_optim`` would take seconds longer."""
    program = (
        "import sys, torch; from torch._compile import _disable_dynamo; _disable_dynamo(print); "
        "sys.exit('torch._dynamo' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", program], check=False)
    assert run.returncode == 0, changed("_disable_dynamo")


@pytest.mark.parametrize("capturable", [False, True])
def test_the_check_of_a_graph_capture_refuses_a_step_that_is_not_capturable(monkeypatch, capturable) -> None:
    """Without a GPU: the accelerator, which torch 2.11 knows by its name, is patched to report a capture."""
    name = "_accelerator_graph_capture_health_check"
    check = in_torch(name)
    optimizer = SGD([nn.Parameter(torch.ones(1))])
    optimizer.param_groups[0]["capturable"] = capturable
    check(optimizer)  # no capture: no error
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: SimpleNamespace(type="cuda"))
    stream = SimpleNamespace(is_capturing=lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda: stream)
    for about in ("is_available", "is_current_stream_capturing"):
        monkeypatch.setattr(torch.cuda, about, lambda: True)
    try:
        check(optimizer)
        refused = False
    except RuntimeError as error:
        refused = "capturable is False" in str(error)
    assert refused != capturable, changed(name)


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.filterwarnings("ignore")  # FSDP1's warnings about CPUs and about its deprecation
def test_fsdp1_marks_its_flat_parameters() -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    (flat,) = FullyShardedDataParallel(nn.Linear(2, 3), device_id=torch.device("cpu")).parameters()
    assert flat.shape == (9,)
    assert getattr(flat, "_fsdp_flattened", None) is True, lost("_fsdp_flattened")
    assert not hasattr(nn.Parameter(torch.ones(1)), "_fsdp_flattened"), changed("_fsdp_flattened")


@pytest.mark.usefixtures("one_rank")
def test_a_dtensor_has_its_local_tensor() -> None:
    """The same object every time and without autograd: a step keeps its address and changes it in place."""
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = dist.init_device_mesh("cpu", (1,))
    param = nn.Parameter(distribute_tensor(torch.ones(2, 3), mesh, [Shard(0)]))
    local = getattr(param, "_local_tensor", None)
    assert type(local) is Tensor, lost("_local_tensor")
    assert local is param._local_tensor, changed("_local_tensor")
    with torch.no_grad():
        local.mul_(2)
    assert param.full_tensor().eq(2).all(), changed("_local_tensor")
