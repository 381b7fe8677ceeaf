"""`merit bench step` on a GPU."""

import json

import pytest

from merit_optim import cli

pytestmark = pytest.mark.gpu


@pytest.mark.filterwarnings("ignore:This instance was constructed with capturable=True")  # before the capture
def test_muon_is_timed_on_the_device_the_host_and_in_a_graph(tmp_path) -> None:
    output = tmp_path / "step.json"
    arguments = ["--device", "cuda", "--models", "tiny", "--seconds", "0", "--only", "uon"]
    assert cli.main(["bench", "step", *arguments, "--without", "dion", "--output", str(output)]) == 0
    record = json.loads(output.read_text())
    assert [r["contestant"] for r in record["results"]] == [
        "torch Muon + AdamW",
        "Muon",
        "NorMuon",
        "MuonMERIT",
    ]
    for r in record["results"]:
        assert 0 < r["median_ms"] <= r["worst_ms"]
        assert r["host_ms"] > 0
        assert r["graph_refused"] is None
        assert (r["graph_ms"] is not None) == ("torch" not in r["contestant"])
    (alone,) = record["newton_schulz"]
    assert 0 < alone["share"] < 1
