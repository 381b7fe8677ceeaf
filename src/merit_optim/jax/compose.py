"""Any direction, ratio and hold as one optax optimizer."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax  # type: ignore[import-untyped]

from merit_optim.jax import validate
from merit_optim.jax.directions import DIRECTIONS
from merit_optim.jax.holds import HOLDS, Hold
from merit_optim.jax.ratios import RATIOS
from merit_optim.jax.trees import Mask, Scalar, ScalarOrSchedule, Views, for_each, in_float32, resolved
from merit_optim.spelling import did_you_mean

AXES: Mapping[str, Mapping[str, Callable[..., Any]]] = {
    "direction": DIRECTIONS,
    "ratio": RATIOS,
    "hold": HOLDS,
}
_SHARED = ("weight_decay", "mask", "view")
"""Arguments of ``compose`` that choices take too."""


def compose(
    learning_rate: ScalarOrSchedule,
    weight_decay: ScalarOrSchedule = 0.1,
    mask: Mask = None,
    *,
    direction: str | optax.GradientTransformation = "adam",
    ratio: str | optax.GradientTransformation = "merit",
    hold: str | Hold = "decay",
    view: Views = None,
    hidden: Mask = None,
    rest: optax.GradientTransformation | None = None,
    rest_scale: Scalar = 1.0,
    **options: Any,
) -> optax.GradientTransformationExtraArgs:
    """Optimizer of a direction, a ratio and a hold.

        d  = direction(g)
        u  = d + weight_decay*w          for hold="decay", else d
        c  = clamp(s*u, -clip, clip)     with s = ratio(w, u)
        w <- w - learning_rate*c, and what the hold does

    Arithmetic and state are in float32 for any dtype of the parameters. The updates have the dtype of the
    gradients, as in optax.

    Args:
        learning_rate: a number, or a schedule from the step count to one.
        weight_decay: of the hold, and of AdamW for the rest; a number or a schedule. A sphere has none.
        mask: which parameters decay: a tree of bools, a prefix of the parameters' tree, or a function from
            the parameters to one. None: all.
        direction: "adam", "sgd" (with momentum), "sign" (of it), "muon" or "normuon"; or a transformation.
        ratio: "merit", "weight", "row", "column" or "none"; or a transformation.
        hold: "decay" (inside the ratio), "decoupled", "cautious" or "sphere"; or a ``Hold``.
        view: how arrays are seen as matrices: a ``View``, a number of trailing axes, or None for (first axis)
            x (all the rest). Also a tree of these, a prefix of one, or a function from the parameters to one.
        hidden: which parameters are hidden matrices and take this step, in the same forms as ``mask``. None:
            all, but Muon's directions must be told. Embeddings and the output head are not hidden: their rows
            or columns belong to tokens.
        rest: the optimizer of the other parameters; None for AdamW with betas (0.9, 0.95).
        rest_scale: AdamW's learning rate, as a share of ``learning_rate``.
        options: those of the choices: of ``scale_by_adam`` and ``scale_by_muon`` (SGD has ``momentum`` and
            ``nesterov``), of ``scale_by_ratio``, and ``sphere_of``; see there.

    Under ``optax.inject_hyperparams``, name in ``static_args`` ``ns_steps``, dtypes, and those of ``mask``,
    ``view`` and ``hidden`` that are given as functions or numbers.

    Examples:
        >>> import jax, jax.numpy as jnp, optax
        >>> from merit_optim.jax import compose
        >>> params = {"kernel": jnp.eye(3), "bias": jnp.ones(3)}
        >>> optimizer = optax.chain(
        ...     optax.clip_by_global_norm(1.0),
        ...     compose(1e-2, direction="sign", ratio="row", hold="cautious", momentum=0.95),
        ... )
        >>> state = optimizer.init(params)
        >>> updates, state = jax.jit(optimizer.update)(params, state, params)
    """
    validate.rate("learning_rate", learning_rate)
    validate.rate("weight_decay", weight_decay)
    validate.number("rest_scale", rest_scale, "a number of at least 0", lambda value: value >= 0)
    if hidden is None and (rest is not None or direction in ("muon", "normuon")):
        raise ValueError(
            "hidden is None; it must say which parameters are hidden matrices: a tree of bools, such as "
            "{'embedding': False, 'layers': True, 'head': False}, a function from the parameters to one, or "
            "True for all. The arrays alone do not show it"
        )
    choices = {"direction": direction, "ratio": ratio, "hold": hold}
    _check_options(choices, options)

    def step(mask: Mask, view: Views) -> optax.GradientTransformation:
        arguments = {"weight_decay": weight_decay, "mask": mask, "view": view, **options}
        of_direction, of_ratio, of_hold = (_made(axis, value, arguments) for axis, value in choices.items())
        rate = optax.scale_by_learning_rate(learning_rate)
        return optax.chain(of_direction, of_hold.inside, of_ratio, of_hold.outside, rate, of_hold.last)

    def adamw(mask: Mask) -> optax.GradientTransformation:
        schedule = learning_rate if callable(learning_rate) else optax.constant_schedule(learning_rate)
        return optax.adamw(
            lambda count: rest_scale * schedule(count), b2=0.95, weight_decay=weight_decay, mask=mask
        )

    def of(params: Any) -> optax.GradientTransformationExtraArgs:
        """The transformation of these parameters: functions of them are called here, with the whole tree."""
        of_mask = resolved(mask, params)
        inner = step(of_mask, resolved(view, params))
        if hidden is not None:
            others = adamw(of_mask) if rest is None else rest
            kinds = _kinds(hidden, params)  # as a function, since a tree that can be called is not one
            inner = optax.partition({"hidden": inner, "rest": others}, lambda _: kinds)
        return optax.with_extra_args_support(inner)

    def update(updates: Any, state: Any, params: Any, **extra_args: Any) -> Any:
        return of(params).update(updates, state, params, **extra_args)

    step(mask, view)  # refuse wrong options now
    return in_float32(optax.GradientTransformationExtraArgs(lambda params: of(params).init(params), update))


def parameters_of(axis: str, name: str) -> list[inspect.Parameter]:
    """The options of a choice, as keyword arguments with their defaults."""
    parameters = inspect.signature(AXES[axis][name]).parameters.values()
    return [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters if p.name not in _SHARED]


def _check_options(choices: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    known = []
    for axis, value in choices.items():
        kind = Hold if axis == "hold" else optax.GradientTransformation
        if not isinstance(value, kind):
            validate.one_of(axis, value, AXES[axis], f", or a {kind.__name__}")
            known += [parameter.name for parameter in parameters_of(axis, value)]
    for name in options.keys() - known:
        hint = did_you_mean(name, known, otherwise=f"; their options are {', '.join(sorted(known))}")
        raise TypeError(f"{name!r} is no option of {choices}{hint}")


def _made(axis: str, value: Any, arguments: Mapping[str, Any]) -> Any:
    if not isinstance(value, str):
        return value
    factory = AXES[axis][value]
    return factory(
        **{name: arguments[name] for name in inspect.signature(factory).parameters & arguments.keys()}
    )


def _kinds(hidden: Mask, params: Any) -> Any:
    """Return the kind of every parameter: "hidden" or "rest"."""
    kinds = for_each(hidden, params, lambda is_hidden, _: "hidden" if is_hidden else "rest")
    if set(jax.tree.leaves(kinds)) == {"rest"}:
        raise ValueError(
            "hidden marks no parameter; at least one must be a hidden matrix, or use optax.adamw"
        )
    return kinds
