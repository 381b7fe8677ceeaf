"""Which runs are alike and which may be compared."""

from typing import Any

import polars as pl
import pytest

from merit_lab.results.names import clean
from merit_lab.results.series import with_series


def frame(*changes: dict[str, Any], **common: Any) -> pl.DataFrame:
    """A frame of finished runs that differ as given."""
    settings = {
        "status": "finished",
        "seed": 0,
        "steps": 100,
        "batch": 64,
        "last_step": 100,
        "validation_loss": 3.0,
        "model.family": "gpt2",
        "model.layers": 2,
        "model.width": 64,
        "model.context": 32,
        "optimizer.name": "merit",
        "optimizer.lr": 0.01,
        "environment.data.fingerprint": "f" * 64,
        "environment.data.folder": "data/enwik8",
        "environment.data.tokenizer": "bpe-512",
    }
    rows = [{"run": f"run-{place}", **settings, **common, **change} for place, change in enumerate(changes)]
    return pl.DataFrame(rows, infer_schema_length=None)


def test_seeds_form_a_series_and_what_else_differs_within_an_optimizer_is_in_its_name() -> None:
    runs = with_series(
        frame(
            {"optimizer.name": "muon", "optimizer.lr": 0.02, "optimizer.rate_scale": 0.1, "seed": 1},
            {"optimizer.name": "muon", "optimizer.lr": 0.02, "optimizer.rate_scale": 0.1},
            {"optimizer.name": "muon", "optimizer.lr": 0.01, "optimizer.rate_scale": 0.1},
            {"optimizer.name": "adamw", "optimizer.lr": 0.001, "measure.attention_every": 5},
        )
    )
    assert list(zip(runs["series"], runs["run"], strict=True)) == [
        ("AdamW", "run-3"),
        ("Muon, lr 0.01", "run-2"),
        ("Muon, lr 0.02", "run-1"),
        ("Muon, lr 0.02", "run-0"),
    ]
    assert runs["conditions"].unique().to_list() == ["gpt2 2x64, enwik8 bpe-512, 100 steps of 64 x 32 tokens"]


@pytest.mark.parametrize(
    ("setting", "value", "may_be_compared"),
    [
        ("batch", 128, False),
        ("steps", 200, False),
        ("model.rope_base", 1e6, False),
        ("environment.data.fingerprint", "e" * 64, False),
        ("environment.data.folder", "elsewhere/text8", True),
        ("measure.validation_sequences", 8, False),
        ("model.attention", "math", True),
        ("measure.update_every", 10, True),
        ("environment.device.name", "H200", True),
        ("optimizer.betas", "[0.9, 0.99]", True),
    ],
)
def test_conditions_agree_if_and_only_if_runs_may_be_compared(
    setting: str, value: object, may_be_compared: bool
) -> None:
    runs = with_series(frame({}, {setting: value}))
    assert (runs["conditions"].n_unique() == 1) == may_be_compared


def test_a_run_that_was_repeated_or_did_not_end_does_not_count() -> None:
    runs = with_series(
        frame({"last_step": 50, "status": "diverged"}, {}, {"status": "running", "seed": 1}, {"seed": 2})
    )
    assert dict(zip(runs["run"], runs["left_out"], strict=True)) == {
        "run-0": "the settings and seed of run-1",
        "run-1": None,
        "run-2": "running",
        "run-3": None,
    }


def test_a_setting_can_be_ignored_but_its_runs_still_count_each() -> None:
    runs = with_series(frame({}, {"optimizer.lr": 0.02}), ignoring=["optimizer.lr"])
    assert runs["series"].to_list() == ["MERIT", "MERIT"]
    assert runs["left_out"].null_count() == 2


def test_names_that_differ_in_what_cannot_be_read_stay_two_series() -> None:
    names = [
        "my:A\x07",
        "my:A\x08",
        "my:" + "x" * 10_000,
        "my:" + "x" * 10_000 + "y",
        "other:Same",
        "my:Same",
    ]
    series = with_series(frame(*({"optimizer.name": name} for name in names)))["series"]
    assert series.n_unique() == len(names)
    assert all(clean(name) == name for name in series)


def test_values_that_look_alike_when_shortened_are_written_in_full() -> None:
    runs = with_series(frame({"optimizer.lr": 0.1234567}, {"optimizer.lr": 0.1234568}))
    assert runs["series"].to_list() == ["MERIT, lr 0.1234567", "MERIT, lr 0.1234568"]
