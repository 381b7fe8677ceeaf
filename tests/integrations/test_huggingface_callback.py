"""The Trainer's callback: when it observes, what is logged and where, and that training is as without it."""

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="needs transformers")
pytest.importorskip("accelerate", reason="needs accelerate")

from merit_optim import MERIT, MuonMERIT, param_groups  # noqa: E402
from merit_optim.integrations.huggingface import MeritCallback  # noqa: E402

SUMMARY = {
    "attention/max_logit",
    "attention/min_entropy",
    "update/clipped",
    "update/bounded",
    "update/largest_ratio",
    "update/relative_change",
}


class Reporter(transformers.TrainerCallback):
    """Stands where report_to's callbacks stand: before those of users."""

    def __init__(self) -> None:
        self.logs = []

    def on_log(self, args, state, control, logs=None, **kwargs) -> None:  # noqa: ARG002
        self.logs.append((state.global_step, dict(logs)))


class Interrupting(transformers.TrainerCallback):
    """Raises within the third step, after its forward and backward passes."""

    def __init__(self, error: type[BaseException]) -> None:
        self.error = error

    def on_pre_optimizer_step(self, args, state, control, **kwargs) -> None:  # noqa: ARG002
        if state.global_step == 2:
            raise self.error


def build(tmp_path, optimizer=None, callback=None, **options):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=20,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    model = transformers.LlamaForCausalLM(config)
    optimizer = MERIT(param_groups(model), lr=1e-2) if optimizer is None else optimizer(model.parameters())
    tokens = torch.randint(20, (64, 8), generator=torch.Generator().manual_seed(0))
    reporter = Reporter()
    trainer = transformers.Trainer(
        model,
        transformers.TrainingArguments(
            **{
                "output_dir": str(tmp_path),
                "max_steps": 6,
                "logging_steps": 2,
                "per_device_train_batch_size": 4,
            }
            | {"use_cpu": True, "report_to": [], "save_strategy": "no", "disable_tqdm": True}
            | options
        ),
        train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
        optimizers=(optimizer, None),
        callbacks=[reporter],
    )
    if callback is not None:
        trainer.add_callback(MeritCallback(trainer, **callback))
    return trainer, reporter.logs


def train(tmp_path, optimizer=None, callback=None, **options):
    trainer, logs = build(tmp_path, optimizer, callback, **options)
    trainer.train()
    return trainer, logs


def steps_with(logs, key) -> list[int]:
    return [step for step, numbers in logs if key in numbers]


def test_the_trainers_logging_steps_are_observed_and_reported(tmp_path) -> None:
    trainer, logs = train(tmp_path, callback={})
    assert steps_with(logs, "loss") == steps_with(logs, "attention/max_logit") == [2, 4, 6]
    ours = [set(numbers) - {"epoch"} for _, numbers in logs if "attention/max_logit" in numbers]
    assert all(names == SUMMARY for names in ours)
    assert sum("attention/max_logit" in entry for entry in trainer.state.log_history) == 3
    assert torch._C._len_torch_function_stack() == 0


def test_gradients_of_several_batches_are_one_step(tmp_path) -> None:
    _, logs = train(
        tmp_path, callback={"details": True}, gradient_accumulation_steps=2, logging_first_step=True
    )
    assert steps_with(logs, "attention/max_logit") == [1, 2, 4, 6]
    numbers = next(numbers for _, numbers in logs if "attention/max_logit" in numbers)
    assert "attention/max_logit/model.layers.1.self_attn" in numbers
    assert "update/clipped/model.layers.0.self_attn.q_proj.weight" in numbers


def test_a_schedule_moves_all_kinds_of_weights_in_proportion(tmp_path) -> None:
    trainer, _ = build(tmp_path, lr_scheduler_type="cosine", max_steps=10)
    trainer.optimizer = optimizer = MuonMERIT(param_groups(trainer.model), lr=1e-2)
    rates = []

    class Watching(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs) -> None:  # noqa: ARG002
            rates.append({group["lr"] for group in optimizer.param_groups})

    trainer.add_callback(Watching())
    trainer.train()
    assert [len(of_step) for of_step in rates] == [1] * 10
    assert rates[0] != rates[5]
    assert {group["rate_scale"] for group in optimizer.param_groups} == {1.0, 0.4}


def test_training_is_as_without_it(tmp_path) -> None:
    with_it, _ = train(tmp_path, callback={"every": 1})
    without, _ = train(tmp_path)
    for one, other in zip(with_it.model.parameters(), without.model.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_after_a_failure_nothing_is_left(tmp_path, error) -> None:
    registry = transformers.modeling_utils.AttentionInterface
    before = registry.get_interface
    trainer, logs = build(tmp_path, callback={"every": 1})
    interrupting = Interrupting(error)
    trainer.add_callback(interrupting)
    with pytest.raises(error):
        trainer.train()
    assert torch._C._len_torch_function_stack() == 0
    assert registry.get_interface is before
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in trainer.model.modules())
    optimizer = trainer.optimizer.optimizer
    assert optimizer._recordings == ()
    trainer.remove_callback(interrupting)
    trainer.train()
    assert steps_with(logs, "attention/max_logit") == [1, 2, 1, 2, 3, 4, 5, 6]


def test_a_loop_begun_again_after_a_failure_begins_unobserved(tmp_path) -> None:
    """As with auto_find_batch_size, within one call of train()."""
    trainer, _ = build(tmp_path, callback={"every": 1})
    callback = trainer.callback_handler.callbacks[-1]
    callback.on_step_begin(trainer.args, trainer.state, trainer.control, trainer.model, trainer.optimizer)
    assert torch._C._len_torch_function_stack() == 1
    callback.on_train_begin(trainer.args, trainer.state, trainer.control)
    assert torch._C._len_torch_function_stack() == 0


@pytest.mark.parametrize("logging_steps", [0, 2])
def test_a_trainer_that_never_logs_is_never_observed(tmp_path, logging_steps) -> None:
    _, logs = train(tmp_path, callback={}, logging_strategy="no", logging_steps=logging_steps)
    assert not steps_with(logs, "attention/max_logit")
    _, logs = train(tmp_path, callback={"every": 4}, logging_strategy="no", logging_steps=0)
    assert steps_with(logs, "attention/max_logit") == [4]


def test_an_optimizer_without_statistics_leaves_attention(tmp_path) -> None:
    _, logs = train(tmp_path, torch.optim.AdamW, callback={"every": 3, "entropy": False})
    ours = [(step, set(numbers) - {"epoch"}) for step, numbers in logs if "attention/max_logit" in numbers]
    assert ours == [(3, {"attention/max_logit"}), (6, {"attention/max_logit"})]


def test_steps_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 step, or None for logging_steps; got 0"):
        MeritCallback(None, every=0)
