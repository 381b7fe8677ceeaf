"""The optax example runs as its first lines say."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("jax.numpy", reason="jax is not installed")
pytest.importorskip("optax", reason="optax is not installed")

EXAMPLE = Path(__file__).parents[1] / "examples" / "optax_train.py"


def test_optax_learns_on_eight_devices_and_compiles_its_step_once() -> None:
    flags = "--xla_force_host_platform_device_count=8"
    finished = subprocess.run(
        [sys.executable, "-W", "error", EXAMPLE, "--steps", "20"],
        env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "JAX_LOG_COMPILES": "1"},
        check=False,
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    assert finished.stdout.startswith("8 devices")
    losses = {int(step): float(loss) for step, loss in re.findall(r"step (\d+): loss (\S+)", finished.stdout)}
    assert list(losses) == [10, 20]
    assert losses[20] < losses[10] < 4.1  # the logarithm of 64 tokens is 4.16
    assert finished.stderr.count("Finished XLA compilation of jit(train_step)") == 1
