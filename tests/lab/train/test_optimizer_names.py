"""The user's optimizers, named as MODULE:CLASS."""

import json
import signal
import sys

import pytest
import torch

from merit_lab.train import OptimizerConfig, command, train
from merit_lab.train.command import main
from merit_lab.train.loop import Trainer
from merit_lab.train.optimizer_options import load_class
from merit_lab.train.signals import Interrupted
from merit_lab.train.snapshot import Snapshot
from merit_optim import MERIT


def weights(run):
    return Snapshot.find(run.folder).load_model(torch.device("cpu")).state_dict()


@pytest.mark.parametrize("name", [":Mine", "module:", "a module:Mine", "module:Mine:too", "../module:Mine"])
def test_malformed_class_names(name):
    with pytest.raises(ValueError, match=r"as in my_package\.optimizers:Mine"):
        OptimizerConfig(name=name)


def test_a_record_can_be_read_without_the_module():
    assert OptimizerConfig(name="gone_since:Mine", lr=1.0).name == "gone_since:Mine"
    with pytest.raises(ValueError, match="gone_since"):
        load_class("gone_since:Mine")


class Counting(torch.optim.SGD):
    """Keeps a number in its groups and another in its state, as some optimizers do."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["num_steps"] = group.get("num_steps", 0) + 1
            for parameter in group["params"]:
                state = self.state[parameter]
                state["age"] = state.get("age", 0) + 1
                parameter.grad.div_(state["age"] + group["num_steps"])
        return super().step(closure)


class Keeping(torch.optim.SGD):
    """Keeps state that no checkpoint can hold."""

    def step(self, closure=None):
        self.state[self.param_groups[0]["params"][0]]["words"] = {"many"}
        return super().step(closure)


class KeepingOfOurs(MERIT):
    """A subclass of ours that does the same."""

    def step(self, closure=None):
        super().step(closure)
        self.state[self.param_groups[0]["params"][0]]["words"] = {"many"}


class Bounded(MERIT):
    """A subclass of ours with another name."""


@pytest.fixture(autouse=True)
def _mine(monkeypatch):
    """Make this module importable as ``mine``."""
    monkeypatch.setitem(sys.modules, "mine", sys.modules[__name__])


@pytest.mark.parametrize("name", ["Keeping", "KeepingOfOurs"])
def test_state_that_no_checkpoint_can_hold_is_refused_after_the_first_step(name, changed, tmp_path):
    with pytest.raises(ValueError, match=f"{name} keeps a set as 'words' in its state"):
        train(changed(**{"optimizer.name": f"mine:{name}"}), tmp_path)


def test_a_subclass_of_ours_clips_and_skips_as_ours_do(changed, tmp_path):
    options = {"optimizer.max_grad_norm": 0.1, "nonfinite": "skip"}
    expected = train(changed(**options), tmp_path / "merit")
    found = train(changed(**options, **{"optimizer.name": "mine:Bounded"}), tmp_path / "named")
    for one, other in zip(weights(expected).values(), weights(found).values(), strict=True):
        assert torch.equal(one, other)


@pytest.fixture
def handed_over(changed, tmp_path, monkeypatch):
    """A run directory, with values of its optimizer changed, and a module that says when it is imported."""
    (tmp_path / "from_elsewhere.py").write_text("import torch\nclass Mine(torch.optim.SGD): pass\n")
    monkeypatch.syspath_prepend(tmp_path)

    def hand_over(**values):
        run = train(changed(**{"optimizer.name": "torch:SGD", "steps": 1}), tmp_path / "run")
        run.metrics_path.unlink()  # as if it had not started
        for manifest in run.checkpoints.glob("*/manifest.json"):
            manifest.unlink()
        path = run.folder / "config.json"
        config = json.loads(path.read_text())
        path.write_text(json.dumps({**config, "optimizer": {**config["optimizer"], **values}}))
        return run.folder

    yield hand_over
    sys.modules.pop("from_elsewhere", None)


@pytest.mark.parametrize(
    "values",
    [
        {"name": "from_elsewhere:Mine"},
        {"rest": "from_elsewhere:Mine", "rest_lr": 0.1},
    ],
)
def test_a_run_directory_cannot_import_modules_without_trust(values, handed_over, data, capfd):
    folder = handed_over(**values)
    for more in ([], ["--data", str(data)], ["--trust", "another:One"]):
        assert main(["--resume", str(folder), *more]) == 1
        printed = capfd.readouterr().err
        assert (
            "config.json names from_elsewhere:Mine; to resume the run, that code has to be imported"
            in printed
        )
        assert f"merit train --resume {folder} --trust from_elsewhere:Mine" in printed
        assert "from_elsewhere" not in sys.modules


def test_trusted_modules_are_imported(handed_over, capfd):
    folder = handed_over(name="from_elsewhere:Mine")
    assert main(["--resume", str(folder), "--trust", "from_elsewhere:Mine"]) == 0
    assert "from_elsewhere" in sys.modules
    assert "all 1 steps are done" in capfd.readouterr().err


def test_an_interruption_prints_the_resume_command(changed, tmp_path, monkeypatch, capfd):
    def stopping(*_):
        raise Interrupted(signal.SIGTERM, "stopped")

    monkeypatch.setattr(Trainer, "run", stopping)
    config = changed(**{"optimizer.name": "mine:Counting", "optimizer.options": ("momentum=0.5",)})
    monkeypatch.setattr(command, "parse", lambda _: (config, tmp_path / "run", False))
    assert main([]) == 128 + signal.SIGTERM
    assert f"merit train --resume {tmp_path / 'run'} --trust mine:Counting" in capfd.readouterr().err
