from __future__ import annotations

import io
from typing import Any

import pytest

from rlt.cli.loading import loading
from rlt.cli.options import open_llm
from rlt.progress import ProgressLines


def test_lines_where_stderr_is_no_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("rlt.progress.LINE_EVERY_S", 0.0)
    with loading() as progress:
        assert isinstance(progress, ProgressLines)
        progress("[one].safetensors", 0.25)
    assert capsys.readouterr() == ("", "loading [one].safetensors, 25% of the model is done\n")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    terminal = Terminal()
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setattr("sys.stderr", terminal)
    with loading() as progress:
        progress("one.safetensors", 0.25)
        progress("two.safetensors", 1.0)
    shown = terminal.getvalue()
    assert "two.safetensors" in shown
    assert "100%" in shown
    assert shown.endswith("\x1b[2K"), "the bar stays when the model is there"
    assert capsys.readouterr().out == ""


def test_commands_show_how_far_their_model_is(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[tuple[str, float]] = []
    monkeypatch.setattr(ProgressLines, "__call__", lambda self, stage, share: steps.append((stage, share)))
    llm: Any = open_llm("tiny-ouro", "cpu", None, None, ["kv.pages=100"])
    llm.close()
    assert {stage for stage, _ in steps} == {f"model-0000{number}-of-00002.safetensors" for number in (1, 2)}
    shares = [share for _, share in steps]
    assert shares == sorted(shares)
    assert shares[-1] == pytest.approx(1.0)
