"""The package as installed: what importing it costs, what it offers, what it depends on."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import merit_optim

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "merit_optim"


def run_python(code: str) -> str:
    """Run code in a fresh interpreter, where nothing has been imported yet."""
    finished = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=120
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout.strip()


@pytest.mark.parametrize("module", ["merit_optim", "merit_optim.cli"])
def test_importing_imports_no_torch(module: str) -> None:
    assert run_python(f"import sys, {module}; print('torch' in sys.modules)") == "False"


def test_using_a_public_name_loads_it() -> None:
    code = "import sys, merit_optim; merit_optim.MERIT; print('torch' in sys.modules)"
    assert run_python(code) == "True"


def test_public_names_are_those_of_the_optimizer_package() -> None:
    from merit_optim import optim

    assert sorted(merit_optim.__all__) == sorted(optim.__all__)
    for name in merit_optim.__all__:
        assert getattr(merit_optim, name) is getattr(optim, name)


def test_type_checkers_see_the_names_that_exist_at_run_time() -> None:
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    names = [
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "merit_optim.optim"
        for alias in node.names
    ]
    assert sorted(names) == sorted(merit_optim.__all__)


def test_public_names_are_listed_before_they_are_loaded() -> None:
    code = "import merit_optim; print(set(merit_optim.__all__) <= set(dir(merit_optim)))"
    assert run_python(code) == "True"


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'merit_optim' has no attribute 'MERTI'"):
        merit_optim.MERTI  # noqa: B018


def test_version_is_written_once() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "version" in project["dynamic"]
    heading = "Unreleased" if ".dev" in merit_optim.__version__ else merit_optim.__version__
    newest = re.search(r"^## \[(.*)\]", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert newest is not None
    assert newest[1] == heading
    assert f"version: {merit_optim.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def imported_packages(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            assert node.module is not None
            yield node.module.partition(".")[0]


def test_base_install_needs_torch_alone() -> None:
    """import-linter forbids packages by name; this holds for every package there is."""
    allowed = {*sys.stdlib_module_names, "merit_optim", "torch", "triton"}
    files = [*PACKAGE.glob("*.py"), *PACKAGE.glob("optim/**/*.py")]
    strangers = {
        f"{file.relative_to(PACKAGE)} imports {package}"
        for file in files
        for package in imported_packages(file)
        if package not in allowed
    }
    assert not strangers


def test_every_development_package_is_pinned() -> None:
    pinned = {
        line.partition("==")[0].lower().replace("_", "-")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line and not line.startswith("#")
    }
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    dev = project["optional-dependencies"]["dev"]
    wanted = {re.split(r"[;\[]", name)[0].strip().lower().replace("_", "-") for name in dev}
    assert wanted | {"torch"} <= pinned
