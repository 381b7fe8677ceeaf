import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from merit_lab import progress
from merit_lab import train as training
from merit_lab.data import Dataset
from merit_lab.models import PRESETS
from merit_lab.runs import Run
from merit_lab.train import Interrupted
from merit_lab.train.command import main, parse
from merit_lab.train.loop import Trainer
from merit_lab.train.parallel import Ranks

TOY = ["--model.width", "32", "--model.heads", "2", "--model.layers", "1", "--model.context", "32"]
TOY += ["--batch", "4", "--steps", "3"]


def test_a_model_and_options(data, tmp_path):
    options = ["--data", str(data), "--out", str(tmp_path), "--optimizer.name", "merit", "--model.qk-norm"]
    config, folder, resume = parse(["nano-10m", *options])
    assert (folder, resume) == (tmp_path, False)
    assert (config.model.width, config.model.qk_norm) == (PRESETS["nano-10m"].width, True)
    assert (config.optimizer.name, config.data) == ("merit", data)


def test_the_slurm_example_parses():
    script = (Path(__file__).parents[3] / "examples" / "slurm.sh").read_text()
    arguments = script.partition("-m merit_optim train ")[2].replace("\\\n", "")
    config, folder, resume = parse(shlex.split(arguments))
    assert (str(config.data), str(folder), resume) == ("$DATA", "$OUT", "auto")


def test_the_default_folder(data):
    assert str(parse(["tiny", "--data", str(data), "--seed", "3"]).folder) == "runs/tiny-merit-lr0.009-seed3"


@pytest.mark.parametrize("option", [["--model.vocab-size", "256"], ["--model.vocab_size=256"]])
def test_a_vocabulary_that_the_data_would_replace_is_refused(data, option, monkeypatch):
    command = ["tiny", "--data", str(data), *option]
    assert parse(command).config.model.vocab_size == 256  # these data do not name their tokenizer
    monkeypatch.setattr(Dataset, "vocab_size", 300)
    with pytest.raises(
        ValueError, match=r"vocab-size is 256, but .* to 320; leave the option out, or add --no-fit"
    ):
        parse(command)
    assert parse([*command, "--no-fit-vocab"]).config.model.vocab_size == 256
    monkeypatch.setattr(Dataset, "vocab_size", 256)
    assert parse(command).config.model.vocab_size == 256


def test_training_and_its_exit_status(data, tmp_path, capfd):
    assert main(["tiny", *TOY, "--data", str(data), "--out", str(tmp_path)]) == 0
    printed = capfd.readouterr()
    first, second = printed.out.splitlines()
    assert re.fullmatch(rf"The run is in {tmp_path}, with a validation loss of \d\.\d{{4}}\.", first)
    assert second == f"To see it: merit report {tmp_path}"
    assert Run.open(tmp_path).status == "finished"
    assert main(["--resume", str(tmp_path)]) == 0
    assert main(["--resume", str(tmp_path / "nothing")]) == 1
    assert "holds no run" in capfd.readouterr().err
    assert not (tmp_path / "nothing").exists()


def test_a_run_goes_on_when_nobody_reads_its_progress(data, tmp_path):
    """As in `merit train ... 2>&1 | head -1`."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "merit_optim", "train", "tiny", *TOY, "--data", str(data)]
    command += ["--out", str(tmp_path / "run")]
    try:
        ended = subprocess.run(command, stdout=subprocess.PIPE, stderr=writing, text=True, check=False)
    finally:
        os.close(writing)
    assert ended.returncode == 0
    assert ended.stdout.startswith(f"The run is in {tmp_path / 'run'}")
    assert Run.open(tmp_path / "run").status == "finished"


def test_only_the_first_rank_prints(run, capfd, monkeypatch):
    tmp_path = run
    monkeypatch.setattr(training, "train", lambda *_, **__: Run.open(tmp_path))
    monkeypatch.setenv("RANK", "1")
    assert main(["--resume", str(tmp_path)]) == 0
    assert capfd.readouterr().out == ""

    def interrupted(*_, **__):
        raise Interrupted(15, "stopped by SIGTERM")

    monkeypatch.setattr(training, "train", interrupted)
    assert main(["--resume", str(tmp_path)]) == 128 + 15
    assert capfd.readouterr().err == ""
    monkeypatch.setenv("RANK", "0")
    assert main(["--resume", str(tmp_path)]) == 128 + 15
    assert "To resume: merit train --resume" in capfd.readouterr().err


def test_a_run_resumes_with_moved_data(data, tmp_path, capfd, monkeypatch):
    before = shutil.copytree(data, tmp_path / "before")
    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "run", lambda _: pytest.fail("as if it died"))
        with pytest.raises(pytest.fail.Exception):
            main(["tiny", *TOY, "--data", str(before), "--out", str(tmp_path / "run")])
    before.rename(tmp_path / "after")
    assert main(["--resume", str(tmp_path / "run")]) == 1
    assert (
        "before does not exist any more; if it has moved, give the folder with --data"
        in capfd.readouterr().err
    )
    assert main(["--resume", str(tmp_path / "run"), "--data", str(tmp_path / "after")]) == 0
    assert Run.open(tmp_path / "run").status == "finished"


def test_a_disk_that_is_full_at_the_end(data, tmp_path, capfd, no_file_larger_than):
    folder = tmp_path / "run"
    with no_file_larger_than(60_000):
        assert main(["tiny", *TOY, "--data", str(data), "--out", str(folder)]) == 1
    last = capfd.readouterr().err.splitlines()[-1]
    assert f"no checkpoint could be written to {folder / 'checkpoints'} (File too large)" in last
    assert last.endswith(f"Fix the cause, then resume the run: merit train --resume {folder}")
    assert main(["--resume", str(folder)]) == 0
    assert Run.open(folder).status == "finished"


def test_a_run_that_diverged_has_failed(data, tmp_path, capfd):
    options = ["--optimizer.name", "adamw", "--optimizer.lr", "1e38", "--data", str(data)]
    assert main(["tiny", *TOY, *options, "--out", str(tmp_path)]) == 1
    assert "the run diverged" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["tinny"], "did you mean 'tiny'"),
        (["--resume", "x", "--seed", "1"], "arguments: --seed 1; a run is resumed with the options that it"),
        (["--data", "x"], "error: the model is missing; it comes first"),
        (["tiny", "--data", "x", "--resume", "y"], "without tiny: merit train --resume FOLDER"),
        (["tiny", "--data", "x", "--optimizer.weight-decy", "1"], "--optimizer.weight-decay"),
        (
            ["tiny", "--data", "x", "--model.layers", "1000000000"],
            "layers is 1000000000; it must be at most",
        ),
        (["tiny"], "--data"),
    ],
)
def test_unknown_names_are_refused_with_the_nearest(argv, message, capfd):
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2
    assert message in capfd.readouterr().err


def test_a_run_is_shown_while_it_trains(data, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(progress, "_SECONDS_BETWEEN_LINES", 0.0)
    options = ["--measure.attention-every", "1", "--measure.validation-every", "2"]
    assert main(["tiny", *TOY, *options, "--data", str(data), "--out", str(tmp_path)]) == 0
    shown = capfd.readouterr().err
    for line in (
        r"step 0: gpt2 of .* parameters, merit with learning rate .*",
        r"training: 67% of 3 steps, loss \d\.\d{4}, logit \d\.\d, [\d,]+ tokens/s",
        r"step 2: validation loss \d\.\d{4}",
    ):
        assert re.search(f"^{line}$", shown, re.MULTILINE)
    assert shown.endswith("step 3: all 3 steps are done\n")


@pytest.mark.parametrize(("on_all", "rank", "lines"), [(True, "0", 1), (True, "1", 0), (False, "1", 1)])
def test_an_error_of_all_ranks_is_reported_once(on_all, rank, lines, data, monkeypatch, capfd):
    def fails(*_, **__):
        alone = Ranks(rank=0, size=1, device=torch.device("cpu"))
        if not on_all:
            raise ValueError("of this rank")
        alone.first(lambda: int("of all ranks"))

    monkeypatch.setattr(training, "train", fails)
    monkeypatch.setenv("RANK", rank)
    assert main(["tiny", "--data", str(data)]) == 1
    assert len(capfd.readouterr().err.splitlines()) == lines
