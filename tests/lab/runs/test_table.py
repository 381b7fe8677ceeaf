"""All runs as two frames, whatever is in the folders."""

import json
import math
import shutil
from pathlib import Path

import polars as pl
import pytest
from written_runs import write_run

from merit_lab.runs import MetricsWriter, Run, lock, table
from merit_lab.runs.keep_command import keep
from merit_lab.runs.measurements import Measurements


def test_a_row_has_settings_environment_and_outcome(tmp_path: Path) -> None:
    run = write_run(tmp_path / "one")
    Measurements(run.folder / "evaluate" / "step-00000008.json").put("lambada", {}, {"perplexity": math.inf})
    (row,) = table.read(tmp_path).runs.to_dicts()
    loss = 3 + math.exp(-8 / 3)
    assert row["run"], row["status"] == ("one", "finished")
    assert (row["optimizer.lr"], row["optimizer.options.momentum"], row["optimizer.betas"]) == (
        *(0.01, 0.9),
        "[0.9, 0.95]",
    )
    assert row["environment.versions.torch"] == "2.13.0"
    assert (row["last_step"], row["tokens"], row["seconds"]) == (8, 512, 8 / 3)
    assert (row["validation_loss"], row["bits_per_byte"]) == (loss, pytest.approx(loss / math.log(2) / 4))
    assert (row["max_logit"], row["largest_logit"], row["message"]) == (9.0, 9.0, "it finished")
    assert (row["evaluate.step"], row["evaluate.lambada.perplexity"]) == (8, math.inf)


def test_a_row_for_each_step_has_all_that_was_measured_there(tmp_path: Path) -> None:
    write_run(tmp_path / "one")
    steps = table.read(tmp_path).steps
    assert steps["step"].to_list() == list(range(9))
    first, second = steps.row(0, named=True), steps.row(2, named=True)
    assert (first["training_loss"], first["events"]) == (None, [{"what": "started", "message": ""}])
    assert (second["tokens"], second["training_loss"]) == (128, pytest.approx(second["validation_loss"] / 3))
    assert (second["max_logits"], second["entropy_lowest"]) == ([[2 + 1 / 3, 2], [2 + 1 / 3, 3]], 2)
    assert second["clipped"] == second["updates"][0]["clipped"] == pytest.approx(2 / 30)


def test_running_killed_diverged_and_interrupted_runs(tmp_path: Path) -> None:
    ends = {"killed": None, "over": "diverged", "stopped": "interrupted", "at work": None}
    for name, end in ends.items():
        write_run(tmp_path / name, end=end)
    with (tmp_path / "killed" / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "st')
    with lock(tmp_path / "at work"):
        runs = table.read(tmp_path).runs
    assert dict(runs.select("run", "status").iter_rows()) == {
        "at work": "running",
        "killed": "unfinished",
        "over": "diverged",
        "stopped": "interrupted",
    }


def test_a_nan_stays_one(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "one", {}, {})
    with MetricsWriter(run.metrics_path) as metrics:
        metrics.write({"kind": "validation", "step": 1, "loss": math.nan})
        metrics.write({"kind": "attention", "step": 1, "max_logits": [[math.nan, 2.0]], "entropy": None})
        metrics.write({"kind": "attention", "step": 2, "max_logits": [[3.0, 2.0]], "entropy": None})
    (row,) = table.read(run.folder).runs.to_dicts()
    assert math.isnan(row["validation_loss"])
    assert math.isnan(row["largest_logit"])
    assert row["max_logit"] == 3.0


def test_runs_are_found_at_any_depth(tmp_path: Path) -> None:
    for folder in ("a/x", "a/runs/y", "b/c/x", "b/c/x/deeper", ".hidden/x"):
        write_run(tmp_path / folder)
    (tmp_path / "a" / "exported").mkdir()
    (tmp_path / "a" / "exported" / "config.json").write_text('{"model_type": "gpt2"}')
    (tmp_path / "b" / "round").symlink_to(tmp_path)
    keep([tmp_path / "a" / "x"], tmp_path / "d" / "runs.parquet")
    runs = table.read(tmp_path, tmp_path / "a").runs
    assert sorted(runs["folder"]) == [
        str(tmp_path / name) for name in ("a/runs/y", "a/x", "b/c/x", "d/runs.parquet/x")
    ]
    shared = [str(tmp_path / name) for name in ("a/x", "b/c/x", "d/runs.parquet/x")]
    assert sorted(runs["run"]) == [*shared, "y"], "those of one name by their folders"
    with pytest.raises(ValueError, match=r"no runs in .*exported"):
        table.read(tmp_path / "a" / "exported")


def test_a_directory_goes_before_what_is_kept_of_it(tmp_path: Path) -> None:
    for seed in range(2):
        write_run(tmp_path / "runs" / f"seed{seed}", seed=seed)
    keep([tmp_path / "runs"], tmp_path / "runs.parquet")
    shutil.rmtree(tmp_path / "runs" / "seed0")
    for folder in (tmp_path, tmp_path / "runs"):
        read = table.read(folder)
        kept = dict(read.runs.select("run", pl.col("folder").str.contains("parquet")).iter_rows())
        assert kept == {"seed0": True, "seed1": False}
        assert dict(read.steps["run"].value_counts().iter_rows()) == {"seed0": 9, "seed1": 9}


def test_columns_of_numbers_and_of_text(tmp_path: Path) -> None:
    write_run(tmp_path / "one", precision="fp32", clip=1)
    write_run(tmp_path / "two", precision=None, clip=0.5, model={"tied": True, "heads": "all"})
    write_run(tmp_path / "three", model={"heads": 2})
    runs = table.read(tmp_path).runs.sort("run")
    assert runs["clip"].to_list() == [1.0, None, 0.5]
    assert runs["model.heads"].to_list() == [None, "2", "all"]
    assert runs["model.tied"].to_list() == [None, None, True]


DEEP = "[" * 100_000 + "]" * 100_000
LONG = "9" * 400
GOOD = '{"kind": "train", "step": 1, "loss": 2.5}'


@pytest.mark.parametrize(
    "line",
    [
        *("5", "null", "{}", DEEP, f'{{"kind": {DEEP}}}', LONG),
        *(f'{{"kind": "train", "step": {step}}}' for step in ('"3"', "null", "1.5", "-1", "true", LONG)),
        *(f'{{"kind": "train", "step": 3, "loss": {loss}}}' for loss in ('"5.2"', "[5.2]", LONG, DEEP)),
        '{"kind": "train", "step": 3, "tokens": "nan"}',
        '{"kind": "validation", "step": 3}',
        '{"kind": "validation", "step": 3, "loss": 1, "tokens": [1]}',
        '{"kind": "event", "step": 3, "what": 5}',
        '{"kind": "attention", "step": 3, "max_logits": [["a"]], "entropy": null}',
        '{"kind": "update", "step": 3, "parameters": {"w": {"clipped": "none"}}}',
        '{"kind": "another", "step": 3}',
    ],
    ids=lambda line: line[:60],
)
def test_a_damaged_line_is_named(tmp_path: Path, line: str) -> None:
    run = write_run(tmp_path / "one", steps=2)
    run.metrics_path.write_text(f"{GOOD}\n{line}\n{GOOD}\n")
    with pytest.raises(ValueError, match=r"^line 2 of .*one/metrics\.jsonl is not a measurement"):
        table.read(tmp_path)


@pytest.mark.parametrize("file", ["config.json", "environment.json"])
@pytest.mark.parametrize("text", ["", "5", DEEP, f'{{"seed": {LONG}}}'], ids=["empty", "5", "deep", "long"])
def test_a_damaged_record_is_named(tmp_path: Path, file: str, text: str) -> None:
    run = write_run(tmp_path / "one")
    (run.folder / file).write_text(text)
    with pytest.raises(ValueError, match=rf"one/{file} .*restore the file"):
        table.read(tmp_path)


def test_a_part_of_the_environment_is_an_object(tmp_path: Path) -> None:
    run = write_run(tmp_path / "one")
    path = run.folder / "environment.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "device": "none"}))
    with pytest.raises(ValueError, match=r"environment\.json: device is 'none'; it must be an object"):
        table.read(tmp_path)
