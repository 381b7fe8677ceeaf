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
_WAYS = """\
  merit completion bash > ~/.local/share/bash-completion/completions/merit
  source <(merit completion zsh)        (in ~/.zshrc, after compinit)
  merit completion fish > ~/.config/fish/completions/merit.fish"""


def main(argv: Sequence[str]) -> int:
    """Print the script and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="merit completion",
        description=f"Print a script for shell completion of commands, models and options.\n\n{_WAYS}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("shell", choices=_SHELLS)
    print(script(parser.parse_args(argv).shell), end="")
    return 0


def find_words() -> dict[str, list[str]]:
    """Return the possible next words by the words before: none, a command, or a command and its kind.

    A star is any word.
    """
    words = {"": list(COMMANDS)}
    for name in COMMANDS:
        if name in _WITH_MODEL:
            words[name] = [*PRESETS, *_options(_help(name))]
            words[f"{name} *"] = _options(_help(name, "tiny"))  # whichever model it is
        elif name != "completion":
            text = _help(name)
            kinds = _kinds(text)
            words[name] = [*kinds, *_options(text)]
            words |= {f"{name} {kind}": _options(_help(name, kind)) for kind in kinds}
    words["completion"] = list(_SHELLS)
    return words


def _help(*words: str) -> str:
    name, *arguments = words
    with contextlib.redirect_stdout(io.StringIO()) as shown, contextlib.suppress(SystemExit):
        COMMANDS[name].run(name, [*arguments, "--help"])
    return shown.getvalue()


def _options(text: str) -> list[str]:
    """Return the long options in a help text."""
    return list(dict.fromkeys(re.findall(r"(?<![\w-])--[a-z][a-z0-9.-]*[a-z0-9]", text)))


def _kinds(text: str) -> list[str]:
    """Return the subcommands of a command: {text,embedded} in the first line."""
    match = re.search(r"\{([a-z0-9-]+(?:,[a-z0-9-]+)+)\}$", text.partition("\n")[0])
    return match[1].split(",") if match else []


def script(shell: str) -> str:
    """Return the script for a shell; zsh reads bash's."""
    words = find_words()
    if shell == "fish":
        cases = (f"    case '{key}'\n      string split ' ' -- '{' '.join(words[key])}'" for key in words)
        return _FISH.replace("CASES", "\n".join(cases))
    # Words are quoted, except for a star.
    patterns = {key: f'"{key.removesuffix("*")}"' + "*" * key.endswith("*") for key in words}
    cases = (f'    {patterns[key]}) words="{" ".join(words[key])}" ;;' for key in words)
    begin = "autoload -U +X bashcompinit && bashcompinit\n" if shell == "zsh" else ""
    return begin + _BASH.replace("CASES", "\n".join(cases))


_BASH = """\
_merit() {
  local current="${COMP_WORDS[COMP_CWORD]}" before="" words=""
  [ "$COMP_CWORD" -gt 1 ] && before="${COMP_WORDS[1]}"
  [ "$COMP_CWORD" -gt 2 ] && before="${COMP_WORDS[1]} ${COMP_WORDS[2]}"
  _merit_words "$before" || _merit_words "${COMP_WORDS[1]}"
  COMPREPLY=($(compgen -W "$words" -- "$current"))
}
_merit_words() {
  case "$1" in
CASES
    *) return 1 ;;
  esac
}
complete -o default -F _merit merit
"""

_FISH = """\
function __merit_words
  switch "$argv[1]"
CASES
    case '*'
      return 1
  end
end
function __merit_complete
  set -l given (commandline -opc)
  __merit_words "$given[2..3]"; or __merit_words "$given[2]"
end
complete -c merit -a '(__merit_complete)'
complete -c merit -n 'test (count (commandline -opc)) -eq 1' -f
"""
