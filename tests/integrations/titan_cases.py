"""torchtitan's Llama 3 on a CPU, and its container with optimizers of this package.

Its flex attention has no backward pass on a CPU; another of its attention modules replaces it.
"""

import warnings

import pytest
import torch

INSTALL = "needs torchtitan: pip install --no-deps torchtitan==0.3.0 spmd_types==0.2.3"
pytest.importorskip("torchtitan", reason=INSTALL)
pytest.importorskip("spmd_types", reason=INSTALL)

from torchtitan.components.optimizer import LRSchedulersContainer, ParamGroupConfig  # noqa: E402

from merit_optim.integrations.torchtitan import MeritOptimizersContainer  # noqa: E402

with warnings.catch_warnings():
    # torchtitan's models compile a function when they are imported, and so import torch's compiler.
    warnings.filterwarnings("ignore", "`torch.jit.script_method` is deprecated", DeprecationWarning)
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3 import model_registry

NUM_STEPS = 6


def build_llama():
    """Two layers of torchtitan's Llama 3 for debugging."""
    torch.manual_seed(0)
    config = model_registry("debugmodel").model
    config.layers = config.layers[:2]
    for layer in config.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    model = config.build()
    model.init_states()
    return model


def group(pattern: str, name: str = "MERIT", **options) -> ParamGroupConfig:
    return ParamGroupConfig(pattern=pattern, optimizer_name=name, optimizer_kwargs=options)


def container(parts, *groups, implementation="for-loop", **options):
    """Of a model, or of several parts of one."""
    config = MeritOptimizersContainer.Config(
        param_groups=list(groups), implementation=implementation, **options
    )
    return config.build(model_parts=parts if isinstance(parts, list) else [parts])


def schedule(optimizers):
    config = LRSchedulersContainer.Config(warmup_steps=2, decay_type="cosine", min_lr_factor=0.1)
    return config.build(optimizers=optimizers, training_steps=NUM_STEPS)


def backward(model, step: int) -> None:
    tokens = torch.randint(2048, (2, 17), generator=torch.Generator().manual_seed(step))
    logits = model(tokens[:, :-1])
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()


def train(model, optimizers, schedulers, steps) -> None:
    """The order of torchtitan's own train_step."""
    for step in steps:
        optimizers.zero_grad(set_to_none=False)
        backward(model, step)
        optimizers.step()
        schedulers.step()


def assert_same(one, other) -> None:
    for (name, parameter), expected in zip(one.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(parameter, expected), name
