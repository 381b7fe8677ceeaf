"""What every test shares: which tests are skipped here, and why; how Triton is imported; examples."""

import re
import tomllib
from collections import Counter
from collections.abc import Generator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torchrun import why_not_two_nodes

if find_spec("hypothesis"):
    from hypothesis import settings

    # The same examples in every run, and no limit on the time of one: the first example compiles or warms
    # up, and the machine may be busy.
    settings.register_profile("repeatable", deadline=None, derandomize=True, database=None, max_examples=40)
    settings.load_profile("repeatable")

# As ranks have: on some CPUs the rounding of products depends on the number of threads.
torch.set_num_threads(1)

# Triton decides when a kernel is defined whether it is interpreted, its own functions among them. So it is
# imported here, with the variable set, before any test can import it; tests/optim/engines runs the kernels.
if not torch.cuda.is_available() and find_spec("triton"):
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TRITON_INTERPRET", "1")
        from merit_optim.optim.engines.fused import hold_kernels, kernels, product_kernels  # noqa: F401


# What torch warns of in its own code when it compiles for a GPU.
_OF_TORCH_S_COMPILER = (
    "ignore:.*Function.* should not be instantiated:DeprecationWarning",
    "ignore:`torch.jit.script:DeprecationWarning",
    "ignore:TensorFloat32 tensor cores:UserWarning",  # a hint
    "ignore:The CUDA Graph is empty:UserWarning",
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning",
)


@pytest.fixture(autouse=True)
def _one_rounding() -> None:
    """Let each test begin with oneDNN.

    On a CPU without instructions for bfloat16 torch turns it off for the rest of the process when a product
    of such matrices fails, and later results round otherwise than those of a new process.
    """
    torch.backends.mkldnn.enabled = True


# Of a test with more cases than this, so many run that are spread evenly over them; with --slow all do.
_MOST_CASES = 10


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run the tests marked slow, and every case")
    # What pyproject.toml sets for plugins; pytest refuses it without them, and tests can do without.
    if not find_spec("pytest_timeout"):
        parser.addini("timeout", "of pytest-timeout, which is not installed")
    if not find_spec("pytest_rerunfailures"):
        for option in ("--reruns", "--only-rerun"):
            parser.addoption(option, help="of pytest-rerunfailures, which is not installed")


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Look for no examples in files of fixtures: all have one name, so pytest could import one alone."""
    return True if collection_path.name == "conftest.py" else None


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Skip files that import a package of an extra that is not installed, and say which."""
    report = yield
    error = report.call.excinfo and report.call.excinfo.value
    while error and not isinstance(error, ModuleNotFoundError):
        error = getattr(error, "cause", None) or error.__cause__
    if error and report.failed and (name := (error.name or "").partition(".")[0]) in _of_extras():
        report.outcome, report.longrepr = "skipped", (str(collector.path), 0, f"Skipped: needs {name}")
    return report


def _of_extras() -> set[str]:
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text("utf-8"))["project"]
    return {
        re.split(r"[^\w-]", package)[0]
        for packages in project["optional-dependencies"].values()
        for package in packages
    }


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--slow"):
        _skip(items, "slow", "takes minutes: run it with --slow")
        if not any("::" in argument for argument in config.args):  # a test that is named runs whole
            _leave_some_of_each_test(config, items)
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            for warning in _OF_TORCH_S_COMPILER:
                item.add_marker(pytest.mark.filterwarnings(warning))
    if not torch.cuda.is_available():
        _leave_one_of_each_file(config, items, "gpu")
        _skip(items, "gpu", "needs a CUDA GPU: torch.cuda.is_available() is False")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Count what was skipped by its reason, where it is not listed."""
    skipped = terminalreporter.stats.get("skipped", [])
    if not skipped or terminalreporter.hasopt("s"):
        return
    reasons = Counter(_reason(report) for report in skipped)
    terminalreporter.section("skipped; -rs lists them")
    for reason, count in reasons.most_common():
        terminalreporter.line(f"{count:4} {reason}")


def _reason(report: pytest.TestReport) -> str:
    what = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return what.removeprefix("Skipped: ").partition(":")[0]


@pytest.fixture(scope="session")
def two_nodes() -> None:
    """For tests that run torchrun on two nodes: skips where this machine cannot be two."""
    if (reason := why_not_two_nodes()) is not None:
        pytest.skip(f"needs two network namespaces: {reason}")


def _leave_some_of_each_test(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect most cases of those tests that have very many."""
    cases: dict[tuple[Path, str], list[pytest.Item]] = {}
    for item in items:
        cases.setdefault((item.path, item.nodeid.partition("[")[0]), []).append(item)
    kept = set()
    for alike in cases.values():
        num = min(len(alike), _MOST_CASES)
        kept.update(alike[place * (len(alike) - 1) // max(1, num - 1)] for place in range(num))
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


def _leave_one_of_each_file(config: pytest.Config, items: list[pytest.Item], marker: str) -> None:
    """Deselect all but the first: it is skipped for all of them, which are thousands."""
    seen, left, dropped = set(), [], []
    for item in items:
        is_marked = item.get_closest_marker(marker) is not None
        (dropped if is_marked and item.path in seen else left).append(item)
        if is_marked:
            seen.add(item.path)
    items[:] = left
    config.hook.pytest_deselected(items=dropped)


def _skip(items: list[pytest.Item], marker: str, reason: str) -> None:
    for item in items:
        if item.get_closest_marker(marker) is not None:
            item.add_marker(pytest.mark.skip(reason=reason))
