"""JSON is read strictly, and into the types that are asked for."""

import dataclasses
import math
from pathlib import Path
from typing import Any, Literal

import pytest

from merit_lab.json_values import build, convert, decode, encode, read_object, with_nan


@dataclasses.dataclass(frozen=True)
class Inner:
    width: int = 8


@dataclasses.dataclass(frozen=True)
class Other:
    path: Path


@dataclasses.dataclass(frozen=True)
class Outer:
    name: str
    inner: Inner | Other = dataclasses.field(default_factory=Inner)
    betas: tuple[float, float] | None = None
    kind: Literal["a", "b"] = "a"
    more: dict[str, list[bool]] = dataclasses.field(default_factory=dict)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "Expecting value"),
        ("\udcff", "."),
        ("[" * 100_000, "more than 64 levels"),
        ('{"a":' * 100_000, "more than 64 levels"),
        ("[" * 66 + "]" * 66, "more than 64 levels"),
        ("9" * 400, "more than 64 bits"),
        (str(2**63), "more than 64 bits"),
        ("1e400", "too large"),
        ("[NaN]", "NaN, which JSON has not"),
        ('"\\ud800"', "surrogates"),
    ],
    ids=lambda text: text[:12],
)
def test_what_is_no_plain_json_is_refused(text: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=reason):
        decode(text.encode("utf-8", "surrogateescape"))
    (tmp_path / "file").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ValueError, match=r"/file is not the JSON that was written \(.*restore"):
        read_object(tmp_path / "file")


def test_values_come_back_as_they_were() -> None:
    for value in (2**63 - 1, -(2**63), 0.1, "\U0001f600", [[None, True]], {"a": {"b": []}}, "[" * 100):
        assert decode(encode(value)) == value
    assert str(with_nan(decode(encode([math.nan, (math.inf, -math.inf)])))) == "[nan, [inf, -inf]]"


def test_objects_become_dataclasses() -> None:
    values = {"name": "x", "inner": {"path": "p"}, "betas": [1, 0.5], "kind": "b", "more": {"k": [True]}}
    built = build(Outer, values)
    assert built == Outer("x", Other(Path("p")), (1.0, 0.5), "b", {"k": [True]})
    assert build(Outer, {"name": "x"}) == Outer("x")
    assert isinstance(built.betas, tuple)
    assert isinstance(built.betas[0], float)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"name": 5}, "name is 5; it must be a string"),
        ({"name": None}, "name is None; it must be a string"),
        ({"inner": {"witdh": 1}}, "there is no inner.witdh; the nearest is inner.width"),
        ({"inner": {"width": True}}, "inner.width is True; it must be a whole number"),
        ({"inner": 3}, "inner is 3; it must be an object"),
        ({"betas": [1]}, "betas is [1]; it must be a list of 2, each a number, or null"),
        ({"kind": "c"}, "kind is 'c'; it must be one of a, b"),
        ({"more": {"k": [0]}}, "more.k[0] is 0; it must be true or false"),
    ],
)
def test_another_type_is_refused_by_name(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011
        build(Outer, {"name": "x", **changed})
    assert str(error.value) == message


def test_what_is_missing_is_named() -> None:
    with pytest.raises(ValueError, match=r"^part\.name is missing$"):
        build(Outer, {}, "part")
    with pytest.raises(ValueError, match=r"^part is 3; it must be an object$"):
        convert(3, Outer, "part")
