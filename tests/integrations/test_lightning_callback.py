"""Lightning's callback: when it observes, what is logged, and that nothing is left after a failure."""

import pytest
import torch

lightning = pytest.importorskip("lightning.pytorch", reason="needs lightning")

from lightning.pytorch.loggers.logger import Logger  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

from merit_optim import MERIT, param_groups  # noqa: E402
from merit_optim.integrations.lightning import MeritCallback  # noqa: E402

# A name of torch's that is being replaced, in Lightning itself.
pytestmark = pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning")


class Memory(Logger):
    name, version = "memory", 0

    def __init__(self) -> None:
        super().__init__()
        self.logs = []

    def log_metrics(self, metrics, step=None) -> None:
        self.logs.append((step, dict(metrics)))

    def log_hyperparams(self, *_, **__) -> None:
        pass


class Model(lightning.LightningModule):
    def __init__(self, fails_at: int = -1) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(16, 2, dim_feedforward=16, dropout=0.0, batch_first=True)
        self.fails_at = fails_at

    def training_step(self, batch, index):
        if index == self.fails_at:
            raise RuntimeError("out of luck")
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self):
        return MERIT(param_groups(self), lr=1e-2)


def train(model: Model, callback: MeritCallback | None, **options) -> list[tuple[int, dict[str, float]]]:
    logger = Memory()
    trainer = lightning.Trainer(
        **{"accelerator": "cpu", "max_epochs": 1, "log_every_n_steps": 2, "logger": logger}
        | {"callbacks": [] if callback is None else [callback], "enable_checkpointing": False}
        | {"enable_progress_bar": False, "enable_model_summary": False}
        | options
    )
    data = torch.randn(32, 5, 16, generator=torch.Generator().manual_seed(0))
    trainer.fit(model, DataLoader(TensorDataset(data), batch_size=4))
    return [(step, numbers) for step, numbers in logger.logs if "attention/max_logit" in numbers]


def build(**options) -> Model:
    torch.manual_seed(0)
    return Model(**options)


def test_the_trainers_logging_steps_are_observed() -> None:
    logs = train(build(), MeritCallback())
    assert [step for step, _ in logs] == [2, 4, 6, 8]
    assert set(logs[0][1]) == {
        "attention/max_logit",
        "attention/min_entropy",
        "update/clipped",
        "update/bounded",
        "update/largest_ratio",
        "update/relative_change",
    }
    assert 0 < logs[0][1]["update/relative_change"] < 1


def test_gradients_of_several_batches_are_one_step() -> None:
    logs = train(build(), MeritCallback(every=1, details=True), accumulate_grad_batches=4)
    assert [step for step, _ in logs] == [1, 2]
    assert {"attention/max_logit/layer.self_attn", "update/clipped/layer.linear1.weight"} <= set(logs[0][1])


def test_training_is_as_without_it() -> None:
    models = [build(), build()]
    train(models[0], MeritCallback(every=1))
    train(models[1], None)
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(one, other)


def test_after_a_failure_nothing_is_left() -> None:
    model = build(fails_at=1)
    with pytest.raises(RuntimeError, match="out of luck"):
        train(model, MeritCallback(every=1))
    assert torch._C._len_torch_function_stack() == 0
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_steps_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 step, or None for log_every_n_steps; got 0"):
        MeritCallback(every=0)
