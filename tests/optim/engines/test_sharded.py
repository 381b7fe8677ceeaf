"""Sharded parameters: which sizes cross ranks, and that a step on many ranks gives the bits of one."""

import re
from importlib.util import find_spec

import pytest
import torch
import torch.distributed as dist
from torchrun import ENGINES, forked, on_ranks

from merit_optim import MERIT
from merit_optim.optim.engines.ranks.placements import Crossing, crossing_of, local
from merit_optim.optim.engines.work import Names, Work

# Sections of the worker for a number of ranks, and the number of their comparisons.
ON_ALL = ["layouts", "matrices", "by rows", "networks", "mixed", "behaviour"]
SECTIONS = [
    (2, ["tensor parallel", "replicas", "compiled"], 7),
    (4, [*ON_ALL, "collectives", "matrix collectives"], 180),
    (8, ["networks"], 9),
    pytest.param(2, ON_ALL, 130, marks=pytest.mark.slow),
    pytest.param(3, [*ON_ALL, "in every dimension", "matrix behaviour"], 120, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("num_ranks", "sections", "at_least"), SECTIONS)
def test_a_step_on_many_ranks_equals_the_step_on_one(num_ranks, sections, at_least) -> None:
    """All layouts and optimizers of the worker, with gloo."""
    compared = on_ranks(num_ranks, "sharded_worker.py", *sections)
    assert {case: wrong for case, wrong in compared.items() if wrong} == {}
    assert len(compared) >= at_least


def test_a_rank_that_exits_between_two_messages_is_an_error_on_all_others() -> None:
    run = forked(3, ENGINES / "sharded_worker.py", "die")
    raised = re.findall(r"RAISED after (.+) s: (.*)", run.stdout)
    assert len(raised) == 2, run.stderr[-4000:]
    # gloo would wait half an hour for a slow rank.
    assert all(float(seconds) < 30 for seconds, _ in raised)


@pytest.mark.skipif(find_spec("triton") is None, reason="the fused engine needs triton")
@pytest.mark.slow
def test_the_fused_engine_gives_the_bits_of_one_rank_too() -> None:
    compared = on_ranks(2, "sharded_worker.py", "fused", TRITON_INTERPRET="1")
    assert len(compared) == 11
    assert {case: wrong for case, wrong in compared.items() if wrong} == {}


@pytest.mark.parametrize(
    ("arguments", "crossing"),
    [
        ((2, None, [0], [4]), Crossing((), (0,), (0,))),
        ((2, None, [1], [4]), Crossing((0,), (), (0,))),
        ((2, None, [None, 0], [2, 4]), Crossing((), (1,), (1,))),
        ((2, None, [0, 1], [2, 4]), Crossing((1,), (0,), (0, 1))),
        ((2, None, [0, 0], [2, 4]), Crossing((), (0, 1), (0, 1))),
        ((2, None, [0], [1]), Crossing((), (), ())),
        ((1, None, [0], [4]), Crossing((), (), (0,))),
        ((4, None, [2], [4]), Crossing((0,), (), (0,))),
        ((3, 2, [0], [4]), Crossing((), (), ())),
        ((3, 2, [1], [4]), Crossing((), (0,), (0,))),
        ((3, 2, [2], [4]), Crossing((0,), (), (0,))),
        ((2, 1, [1], [4]), Crossing((), (), (0,))),
    ],
)
def test_the_sizes_that_cross_ranks(arguments, crossing) -> None:
    assert crossing_of(*arguments) == crossing


@pytest.fixture
def one_rank(tmp_path):
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.FileStore(str(tmp_path / "store"), 1))
    yield
    dist.destroy_process_group()


def on_one_rank(full: torch.Tensor) -> torch.nn.Parameter:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    return torch.nn.Parameter(distribute_tensor(full, init_device_mesh("cpu", (1,)), [Shard(0)]))


@pytest.mark.usefixtures("one_rank")
def test_a_parameter_placed_as_a_partial_sum_is_refused() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial

    mesh = init_device_mesh("cpu", (1,))
    weight = torch.nn.Parameter(DTensor.from_local(torch.ones(2, 2), mesh, [Partial()]))
    with pytest.raises(TypeError, match="Redistribute the parameter"):
        MERIT([weight])


@pytest.mark.usefixtures("one_rank")
def test_a_gradient_placed_as_a_partial_sum_is_redistributed() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate

    mesh = init_device_mesh("cpu", (1,))
    whole = torch.nn.Parameter(torch.ones(2, 3))
    placed = torch.nn.Parameter(DTensor.from_local(torch.ones(2, 3), mesh, [Replicate()]))
    whole.grad = torch.arange(6.0).view(2, 3)
    placed.grad = DTensor.from_local(whole.grad, mesh, [Partial()])
    for weight in (whole, placed):
        MERIT([weight]).step()
    assert torch.equal(placed.full_tensor(), whole)


@pytest.mark.usefixtures("one_rank")
def test_the_step_waits_for_gradients_of_unfinished_collectives() -> None:
    from torch.distributed._functional_collectives import AsyncCollectiveTensor, all_reduce
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate

    mesh = init_device_mesh("cpu", (1,))
    param = DTensor.from_local(torch.ones(2, 3), mesh, [Replicate()])
    coming = all_reduce(torch.ones(2, 3), "sum", mesh.get_group())
    assert isinstance(coming, AsyncCollectiveTensor)
    grad = DTensor.from_local(coming, mesh, [Replicate()])
    with torch.no_grad():
        work = local(
            Work(Names.of(0, {"params": []}), None, 0.1, 0.0, [param], [param], [grad], [torch.zeros(())], [])
        )
    assert type(work.grads[0]) is torch.Tensor


@pytest.mark.usefixtures("one_rank")
def test_a_differentiable_step_on_sharded_parameters_is_refused() -> None:
    with pytest.raises(TypeError, match="differentiable=False"):
        MERIT([on_one_rank(torch.ones(2, 2))], differentiable=True)


def test_one_process_has_whole_weights_even_if_marked_as_tensor_parallel() -> None:
    weight = torch.nn.Parameter(torch.ones(2, 2))
    weight.tensor_model_parallel = True
    MERIT([weight])
