import dataclasses
import json
from pathlib import Path

import pytest

from merit_lab.models import PRESETS, build
from merit_lab.train import CheckpointConfig, MeasureConfig, OptimizerConfig, TrainConfig
from merit_lab.train.optimizer import create_optimizer


def test_json_and_back(changed):
    config = changed(**{"optimizer.betas": (0.9, 0.99), "micro_batch": 2})
    assert TrainConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_the_fingerprint_ignores_only_the_data_folder(toy, changed, tmp_path):
    assert changed(data=tmp_path).fingerprint == toy.fingerprint
    assert changed(seed=1).fingerprint != toy.fingerprint
    assert changed(**{"optimizer.lr": 1}).fingerprint == changed(**{"optimizer.lr": 1.0}).fingerprint


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: OptimizerConfig(name="mertt"), "'mertt'; did you mean 'merit'.*adamw.*, or MODULE:CLASS"),
        (lambda: OptimizerConfig(lr=float("nan")), r"optimizer\.lr is nan"),
        (lambda: OptimizerConfig(max_grad_norm=0.0), "above 0, or None"),
        (lambda: OptimizerConfig(warmup=1.5), r"warmup is 1.5; it must be from 0 to 1"),
        (lambda: OptimizerConfig(without=("clips",)), "without is 'clips'; did you mean 'clip'"),
        (lambda: OptimizerConfig(name="lamb", without=("clip",)), "lamb has no such parts"),
        (lambda: OptimizerConfig(overrides=("element_wise=false",)), "write PATTERN:OPTION=VALUE"),
        (
            lambda: OptimizerConfig(overrides=("*:lr=-1",)),
            r"'\*:lr=-1'; a learning rate must be a finite number",
        ),
        (lambda: MeasureConfig(validation_sequences=0), "validation_sequences is 0; .*at least 1"),
        (lambda: CheckpointConfig(every_steps=1.5), "every_steps is 1.5; .*a whole number"),
    ],
)
def test_invalid_values(make, match):
    with pytest.raises(ValueError, match=match):
        make()


def test_some_parameters_can_have_other_options(changed):
    texts = ("*embedding*:element_wise=false", "*embedding*:weight_decay=0", "*.mlp.*:clip=null")
    config = changed(**{"optimizer.overrides": texts})
    assert TrainConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    for group in create_optimizer(config, build(config.model)).param_groups:
        for name in group["param_names"]:
            assert group["element_wise"] is ("embedding" not in name)
            assert (group["clip"] is None) is (".mlp." in name)
            assert group["weight_decay"] == (0.1 if ".mlp." in name or ".attention." in name else 0.0)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        (
            "*embedding*:elementwise=false",
            "'elementwise', which MERIT does not know; did you mean 'element_wise'",
        ),
        ("*embedding*:momentum=0.9", "sets 'momentum', which its choices do not have"),
        ("embeddings:element_wise=false", "'embeddings' matches no parameter; the nearest"),
    ],
)
def test_invalid_overrides(text, match, changed):
    config = changed(**{"optimizer.overrides": (text,)})
    with pytest.raises(ValueError, match=match):
        create_optimizer(config, build(config.model))


def test_parts_of_merit_can_be_left_out(changed):
    config = changed(**{"optimizer.without": ("clip", "weight-bound", "element-wise")})
    assert TrainConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    for group in create_optimizer(config, build(config.model)).param_groups:
        assert (group["clip"], group["weight_bound"], group["element_wise"]) == (None, False, False)


@pytest.mark.parametrize(
    ("values", "match"),
    [
        ({"micro_batch": True}, "micro_batch is True"),
        ({"tokens": 100}, "steps is 12 and tokens is 100; give only one"),
        ({"seed": 2**63}, r"seed is 9223372036854775808; .* 2\*\*63 - 1"),
        ({"batch": 2**31 + 1}, "batch is 2147483649; it must be at most 2147483648"),
        ({"steps": None, "tokens": 10**400}, r"tokens is 10+[.0]*; it must be at most"),
        ({"model.context": 2**24 + 1}, "context is 16777217; it must be at most 16777216"),
    ],
)
def test_invalid_runs(values, match, changed):
    with pytest.raises(ValueError, match=match):
        changed(**values)


def test_the_length_of_a_run(toy):
    def steps(**values):
        return dataclasses.replace(toy, **values).resolve(None).steps

    assert steps() == 12
    assert steps(steps=None, tokens=8 * 32 * 3 + 1) == 4
    parameters = 33_952  # 256*32 + 32*32 + 2*12*32*32 + 5*32
    assert steps(steps=None) == -(-20 * parameters // (8 * 32))


def test_the_vocabulary_follows_the_data(toy, changed):
    assert toy.resolve(50257).model.vocab_size == 50304
    assert toy.resolve(None).model.vocab_size == 256
    assert changed(fit_vocab=False).resolve(50257).model.vocab_size == 256


@pytest.mark.parametrize(
    ("preset", "rate"),
    [("tiny", 9e-3), ("gpt2-small", 9e-3), ("llama-350m", 9e-3), ("gpt2-large", 6e-3)],
)
def test_the_paper_learning_rate_for_the_nearest_size(preset, rate, toy):
    config = dataclasses.replace(toy, model=PRESETS[preset], optimizer=OptimizerConfig())
    assert config.resolve(None).optimizer.lr == rate


def test_the_schedule():
    def rates(steps, **options):
        config = OptimizerConfig(**{"warmup": 0.2, "final": 0.1, **options})
        return [config.rate(step, steps, 2.0) for step in range(steps)]

    long = rates(100)
    assert long[:20] == pytest.approx([2.0 * (step + 1) / 20 for step in range(20)])
    assert max(long) == long[19] == 2.0
    assert long[19:] == sorted(long[19:], reverse=True)
    assert long[-1] == pytest.approx(0.2)
    assert long[19 + 40] == pytest.approx((2.0 + 0.2) / 2)  # half-way down
    assert rates(100, warmup=0.0)[0] == 2.0
    assert rates(100, final=1.0)[20:] == pytest.approx([2.0] * 80)
    assert rates(1) == [2.0]
    assert rates(2) == pytest.approx([2.0, 0.2])
    assert rates(10, warmup=1.0)[-1] == 2.0


@pytest.mark.parametrize(
    ("steps", "every"), [(1, (1, 1)), (60, (3, 3)), (4000, (200, 100)), (100_000, (250, 100))]
)
def test_measurement_intervals_follow_the_length_of_a_run(steps, every):
    measure = TrainConfig(data=Path("data"), steps=steps).resolve(None).measure
    assert (measure.validation_every, measure.entropy_every) == every
    assert measure.update_every == measure.entropy_every
    measure = MeasureConfig(validation_every=7, entropy_every=0, update_every=9)
    assert TrainConfig(data=Path("data"), steps=steps, measure=measure).resolve(None).measure == measure


def test_a_schedule_that_stays_at_the_peak_and_falls_at_the_end():
    wsd = OptimizerConfig(schedule="wsd", warmup=0.1, decay=0.2, final=0.0)
    rates = [wsd.rate(step, 100, 2.0) for step in range(100)]
    assert rates[9:80] == [2.0] * 71
    assert rates[80:] == pytest.approx([2.0 * (99 - step) / 20 for step in range(80, 100)])
    whole = TrainConfig(data=Path("data"), optimizer=wsd)
    assert TrainConfig.from_dict(whole.to_dict()) == whole
    with pytest.raises(ValueError, match=r"optimizer.decay is 0.5, but the schedule is cosine; it is for"):
        OptimizerConfig(decay=0.5)
