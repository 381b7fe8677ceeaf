import math
from pathlib import Path

import pytest
from fake_runs import write_run

from merit_lab.results.command import main
from merit_lab.results.gather import MeasuredRun
from merit_lab.results.health import warnings
from merit_lab.runs import MetricsWriter


def attended(*entropies: float) -> MeasuredRun:
    rows = [
        {"step": step, "max_logits": [[1.0, 1.0]], "entropy": [[entropy - 0.1, entropy + 0.1]]}
        for step, entropy in enumerate(entropies)
    ]
    return MeasuredRun("run", {}, {}, "finished", {"attention": rows})


@pytest.mark.parametrize(
    "entropies", [(), (4.0,), (4.0, 1.5, 1.1), (0.2, 0.1), (4.0, 0.5, 1.1), (4.0, math.nan)]
)
def test_attention_that_keeps_a_quarter_of_its_entropy_at_the_end_is_fine(
    entropies: tuple[float, ...],
) -> None:
    assert warnings({"MERIT": [attended(*entropies)]}) == []


def test_collapsed_attention_is_named_once_for_each_series() -> None:
    runs = {
        "MERIT": [attended(4.0, 0.9), attended(4.0, 0.6), attended(4.0, 2.0)],
        "Muon": [attended(4.0, 3.0)],
        "LAMB": [attended(5.0, 0.2)],
    }
    (warning,) = warnings(runs)
    assert "fell from 4 to 0.6 nats with MERIT and from 5 to 0.2 nats with LAMB: heads attend" in warning


def test_the_report_warns_on_its_page_and_in_the_terminal(tmp_path: Path, capsys) -> None:
    write_run(tmp_path, "lamb")
    folder = write_run(tmp_path, "merit", end=None)
    with MetricsWriter(folder / "metrics.jsonl") as metrics:
        metrics.write({"kind": "attention", "step": 60, "max_logits": [[9.0]], "entropy": [[0.3]]})
    assert main([str(tmp_path), "--out", str(tmp_path / "report")]) == 0
    warning = "the attention entropy fell from 2.9 to 0.3 nats with MERIT"
    assert warning in capsys.readouterr().err
    assert warning in (tmp_path / "report" / "index.html").read_text("utf-8")
