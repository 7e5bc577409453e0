from __future__ import annotations

import io
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from rlt.cli import generate
from rlt.cli.main import main
from rlt_protocols.params import SamplingParams
from support import Golden


class Parrot:
    """A model that repeats its prompt, one character per token."""

    info = SimpleNamespace(loops=4)

    def __init__(self) -> None:
        self.params: list[SamplingParams] = []
        self.prompts: list[Any] = []
        self.closed = False

    def stream(self, prompts: list[Any], params: SamplingParams) -> Any:
        self.params.append(params)
        self.prompts += prompts
        for i, char in enumerate(str(prompts[0])):
            yield SimpleNamespace(index=0, text=char, token_ids=(i,), depths=(i % 4 + 1,))

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def parrot(monkeypatch: pytest.MonkeyPatch) -> Parrot:
    fake = Parrot()
    monkeypatch.setattr(generate, "open_llm", lambda *options: fake)
    return fake


def run(*words: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(["generate", *words])
    return int(caught.value.code or 0)


def test_answers_come_one_after_the_other(parrot: Parrot, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--prompt", "one", "--prompt", "two", "--token-ids", "5, 9 12") == 0
    assert capsys.readouterr().out == "one\ntwo\n[5, 9, 12]\n"
    assert parrot.prompts == ["one", "two", [5, 9, 12]]
    assert parrot.params == [SamplingParams()] * 3
    assert parrot.closed


def test_every_option_reaches_the_request(parrot: Parrot) -> None:
    words = "--max-tokens 5 --temperature 0.5 --top-p 0.9 --top-k 3 --min-p 0.1 --seed 7 --stop a --stop b --ignore-eos"
    depth = "--min-loops 2 --max-loops 3 --exit-threshold 0.4"
    assert run("--prompt", "x", *words.split(), *depth.split()) == 0
    assert parrot.params == [
        SamplingParams(
            max_tokens=5,
            temperature=0.5,
            top_p=0.9,
            top_k=3,
            min_p=0.1,
            seed=7,
            stop=("a", "b"),
            ignore_eos=True,
            min_loops=2,
            max_loops=3,
            exit_threshold=0.4,
        )
    ]


def test_a_dash_reads_the_prompt_from_stdin(parrot: Parrot, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("from a pipe\n"))
    assert run("--prompt", "-") == 0
    assert parrot.prompts == ["from a pipe\n"]


def test_depths_are_shown(parrot: Parrot, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--prompt", "abc", "--show-depths") == 0
    assert capsys.readouterr().out.splitlines() == [
        "abc",
        "depths: 1 2 3",
        "3 tokens, 2.00 loops per token (1 at 1, 1 at 2, 1 at 3)",
    ]


def golden_words(golden: Golden) -> list[str]:
    ids = ",".join(map(str, golden.prompts["p7"]))
    settings = "--temperature 0 --max-tokens 32 --ignore-eos --device cpu --dtype float32 --set kv.pages=400"
    return ["--model", str(golden.directory), "--token-ids", ids, *settings.split()]


def test_a_real_model_answers_as_published(ouro_golden: Golden, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*golden_words(ouro_golden)) == 0
    tokens = ouro_golden.facts["runs"]["full_depth"]["p7"]["tokens"]
    assert capsys.readouterr().out == f"token ids: {' '.join(map(str, tokens))}\n"


def test_a_real_model_exits_early(ouro_golden: Golden, capsys: pytest.CaptureFixture[str]) -> None:
    # The first token is computed with the prompt, which always runs at full depth.
    assert run(*golden_words(ouro_golden), "--exit-threshold", "0", "--show-depths") == 0
    assert "\n32 tokens, 1.09 loops per token (31 at 1, 1 at 4)\n" in capsys.readouterr().out


def test_text_needs_a_tokenizer(ouro_golden: Golden, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--model", str(ouro_golden.directory), "--prompt", "x", "--set", "kv.pages=400") == 2
    assert "no tokenizer" in capsys.readouterr().err


def test_a_bad_request_names_its_field(ouro_golden: Golden, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*golden_words(ouro_golden), "--max-loops", "9") == 2
    assert capsys.readouterr().err == "rlt: max_loops: must be between 1 and 4, got 9\n"
