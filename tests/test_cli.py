"""The `merit` command: what it prints and how it refuses."""

import os
import subprocess
import sys

import pytest

import merit_optim
from merit_optim import cli


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


def test_a_closed_pipe_prints_no_traceback() -> None:
    command = [sys.executable, "-m", "merit_optim", "info"]
    reading, writing = os.pipe()
    os.close(reading)
    try:
        ended = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    finally:
        os.close(writing)
    assert ended.stderr == ""
    assert ended.returncode == 141
