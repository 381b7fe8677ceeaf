"""How dataclasses become command lines, beside what tyro does itself."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import itertools
import textwrap
from collections.abc import Collection
from typing import Any, get_type_hints

from tyro.constructors import (
    MISSING,
    MISSING_NONPROP,
    ConstructorRegistry,
    StructConstructorSpec,
    StructFieldSpec,
    StructTypeInfo,
)


def rules(without: Collection[tuple[type, str]] = ()) -> ConstructorRegistry:
    """Return tyro's rules with ours for dataclasses.

    The help of a field is its docstring with one line for each paragraph, which tyro wraps; tyro alone keeps
    the line breaks of the source. ``without`` are fields that get no option, each with its class, and keep
    their default; so do those with the metadata ``option`` False.
    """
    registry = ConstructorRegistry()

    @registry.struct_rule
    def rule(info: StructTypeInfo) -> StructConstructorSpec | None:
        is_generic = hasattr(info.type, "__parameters__")  # as tyro's own
        if is_generic or not dataclasses.is_dataclass(info.type):
            return None
        kind: Any = info.type
        types, texts = get_type_hints(kind, include_extras=True), _help_texts(kind)
        defaults = {field.name: _default(field, info.default) for field in dataclasses.fields(kind)}
        hidden = {field.name for field in dataclasses.fields(kind) if field.metadata.get("option") is False}
        hidden |= {name for name in defaults if (kind, name) in without}
        fixed = {name: defaults[name] for name in hidden}
        return StructConstructorSpec(
            instantiate=functools.partial(kind, **fixed),
            fields=tuple(
                StructFieldSpec(name=name, type=types[name], default=default, helptext=texts.get(name))
                for name, default in defaults.items()
                if name not in fixed
            ),
        )

    return registry


def _default(field: dataclasses.Field[Any], instance: Any) -> Any:
    """The default of a field: that of the instance, if there is one, or that of the class."""
    if instance is MISSING:
        return MISSING
    if instance is not None and hasattr(instance, field.name):
        return getattr(instance, field.name)
    if field.default is not dataclasses.MISSING:
        return field.default
    return MISSING_NONPROP if field.default_factory is dataclasses.MISSING else field.default_factory()


@functools.cache
def _help_texts(kind: type) -> dict[str, str]:
    """Return the docstrings of a dataclass's fields, inherited ones too; each paragraph is one line."""
    texts: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if not dataclasses.is_dataclass(base):
            continue
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(definition, ast.ClassDef)
        for field, text in itertools.pairwise(definition.body):
            match field, text:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(docstring))),
                ):
                    paragraphs = inspect.cleandoc(docstring).split("\n\n")
                    texts[name] = "\n\n".join(" ".join(lines.split()) for lines in paragraphs)
    return texts
