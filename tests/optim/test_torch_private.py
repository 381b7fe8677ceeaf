"""Private names of torch: they exist, and do what they are used for.

A failing test says which name a version of torch has removed or changed, and where and for what
``merit_optim`` uses it. Only the last test imports ``merit_optim``: if that import fails,
``pytest --noconftest`` still runs this file.
"""

import ast
import pkgutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.overrides import BaseTorchFunctionMode

TORCH_PRIVATE = Path(__file__).parents[2] / "src" / "merit_optim" / "optim" / "torch_private.py"

# The location of each name in torch, and its use. The tests below check what it must do.
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
    "_local_tensor": ("torch.distributed.tensor.DTensor", "placements.py updates a rank's part through it"),
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


def test_every_name_is_tested_here() -> None:
    """A name that is added to torch_private.py fails here until it has a test."""
    used: set[str] = set()
    for node in ast.walk(ast.parse(TORCH_PRIVATE.read_text())):
        if isinstance(node, ast.Attribute):
            used.add(node.attr)
        elif isinstance(node, ast.ImportFrom):
            used |= {alias.name for alias in node.names} | set((node.module or "").split("."))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            used.add(node.value)
    private = {name for name in used if name.isidentifier() and name[0] == "_" and name[:2] != "__"}
    assert private - {"_compile", "_C"} == NAMES.keys() | {f"_foreach_{form.name}" for form in FOREACH}


class Form:
    """A call of one of the operations on lists of tensors, and the equivalent for each tensor."""

    def __init__(self, name: str, of_each: Callable[..., Tensor], *arguments: Any, **options: Any) -> None:
        self.name, self.of_each, self.arguments, self.options = name, of_each, arguments, options

    @property
    def id(self) -> str:
        kinds = ["list" if isinstance(x, list) else type(x).__name__ for x in self.arguments]
        return f"{self.name}({', '.join(['list', *kinds])})"


def values(*shapes: tuple[int, ...], seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in shapes]


SHAPES = [(2, 3, 5), (1, 7, 4)]
OTHERS, MORE = values(*SHAPES, seed=1), values(*SHAPES, seed=2)
TO_BROADCAST = values((2, 3, 1), (1, 1, 4), seed=3)
NUMBER, IN_TENSOR = 0.3, torch.tensor(0.3)

FOREACH = [
    Form("abs", torch.abs),
    Form("abs_", torch.abs),
    Form("add", torch.add, OTHERS),
    Form("add_", torch.add, OTHERS),
    Form("add_", torch.add, NUMBER),
    Form("addcmul_", lambda x, y, z, value: torch.addcmul(x, y, z, value=value), OTHERS, MORE, NUMBER),
    Form("clamp_max_", lambda x, limit: x.clamp(max=limit), NUMBER),
    Form("clamp_min_", lambda x, limit: x.clamp(min=limit), NUMBER),
    Form("copy_", lambda x, y: x.copy_(y), OTHERS),
    Form("div", torch.div, OTHERS),
    Form("lerp_", torch.lerp, OTHERS, NUMBER),
    Form("mul", torch.mul, OTHERS),
    Form("mul", torch.mul, NUMBER),
    Form("mul", torch.mul, IN_TENSOR),
    Form("mul_", torch.mul, TO_BROADCAST),
    Form("mul_", torch.mul, NUMBER),
    Form("mul_", torch.mul, IN_TENSOR),
    Form("neg", torch.neg),
    Form("norm", lambda x, order, dtype: torch.linalg.vector_norm(x, order, dtype=dtype), 2.0, dtype=None),
    Form(
        "norm", lambda x, order, dtype: torch.linalg.vector_norm(x, order, dtype=dtype), torch.inf, dtype=None
    ),
    Form(
        "norm",
        lambda x, order, dtype: torch.linalg.vector_norm(x, order, dtype=dtype),
        2.0,
        dtype=torch.float64,
    ),
    Form("sqrt", torch.sqrt),
    Form("sub_", torch.sub, OTHERS),
]


@pytest.mark.parametrize("form", FOREACH, ids=lambda form: form.id)
def test_an_operation_on_a_list_gives_the_bits_of_the_operation_on_each(form) -> None:
    """foreach must give the same bits as the definition."""
    name = f"_foreach_{form.name}"
    operation = in_torch(name)
    tensors = [x.abs() for x in values(*SHAPES)] if form.name == "sqrt" else values(*SHAPES)
    expected = [
        form.of_each(x, *(y[i] if isinstance(y, list) else y for y in form.arguments), **form.options)
        for i, x in enumerate(tensors)
    ]
    before = [x.clone() for x in tensors]
    try:
        result = operation(tensors, *form.arguments, **form.options)
    except TypeError as error:
        pytest.fail(f"{changed(name)} ({error})")
    in_place = form.name.endswith("_")
    for actual, each in zip(tensors if in_place else result, expected, strict=True):
        assert torch.equal(actual, each), changed(name)
    if not in_place:
        assert all(map(torch.equal, tensors, before)), changed(name)


# torch's compiler imports a deprecated part of torch.
dynamo = pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")


@dynamo
def test_disable_dynamo_keeps_a_function_out_of_a_compiled_one() -> None:
    @in_torch("_disable_dynamo")
    def is_traced() -> bool:
        return torch.compiler.is_compiling()

    seen = []

    def function(x: Tensor) -> Tensor:
        # Called apart: torch 2.11 cannot continue in the middle of the call of append.
        seen_here = torch.compiler.is_compiling(), is_traced()
        seen.append(seen_here)
        return x + 1

    torch.compiler.reset()
    torch.compile(function, backend="eager")(torch.ones(1))
    assert seen == [(True, False)], changed("_disable_dynamo")


def test_disable_dynamo_does_not_import_the_compiler() -> None:
    """The public torch.compiler.disable does: ``import merit_optim`` would take seconds longer."""
    program = (
        "import sys, torch; from torch._compile import _disable_dynamo; _disable_dynamo(print); "
        "sys.exit('torch._dynamo' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", program], check=False)
    assert run.returncode == 0, changed("_disable_dynamo")


@pytest.mark.parametrize("differentiable", [False, True])
def test_use_grad_for_differentiable_turns_autograd_on_only_for_differentiable(differentiable) -> None:
    seen = []

    class Own(Optimizer):
        @in_torch("_use_grad_for_differentiable")
        def step(self) -> None:
            seen.append(torch.is_grad_enabled())

    optimizer = Own([nn.Parameter(torch.ones(1))], {"differentiable": differentiable})
    for outside in (False, True):
        with torch.set_grad_enabled(outside):
            optimizer.step()
            assert torch.is_grad_enabled() == outside, changed("_use_grad_for_differentiable")
    assert seen == [differentiable] * 2, changed("_use_grad_for_differentiable")


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


def test_function_modes_are_a_stack_that_can_be_popped_and_pushed() -> None:
    stack, pop, push = map(in_torch, ("_get_current_function_mode_stack", "_pop_mode", "_push_mode"))
    one, other = BaseTorchFunctionMode(), BaseTorchFunctionMode()
    with one, other:
        assert stack() == [one, other], changed("_get_current_function_mode_stack")
        assert [pop(), pop()] == [other, one], changed("_pop_mode")
        push(one)
        push(other)
        assert stack() == [one, other], changed("_push_mode")
    assert stack() == []


@pytest.mark.usefixtures("one_rank")
def test_tensors_that_are_made_of_others_are_known() -> None:
    from torch.distributed.tensor import Replicate, distribute_tensor

    is_wrapper = in_torch("_python_dispatch").is_traceable_wrapper_subclass
    mesh = dist.init_device_mesh("cpu", (1,))
    assert is_wrapper(distribute_tensor(torch.ones(2), mesh, [Replicate()])), changed("_python_dispatch")
    assert not is_wrapper(torch.ones(2)), changed("_python_dispatch")


def test_a_module_that_is_compiled_in_place_says_so() -> None:
    layer = nn.Linear(2, 2)
    assert getattr(layer, "_compiled_call_impl", None) is None, changed("_compiled_call_impl")
    layer.compile(backend="eager")
    assert layer._compiled_call_impl is not None, changed("_compiled_call_impl")


def test_a_tensor_counts_its_changes() -> None:
    x = torch.ones(2)
    before = x._version
    x += 1
    assert x._version == before + 1, changed("_version")


def test_tensors_that_share_memory_are_known() -> None:
    x = torch.ones(4, 6)
    share_memory = in_torch("_is_alias_of")
    assert share_memory(x[:, ::2].reshape(4, 3, 1), x), changed("_is_alias_of")
    assert not share_memory(x.t().reshape(4, 6), x), changed("_is_alias_of")


def test_tensors_without_values_are_known_and_a_count_has_its_value() -> None:
    fake_tensor = pkgutil.resolve_name(f"{in_torch('_subclasses').__name__}.fake_tensor")
    real = torch.ones(2)
    with fake_tensor.FakeTensorMode():
        assert isinstance(torch.ones(2), fake_tensor.FakeTensor), changed("_subclasses")
        count = torch.tensor(0.0)
        torch._foreach_add_([count], 1)
        assert count.item() == 1, changed("_subclasses")
        with fake_tensor.unset_fake_temporarily():
            assert real.sum().item() == 2, changed("_subclasses")
    assert not isinstance(real, fake_tensor.FakeTensor), changed("_subclasses")


def test_the_limit_of_compiled_versions_can_be_raised() -> None:
    import torch._dynamo

    assert isinstance(torch._dynamo.config.recompile_limit, int), lost("_dynamo")


@pytest.mark.usefixtures("one_rank")
@pytest.mark.filterwarnings("ignore")  # FSDP1's warnings about CPUs and about its deprecation
def test_fsdp1_marks_its_flat_parameters() -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    (flat,) = FullyShardedDataParallel(nn.Linear(2, 3), device_id=torch.device("cpu")).parameters()
    assert flat.shape == (9,)
    assert getattr(flat, "_fsdp_flattened", None) is True, lost("_fsdp_flattened")
    assert not hasattr(nn.Parameter(torch.ones(1)), "_fsdp_flattened"), changed("_fsdp_flattened")


@pytest.mark.usefixtures("four_ranks")
def test_fsdp2_has_a_separate_placement_for_tensor_parallel_parameters() -> None:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    layer = parallelize_module(nn.Linear(2, 4, bias=False), mesh["tensor"], ColwiseParallel())
    fully_shard(layer, mesh=mesh["data"])
    first, second = layer.weight.placements
    assert isinstance(first, in_torch("_StridedShard")), changed("_StridedShard")
    assert (first.dim, second) == (0, Shard(0)), changed("_StridedShard")
    assert getattr(first, "split_factor", None) == 2, changed("_StridedShard")


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


@pytest.mark.usefixtures("one_rank")
def test_a_collective_may_return_a_tensor_that_must_be_waited_for() -> None:
    collectives = in_torch("_functional_collectives")
    group = dist.init_device_mesh("cpu", (1,)).get_group()
    coming = collectives.all_reduce(torch.ones(2), "sum", group)
    assert isinstance(coming, collectives.AsyncCollectiveTensor), changed("_functional_collectives")
    assert type(coming.wait()) is Tensor, changed("_functional_collectives")


# --- names that torch looks up in our classes -----------------------------------------------------------


@pytest.mark.parametrize("in_step", [False, True])
def test_grad_scaler_asks_whether_a_step_unscales_by_itself(in_step) -> None:
    """If so, it sets ``grad_scale`` and ``found_inf``, which base.py reads."""
    received = []

    class Own(SGD):
        _step_supports_amp_scaling = in_step

        def step(self) -> None:
            received.append((getattr(self, "grad_scale", None), getattr(self, "found_inf", None)))

    param = nn.Parameter(torch.ones(2))
    optimizer, scaler = Own([param]), torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(param.sum()).backward()
    scaler.step(optimizer)
    ((grad_scale, found_inf),) = received
    message = (
        f"torch.amp.GradScaler of torch {torch.__version__} no longer reads _step_supports_amp_scaling as "
        "it did, which base.py and trust.py define to leave scaling and skipping to the step"
    )
    if in_step:
        assert (grad_scale, found_inf) == (8.0, 0.0), message
        assert param.grad.eq(8).all(), message
    else:
        assert (grad_scale, found_inf) == (None, None), message
        assert param.grad.eq(1).all(), message
    assert not hasattr(optimizer, "grad_scale"), message


@dynamo
def test_torch_compile_runs_init_group_without_tracing_it() -> None:
    """It creates the state in ways that cannot be traced; here it reads a frame."""
    ran = []

    class Own(Optimizer):
        def _init_group(self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor]) -> None:
            ran.append(sys._getframe())
            params += group["params"]
            grads += [param.grad for param in params]

        @torch.no_grad()
        def step(self) -> None:
            for group in self.param_groups:
                params: list[Tensor] = []
                grads: list[Tensor] = []
                self._init_group(group, params, grads)
                for param, grad in zip(params, grads, strict=True):
                    param.sub_(grad)

    param = nn.Parameter(torch.ones(2))
    param.grad = torch.ones(2)
    optimizer = Own([param], {"lr": 1.0})
    torch.compiler.reset()
    step = torch.compile(optimizer.step, backend="eager", fullgraph=True)
    message = (
        f"torch.compile of torch {torch.__version__} no longer runs Optimizer._init_group untraced, which "
        "base.py relies on to create state and to gather the tensors of a step"
    )
    try:
        for _ in range(2):
            step()
    except RuntimeError as error:
        pytest.fail(f"{message} ({error})")
    assert ran, message
    assert param.eq(-1).all(), message


def test_our_classes_have_the_names_that_torch_looks_up() -> None:
    from merit_optim import MERIT, Lion

    for optimizer_class in (MERIT, Lion):
        assert callable(optimizer_class._init_group)
        assert isinstance(optimizer_class._step_supports_amp_scaling, property)
