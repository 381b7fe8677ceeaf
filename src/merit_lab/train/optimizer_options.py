"""Parse optimizer arguments written as OPTION=VALUE, and check them against the signature of the class."""

from __future__ import annotations

import contextlib
import inspect
import json
import types
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Literal, Union, Unpack, get_args, get_origin, get_type_hints

from merit_lab.json_values import decode
from merit_lab.train.optimizer_names import class_of, is_external, load_class
from merit_optim.settings import SETTINGS
from merit_optim.spelling import did_you_mean

_PYTHON_WORDS = {"True": True, "False": False, "None": None}
_FIELDS = ("lr", "weight_decay", "max_grad_norm")  # fields of OptimizerConfig, for both optimizers


def parse_options(texts: Iterable[str], field: str) -> dict[str, Any]:
    """Return options by name. Values are JSON, True, False, None, a list separated by commas, or strings.

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
        options[option] = _parse(value)
    return options


def fitted_options(cls: Callable[..., Any], options: Mapping[str, Any], field: str) -> dict[str, Any]:
    """Convert options to the types that a class expects. Raise ValueError if that is impossible."""
    hints = _hints(cls)
    fitted = {}
    for option, value in options.items():
        try:
            fitted[option] = _fit(value, hints.get(option))
        except TypeError:
            expected = inspect.formatannotation(hints[option])
            raise ValueError(
                f"{field} has {option}={value!r}, but {cls.__name__} expects {expected}"
            ) from None
    return fitted


def check_known(cls: Callable[..., Any], options: Iterable[str], field: str) -> None:
    """Raise ValueError on an option that a class does not take, and suggest the nearest one."""
    for option in options:
        if not takes(cls, option):
            raise _unknown_option(cls, option, field)


def default_of(name: str, option: str) -> Any:
    """Return the default of an option of an optimizer, as ``parse_options`` would; None without a default.

    Example:
        >>> default_of("torch:SGD", "momentum"), default_of("lamb", "betas"), default_of("lamb", "momentum")
        (0, (0.9, 0.95), None)
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


def check_used(
    cls: Callable[..., Any], options: Mapping[str, Any], used: Collection[str], field: str
) -> None:
    """Raise ValueError on an option that a class accepted as ``**kwargs`` but does not use."""
    for option in options:
        if option not in option_names(cls) and option not in used:
            raise _unknown_option(cls, option, field)


def option_names(cls: Callable[..., Any]) -> list[str]:
    """Return the named arguments of a class, without the first, the parameters."""
    arguments = inspect.signature(cls).parameters.values()
    return [
        *[argument.name for argument in arguments if argument.kind is not argument.VAR_KEYWORD][1:],
        *_unpacked(cls),
    ]


def _unpacked(cls: Callable[..., Any]) -> list[str]:
    """Return the arguments that a class declares as ``**options: Unpack[...]``."""
    unpacked = [hint for hint in _hints(cls).values() if get_origin(hint) is Unpack]
    return [name for hint in unpacked for name in get_args(hint)[0].__annotations__]


def _unknown_option(cls: Callable[..., Any], option: str, field: str) -> ValueError:
    known = option_names(cls)
    return ValueError(
        f"{field} has {option}, which {cls.__name__} does not take{did_you_mean(option, known)} It takes "
        f"{', '.join(known)}"
    )


def _parse(text: str) -> Any:
    if text in _PYTHON_WORDS:
        return _PYTHON_WORDS[text]
    try:
        return _as_tuples(decode(text))
    except ValueError:
        is_several = "," in text and not text.startswith(("[", "{"))
        return tuple(map(_parse, text.split(","))) if is_several else text


def _as_tuples(value: Any) -> Any:
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value


def _hints(cls: Callable[..., Any]) -> dict[str, Any]:
    """Return the type hints of a class's arguments, if they can be resolved."""
    try:
        return get_type_hints(getattr(cls, "__init__", cls))
    except (NameError, TypeError):  # names imported only for type checkers
        return {}


def _fit(value: Any, hint: Any) -> Any:
    """Convert a value to a type. Raise TypeError if it does not fit."""
    import torch

    kind, inner = get_origin(hint) or hint, get_args(hint)
    if kind in (Union, types.UnionType):
        for member in inner:
            with contextlib.suppress(TypeError):
                return _fit(value, member)
        raise TypeError
    if isinstance(value, str):
        if kind is type or (hint is None and is_external(value)):
            return load_class(value)
        if kind is torch.dtype and isinstance(getattr(torch, value, None), torch.dtype):
            return getattr(torch, value)
        if kind is float:
            with contextlib.suppress(ValueError):
                return float(value)
    if kind is Literal:
        fits = value in inner
    elif kind in (bool, str, int, float, types.NoneType):
        fits = type(value) is kind or (kind is float and type(value) is int)
    elif kind in (tuple, list):
        fits = isinstance(value, tuple)
    else:  # no hint, or one that cannot be checked
        fits = kind not in (torch.dtype, type, Callable)
    if not fits:
        raise TypeError
    return value
