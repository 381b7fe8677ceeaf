"""Which runs are ranked against each other, and what the summary says about the others."""

import math
import re
from pathlib import Path
from typing import Any

import pytest
from fake_runs import BATCH, CONTEXT, write_run

from merit_lab.results import Report, find_runs, group
from merit_lab.results.figures import make_figures
from merit_lab.results.tables import environment, series_table, settings

BYTES = {"folder": "/at/home/enwik8", "fingerprint": "ab" * 32, "tokenizer": "bytes", "bytes_per_token": 1.0}
WORDS = {"folder": "enwik8-bpe", "fingerprint": "cd" * 32, "tokenizer": "bpe-1024", "bytes_per_token": 3.5}


def model(family: str = "gpt2", width: int = 256, **others: Any) -> dict[str, Any]:
    return {"family": family, "layers": 4, "width": width, "context": CONTEXT, **others}


def report_of(folder: Path) -> Report:
    return Report.of(find_runs(sorted(path for path in folder.iterdir() if path.is_dir())))


def labels_of(folder: Path) -> list[str]:
    return [series.label for series in report_of(folder).series]


def test_models_are_not_ranked_against_each_other(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "adamw", model=model(width=768))
    write_run(tmp_path / "b", "merit", model=model(width=64))
    write_run(tmp_path / "c", "lamb", model=model(width=64))
    write_run(tmp_path / "d", "lamb", model=model("llama", width=64))
    report = report_of(tmp_path)
    assert [series.label for series in report.series] == [
        "AdamW (gpt2 4x768)",
        "LAMB (gpt2 4x64)",
        "MERIT (gpt2 4x64)",
        "LAMB (llama 4x64)",
    ]
    first, large, small, other = report.summary.splitlines()
    assert first == (
        "These runs form 3 groups, which cannot be ranked against each other: they differ in model (gpt2 "
        "4x768, gpt2 4x64 and llama 4x64)."
    )
    assert large.startswith("gpt2 4x768, 1.64M tokens: AdamW ended at a validation loss of")
    assert small.startswith("gpt2 4x64, 1.64M tokens: At the end MERIT had the lowest validation loss, 2.")
    assert "below LAMB; one seed each" in small
    assert other.startswith("llama 4x64, 1.64M tokens: LAMB ended at a validation loss of")


def test_runs_with_other_batches_and_optimizer_settings_are_compared(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "merit", lr=0.01, model=model(attention="flex", vocab_size=256))
    write_run(tmp_path / "b", "merit", lr=0.02, model=model(attention="sdpa", vocab_size=256))
    write_run(tmp_path / "c", "lamb", num_steps=200, batch=BATCH // 2, model=model(vocab_size=300))
    write_run(tmp_path / "d", "adamw", num_steps=101, model=model())  # the same tokens, in whole steps
    report = report_of(tmp_path)
    assert {series.conditions.length for series in report.series} == {"1.64M tokens"}
    assert "\n" not in report.summary
    assert report.summary.startswith("At the end MERIT")


def test_a_run_that_diverged_counts_with_its_planned_length(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "merit")
    write_run(tmp_path / "b", "lamb", diverges_at=30)
    assert "LAMB diverged (at step 30)" in report_of(tmp_path).summary
    assert "groups" not in report_of(tmp_path).summary


def test_models_of_one_shape_are_told_apart_by_their_settings(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "merit", model=model(qk_norm=True))
    write_run(tmp_path / "b", "merit", model=model(qk_norm=False))
    assert labels_of(tmp_path) == ["MERIT (gpt2 4x256, qk_norm yes)", "MERIT (gpt2 4x256, qk_norm no)"]


def test_models_with_many_settings_still_have_short_names(tmp_path: Path) -> None:
    for place in range(2):
        many = {"model_type": "mistral", **{f"a_rather_long_setting_{number}": place for number in range(9)}}
        write_run(tmp_path / f"{place}", "merit", model={"settings": many, "context": CONTEXT})
    labels = labels_of(tmp_path)
    assert len(set(labels)) == 2
    assert {len(label) for label in labels} == {len("MERIT (mistral 01234567)")}


def test_across_tokenizers_losses_are_in_bits_per_byte(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "merit", trained_on=BYTES)
    write_run(tmp_path / "b", "merit", trained_on=WORDS, loss_offset=1.0)
    report = report_of(tmp_path)
    by_bytes, by_words = (outcome.spread("validation_loss") for outcome in report.outcomes)
    assert by_bytes is not None
    assert by_words is not None
    assert [series.label for series in report.series] == [
        "MERIT (enwik8 bytes)",
        "MERIT (enwik8-bpe bpe-1024)",
    ]
    bits = [f"{by_bytes.mean / math.log(2):.3f}", f"{by_words.mean / math.log(2) / 3.5:.3f}"]
    first, *lines = report.summary.splitlines()
    assert first == (
        "These runs form 2 groups, which cannot be ranked against each other: they differ in data (enwik8 "
        "bytes and enwik8-bpe bpe-1024). Their tokens differ, so losses are also given in bits per byte of "
        "text."
    )
    for line, value in zip(lines, bits, strict=True):
        assert f" or {value} bits per byte (one seed)" in line
    table = series_table(report.outcomes)
    place = table.head.index("Bits per byte")
    assert [row[place] for row in table.rows] == bits
    (loss,) = (figure for figure in make_figures(report.series) if figure.key == "validation-loss")
    ends = [row["value"] for row in loss.datasets["validation_loss-means"] if row["step"] == 100]
    assert [f"{value:.3f}" for value in ends] == bits
    assert "bits per byte" in str(loss.on_page)


def test_old_records_without_bytes_per_token_cannot_be_compared(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "merit", trained_on=BYTES)
    write_run(tmp_path / "b", "merit", trained_on={"fingerprint": "ef" * 32})
    report = report_of(tmp_path)
    assert [series.label for series in report.series] == ["MERIT (enwik8 bytes)", "MERIT (efefefef)"]
    assert report.summary.splitlines()[0].endswith(
        "Their tokens differ, and not every record has the number of bytes per token, so these losses cannot "
        "be compared."
    )
    (loss,) = (figure for figure in make_figures(report.series) if figure.key == "validation-loss")
    assert "cannot be compared" in loss.caption
    assert "nats per token" in str(loss.on_page)


def test_runs_on_the_same_data_need_no_data_name_and_no_other_unit(tmp_path: Path) -> None:
    for name in ("merit", "lamb"):
        write_run(tmp_path / name, name, trained_on=BYTES)
    report = report_of(tmp_path)
    assert [series.label for series in report.series] == ["LAMB", "MERIT"]
    assert "Bits per byte" not in series_table(report.outcomes).head


def test_data_of_the_same_name_are_told_apart_by_eight_digits(tmp_path: Path) -> None:
    for place, digits in enumerate(("ab" * 32, "ef" * 32)):
        write_run(tmp_path / f"{place}", "merit", trained_on={**BYTES, "fingerprint": digits})
    assert labels_of(tmp_path) == ["MERIT (enwik8 bytes abababab)", "MERIT (enwik8 bytes efefefef)"]


def test_no_table_has_all_digits_of_a_fingerprint_that_differs(tmp_path: Path) -> None:
    for place, data in enumerate((BYTES, WORDS)):
        write_run(tmp_path / f"{place}", "merit", trained_on=data)
    series = group(find_runs(sorted(tmp_path.iterdir())))
    for table in (settings(series), environment(series)):
        assert table.different is not None
        assert "abababab" * 2 not in str(table.different)
    assert "enwik8 bytes" in str(settings(series).different)


def test_gradually_growing_lengths_are_not_all_equal(tmp_path: Path) -> None:
    for steps in range(200, 210, 2):
        write_run(tmp_path / f"{steps}", "merit", num_steps=steps, every=10)
    lengths = [series.conditions.length for series in report_of(tmp_path).series]
    assert lengths == ["3.28M tokens"] * 2 + ["3.34M tokens"] * 2 + ["3.41M tokens"]


@pytest.mark.parametrize(("steps", "is_same"), [(101, True), (103, False)])
def test_lengths_are_equal_up_to_rounding_to_steps(tmp_path: Path, steps: int, is_same: bool) -> None:
    write_run(tmp_path / "a", "merit", num_steps=100)
    write_run(tmp_path / "b", "lamb", num_steps=steps)
    assert ("groups" not in report_of(tmp_path).summary) == is_same


def test_the_close_up_has_the_ends_of_short_runs_that_finished(tmp_path: Path) -> None:
    """One that was killed ends where its curve is steep, and would flatten the others."""
    for seed in range(2):
        write_run(tmp_path, "merit", seed=seed, num_steps=1000)
    write_run(tmp_path, "adamw", num_steps=50, loss_offset=1.0)
    write_run(tmp_path, "lamb", num_steps=50, loss_offset=3.0, end=None)
    (loss,) = (
        figure for figure in make_figures(report_of(tmp_path).series) if figure.key == "validation-loss"
    )

    highest, *_ = re.findall(
        r"'domainMax': \{'expr': 'whole \? [\d.]+ : ([\d.]+)'", str(loss.on_page["step"])
    )
    assert 3.6 < float(highest) < 4.5
