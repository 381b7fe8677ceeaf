"""Ranks on two nodes, emulated by network namespaces on this machine, give the bits of one rank."""

import pytest
from torchrun import on_ranks


@pytest.mark.usefixtures("two_nodes")
@pytest.mark.slow
def test_a_step_on_two_nodes_equals_the_step_on_one_rank() -> None:
    compared = on_ranks(2, "sharded_worker.py", "networks", "mixed", num_nodes=2)
    assert {case: wrong for case, wrong in compared.items() if wrong} == {}
    assert len(compared) >= 20
