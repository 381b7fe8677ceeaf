"""Optimizers by name, also torch:NAME, pytorch-optimizer:NAME or MODULE:CLASS; their options as OPTION=VALUE.

Options are checked against the signature of the class. torch is imported when a class is needed.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import types
from collections.abc import Callable, Collection, Iterable, Mapping
from types import ModuleType
from typing import (
    TYPE_CHECKING,
    Any,
    Literal,
    TypeGuard,
    Union,
    Unpack,
    get_args,
    get_origin,
    get_type_hints,
)

from merit_lab.checks import check_choice
from merit_lab.json_values import convert, decode
from merit_optim.settings import SETTINGS
from merit_optim.spelling import did_you_mean

if TYPE_CHECKING:
    from torch.optim import Optimizer

_SHORT_NAMES = {"torch": "torch.optim", "pytorch-optimizer": "pytorch_optimizer"}
_PYTHON_WORDS = {"True": True, "False": False, "None": None}
# Fields of OptimizerConfig, for both optimizers.
_FIELDS = ("lr", "rate_scale", "weight_decay", "max_grad_norm")
_CHECKED: set[Any] = {bool, int, float, str, types.NoneType, Literal}  # types that text can be compared with


def is_external(name: str) -> bool:
    """Whether a name means an external class, as in "my_package.optimizers:Mine"."""
    return ":" in name


def must_be_trusted(name: str) -> bool:
    """Whether a name means a class of an arbitrary module: importing it runs its code."""
    return is_external(name) and name.partition(":")[0] not in (*_SHORT_NAMES, *_SHORT_NAMES.values())


def check_name(field: str, name: str) -> None:
    """Raise ValueError unless a name is ours or MODULE:CLASS, which is not imported to read a record."""
    if not is_external(name):
        others = "torch:NAME, pytorch-optimizer:NAME", "MODULE:CLASS for your own"
        check_choice(field, name, tuple(SETTINGS), *others)
        return
    module, _, cls = name.partition(":")
    parts = _SHORT_NAMES.get(module, module).split(".")
    if not cls.isidentifier() or not all(part.isidentifier() for part in parts):
        raise ValueError(
            f"{field} is {name!r}; name your own optimizer by its module and class, as in "
            "my_package.optimizers:Mine; others are torch:NAME and pytorch-optimizer:NAME"
        )


def class_of(name: str) -> Callable[..., Optimizer]:
    """Return the class of an optimizer, or the function that makes it, from this package or external."""
    from merit_optim.optim.registry import OPTIMIZERS  # imports torch, which checking names does not need

    return load_class(name) if is_external(name) else OPTIMIZERS[name].optimizer


def load_class(name: str) -> Callable[..., Optimizer]:
    """Import the class or function of an external name; if there is no exact match, case is ignored."""
    check_name("the optimizer", name)
    short, _, class_name = name.partition(":")
    module_name = _SHORT_NAMES.get(short, short)
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        way_out = "install the module, or set PYTHONPATH to its folder"
        if module_name == "pytorch_optimizer":
            way_out = "install it with pip install '.[optim]'"
        raise ValueError(f"the optimizer is {name!r}, but {error}; {way_out}") from error
    optimizer = getattr(module, class_name, None)
    if inspect.isfunction(optimizer) and optimizer.__module__ == module_name:
        made: Callable[..., Optimizer] = optimizer
        return made
    if optimizer is None:
        optimizer = _by_lower_case(module).get(class_name.lower())
    if not _is_optimizer(optimizer):
        problem = (
            f"{module_name} has no such class"
            if optimizer is None
            else f"{optimizer!r} is not a torch.optim.Optimizer"
        )
        names = sorted(cls.__name__ for cls in _by_lower_case(module).values())
        hint = did_you_mean(class_name, names, otherwise=";")
        known = f"the optimizers of {module_name} are {', '.join(names)}" if names else "it has no optimizer"
        raise ValueError(f"the optimizer is {name!r}, but {problem}{hint} {known}")
    return optimizer


def is_from_library(cls: Callable[..., Any]) -> bool:
    """Whether a class is from torch or pytorch_optimizer."""
    return cls.__module__.startswith(tuple(f"{module}." for module in _SHORT_NAMES.values()))


def _by_lower_case(module: ModuleType) -> dict[str, type[Optimizer]]:
    return {key.lower(): value for key, value in vars(module).items() if _is_optimizer(value)}


def _is_optimizer(value: object) -> TypeGuard[type[Optimizer]]:
    from torch.optim import Optimizer

    return isinstance(value, type) and issubclass(value, Optimizer) and value is not Optimizer


# --- options ---


def parse_options(texts: Iterable[str], field: str) -> dict[str, Any]:
    """Return options by name, with their values.

    Example:
        >>> parse_options(["betas=0.9,0.95", "nesterov=true", "ns_dtype=float32"], "optimizer.options")
        {'betas': (0.9, 0.95), 'nesterov': True, 'ns_dtype': 'float32'}
    """
    options: dict[str, Any] = {}
    for text in texts:
        option, equals, value = text.partition("=")
        if not option.isidentifier() or not equals:
            raise ValueError(f"{field} has {text!r}; write OPTION=VALUE, as in momentum=0.9")
        if option in _FIELDS:
            raise ValueError(f"{field} has {text!r}; write --optimizer.{option.replace('_', '-')}")
        options[option] = parse_value(value)
    return options


def fitted_options(cls: Callable[..., Any], options: Mapping[str, Any], field: str) -> dict[str, Any]:
    """Convert options to the types that a class expects. Raise ValueError if that is impossible."""
    hints = _hints(cls)
    return {
        option: _fitted(value, hints.get(option), f"{option} in {field}") for option, value in options.items()
    }


def check_known(
    cls: Callable[..., Any], options: Iterable[str], field: str, used: Collection[str] | None = None
) -> None:
    """Raise ValueError on an option that a class does not take, and suggest the nearest one.

    Of those that it accepts as ``**kwargs``, once it is made, only those that it has ``used`` count.
    """
    known = option_names(cls)
    for option in options:
        if option not in known and not (takes(cls, option) if used is None else option in used):
            raise ValueError(
                f"{field} has {option}, which {cls.__name__} does not take{did_you_mean(option, known)} It "
                f"takes {', '.join(known)}"
            )


def default_of(name: str, option: str) -> Any:
    """Return the default of an option of an optimizer, as ``parse_options`` would; None without a default.

    Example:
        >>> default_of("torch:SGD", "momentum"), default_of("lion", "betas"), default_of("lion", "momentum")
        (0, (0.95, 0.98), None)
    """
    import torch  # not needed to parse options

    arguments = inspect.signature(class_of(name)).parameters
    defaults = {
        argument.name: argument.default
        for argument in arguments.values()
        if argument.default is not argument.empty
    }
    value = (defaults if is_external(name) else {**defaults, **SETTINGS[name].options}).get(option)
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else _as_tuples(value)


def write_option(option: str, value: Any) -> str:
    """Write an option so that ``parse_options`` can read it.

    Example:
        >>> write_option("betas", (0.9, 0.95)), write_option("nesterov", True), write_option("eps", 1e-8)
        ('betas=0.9,0.95', 'nesterov=true', 'eps=1e-08')
    """
    is_plain = isinstance(value, tuple) and len(value) > 1 and not any(isinstance(v, tuple) for v in value)
    return f"{option}={','.join(map(_word, value)) if is_plain else _word(value)}"


def _word(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, float) and float(f"{value:g}") == value:
        return f"{value:g}"
    return json.dumps(value)


def takes(cls: Callable[..., Any], option: str) -> bool:
    """Whether a class has this argument, or takes any."""
    takes_more = any(
        argument.kind is argument.VAR_KEYWORD for argument in inspect.signature(cls).parameters.values()
    )
    return option in option_names(cls) or (takes_more and not _unpacked(cls))


def option_names(cls: Callable[..., Any]) -> list[str]:
    """Return the named arguments of a class, without the first, the parameters."""
    arguments = inspect.signature(cls).parameters.values()
    return [
        *[argument.name for argument in arguments if argument.kind is not argument.VAR_KEYWORD][1:],
        *_unpacked(cls),
    ]


def _unpacked(cls: Callable[..., Any]) -> list[str]:
    """Return the arguments that a class declares as ``**options: Unpack[...]``."""
    if not any(one.kind is one.VAR_KEYWORD for one in inspect.signature(cls).parameters.values()):
        return []  # the signature names them
    unpacked = [hint for hint in _hints(cls).values() if get_origin(hint) is Unpack]
    return [name for hint in unpacked for name in get_args(hint)[0].__annotations__]


def parse_value(text: str) -> Any:
    """Return the value of text: JSON, True, False, None, a list separated by commas, or a string."""
    if text in _PYTHON_WORDS:
        return _PYTHON_WORDS[text]
    try:
        return _as_tuples(decode(text))
    except ValueError:
        is_several = "," in text and not text.startswith(("[", "{"))
        return tuple(map(parse_value, text.split(","))) if is_several else text


def _as_tuples(value: Any) -> Any:
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value


def _hints(cls: Callable[..., Any]) -> dict[str, Any]:
    """Return the type hints of a class's arguments, if they can be resolved."""
    try:
        return get_type_hints(getattr(cls, "__init__", cls))
    except (NameError, TypeError):  # names imported only for type checkers
        return {}


def _fitted(value: Any, hint: Any, name: str) -> Any:
    """Return a value as the type of an argument, if text can have that; raise ValueError if it cannot be."""
    import torch

    is_union = get_origin(hint) in (Union, types.UnionType)
    kinds = {get_origin(one) or one for one in (get_args(hint) if is_union else [hint])}
    if isinstance(value, str):
        if torch.dtype in kinds:
            if not isinstance(dtype := getattr(torch, value, None), torch.dtype):
                raise ValueError(f"{name} is {value!r}; it must be a dtype of torch, as bfloat16")
            return dtype
        if float in kinds:
            with contextlib.suppress(ValueError):  # numbers that JSON has not, as inf
                return float(value)
    return convert(value, hint, name) if kinds <= _CHECKED else value
