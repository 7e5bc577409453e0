from __future__ import annotations

import io

import pytest
from rich.console import Console

from rlt.cli.render import COLOURS, Stream, colour


def shown(*, coloured: bool, show_depths: bool, pieces: list[tuple[str, list[int]]], loops: int = 4) -> str:
    out = io.StringIO()
    console = Console(
        file=out, force_terminal=coloured, color_system="standard" if coloured else None, width=40, _environ={}
    )
    stream = Stream(console, loops, show_depths)
    stream.start()
    for text, depths in pieces:
        stream.write(text, [7 + depth for depth in depths], depths)
    stream.finish()
    return out.getvalue()


PIECES = [("Hel", [1]), ("", [4]), ("lo", [2]), (" [b]all[/b]", [])]


def test_plain_text_comes_as_it_is() -> None:
    assert shown(coloured=False, show_depths=False, pieces=PIECES) == "Hello [b]all[/b]\n"


def test_without_colours_depths_follow_in_a_line() -> None:
    assert shown(coloured=False, show_depths=True, pieces=PIECES) == (
        "Hello [b]all[/b]\ndepths: 1 4 2\n3 tokens, 2.33 loops per token (1 at 1, 1 at 2, 1 at 4)\n"
    )


def test_colours_follow_the_deepest_token_of_a_piece() -> None:
    text = shown(coloured=True, show_depths=True, pieces=PIECES[:3])
    assert text.startswith("depth:\x1b[94m ■ 1\x1b[0m")
    assert "\x1b[94mHel\x1b[0m\x1b[35mlo\x1b[0m" in text
    assert "depths:" not in text


def test_without_any_text_the_ids_are_shown() -> None:
    pieces: list[tuple[str, list[int]]] = [("", [1, 4]), ("", [2])]
    assert shown(coloured=False, show_depths=False, pieces=pieces) == "token ids: 8 11 9\n"
    assert "\x1b[94m 8\x1b[0m\x1b[35m 11\x1b[0m" in shown(coloured=True, show_depths=True, pieces=pieces)


def test_no_tokens_are_fine() -> None:
    assert shown(coloured=False, show_depths=True, pieces=[]) == (
        "token ids:\ndepths: \n0 tokens, 0.00 loops per token ()\n"
    )


def test_plain_text_is_not_laid_out() -> None:
    assert shown(coloured=False, show_depths=False, pieces=[("x" * 100 + "\t\n", [1])]) == "x" * 100 + "\t\n\n"


@pytest.mark.parametrize("loops", [1, 2, 4, 6, 32])
def test_the_scale_goes_from_the_first_colour_to_the_last(loops: int) -> None:
    scale = [COLOURS.index(colour(depth, loops)) for depth in range(1, loops + 1)]
    assert scale == sorted(scale)
    assert scale[0] == 0
    assert scale[-1] == (len(COLOURS) - 1 if loops > 1 else 0)
