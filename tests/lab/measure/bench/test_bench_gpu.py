"""`merit bench` on a GPU."""

import json

import pytest

from merit_optim import cli

pytestmark = pytest.mark.gpu


@pytest.mark.filterwarnings("ignore:This instance was constructed with capturable=True")  # before the capture
def test_muon_is_timed_on_the_device_the_host_and_in_a_graph(tmp_path) -> None:
    output = tmp_path / "step.json"
    arguments = ["--device", "cuda", "--models", "tiny", "--seconds", "0", "--only", "uon"]
    assert cli.main(["bench", *arguments, "--without", "AdamW", "--out", str(output)]) == 0
    record = json.loads(output.read_text())
    ours = [r for r in record["results"] if r["contestant"] in ("Muon", "NorMuon", "MuonMERIT")]
    assert len(ours) == 3
    for r in ours:
        assert 0 < r["median_ms"] <= r["worst_ms"]
        assert r["host_ms"] > 0
        assert r["graph_refused"] is None
        assert r["graph_ms"] > 0
