"""A file of kept runs gives back what was put in, and is never damaged or lost in silence."""

import hashlib
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest
from polars.testing import assert_frame_equal
from written_runs import write_run

from merit_lab.runs import archive, table
from merit_lab.runs.archive import thinned
from merit_lab.runs.keep_command import keep, main
from merit_lab.runs.measurements import Measurements


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file with two runs."""
    for seed in range(2):
        write_run(tmp_path / "runs" / f"seed{seed}", seed=seed)
    keep([tmp_path / "runs"], tmp_path / "kept" / "runs.parquet")
    return tmp_path / "kept" / "runs.parquet"


def test_a_kept_run_is_read_as_its_directory(tmp_path: Path, file: Path) -> None:
    read, kept = table.read(tmp_path / "runs"), table.read(file)
    machine = {f"environment.{name}" for name in ("host", "command", "folder")}
    paths = ["folder", "data", "environment.data.folder"]
    same = [name for name in read.runs.columns if name not in {*machine, *paths}]
    assert set(kept.runs.columns) >= set(same)
    assert not machine & set(kept.runs.columns)
    assert kept.runs["data"].to_list() == kept.runs["environment.data.folder"].to_list() == ["enwik8"] * 2
    assert_frame_equal(kept.runs.select(same), read.runs.select(same), rel_tol=1e-4)
    lists = ["max_logits", "entropies", "updates"]
    assert_frame_equal(kept.steps.drop(lists), read.steps.drop(lists), rel_tol=1e-4)
    assert kept.steps["max_logits"][2].to_list() == [[2.33, 2.0], [2.33, 3.0]]
    assert kept.steps["updates"].count() == 2 * 6


def test_what_is_kept_of_kept_runs_is_all_of_it(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "seed0")
    Measurements(tmp_path / "runs" / "seed0" / "evaluate" / "step-00000008.json").put(
        "a", {}, {"value": 1 / 3}
    )
    keep([tmp_path / "runs"], tmp_path / "first")
    keep([tmp_path / "first"], tmp_path / "second")
    assert table.read(tmp_path / "first").runs["evaluate.a"][0] == 1 / 3
    for first, second in zip(*map(table.read, (tmp_path / "first", tmp_path / "second")), strict=True):
        dropped = ["folder"] if "folder" in first.columns else []
        assert_frame_equal(first.drop(dropped), second.drop(dropped), check_exact=True)


def test_long_curves_keep_their_ends_and_every_validation(tmp_path: Path) -> None:
    write_run(tmp_path / "one", steps=400)
    whole = table.read(tmp_path).steps
    for steps in (thinned(whole), thinned(thinned(whole))):
        counts = {
            name: steps[name].count() for name in ("training_loss", "updates", "max_logits", "entropies")
        }
        assert counts == {"training_loss": 50, "updates": 6, "max_logits": 11, "entropies": 3}
        assert steps["validation_loss"].count() == steps["max_logit"].count() == 201
        logged = steps.filter(pl.col("training_loss").is_not_null())["step"]
        assert (logged.min(), logged.max()) == (1, 400)
        assert logged.diff().n_unique() > 3, "not a stride, which may hit the monitored steps alone"


def test_every_flipped_bit_is_noticed(file: Path) -> None:
    lots, content = random.Random(0), file.read_bytes()
    hashes = archive.hash_path(file)
    for path in (file, hashes):
        before = path.read_bytes()
        for _ in range(60):
            place = lots.randrange(len(before) if path == file else 64)
            path.write_bytes(
                before[:place] + bytes([before[place] ^ 1 << lots.randrange(7)]) + before[place + 1 :]
            )
            with pytest.raises(ValueError, match="is not as it was kept: its sha256 is not"):
                table.read(file)
        path.write_bytes(before)
    assert hashes.read_text() == f"{hashlib.sha256(content).hexdigest()}  runs.parquet\n", (
        "as sha256sum writes it"
    )
    hashes.unlink()
    with pytest.raises(ValueError, match=r"sha256 is missing.* sha256sum runs\.parquet"):
        table.read(file)


def test_a_table_of_others_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "runs.parquet"
    for content, reason in ((b"PAR1", "cannot be read"), (None, "has other columns")):
        if content is None:
            pl.DataFrame({"run": ["one"]}).write_parquet(path)
        else:
            path.write_bytes(content)
        archive.hash_path(path).write_text(hashlib.sha256(path.read_bytes()).hexdigest())
        with pytest.raises(ValueError, match=rf"runs\.parquet {reason}"):
            table.read(path)


_KEEP = """
import os, signal, sys
from pathlib import Path
from merit_lab.runs import durable
from merit_lab.runs.keep_command import main

place, left = durable._sync, int(sys.argv[1])

def sync(path):
    global left
    left -= 1
    if left < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    place(path)

durable._sync = sync
main([sys.argv[2], "--out", sys.argv[3]])
"""


def test_a_kill_while_keeping_leaves_the_old_runs_or_the_new(tmp_path: Path, file: Path) -> None:
    write_run(tmp_path / "more" / "seed2", seed=2)
    for num_syncs in range(7):
        command = [sys.executable, "-c", _KEEP, str(num_syncs), tmp_path / "more", file.parent]
        status = subprocess.run(command, check=False, env={**os.environ}).returncode
        names = table.read(file).runs["run"].to_list()
        assert names in (["seed0", "seed1"], ["seed0", "seed1", "seed2"])
        if status != -signal.SIGKILL:
            break
    assert num_syncs > 3
    assert len(names) == 3


def test_a_file_that_others_change_meanwhile_is_not_written_over(file: Path, monkeypatch) -> None:
    heads, steps = archive.read(file)

    def change(frame: pl.DataFrame) -> pl.DataFrame:
        monkeypatch.undo()
        archive.add(file, [heads[0]._replace(name="theirs")], steps)
        return thinned(frame)

    monkeypatch.setattr(archive, "thinned", change)
    with pytest.raises(ValueError, match="changed by another process in the meantime; repeat"):
        archive.add(file, [heads[0]._replace(name="ours")], steps)
    assert table.read(file).runs["run"].to_list() == ["seed0", "seed1", "theirs"]


def test_a_full_disk_leaves_the_file_as_it_was(
    file: Path, tmp_path: Path, no_file_larger_than, capsys
) -> None:
    write_run(tmp_path / "more" / "seed2", seed=2)
    before = file.read_bytes()
    with no_file_larger_than(1000):
        assert main([str(tmp_path / "more"), "--out", str(file.parent)]) == 1
    assert "File too large" in capsys.readouterr().err
    assert sorted(path.name for path in file.parent.iterdir()) == ["runs.parquet", "runs.parquet.sha256"]
    assert file.read_bytes() == before
    assert table.read(file).runs.height == 2
