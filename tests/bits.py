"""Compares the bits of every optimizer with those at an earlier commit: does a change change a result?

    python tests/bits.py REF [PATTERN]    compare with REF, a git reference, the cases whose names match
    python tests/bits.py ALL [PATTERN]    print each case of this tree: its name and the hash of its weights

A case is a trajectory of 50 steps with made-up gradients, at a constant rate. Its hash is of all weights
after every step. Hashes of two machines differ, because their libraries sum in other orders, so none are
kept: both sides run here. Cases that one side lacks are named and not compared.
"""

import hashlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

NUM_STEPS = 50
FEW_STEPS = 2  # where Triton's kernels are interpreted, or the step is traced
HIDDEN = ("Muon", "NorMuon", "OrScale", "MuonMERIT", "SOAP", "SOAPMERIT")
VARIANTS: Mapping[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in ("MERIT", "LAMB", "MaxLAMB", "Lion", "SophiaG", *HIDDEN)},
    "MERIT corrected": ("MERIT", {"bias_correction": True}),
    "MERIT without clip and bound": ("MERIT", {"clip": None, "weight_bound": False}),
    "MERIT with l2 norms": ("MERIT", {"norm": "l2"}),
    "MERIT, one ratio": ("MERIT", {"element_wise": False}),
    "Muon, original scale, Polar Express": (
        "Muon",
        {"scale": "original", "ns_coefficients": "polar-express"},
    ),
    "Muon in float32 without Nesterov": ("Muon", {"ns_dtype": "float32", "nesterov": False}),
    "MuonMERIT without rows' average": ("MuonMERIT", {"neuron_beta": None}),
    "MuonMERIT, l2": ("MuonMERIT", {"norm": "l2"}),
    "OrScale, not calibrated": ("OrScale", {"calibrated": False}),
    "SOAP, small sides": ("SOAP", {"max_precond_dim": 16}),
}
ENGINES: Mapping[str, dict[str, Any]] = {
    "default": {},
    "foreach": {"foreach": True},
    "one by one": {"foreach": False},
    "capturable": {"capturable": True},
    "differentiable": {"differentiable": True},
    "clipped": {"max_grad_norm": 0.5},
    "skipping": {"nonfinite": "skip"},
    "bfloat16 state": {"state_dtype": torch.bfloat16},
    "fused": {"fused": True},
    "compiled": {},
}


class Weights(nn.Module):
    """Weights of all kinds and orientations, split and stacked ones among them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 12)
        self.blocks = nn.ModuleList(self._block() for _ in range(1))
        self.norm = nn.LayerNorm(12)
        self.head = nn.Linear(12, 40, bias=False)

    @staticmethod
    def _block() -> nn.Module:
        block = nn.Module()
        block.qkv, block.out = nn.Linear(12, 36), nn.Linear(12, 12)
        block.up, block.down = nn.Linear(12, 30), nn.Linear(30, 12)
        block.convolution = nn.Conv2d(4, 6, 3)
        block.experts = nn.Parameter(torch.empty(3, 10, 12))
        block.gain = nn.Parameter(torch.empty(()))
        return block


def made(dtype: torch.dtype) -> nn.Module:
    """The model with weights that do not depend on torch's initialisation."""
    model = Weights().to(dtype)
    with torch.no_grad():
        for number, param in enumerate(model.parameters()):
            param.copy_(drawn(param.shape, number) / max(1, param.shape[-1] if param.ndim else 1) ** 0.5)
    return model


def drawn(shape: torch.Size, *seed: int) -> Tensor:
    """Normal numbers that depend on the seed alone."""
    number = int.from_bytes(hashlib.blake2b(repr(seed).encode(), digest_size=6).digest(), "little")
    return torch.randn(shape, generator=torch.Generator().manual_seed(number))


def trajectory(variant: str, engine: str, dtype: torch.dtype, ranks: int = 1, dim: int = 0) -> str:
    """The hash of all weights after every step; the reason if there is no such case."""
    import merit_optim
    from merit_optim import param_groups

    name, options = VARIANTS[variant]
    torch.manual_seed(0)
    model = made(dtype)
    if ranks > 1:
        shard(model, dim)
    overrides: dict[str, dict[str, Any]] = {"*experts": {"matrix_dims": 2}}
    if not name.startswith("SOAP"):
        overrides["*qkv.weight"] = {"split": 3}
    groups = param_groups(model, weight_decay=0.1, overrides=overrides)
    if engine == "differentiable":
        model.requires_grad_(False)  # a step on leaves could not be recorded
    optimizer = getattr(merit_optim, name)(groups, lr=0.02, **options, **ENGINES[engine])
    step: Any = optimizer.step
    if engine == "compiled":
        torch._dynamo.reset()
        step = torch.compile(step, backend="aot_eager")
    digest = hashlib.sha256()
    for number in range(FEW_STEPS if engine in ("fused", "compiled") else NUM_STEPS):
        for place, param in enumerate(model.parameters()):
            gradient = drawn(param.shape, number, place).to(dtype)
            if engine == "skipping" and number == 7 and place == 3:
                gradient.view(-1)[0] = torch.nan
            param.grad = placed(gradient, param)
        if name == "SophiaG" and number % 10 == 0:
            optimizer.update_hessian(num_labels=64)
        step()
        for param in model.parameters():
            digest.update(whole(param).reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def shard(model: nn.Module, dim: int) -> None:
    """Cut every weight that has the dimension over all ranks."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in model.modules():
        for leaf, param in list(module.named_parameters(recurse=False)):
            placement = Shard(dim) if param.ndim > dim else Replicate()
            setattr(module, leaf, nn.Parameter(distribute_tensor(param.detach(), mesh, [placement])))


def placed(gradient: Tensor, param: Tensor) -> Tensor:
    """A gradient as its weight is placed."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    if not isinstance(param, DTensor):
        return gradient
    return distribute_tensor(gradient, param.device_mesh, param.placements)


def whole(param: Tensor) -> Tensor:
    """All of a weight, which ranks may share."""
    from torch.distributed.tensor import DTensor

    return (param.full_tensor() if isinstance(param, DTensor) else param).detach().contiguous()


def cases() -> Iterator[tuple[str, tuple[Any, ...]]]:
    """The name and the arguments of each trajectory in one process."""
    for variant in VARIANTS:
        for engine in ENGINES:
            for dtype in (torch.float32, torch.bfloat16, torch.float64):
                if dtype == torch.float32 or engine in ("default", "foreach"):
                    yield f"{variant}; {engine}; {dtype}", (variant, engine, dtype)


def report(pattern: str, lines: Iterator[tuple[str, tuple[Any, ...]]], *, is_first: bool = True) -> None:
    """Print the name and the hash of each case, or why there is none."""
    for name, arguments in lines:
        if not re.search(pattern, name):
            continue
        try:
            found = trajectory(*arguments)
        except Exception as error:
            found = f"- {type(error).__name__}: {error}".splitlines()[0][:100]
        if is_first:
            print(f"{name}\t{found}", flush=True)


def on_rank(rank: int, num_ranks: int, port: int, pattern: str) -> None:
    """All variants, cut along the first and the second dimension."""
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=num_ranks)
    lines = (
        (
            f"{variant}; {num_ranks} ranks; dimension {dim}",
            (variant, "default", torch.float32, num_ranks, dim),
        )
        for variant in VARIANTS
        for dim in (0, 1)
    )
    report(pattern, lines, is_first=rank == 0)
    dist.destroy_process_group()


def compare(reference: str, pattern: str) -> int:
    """Run both sides; the exit status is 1 if bits differ."""
    root = Path(__file__).resolve().parents[1]
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["git", "worktree", "add", "--detach", folder, reference], cwd=root, check=True)
        try:
            sides = [_hashes(source / "src", pattern) for source in (Path(folder), root)]
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", folder], cwd=root, check=True)
    before, now = sides
    ended = 0
    for name in before.keys() | now.keys():
        pair = before.get(name, "- not there"), now.get(name, "- not there")
        if pair[0] != pair[1]:
            print(f"{name}: {pair[0]} before, {pair[1]} now")
            ended |= not any(one.startswith("-") for one in pair)
    print(
        f"{sum(before[name] == now.get(name) for name in before)} of {len(before)} cases have the same bits"
    )
    return int(ended)


def _hashes(source: Path, pattern: str) -> dict[str, str]:
    environment = {**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"}
    command = [sys.executable, __file__, "ALL", pattern]
    out = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return dict(line.split("\t") for line in out.stdout.splitlines())


def main() -> int:
    """Compare with the reference that is given, or print this side."""
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    reference, pattern = [*sys.argv[1:], ""][:2]
    if reference != "ALL":
        return compare(reference, pattern)
    torch.set_num_threads(1)
    report(pattern, cases())
    for num_ranks in (2, 3, 4):
        torch.multiprocessing.spawn(on_rank, (num_ranks, 29500 + num_ranks, pattern), nprocs=num_ranks)
    return 0


if __name__ == "__main__":
    sys.exit(main())
