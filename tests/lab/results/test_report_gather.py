"""Which folders are runs, and which runs belong together."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_runs import write_run

from merit_lab.results import gather, read_outcomes, summarise
from merit_lab.results.gather import find_runs
from merit_lab.results.old_series import group
from merit_lab.runs import MetricsWriter, Run, archive, excerpt, lock, read_metrics
from merit_lab.runs.settings import flatten, show


def test_a_folder_means_all_runs_in_it_and_none_counts_twice(one_seed: Path) -> None:
    runs = find_runs([one_seed, one_seed / "merit-lr0.009-seed0"])
    assert [run.name for run in runs] == ["adamw-lr0.001-seed0", "lamb-lr0.01-seed0", "merit-lr0.009-seed0"]


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere: no such folder; give run directories"):
        find_runs([tmp_path / "nowhere"])


def test_a_folder_without_runs_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"empty holds no run; a run is a folder with a config\.json"):
        find_runs([tmp_path / "empty"])


def test_seeds_form_a_series_and_optimizers_have_a_fixed_order(three_seeds: Path) -> None:
    series = group(find_runs([three_seeds]))
    assert [one.label for one in series] == ["AdamW", "LAMB", "MERIT"]
    assert [[run.seed for run in one.runs] for one in series] == [[0, 1, 2]] * 3


def test_what_differs_within_an_optimizer_is_in_the_label(tmp_path: Path) -> None:
    write_run(tmp_path, "merit", lr=2e-2)
    write_run(tmp_path, "merit", lr=9e-3)
    write_run(tmp_path, "lamb", lr=1e-2)
    series = group(find_runs([tmp_path]))
    assert [one.label for one in series] == ["LAMB", "MERIT, lr 0.009", "MERIT, lr 0.02"]


def test_settings_that_affect_no_result_do_not_split_a_series(tmp_path: Path) -> None:
    often = {"measure": {"validation_every": 5, "validation_sequences": 256}, "checkpoint": {"keep": 2}}
    seldom = {"measure": {"validation_every": 50, "validation_sequences": 256}, "checkpoint": {"keep": 9}}
    write_run(tmp_path, "merit", seed=0, **often)
    write_run(tmp_path, "merit", seed=1, **seldom)
    (series,) = group(find_runs([tmp_path]))
    assert (series.label, [run.seed for run in series.runs]) == ("MERIT", [0, 1])
    seldom["measure"]["validation_sequences"] = 16
    write_run(tmp_path, "merit", seed=2, **seldom)
    labels = [one.label for one in group(find_runs([tmp_path]))]
    assert labels == ["MERIT (with 256 validation sequences)", "MERIT (with 16 validation sequences)"]


def test_runs_of_the_same_name_are_told_apart_by_parent_folders(tmp_path: Path) -> None:
    for place, seed in (("a/x", 0), ("b/x", 1)):
        write_run(tmp_path / place, "merit", seed=seed).rename(tmp_path / place / "run")
    write_run(tmp_path, "lamb")
    runs = find_runs([tmp_path / "a" / "x", tmp_path / "b" / "x", tmp_path / "lamb-lr0.01-seed0"])
    assert [run.name for run in runs] == ["a/x/run", "b/x/run", "lamb-lr0.01-seed0"]


def test_a_folder_without_runs_of_its_own_stands_for_those_below_it(tmp_path: Path) -> None:
    for folder in ("a", "b/c", ".hidden"):
        write_run(tmp_path / folder, "merit")
    write_run(tmp_path / "b" / "c" / "deeper", "lamb")  # b/c has a run of its own
    kept = write_run(tmp_path / "elsewhere", "lamb", data="enwik8")
    archive.add(tmp_path / "d" / "runs.parquet", [excerpt(Run.open(kept))])
    shutil.rmtree(kept)
    (tmp_path / "b" / "round").symlink_to(tmp_path)
    runs = find_runs([tmp_path])
    assert [run.name for run in runs] == ["a/merit-lr0.01-seed0", "c/merit-lr0.01-seed0", "lamb-lr0.01-seed0"]


def test_an_exported_model_is_not_a_run(one_seed: Path) -> None:
    (one_seed / "exported").mkdir()
    (one_seed / "exported" / "config.json").write_text('{"model_type": "gpt2"}')
    assert len(find_runs([one_seed])) == 3
    with pytest.raises(ValueError, match="exported holds no run"):
        find_runs([one_seed / "exported"])


def test_an_incomplete_line_of_a_killed_run_is_ignored(one_seed: Path) -> None:
    metrics = one_seed / "merit-lr0.009-seed0" / "metrics.jsonl"
    before = find_runs([one_seed / "merit-lr0.009-seed0"])[0]
    with metrics.open("a") as file:
        file.write('{"kind": "train", "step": 105, "lo')
    after = find_runs([one_seed / "merit-lr0.009-seed0"])[0]
    assert after.rows == before.rows


def test_classes_of_the_same_name_are_told_apart_by_modules(tmp_path: Path) -> None:
    for place, name in enumerate(("theirs:MERIT", "merit", "ours:MERIT", "ours:Lamb")):
        write_run(tmp_path, name, loss_offset=place)
    series = group(find_runs([tmp_path]))
    assert [one.label for one in series] == ["MERIT", "Lamb", "ours:MERIT", "theirs:MERIT"]
    sentence = summarise(read_outcomes(series))
    assert sentence.startswith("At the end theirs:MERIT had the lowest validation loss")
    assert re.search(r"below MERIT, \S+ below ours:MERIT and \S+ below Lamb;", sentence)


def test_values_that_look_alike_when_shortened_are_written_in_full(tmp_path: Path) -> None:
    for place, lr in enumerate((0.01234567, 0.01234568)):
        write_run(tmp_path / f"{place}", "merit", lr=lr)
    series = group(find_runs(sorted(tmp_path.iterdir())))
    assert [one.label for one in series] == ["MERIT, lr 0.01234567", "MERIT, lr 0.01234568"]


@pytest.mark.parametrize(
    ("value", "shown"),
    [(None, "none"), ((), "none"), ((0.9, 0.95), "0.9, 0.95"), (False, "no"), (1e-5, "1e-05")],
)
def test_settings_are_formatted_for_readers(value: object, shown: str) -> None:
    assert show(value) == shown


@pytest.mark.parametrize("kept_first", [False, True])
def test_a_run_and_its_excerpt_count_once(tmp_path: Path, kept_first: bool) -> None:
    runs, kept = tmp_path / "runs", tmp_path / "kept"
    for seed in range(2):
        folder = write_run(runs, "merit", seed=seed, num_steps=400, data="/somewhere/enwik8")
        archive.add(kept / "runs.parquet", [excerpt(Run.open(folder))])
    (series,) = group(find_runs([kept, runs] if kept_first else [runs, kept]))
    assert [run.seed for run in series.runs] == [0, 1]
    lengths = [len(run.curves["training_loss"]) for run in series.runs]
    assert lengths == [80, 80], "the runs, which have more measurements"
    sentence = summarise(read_outcomes([series]))
    assert "(2 seeds)" in sentence
    assert sentence.endswith(
        "2 runs have the settings and the seed of another and are not counted: "
        "runs.parquet/merit-lr0.01-seed0 (finished) and runs.parquet/merit-lr0.01-seed1 (finished)."
    )


def test_the_repeated_run_that_got_furthest_counts(tmp_path: Path) -> None:
    killed = write_run(tmp_path / "one", "merit", every=1, end=None)
    with (killed / "metrics.jsonl").open() as file:
        lines = file.readlines()
    (killed / "metrics.jsonl").write_text("".join(lines[: len(lines) // 2]))
    write_run(tmp_path / "other", "merit", every=5)
    (series,) = group(find_runs([tmp_path / "one", tmp_path / "other"]))
    assert [run.status for run in series.runs] == ["finished"]
    sentence = summarise(read_outcomes([series]))
    assert sentence.endswith(
        "1 run has the settings and the seed of another and is not counted: "
        "one/merit-lr0.01-seed0 (unfinished)."
    )


def test_three_of_many_repeated_runs_are_named(tmp_path: Path) -> None:
    for place in ("one", "other"):
        for seed in range(5):
            write_run(tmp_path / place, "merit", seed=seed)
    sentence = summarise(read_outcomes(group(find_runs(sorted(tmp_path.iterdir())))))
    assert "; 5 runs have the settings and the seed of another and are not counted: " in sentence
    assert sentence.endswith(", other/merit-lr0.01-seed2 (finished) and 2 more.")


def test_other_data_make_another_run_with_the_same_seed(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "one", "merit")
    shutil.copytree(folder, tmp_path / "other" / folder.name)
    environment = tmp_path / "other" / folder.name / "environment.json"
    environment.write_text('{"data": {"fingerprint": "of other data"}}')
    series = group(find_runs([tmp_path / "one", tmp_path / "other"]))
    assert [len(one.runs) for one in series] == [1, 1]
    assert not any(one.repeats for one in series)


def test_a_run_that_ends_while_it_is_read_is_not_finished_with_an_old_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run.open(write_run(tmp_path, "merit", end=None))
    training = lock(run.folder)
    training.__enter__()

    def read_slowly(path: Path) -> Iterator[dict[str, Any]]:
        yield from read_metrics(path)
        with MetricsWriter(run.metrics_path) as metrics:
            metrics.write({"kind": "validation", "step": 200, "tokens": 2, "loss": 1.0})
            metrics.write({"kind": "event", "step": 200, "what": "finished", "message": ""})
        training.__exit__(None, None, None)

    with monkeypatch.context() as patched:
        patched.setattr("merit_lab.runs.run.read_metrics", read_slowly)
        meanwhile = gather.MeasuredRun.read(run)
    assert meanwhile.status == "running"
    afterwards = gather.MeasuredRun.read(run)
    assert (afterwards.status, afterwards.rows["validation"][-1]["loss"]) == ("finished", 1.0)


def test_the_status_of_an_unlocked_run_comes_from_the_lines_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that starts and ends while the file is read does not change the status."""
    run = Run.open(write_run(tmp_path, "merit", end="interrupted"))

    def read_slowly(path: Path) -> Iterator[dict[str, Any]]:
        yield from read_metrics(path)
        with MetricsWriter(run.metrics_path) as metrics:
            metrics.write({"kind": "event", "step": 100, "what": "resumed", "message": ""})
            metrics.write({"kind": "event", "step": 200, "what": "finished", "message": ""})

    monkeypatch.setattr("merit_lab.runs.run.read_metrics", read_slowly)
    assert gather.MeasuredRun.read(run).status == "interrupted"


def test_settings_with_nested_lists_can_be_compared() -> None:
    """As in the configurations of some Hugging Face models."""
    flat = flatten(
        {"model": {"settings": {"attention_types": [[["global", "local"], 2]], "limit": [{"a": [1]}]}}}
    )
    assert flat["model.settings.attention_types"] == ((("global", "local"), 2),)
    assert len({tuple(flat.values())}) == 1
