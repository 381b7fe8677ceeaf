"""The experimental variant of MuonMERIT, against MuonMERIT itself."""

import pytest
import torch

from merit_lab.paper.muon_merit_variant import MuonMERITVariant
from merit_optim import SOAPMERIT, MuonMERIT

START = torch.randn(12, 8, generator=torch.Generator().manual_seed(0)) * 0.05  # no ratio is bounded


def trained(make, *, num_steps=4, direction="muon", **options):
    """The weights of a matrix and a vector after some steps."""
    torch.manual_seed(0)
    matrix, vector = torch.nn.Parameter(START.clone()), torch.nn.Parameter(torch.ones(8))
    groups = [{"params": [matrix], "direction": direction}, {"params": [vector], "direction": "adam"}]
    optimizer = make(groups, lr=0.1, **options)
    for _ in range(num_steps):
        for weight in (matrix, vector):
            weight.grad = torch.randn(weight.shape)
        optimizer.step()
    return matrix.detach(), vector.detach()


def test_by_default_it_is_muon_merit():
    for expected, actual in zip(trained(MuonMERIT), trained(MuonMERITVariant), strict=True):
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("variant", [{"decay": "outside"}, {"decay": "cautious"}, {"smoothing": 0.9}])
def test_a_variant_changes_the_matrix_alone(variant):
    expected, actual = trained(MuonMERIT), trained(MuonMERITVariant, **variant)
    assert not torch.allclose(actual[0], expected[0])
    assert torch.equal(actual[1], expected[1])


def test_without_decay_its_place_does_not_matter():
    expected = trained(MuonMERITVariant, weight_decay=0.0)[0]
    for decay in ("outside", "cautious"):
        assert torch.equal(trained(MuonMERITVariant, weight_decay=0.0, decay=decay)[0], expected)


def decay_of_one_step(**options):
    """What weight decay takes from the matrix in one step."""
    without, decayed = (
        trained(MuonMERITVariant, num_steps=1, weight_decay=decay, **options)[0] for decay in (0.0, 0.5)
    )
    return without - decayed


def test_decay_outside_is_that_of_adamw():
    torch.testing.assert_close(decay_of_one_step(decay="outside"), START * 0.1 * 0.5)


def test_cautious_decay_is_for_what_the_update_shrinks():
    unscaled = {"norm": "none", "clip": None}
    direction = START - trained(MuonMERITVariant, num_steps=1, weight_decay=0.0, **unscaled)[0]
    expected = torch.where(direction * START > 0, START * 0.1 * 0.5, 0)
    assert 0 < (expected == 0).sum() < expected.numel()
    torch.testing.assert_close(decay_of_one_step(decay="cautious", **unscaled), expected)


def test_an_unknown_decay():
    with pytest.raises(ValueError, match="decay is 'late', but must be one of inside, outside, cautious"):
        MuonMERITVariant(
            [{"params": [torch.nn.Parameter(torch.ones(2, 2))], "direction": "muon"}], decay="late"
        )


def test_soap_from_the_start_is_soap_merit():
    bounds = (0.0, 0.1)  # MuonMERIT's default
    expected = trained(SOAPMERIT, direction="soap", ratio_bounds=bounds)
    actual = trained(MuonMERITVariant, soap_after=0)
    for one, other in zip(expected, actual, strict=True):
        torch.testing.assert_close(other, one)


def test_until_then_it_is_muon_merit():
    # The third step is SOAP's first, which changes nothing.
    for num_steps, is_muon in ((3, True), (5, False)):
        expected = trained(MuonMERIT, num_steps=min(num_steps, 2))
        actual = trained(MuonMERITVariant, num_steps=num_steps, soap_after=2)
        assert torch.equal(actual[0], expected[0]) == is_muon


def test_soap_later_with_other_options_is_refused():
    with pytest.raises(ValueError, match="soap_after is 3, and decay is 'outside'"):
        trained(MuonMERITVariant, soap_after=3, decay="outside")
