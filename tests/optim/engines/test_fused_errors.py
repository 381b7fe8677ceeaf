"""If the fused engine cannot run, ``fused=True`` raises and changes nothing; ``fused=None`` falls back."""

import re
from typing import Any

import pytest
import torch
from optimizer_cases import (
    FAMILY,
    HIDDEN,
    add_group,
    assert_same_bits,
    name_of,
    random_tensor,
    take_steps,
)
from torch import Tensor, nn

from merit_optim import LAMB, MERIT, MaxLAMB, cli
from merit_optim.optim import engines
from merit_optim.optim.spec import Spec

MUON_MERIT, MUON, _, ORSCALE, SOAP_MERIT, SOAP, *_ = HIDDEN

every_family_class = pytest.mark.parametrize("optimizer_class", [*FAMILY, MUON_MERIT, MUON], ids=name_of)
needs_triton = pytest.mark.skipif(not engines._has_triton(), reason="triton is not installed")

NO_TRITON = "triton is not installed; it comes with the CUDA builds of torch"
NO_DEVICE = "torch sees no CUDA device"


def matrix(dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> nn.Parameter:
    return nn.Parameter(random_tensor((4, 6), 0, dtype=dtype, device=device))


@pytest.fixture
def without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "_has_triton", lambda: False)


@pytest.fixture
def without_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """No GPU and no interpreter."""
    monkeypatch.setattr(engines, "_has_triton", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


@pytest.fixture
def beside_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine is available, but not for tensors on the CPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    # A CUDA build of torch would ask the driver.
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def assert_refused(
    optimizer_class: Any, params: list[Tensor], error: type[Exception], message: str, **options: Any
) -> None:
    """At construction, and for a group that is added later, which leaves nothing behind."""
    with pytest.raises(error, match=re.escape(message)):
        optimizer_class(params, fused=True, **options)
    optimizer = optimizer_class([matrix()])
    before = [dict(group) for group in optimizer.param_groups]
    with pytest.raises(error, match=re.escape(message)):
        add_group(optimizer, {"params": params, "fused": True, **options})
    assert [dict(group) for group in optimizer.param_groups] == before
    take_steps(optimizer, 1)
    assert len(optimizer.state) == 1


@every_family_class
@pytest.mark.usefixtures("without_triton")
def test_fused_without_triton_is_refused(optimizer_class) -> None:
    assert_refused(
        optimizer_class, [matrix()], RuntimeError, f"fused=True is not available: {NO_TRITON}. Use fused=None"
    )


@every_family_class
@pytest.mark.usefixtures("without_device")
def test_fused_without_a_gpu_is_refused(optimizer_class) -> None:
    assert_refused(
        optimizer_class, [matrix()], RuntimeError, f"fused=True is not available: {NO_DEVICE}. Use fused=None"
    )


@needs_triton
@every_family_class
@pytest.mark.usefixtures("beside_a_device")
def test_fused_is_refused_for_tensors_on_the_cpu(optimizer_class) -> None:
    message = "it is on cpu, and the fused engine runs on CUDA devices. Move or change it, or use fused=None"
    assert_refused(optimizer_class, [matrix()], ValueError, message)


@needs_triton
@every_family_class
def test_fused_is_refused_for_float64(device, optimizer_class) -> None:
    message = "cannot be fused: it has dtype torch.float64, not one of torch.float32, torch.bfloat16"
    assert_refused(optimizer_class, [matrix(torch.float64, device)], ValueError, message)


@needs_triton
@every_family_class
def test_fused_is_refused_for_parameters_that_are_not_contiguous(device, optimizer_class) -> None:
    params = [matrix(device=device), nn.Parameter(random_tensor((6, 4), 0, device=device).T)]
    assert_refused(optimizer_class, params, ValueError, "cannot be fused: it is not contiguous")


@needs_triton
def test_fused_is_refused_for_sums_of_rows_and_columns(device) -> None:
    message = "norm='l2' with element_wise=True needs a sum for every row and column"
    assert_refused(MERIT, [matrix(device=device)], ValueError, message, norm="l2")


@needs_triton
@pytest.mark.parametrize(
    "option",
    [{"split": 2, "split_dim": 1}, {"calibrated": True, "ratio": "weight"}],
    ids=repr,
)
def test_fused_is_refused_for_options_that_the_kernels_do_not_support(device, option) -> None:
    name, value = next(iter(option.items()))
    with pytest.raises(
        ValueError, match=re.escape(f"cannot be fused: the kernels do not support {name}={value!r}")
    ):
        MERIT([{"params": [matrix(device=device)], **option}], fused=True)


@needs_triton
@pytest.mark.parametrize(
    ("optimizer_class", "options", "unknown"),
    [
        (MUON_MERIT, {"ns_dtype": "float32"}, "ns_dtype='float32'"),
        (MUON_MERIT, {"ns_dtype": "float16"}, "ns_dtype='float16'"),
        (MUON, {"split": 2, "split_dim": 1}, "split=2 of columns"),
        (MUON, {"hold": "sphere", "sphere_of": "row"}, "sphere_of='row'"),
        (MUON, {"hold": "displacement"}, "hold='displacement'"),
        (MUON, {"hold": "sphere", "clip": 0.3}, "hold='sphere' with a ratio, a clip or direction='adam'"),
        (ORSCALE, {}, "calibrated=True"),
        (SOAP_MERIT, {}, "direction='soap'"),
        (SOAP, {}, "direction='soap'"),
    ],
    ids=name_of,
)
def test_fused_is_refused_for_directions_that_the_kernels_do_not_support(
    device, optimizer_class, options, unknown
) -> None:
    message = (
        f"cannot be fused: the kernels do not support {unknown}. Move or change it, or use "
        "fused=None for the fastest engine that each parameter allows."
    )
    assert_refused(optimizer_class, [matrix(device=device)], ValueError, message, **options)


@needs_triton
def test_fused_is_refused_for_matrices_of_2_to_the_31_elements() -> None:
    """The kernels index the elements of each stacked matrix with 32 bits."""
    from merit_optim.optim.engines.fused.refusals import refusal

    def reason(*shape: int) -> str | None:
        group = MUON_MERIT([matrix()], matrix_dims=2).param_groups[0]
        return refusal(Spec.of(group), torch.empty(shape, device="meta"))

    assert reason(2**16, 2**15) == "it has a matrix of 2**31 elements or more"
    assert reason(2**16, 2**15 - 1) is None
    assert reason(4, 2**15, 2**15) is None


@needs_triton
def test_fused_is_refused_for_rows_too_long_for_32_bits(device, monkeypatch) -> None:
    from merit_optim.optim.engines.fused import refusals

    monkeypatch.setattr(refusals, "MAX_COLUMNS", 5)
    assert_refused(MERIT, [matrix(device=device)], ValueError, "its rows have more than 5 elements")
    MERIT([nn.Parameter(torch.ones(6, device=device))], fused=True)  # a vector is folded


@needs_triton
@every_family_class
@pytest.mark.parametrize("other", ["foreach", "differentiable"])
def test_fused_excludes_other_engines(device, optimizer_class, other) -> None:
    message = f"fused=True and {other}=True exclude each other; choose one"
    assert_refused(optimizer_class, [matrix(device=device)], ValueError, message, **{other: True})


@needs_triton
def test_the_refused_parameter_is_named(device) -> None:
    named = [("embedding", matrix(device=device)), ("head.weight", matrix(torch.float64, device))]
    with pytest.raises(ValueError, match=r"fused=True, but head\.weight of shape \(4, 6\) cannot be fused"):
        MERIT(named, fused=True)


@needs_triton
@every_family_class
@pytest.mark.parametrize("obstacle", ["without_triton", "without_device", "beside_a_device"])
def test_a_checkpoint_with_fused_continues_without_it(request, optimizer_class, obstacle) -> None:
    """The request is in the checkpoint's groups, and is met again where it can be."""
    request.getfixturevalue(obstacle)
    params, plain = [matrix()], [matrix()]
    optimizer, eager = optimizer_class(params), optimizer_class(plain)
    take_steps(optimizer, 1)
    take_steps(eager, 1)
    saved = optimizer.state_dict()
    saved["param_groups"][0]["fused"] = True
    optimizer.load_state_dict(saved)
    take_steps(optimizer, 2, first=1)
    take_steps(eager, 2, first=1)
    assert optimizer.param_groups[0]["fused"] is True
    assert optimizer._engines is None
    assert_same_bits([p.detach() for p in params], [p.detach() for p in plain])


SILENT: list[tuple[Any, dict[str, Any], torch.dtype]] = [
    *((cls, {}, torch.float32) for cls in (MERIT, LAMB, MaxLAMB, *HIDDEN)),
    (MUON_MERIT, {"ns_dtype": "float32"}, torch.float32),
    (MUON_MERIT, {"split": 2}, torch.float32),
    (MERIT, {"norm": "l2"}, torch.float32),
    (MERIT, {"foreach": True}, torch.float32),
    (MERIT, {}, torch.float64),
]


@pytest.mark.parametrize(("optimizer_class", "options", "dtype"), SILENT, ids=name_of)
@pytest.mark.parametrize("obstacle", ["without_triton", "without_device", "beside_a_device", None])
def test_the_default_engine_falls_back_silently(request, optimizer_class, options, dtype, obstacle) -> None:
    """On the CPU, fused=None means the eager engine, with or without the interpreter."""
    if obstacle:
        request.getfixturevalue(obstacle)
    params, plain = [matrix(dtype)], [matrix(dtype)]
    optimizer = optimizer_class(params, **options)
    eager = optimizer_class(plain, fused=False, **options)
    take_steps(optimizer, 2)
    take_steps(eager, 2)
    assert optimizer._engines is None
    assert_same_bits([p.detach() for p in params], [p.detach() for p in plain])


@pytest.mark.parametrize(
    ("obstacle", "line"),
    [
        ("without_triton", f"fused: not available: {NO_TRITON}\n"),
        ("without_device", f"fused: not available: {NO_DEVICE}\n"),
    ],
)
def test_merit_info_says_why_there_is_no_fused_engine(request, capsys, obstacle, line) -> None:
    request.getfixturevalue(obstacle)
    assert cli.main(["info"]) == 0
    printed = capsys.readouterr().out
    assert line in printed
    assert "eager: available\n" in printed


@needs_triton
def test_merit_info_says_that_there_is_a_fused_engine(capsys) -> None:
    cli.main(["info"])
    assert "fused: available\n" in capsys.readouterr().out
