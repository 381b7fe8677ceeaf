"""What every test shares: which tests are skipped here, and why."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run the tests marked slow")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--slow"):
        _skip(items, "slow", "takes minutes: run it with --slow")
    if any("gpu" in item.keywords for item in items):
        import torch

        if not torch.cuda.is_available():
            _skip(items, "gpu", "needs a CUDA GPU: torch.cuda.is_available() is False")


def _skip(items: list[pytest.Item], marker: str, reason: str) -> None:
    for item in items:
        if item.get_closest_marker(marker) is not None:
            item.add_marker(pytest.mark.skip(reason=reason))
