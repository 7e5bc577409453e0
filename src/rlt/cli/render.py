"""Streamed text on a terminal, shaded by the depth at which its tokens left the loop."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

#: Colours from shallow to deep, readable on light and dark backgrounds.
COLOURS = ("bright_blue", "cyan", "green", "yellow", "bright_red", "magenta")


def colour(depth: int, loops: int) -> str:
    """The colour of a token that left after `depth` of `loops` loops; the deepest always gets the last colour."""
    if loops == 1:
        return COLOURS[0]
    return COLOURS[round((depth - 1) * (len(COLOURS) - 1) / (loops - 1))]


class Stream:
    """Prints one answer as it comes, or its token ids at the end if there was no text (a model without a tokenizer).

    With `show_depths`, every piece of text is coloured by its deepest token, after a legend; a console without colours
    gets the depths in a line of their own at the end.
    """

    def __init__(self, console: Console, loops: int, show_depths: bool) -> None:
        self._console = console
        self._loops = loops
        self._show_depths = show_depths
        self._coloured = show_depths and console.color_system is not None
        self._token_ids: list[int] = []
        self._depths: list[int] = []
        self._any_text = False
        self._waiting = 0

    def start(self) -> None:
        if self._coloured:
            legend = Text("depth:")
            for depth in range(1, self._loops + 1):
                legend.append(f" ■ {depth}", style=colour(depth, self._loops))
            self._console.print(legend)

    def write(self, text: str, token_ids: Sequence[int], depths: Sequence[int]) -> None:
        """Print what new tokens added; `text` may be empty while a character or a stop string is incomplete."""
        self._token_ids += token_ids
        self._depths += depths
        self._waiting = max(self._waiting, *depths, 0)
        if not text:
            return
        self._any_text = True
        if self._coloured:
            style = colour(self._waiting or 1, self._loops)
            self._console.print(Text(text, style=style), end="", soft_wrap=True)
        else:
            self._console.file.write(text)
        self._console.file.flush()
        self._waiting = 0

    def finish(self) -> None:
        if not self._any_text:
            self._ids()
        self._console.print()
        if not self._show_depths:
            return
        if not self._coloured:
            self._console.print(f"depths: {' '.join(map(str, self._depths))}", soft_wrap=True)
        counts = Counter(self._depths)
        spread = ", ".join(f"{counts[depth]} at {depth}" for depth in sorted(counts))
        mean = sum(self._depths) / len(self._depths) if self._depths else 0.0
        self._console.print(f"{len(self._depths)} tokens, {mean:.2f} loops per token ({spread})", soft_wrap=True)

    def _ids(self) -> None:
        line = Text("token ids:")
        for token_id, depth in zip(self._token_ids, self._depths, strict=True):
            line.append(f" {token_id}", style=colour(depth, self._loops) if self._coloured else "")
        self._console.print(line, end="", soft_wrap=True)
