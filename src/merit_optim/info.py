"""`merit info`: print versions, devices and available engines."""

import argparse
import os
import platform
from collections.abc import Iterator

from merit_optim import __version__


def main(argv: list[str]) -> int:
    """Run `merit info` and return its exit status."""
    argparse.ArgumentParser(prog="merit info", description=__doc__).parse_args(argv)
    for label, value in _describe_installation():
        print(f"{label:<12} {value}")
    return 0


def _describe_installation() -> Iterator[tuple[str, str]]:
    """Yield (label, value) lines; a label is empty if it repeats the one above."""
    import torch

    from merit_optim.optim import engines

    yield "merit-optim", __version__
    yield "python", f"{platform.python_version()} ({platform.system()} {platform.machine()})"
    yield "torch", torch.__version__
    yield "triton", _triton_version()
    cores, threads = _count(os.cpu_count() or 1, "core"), _count(torch.get_num_threads(), "thread")
    yield "devices", f"cpu: {cores}, torch uses {threads}"
    for device in _accelerators():
        yield "", device
    label = "engines"
    for engine, obstacle in engines.availability().items():
        status = "available" if obstacle is None else f"not available: {obstacle}"
        yield label, f"{engine}: {status}"
        label = ""


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _triton_version() -> str:
    try:
        import triton
    except ImportError as error:
        return f"not available: {error}"
    return str(triton.__version__)


def _accelerators() -> Iterator[str]:
    """Yield one line for each device other than the CPU that torch can use."""
    import torch

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return
    for index in range(torch.accelerator.device_count()):
        device = f"{accelerator.type}:{index}"
        if accelerator.type == "cuda":
            properties = torch.cuda.get_device_properties(index)
            gibibytes = properties.total_memory / 2**30
            device += f": {properties.name}, {gibibytes:.0f} GiB"
        yield device
