"""`merit bench`: its output and the JSON file."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from merit_lab.measure.bench import command, contestants, model, timing
from merit_lab.measure.bench.contestants import BenchContestant
from merit_lab.measure.bench.model import Parameters, WeightSpec
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
    """Make the model tiny even smaller, the machine's speeds known, and no rival installed."""
    monkeypatch.setitem(model.WEIGHTS, "tiny", SMALL)
    monkeypatch.setattr(contestants, "find_spec", lambda _: None)
    for name, measured in speeds.items():
        monkeypatch.setattr(timing, name, measured)


def bench(output: Path, *options: str) -> dict[str, Any]:
    arguments = ["--device", "cpu", "--models", "tiny", "--seconds", "0", "--out", str(output)]
    assert cli.main(["bench", *arguments, *options]) == 0
    record: dict[str, Any] = json.loads(output.read_text())
    return record


@pytest.mark.usefixtures("small")
def test_a_step_is_timed_with_the_alternatives(tmp_path, capsys) -> None:
    record = bench(tmp_path / "new" / "step.json")
    assert {r["contestant"] for r in record["results"]} == {
        *("MERIT", "LAMB", "MaxLAMB", "naive MERIT", "torch AdamW, fused", "torch AdamW, foreach"),
        *("torch Muon + AdamW", "Muon", "NorMuon", "MuonSphere", "MuonMERIT", "SOAP", "SOAPMERIT"),
    }
    for r in record["results"]:
        assert 0 < r["fastest_ms"] <= r["median_ms"] <= r["worst_ms"] <= r["slowest_ms"]
        assert r["num_steps"] == (30 if "SOAP" in r["contestant"] else 5)
    assert record["environment"]["torch"]
    assert {(r["contestant"], r["reason"]) for r in record["left_out"]} >= {
        (
            "pytorch_optimizer SOAP",
            "the package pytorch_optimizer is not installed; pip install pytorch_optimizer",
        ),
        ("dion Muon + AdamW", f"the package dion is not installed; pip install {contestants._DION}"),
    }
    copy, product = (record["environment"][rate] for rate in ("copy_tb_s", "matrix_tflop_s"))
    adamw, _, muon = record["floors"]
    assert adamw["ms"] == pytest.approx(28 * (32 + 16 + 32 + 4) / copy / 1e9)
    num_bytes = 28 * (32 + 4) + 20 * (16 + 32)
    assert muon["ms"] == pytest.approx(num_bytes / copy / 1e9 + 5120 / product / 1e9)
    printed = capsys.readouterr().out
    assert "floor, 40 bytes" in printed
    assert "floor, Muon's traffic and products" in printed
    assert " worst " in printed


@pytest.mark.usefixtures("small")
def test_the_others_are_timed_if_a_contestant_fails(tmp_path, capsys, monkeypatch) -> None:
    def fail(_: Parameters) -> timing.Stepped:
        raise RuntimeError("out of memory\nand more")

    few = [BenchContestant("broken", fail), BenchContestant("MERIT", lambda p: MERIT(p.all))]
    monkeypatch.setattr(command, "contestants", lambda **_: few)
    record = bench(tmp_path / "step.json")
    assert [r["contestant"] for r in record["results"]] == ["MERIT"]
    assert record["left_out"] == [
        {"model": "tiny", "contestant": "broken", "reason": "RuntimeError: out of memory"}
    ]
    assert "left out, RuntimeError: out of memory: broken\n" in capsys.readouterr().out


@pytest.mark.usefixtures("small")
def test_contestants_are_left_out_if_a_model_is_too_large_or_has_no_hidden_matrix(
    tmp_path, capsys, monkeypatch
) -> None:
    few = [
        BenchContestant("naive", lambda p: MERIT(p.all), most_elements=83),
        BenchContestant("exact", lambda p: MERIT(p.all), most_elements=84),
    ]
    monkeypatch.setattr(command, "contestants", lambda **_: few)
    assert [r["contestant"] for r in bench(tmp_path / "step.json")["results"]] == ["exact"]
    printed = capsys.readouterr().out
    assert "left out, takes minutes with more than 83 parameters; the model has 84: naive\n" in printed

    monkeypatch.undo()
    monkeypatch.setitem(model.WEIGHTS, "tiny", [WeightSpec((8, 4), "embedding")])
    record = bench(tmp_path / "step.json", "--only", "MERIT", "--without", "naive")
    assert [r["contestant"] for r in record["results"]] == ["MERIT"]
    assert "left out, the model has no hidden matrix: MuonMERIT\n" in capsys.readouterr().out
