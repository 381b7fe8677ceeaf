"""What is published: an sdist, the wheel made from it, and that the wheel works where it is installed."""

import os
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.parser import Parser
from importlib import metadata
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parents[1]


def run(*command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    return subprocess.run(
        [sys.executable, *command], env=environment | variables, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """A folder with the sdist and the wheel that was built from it."""
    folder = tmp_path_factory.mktemp("dist")
    made = run("-m", "build", "--outdir", str(folder), str(ROOT))
    if "Could not find a version that satisfies the requirement hatchling" in made.stdout + made.stderr:
        pytest.skip("the build backend cannot be fetched: no package index")
    assert made.returncode == 0, made.stdout[-2000:] + made.stderr[-2000:]
    return folder


def sources() -> set[str]:
    """Every file of the package, as paths in the wheel."""
    package = ROOT / "src"
    files = {path.relative_to(package).as_posix() for path in package.glob("merit_*/**/*") if path.is_file()}
    return {file for file in files if "__pycache__" not in file}


def test_the_wheel_holds_both_packages_and_nothing_else(built) -> None:
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert names == sources()


def test_the_sdist_holds_what_a_clone_holds(built) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"README.md", "LICENSE", "Makefile", "constraints.txt", "tests/conftest.py"} <= names
    assert not [name for name in names if name.startswith((".venv", "carry", "runs", "data"))]


def test_torch_is_all_that_the_base_needs(built) -> None:
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = Parser().parsestr(archive.read(name).decode())
    needed = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert [line.partition(">")[0] for line in needed] == ["torch"]


def test_the_installed_wheel_works_away_from_the_clone(built, tmp_path) -> None:
    (wheel,) = built.glob("*.whl")
    target = tmp_path / "site"
    installed = run("-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target), str(wheel))
    assert installed.returncode == 0, installed.stderr
    program = (
        "import torch, merit_optim; print(merit_optim.__file__)\n"
        "model = torch.nn.Linear(3, 2); model(torch.ones(1, 3)).sum().backward()\n"
        "merit_optim.MERIT(model.parameters()).step()\n"
    )
    # -P: not the current folder; PYTHONPATH comes before the environment's own, editable install.
    ran = run("-P", "-c", program, PYTHONPATH=str(target))
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith(str(target))
    ran = run("-P", "-m", "merit_optim", "--help", PYTHONPATH=str(target))
    assert ran.stdout.startswith("usage: merit")


def test_every_pinned_package_can_be_had_with_the_oldest_python_that_is_promised() -> None:
    """A pin that needs a later one would end `make test` in its set-up there."""
    promised = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    oldest = f"{promised.removeprefix('>=')}.0"
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    needs = {}
    for name, version in pins.items():
        try:
            installed = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue  # of an extra that is not installed here
        if installed.version == version and (python := installed.metadata["Requires-Python"]):
            needs[name] = python
    assert len(needs) > 50
    assert {name: python for name, python in needs.items() if not SpecifierSet(python).contains(oldest)} == {}
