"""`merit train` under torchrun, which restarts all ranks when one is killed, on one node and on two."""

from pathlib import Path

import pytest
from safetensors.numpy import load_file
from torchrun import torchrun

from merit_lab.runs import Run

WORKER = Path(__file__).parent / "killed_once_worker.py"
OPTIONS = ["--model.width", "32", "--model.heads", "2", "--model.layers", "2", "--model.context", "32"]
OPTIONS += ["--batch", "8", "--steps", "9", "--parallel", "fsdp2", "--micro-batch", "2"]
OPTIONS += ["--checkpoint.every-steps", "4", "--checkpoint.every-minutes", "0"]
OPTIONS += ["--measure.validation-every", "4", "--measure.validation-sequences", "8"]
OPTIONS += ["--measure.attention-every", "3", "--measure.update-every", "5"]


@pytest.fixture
def resumes_by_itself(data, tmp_path, measured):
    """Kill a rank before the seventh step; the run must resume by itself, bit for bit."""

    def check(killed_rank, num_nodes):
        finished = torchrun(
            2,
            WORKER,
            *[str(killed_rank), "6", str(tmp_path)],
            *["tiny", *OPTIONS, "--data", str(data)],
            num_nodes=num_nodes,
            max_restarts=1,
        )
        assert finished.returncode == 0, finished.stderr[-4000:]
        undisturbed, killed = Run.open(tmp_path / "undisturbed"), Run.open(tmp_path / "killed")
        assert what_happened(undisturbed) == ["started", "finished"]
        assert what_happened(killed) == ["started", "resumed", "finished"]
        assert killed.metrics("event")[1]["message"].startswith("from step-00000004")
        assert measured(killed) == measured(undisturbed)
        assert len(saved_last(killed)) == 2
        assert saved_last(killed) == saved_last(undisturbed)
        # After the restart, the command found the first run finished.
        assert finished.stderr.count(f"the run in {undisturbed.folder} has already finished") == 1

    return check


def what_happened(run):
    return [event["what"] for event in run.metrics("event")]


def saved_last(run):
    """The bytes of each rank's part of the weights and of the optimizer's state."""
    shards = sorted((run.checkpoints / "step-00000009").glob("*.safetensors"))
    return [{name: array.tobytes() for name, array in load_file(shard).items()} for shard in shards]


@pytest.mark.slow
def test_a_run_whose_first_rank_was_killed_resumes_by_itself(resumes_by_itself):
    """The first rank writes the files and holds the lock."""
    resumes_by_itself(killed_rank=0, num_nodes=1)


@pytest.mark.slow
@pytest.mark.usefixtures("two_nodes")
def test_a_run_that_was_killed_on_another_node_resumes_by_itself(resumes_by_itself):
    resumes_by_itself(killed_rank=1, num_nodes=2)
