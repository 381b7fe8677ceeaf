"""The kernels compile without a GPU, with 16-byte accesses and without spilled registers.

Without the alignment that ``kernels.py`` declares for its pointers, the compiler loads 4 bytes at a time, and
the moments phase took a third longer on an H200. No other test would notice.
"""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="the fused engine needs triton, which is not installed")

# In a separate process, because the kernels may be interpreted in this one.
COMPILE = """
import json, warnings
warnings.simplefilter("ignore")
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from merit_optim.optim.engines.fused import engine, kernels

POINTERS = dict(
    schedule="*i32", weights="*i64", pointers="*i64", hyper="*fp32", corrections="*fp32", statistics="*fp32",
    gradient_scale="*fp32", skip="*u8", weight_sizes="*fp32", update_sizes="*fp32",
)
FLAGS = dict(
    PARAM=tl.float32, GRAD=tl.float32, STATE=tl.float32, ALIGNED=True, ANY_ROWS=True, MEASURE=True,
    WEIGHT_BOUND=True, L2=False, MAXIMIZE=False, BIAS_CORRECTION=False, HAS_SCALE=False, HAS_SKIP=False,
    RECORD=False,
)
result = {}
for kernel, tile, sizes in (
    (kernels.moments, engine.MOMENTS_TILE, "*i32"),
    (kernels.apply, engine.APPLY_TILE, "*fp32"),
):
    options = tile.launch_options
    pointers = POINTERS | dict(weight_sizes=sizes, update_sizes=sizes)
    values = FLAGS | {k: v for k, v in options.items() if k.isupper()}
    names = kernel.arg_names
    source = ASTSource(
        fn=kernel,
        signature={name: pointers.get(name, "constexpr") for name in names},
        constexprs={name: values[name] for name in names if name in values},
        attrs={(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name in pointers},
    )
    compiled = triton.compile(
        source,
        target=GPUTarget("cuda", 90, 32),
        options={k: v for k, v in options.items() if not k.isupper()},
    )
    ptx = compiled.asm["ptx"]
    result[kernel.__name__] = {
        "wide": sum(".v4" in line for line in ptx.splitlines() if "ld.global" in line),
        "spilled": "local .align" in ptx,
    }
print(json.dumps(result))
"""


@pytest.fixture(scope="module")
def compiled() -> dict[str, dict[str, int]]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    result: dict[str, dict[str, int]] = json.loads(run.stdout)
    return result


# 16 and 8 elements a thread in each block, so 4 and 2 accesses of 16 bytes for each tensor that is read.
@pytest.mark.parametrize(("kernel", "num_accesses"), [("moments", 4 * 4), ("apply", 3 * 2)])
@pytest.mark.slow
def test_tensors_are_read_16_bytes_at_a_time(compiled, kernel, num_accesses) -> None:
    assert compiled[kernel]["wide"] >= num_accesses
    assert not compiled[kernel]["spilled"]
