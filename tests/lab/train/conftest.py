import dataclasses

import pytest

from merit_lab.models import ModelConfig
from merit_lab.train import CheckpointConfig, MeasureConfig, OptimizerConfig, TrainConfig, train
from merit_lab.train.loop import Trainer

# What differs between two runs of the same computation.
OF_THE_CLOCK = ("seconds", "tokens_per_second", "optimizer_share", "mfu", "memory_gib")


@pytest.fixture
def toy(data):
    """A configuration that trains in a second."""
    return TrainConfig(
        data=data,
        model=ModelConfig(width=32, heads=2, layers=2, context=32, vocab_size=256),
        optimizer=OptimizerConfig(lr=1e-2),
        measure=MeasureConfig(
            validation_every=4, validation_sequences=8, attention_every=3, entropy_every=6, update_every=5
        ),
        checkpoint=CheckpointConfig(every_steps=5, every_minutes=0),
        batch=8,
        steps=12,
    )


@pytest.fixture
def changed(toy):
    """The toy configuration with other values, by dotted name: changed(**{"optimizer.name": "adamw"})."""

    def change(**values):
        config = toy
        for path, value in values.items():
            part, _, name = path.rpartition(".")
            if part:
                name, value = part, dataclasses.replace(getattr(config, part), **{name: value})
            config = dataclasses.replace(config, **{name: value})
        return config

    return change


class Killed(BaseException):
    """Ends a run like SIGKILL: nothing catches it."""


@pytest.fixture
def before_step(monkeypatch):
    """Run an action before a step."""

    def arrange(step, action, patched=monkeypatch):
        original = Trainer.take_step

        def take_step(self, micro_batches):
            if self.step == step:
                action()
            return original(self, micro_batches)

        patched.setattr(Trainer, "take_step", take_step)

    return arrange


@pytest.fixture
def die_before_step(before_step):
    """Train a configuration until its process dies before a step."""

    def kill():
        raise Killed

    def die(config, folder, step, resume=False):
        with pytest.MonkeyPatch.context() as patched:
            before_step(step, kill, patched)
            with pytest.raises(Killed):
                train(config, folder, resume=resume)

    return die


@pytest.fixture(scope="session")
def measured():
    """All measurements of a run except events, without timings."""

    def measurements(run):
        kinds = ("train", "validation", "attention", "update")
        lines = [line for kind in kinds for line in run.metrics(kind)]
        return [{key: value for key, value in line.items() if key not in OF_THE_CLOCK} for line in lines]

    return measurements
