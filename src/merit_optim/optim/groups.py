"""Sort a model's parameters into groups, one kind of weight in each, and print them as a table."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from merit_optim.optim import validate
from merit_optim.optim.engines.gradients import norms
from merit_optim.optim.kinds import KINDS, Kind, kinds_of, transposed_in
from merit_optim.optim.names import plain
from merit_optim.optim.torch_private import is_fake, is_wrapper
from merit_optim.spelling import nearest

_RESERVED = {"params", "param_names", "kind"}
_FEWEST_DIMENSIONS = {"hidden": 2, "experts": 3}
_NUMBER = re.compile(r"\d+")


def param_groups(
    model: nn.Module,
    weight_decay: float = 0.1,
    *,
    no_decay: Iterable[str] = (),
    kind_of: Mapping[str, Kind] | None = None,
    overrides: Mapping[str, Mapping[str, Any]] | None = None,
) -> list[dict[str, Any]]:
    """Parameter groups for any torch optimizer, one kind of weight in each.

    Weights of two or more dimensions decay, others do not.

    Frozen parameters are left out, and a tied parameter appears once. Patterns are shell-style
    (``"*.bias"``), are matched against every name of a parameter, and must match at least one. Names are
    those of the model before ``torch.compile``.

    The ``kind`` of a group is "hidden", "experts", "embedding", "head" or "vector"; see ``kinds_of``. The
    optimizers of this package take options for each: ``kinds={"embedding": {"rate_scale": 20}}``. Several
    groups have the same kind if their options differ, as those of weights that are stored as (inputs,
    outputs), with ``transposed``: Hugging Face's Conv1D is recognised.

    Args:
        model: the model whose parameters to sort.
        weight_decay: weight decay of parameters with two or more dimensions.
        no_decay: patterns of other parameters without weight decay.
        kind_of: kinds by pattern, to correct those found in the model; the last pattern that matches wins.
            A kind does not change which parameters decay.
        overrides: options by pattern, such as ``rate_scale`` for some layers; the last pattern that matches
            wins.

    Examples:
        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.Embedding(10, 4), torch.nn.Linear(4, 10))
        >>> groups = param_groups(model, overrides={"0.*": {"element_wise": False}})
        >>> [(group["kind"], group["param_names"], group["weight_decay"]) for group in groups]
        [('embedding', ['0.weight'], 0.1), ('head', ['1.weight'], 0.1), ('vector', ['1.bias'], 0.0)]
    """
    kind_of = {} if kind_of is None else kind_of
    overrides = {} if overrides is None else overrides
    no_decay = [no_decay] if isinstance(no_decay, str) else list(no_decay)
    validate.model(model)
    validate.kind_of(kind_of, KINDS)
    validate.overrides(overrides)
    for pattern, override in overrides.items():
        if reserved := _RESERVED & set(override):
            raise ValueError(
                f"the override for {pattern!r} sets {sorted(reserved)}; it can only set options of the "
                "optimizer, such as rate_scale, weight_decay or matrix_dims. Kinds are set by kind_of."
            )

    names: dict[nn.Parameter, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        # A pattern may also use the name that torch.compile gave the parameter.
        names.setdefault(param, []).extend(dict.fromkeys([plain(name), name]))
    _check_patterns([*no_decay, *kind_of, *overrides], [name for alike in names.values() for name in alike])

    kinds, transposed = kinds_of(model), transposed_in(model)
    groups: dict[str, dict[str, Any]] = {}
    found: dict[Tensor, dict[str, Any]] = {}
    for param, alike in names.items():
        if not param.requires_grad:
            continue
        decays = param.ndim >= 2 and not _matches(alike, no_decay)
        options: dict[str, Any] = {"weight_decay": weight_decay if decays else 0.0}
        for pattern, override in overrides.items():
            if _matches(alike, [pattern]):
                options.update(override)
        group = groups.setdefault(_key(options), {"params": [], "param_names": [], **options})
        group["params"].append(param)
        group["param_names"].append(alike[0])
        kind = _corrected(kinds[param], alike, param, kind_of)
        found[param] = options_of_kind(kind, param, is_transposed=param in transposed)
    # Divided last: SOAP's matrices take turns by the order of the groups, which so keeps the model's order.
    return [part for group in groups.values() for part in divided(group, found)]


def options_of_kind(kind: Kind, param: Tensor, *, is_transposed: bool = False) -> dict[str, Any]:
    """The kind of a weight and how its matrix is stored, as options of a group."""
    if kind == "embedding" and param.ndim > 2 and param.shape[0] == 1:
        return {"kind": kind, "matrix_dims": 2}  # the leading 1 is a batch: the table is behind it
    return {"kind": kind, "transposed": True} if is_transposed and kind != "vector" else {"kind": kind}


def divided(group: Mapping[str, Any], options_of: Mapping[Tensor, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The group in parts whose parameters have the same of these options. The group's own win."""
    parts: dict[str, dict[str, Any]] = {}
    names = group.get("param_names") or [None] * len(group["params"])
    for param, name in zip(group["params"], names, strict=True):
        options = options_of[param]
        lists: dict[str, list[Any]] = {"params": []} if name is None else {"params": [], "param_names": []}
        part = parts.setdefault(_key(options), {**options, **group, **lists})
        part["params"].append(param)
        if name is not None:
            part["param_names"].append(name)
    return list(parts.values())


def describe_groups(groups: Optimizer | Sequence[Mapping[str, Any]]) -> str:
    """Return a table of the parameters, and a second one that counts them by kind.

    Groups of ``param_groups`` have kinds, and those of this package's optimizers updates: a direction, and
    the norm of its ratios. The rate is ``lr * rate_scale``. The norm is the weight's Euclidean one; those on
    the meta device, or shared by ranks, have none here. Columns without entries are left out.

    Parameters whose names differ only in their numbers, such as those of a model's blocks, share a row.

    Args:
        groups: parameter groups, as ``param_groups`` returns them, or an optimizer of any class.

    Examples:
        >>> import torch
        >>> blocks = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(3))
        >>> model = torch.nn.ModuleDict({"embedding": torch.nn.Embedding(10, 4), "blocks": blocks})
        >>> for param in model.parameters():
        ...     _ = torch.nn.init.ones_(param)
        >>> print(describe_groups(torch.optim.AdamW(param_groups(model), lr=1e-3)))
        name                  shape       kind       rate   weight decay  norm
        embedding.weight      (10, 4)     embedding  0.001  0.1           6.32
        blocks.{0..2}.weight  3 x (4, 4)  hidden     0.001  0.1           4
        blocks.{0..2}.bias    3 x (4,)    vector     0.001  0             2
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
    norm_of: dict[str, float | None] = {}
    sizes: dict[str, list[int]] = {kind: [] for kind in KINDS}
    for index, group in enumerate(listed):
        params, cells = group["params"], [show(group) for show in _COLUMNS.values()]
        names = group.get("param_names") or [f"parameter {i} of group {index}" for i in range(len(params))]
        for param, name in zip(params, names, strict=True):
            alike.setdefault((str(tuple(param.shape)), *cells), []).append(name)
            order.setdefault(name, len(order))
            norm_of[name] = _norm(param)
            sizes.setdefault(group.get("kind", "-"), []).append(param.numel())

    rows = []
    for (shape, *cells), names in alike.items():
        for folded, members in fold_names(names).items():
            many = f"{len(members)} x {shape}" if len(members) > 1 else shape
            of_each = [norm for name in members if (norm := norm_of[name]) is not None]
            rows.append((order[members[0]], [folded, many, *cells, _between(of_each)]))
    table = [["name", "shape", *_COLUMNS, "norm"], *(cells for _, cells in sorted(rows))]
    summary = [["kind", "tensors", "parameters"]]
    summary += [[kind, str(len(numels)), f"{sum(numels):,}"] for kind, numels in sizes.items() if numels]
    return f"{_aligned(table, optional=(*_COLUMNS, 'norm'))}\n\n{_aligned(summary)}"


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
    """The choices of a group, as "muon x merit" or "muon x none, sphere"; "-" for other classes."""
    if not {"direction", "ratio", "hold"} <= group.keys():
        return "-"
    direction, ratio, hold = (group[axis] for axis in ("direction", "ratio", "hold"))
    if (direction, ratio, hold) == ("adam", "none", "decay"):
        return "adamw"
    scaled = direction if ratio == "none" else f"{direction} x {ratio}"
    return scaled if hold == "decay" else f"{scaled}, {hold}"


def _rate(group: Mapping[str, Any]) -> str:
    """The rate of the group's steps; before there is an ``lr``, its multiple."""
    scale = group.get("rate_scale", 1.0)
    if "lr" in group:
        return f"{float(group['lr']) * scale:g}"
    return f"{scale:g} lr" if "rate_scale" in group else "-"


def _given(option: str) -> Callable[[Mapping[str, Any]], str]:
    """Shows an option of a group."""

    def shown(group: Mapping[str, Any]) -> str:
        value = group.get(option)
        return "-" if value is None else f"{value:g}" if isinstance(value, float) else str(value)

    return shown


_COLUMNS: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "kind": _given("kind"),
    "update": _update,
    "rate": _rate,
    "weight decay": _given("weight_decay"),
    "split": _given("split"),
    "matrix_dims": _given("matrix_dims"),
}


def _norm(param: Tensor) -> float | None:
    """A weight's norm, if it can be known without other ranks."""
    is_elsewhere = any(ask(param) for ask in (is_lazy, is_fake, is_wrapper))
    if is_elsewhere or not param.is_floating_point():
        return None
    return float(norms([param.detach()], 2.0)[0])


def _between(values: list[float]) -> str:
    """The smallest and the largest of several values, rounded; one if they are the same."""
    return "..".join(dict.fromkeys(f"{value:.3g}" for value in (min(values), max(values)))) if values else "-"


def _aligned(rows: list[list[str]], optional: Sequence[str] = ()) -> str:
    """Format rows, the first one the header, as a table; optional columns that are empty are left out."""
    columns = [
        column
        for column in zip(*rows, strict=True)
        if column[0] not in optional or any(cell != "-" for cell in column[1:])
    ]
    padded = [[cell.ljust(max(map(len, column))) for cell in column] for column in columns]
    return "\n".join("  ".join(row).rstrip() for row in zip(*padded, strict=True))


def _corrected(kind: Kind, names: list[str], param: Tensor, kind_of: Mapping[str, Kind]) -> Kind:
    """The kind of the last pattern that matches, or the one found in the model."""
    pattern = None
    for candidate in kind_of:
        if _matches(names, [candidate]):
            pattern, kind = candidate, kind_of[candidate]
    fewest = _FEWEST_DIMENSIONS.get(kind, 0)
    if param.ndim < fewest:
        meaning = "a stack of matrices" if kind == "experts" else "a matrix"
        raise ValueError(
            f"the kind for {pattern!r} is {kind!r}, but {names[0]} has shape {tuple(param.shape)}; {kind!r} "
            f"means {meaning}, with {fewest} or more dimensions. Use a pattern that does not match it, such "
            "as '*.weight', or another kind."
        )
    return kind


def _key(options: Mapping[str, Any]) -> str:
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
