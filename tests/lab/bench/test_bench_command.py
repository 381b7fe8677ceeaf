"""`merit bench`: what it prints, writes and refuses."""

import json

import pytest

from merit_optim import cli
from merit_optim.lab.bench import growth, shapes


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
