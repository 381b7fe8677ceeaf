"""Run by forked_ranks.py on 4 ranks: torchtitan shards its Llama 3, and steps are those of the whole model.

Two ranks share the data and two a tensor. Of torchtitan's three backends, "spmd_types" needs a nightly torch.
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, distribute_tensor
from torchtitan.tools import utils

utils.device_type = "cpu"  # it takes a machine without an accelerator for one with CUDA

from torchtitan.components.optimizer import ParamGroupConfig  # noqa: E402
from torchtitan.components.optimizer.utils import init_optim_state  # noqa: E402
from torchtitan.distributed import ParallelDims  # noqa: E402
from torchtitan.distributed.utils import set_spmd_backend  # noqa: E402
from torchtitan.models.llama3.config_registry import llama3_debugmodel  # noqa: E402

from merit_optim import optimizer_class  # noqa: E402
from merit_optim.integrations.torchtitan import MeritOptimizersContainer  # noqa: E402
from merit_optim.optim.groups import divided  # noqa: E402
from merit_optim.optim.kinds import kinds_of  # noqa: E402


def sharded_model(backend: str) -> torch.nn.Module:
    """What torchtitan's trainer does to make a model, in its order."""
    config = llama3_debugmodel()
    config.parallelism.spmd_backend = backend
    config.parallelism.data_parallel_shard_degree = config.parallelism.tensor_parallel_degree = 2
    degrees = {"dp_replicate": 1, "dp_shard": 2, "cp": 1, "tp": 2, "pp": 1, "ep": 1}
    parallel_dims = ParallelDims(**degrees, world_size=4, spmd_backend=backend)
    parallel_dims.build_mesh()
    set_spmd_backend(backend)
    model_config = config.model_spec.model
    model_config.layers = model_config.layers[:1]
    model_config.update_from_config(config=config)
    with torch.device("meta"):
        model = model_config.build()
    model = config.model_spec.parallelize_fn(
        model,
        parallel_dims=parallel_dims,
        training=config.training,
        parallelism=config.parallelism,
        compile_config=config.compile,
        ac_config=None,
        dump_folder="",
    )
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_weights()
    return model


def container(model: torch.nn.Module, optimizer_name: str) -> MeritOptimizersContainer:
    group = ParamGroupConfig(pattern=".*", optimizer_name=optimizer_name, optimizer_kwargs={"lr": 9e-3})
    config = MeritOptimizersContainer.Config(param_groups=[group], implementation="foreach")
    return config.build(model_parts=[model])


def check_steps(model: torch.nn.Module, optimizer_name: str) -> None:
    sharded = dict(model.named_parameters())
    assert all(isinstance(parameter, DTensor) for parameter in sharded.values())
    assert any(len(set(map(str, parameter.placements))) == 2 for parameter in sharded.values())
    whole = {name: torch.nn.Parameter(p.full_tensor().detach().clone()) for name, p in sharded.items()}

    optimizers = container(model, optimizer_name)
    optimizers.zero_grad()
    optimizers.state_dict()  # as the checkpointer does, which makes the state by a step without gradients
    kinds = kinds_of(model)
    marks = {whole[name]: {"kind": kinds[parameter]} for name, parameter in sharded.items()}
    groups = divided({"params": list(whole.values())}, marks)
    expected = optimizer_class(optimizer_name)(groups, lr=9e-3, foreach=True)
    init_optim_state(expected)
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        for name, parameter in sharded.items():
            gradient = torch.randn(parameter.shape, generator=generator)
            whole[name].grad = gradient
            parameter.grad = distribute_tensor(gradient, parameter.device_mesh, parameter.placements)
        optimizers.step()
        expected.step()
    for name, parameter in sharded.items():
        assert torch.equal(parameter.full_tensor(), whole[name]), f"{optimizer_name}: {name}"


def main() -> None:
    for backend in sys.argv[1:]:
        torch.manual_seed(0)
        model = sharded_model(backend)
        check_steps(model, "MERIT")
        check_steps(model, "MuonMERIT")
        check_steps(model, "SOAPMERIT")
    dist.destroy_process_group()
