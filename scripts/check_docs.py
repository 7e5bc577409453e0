#!/usr/bin/env python3
"""Checks that relative links in the documentation lead somewhere and that README's commands exist.

Usage: scripts/check_docs.py [ROOT]. Prints one line per problem and exits with 1 if there is any.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

#: `module:app` of each program's typer application.
PROGRAMS = {"rlt": "rlt.cli.main:app", "rltd": "rltd.main:app", "rltctl": "rltd.control.main:app"}

_LINK = re.compile(r"!?\[[^\]]*\]\(\s*<?([^)\s>]+)>?[^)]*\)")
_FENCE = re.compile(r"^\s*(```+|~~~+)\s*(\w*)")
_SHELLS = {"sh", "shell", "bash", "console", "shell-session"}


def documents(root: Path) -> list[Path]:
    """README.md and everything under docs/ and recipes/."""
    return [*root.glob("README.md"), *sorted(root.glob("docs/**/*.md")), *sorted(root.glob("recipes/**/*.md"))]


def split(text: str) -> tuple[list[tuple[int, str]], list[tuple[int, str]]]:
    """Numbered lines outside of fenced blocks, and numbered lines of fenced shell blocks."""
    prose: list[tuple[int, str]] = []
    shell: list[tuple[int, str]] = []
    fence, language = "", ""
    for number, line in enumerate(text.splitlines(), 1):
        mark = _FENCE.match(line)
        if mark and not fence:
            fence, language = mark.group(1), mark.group(2)
        elif mark and mark.group(1).startswith(fence) and not mark.group(2):
            fence = ""
        elif not fence:
            prose.append((number, line))
        elif language in _SHELLS:
            shell.append((number, line))
    return prose, shell


def link_problems(path: Path, root: Path) -> Iterator[str]:
    """Relative links of a document whose file or folder does not exist."""
    for number, line in split(path.read_text(encoding="utf-8"))[0]:
        # What is in backticks is an example, not a link.
        for target in _LINK.findall(re.sub(r"`[^`]*`", "", line)):
            if re.match(r"[a-z][a-z0-9+.-]*:|#", target):
                continue
            name = target.partition("#")[0]
            place = root / name.lstrip("/") if name.startswith("/") else path.parent / name
            if not place.exists():
                yield f"{path.relative_to(root)}:{number}: the link {target} leads nowhere"


def command_problems(path: Path, root: Path) -> Iterator[str]:
    """Commands in fenced shell blocks that name a script or a sub-command that does not exist."""
    for number, line in split(path.read_text(encoding="utf-8"))[1]:
        text = line.strip().removeprefix("$ ")
        try:
            words = shlex.split(text, comments=True)
        except ValueError:  # a quote that the next line closes
            words = text.split()
        while words and re.fullmatch(r"\w+=.*", words[0]):
            words = words[1:]
        if words:
            problem = _problem(words, root)
            if problem:
                yield f"{path.relative_to(root)}:{number}: {problem}"


def _problem(words: list[str], root: Path) -> str | None:
    first = words[0].removeprefix("./")
    if first.startswith("scripts/"):
        return None if (root / first).is_file() else f"{first} does not exist"
    program = first.removeprefix(".venv/bin/")
    if program not in PROGRAMS:
        return None
    try:
        known = commands(program)
    except (ImportError, AttributeError) as error:
        return f"{program} cannot be imported: {error}"
    for word in words[1:]:
        if known is None or word.startswith("-"):
            return None
        if word not in known:
            return f"{program} has no command {word}; known: {', '.join(sorted(known))}"
        known = known[word]
    return None


def commands(program: str) -> dict[str, Any] | None:
    """The tree of a program's command names: a dict for a group, None for a command."""
    from typer.main import get_command

    module, _, name = PROGRAMS[program].partition(":")

    def tree(command: Any) -> dict[str, Any] | None:
        below = getattr(command, "commands", None)
        return None if below is None else {key: tree(value) for key, value in below.items()}

    return tree(get_command(getattr(import_module(module), name)))


def main() -> int:
    root = Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else Path(__file__).resolve().parents[1]
    problems = [problem for path in documents(root) for problem in link_problems(path, root)]
    if (root / "README.md").is_file():
        problems += command_problems(root / "README.md", root)
    for problem in problems:
        print(problem)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
