"""Shells complete commands, models, kinds and options, each with its script."""

import shutil
import subprocess
from pathlib import Path

import pytest

from merit_lab import completion

# By what is typed, some of what is offered.
CASES = {
    "merit tra": ["train"],
    "merit prepare te": ["text"],
    "merit train gpt2-": ["gpt2-small", "gpt2-medium", "gpt2-large"],
    "merit train hf:model --optimizer.na": ["--optimizer.name"],
    "merit report runs --o": ["--out"],
    "merit prepare text --fie": ["--field"],
    "merit completion f": ["fish"],
}


@pytest.fixture(scope="module")
def words() -> dict[str, list[str]]:
    return completion.find_words()


def ask(shell: str, script: str, folder: Path) -> list[str]:
    path = shutil.which(shell)
    if path is None:
        pytest.skip(f"{shell} is not installed")
    arguments = ["-f", "-c"] if shell == "zsh" else ["-c"]
    done = subprocess.run([path, *arguments, script], check=True, capture_output=True, text=True, cwd=folder)
    return done.stdout.split()


@pytest.mark.parametrize("typed", CASES)
def test_bash(typed: str, words: dict[str, list[str]], tmp_path: Path) -> None:
    file = tmp_path / "merit"
    file.write_text(completion._bash(words))
    typed_before = " ".join(f"'{word}'" for word in typed.split())
    typed_words = f"COMP_WORDS=({typed_before}); COMP_CWORD={len(typed.split()) - 1}"
    script = f'source {file}; {typed_words}; _merit; echo "${{COMPREPLY[@]}}"'
    assert ask("bash", script, tmp_path) == CASES[typed]


@pytest.mark.parametrize("typed", CASES)
def test_fish(typed: str, words: dict[str, list[str]], tmp_path: Path) -> None:
    file = tmp_path / "merit.fish"
    file.write_text(completion._fish(words))
    (tmp_path / "empty").mkdir()  # names of files are offered too
    offered = ask("fish", f"source {file}; complete -C '{typed}'", tmp_path / "empty")
    assert sorted(offered) == sorted(CASES[typed])


@pytest.mark.parametrize("typed", CASES)
def test_zsh(typed: str, words: dict[str, list[str]], tmp_path: Path) -> None:
    """compadd is replaced by one that shows what it is typed_before: a real one needs a terminal."""
    file = tmp_path / "_merit"
    file.write_text(completion._zsh(words))
    typed_before = " ".join(f"'{word}'" for word in typed.split())
    last = typed.rsplit(maxsplit=1)[-1]
    script = f"""compdef() {{ :; }}; _files() {{ :; }}; compadd() {{ shift; print -l -- "$@"; }}
source {file}; words=({typed_before}); CURRENT={len(typed.split())}; PREFIX='{last}'; _merit"""
    offered = [line for line in ask("zsh", script, tmp_path) if line.startswith(last)]
    assert offered == CASES[typed]


def test_the_command_prints_a_script(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        completion.main(["--help"])
    assert "merit completion fish > " in capsys.readouterr().out
