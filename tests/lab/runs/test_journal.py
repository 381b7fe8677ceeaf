import math
import sys
import types

import pytest
import torch

import merit_optim
from merit_lab.runs import Journal, NotWritten, Run, differences, environment
from merit_lab.runs.journal import TensorBoard


@pytest.fixture
def run(tmp_path):
    data = {"folder": "somewhere", "fingerprint": "f" * 64}
    return Run.create(tmp_path / "run", {"seed": 1}, environment(device=torch.device("cpu"), data=data))


def tensorboard_scalars(run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run.folder / "tensorboard")).Reload()
    return {tag: [(x.step, x.value) for x in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_the_environment_says_what_ran_where(run):
    seen = Run.open(run.folder).environment
    assert seen["versions"]["merit-optim"] == merit_optim.__version__
    assert seen["versions"]["torch"] == torch.__version__
    assert seen["device"]["type"] == "cpu"
    assert seen["data"]["fingerprint"] == "f" * 64
    assert seen["command"] == sys.argv


@pytest.mark.parametrize(
    ("changed", "commit"), [("", "0123abc"), (" M src/merit_optim/__init__.py", "0123abc+changes")]
)
def test_the_commit_tells_of_files_that_differ_from_it(monkeypatch, changed, commit):
    answers = {"ls-files": "__init__.py", "rev-parse": "0123abc", "status": changed}
    module = sys.modules["merit_lab.runs.environment"]  # the package has a function of its name
    monkeypatch.setattr(module, "_git", lambda _, command, *__: answers[command])
    assert environment(device=torch.device("cpu"), data={})["commit"] == commit


def test_differences_between_two_environments(run):
    now = {**run.environment, "num_ranks": 4, "versions": {**run.environment["versions"], "torch": "9.9"}}
    assert differences(run.environment, run.environment) == []
    assert differences(run.environment, now) == [f"torch {torch.__version__} -> 9.9", "num_ranks 1 -> 4"]


def test_numbers_reach_the_metrics_file_and_tensorboard(run):
    with Journal(run) as journal:
        journal.write("train", 1, loss=2.0, mfu=None)
        journal.write("attention", 1, max_logits=[[1.0, 3.0], [math.nan, 2.0]], entropy=[[1.0, 2.0]])
        journal.write("update", 1, parameters={"w": {"clipped": 0.25}})
        journal.write("event", 1, what="finished", message="done")
    assert run.metrics("train") == [{"kind": "train", "step": 1, "loss": 2.0, "mfu": None}]
    assert run.status == "finished"
    scalars = tensorboard_scalars(run)
    assert math.isnan(scalars.pop("attention/max_logit_layer_01")[0][1]), "of one head"
    assert scalars == {
        "train/loss": [(1, 2.0)],
        "attention/max_logit_layer_00": [(1, 3.0)],
        "attention/entropy_layer_00": [(1, 1.5)],
        "update_clipped/w": [(1, 0.25)],
    }


def test_going_on_from_a_checkpoint_drops_what_came_after_it(run):
    with Journal(run) as journal:
        journal.write("train", 1, loss=2.0)
        mark = journal.sync()
        journal.write("train", 2, loss=math.nan)
    with Journal(run, mark=mark, step=2) as journal:
        journal.write("train", 2, loss=1.0)
    assert [line["loss"] for line in run.metrics("train")] == [2.0, 1.0]
    assert tensorboard_scalars(run)["train/loss"] == [(1, 2.0), (2, 1.0)]


def test_a_write_that_fails_names_the_folder_and_keeps_whole_lines(run, no_file_larger_than):
    with Journal(run) as journal:
        journal.write("train", 1, loss=2.0)
        size, _ = journal.sync()
        refused = pytest.raises(NotWritten, match=rf"not be written to {run.folder} \(File too large\)\. Fix")
        with refused, no_file_larger_than(size + 10):
            journal.write("event", 1, what="warning", message="x" * 1000)
    assert run.metrics("train") == [{"kind": "train", "step": 1, "loss": 2.0}]


def test_a_full_disk_is_told_once(run, no_file_larger_than, capfd):
    """Not by a thread too, with a traceback of its own."""
    with Journal(run) as journal:
        journal.write("validation", 1, loss=1.0)
        (events,) = (run.folder / "tensorboard").iterdir()
        size = max(events.stat().st_size, run.metrics_path.stat().st_size) + 10
        refused = pytest.raises(NotWritten, match="File too large")
        with refused, no_file_larger_than(size):
            journal.write("validation", 2, loss=1.0)
    assert capfd.readouterr().err == ""


def test_what_went_wrong_first_is_told(run, monkeypatch):
    close = TensorBoard.close

    def fail(sink):
        close(sink)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(TensorBoard, "close", fail)
    with pytest.raises(KeyError), Journal(run):
        raise KeyError
    with pytest.raises(NotWritten), Journal(run):
        pass


def test_weights_and_biases_missing(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ModuleNotFoundError, match="pip install wandb"):
        Journal(run, wandb="project")


def test_weights_and_biases_gets_the_same_numbers(run, monkeypatch):
    class Fake:
        def __init__(self):
            self.logged, self.finished = [], False

        def log(self, values):
            self.logged.append(values)

        def finish(self):
            self.finished = True

    fake, given = Fake(), {}
    module = types.SimpleNamespace(init=lambda **options: given.update(options) or fake)
    monkeypatch.setitem(sys.modules, "wandb", module)
    with Journal(run, wandb="project") as journal:
        journal.write("validation", 3, loss=2.0)
        journal.write("event", 3, what="finished", message="")
    assert given["project"] == "project"
    assert given["config"] == {"seed": 1}
    assert given["resume"] == "allow"
    assert fake.logged == [{"validation/loss": 2.0, "step": 3}]
    assert fake.finished
