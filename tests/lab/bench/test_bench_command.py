"""`merit bench`: what it prints, writes and refuses."""

import json
from argparse import ArgumentTypeError
from pathlib import Path

import pytest

from merit_optim import cli
from merit_optim.lab.bench import growth, shapes, step
from merit_optim.lab.bench.options import new_file


def test_a_step_is_timed_beside_the_alternatives(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setitem(shapes.MODELS, "tiny", [(8, 4), (4,)])
    output = tmp_path / "new" / "step.json"
    arguments = ["--device", "cpu", "--models", "tiny", "--seconds", "0", "--output", str(output)]
    assert cli.main(["bench", "step", *arguments, "--without", "pytorch"]) == 0
    record = json.loads(output.read_text())
    assert {"MERIT", "LAMB", "torch AdamW, fused", "naive MERIT"} <= {
        r["contestant"] for r in record["results"]
    }
    assert all(0 < r["fastest_ms"] <= r["median_ms"] <= r["slowest_ms"] for r in record["results"])
    assert record["environment"]["torch"]
    printed = capsys.readouterr().out
    assert "floor, 40 bytes" in printed


def test_growth_is_measured_in_both_directions(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(growth, "SIDE", 8)
    monkeypatch.setattr(growth, "MILLIONS", (1, 2))
    monkeypatch.setattr(growth, "TENSORS", (1, 4))
    monkeypatch.setattr(growth, "FIXED_TOTAL", 2**10)
    output = tmp_path / "growth.json"
    assert cli.main(["bench", "growth", "--device", "cpu", "--seconds", "0", "--output", str(output)]) == 0
    found = [(r["num_elements"], r["num_tensors"]) for r in json.loads(output.read_text())["results"]]
    assert found == [(64, 1)] * 2 + [(128, 2)] * 2 + [(256, 1)] * 2 + [(256, 4)] * 2


@pytest.mark.parametrize(("arguments", "status"), [([], 0), (["--help"], 0), (["stpe"], 2)])
def test_usage(arguments, status, capsys) -> None:
    assert cli.main(["bench", *arguments]) == status
    captured = capsys.readouterr()
    assert "step    models" in captured.out + captured.err


@pytest.mark.parametrize("benchmark", ["step", "growth"])
@pytest.mark.parametrize(
    ("option", "value", "complaint"),
    [
        ("--device", "gpu", "'gpu' is no device; it must be cpu, cuda or cuda:N"),
        ("--device", "meta", "'meta' is no device; it must be cpu, cuda or cuda:N"),
        ("--device", "cuda:7", "'cuda:7' is not there; torch sees 1 of CUDA's devices"),
        ("--seconds", "nan", "'nan' is no number of seconds; it must be finite and at least 0"),
        ("--seconds", "-1", "'-1' is no number of seconds; it must be finite and at least 0"),
        ("--output", ".", "'.' is a folder; name a file in it"),
        ("--output", 300 * "x", "cannot be written: File name too long; name another file"),
    ],
)
def test_what_cannot_be_meant_is_refused_before_anything_is_timed(
    benchmark, option, value, complaint, capsys, monkeypatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(SystemExit) as stopped:
        cli.main(["bench", benchmark, f"{option}={value}"])
    assert stopped.value.code == 2
    assert complaint in capsys.readouterr().err


def test_whether_the_output_can_be_written_is_tried_and_leaves_no_trace(tmp_path, monkeypatch) -> None:
    new, old = tmp_path / "made" / "new.json", tmp_path / "old.json"
    old.write_text("[]")
    assert (new_file(str(new)), new_file(str(old))) == (new, old)
    assert (new.exists(), old.read_text()) == (False, "[]")

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(ArgumentTypeError, match=r"old\.json' cannot be written: Permission denied"):
        new_file(str(old))


def test_without_cuda_the_device_says_so(capsys, monkeypatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    with pytest.raises(SystemExit):
        cli.main(["bench", "step", "--device", "cuda"])
    assert "'cuda' is not there; torch sees 0 of CUDA's devices: use cpu" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--piece", "0"], "'0' is no number of elements; it must be a whole number above 0"),
        (["--piece", "-5"], "'-5' is no number of elements"),
        (["--only", "Adagrad"], "--only and --without leave no contestant; there are torch AdamW, foreach;"),
        (["--only", "LAMB", "--without", "LAMB"], "--only and --without leave no contestant"),
    ],
)
def test_options_of_a_step_that_leave_nothing_to_time(options, complaint, capsys) -> None:
    with pytest.raises(SystemExit):
        cli.main(["bench", "step", "--device", "cpu", "--models", "tiny", *options])
    assert complaint in capsys.readouterr().err


def test_a_model_that_is_too_large_for_all_that_are_chosen_is_left_out(capsys, monkeypatch) -> None:
    monkeypatch.setitem(shapes.MODELS, "tiny", [(8, 4), (4,)])
    few = [step.Contestant("naive MERIT", step.NaiveMERIT, most_elements=10)]
    monkeypatch.setattr(step, "on_cpu", lambda: few)
    assert cli.main(["bench", "step", "--device", "cpu", "--models", "tiny", "--seconds", "0"]) == 0
    assert "tiny: none of the contestants chosen is timed with as many parameters" in capsys.readouterr().out
