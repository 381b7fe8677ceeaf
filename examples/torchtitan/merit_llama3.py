"""MuonMERIT in torchtitan 0.3: configurations for its command line.

In a checkout of torchtitan 0.3.0, with the nightly torch that it requires and merit-optim installed:

    export PYTHONPATH=path/to/merit-optim/examples/torchtitan
    torchrun --nproc_per_node 1 -m torchtitan.train --module merit_llama3 --config llama3_debugmodel_merit
    torchrun --nproc_per_node 8 -m torchtitan.train --module merit_llama3 --config llama3_8b_merit

They are torchtitan's configurations with another optimizer; deepseek_v3_debugmodel_merit is a mixture of
experts. The 8B model needs its tokenizer, which torchtitan's scripts/download_hf_assets.py downloads.
"""

# torchtitan has no type annotations.
# mypy: disable-error-code="import-not-found,import-untyped"

from torchtitan.components.optimizer import LRSchedulersContainer, ParamGroupConfig
from torchtitan.models.deepseek_v3.config_registry import deepseek_v3_debugmodel
from torchtitan.models.llama3.config_registry import llama3_8b, llama3_debugmodel
from torchtitan.trainer import Trainer

from merit_optim.integrations.torchtitan import MeritOptimizersContainer

OPTIMIZER = "MuonMERIT"  # or MERIT, LAMB, Muon, NorMuon, ...
LR = 1e-2  # depends on the optimizer and the number of steps: tune it


def group(pattern: str, **options: object) -> ParamGroupConfig:
    return ParamGroupConfig(pattern=pattern, optimizer_name=OPTIMIZER, optimizer_kwargs={"lr": LR, **options})


def llama3_debugmodel_merit() -> Trainer.Config:
    """A model of 6 layers for ten steps, as a smoke test."""
    config = llama3_debugmodel()
    config.optimizer = MeritOptimizersContainer.Config(
        param_groups=[
            group(r"norm\.weight$", weight_decay=0.0),  # the first pattern that matches counts
            group(r".*", weight_decay=0.1),  # hidden matrices and the rest are sorted automatically
        ]
    )
    return config


def llama3_8b_merit() -> Trainer.Config:
    """8B at a batch of 1024 sequences."""
    config = llama3_8b()
    config.optimizer = MeritOptimizersContainer.Config(
        param_groups=[
            group(r"norm\.weight$", weight_decay=0.0),
            group(r".*", weight_decay=0.1),
        ]
    )
    config.lr_scheduler = LRSchedulersContainer.Config(
        warmup_steps=100, decay_type="cosine", min_lr_factor=0.1
    )
    config.training.global_batch_size = 1024
    return config


def deepseek_v3_debugmodel_merit() -> Trainer.Config:
    """A mixture of stacked experts, each with a separate direction and ratios."""
    config = deepseek_v3_debugmodel()
    config.optimizer = MeritOptimizersContainer.Config(
        param_groups=[
            group(r"norm\.weight$", weight_decay=0.0),
            group(r"routed_experts", weight_decay=0.1, matrix_dims=2),  # MERIT and LAMB need matrix_dims
            group(r".*", weight_decay=0.1),
        ]
    )
    return config
