"""Options that version 0.1 did not have, and the memory of held directions."""

import weakref
from typing import Any

import pytest
import torch
from optimizer_cases import parameter, parameters, set_gradients
from torch import nn

from merit_optim import MERIT, SOAP, MuonMERIT, OrScale, param_groups
from merit_optim.optim.directions import Muon
from merit_optim.optim.options import LATER


def test_a_later_option_is_only_in_groups_that_set_it() -> None:
    groups = [{"params": [parameter((6, 4), 0)], "split": 3}, {"params": [parameter((6, 4), 1)]}]
    split, other = MERIT(groups).param_groups
    assert split["split"] == 3
    assert not LATER.keys() & other.keys()


LATER_BY_CONSTRUCTION: list[tuple[type[Any], dict[str, Any], dict[str, Any]]] = [
    (MERIT, {}, {"split": 3}),
    (MERIT, {"split": 3}, {}),
    (MuonMERIT, {"ratio_bounds": None}, {}),
    (MuonMERIT, {}, {"ratio_bounds": None}),
    (SOAP, {"refresh_phase": None}, {"refresh_phase": 0}),
    (OrScale, {"calibrated": False}, {}),
]


@pytest.mark.parametrize(("optimizer_class", "saving", "loading"), LATER_BY_CONSTRUCTION)
def test_a_later_option_is_that_of_the_checkpoint(optimizer_class, saving, loading) -> None:
    """Also where its value is the one that groups omit."""

    def build(options: dict[str, Any]) -> Any:
        named = (
            {} if optimizer_class is MERIT else {"direction": optimizer_class(matrices).defaults["direction"]}
        )
        return optimizer_class([{"params": [nn.Parameter(torch.ones(6, 4))], **named}], **options)

    matrices = param_groups(nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4)), kinds={"*.weight": "hidden"})
    saved, loaded = build(saving), build(loading)
    set_gradients(saved.param_groups[0]["params"], 0)
    saved.step()
    loaded.load_state_dict(saved.state_dict())
    (of_saved,), (of_loaded,) = saved.param_groups, loaded.param_groups
    assert {**LATER, **of_loaded, "params": ()} == {**LATER, **of_saved, "params": ()}


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
