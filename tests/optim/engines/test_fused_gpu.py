"""The fused engine on a CUDA GPU: graphs, streams, memory, host syncs, and the sizes of real models."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from optimizer_cases import assert_same_bits, bits, name_of, random_tensor, snapshot
from torch import Tensor, nn

pytest.importorskip("triton", reason="the fused engine needs triton, which is not installed")

from fused_cases import Pair, gradient, parameters

from merit_optim import LAMB, MERIT

pytestmark = pytest.mark.gpu

CUDA = "cuda:0"
MIB = 2**20
SHAPES = [(96, 64), (33, 67), (100,), (592,), (3, 20, 48), ()]


def gpt2_small(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    """Random weights with GPT-2 small's shapes, the same each time, with gradients."""
    width, generator = 768, torch.Generator(CUDA).manual_seed(0)
    block = [(width,), (3 * width, width), (width, width), (width,), (4 * width, width), (width, 4 * width)]
    params = []
    for shape in [(50304, width), (1024, width), *(block * 12), (width,)]:
        weight, grad = (torch.randn(shape, generator=generator, device=CUDA, dtype=dtype) for _ in range(2))
        params.append(nn.Parameter(weight * 0.02))
        params[-1].grad = grad * 1e-3
    return params


def set_gradients(params: list[nn.Parameter], step: int) -> None:
    """New tensors each time."""
    for i, param in enumerate(params):
        param.grad = gradient(param, 100 * step + i)


def plain_run(num_steps: int, **options: Any) -> tuple[list[Tensor], dict[str, Any]]:
    """Steps on one stream, with a sync after each."""
    params = parameters(SHAPES, CUDA)
    optimizer = MERIT(params, fused=True, **options)
    for step in range(num_steps):
        set_gradients(params, step)
        optimizer.step()
        torch.cuda.synchronize()
    return snapshot(optimizer)


@contextmanager
def no_waiting_for_the_device() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


GRAPH_OPTIONS: list[dict[str, Any]] = [
    {},
    {"bias_correction": True, "max_grad_norm": 1.0},
    {"nonfinite": "skip", "element_wise": False, "norm": "l2"},
]


@pytest.mark.parametrize("options", GRAPH_OPTIONS, ids=repr)
def test_a_captured_step_replays_like_the_original(options) -> None:
    """With the current learning rate and gradients, and with steps outside the graph in between."""
    rates = [0.1, 0.3, 0.05, 0.2, 0.15, 0.4]

    def build() -> tuple[list[nn.Parameter], Tensor, MERIT]:
        params = parameters(SHAPES, CUDA)
        lr = torch.tensor(rates[0], device=CUDA)
        return params, lr, MERIT(params, lr=lr, fused=True, capturable=True, **options)

    params, lr, optimizer = build()
    set_gradients(params, 0)
    static = [p.grad for p in params]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # the first step compiles
        optimizer.step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()

    reference_params, reference_lr, reference = build()
    for step, rate in enumerate(rates):
        reference_lr.fill_(rate)
        set_gradients(reference_params, step)
        reference.step()
        if step == 0:
            continue
        lr.fill_(rate)
        if step == 3:  # outside the graph, with gradients elsewhere
            set_gradients(params, step)
            optimizer.step()
            continue
        for param, grad, other in zip(params, static, reference_params, strict=True):
            param.grad = grad.copy_(other.grad)
        graph.replay()
    assert_same_bits(snapshot(optimizer)[0], snapshot(reference)[0])
    assert_same_bits(snapshot(optimizer)[1]["state"], snapshot(reference)[1]["state"])


def test_a_host_far_ahead_of_the_device_sends_the_addresses_of_each_step() -> None:
    """The device sleeps while steps with gradients at new addresses and new learning rates queue up."""
    params = parameters(SHAPES, CUDA)
    optimizer = MERIT(params, lr=0.1, fused=True)
    grads = [[gradient(p, 100 * step + i) for i, p in enumerate(params)] for step in range(8)]
    expected = parameters(SHAPES, CUDA)
    waiting = MERIT(expected, lr=0.1, fused=True)
    for ahead, stepped, its_params in ((False, waiting, expected), (True, optimizer, params)):
        for step, of_step in enumerate(grads):
            for param, grad in zip(its_params, of_step, strict=True):
                param.grad = grad
            stepped.param_groups[0]["lr"] = 0.1 / (1 + step)
            stepped.step()
            if not ahead:
                torch.cuda.synchronize()
            elif step == 0:
                torch.cuda._sleep(500_000_000)
    assert_same_bits(snapshot(optimizer), snapshot(waiting))


def test_gradients_set_to_none_come_back_at_new_addresses() -> None:
    """Through autograd, with other allocations in between so that addresses change."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(48, 96), nn.GELU(), nn.Linear(96, 32, bias=False)).to(CUDA)
    pair = Pair(list(model.parameters()))
    inputs = random_tensor((16, 48), 0, device=CUDA)
    kept: list[Tensor] = []
    for _ in range(4):
        model.zero_grad(set_to_none=True)
        model(inputs).square().mean().backward()
        pair.step([p.grad for p in pair.params])
        kept += [p.grad for p in pair.params]
    assert len({grad.data_ptr() for grad in kept}) == len(kept)


@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 1.0}, {"bias_correction": True}], ids=repr)
@pytest.mark.parametrize("build", [MERIT, LAMB], ids=name_of)
def test_a_step_takes_at_most_two_mebibytes_besides_the_buffer(build, options) -> None:
    """For temporaries, and for the tables that the engine keeps."""
    optimizer = build(gpt2_small(), fused=True, **options)
    optimizer.step()
    (engine,) = optimizer._engines.values()
    tables = [engine._shared.hyper]
    for launch in engine._launches:
        grids = (launch.moments_grid, launch.apply_grid)
        tables += [
            launch.pointers,
            *launch.sums,
            *(x for grid in grids for x in (grid.schedule, grid.weights)),
        ]
    assert sum(table.nbytes for table in tables) <= 2 * MIB
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    optimizer.step()
    assert torch.cuda.max_memory_allocated() - before <= 2 * MIB


SYNC_OPTIONS: list[dict[str, Any]] = [
    {},
    {"nonfinite": "skip"},
    {"max_grad_norm": 1.0, "bias_correction": True},
    {"norm": "l2", "element_wise": False},
]


@pytest.mark.parametrize("options", SYNC_OPTIONS, ids=repr)
@pytest.mark.parametrize("tensor_lr", [True, False])
@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
def test_a_step_never_waits_for_the_device(options, tensor_lr) -> None:
    params = parameters(SHAPES, CUDA)
    lr = torch.tensor(0.1, device=CUDA) if tensor_lr else 0.1
    optimizer = MERIT(params, lr=lr, fused=True, **options)
    set_gradients(params, 0)
    optimizer.step()
    grads = [[gradient(p, 100 * step + i) for i, p in enumerate(params)] for step in (1, 2)]
    with no_waiting_for_the_device():
        for step, of_step in enumerate(grads):
            for param, grad in zip(params, of_step, strict=True):
                param.grad = grad
            if not tensor_lr:
                optimizer.param_groups[0]["lr"] = 0.1 / (2 + step)
            optimizer.step()


@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
def test_waiting_for_the_device_would_be_noticed() -> None:
    with no_waiting_for_the_device(), pytest.raises(RuntimeError, match="synchroniz"):
        torch.ones((), device=CUDA).item()


def same_bits(a: list[Tensor], b: list[Tensor]) -> bool:
    """On the device."""
    return all(torch.equal(bits(x), bits(y)) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("build", [MERIT, LAMB], ids=name_of)
def test_gpt2_small_repeats_bit_for_bit(build) -> None:
    def run() -> list[Tensor]:
        params = gpt2_small()
        optimizer = build(params, fused=True)
        for _ in range(3):
            optimizer.step()
        return [p.detach() for p in params] + [x for s in optimizer.state.values() for x in s.values()]

    assert same_bits(run(), run())


@pytest.mark.parametrize("build", [MERIT, LAMB], ids=name_of)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gpt2_small_changes_as_with_the_eager_engine(build, dtype) -> None:
    """Weights and state; a bfloat16 weight may be rounded to either side."""
    pair = Pair(gpt2_small(dtype), build, max_grad_norm=1.0)
    grads = [p.grad for p in pair.params]
    for _ in range(2):
        pair.step(grads)
    assert not pair.engine._unfused


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_vectors_of_16_times_any_number_are_read_in_bounds(dtype) -> None:
    """Each is folded into rows; the memory behind it must not change."""
    for factor in (1, 9, 17, 37, 100, 127):
        memory = torch.full((16 * factor + 64,), 3.0, dtype=dtype, device=CUDA)
        pair = Pair([nn.Parameter(memory[: 16 * factor])])
        pair.step()
        assert pair.engine._launches[0].variant.aligned
        assert (memory[16 * factor :] == 3).all()


def test_a_weight_of_more_than_2_to_the_31_elements_is_updated_to_its_end() -> None:
    if torch.cuda.mem_get_info()[0] < 60 * 2**30:
        pytest.skip("needs 60 GiB of free GPU memory")
    rows, columns = 2**16 + 1, 2**15
    generator = torch.Generator(CUDA).manual_seed(0)
    weight, grad = (
        torch.empty(rows, columns, dtype=torch.bfloat16, device=CUDA).normal_(generator=generator)
        for _ in range(2)
    )
    last_row = weight[-1].clone()
    params = [nn.Parameter(weight), nn.Parameter(weight.clone())]
    for param, fused in zip(params, (True, False), strict=True):
        param.grad = grad
        MERIT([param], lr=0.5, fused=fused).step()
    param, expected = (p.detach() for p in params)
    for part, expected_part in zip(param.split(4096), expected.split(4096), strict=True):
        torch.testing.assert_close(part, expected_part, rtol=2**-7, atol=1e-5)
    assert (param[-1] != last_row).float().mean() > 0.9


def alternating_streams(step: int, streams: list[torch.cuda.Stream]) -> torch.cuda.Stream:
    stream = streams[step % len(streams)]
    stream.wait_stream(streams[(step - 1) % len(streams)])
    return stream


def test_steps_on_several_streams_equal_steps_on_one() -> None:
    """One after another, each on another stream than the previous one."""
    params = parameters(SHAPES, CUDA)
    optimizer = MERIT(params, fused=True)
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    for step in range(6):
        with torch.cuda.stream(alternating_streams(step, streams)):
            set_gradients(params, step)
            optimizer.step()
    torch.cuda.synchronize()
    assert_same_bits(snapshot(optimizer), plain_run(6))


def test_two_optimizers_may_step_at_once_on_two_streams() -> None:
    optimizers = [MERIT(parameters(SHAPES, CUDA), fused=True) for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    for step in range(4):
        for optimizer, stream in zip(optimizers, streams, strict=True):
            with torch.cuda.stream(stream):
                set_gradients(optimizer.param_groups[0]["params"], step)
                optimizer.step()
    torch.cuda.synchronize()
    expected = plain_run(4)
    for optimizer in optimizers:
        assert_same_bits(snapshot(optimizer), expected)


FALLBACKS: dict[str, tuple[Callable[[], Tensor], dict[str, Any]]] = {
    "float64": (lambda: random_tensor((4, 6), 0, dtype=torch.float64, device=CUDA), {}),
    "not contiguous": (lambda: random_tensor((6, 4), 0, device=CUDA).T, {}),
    "sums of rows and columns": (lambda: random_tensor((4, 6), 0, device=CUDA), {"norm": "l2"}),
}


@pytest.mark.parametrize(("make", "options"), FALLBACKS.values(), ids=FALLBACKS.keys())
def test_parameters_that_cannot_be_fused_use_the_eager_engine_in_the_same_step(make, options) -> None:
    """With fused=None, silently, and bit for bit as with fused=False."""
    params, plain = ([nn.Parameter(make()), nn.Parameter(torch.ones(5, device=CUDA))] for _ in range(2))
    optimizer, eager = MERIT(params, **options), MERIT(plain, fused=False, **options)
    for step in range(2):
        set_gradients(params, step)
        set_gradients(plain, step)
        optimizer.step()
        eager.step()
    (engine,) = optimizer._engines.values()
    assert 0 in engine._unfused
    assert_same_bits(params[0].detach(), plain[0].detach())


def test_the_fused_engine_is_chosen_if_it_can_run() -> None:
    optimizer = MERIT(parameters([(4, 6)], CUDA))
    set_gradients(optimizer.param_groups[0]["params"], 0)
    optimizer.step()
    assert optimizer._engines
    for other in ({"fused": False}, {"foreach": True}, {"foreach": False}):
        optimizer = MERIT(parameters([(4, 6)], CUDA), **other)
        set_gradients(optimizer.param_groups[0]["params"], 0)
        optimizer.step()
        assert not optimizer._engines
