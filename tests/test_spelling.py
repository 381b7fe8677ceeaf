"""What is suggested for a name that is not known."""

from merit_optim.spelling import did_you_mean, nearest

KNOWN = ["adamw", "MuonMERIT", "merit", "lion"]


def test_the_nearest_name_is_asked_for() -> None:
    assert did_you_mean("mertt", KNOWN) == "; did you mean 'merit'?"


def test_upper_and_lower_case_are_the_same() -> None:
    assert did_you_mean("MERIT", KNOWN) == "; did you mean 'merit'?"
    assert did_you_mean("muonmerit", KNOWN) == "; did you mean 'MuonMERIT'?"


def test_nothing_is_asked_where_no_name_is_near() -> None:
    assert did_you_mean("xyz", KNOWN) == "."
    assert did_you_mean("xyz", KNOWN, otherwise=";") == ";"
    assert did_you_mean("merits", KNOWN, otherwise="", similarity=0.95) == ""


def test_what_was_given_need_not_be_text() -> None:
    assert did_you_mean(None, ["none", "some"]) == "; did you mean 'none'?"


def test_several_names_the_nearest_first() -> None:
    assert nearest("merit", KNOWN, num=2) == ["merit", "MuonMERIT"]
    assert len(nearest("xyz", KNOWN, num=3, similarity=0.0)) == 3
