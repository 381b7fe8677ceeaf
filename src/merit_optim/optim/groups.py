"""Sort a model's parameters into groups by weight decay and by other options, and print them as a table."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from merit_optim.optim import validate
from merit_optim.optim.kinds import KINDS, MARKS, Kind, kinds_of, transposed_in
from merit_optim.optim.names import plain
from merit_optim.spelling import nearest

_LISTS = ("params", "param_names", *MARKS)
_FEWEST_DIMENSIONS = {"hidden": 2, "experts": 3}
_NUMBER = re.compile(r"\d+")


def param_groups(
    model: nn.Module,
    weight_decay: float = 0.1,
    *,
    no_decay: Iterable[str] = (),
    kinds: Mapping[str, Kind] | None = None,
    overrides: Mapping[str, Mapping[str, Any]] | None = None,
) -> list[dict[str, Any]]:
    """Parameter groups for any torch optimizer: weights of two or more dimensions decay, others do not.

    Frozen parameters are left out, and a tied parameter appears once. Patterns are shell-style
    (``"*.bias"``), are matched against every name of a parameter, and must match at least one. Names are
    those of the model before ``torch.compile``.

    Each group has ``param_kinds`` next to ``param_names``: the kind of each weight, from ``kinds_of``.
    ``describe_groups`` shows them. A group with weights that are stored as (inputs, outputs), as in Hugging
    Face's Conv1D, has ``param_transposed`` too: whether each is. The override ``{"transposed": True}`` says
    it of others.

    Args:
        model: the model whose parameters to sort.
        weight_decay: weight decay of parameters with two or more dimensions.
        no_decay: patterns of other parameters without weight decay.
        kinds: kinds by pattern, to correct those found in the model; the last pattern that matches wins.
            A kind does not change which parameters decay.
        overrides: options by pattern; the last pattern that matches wins.

    Examples:
        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.Embedding(10, 4), torch.nn.Linear(4, 10))
        >>> groups = param_groups(model, overrides={"0.*": {"element_wise": False}})
        >>> [(group["param_names"], group["weight_decay"]) for group in groups]
        [(['0.weight'], 0.1), (['1.weight'], 0.1), (['1.bias'], 0.0)]
        >>> [group["param_kinds"] for group in groups]
        [['embedding'], ['head'], ['vector']]
    """
    kinds = {} if kinds is None else kinds
    overrides = {} if overrides is None else overrides
    no_decay = [no_decay] if isinstance(no_decay, str) else list(no_decay)
    validate.model(model)
    validate.kinds(kinds, KINDS)
    validate.overrides(overrides)
    for pattern, override in overrides.items():
        if reserved := set(_LISTS) & set(override):
            raise ValueError(
                f"the override for {pattern!r} sets {sorted(reserved)}; it can only set options of the "
                "optimizer, such as lr, weight_decay or matrix_dims"
            )

    names: dict[nn.Parameter, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        # A pattern may also use the name that torch.compile gave the parameter.
        names.setdefault(param, []).extend(dict.fromkeys([plain(name), name]))
    _check_patterns([*no_decay, *kinds, *overrides], [name for alike in names.values() for name in alike])

    kinds_in_model, transposed = kinds_of(model), transposed_in(model)
    groups: dict[str, dict[str, Any]] = {}
    for param, alike in names.items():
        if not param.requires_grad:
            continue
        decays = param.ndim >= 2 and not _matches(alike, no_decay)
        options: dict[str, Any] = {"weight_decay": weight_decay if decays else 0.0}
        for pattern, override in overrides.items():
            if _matches(alike, [pattern]):
                options.update(override)
        empty: dict[str, Any] = {name: [] for name in _LISTS}
        group = groups.setdefault(_key(options), {**empty, **options})
        group["params"].append(param)
        group["param_names"].append(alike[0])
        group["param_kinds"].append(_corrected(kinds_in_model[param], alike, param, kinds))
        group["param_transposed"].append(param in transposed)
    for group in groups.values():
        if not any(group["param_transposed"]):
            del group["param_transposed"]
    return list(groups.values())


def picked(group: Mapping[str, Any], members: Sequence[int]) -> dict[str, Any]:
    """Return the group with only the parameters at these indices."""
    return {key: [value[i] for i in members] if key in _LISTS else value for key, value in group.items()}


def by_orientation(group: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the group, or two with the option ``transposed`` if ``param_transposed`` says it of some."""
    marks = group.get("param_transposed")
    if marks is None or "transposed" in group:
        return [group]
    params = group["params"]
    group = {**group, "params": [params] if isinstance(params, Tensor) else list(params)}
    validate.one_each("param_transposed", marks, len(group["params"]))
    parts = [[i for i, mark in enumerate(marks) if bool(mark) is turned] for turned in (False, True)]
    options: tuple[dict[str, Any], ...] = ({}, {"transposed": True})
    return [picked(group, part) | option for part, option in zip(parts, options, strict=True) if part]


def describe_groups(groups: Optimizer | Sequence[Mapping[str, Any]]) -> str:
    """Return a table of the parameters, and a second one that counts them: by kind, or by update.

    Groups of ``param_groups`` have kinds, and so has an optimizer of torch that was made from them. Those of
    this package have updates instead: a direction, and the norm of its ratios.

    Parameters whose names differ only in their numbers, such as those of a model's blocks, share a row.

    Args:
        groups: parameter groups, as ``param_groups`` returns them, or an optimizer of any class.

    Examples:
        >>> import torch
        >>> blocks = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(3))
        >>> model = torch.nn.ModuleDict({"embedding": torch.nn.Embedding(10, 4), "blocks": blocks})
        >>> print(describe_groups(torch.optim.AdamW(param_groups(model), lr=1e-3)))
        name                  shape       kind       lr     weight decay
        embedding.weight      (10, 4)     embedding  0.001  0.1
        blocks.{0..2}.weight  3 x (4, 4)  hidden     0.001  0.1
        blocks.{0..2}.bias    3 x (4,)    vector     0.001  0
        <BLANKLINE>
        kind       tensors  parameters
        hidden     3        48
        embedding  1        40
        vector     3        12
    """
    listed: Any = getattr(groups, "param_groups", groups)
    validate.groups(listed)
    alike: dict[tuple[str, ...], list[str]] = {}
    order: dict[str, int] = {}
    sizes: dict[str, list[int]] = {kind: [] for kind in KINDS}
    knows_kinds = any("param_kinds" in group for group in listed)
    for index, group in enumerate(listed):
        options = [_update(group), _number(group.get("lr")), _number(group.get("weight_decay"))]
        params = group["params"]
        names = group.get("param_names") or [f"parameter {i} of group {index}" for i in range(len(params))]
        kinds = group.get("param_kinds") or ["-"] * len(params)
        for param, name, kind in zip(params, names, kinds, strict=True):
            alike.setdefault((str(tuple(param.shape)), kind, *options), []).append(name)
            order.setdefault(name, len(order))
            sizes.setdefault(kind if knows_kinds else options[0], []).append(param.numel())

    rows = []
    for (shape, *cells), names in alike.items():
        for folded, members in fold_names(names).items():
            many = f"{len(members)} x {shape}" if len(members) > 1 else shape
            rows.append((order[members[0]], [folded, many, *cells]))
    table = [["name", "shape", "kind", "update", "lr", "weight decay"]]
    table += [cells for _, cells in sorted(rows)]
    summary = [["kind" if knows_kinds else "update", "tensors", "parameters"]]
    summary += [[kind, str(len(numels)), f"{sum(numels):,}"] for kind, numels in sizes.items() if numels]
    return f"{_aligned(table, optional=('kind', 'update', 'lr'))}\n\n{_aligned(summary)}"


def fold_names(names: Iterable[str]) -> dict[str, list[str]]:
    """Fold names that differ only in their numbers into one name with the ranges of those numbers.

    A folded name stands for exactly the combinations of its numbers.

    Examples:
        >>> fold_names(["norm.weight", "blocks.0.weight", "blocks.1.weight"])
        {'norm.weight': ['norm.weight'], 'blocks.{0..1}.weight': ['blocks.0.weight', 'blocks.1.weight']}
    """
    alike: dict[tuple[str, ...], list[str]] = {}
    for name in names:
        alike.setdefault(tuple(_NUMBER.split(name)), []).append(name)
    folded = {}
    for members in alike.values():
        folded.update(_fold(members))
    return folded


def _fold(names: list[str]) -> dict[str, list[str]]:
    """Like :func:`fold_names`, for names that differ only in their numbers."""
    numbers = [_NUMBER.findall(name) for name in names]
    choices = [sorted(set(column), key=int) for column in zip(*numbers, strict=True)]
    if math.prod(map(len, choices)) > len(set(names)):
        # Some combinations are missing: fold separately for each value of the number with the fewest values.
        varying = min((i for i in range(len(choices)) if len(choices[i]) > 1), key=lambda i: len(choices[i]))
        folded = {}
        for value in choices[varying]:
            pairs = zip(names, numbers, strict=True)
            folded.update(_fold([name for name, in_name in pairs if in_name[varying] == value]))
        return folded
    texts, ranges = _NUMBER.split(names[0]), [*map(_range, choices), ""]
    return {"".join(text + values for text, values in zip(texts, ranges, strict=True)): names}


def _range(values: list[str]) -> str:
    """Format sorted numbers, with consecutive ones as ``0..11``."""
    if len(values) == 1:
        return values[0]
    runs: list[list[str]] = []
    for value in values:
        if runs and int(value) == int(runs[-1][-1]) + 1:
            runs[-1].append(value)
        else:
            runs.append([value])
    return "{" + ",".join(run[0] if len(run) == 1 else f"{run[0]}..{run[-1]}" for run in runs) + "}"


def _update(group: Mapping[str, Any]) -> str:
    """The direction and the norm of the ratios of a group, as "muon x max ratios"; "-" for other classes."""
    if "norm" not in group:
        return "-"
    direction, norm = group.get("direction", "adam"), group["norm"]
    if norm == "none":
        return "adamw" if direction == "adam" else direction
    return f"{direction} x {norm} ratios"


def _number(value: Any) -> str:
    return "-" if value is None else f"{float(value):g}"


def _aligned(rows: list[list[str]], optional: Sequence[str] = ()) -> str:
    """Format rows, the first one the header, as a table; optional columns that are empty are left out."""
    columns = [
        column
        for column in zip(*rows, strict=True)
        if column[0] not in optional or any(cell != "-" for cell in column[1:])
    ]
    padded = [[cell.ljust(max(map(len, column))) for cell in column] for column in columns]
    return "\n".join("  ".join(row).rstrip() for row in zip(*padded, strict=True))


def _corrected(kind: Kind, names: list[str], param: Tensor, kinds: Mapping[str, Kind]) -> Kind:
    """The kind of the last pattern that matches, or the one found in the model."""
    pattern = None
    for candidate in kinds:
        if _matches(names, [candidate]):
            pattern, kind = candidate, kinds[candidate]
    fewest = _FEWEST_DIMENSIONS.get(kind, 0)
    if param.ndim < fewest:
        meaning = "a stack of matrices" if kind == "experts" else "a matrix"
        raise ValueError(
            f"the kind for {pattern!r} is {kind!r}, but {names[0]} has shape {tuple(param.shape)}; {kind!r} "
            f"means {meaning}, with {fewest} or more dimensions. Use a pattern that does not match it, such "
            "as '*.weight', or another kind."
        )
    return kind


def _key(options: dict[str, Any]) -> str:
    """A key for equal options. Tensors are compared by identity, because each can be changed in place."""
    items = [(name, id(value) if isinstance(value, Tensor) else value) for name, value in options.items()]
    return repr(sorted(items, key=lambda pair: pair[0]))


def _matches(names: list[str], patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for name in names for pattern in patterns)


def _check_patterns(patterns: list[str], names: list[str]) -> None:
    for pattern in patterns:
        if not _matches(names, [pattern]):
            similar = nearest(pattern, names, num=3, similarity=0.0)
            raise ValueError(
                f"the pattern {pattern!r} matches no parameter; the nearest names are "
                f"{', '.join(similar) or '(the model has no parameters)'}. Patterns are shell-style: "
                "'*.bias', 'blocks.0.*'."
            )
