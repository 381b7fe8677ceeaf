"""The Trainer's callback: when it observes, what is logged and where, and that training is as without it."""

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="needs transformers")
pytest.importorskip("accelerate", reason="needs accelerate")

from merit_optim import MERIT, param_groups  # noqa: E402
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


def train(tmp_path, optimizer=None, callback=None, **options):
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
    trainer.train()
    return trainer, reporter.logs


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


def test_training_is_as_without_it(tmp_path) -> None:
    with_it, _ = train(tmp_path, callback={"every": 1})
    without, _ = train(tmp_path)
    for one, other in zip(with_it.model.parameters(), without.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_an_optimizer_without_statistics_leaves_attention(tmp_path) -> None:
    _, logs = train(tmp_path, torch.optim.AdamW, callback={"every": 3, "entropy": False})
    ours = [(step, set(numbers) - {"epoch"}) for step, numbers in logs if "attention/max_logit" in numbers]
    assert ours == [(3, {"attention/max_logit"}), (6, {"attention/max_logit"})]


def test_steps_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 step, or None for logging_steps; got 0"):
        MeritCallback(None, every=0)
