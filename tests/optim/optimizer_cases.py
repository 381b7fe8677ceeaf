"""Shared by the optimizer tests: all optimizers, random tensors, and comparison bit by bit."""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from merit_optim import (
    LAMB,
    MERIT,
    OPTIMIZERS,
    SOAP,
    SOAPMERIT,
    Lion,
    MaxLAMB,
    Muon,
    MuonMERIT,
    MuonSphere,
    Muown,
    NorMuon,
    NorMuonSphere,
    OrScale,
    SOAPMuon,
    SophiaG,
    create,
)
from merit_optim.optim.axes.directions.adam import quotient
from merit_optim.optim.family import Family

FAMILY = (MERIT, LAMB, MaxLAMB)
"""The trust-ratio optimizers on Adam's direction: AdamW's state, and the engines."""


class Hidden:
    """Builds an optimizer for hidden matrices from any parameters; those with rows count as hidden."""

    def __init__(self, optimizer_class: type[Family], **defaults: Any) -> None:
        self.optimizer_class, self.__name__ = optimizer_class, optimizer_class.__name__
        self.defaults = defaults
        self.direction = "soap" if issubclass(optimizer_class, (SOAP, SOAPMERIT, SOAPMuon)) else "muon"

    def __call__(self, params: Any, **options: Any) -> Optimizer:
        return self.optimizer_class(sorted_by_shape(params), **self.defaults | options)


def sorted_by_shape(params: Any) -> Any:
    """Convert parameters, named parameters or groups to groups with kinds.

    These optimizers need a hidden matrix: if there is none, one without a gradient is added.
    """
    if isinstance(params, nn.Module) and not isinstance(params, nn.ParameterList):
        return params  # to be refused
    params = list(params)
    groups = params if params and isinstance(params[0], dict) else [{"params": params}]
    groups = [part for group in groups for part in by_kind(group)]
    if not any(group["kind"] == "hidden" for group in groups):
        first = groups[0]["params"][0]
        is_named = isinstance(first, tuple)
        unknown = nn.Parameter(torch.ones(1, 1, device=(first[1] if is_named else first).device))
        groups += by_kind({"params": [("unknown", unknown) if is_named else unknown]})
    return groups


def by_kind(group: dict[str, Any]) -> list[dict[str, Any]]:
    """The group in two: parameters with rows are hidden matrices, others vectors."""
    params = [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"])
    kinds: dict[str, list[Any]] = {"hidden": [], "vector": []}
    for param in params:
        tensor = param[1] if isinstance(param, tuple) else param
        kinds["hidden" if tensor.ndim >= 2 else "vector"].append(param)
    return [{**group, "params": some, "kind": kind} for kind, some in kinds.items() if some]


def add_group(optimizer: Optimizer, group: dict[str, Any]) -> None:
    """Add a group, by the kinds of its parameters if the optimizer needs them."""
    is_sorting = isinstance(optimizer, Family) and optimizer.COMPOSITION.kinds is not None
    for part in by_kind(group) if is_sorting else [group]:
        optimizer.add_param_group(part)


HIDDEN = tuple(
    map(
        Hidden,
        (MuonMERIT, Muon, NorMuon, OrScale, SOAPMERIT, SOAP, SOAPMuon, MuonSphere, NorMuonSphere, Muown),
    )
)
"""The optimizers with another direction for hidden matrices."""
NEED_A_START = HIDDEN[-3:]
"""Those that hold the size of the start, and refuse weights of zeros."""
OWN = (*FAMILY, Lion, SophiaG, *HIDDEN)
"""All optimizers of this package."""


def is_soap(build: Any) -> bool:
    """Whether a class, a ``Case`` or a ``Hidden`` uses SOAP's direction for hidden matrices.

    Its first step only computes a basis, as in its authors' code, and changes no matrix. It does not support
    ``capturable``, ``differentiable`` and state in bfloat16; see test_bad_input.py.
    """
    return getattr(build, "direction", None) == "soap"


def as_if_alone(build: Any) -> dict[str, Any]:
    """Options that make parameters independent of each other: SOAP's matrices take turns by default."""
    return {"refresh_phase": 0} if is_soap(build) else {}


def steps_to_move(build: Any) -> int:
    """Number of steps until every parameter has changed."""
    return 2 if is_soap(build) else 1


OWN_BUT_SOAP = tuple(build for build in OWN if not is_soap(build))


class Case(NamedTuple):
    """A way to make an optimizer: ``build(params, **options)``."""

    name: str
    build: Callable[..., Optimizer]
    is_own: bool
    direction: str | None
    """The direction of hidden matrices, if the optimizer has another for the rest."""


def case_of(name: str, build: Any, optimizer_class: Any) -> Case:
    """The case of this optimizer class."""
    build = partial(build, lr=1e-2)
    return Case(
        name, build, optimizer_class is not torch.optim.AdamW, getattr(optimizer_class, "direction", None)
    )


def created(name: str, params: Any, **options: Any) -> Optimizer:
    """An optimizer by name."""
    return create(name, sorted_by_shape(params) if name in BY_SHAPE else params, **options)


BY_SHAPE = {cls.optimizer_class.ALGORITHM: cls for cls in HIDDEN}
CASES = [
    *(
        case_of(f"create-{name}", partial(created, name), BY_SHAPE.get(name, preset.optimizer))
        for name, preset in OPTIMIZERS.items()
        if preset.options  # without options it is the class itself, below
    ),
    *(case_of(cls.__name__, cls, cls) for cls in OWN),
]
OWN_CASES = [case for case in CASES if case.is_own]


def name_of(case: Any) -> str:
    """The name of a test's parameter."""
    return case.name if isinstance(case, Case) else getattr(case, "__name__", repr(case))


def arguments(
    case: Case, options: Mapping[str, Any], of_the_rest: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Arguments of an optimizer whose groups will have these rates and decays.

    ``of_the_rest`` are those of vectors; by default, the same.
    """

    def picked(options: Mapping[str, Any], *names: str) -> dict[str, Any]:
        return {name: options[name] for name in names if name in options}

    if case.direction is None:
        return picked(options, "lr", "weight_decay", "betas")
    of_vectors = picked(options if of_the_rest is None else of_the_rest, "betas")
    if of_the_rest is not None:
        share = of_the_rest["lr"] / options["lr"] if options["lr"] else 1.0
        of_vectors["rate_scale"] = share * of_the_rest.get("rate_scale", 1.0)
    return {
        **picked(options, "lr", "betas" if case.direction == "soap" else "momentum"),
        **picked(of_the_rest or options, "weight_decay"),  # spheres have none
        "kinds": {"vector": of_vectors},
    }


def random_tensor(
    shape: Sequence[int],
    seed: int,
    *,
    scale: float = 1.0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Normal values, the same on every device and, up to rounding, in every dtype."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(tuple(shape), generator=generator, dtype=torch.float64)
    return (values * scale).to(device, dtype)


def parameter(*args: Any, **kwargs: Any) -> nn.Parameter:
    """A random tensor to be optimized."""
    return nn.Parameter(random_tensor(*args, **kwargs))


SHAPES = ((5, 7), (7,), (1, 6), (4, 1), (3, 2, 2, 2), ())


def parameters(
    device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32, seed: int = 0
) -> list[nn.Parameter]:
    """A few parameters of different shapes."""
    return [parameter(s, seed + i, scale=0.3, dtype=dtype, device=device) for i, s in enumerate(SHAPES)]


def set_gradients(params: Iterable[Tensor], step: int) -> None:
    """Random gradients that depend only on the parameter's position and the step."""
    for i, param in enumerate(params):
        grad = random_tensor(param.shape, 1000 + 100 * step + i, dtype=param.dtype, device=param.device)
        param.grad = torch.empty_like(param).copy_(grad)


def params_of(optimizer: Optimizer) -> list[Tensor]:
    """All parameters, group by group."""
    return [param for group in optimizer.param_groups for param in group["params"]]


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """With ``torch.set_default_dtype`` inside."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def take_steps(optimizer: Optimizer, num_steps: int, first: int = 0) -> None:
    """Steps with random gradients for every parameter."""
    for step in range(first, first + num_steps):
        set_gradients(params_of(optimizer), step)
        if isinstance(optimizer, SophiaG) and step == 0:
            optimizer.update_hessian(num_labels=2)
        optimizer.step()


def adam_update(
    exp_avg: Tensor, exp_avg_sq: Tensor, weight: Tensor, eps: float, weight_decay: float
) -> Tensor:
    """u with Adam's direction, from the moments."""
    return quotient(exp_avg, exp_avg_sq, eps) + weight * weight_decay


def rebuilt(case: Case, optimizer: Optimizer, **options: Any) -> Optimizer:
    """A new optimizer with these options, over the same parameters and with the same state."""
    new = case.build(params_of(optimizer), **options)
    new.state.update(optimizer.state)
    return new


def bits(x: Tensor) -> Tensor:
    """The bit pattern of every element: NaN equals itself and -0 differs from 0."""
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return x.detach().contiguous().view(integers[x.element_size()])


def assert_same_bits(actual: Any, expected: Any, where: str = "") -> None:
    """Equal bit for bit: tensors, or nested lists, tuples and dicts with tensors in them."""
    if isinstance(expected, Tensor):
        assert isinstance(actual, Tensor), where
        assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape), where
        differ = bits(actual).cpu() != bits(expected).cpu()
        assert not differ.any(), f"{where}: {int(differ.sum())} of {differ.numel()} elements differ"
    elif isinstance(expected, dict):
        assert actual.keys() == expected.keys(), where
        for key in expected:
            assert_same_bits(actual[key], expected[key], f"{where}[{key!r}]")
    elif isinstance(expected, (list, tuple)):
        assert len(actual) == len(expected), where
        for i, pair in enumerate(zip(actual, expected, strict=True)):
            assert_same_bits(*pair, where=f"{where}[{i}]")
    else:
        assert actual == expected, where


def snapshot(optimizer: Optimizer) -> tuple[list[Tensor], dict[str, Any]]:
    """A copy of everything that a step may change."""
    params = [p.detach().clone() for p in params_of(optimizer)]
    return params, copy.deepcopy(optimizer.state_dict())


def assert_unchanged(optimizer: Optimizer, before: tuple[list[Tensor], dict[str, Any]]) -> None:
    """Parameters, state and options are those of the snapshot."""
    assert_same_bits(snapshot(optimizer), before)
