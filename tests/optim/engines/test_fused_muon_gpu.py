"""Muon's direction on a CUDA GPU: accuracy in bfloat16, bits, graphs, memory, and host syncs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from optimizer_cases import (
    HIDDEN,
    Hidden,
    assert_same_bits,
    bits,
    name_of,
    params_of,
    random_tensor,
    snapshot,
)
from torch import Tensor, nn

pytest.importorskip("triton", reason="the fused engine needs triton, which is not installed")

from fused_cases import gradient, parameters

from merit_optim import Muon, MuonMERIT, NorMuon
from merit_optim.optim.axes.directions.newton_schulz import COEFFICIENTS, polar
from merit_optim.optim.engines.fused.engine import FusedEngine
from merit_optim.optim.engines.fused.launch import HeldLaunch
from merit_optim.optim.engines.fused.newton_schulz import Iteration, Polar

pytestmark = pytest.mark.gpu

CUDA = "cuda:0"
MIB = 2**20
EPS = 1e-7

muon_merit, muon, normuon = (
    Hidden(MuonMERIT, neuron_beta=None, ratio_bounds=None),
    Hidden(Muon),
    Hidden(NorMuon),
)

SPHERE = {"hold": "sphere", "ratio": "none", "clip": None}

# The limit of this engine's error relative to the eager one's, which rounds every product to bfloat16; and
# half an ulp of bfloat16, the dtype of both results.
ERROR_SHARE, ROUNDING = 1.0, 2**-9


def size(x: Tensor) -> float:
    return torch.linalg.vector_norm(x.detach().double()).item()


def matrices(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Created on the device, because large ones take seconds on the host."""
    generator = torch.Generator(CUDA).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=CUDA).to(dtype)


def model() -> list[nn.Parameter]:
    """Two blocks of GPT-2 small, experts, and a matrix that no tile divides; with gradients."""
    width = 768
    block = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width), (width,)]
    params = []
    for i, shape in enumerate([*block, *block, (5, 512, 384), (333, 517)]):
        weight, grad = (matrices(*shape, seed=10 * i + j, dtype=torch.float32) for j in range(2))
        params.append(nn.Parameter(weight * 0.02))
        params[-1].grad = grad * 1e-3
    return params


def set_gradients(params: list[nn.Parameter], step: int) -> None:
    """New tensors each time."""
    for i, param in enumerate(params):
        param.grad = gradient(param, 100 * step + i)


# --- exactness --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape",
    [(256, 512), (512, 256), (768, 768), (300, 520), (520, 300), (129, 1000), (1, 700), (700, 1), (3, 5)],
    ids=str,
)
def test_polar_factors_are_as_accurate_as_the_eager_engine_s(shape) -> None:
    """Against products in float64."""
    for name, coefficients in COEFFICIENTS.items():
        n = matrices(3, *shape)
        exact = polar(n.double(), coefficients, 5, torch.float64, EPS)
        eager = polar(n, coefficients, 5, torch.bfloat16, EPS)
        fused = Polar(3, Iteration(*shape, coefficients, 5, EPS))(n)
        errors = [size(x.double() - exact) / size(exact) for x in (fused, eager)]
        assert errors[0] <= ERROR_SHARE * errors[1] + ROUNDING, (name, errors)


@pytest.mark.parametrize("build", [muon_merit, muon, normuon], ids=name_of)
def test_steps_are_as_accurate_as_the_eager_engine_s(build) -> None:
    """Against products in float32: for each weight, but on average with ratios of single elements."""

    def changes(**options: Any) -> list[Tensor]:
        params = model()
        before = [p.detach().clone() for p in params]
        optimizer = build(params, lr=0.05, matrix_dims=2, **options)
        optimizer.step()
        return [p.detach() - start for p, start in zip(params, before, strict=True) if p.ndim > 1]

    exact = changes(fused=False, ns_dtype="float32")
    fused, eager = (
        [size(x - y) / size(y) for x, y in zip(changes(fused=fused), exact, strict=True)]
        for fused in (True, False)
    )
    if build is muon_merit:
        fused, eager = ([sum(errors) / len(errors)] for errors in (fused, eager))
    for of_fused, of_eager in zip(fused, eager, strict=True):
        assert of_fused <= ERROR_SHARE * of_eager + ROUNDING, (fused, eager)


def test_the_largest_matrices_that_are_not_refused() -> None:
    """Elements have indices up to 2**31: one pass, and both ends of a tall matrix."""
    if torch.cuda.mem_get_info()[0] < 90 * 2**30:
        pytest.skip("needs 90 GiB of free GPU memory")
    rows, columns = 2**16, 2**15 - 128
    n = torch.empty(1, rows, columns, dtype=torch.bfloat16, device=CUDA)
    n.normal_(generator=torch.Generator(CUDA).manual_seed(0))
    eager = polar(n, COEFFICIENTS["quintic"], 1, torch.bfloat16, EPS)
    fused = Polar(1, Iteration(rows, columns, COEFFICIENTS["quintic"], 1, EPS))(n)
    for part in (slice(0, 512), slice(rows // 2, rows // 2 + 512), slice(rows - 512, rows)):
        apart, whole = (size(x) for x in (fused[0, part].float() - eager[0, part].float(), eager[0, part]))
        assert apart <= 0.02 * whole


# --- bits -------------------------------------------------------------------------------------------------


def stepped(num_steps: int = 2, max_held: int | None = None, **options: Any) -> list[Tensor]:
    """Weights and state after some steps."""
    params = model()
    optimizer = muon_merit(params, lr=0.05, matrix_dims=2, fused=True, **options)
    with mock.patch.object(FusedEngine, "max_held", max_held or FusedEngine.max_held):
        for _ in range(num_steps):
            optimizer.step()
    return [p.detach() for p in params] + [x for s in optimizer.state.values() for x in s.values()]


def same_bits(a: list[Tensor], b: list[Tensor]) -> bool:
    """On the device."""
    return all(torch.equal(bits(x), bits(y)) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize(
    "options", [{}, {"norm": "l2", "element_wise": False}, {"neuron_beta": 0.95}, SPHERE], ids=repr
)
def test_a_run_repeats_bit_for_bit(options) -> None:
    assert same_bits(stepped(**options), stepped(**options))


@pytest.mark.parametrize("neuron_beta", [None, 0.95])
def test_chunks_change_no_bit(neuron_beta) -> None:
    """One matrix at a time, two of the experts, and all of a shape."""
    whole = stepped(neuron_beta=neuron_beta)
    for max_held in (1, 2 * 512 * 384):
        assert same_bits(stepped(max_held=max_held, neuron_beta=neuron_beta), whole), max_held


@pytest.mark.parametrize("shape", [(256, 512), (520, 300)], ids=str)
def test_a_matrix_has_the_same_bits_whatever_shares_its_launch(shape) -> None:
    n, quintic = matrices(5, *shape), COEFFICIENTS["quintic"]
    together = Polar(5, Iteration(*shape, quintic, 5, EPS))(n.clone())
    alone = Polar(1, Iteration(*shape, quintic, 5, EPS))
    for i in range(5):
        assert_same_bits(alone(n[i : i + 1].clone())[0], together[i], str(i))


GRAPH_OPTIONS: list[dict[str, Any]] = [
    {},
    {"max_grad_norm": 1.0, "nesterov": False},
    {"nonfinite": "skip", "element_wise": False, "norm": "l2"},
    {"neuron_beta": 0.95},
    {"neuron_beta": 0.95, **SPHERE},
    {"hold": "corrected", "weight_decay": 0.5},
]


@pytest.mark.parametrize("options", GRAPH_OPTIONS, ids=repr)
def test_a_captured_step_replays_like_the_original(options) -> None:
    """With the current learning rate and gradients, and with steps outside the graph in between."""
    rates = [0.1, 0.3, 0.05, 0.2, 0.15]
    shapes = [(96, 64), (33, 67), (100,), (3, 20, 48), (96, 64)]

    def build() -> tuple[list[nn.Parameter], Tensor, Any]:
        params = parameters(shapes, CUDA)
        lr = torch.tensor(rates[0], device=CUDA)
        return params, lr, muon_merit(params, lr=lr, matrix_dims=2, fused=True, capturable=True, **options)

    with mock.patch.object(FusedEngine, "max_held", 2 * 20 * 48):
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
            if step == 2:  # outside the graph, with gradients elsewhere
                set_gradients(params, step)
                optimizer.step()
                continue
            for param, grad, other in zip(params, static, reference_params, strict=True):
                param.grad = grad.copy_(other.grad)
            graph.replay()
    assert_same_bits(snapshot(optimizer)[0], snapshot(reference)[0])
    assert_same_bits(snapshot(optimizer)[1]["state"], snapshot(reference)[1]["state"])


def test_the_memory_around_a_weight_does_not_change() -> None:
    for shape in ((33, 48), (130, 257), (1, 16)):
        memory = torch.full((shape[0] * shape[1] + 128,), 3.0, device=CUDA)
        param = nn.Parameter(memory[64:-64].view(shape))
        param.grad = gradient(param, 0)
        muon_merit([param], lr=0.05, fused=True).step()
        assert (param != 3).all()
        assert (memory[:64] == 3).all()
        assert (memory[-64:] == 3).all()


# --- memory and the host ----------------------------------------------------------------------------------

LARGEST = 4 * 768 * 768
"""Elements of the largest matrix of ``model``."""


@pytest.mark.parametrize("max_held", [2**18, 2**22, 2**24])
@pytest.mark.parametrize(
    "options", [{}, {"max_grad_norm": 1.0, "nonfinite": "skip"}, {"neuron_beta": 0.95}], ids=repr
)
def test_temporaries_are_8_bytes_per_held_element(max_held, options) -> None:
    """And no more matrices are held at a time than allowed."""
    optimizer = muon_merit(model(), matrix_dims=2, fused=True, **options)
    with mock.patch.object(FusedEngine, "max_held", max_held):
        optimizer.step()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        optimizer.step()
    # The allocator may round a block up by a mebibyte.
    bound = 8 * max(max_held, LARGEST) + 8 * MIB
    assert torch.cuda.max_memory_allocated() - before <= bound
    assert torch.cuda.memory_allocated() <= before


@contextmanager
def no_waiting_for_the_device() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    "options", [{}, {"nonfinite": "skip", "max_grad_norm": 1.0}, {"neuron_beta": 0.95}, SPHERE], ids=repr
)
@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
def test_a_step_never_waits_for_the_device(options) -> None:
    params = parameters([(96, 64), (33, 67), (100,), (3, 20, 48)], CUDA)
    optimizer = muon_merit(params, matrix_dims=2, fused=True, **options)
    set_gradients(params, 0)
    optimizer.step()
    grads = [[gradient(p, 100 * step + i) for i, p in enumerate(params)] for step in (1, 2)]
    with no_waiting_for_the_device():
        for step, of_step in enumerate(grads):
            for param, grad in zip(params, of_step, strict=True):
                param.grad = grad
            optimizer.param_groups[0].update(lr=0.1 / (2 + step), momentum=0.9)
            optimizer.step()


# --- which engine -----------------------------------------------------------------------------------------


def test_the_fused_engine_is_chosen_if_it_can_run() -> None:
    for build in (muon_merit, muon, normuon):
        optimizer = build(parameters([(4, 6), (5,)], CUDA))
        set_gradients(params_of(optimizer), 0)
        optimizer.step()
        (engine,) = optimizer._engines.values()
        assert not engine._unfused
        assert any(isinstance(launch, HeldLaunch) for launch in engine._launches)
        for other in ({"fused": False}, {"foreach": True}, {"foreach": False}):
            optimizer = build(parameters([(4, 6)], CUDA), **other)
            set_gradients(params_of(optimizer), 0)
            optimizer.step()
            assert not optimizer._engines


def contiguous() -> Tensor:
    return random_tensor((6, 4), 0, device=CUDA)


FALLBACKS: dict[str, tuple[Callable[[], Tensor], Hidden, dict[str, Any]]] = {
    "float64": (lambda: contiguous().double(), muon_merit, {}),
    "not contiguous": (lambda: contiguous().T, muon_merit, {}),
    "split columns": (contiguous, muon_merit, {"split": 2, "split_dim": 1, "neuron_beta": None}),
    "products in float32": (contiguous, muon_merit, {"ns_dtype": "float32"}),
    "sums of rows and columns": (contiguous, muon_merit, {"norm": "l2"}),
    **{build.__name__: (contiguous, build, {}) for build in HIDDEN[3:]},
}


@pytest.mark.parametrize(("make", "build", "options"), FALLBACKS.values(), ids=FALLBACKS.keys())
def test_parameters_that_cannot_be_fused_use_the_eager_engine_in_the_same_step(make, build, options) -> None:
    """With fused=None, silently, and bit for bit as with fused=False; the vector is still fused."""
    params, plain = ([nn.Parameter(make()), nn.Parameter(torch.ones(5, device=CUDA))] for _ in range(2))
    groups = [
        [
            {"params": weights[:1], "direction": build.direction, **options},
            {"params": weights[1:], "direction": "adam"},
        ]
        for weights in (params, plain)
    ]
    optimizer, eager = (
        build.optimizer_class(groups[0]),
        build.optimizer_class(groups[1], fused=False),
    )
    for step in range(3):
        set_gradients(params, step)
        set_gradients(plain, step)
        optimizer.step()
        eager.step()
    (engine,) = optimizer._engines.values()
    assert [launch.variant.held for launch in engine._launches] == [None]
    assert_same_bits(params[0].detach(), plain[0].detach())
