"""`merit train --list`: many runs of a list, in several processes."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from merit_lab.runs import Run
from merit_lab.train import train
from merit_lab.train.command import main
from merit_lab.train.list_command import read_list
from merit_lab.train.pool import as_in_pool

COMMAND = "import sys; from merit_optim.cli import main; sys.exit(main(['train', *sys.argv[1:]]))"
# What a machine that only trains often lacks; the workers, which begin anew, must do without it too.
BLOCKED = """
import sys
for name in (
    *("polars", "optuna", "datasets", "altair", "vl_convert", "pyarrow", "scipy", "jinja2"),
    *("msgspec", "tyro", "tensorboard", "transformers"),
):
    sys.modules[name] = None
"""


@pytest.fixture
def listed(changed, tmp_path):
    """Writes a list of the toy configuration with some values, and returns its path and that of the runs."""

    def write(*lines):
        rows = [{"name": str(number), **changed(**line).to_dict()} for number, line in enumerate(lines)]
        path = tmp_path / "list.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path, tmp_path / "runs"

    return write


def statuses(out):
    return [Run.open(folder).status for folder in sorted(out.iterdir()) if folder.name != "logs"]


@pytest.mark.parametrize("jobs", ["1", pytest.param("2", marks=pytest.mark.slow)])
def test_a_list_is_trained_without_what_studies_need(jobs, listed, changed, measured, tmp_path):
    lines = [{"seed": 0}, {"seed": 1}, {"optimizer.name": "adamw", "optimizer.lr": 1e38}]
    path, out = listed(*lines)
    arguments = ["--list", str(path), "--out", str(out), "--jobs", jobs]
    (tmp_path / "sitecustomize.py").write_text(BLOCKED)
    paths = {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    subprocess.run([sys.executable, "-c", COMMAND, *arguments], check=True, env=os.environ | paths)
    assert statuses(out) == ["finished", "finished", "diverged"]
    assert measured(Run.open(out / "1")) == measured(train(as_in_pool(changed(seed=1)), tmp_path / "alone"))
    written = [(out / name / "metrics.jsonl").read_bytes() for name in "012"]
    assert main(arguments) == 0
    assert [(out / name / "metrics.jsonl").read_bytes() for name in "012"] == written


@pytest.mark.slow  # a minute each: three processes import torch
@pytest.mark.parametrize("who", ["a worker", "all", "interrupt"])
def test_a_list_that_was_killed_goes_on(who, listed, changed, measured, tmp_path):
    lines = [{"seed": seed, "steps": 60, "checkpoint.every_steps": 3} for seed in range(3)]
    path, out = listed(*lines)
    arguments = ["--list", str(path), "--out", str(out), "--jobs", "2"]
    process = subprocess.Popen(
        [sys.executable, "-c", COMMAND, *arguments], stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    metrics = out / "1" / "metrics.jsonl"
    while process.poll() is None and not (metrics.exists() and metrics.read_bytes().count(b"\n") > 20):
        time.sleep(0.01)
    if who == "a worker":
        holder = int((out / "1" / "lock").read_text().split()[1])
        os.kill(holder, signal.SIGKILL)
    elif who == "all":
        os.killpg(process.pid, signal.SIGKILL)
    else:
        process.terminate()
    assert process.wait() == {"a worker": 0, "all": -signal.SIGKILL, "interrupt": 128 + signal.SIGTERM}[who]
    if who == "interrupt":
        assert "The same command continues" in process.stderr.read()
    process.stderr.close()
    if who != "a worker":
        assert main(arguments) == 0
    assert statuses(out) == ["finished"] * 3
    alone = train(as_in_pool(changed(**lines[1])), tmp_path / "alone")
    assert measured(Run.open(out / "1")) == measured(alone)


def test_a_run_that_fails_does_not_end_the_others(listed, capfd):
    path, out = listed({"model.context": 8192}, {"seed": 1})
    assert main(["--list", str(path), "--out", str(out)]) == 1
    assert statuses(out) == ["finished"]
    assert "1 runs failed: 0" in capfd.readouterr().err


def test_settings_may_be_nested_or_dotted_and_the_model_a_preset(tmp_path):
    path = tmp_path / "list"
    path.write_text(
        '{"data": "d", "model": "tiny", "model.layers": 2, '
        '"optimizer": {"name": "adamw"}, "optimizer.lr": 1}\n'
        "\n"
        '{"name": "mine", "model": {"width": 32, "heads": 2}, "seed": 3}\n'
    )
    first, second = read_list(path, tmp_path, tmp_path / "data").items()
    assert first[0].name.startswith("adamw-lr1-seed0-")
    assert (first[1].model.width, first[1].model.layers, first[1].optimizer.lr) == (64, 2, 1.0)
    assert (second[0].name, second[1].model.width, second[1].seed) == ("mine", 32, 3)
    assert (str(first[1].data), second[1].data) == ("d", tmp_path / "data")


@pytest.mark.parametrize(
    ("line", "fragment"),
    [
        ("{", "line 2 of"),
        ("[" * 100_000, "line 2 of"),
        ("[1]", "a list, not an object"),
        ('{"sede": 1}', "there is no sede; the nearest is seed"),
        ('{"optimizer.lrr": 1}', "there is no optimizer.lrr; the nearest is optimizer.lr"),
        ('{"batch": "many"}', "batch is 'many'; it must be a whole number"),
        ('{"steps": 1' + "0" * 400 + "}", "64 bits"),
        ('{"optimizer": 3, "optimizer.lr": 1}', "optimizer is 3"),
        ('{"model": "tinny"}', "did you mean"),
        ('{"name": "../up"}', "'../up'"),
        ('{"name": "a"}', "an earlier line"),
    ],
)
def test_a_bad_line_is_refused_with_its_number(line, fragment, tmp_path, capsys):
    path = tmp_path / "list"
    path.write_text('{"name": "a"}\n' + line + "\n")
    assert main(["--list", str(path), "--out", str(tmp_path / "out"), "--data", "d"]) == 1
    message = capsys.readouterr().err
    assert "line 2 of" in message
    assert fragment in message
    assert not (tmp_path / "out").exists()
