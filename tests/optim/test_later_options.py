"""Options that version 0.1 did not have, and the memory of held directions."""

import weakref

import pytest
import torch
from optimizer_cases import parameter, parameters, set_gradients
from torch import nn

from merit_optim import MERIT, MuonMERIT
from merit_optim.optim.directions import Muon
from merit_optim.optim.options import LATER


def test_a_later_option_is_only_in_groups_that_set_it() -> None:
    groups = [{"params": [parameter((6, 4), 0)], "split": 3}, {"params": [parameter((6, 4), 1)]}]
    split, other = MERIT(groups).param_groups
    assert split["split"] == 3
    assert not LATER.keys() & other.keys()


def test_a_misspelt_later_option_is_refused() -> None:
    with pytest.raises(ValueError, match="'splitt', which MERIT does not know; did you mean 'split'"):
        MERIT([{"params": parameters(), "splitt": 3}])


def test_one_direction_is_held_at_a_time(monkeypatch) -> None:
    """A direction that needs whole matrices costs the memory of one weight, not of the model."""
    held: list[weakref.ref[torch.Tensor]] = []
    advance = Muon.advance

    def watched(self, grad, state, step):  # type: ignore[no-untyped-def]
        assert not [ref for ref in held if ref() is not None]
        d, after = advance(self, grad, state, step)
        held.append(weakref.ref(d))
        return d, after

    monkeypatch.setattr(Muon, "advance", watched)
    weights = [nn.Parameter(torch.ones(5, 4)) for _ in range(3)]
    optimizer = MuonMERIT([{"params": weights, "direction": "muon"}])
    set_gradients(weights, 0)
    optimizer.step()
    assert len(held) == 3
