"""Shells complete commands, models, kinds and options; zsh reads bash's script."""

import shutil
import subprocess
from pathlib import Path

import pytest

from merit_lab import completion

# By what is typed, what is offered.
CASES = {
    "merit tra": ["train"],
    "merit prepare te": ["text"],
    "merit train gpt2-": ["gpt2-small", "gpt2-medium", "gpt2-large"],
    "merit train hf:model --optimizer.na": ["--optimizer.name"],
    "merit completion f": ["fish"],
}
FILL = 'COMP_WORDS=({words}); COMP_CWORD={last}; _merit; echo "${{COMPREPLY[@]}}"'


@pytest.mark.parametrize("shell", ["bash", "fish"])
def test_what_each_shell_offers(shell: str, tmp_path: Path) -> None:
    path = shutil.which(shell)
    if path is None:
        pytest.skip(f"{shell} is not installed")
    file = tmp_path / "script"
    file.write_text(completion.script(shell))
    for typed, expected in CASES.items():
        words = typed.split()
        ask = FILL.format(words=" ".join(f"'{word}'" for word in words), last=len(words) - 1)
        if shell == "fish":
            ask = f"complete -C '{typed}'"
        done = subprocess.run(
            [path, "-c", f"source {file}; {ask}"],
            check=True,
            capture_output=True,
            text=True,
            cwd=tmp_path,
        )
        offered = [word for word in done.stdout.split() if word.startswith(words[-1])]
        assert sorted(offered) == sorted(expected), typed
