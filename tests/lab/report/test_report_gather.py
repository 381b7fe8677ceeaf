"""Which folders are runs, and which runs belong together."""

from pathlib import Path

import pytest
from fake_runs import write_run

from merit_optim.lab.report.gather import find_runs, group


def test_a_folder_stands_for_the_runs_in_it_and_none_counts_twice(one_seed: Path) -> None:
    runs = find_runs([one_seed, one_seed / "merit-lr0.009-seed0"])
    assert [run.name for run in runs] == ["adamw-lr0.001-seed0", "lamb-lr0.01-seed0", "merit-lr0.009-seed0"]


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere: no such folder; give run directories"):
        find_runs([tmp_path / "nowhere"])


def test_a_folder_without_runs_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"empty holds no run; a run is a folder with a config\.json"):
        find_runs([tmp_path / "empty"])


def test_seeds_make_a_series_and_optimizers_keep_one_order(three_seeds: Path) -> None:
    series = group(find_runs([three_seeds]))
    assert [own.label for own in series] == ["AdamW", "LAMB", "MERIT"]
    assert [[run.seed for run in own.runs] for own in series] == [[0, 1, 2]] * 3


def test_what_differs_within_an_optimizer_is_in_the_label(tmp_path: Path) -> None:
    write_run(tmp_path, "merit", lr=2e-2)
    write_run(tmp_path, "merit", lr=9e-3)
    write_run(tmp_path, "lamb", lr=1e-2)
    series = group(find_runs([tmp_path]))
    assert [own.label for own in series] == ["LAMB", "MERIT, lr 0.009", "MERIT, lr 0.02"]


def test_the_half_line_of_a_killed_run_is_left_out(one_seed: Path) -> None:
    metrics = one_seed / "merit-lr0.009-seed0" / "metrics.jsonl"
    before = find_runs([one_seed / "merit-lr0.009-seed0"])[0]
    with metrics.open("a") as file:
        file.write('{"kind": "train", "step": 105, "lo')
    after = find_runs([one_seed / "merit-lr0.009-seed0"])[0]
    assert after.rows == before.rows
