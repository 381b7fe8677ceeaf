"""Eight host devices for the tests here, so that arrays can be sharded; and their place in a run."""

from importlib.util import find_spec
from pathlib import Path

import pytest

# Not jax: without it, this folder, whose parent is on the path, would be found in its place.
if find_spec("jaxlib") is not None:
    import jax

    jax.config.update("jax_num_cpu_devices", 8)  # before the first array


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """These tests run last: JAX warns when a process that has used it forks, and others' tests fork."""
    here = Path(__file__).parent
    items.sort(key=lambda item: here in item.path.parents or "merit_optim/jax" in item.path.as_posix())
