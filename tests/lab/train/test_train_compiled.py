"""The torch.compile cache between the runs of a process."""

import pytest
import torch

from merit_lab.train.compiled import begin_compiling_for


def test_only_runs_of_the_same_shapes_share_compiled_code(monkeypatch: pytest.MonkeyPatch):
    resets = []
    monkeypatch.setattr(torch.compiler, "reset", lambda: resets.append(1))
    begin_compiling_for("a model", 8)
    before = len(resets)
    begin_compiling_for("a model", 8)
    assert len(resets) == before
    begin_compiling_for("a model", 4)
    begin_compiling_for("a model", 8)
    assert len(resets) == before + 2


def test_many_shapes_in_one_process_are_all_compiled():
    counts = []

    def backend(graph, _):
        counts.append(1)
        return graph.forward

    class Model(torch.nn.Module):
        def forward(self, x):
            return x.sin()

    for size in range(2, 14):  # more than torch compiles of one function
        begin_compiling_for("test", size)
        model = Model()
        model.compile(dynamic=False, backend=backend)
        model(torch.ones(size))
        assert len(counts) == size - 1
    torch.compiler.reset()
