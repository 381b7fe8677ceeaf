"""The JAX package without torch, and the package without JAX."""

import subprocess
import sys

import pytest

pytest.importorskip("jax.numpy", reason="jax is not installed")
pytest.importorskip("optax", reason="optax is not installed")

BLOCK = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Blocked())
"""


def run_without(blocked: set[str], code: str) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter in which some packages cannot be imported."""
    code = BLOCK.format(blocked=blocked) + code
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code], check=False, capture_output=True, text=True, timeout=120
    )


def test_trains_without_torch() -> None:
    code = """
import jax, jax.numpy as jnp, optax
from merit_optim.jax import merit
optimizer = merit(0.1)
params = jnp.eye(3)
updates, _ = jax.jit(optimizer.update)(params, optimizer.init(params), params)
assert not any(name.partition(".")[0] == "torch" for name in sys.modules)
print(float(optax.apply_updates(params, updates).sum()) < 3)
"""
    finished = run_without({"torch"}, code)
    assert finished.stdout.strip() == "True", finished.stderr


def test_imports_no_torch_where_there_is_one() -> None:
    finished = run_without(set(), "import merit_optim.jax; print('torch' in sys.modules)")
    assert finished.stdout.strip() == "False", finished.stderr


def test_the_package_itself_imports_neither() -> None:
    heavy = {"torch", "jax", "optax", "numpy"}
    finished = run_without(set(), f"import merit_optim; print({heavy} & set(sys.modules))")
    assert finished.stdout.strip() == "set()", finished.stderr


@pytest.mark.parametrize("missing", ["jax", "optax"])
def test_missing_packages_are_reported(missing: str) -> None:
    finished = run_without({missing}, "import merit_optim.jax")
    assert f"but {missing} is missing: pip install 'merit-optim[jax]'" in finished.stderr
