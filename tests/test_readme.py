"""The README's code runs, its commands and links exist; the file tree of docs/design.md is complete."""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from merit_optim import cli

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
DESIGN = (ROOT / "docs" / "design.md").read_text()
PACKAGES = [Path("src/merit_optim"), Path("src/merit_lab")]


def test_code_runs() -> None:
    """The blocks are one program: later ones use names of earlier ones."""
    blocks = re.findall(r"^```python\n(.*?)^```", README, flags=re.DOTALL | re.MULTILINE)
    assert blocks
    namespace: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), namespace)


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    named = set(re.findall(r"^ {4}make ([a-z-]+)", README, flags=re.MULTILINE))
    assert {"demo", "test"} <= named
    assert named <= targets


def test_merit_commands_exist() -> None:
    named = set(re.findall(r"`merit ([a-z-]+)", README))
    assert named
    assert named <= set(cli.COMMANDS)


def test_links_into_the_repository_exist() -> None:
    targets = re.findall(r"\]\(([^)#]+)[^)]*\)", README)
    broken = [t for t in targets if "://" not in t and not (ROOT / t).exists()]
    assert targets
    assert not broken


def paths_in_tree() -> Iterator[Path]:
    """Yield the paths of the tree, where a folder's contents are indented below it."""
    match = re.search(r"<!-- tree -->\n```text\n(.*?)```\n<!-- /tree -->", DESIGN, flags=re.DOTALL)
    assert match, "docs/design.md has no file tree between its two markers"
    parents: list[Path] = []
    for line in match[1].splitlines():
        depth = (len(line) - len(line.lstrip())) // 4
        path = Path(*parents[:depth], line.split()[0])
        parents[depth:] = [Path(line.split()[0])]
        yield path


def test_every_path_in_the_tree_exists() -> None:
    assert not [str(path) for path in paths_in_tree() if not (ROOT / path).exists()]


def test_every_module_is_in_the_tree() -> None:
    """A package stands for its `__init__.py`, and for all its modules if none of them is listed."""
    listed = set(paths_in_tree())
    whole = listed - {path.parent for path in listed}
    sources = {path.relative_to(ROOT) for package in PACKAGES for path in (ROOT / package).glob("**/*.py")}
    modules = {path.parent if path.name == "__init__.py" else path for path in sources}
    assert not sorted(str(m) for m in modules - listed if not whole & set(m.parents))


def test_every_folder_is_in_the_tree() -> None:
    listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    try:
        files = subprocess.run(listing, cwd=ROOT, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"which folders belong to the project is known from git alone: {error}")
    folders = {Path(file).parts[0] for file in files.stdout.splitlines() if "/" in file}
    assert folders
    assert not sorted(folders - {path.parts[0] for path in paths_in_tree()})
