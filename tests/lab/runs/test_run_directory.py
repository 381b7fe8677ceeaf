import json
import math

import pytest

from merit_lab.runs import FORMAT, Journal, MetricsWriter, Run, lock, read_metrics

CONFIG = {"seed": 1, "optimizer": {"name": "merit"}}
ENVIRONMENT = {"started": "2026-01-01T00:00:00+00:00"}


@pytest.fixture
def run(tmp_path):
    return Run.create(tmp_path / "a-run", CONFIG, ENVIRONMENT)


def events(run, *what):
    with MetricsWriter(run.metrics_path) as writer:
        for step, event in enumerate(what):
            writer.write({"kind": "event", "step": step, "what": event, "message": "..."})


def test_what_was_created_is_what_is_opened(run):
    opened = Run.open(str(run.folder))
    assert (opened.config, opened.environment, opened.name) == (CONFIG, ENVIRONMENT, "a-run")
    assert opened.metrics("train") == []


def test_a_folder_takes_one_run(run):
    with pytest.raises(FileExistsError, match="holds a run already"):
        Run.create(run.folder, CONFIG, ENVIRONMENT)


def test_a_folder_without_a_run_or_its_environment(run, tmp_path):
    (run.folder / "environment.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"environment\.json is missing; restore"):
        Run.open(run.folder)
    with pytest.raises(FileNotFoundError, match=r"holds no run.*config\.json"):
        Run.open(tmp_path)


@pytest.mark.parametrize("version", [FORMAT + 1, None])
def test_a_config_of_another_version(run, version):
    config = {**CONFIG, "format": version} if version else CONFIG
    (run.folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=rf"format {version}.*reads format {FORMAT}"):
        Run.open(run.folder)


@pytest.mark.parametrize(
    ("what", "status"),
    [
        ([], "unfinished"),
        (["started"], "unfinished"),
        (["started", "finished"], "finished"),
        (["started", "skipped", "diverged"], "diverged"),
        (["started", "interrupted"], "interrupted"),
        (["started", "interrupted", "resumed"], "unfinished"),
        (["started", "interrupted", "resumed", "finished", "warning"], "finished"),
    ],
)
def test_status_is_told_by_the_last_event_that_ends_or_begins(run, what, status):
    events(run, *what)
    assert run.status == status


def test_a_locked_run_is_running(run):
    events(run, "started", "interrupted")
    with lock(run.folder):
        assert run.status == "running"
    assert run.status == "interrupted"


def test_numbers_come_back_as_they_were(run):
    line = {"kind": "train", "step": 1, "loss": math.inf, "mfu": None, "nested": [[-math.inf, 0.1], {"x": 3}]}
    with MetricsWriter(run.metrics_path) as writer:
        writer.write(line)
        writer.write({"kind": "validation", "step": 1, "loss": math.nan})
    assert run.metrics("train") == [line]
    assert math.isnan(run.metrics("validation")[0]["loss"])
    for text in run.metrics_path.read_text().splitlines():
        json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def test_every_line_is_in_the_file_at_once(run):
    with MetricsWriter(run.metrics_path) as writer:
        writer.write({"kind": "train", "step": 1})
        assert len(run.metrics("train")) == 1


def test_metrics_are_cut_where_a_checkpoint_was_made(run):
    with MetricsWriter(run.metrics_path) as writer:
        writer.write({"kind": "train", "step": 1})
        mark = writer.sync()
        writer.write({"kind": "train", "step": 2, "loss": 1.0})
    with MetricsWriter(run.metrics_path, mark) as writer:
        assert writer.sync() == mark
        writer.write({"kind": "train", "step": 2, "loss": 2.0})
    assert [line.get("loss") for line in run.metrics("train")] == [None, 2.0]


@pytest.mark.parametrize("change", [lambda text: text.replace("2.5", "2.6"), lambda text: text[:-9]])
def test_metrics_that_changed_since_the_checkpoint_are_refused(run, change):
    with MetricsWriter(run.metrics_path) as writer:
        writer.write({"kind": "validation", "step": 1, "loss": 2.5})
        mark = writer.sync()
    changed = change(run.metrics_path.read_text())
    run.metrics_path.write_text(changed)
    with pytest.raises(ValueError, match=r"has changed in its first \d+ bytes"):
        Journal(run, mark=mark)
    assert run.metrics_path.read_text() == changed, "nothing is written over"
    assert not (run.folder / "tensorboard").exists()


def test_a_last_line_cut_short_is_no_line(run):
    run.metrics_path.write_text('{"kind": "train", "step": 1}\n{"kind": "tra')
    assert [line["step"] for line in read_metrics(run.metrics_path)] == [1]
