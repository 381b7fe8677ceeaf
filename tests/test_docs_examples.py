"""The documentation's code runs, and its links lead somewhere."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from merit_optim import MuonMERIT, param_groups

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))


class Block(NamedTuple):
    """A fenced block of a page: its language, the file it is titled with, and its text."""

    language: str
    title: str | None
    text: str


def blocks_of(page: Path) -> list[Block]:
    pattern = r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$'
    found = re.findall(pattern, page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    return [Block(language, title or None, text) for language, title, text in found]


def run(program: str, name: str) -> None:
    exec(compile(program, name, "exec"), {"__name__": "__main__"})


def program_of(page: Path) -> str:
    """The blocks without a title are one program."""
    return "\n".join(block.text for block in blocks_of(page) if block[:2] == ("python", None))


def test_choices_are_added_as_the_page_says() -> None:
    page = DOCS / "contribute" / "choice.md"
    program = [sys.executable, "-c", program_of(page)]  # a process of its own: it registers names
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def test_an_engine_is_proved_as_the_page_says() -> None:
    page = DOCS / "contribute" / "engine.md"
    run(program_of(page), page.name)


def test_a_study_is_carried_out_as_the_page_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = DOCS / "contribute" / "study.md"
    (study,) = (block for block in blocks_of(page) if block.title is not None)
    assert study.title is not None
    (tmp_path / study.title).write_text(study.text)
    data = tmp_path / "data" / "demo"
    data.mkdir(parents=True)
    tokens = np.random.default_rng(0).integers(0, 256, 30_000).astype("<u2")
    tokens[:25_000].tofile(data / "train.bin")
    tokens[25_000:].tofile(data / "val.bin")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    run(program_of(page), page.name)
    assert (tmp_path / "runs" / "doubling" / "report" / "index.html").exists()


@pytest.mark.parametrize("name", ["index.md", "monitor.md"])
def test_the_first_example_of_a_page_runs(name: str) -> None:
    first = next(block for block in blocks_of(DOCS / name) if block.language == "python")
    run(first.text, name)


def a_model_with_gradients() -> nn.Module:
    model = nn.Sequential(nn.Embedding(20, 16), nn.Linear(16, 16), nn.Linear(16, 20))
    model(torch.arange(20)).square().mean().backward()
    return model


def test_a_run_of_adamw_is_continued_as_the_page_says() -> None:
    before, *others = (block.text for block in blocks_of(DOCS / "from-adamw.md"))
    model = a_model_with_gradients()
    known = {"torch": torch, "model": model}
    exec(before, known)
    known["optimizer"].step()
    known["checkpoint"] = known["optimizer"].state_dict()
    for block in others:
        exec(block, known)
        known["optimizer"].step()
    continued = known["optimizer"]
    assert isinstance(continued, MuonMERIT)
    counts = {name: int(continued.state[weight]["step"]) for name, weight in model.named_parameters()}
    begun = counts.pop("1.weight")
    assert begun == 1
    assert min(counts.values()) > 1


def test_the_schedule_of_the_page_keeps_the_rates_in_proportion() -> None:
    (block,) = (block.text for block in blocks_of(DOCS / "from-adamw.md") if "def share" in block.text)
    optimizer = MuonMERIT(param_groups(a_model_with_gradients()), lr=0.04)
    known = {"torch": torch, "optimizer": optimizer}
    exec(block, known)
    share = known["share"]
    assert [share(0), share(99), share(100), share(4000)] == pytest.approx([0.01, 1, 1, 0.1])
    for _ in range(150):
        optimizer.step()
        known["schedule"].step()
    rates = {group["direction"]: group["lr"] * group["rate_scale"] for group in optimizer.param_groups}
    assert rates == pytest.approx({"muon": 0.04 * share(150), "adam": 0.4 * 0.04 * share(150)})


def test_rates_by_kind_as_the_page_gives_them_first() -> None:
    first = next(block.text for block in blocks_of(DOCS / "parameter-groups.md"))
    known = {"model": a_model_with_gradients()}
    known["model"].append(nn.LayerNorm(20))
    exec(first, known)
    scales = {group["kind"]: group["rate_scale"] for group in known["optimizer"].param_groups}
    assert scales == {"embedding": 3.0, "hidden": 1.0, "head": 0.5, "vector": 0.4}


def test_a_run_of_muon_is_continued_as_the_page_says() -> None:
    before, *others = (block.text for block in blocks_of(DOCS / "from-muon.md"))
    model = a_model_with_gradients()
    hidden = model[1].weight
    everything_else = [weight for weight in model.parameters() if weight is not hidden]
    known = {"torch": torch, "model": model, "hidden_matrices": [hidden], "everything_else": everything_else}
    exec(before, known)
    for name in ("muon", "adamw"):
        known[name].step()
        known[f"checkpoint_of_{name}"] = known[name].state_dict()
    for block in others:
        exec(block, known)
    momentum = known["checkpoint_of_muon"]["state"][0]["momentum_buffer"].clone()
    known["optimizer"].step()
    continued = known["optimizer"].state
    assert {int(continued[weight]["step"]) for weight in everything_else} == {2}
    torch.testing.assert_close(continued[hidden]["momentum_buffer"], momentum.lerp(hidden.grad, 0.1))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_python_blocks_are_python(page: Path) -> None:
    for block in blocks_of(page):
        if block.language == "python":
            ast.parse(block.text)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_links_lead_to_files_that_are_there(page: Path) -> None:
    """Also out of docs/, which the site does not follow. It checks the anchors."""
    targets = re.findall(r"\]\((?!https?:|#)([^)#]+)[^)]*\)", page.read_text("utf-8"))
    assert [target for target in targets if not (page.parent / target).exists()] == []


def test_every_page_is_in_the_navigation() -> None:
    named = set(re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text()))
    assert named == {str(page.relative_to(DOCS)) for page in PAGES}


def test_the_design_shows_the_layers_that_are_checked() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    shown = [line.strip().split("  ")[0] for line in (DOCS / "design.md").read_text().splitlines()]
    for layers in (contract["layers"] for contract in contracts if "containers" in contract):
        start = shown.index(layers[0])
        assert shown[start : start + len(layers)] == layers


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_python_files_that_are_named_are_there(page: Path) -> None:
    elsewhere = {"megabatch_base.py"}  # of microsoft/dion
    titled = {Path(block.title).name for block in blocks_of(page) if block.title is not None}
    named = set(re.findall(r"`(?:[\w.-]+/)*([\w-]+\.py)`", page.read_text("utf-8")))
    known = {
        path.name
        for folder in ("src", "tests", "benchmarks", "examples")
        for path in (ROOT / folder).rglob("*.py")
    }
    assert not named - titled - known - elsewhere
