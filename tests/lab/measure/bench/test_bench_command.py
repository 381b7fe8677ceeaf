"""`merit bench`: its output, the JSON file, and invalid options."""

import json
from argparse import ArgumentTypeError
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from merit_lab.measure.bench import contestants, growth, shapes, step, timing
from merit_lab.measure.bench.contestants import BenchContestant
from merit_lab.measure.bench.options import new_file
from merit_lab.measure.bench.shapes import Parameters, WeightSpec
from merit_optim import MERIT, cli

SMALL = [
    WeightSpec((8, 4), "embedding"),
    WeightSpec((4, 4), "hidden"),
    WeightSpec((4, 8), "hidden"),
    WeightSpec((4,), "vector"),
]


@pytest.fixture(scope="module")
def speeds() -> dict[str, Callable[[torch.device], float]]:
    """The machine's speeds, each measured once for all tests."""
    return {name: cache(getattr(timing, name)) for name in ("copy_bandwidth", "matrix_rate")}


@pytest.fixture
def small(speeds, monkeypatch) -> None:
    """Make the model tiny even smaller, the machine's speeds known, and dion unavailable."""
    monkeypatch.setitem(shapes.WEIGHTS, "tiny", SMALL)
    monkeypatch.setattr(contestants, "find_spec", lambda _: None)
    for name, measured in speeds.items():
        monkeypatch.setattr(timing, name, measured)


def bench(output: Path, *options: str) -> dict[str, Any]:
    arguments = ["--device", "cpu", "--models", "tiny", "--seconds", "0", "--output", str(output)]
    assert cli.main(["bench", "step", *arguments, *options]) == 0
    record: dict[str, Any] = json.loads(output.read_text())
    return record


@pytest.mark.usefixtures("small")
def test_a_step_is_timed_with_the_alternatives(tmp_path, capsys) -> None:
    record = bench(tmp_path / "new" / "step.json")
    assert {r["contestant"] for r in record["results"]} == {
        *("MERIT", "LAMB", "MaxLAMB", "naive MERIT", "torch AdamW, fused", "torch AdamW, foreach"),
        *("torch Muon + AdamW", "Muon", "NorMuon", "MuonMERIT", "SOAP", "SOAPMERIT"),
    }
    for r in record["results"]:
        assert 0 < r["fastest_ms"] <= r["median_ms"] <= r["worst_ms"] <= r["slowest_ms"]
        assert r["num_steps"] == (30 if "SOAP" in r["contestant"] else 5)
    assert record["environment"]["torch"]
    printed = capsys.readouterr().out
    assert "floor, 40 bytes" in printed
    assert "floor, Muon's traffic and products" in printed
    assert " worst " in printed


@pytest.mark.usefixtures("small")
def test_newton_schulz_alone_is_shown_with_muon(tmp_path, capsys) -> None:
    record = bench(tmp_path / "step.json", "--only", "NorMuon")
    (alone,) = record["newton_schulz"]
    # Five passes over 4 x 4 and 4 x 8: 4*16*4 + 2*64 = 384 and 4*16*8 + 2*64 = 640 operations each.
    assert (alone["model"], alone["num_matrices"], alone["num_flops"]) == ("tiny", 2, 5 * (384 + 640))
    assert alone["tflop_s"] == pytest.approx(alone["num_flops"] / alone["median_ms"] / 1e9)
    assert alone["share"] == pytest.approx(alone["tflop_s"] / record["environment"]["matrix_tflop_s"])
    assert "newton-schulz alone, 2 matrices" in capsys.readouterr().out
    assert bench(tmp_path / "step.json", "--only", "LAMB")["newton_schulz"] == []


@pytest.mark.usefixtures("small")
def test_floors_follow_from_the_recorded_speeds(tmp_path) -> None:
    record = bench(tmp_path / "step.json", "--only", "lamb")
    adamw, _, muon = record["floors"]
    copy, product = (record["environment"][rate] for rate in ("copy_tb_s", "matrix_tflop_s"))
    assert copy > 0
    assert product > 0
    assert adamw["ms"] == pytest.approx(28 * (32 + 16 + 32 + 4) / copy / 1e9)
    num_bytes = 28 * (32 + 4) + 20 * (16 + 32)
    assert muon["ms"] == pytest.approx(num_bytes / copy / 1e9 + 5120 / product / 1e9)


@pytest.mark.usefixtures("small")
def test_without_dion_its_row_is_reported_as_left_out(tmp_path, capsys) -> None:
    record = bench(tmp_path / "step.json", "--only", "on Muon")
    assert (record["results"], record["newton_schulz"]) == ([], [])
    (left_out,) = record["left_out"]
    assert (left_out["model"], left_out["contestant"]) == ("tiny", "dion Muon + AdamW")
    printed = capsys.readouterr().out
    assert "tiny: none of the chosen contestants could be timed" in printed
    assert "left out, the package dion is not installed; pip install git+https" in printed


@pytest.mark.usefixtures("small")
def test_the_others_are_timed_if_a_contestant_fails(tmp_path, capsys, monkeypatch) -> None:
    def fail(_: Parameters) -> step.timing.Stepped:
        raise RuntimeError("out of memory\nand more")

    few = [BenchContestant("broken", fail), BenchContestant("MERIT", lambda p: MERIT(p.all))]
    monkeypatch.setattr(step, "on_cpu", lambda: few)
    record = bench(tmp_path / "step.json")
    assert [r["contestant"] for r in record["results"]] == ["MERIT"]
    assert record["left_out"] == [
        {"model": "tiny", "contestant": "broken", "reason": "RuntimeError: out of memory"}
    ]
    assert "left out, RuntimeError: out of memory: broken\n" in capsys.readouterr().out


def test_rows_are_printed_one_by_one(monkeypatch, capsys) -> None:
    """Printing all of them at the end would look like hanging."""
    shown: list[int] = []

    def measure(contestant, _params, model, _seconds) -> step.StepTiming:
        shown.append(len(capsys.readouterr().out.splitlines()))
        return step.StepTiming(model, contestant.name, 1.0, 1.0, 1.0, 1.0, 5)

    monkeypatch.setattr(step, "measure", measure)
    arguments = [
        "bench",
        "step",
        "--models",
        "tiny",
        "--device",
        "cpu",
        "--only",
        "AdamW",
        "--without",
        "Muon",
    ]
    assert cli.main(arguments) == 0
    assert shown[1:] == [1] * (len(shown) - 1)
    assert len(shown) > 1


def test_growth_is_measured_in_both_directions(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(growth, "SIDE", 8)
    monkeypatch.setattr(growth, "MILLIONS", (1, 2))
    monkeypatch.setattr(growth, "TENSORS", (1, 4))
    monkeypatch.setattr(growth, "FIXED_TOTAL", 2**10)
    output = tmp_path / "growth.json"
    assert cli.main(["bench", "growth", "--device", "cpu", "--seconds", "0", "--output", str(output)]) == 0
    found = [(r["num_elements"], r["num_tensors"]) for r in json.loads(output.read_text())["results"]]
    assert found == [(64, 1)] * 2 + [(128, 2)] * 2 + [(256, 1)] * 2 + [(256, 4)] * 2


def test_a_step_that_could_not_be_captured_is_shown_as_refused(capsys) -> None:
    times = {"median_ms": 1.0, "fastest_ms": 1.0, "slowest_ms": 1.0, "worst_ms": 1.0, "num_steps": 5}
    refused = step.StepTiming("tiny", "Muon", **times, graph_refused="RuntimeError: it waits for the device")
    for result in (step.StepTiming("tiny", "LAMB", **times, graph_ms=0.5), refused):
        step.show(result, 1.0)
    lamb, muon = capsys.readouterr().out.splitlines()
    assert " 0.500" in lamb
    assert " refused" in muon


@pytest.mark.parametrize(("arguments", "status"), [([], 0), (["--help"], 0), (["stpe"], 2)])
def test_usage(arguments, status, capsys) -> None:
    assert cli.main(["bench", *arguments]) == status
    captured = capsys.readouterr()
    assert "step    models" in captured.out + captured.err


@pytest.mark.parametrize("benchmark", ["step", "growth"])
@pytest.mark.parametrize(
    ("option", "value", "complaint"),
    [
        ("--device", "gpu", "'gpu' is not a device; it must be cpu, cuda or cuda:N"),
        ("--device", "meta", "'meta' is not a device; it must be cpu, cuda or cuda:N"),
        ("--device", "cuda:7", "'cuda:7' is not available; torch sees 1 CUDA devices"),
        ("--seconds", "nan", "'nan' is not a number of seconds; it must be finite and at least 0"),
        ("--seconds", "-1", "'-1' is not a number of seconds; it must be finite and at least 0"),
        ("--output", ".", "'.' is a folder; name a file in it"),
        ("--output", 300 * "x", "cannot be written: File name too long; name another file"),
    ],
)
def test_invalid_options_are_refused_before_anything_is_timed(
    benchmark, option, value, complaint, capsys, monkeypatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(SystemExit) as stopped:
        cli.main(["bench", benchmark, f"{option}={value}"])
    assert stopped.value.code == 2
    assert complaint in capsys.readouterr().err


def test_the_check_of_the_output_file_leaves_no_trace(tmp_path, monkeypatch) -> None:
    new, old = tmp_path / "made" / "new.json", tmp_path / "old.json"
    old.write_text("[]")
    assert (new_file(str(new)), new_file(str(old))) == (new, old)
    assert (new.exists(), old.read_text()) == (False, "[]")

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(ArgumentTypeError, match=r"old\.json' cannot be written: Permission denied"):
        new_file(str(old))


def test_without_cuda_the_device_is_refused(capsys, monkeypatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    with pytest.raises(SystemExit):
        cli.main(["bench", "step", "--device", "cuda"])
    assert "'cuda' is not available; torch sees 0 CUDA devices: use cpu" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--piece", "0"], "'0' is not a number of elements; it must be a whole number above 0"),
        (["--piece", "-5"], "'-5' is not a number of elements"),
        (
            ["--only", "Adagrad"],
            "--only and --without leave no contestant; choose from: torch AdamW, foreach;",
        ),
        (["--only", "LAMB", "--without", "LAMB"], "--only and --without leave no contestant"),
    ],
)
def test_options_of_a_step_that_leave_nothing_to_time(options, complaint, capsys) -> None:
    with pytest.raises(SystemExit):
        cli.main(["bench", "step", "--device", "cpu", "--models", "tiny", *options])
    assert complaint in capsys.readouterr().err


@pytest.mark.usefixtures("small")
def test_contestants_are_left_out_if_a_model_is_too_large_or_has_no_hidden_matrix(
    tmp_path, capsys, monkeypatch
) -> None:
    few = [
        BenchContestant("naive", lambda p: MERIT(p.all), most_elements=83),
        BenchContestant("exact", lambda p: MERIT(p.all), most_elements=84),
    ]
    monkeypatch.setattr(step, "on_cpu", lambda: few)
    assert [r["contestant"] for r in bench(tmp_path / "step.json")["results"]] == ["exact"]
    printed = capsys.readouterr().out
    assert "left out, takes minutes with more than 83 parameters; the model has 84: naive\n" in printed

    monkeypatch.undo()
    monkeypatch.setitem(shapes.WEIGHTS, "tiny", [WeightSpec((8, 4), "embedding")])
    record = bench(tmp_path / "step.json", "--only", "MERIT", "--without", "naive")
    assert [r["contestant"] for r in record["results"]] == ["MERIT"]
    assert "left out, the model has no hidden matrix: MuonMERIT; SOAPMERIT\n" in capsys.readouterr().out
