"""The `merit` command: what it prints and how it refuses."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import merit_optim
from merit_optim import cli

FULL = Path("/dev/full")


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(["--version"])
    assert exit_.value.code == 0
    assert capsys.readouterr().out == f"merit-optim {merit_optim.__version__}\n"


def test_alone_prints_help_with_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("usage: merit")
    for name in cli.COMMANDS:
        assert f"\n    {name} " in printed


def test_info_names_versions_and_devices(capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    assert cli.main(["info"]) == 0
    lines = capsys.readouterr().out.splitlines()
    values = dict(line.split(maxsplit=1) for line in lines if not line.startswith(" "))
    assert values["merit-optim"] == merit_optim.__version__
    assert values["torch"] == torch.__version__
    assert values["devices"].startswith("cpu: ")
    assert sum("cuda:" in line for line in lines) == torch.cuda.device_count()


def test_info_counts_one_thread_and_several(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    monkeypatch.setattr("torch.get_num_threads", lambda: 1)
    cli.main(["info"])
    assert "cpu: 8 cores, torch uses 1 thread\n" in capsys.readouterr().out


def test_info_says_why_an_engine_is_not_available(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from merit_optim.optim import engines

    monkeypatch.setattr(engines, "availability", lambda: {"eager": None, "fused": "there is no triton"})
    cli.main(["info"])
    printed = capsys.readouterr().out
    assert "eager: available\n" in printed
    assert "fused: not available: there is no triton\n" in printed


def test_an_interrupt_prints_no_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("merit_optim.info.main", interrupted)
    assert cli.main(["info"]) == 130
    assert capsys.readouterr().err == "\nmerit info: interrupted\n"


@pytest.mark.parametrize(
    ("error", "way_out"),
    [
        (
            ModuleNotFoundError("No module named 'altair.utils'", name="altair.utils"),
            "merit info: this needs altair, which is not installed; install it with: pip install",
        ),
        (ModuleNotFoundError("No module named 'scipy'", name="scipy"), "merit-optim[lab]"),
        (ModuleNotFoundError("wandb is missing: pip install wandb"), "merit info: wandb is missing: pip"),
    ],
)
def test_a_missing_package_is_reported_without_a_traceback(
    error: ModuleNotFoundError, way_out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(_: list[str]) -> int:
        raise error

    monkeypatch.setattr("merit_optim.info.main", missing)
    with pytest.raises(SystemExit) as exit_:
        cli.main(["info"])
    assert way_out in str(exit_.value.code)


def test_unknown_command_is_refused_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(["inof"])
    assert exit_.value.code == 2
    assert "unknown command 'inof'; did you mean 'info'?" in capsys.readouterr().err


def test_unknown_command_far_from_all_lists_them(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["zzz"])
    refused = capsys.readouterr().err
    assert "did you mean" not in refused
    assert "the commands are: info" in refused


@pytest.mark.parametrize("options", [["--bogus"], ["info", "--bogus"]])
def test_unknown_option_is_refused(options: list[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(options)
    assert exit_.value.code == 2


def test_python_dash_m_is_the_same_command() -> None:
    finished = subprocess.run(
        [sys.executable, "-m", "merit_optim", "--version"],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert finished.stdout == f"merit-optim {merit_optim.__version__}\n"


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["train", "--help"]],
    ids=" ".join,
)
def test_a_closed_pipe_ends_any_command_quietly(arguments: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        ended = run_command(arguments, stdout=writing, stderr=subprocess.PIPE)
    finally:
        os.close(writing)
    assert ended.stderr == ""
    assert ended.returncode == 141


@pytest.mark.skipif(not FULL.exists(), reason=f"needs {FULL}")
def test_output_that_cannot_be_written_is_an_error_without_a_traceback() -> None:
    with FULL.open("w") as full:
        ended = run_command(["info"], stdout=full, stderr=subprocess.PIPE)
    assert ended.stderr == "merit: cannot write to standard output: No space left on device\n"
    assert ended.returncode == 1


def test_no_standard_output_is_no_error() -> None:
    program = "import os, sys; os.close(1); os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    command = [sys.executable, "-c", program, "-m", "merit_optim", "info"]
    ended = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False, timeout=60)
    assert (ended.stderr, ended.returncode) == ("", 0)


def run_command(arguments: list[str], **streams: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "merit_optim", *arguments]
    return subprocess.run(command, **streams, text=True, check=False, timeout=60)
