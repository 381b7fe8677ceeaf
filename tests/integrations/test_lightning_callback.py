"""Lightning's callback: when it observes, what is logged, and that nothing is left after a failure."""

import pytest
import torch

lightning = pytest.importorskip("lightning.pytorch", reason="needs lightning")

from lightning.pytorch.loggers.logger import Logger  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

from merit_optim import MERIT, MuonMERIT, param_groups  # noqa: E402
from merit_optim.integrations.lightning import MeritCallback  # noqa: E402

# A name of torch's that is being replaced, in Lightning itself.
pytestmark = pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning")


Logs = list[tuple[int, dict[str, float]]]


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


class Scheduled(Model):
    def configure_optimizers(self):
        optimizer = MuonMERIT(param_groups(self), lr=1e-2)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-2, total_steps=100)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class TwoOptimizers(Model):
    """Which step one after the other in each batch, and know no names of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.head = nn.Linear(16, 16)

    def training_step(self, batch, index):  # noqa: ARG002
        self.manual_backward(self.head(self.layer(batch[0])).square().mean())
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self):
        return [MERIT(self.layer.parameters(), lr=1e-2), MERIT(self.head.parameters(), lr=1e-2)]


class Validated(Model):
    """With validation whose attention nobody could mistake for that of training."""

    def validation_step(self, batch, index):  # noqa: ARG002
        self.layer.self_attn(*[1000 * batch[0]] * 3)


def train(model: Model, callback: MeritCallback | None, ckpt_path=None, **options) -> Logs:
    logger = Memory()
    trainer = lightning.Trainer(
        **{"accelerator": "cpu", "max_epochs": 1, "log_every_n_steps": 2, "logger": logger}
        | {"callbacks": [] if callback is None else [callback], "enable_checkpointing": False}
        | {"enable_progress_bar": False, "enable_model_summary": False}
        | options
    )
    data = torch.randn(32, 5, 16, generator=torch.Generator().manual_seed(0))
    loader = DataLoader(TensorDataset(data), batch_size=4)
    trainer.fit(model, loader, loader if isinstance(model, Validated) else None, ckpt_path=ckpt_path)
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


def test_a_schedule_moves_all_kinds_of_weights_in_proportion() -> None:
    module = Scheduled()
    train(module, None)
    groups = module.trainer.optimizers[0].param_groups
    (rate,) = {group["lr"] for group in groups}
    assert rate != module.trainer.optimizers[0].defaults["lr"]
    assert {group["rate_scale"] for group in groups} == {1.0, 0.4}


@pytest.mark.parametrize(
    ("every", "expected"),
    [(1, list(range(2, 17, 2))), (2, list(range(4, 17, 2))), (3, [4, 8, 10, 14, 16]), (4, [6, 10, 14])],
)
def test_the_steps_of_all_optimizers_count(every, expected) -> None:
    logs = train(TwoOptimizers(), MeritCallback(every=every))
    assert [step for step, _ in logs] == expected


def test_parameters_of_several_optimizers_are_told_apart() -> None:
    model = TwoOptimizers()
    numbers = train(model, MeritCallback(every=1, details=True))[0][1]
    parameters = [name for name in numbers if name.startswith("update/clipped/")]
    assert len(parameters) == len(list(model.parameters()))
    assert "update/clipped/optimizer 1/parameter 0 of group 0" in parameters


def test_validation_within_a_step_is_not_of_it() -> None:
    def largest(**options) -> list[float]:
        torch.manual_seed(0)
        logs = train(Validated(), MeritCallback(every=1), accumulate_grad_batches=4, **options)
        return [numbers["attention/max_logit"] for _, numbers in logs]

    expected = largest(limit_val_batches=0)
    assert len(expected) == 2
    assert largest(val_check_interval=2, num_sanity_val_steps=2) == expected


# Which batches come is not looked at here.
@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
def test_a_run_that_is_resumed_is_observed_at_the_same_steps(tmp_path) -> None:
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_steps=4,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = build()
    trainer.fit(model, DataLoader(TensorDataset(torch.randn(32, 5, 16)), batch_size=4))
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    logs = train(build(), MeritCallback(), ckpt_path=tmp_path / "last.ckpt", max_steps=8, max_epochs=-1)
    assert [step for step, _ in logs] == [6, 8]


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


def test_a_trainer_that_never_logs_is_never_observed() -> None:
    assert train(build(), MeritCallback(), log_every_n_steps=0) == []
    assert [step for step, _ in train(build(), MeritCallback(every=4), log_every_n_steps=0)] == [4, 8]


def test_steps_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 step, or None for log_every_n_steps; got 0"):
        MeritCallback(every=0)
