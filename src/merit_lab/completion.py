"""`merit completion`: print a script for shell completion of commands, models and options.

The words are read from the commands' help, so there is no second list of them.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import re
from collections.abc import Sequence

from merit_lab.models.config import PRESETS
from merit_optim.cli import COMMANDS

_WITH_MODEL = ("train", "compare", "sweep", "arena", "scale")
_SHELLS = ("bash", "zsh", "fish")
_ABOUT = """\
Print a script for shell completion of commands, models and options.

  merit completion bash > ~/.local/share/bash-completion/completions/merit
  source <(merit completion zsh)        (in ~/.zshrc, after compinit)
  merit completion fish > ~/.config/fish/completions/merit.fish"""


def main(argv: Sequence[str]) -> int:
    """Print the script and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="merit completion",
        description=_ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("shell", choices=_SHELLS)
    print(script(parser.parse_args(argv).shell), end="")
    return 0


def find_words(name: str) -> list[str]:
    """Return the possible words after a command: models or kinds, and the options of all of them."""
    if name == "completion":
        return list(_SHELLS)
    text = _help(name)
    kinds = re.search(r"\{([a-z0-9-]+(?:,[a-z0-9-]+)+)\}$", text.partition("\n")[0])
    first = list(PRESETS) if name in _WITH_MODEL else kinds[1].split(",") if kinds else []
    asked = first[:1] if name in _WITH_MODEL else first  # the options are those of any model
    return [*first, *_options("".join([text, *(_help(name, one) for one in asked)]))]


def _help(*words: str) -> str:
    name, *arguments = words
    with contextlib.redirect_stdout(io.StringIO()) as shown, contextlib.suppress(SystemExit):
        COMMANDS[name].run(name, [*arguments, "--help"])
    return shown.getvalue()


def _options(text: str) -> list[str]:
    """Return the long options in a help text."""
    return list(dict.fromkeys(re.findall(r"(?<![\w-])--[a-z][a-z0-9.-]*[a-z0-9]", text)))


def script(shell: str) -> str:
    """Return the script for a shell; zsh reads bash's."""
    commands, words = " ".join(COMMANDS), {name: " ".join(find_words(name)) for name in COMMANDS}
    if shell == "fish":
        lines = [f"complete -c merit -n __fish_use_subcommand -f -a '{commands}'"]
        lines += [
            f"complete -c merit -n '__fish_seen_subcommand_from {name}' -a '{words[name]}'" for name in words
        ]
        return "\n".join(lines) + "\n"
    cases = "\n".join(f'    {name}) words="{words[name]}" ;;' for name in words)
    begin = "autoload -U +X bashcompinit && bashcompinit\n" if shell == "zsh" else ""
    return begin + _BASH.replace("COMMANDS", commands).replace("CASES", cases)


_BASH = """\
_merit() {
  local words=""
  case "${COMP_WORDS[1]}" in
CASES
  esac
  [ "$COMP_CWORD" -eq 1 ] && words="COMMANDS"
  COMPREPLY=($(compgen -W "$words" -- "${COMP_WORDS[COMP_CWORD]}"))
}
complete -o default -F _merit merit
"""
