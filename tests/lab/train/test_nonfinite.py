import math

import pytest

from merit_lab.train import pool, reports, train

PARAMETER = "blocks.1.mlp.up.weight"


@pytest.fixture
def poison(monkeypatch):
    """Make one gradient NaN in the given steps; with one micro-batch, calls are steps."""

    def arrange(*steps):
        build, calls = pool.build, []

        def spoil(gradient):
            calls.append(None)
            return gradient * math.nan if len(calls) in steps else gradient

        def build_poisoned(config):
            model = build(config)
            model.get_parameter(PARAMETER).register_hook(spoil)
            return model

        monkeypatch.setattr(pool, "build", build_poisoned)

    return arrange


def events(run, what):
    return [event for event in run.metrics("event") if event["what"] == what]


@pytest.mark.parametrize("name", ["merit", "adamw"])
def test_by_default_the_run_ends_and_says_where(name, poison, changed, tmp_path):
    poison(7)
    run = train(changed(**{"optimizer.name": name}), tmp_path)
    assert run.status == "diverged"
    [event] = events(run, "diverged")
    assert event["step"] == 7
    assert f"1 of 15 gradients are not finite, first that of {PARAMETER}" in event["message"]
    lines = run.metrics("train")
    assert [line["step"] for line in lines] == list(range(1, 8))
    assert math.isnan(lines[-1]["grad_norm"])
    # What was saved is from before.
    assert [path.name for path in run.checkpoints.iterdir()] == ["step-00000005"]


def test_a_diverged_run_can_be_tried_again(poison, toy, tmp_path, monkeypatch, measured):
    undisturbed = train(toy, tmp_path / "undisturbed")
    poison(7)
    run = train(toy, tmp_path / "run")
    monkeypatch.undo()
    assert train(None, run.folder, resume=True).status == "finished"
    assert measured(run) == measured(undisturbed)


@pytest.mark.parametrize("name", ["merit", "adamw", "lion", "sophiag"])
def test_bad_steps_are_skipped_if_configured(name, poison, changed, tmp_path):
    poison(*((8, 9) if name == "sophiag" else (7, 8)))  # Sophia's first estimate has a gradient too
    config = changed(**{"optimizer.name": name, "optimizer.lr": 1e-3, "nonfinite": "skip"})
    run = train(config, tmp_path)
    assert run.status == "finished"
    assert [event["step"] for event in events(run, "skipped")] == [7, 8]
    assert PARAMETER in events(run, "skipped")[0]["message"]
    assert all(math.isfinite(line["loss"]) for line in run.metrics("train"))
    # Weights and state are as they were, but the learning rate goes on.
    assert run.metrics("train")[-1]["loss"] < run.metrics("train")[0]["loss"]


def test_a_run_that_only_skips_is_ended(poison, changed, tmp_path, monkeypatch):
    monkeypatch.setattr(reports, "_SKIPS_IN_A_ROW", 3)
    poison(4, 6, 7, 8)
    run = train(changed(nonfinite="skip"), tmp_path)
    assert run.status == "diverged"
    assert [event["step"] for event in events(run, "skipped")] == [4, 6, 7, 8]
    assert events(run, "diverged")[0]["message"].startswith("3 steps in a row were skipped")


@pytest.mark.parametrize("nonfinite", ["stop", "skip"])
def test_a_run_whose_last_step_broke_the_weights_has_diverged(nonfinite, changed, tmp_path):
    run = train(changed(**{"steps": 1, "optimizer.lr": 1e38, "nonfinite": nonfinite}), tmp_path)
    assert run.status == "diverged"
    assert events(run, "diverged")[0]["message"] == "the validation loss is nan"
    assert not run.checkpoints.exists()
