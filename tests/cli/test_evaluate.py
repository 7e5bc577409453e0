from __future__ import annotations

import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from rlt.cli import evaluate
from rlt.cli.evaluate import Score, parse_thresholds, score
from rlt.cli.main import main
from rlt.errors import ConfigError
from rlt.evals.tasks import Example, examples
from rlt_protocols.params import SamplingParams

ANSWERS = {example.prompt: example for example in examples("heldout", 3, 0)}


class DeepLlm:
    """A model that knows an answer when it may use as many loops as the example is difficult, up to four."""

    info = SimpleNamespace(name="deep", loops=4, full_depth=None)

    def __init__(self) -> None:
        self.calls: list[SamplingParams] = []
        self.closed = False

    def generate(self, prompts: Sequence[str], params: SamplingParams) -> list[Any]:
        self.calls.append(params)
        early = params.exit_threshold is not None and params.exit_threshold < 1
        loops = 2 if early else params.max_loops or 4
        return [self._output(ANSWERS[prompt], loops) for prompt in prompts]

    def _output(self, example: Example, loops: int) -> Any:
        text = f" {example.answer}" if min(example.difficulty, 4) <= loops else " no idea"
        return SimpleNamespace(outputs=[SimpleNamespace(text=text, depths=(loops, loops))])

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> DeepLlm:
    fake = DeepLlm()
    monkeypatch.setattr(evaluate, "open_llm", lambda *options: fake)
    return fake


def run(*words: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(["eval", "tasks", *words])
    return int(caught.value.code or 0)


def share(loops: int) -> float:
    return sum(min(example.difficulty, 4) <= loops for example in ANSWERS.values()) / len(ANSWERS)


def test_json_has_the_promised_structure(llm: DeepLlm, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--n", "3", "--thresholds", "0.5,0.9", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert list(result) == ["model", "tasks", "exact_match", "mean_loops", "by_loops", "by_threshold", "env"]
    assert result["model"] == "deep"
    assert list(result["tasks"]) == ["addition", "subtraction", "chains", "hops", "word_problems"]
    assert result["tasks"]["hops"] == {"n": 3, "exact_match": 1.0}
    assert (result["exact_match"], result["mean_loops"]) == (1.0, 4.0)
    assert result["by_loops"] == {str(m): share(m) for m in (1, 2, 3, 4)}
    assert result["by_threshold"] == {q: {"exact_match": share(2), "mean_loops": 2.0} for q in ("0.5", "0.9")}
    assert result["env"]["torch"]
    assert llm.closed


def test_every_setting_is_greedy_and_says_its_depth(llm: DeepLlm, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--n", "3", "--thresholds", "0.5") == 0
    depths = [(p.min_loops, p.max_loops, p.exit_threshold) for p in llm.calls]
    assert depths == [
        (None, None, None),
        (1, 1, 1.0),
        (1, 2, 1.0),
        (1, 3, 1.0),
        (1, 4, 1.0),
        (1, 4, 0.5),
    ]
    assert all(p.temperature == 0 for p in llm.calls)
    out = capsys.readouterr().out
    assert "word_problems" in out
    assert "threshold 0.5" in out


def test_a_model_of_fixed_depth_has_one_depth(
    llm: DeepLlm, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(llm, "info", SimpleNamespace(name="deep", loops=4, full_depth="no gate"))
    assert run("--n", "3", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert (list(result["by_loops"]), result["by_threshold"]) == (["4"], {})
    assert [(p.min_loops, p.max_loops) for p in llm.calls] == [(None, None), (None, 4)]


def test_an_answer_must_match_whole() -> None:
    example = Example("hops", "Who?", "Ann", 1)

    def answering(text: str) -> Any:
        output = SimpleNamespace(outputs=[SimpleNamespace(text=text, depths=(1, 3))])
        return SimpleNamespace(generate=lambda prompts, params: [output] * len(prompts))

    assert score(answering(" Ann"), [example]) == Score((True,), 2.0)
    assert score(answering(" Anna"), [example]) == Score((False,), 2.0)


def test_thresholds_are_checked() -> None:
    assert parse_thresholds("0, 0.5,1") == [0.0, 0.5, 1.0]
    for text, line in (("a", "is not a list of numbers such as 0.5,0.9"), ("0.5,2", "must be numbers from 0 to 1")):
        with pytest.raises(ConfigError, match=f"--thresholds: '{text}' {line}"):
            parse_thresholds(text)


def test_a_bad_threshold_is_bad_usage(llm: DeepLlm, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--thresholds", "x") == 2
    assert capsys.readouterr().err == "rlt: --thresholds: 'x' is not a list of numbers such as 0.5,0.9\n"
