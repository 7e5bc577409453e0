from __future__ import annotations

import re

import pytest

from rlt.progress import LINE_EVERY_S, ProgressLines, bar_line


def test_lines_come_now_and_then() -> None:
    now_s, said = [100.0], []
    lines = ProgressLines(said.append, lambda: now_s[0])
    for step in range(100):
        lines(f"file-{step}", step / 100)
        now_s[0] += LINE_EVERY_S / 10
    assert said == [f"loading file-{step}, {step}% of the model is done" for step in range(10, 100, 10)]


def test_what_is_quick_says_nothing() -> None:
    said: list[str] = []
    ProgressLines(said.append, lambda: 7.0)("file", 1.0)
    assert said == []


@pytest.mark.parametrize("columns", [30, 60, 200])
@pytest.mark.parametrize("share", [0.0, 0.376, 1.0])
def test_a_bar_is_one_line_that_fits(monkeypatch: pytest.MonkeyPatch, columns: int, share: float) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    line = bar_line("model-00001-of-00002.safetensors", share, columns)
    assert "\n" not in line
    text = re.sub(r"\x1b\[[\d;]*m", "", line)
    assert len(text) <= columns
    assert text.startswith("loading")
    if columns > 100:
        # In a narrow one the text comes first.
        assert "\x1b[" in line
        assert text.endswith(f"{share:.0%}")


def test_a_bar_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    lines = [bar_line("[weights]", share, 80) for share in (0.2, 0.5, 0.8)]
    # Without colour the part that is not done is not drawn at all.
    assert [line.count("━") for line in lines] == sorted({line.count("━") for line in lines})
    assert all("[weights]" in line for line in lines)
