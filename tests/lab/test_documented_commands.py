"""Every `merit` command that README and docs show: it is understood, and gets as far as its work."""

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import merit_lab.paper.command
import merit_lab.study.search
import merit_lab.train
from merit_lab.study.cost import Speed
from merit_lab.train import TrainConfig
from merit_lab.train.optimizer import options_in_use
from merit_optim import cli

ROOT = Path(__file__).parents[2]
STUDIES = ("compare", "sweep", "scale", "arena")
DATA = ("demo", "embedded", "openwebtext", "mine", "enwik8", "mix", "c4")


class Reached(Exception):
    """The command was understood and would begin its work."""


def documented() -> list[str]:
    """The commands, with their continuation lines and without what follows a `#` or a `|`."""
    found = []
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        text = re.sub(r"\\\n\s*", " ", page.read_text("utf-8"))
        found += re.findall(r"^ {4}(?:[A-Z]+=\S+ )*merit (.*?)(?:\s+[#|].*)?$", text, flags=re.MULTILINE)
        for sketch in re.findall(r"`merit ([a-z]+ MODEL [^`]+)`", text):
            found.append(sketch.replace("MODEL", "tiny").replace("...", "data/embedded").replace("LOSS", "3"))
    return list(dict.fromkeys(found))


TRAINING = [line for line in documented() if line.split()[0] in ("train", "reproduce", *STUDIES)]
OTHERS = [line for line in documented() if line not in TRAINING]


@pytest.fixture
def somewhere(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with the data, the model and the module that the documentation speaks of."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    Path("data").mkdir()
    for name in DATA:
        Path("data", name).symlink_to(data)
    Path("my_optimizers.py").write_text("from torch.optim import SGD as Mine\n")
    Path("runs.jsonl").write_text('{"model": "tiny", "optimizer.lr": 0.01, "batch": 8, "steps": 1}\n')


@pytest.fixture
def no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands stop where their work would begin, with all of it planned."""

    def train(config: TrainConfig | None, *_: Any, **__: Any) -> None:
        if config is not None:
            options_in_use(config.resolve(256))
        raise Reached

    def carry_out(trials: list[Any], *_: Any, **__: Any) -> None:
        assert trials
        raise Reached

    def reproduce(*_: Any) -> None:
        raise Reached

    monkeypatch.setattr(merit_lab.train, "train", train)
    monkeypatch.setattr(merit_lab.study.search, "carry_out", carry_out)
    command = merit_lab.paper.command
    monkeypatch.setattr(command, "reproduce", reproduce)
    monkeypatch.setattr(command.cost, "find_speed", lambda _: Speed(1e30, 1, "the test's"))
    monkeypatch.setattr(command, "_agreed", lambda *_: True)


@pytest.mark.usefixtures("somewhere", "no_work")
@pytest.mark.parametrize("text", TRAINING)
def test_what_trains_gets_as_far_as_its_work(
    text: str, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = shlex.split(text)
    if "--resume" in arguments:
        arguments[arguments.index("--resume") + 1] = str(trained)
    if any(argument.startswith("hf:") for argument in arguments):
        arguments[1] = _write_model(Path("model"))
    try:
        status = cli.main(arguments)
    except Reached:
        return
    assert status == 0, capsys.readouterr().err
    assert "--list" in arguments


@pytest.mark.parametrize("text", OTHERS)
def test_the_others_have_the_options_that_are_shown(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    name, *arguments = shlex.split(text)
    kind = arguments[:1] if name == "prepare" else []
    with pytest.raises(SystemExit) as ended:
        cli.main([name, *kind, "--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert not [argument for argument in arguments if argument.startswith("--") and argument not in shown]


def _write_model(folder: Path) -> str:
    """A small model of Hugging Face's, in place of the one that is named."""
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen2Config(
        vocab_size=256,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=512,
    )
    transformers.Qwen2ForCausalLM(config).save_pretrained(folder)
    return f"hf:{folder}"


def test_help_is_there_at_once() -> None:
    """It brings no torch, which alone takes seconds."""
    script = """
import contextlib, io, sys
from merit_optim.cli import main
for command in ("train", "compare", "sweep", "scale", "arena"):
    for arguments in ([], ["tiny"]):
        with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
            main([command, *arguments, "--help"])
print(sorted({"torch", "transformers", "altair"} & sys.modules.keys()))
"""
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert done.stdout == "[]\n"
