from __future__ import annotations

from typing import Any

import pytest

from evals.fake_answerer import FakeAnswerer
from rlt.depth.table import RULES
from rlt.errors import ConfigError
from rlt.evals.accuracy import Form, Plan, default_loops, default_thresholds, evaluate, make_plan, score
from rlt.evals.answers import Answer, Asked
from rlt.evals.tasks import Example, examples
from rlt_protocols.params import SamplingParams

EXAMPLES = list(examples("heldout", 3, 0))
BY_PROMPT = {example.prompt: example for example in EXAMPLES} | {example.question: example for example in EXAMPLES}


def share(loops: int) -> float:
    return sum(min(example.difficulty, 4) <= loops for example in EXAMPLES) / len(EXAMPLES)


def deep(asked: Asked) -> Answer:
    """Knows an answer when it may use as many loops as the example is difficult, up to four; early exit leaves two."""
    chat = not isinstance(asked.prompt, str)
    example = BY_PROMPT[asked.prompt if isinstance(asked.prompt, str) else asked.prompt[-1]["content"]]
    params = asked.params
    loops = 2 if params.exit_threshold is not None else params.max_loops or 4
    answer = example.chat_answer if chat else f" {example.answer}"
    return Answer(answer if min(example.difficulty, 4) <= loops else " no idea", tokens=2, loops=2 * loops)


def run(answerer: Any, form: Form = "raw", plan: Plan | None = None) -> dict[str, Any]:
    steps: list[int] = []
    plan = plan or make_plan(answerer, None, None)
    result = evaluate(answerer, EXAMPLES, form, plan, lambda: steps.append(1))
    assert len(steps) == plan.runs * len(EXAMPLES)
    return result


@pytest.mark.parametrize("form", ["raw", "chat"])
def test_the_promised_structure(form: Form) -> None:
    result = run(FakeAnswerer(deep), form, Plan([1, 2, 3, 4], [0.5, 0.9]))
    promised = ["model", "tasks", "exact_match", "mean_loops", "by_loops", "by_threshold"]
    assert list(result) == [*promised, "form", "exit_rule"]
    assert (result["model"], result["form"], result["exit_rule"]) == ("fake", form, "ouro")
    assert list(result["tasks"]) == ["addition", "subtraction", "chains", "hops", "word_problems"]
    assert result["tasks"]["hops"] == {"n": 3, "exact_match": 1.0}
    assert (result["exact_match"], result["mean_loops"]) == (1.0, 4.0)
    assert result["by_loops"] == {str(m): share(m) for m in (1, 2, 3, 4)}
    assert 0 < share(1) < share(2) < 1
    assert result["by_threshold"] == {q: {"exact_match": share(2), "mean_loops": 2.0} for q in ("0.5", "0.9")}


def test_every_setting_is_greedy_and_says_its_depth() -> None:
    answerer = FakeAnswerer(deep)
    run(answerer, plan=Plan([1, 4], [0.5]))
    sent = list(dict.fromkeys((p.min_loops, p.max_loops, p.exit_threshold) for _, p in answerer.asked))
    assert sent == [(None, None, None), (1, 1, None), (4, 4, None), (1, 4, 0.5)]
    assert {(p.temperature, p.stop) for _, p in answerer.asked} == {(0.0, ("\n",))}


def test_an_answer_must_match_whole() -> None:
    example = Example("hops", "Who?", "Ann", 1)

    def result(text: str, form: Form = "raw") -> tuple[bool | None, ...]:
        return score(FakeAnswerer(lambda _: Answer(text)), [example], form, SamplingParams(), lambda: None).right

    assert result(" Ann") == (True,)
    assert result(" Anna") == (False,)
    assert result("The answer is Ann.", "chat") == (True,)
    assert result("<think>Ann?</think>\n\nThe answer is Ann.", "chat") == (True,)
    assert result("Ann", "chat") == (False,)


def test_failed_questions_are_neither_right_nor_wrong() -> None:
    def flaky(asked: Asked) -> Answer:
        return Answer(error="down") if BY_PROMPT[str(asked.prompt)].task == "hops" else deep(asked)

    result = run(FakeAnswerer(flaky), plan=Plan([1], []))
    assert result["tasks"]["hops"] == {"n": 0, "exact_match": None}
    assert (result["exact_match"], result["mean_loops"]) == (1.0, 4.0)
    assert (result["failed"], result["first_error"]) == (6, "down")


def test_depths_that_a_server_refuses_are_absent_with_the_reason() -> None:
    def shallow(asked: Asked) -> Answer:
        p = asked.params
        refused = p.exit_threshold is not None or p.max_loops not in (None, 4)
        return Answer(error="HTTP 400: no", refused=True) if refused else deep(asked)

    result = run(FakeAnswerer(shallow, exit_rule=None), plan=Plan([1, 2, 4], [0.5]))
    assert (result["by_loops"], result["by_threshold"]) == ({"4": 1.0}, {})
    assert result["absent"] == {"by_loops": "1: HTTP 400: no; 2: HTTP 400: no", "by_threshold": "0.5: HTTP 400: no"}
    assert not result.keys() & {"failed", "exit_rule"}


def test_a_server_that_tells_no_loops_is_asked_for_none() -> None:
    def plain(asked: Asked) -> Answer:
        assert (asked.params.min_loops, asked.params.max_loops, asked.params.exit_threshold) == (None, None, None)
        return Answer(deep(asked).text)

    result = run(FakeAnswerer(plain, loops=None, exit_rule=None))
    assert (result["by_loops"], result["by_threshold"]) == ({}, {})
    assert "mean_loops" not in result
    assert set(result["absent"]) == {"by_loops", "by_threshold"}


class TestPlan:
    def test_the_model_decides(self) -> None:
        assert make_plan(FakeAnswerer(deep), None, None) == Plan([1, 2, 3, 4], [0.3, 0.5, 0.7, 0.9])
        assert make_plan(FakeAnswerer(deep), [2], [0.1]) == Plan([2], [0.1])

    def test_fixed_depth(self) -> None:
        fixed = FakeAnswerer(deep, loops=2, full_depth="no gate")
        absent = {"by_loops": "fewer than 2: no gate", "by_threshold": "no gate"}
        assert make_plan(fixed, None, None) == Plan([2], [], absent)
        assert make_plan(fixed, [2], None).loops == [2]
        with pytest.raises(ConfigError, match="--loops: not with this model: no gate"):
            make_plan(fixed, [1, 2], None)
        with pytest.raises(ConfigError, match="--thresholds: not with this model: no gate"):
            make_plan(fixed, None, [0.5])

    def test_a_server_without_loops(self) -> None:
        for loops, thresholds in (([1], None), (None, [0.5])):
            with pytest.raises(ConfigError, match="the server does not say how many loops"):
                make_plan(FakeAnswerer(deep, loops=None), loops, thresholds)

    def test_a_server_with_loops(self) -> None:
        server = FakeAnswerer(deep, exit_rule=None)
        assert make_plan(server, None, [0.5]) == Plan([1, 2, 3, 4], [0.5])
        plan = make_plan(server, None, None)
        assert (plan.thresholds, list(plan.absent)) == ([], ["by_threshold"])

    def test_too_many_loops(self) -> None:
        with pytest.raises(ConfigError, match="--loops: 5 is more than the model's 4"):
            make_plan(FakeAnswerer(deep), [1, 5], None)

    def test_rules_without_a_threshold(self) -> None:
        plan = make_plan(FakeAnswerer(deep, exit_rule="trace"), None, None)
        assert plan == Plan(
            [1, 2, 3, 4], [], {"by_threshold": "the exit rule trace has no threshold; --set exit.rule has others"}
        )


def test_many_loops_are_sampled() -> None:
    assert default_loops(1) == [1]
    assert default_loops(8) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert default_loops(32) == [1, 2, 4, 8, 16, 32]
    assert default_loops(12) == [1, 2, 4, 8, 12]


@pytest.mark.parametrize("rule", [name for name in RULES if name not in ("full_depth", "trace")])
def test_every_rule_is_asked_for_thresholds_that_it_takes(rule: str) -> None:
    kind = RULES[rule]
    assert kind.thresholds is not None
    low, high = kind.thresholds
    values = default_thresholds(rule)
    assert values == sorted(set(values))
    assert all(low <= value <= high for value in values)
    assert kind.threshold is None or kind.threshold in values
