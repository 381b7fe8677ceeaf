import contextlib
import errno
import json
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystem

from merit_lab.runs import NotWritten, Run
from merit_lab.train import checkpoint, train
from merit_lab.train.checkpoint import Damaged, _written, find, read


def unfinish(run):
    """Remove the last line of the metrics, which says that the run has finished."""
    lines = run.metrics_path.read_bytes().splitlines(keepends=True)
    run.metrics_path.write_bytes(b"".join(lines[:-1]))


@pytest.fixture
def unfinished(changed, tmp_path):
    """A run directory with checkpoints at steps 5 and 10, and 2 steps left."""
    run = train(changed(), tmp_path / "run")
    unfinish(run)
    (run.checkpoints / "step-00000012" / "manifest.json").unlink()
    return run


@pytest.fixture(scope="module")
def trained_once(tmp_path_factory):
    return tmp_path_factory.mktemp("trained") / "whole"


@pytest.fixture
def whole(changed, trained_once, tmp_path):
    """The same run, uninterrupted; three checkpoints are kept. Each test gets a copy."""
    if not trained_once.exists():
        train(changed(**{"checkpoint.keep": 3}), trained_once)
    return Run.open(shutil.copytree(trained_once, tmp_path / "whole"))


def cut_short(path):
    path.write_bytes(path.read_bytes()[:-100])


def change_a_byte(path):
    content = bytearray(path.read_bytes())
    content[-len(content) // 3] ^= 1
    path.write_bytes(content)


def remove(path):
    path.unlink()


@pytest.mark.parametrize("harm", [cut_short, change_a_byte, remove])
@pytest.mark.parametrize("kind", ["*.safetensors", "manifest.json"])
def test_damage_is_detected_and_the_previous_checkpoint_is_used(harm, kind, whole, measured):
    [path] = (whole.checkpoints / "step-00000012").glob(kind)
    harm(path)
    with pytest.raises(Damaged, match="step-00000012"):
        read(path.parent)
    expected = measured(whole)
    unfinish(whole)
    run = train(None, whole.folder, resume=True)
    [event] = [event for event in run.metrics("event") if event["what"] == "resumed"]
    assert event["step"] == 10
    assert "from step-00000010" in event["message"]
    assert "step-00000012" in event["message"]
    assert measured(run) == expected
    assert read(run.checkpoints / "step-00000012").step == 12


def test_without_a_good_checkpoint_a_run_starts_over(whole, measured):
    expected = measured(whole)
    for path in whole.checkpoints.glob("*/*.safetensors"):
        cut_short(path)
    unfinish(whole)
    run = train(None, whole.folder, resume=True)
    assert "from the beginning" in run.metrics("event")[0]["message"]
    assert measured(run) == expected


def test_a_damaged_checkpoint_does_not_outlive_good_ones(changed, tmp_path):
    run = train(changed(**{"checkpoint.keep": 1}), tmp_path)
    unfinish(run)
    cut_short(next((run.checkpoints / "step-00000012").glob("*.safetensors")))
    original, left = checkpoint.save, []

    def save(*arguments, **options):
        original(*arguments, **options)
        left.append(sorted(path.name for path in run.checkpoints.iterdir()))

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(checkpoint, "save", save)
        train(None, tmp_path, resume=True)
    assert left == [["step-00000005"], ["step-00000010"], ["step-00000012"]]


def manifest_of(run, step=12):
    path = run.checkpoints / f"step-{step:08d}" / "manifest.json"
    return path, json.loads(path.read_text())


@pytest.mark.parametrize("suffix", [".json", ".safetensors"])
def test_a_file_that_cannot_be_read_now_is_not_damaged(whole, monkeypatch, suffix):
    """A file server may answer later; with an older one in its place this one would be deleted."""

    def fail(path, *arguments, **options):
        if path.suffix == suffix:
            raise OSError(errno.ESTALE, "Stale file handle", str(path))
        return opened(path, *arguments, **options)

    def read_bytes(path):
        with fail(path, "rb") as file:
            return file.read()

    opened = Path.open
    monkeypatch.setattr(Path, "open", fail)
    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    with pytest.raises(OSError, match="Stale file handle; try again later, or remove this checkpoint"):
        find(whole.checkpoints)


def test_no_byte_of_a_manifest_changes_unnoticed(whole):
    path, _ = manifest_of(whole)
    content = path.read_bytes()
    for place in [*range(0, len(content), 101), len(content) - 1]:
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        with pytest.raises(Damaged, match="step-00000012"):
            read(path.parent)
    path.write_bytes(content)
    assert read(path.parent).step == 12


def test_wrong_values_in_a_manifest_with_its_hash(whole):
    path, values = manifest_of(whole)
    del values["sha256"]
    for change in (
        *({"step": 11}, {"step": "12"}, {"step": 10**400}, {"metrics": [1.5, "f"]}, {"seconds": "long"}),
        *({"files": ["a"]}, {"optimizers": [1]}, {"optimizers": None}),
    ):
        path.write_bytes(_written({**values, **change}))
        with pytest.raises(Damaged, match="step-00000012"):
            read(path.parent)
    assert find(whole.checkpoints)[0][0].name == "step-00000010"


def test_a_digit_that_changed_in_the_measurements_is_noticed(whole):
    unfinish(whole)
    content = whole.metrics_path.read_bytes()
    place = content.index(b'"loss": ') + len(b'"loss": ')
    whole.metrics_path.write_bytes(content[:place] + b"9" + content[place + 1 :])
    with pytest.raises(ValueError, match="has changed in its first"):
        train(None, whole.folder, resume=True)


def test_a_file_that_is_not_a_manifest(whole):
    path, _ = manifest_of(whole)
    for text in ("[]", "null", "12", "[" * 100_000):
        path.write_text(text)
        with pytest.raises(Damaged, match="no readable manifest"):
            read(path.parent)


def test_unlisted_weight_files_are_refused(whole):
    path, values = manifest_of(whole)
    (shard,) = values["files"]
    shutil.copy(whole.checkpoints / "step-00000005" / shard, path.with_name(".hidden.safetensors"))
    with pytest.raises(Damaged, match=r"\.hidden\.safetensors was not written with the checkpoint"):
        read(path.parent)
    assert find(whole.checkpoints)[0][0].name == "step-00000010"


def test_a_checkpoint_under_the_name_of_another_step(whole):
    shutil.copytree(whole.checkpoints / "step-00000005", whole.checkpoints / "step-00000013")
    found, (complaint,) = find(whole.checkpoints)
    assert found[0].name == "step-00000012"
    assert "step-00000013 has the manifest of another step, 5" in complaint


def test_an_old_checkpoint_that_cannot_be_removed_does_not_fail_the_save(changed, tmp_path, monkeypatch):
    remove_folder = os.rmdir

    def held_open(path, **options):  # as on NFS while the file is open
        if "step-00000005" in str(path):
            raise OSError(errno.ENOTEMPTY, "Directory not empty")
        remove_folder(path, **options)

    monkeypatch.setattr(os, "rmdir", held_open)
    run = train(changed(**{"checkpoint.keep": 1}), tmp_path)
    assert [event["what"] for event in run.metrics("event")] == ["started", "finished"]
    assert find(run.checkpoints)[0][0].name == "step-00000012"


@pytest.fixture
def full_disk(monkeypatch):
    """A disk on which checkpoints of some steps do not fit: writing them fails halfway."""

    def fill(*steps):
        original = FileSystem.create_stream

        @contextlib.contextmanager
        def create_stream(self, path, mode):
            with original(self, path, mode) as stream:
                if mode == "wb" and any(f"step-{step:08d}" in str(path) for step in steps):
                    stream.write(b"x" * 1000)
                    raise OSError(errno.ENOSPC, "No space left on device")
                yield stream

        monkeypatch.setattr(FileSystem, "create_stream", create_stream)

    return fill


def test_a_full_disk_is_reported_and_training_continues(full_disk, changed, tmp_path, whole, measured):
    full_disk(10)
    run = train(changed(), tmp_path / "run")
    [event] = [event for event in run.metrics("event") if event["what"] == "warning"]
    assert event["step"] == 10
    assert f"written to {run.checkpoints} (No space left on device); earlier checkpoints" in event["message"]
    assert sorted(path.name for path in run.checkpoints.iterdir()) == ["step-00000005", "step-00000012"]
    assert measured(run) == measured(whole)


def test_a_disk_that_stays_full_leaves_the_last_good_checkpoint(
    full_disk, changed, tmp_path, monkeypatch, whole, measured
):
    full_disk(10, 12)
    with pytest.raises(
        NotWritten, match=r"could be written to .*run/checkpoints \(No space left.*Fix the cau"
    ):
        train(changed(), tmp_path / "run")
    (path, manifest), complaints = find(tmp_path / "run" / "checkpoints")
    assert (path.name, manifest.step, complaints) == ("step-00000005", 5, [])
    monkeypatch.undo()
    assert measured(train(None, tmp_path / "run", resume=True)) == measured(whole)


def test_loading_runs_no_code(unfinished, monkeypatch):
    class Harm:
        def __reduce__(self):
            return pytest.fail, ("code from a file was run",)

    for path in unfinished.checkpoints.iterdir():
        (path / ".metadata").write_bytes(pickle.dumps(Harm()))
        (path / "more.distcp").write_bytes(pickle.dumps(Harm()))

    def refuse(*_, **__):
        pytest.fail("something was unpickled")

    for owner, name in ((pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"), (torch, "load")):
        monkeypatch.setattr(owner, name, refuse)
    assert train(None, unfinished.folder, resume=True).status == "finished"
