"""The examples of training libraries run as their first lines say, and a resumed run is the same run."""

import importlib
import re
import runpy
import sys
from pathlib import Path

import pytest

from merit_optim.optim.registry import FAMILY

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(name: str, *arguments: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")


def needs(*packages: str) -> None:
    for package in packages:
        try:
            importlib.import_module(package)
        except ImportError:
            pytest.skip(f"needs {package}")


def printed(capsys: pytest.CaptureFixture[str]) -> dict[int, str]:
    """The last loss printed for each step."""
    return {
        int(step): loss for step, loss in re.findall(r"step (\d+): loss ([\d.]+)", capsys.readouterr().out)
    }


def assert_resumes(
    name: str, option: str, values: tuple[int, int], folder: str, tmp_path, monkeypatch, capsys
) -> None:
    """Straight through, and in two parts, to the same loss."""
    first, second = map(str, values)
    run(name, option, second, folder, str(tmp_path / "whole"), monkeypatch=monkeypatch)
    whole = printed(capsys)
    run(name, option, first, folder, str(tmp_path / "parts"), monkeypatch=monkeypatch)
    begun = printed(capsys)
    run(name, option, second, folder, str(tmp_path / "parts"), monkeypatch=monkeypatch)
    resumed = printed(capsys)
    assert max(resumed) == max(whole) > max(begun)
    assert resumed[max(resumed)] == whole[max(whole)] != begun[max(begun)]
    assert float(whole[max(whole)]) < 3  # the logarithm of 64 tokens is 4.16


@pytest.mark.parametrize(
    "name",
    ["plain.py", "trainer.py", "accelerate_train.py", "lightning_train.py"],
    ids=lambda name: name[:-3],
)
def test_an_unknown_optimizer_is_refused_with_the_nearest(name, tmp_path, monkeypatch) -> None:
    needs("transformers", "accelerate", "lightning")
    monkeypatch.chdir(tmp_path)
    words = (
        r"unknown optimizer 'muonmerti'; did you mean 'MuonMERIT'\? Known optimizers: .*MERIT, .*SOAPMERIT\."
    )
    with pytest.raises(ValueError, match=words):
        run(name, "--optimizer", "muonmerti", monkeypatch=monkeypatch)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "arguments",
    [
        ("plain.py", "--steps", "2", "--checkpoint"),
        ("trainer.py", "--steps", "2", "--folder"),
        ("accelerate_train.py", "--steps", "2", "--folder"),
        ("lightning_train.py", "--epochs", "1", "--folder"),
    ],
    ids=lambda arguments: arguments[0][:-3],
)
@pytest.mark.parametrize("optimizer", ["MERIT", "SOAPMERIT"])
@pytest.mark.filterwarnings(
    "ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning"
)  # Lightning's
def test_other_optimizers_by_name(arguments, optimizer, tmp_path, monkeypatch) -> None:
    """MuonMERIT is the default, and in all the other tests."""
    needs("transformers", "accelerate", "lightning")
    made = []
    build = FAMILY[optimizer].__init__

    def noted(self, *args, **kwargs) -> None:
        made.append(type(self).__name__)
        build(self, *args, **kwargs)

    monkeypatch.setattr(FAMILY[optimizer], "__init__", noted)
    run(*arguments, str(tmp_path / "out"), "--optimizer", optimizer, monkeypatch=monkeypatch)
    assert made == [optimizer]


def test_plain(tmp_path, monkeypatch, capsys) -> None:
    assert_resumes("plain.py", "--steps", (20, 40), "--checkpoint", tmp_path, monkeypatch, capsys)


def test_resume_adamw(tmp_path, monkeypatch, capsys) -> None:
    run("resume_adamw.py", "--checkpoint", str(tmp_path / "adamw.pt"), monkeypatch=monkeypatch)
    before, options, after = capsys.readouterr().out.splitlines()
    assert options == "MERIT: lr 0.009, moments of 20 steps"
    losses = [float(re.search(r"loss (\S+)", line).group(1)) for line in (before, after)]
    assert losses[1] < losses[0] < 4.2


def test_monitor_huggingface(monkeypatch, capsys) -> None:
    needs("transformers")
    run("monitor_huggingface.py", "--tokens", "16", monkeypatch=monkeypatch)
    lines = capsys.readouterr().out.splitlines()[-3:]
    assert [line.split()[0] for line in lines] == [f"transformer.h.{i}.attn" for i in range(3)]
    assert all(float(line.split()[1]) > 0 and 1 < float(line.split()[2]) < 2.78 for line in lines)


@pytest.mark.parametrize("way", [[], ["--by-factory"]], ids=["optimizers", "factory"])
def test_trainer(way, tmp_path, monkeypatch) -> None:
    needs("transformers", "accelerate")
    import json

    for folder, steps in (("whole", "20"), ("parts", "10"), ("parts", "20")):
        arguments = ["--steps", steps, "--folder", str(tmp_path / folder), *way]
        run("trainer.py", *arguments, monkeypatch=monkeypatch)
    histories = []
    for folder in ("whole", "parts"):
        state = json.loads((tmp_path / folder / "checkpoint-20" / "trainer_state.json").read_text())
        histories.append(
            {
                key: value
                for entry in state["log_history"]
                if entry["step"] == 20
                for key, value in entry.items()
            }
        )
    whole, parts = histories
    assert {
        "loss",
        "attention/max_logit",
        "attention/min_entropy",
        "update/clipped",
        "update/relative_change",
    } <= set(whole)
    assert whole == parts
    assert 0 < whole["loss"] < 3.5


def test_trainer_knows_when_it_is_done(tmp_path, monkeypatch, capsys) -> None:
    needs("transformers", "accelerate")
    run("trainer.py", "--steps", "4", "--folder", str(tmp_path), monkeypatch=monkeypatch)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    capsys.readouterr()
    for steps in ("4", "3"):
        run("trainer.py", "--steps", steps, "--folder", str(tmp_path), monkeypatch=monkeypatch)
        assert capsys.readouterr().out == "4 steps are done; use --steps for more\n"
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}


def test_accelerate(tmp_path, monkeypatch, capsys) -> None:
    needs("transformers", "accelerate")
    assert_resumes("accelerate_train.py", "--steps", (10, 20), "--folder", tmp_path, monkeypatch, capsys)


def test_accelerate_goes_beyond_an_epoch_and_knows_when_it_is_done(tmp_path, monkeypatch, capsys) -> None:
    needs("transformers", "accelerate")
    arguments = ("accelerate_train.py", "--steps", "130", "--folder", str(tmp_path))  # an epoch has 128
    run(*arguments, monkeypatch=monkeypatch)
    assert max(printed(capsys)) == 130
    run(*arguments, monkeypatch=monkeypatch)
    assert capsys.readouterr().out == "130 steps are done; use --steps for more\n"


# Lightning's own: that there is a checkpoint to resume from, and a name of torch's that is being replaced.
@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty:UserWarning")
@pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning")
def test_lightning(tmp_path, monkeypatch, capsys) -> None:
    needs("lightning")
    assert_resumes("lightning_train.py", "--epochs", (1, 2), "--folder", tmp_path, monkeypatch, capsys)
    arguments = ("--epochs", "2", "--folder", str(tmp_path / "parts"))
    run("lightning_train.py", *arguments, monkeypatch=monkeypatch)
    assert "2 epochs are done" in capsys.readouterr().out
    logged = (tmp_path / "whole" / "logs" / "version_0" / "metrics.csv").read_text().splitlines()
    assert {"attention/max_logit", "update/clipped", "loss"} <= set(logged[0].split(","))
