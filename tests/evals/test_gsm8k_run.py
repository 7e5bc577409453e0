from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from evals.fake_answerer import FakeAnswerer
from rlt.errors import ConfigError
from rlt.evals.answers import Answer, Asked
from rlt.evals.gsm8k import Question
from rlt.evals.gsm8k_run import Exam, check, run, score, share, summary, unanswered
from rlt.evals.records import Record, RecordFile, digest
from rlt_protocols.params import SamplingParams

QUESTIONS = [Question(i, f"What are {i} and {i}?", f"{i} + {i} = {2 * i}\n#### {2 * i}", str(2 * i)) for i in range(6)]
SHOTS, SCORED = QUESTIONS[:2], QUESTIONS[2:]


def exam(**changes: Any) -> Exam:
    values: dict[str, Any] = {
        "form": "raw",
        "shots": SHOTS,
        "questions": SCORED,
        "params": SamplingParams(max_tokens=9, temperature=0.0),
    }
    return Exam(**values | changes)


def right(asked: Asked) -> Answer:
    """Works it out: the question is the last one of the prompt."""
    assert isinstance(asked.prompt, str)
    number = int(asked.prompt.rpartition("and ")[2].rstrip("?\nAnswer:"))
    return Answer(f" sure\n#### {2 * number}", tokens=4, loops=10, finish_reason="stop")


def test_asks_all_and_scores_them() -> None:
    answerer, steps = FakeAnswerer(right), []
    with RecordFile(None, {}) as file:
        records = run(answerer, exam(), file, lambda: steps.append(1))
    assert [record.id for record in records] == [2, 3, 4, 5]
    assert all(record.strict_correct and record.flexible_correct for record in records)
    assert len(steps) == 4
    assert records[0] == Record(
        id=2,
        prompt_hash=digest(exam().prompt(QUESTIONS[2])),
        gold="4",
        text=" sure\n#### 4",
        strict="4",
        strict_correct=True,
        flexible="4",
        flexible_correct=True,
        tokens=4,
        loops=10,
        mean_loops=2.5,
        finish_reason="stop",
    )


def test_only_what_has_no_answer_is_asked_again(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    failing = {2, 4}

    def flaky(asked: Asked) -> Answer:
        answer = right(asked)
        return Answer(error="down") if int(answer.text.rpartition(" ")[2]) // 2 in failing else answer

    answerer = FakeAnswerer(flaky)
    with RecordFile(path, {}) as file:
        records = run(answerer, exam(questions=SCORED[:3]), file, lambda: None)
    assert [record.error for record in records] == ["down", None, "down"]
    failing.remove(2)
    answerer.asked.clear()
    with RecordFile(path, {}) as file:
        assert [question.id for question in unanswered(exam(), file)] == [2, 4, 5]
        records = run(answerer, exam(), file, lambda: None)
    assert len(answerer.asked) == 3
    assert [(record.id, record.error) for record in records] == [(2, None), (3, None), (4, "down"), (5, None)]


def test_a_record_of_another_question_is_refused() -> None:
    with RecordFile(None, {}) as file:
        run(FakeAnswerer(right), exam(), file, lambda: None)
        other = Question(3, "Another one?", "#### 1", "1")
        with pytest.raises(ConfigError, match="--record: has another question as number 3; --data is not the file"):
            check(exam(questions=[SCORED[0], other]), file)
        check(exam(questions=SCORED[:1]), file)


def test_sampled_questions_have_seeds_of_their_own() -> None:
    answerer = FakeAnswerer(right)
    with RecordFile(None, {}) as file:
        run(answerer, exam(params=SamplingParams(temperature=1.0, seed=100)), file, lambda: None)
    assert [asked.params.seed for asked in answerer.asked] == [105, 104, 103, 102]
    assert exam().asked(SCORED[0]).params.seed is None


def test_what_a_result_depends_on_is_in_the_settings() -> None:
    answerer = FakeAnswerer(right, settings={"layout": "shared"})
    base = exam().settings(answerer)
    assert base["prompt"] == "Question: {question}\nAnswer: {answer}\n\nQuestion: {question}\nAnswer:"
    assert (base["model"], base["shots"], base["layout"], base["max_tokens"]) == ("fake", 2, "shared", 9)
    json.dumps(base)
    changes: list[dict[str, Any]] = [
        {"form": "chat"},
        {"shots": SHOTS[:1]},
        {"shots": SCORED[:2]},
        {"params": SamplingParams(max_tokens=10, temperature=0.0)},
        {"params": SamplingParams(max_tokens=9, temperature=0.0, max_loops=2)},
        {"thinking": True},
    ]
    changed = [exam(**change).settings(answerer) for change in changes]
    assert all(settings != base for settings in changed)
    assert exam(questions=SCORED[:1]).settings(answerer) == base


def test_the_chat_form_asks_in_messages() -> None:
    prompt = exam(form="chat").prompt(SCORED[0])
    assert [message["role"] for message in prompt if isinstance(message, dict)] == ["user", "assistant"] * 2 + ["user"]


def test_a_number_in_the_reasoning_is_no_answer() -> None:
    question = Question(0, "?", "#### 4", "4")
    assert score(question, "h", Answer("<think>#### 4</think> I give up")).strict is None
    assert score(question, "h", Answer("<think>#### 4")).flexible is None
    assert score(question, "h", Answer("so #### 5</think>#### 4")).strict == "4"
    record = score(question, "h", Answer("", reasoning="#### 4"))
    assert (record.strict, record.reasoning, record.mean_loops) == (None, "#### 4", None)


def good(number: int, strict: bool, flexible: bool, **more: Any) -> Record:
    found = "1" if strict else None
    fields = {"strict": found, "strict_correct": strict, "flexible_correct": flexible, "finish_reason": "stop"}
    return Record(id=number, prompt_hash="h", gold="1", **fields | {"tokens": 2, "loops": 6} | more)


def test_a_summary_counts_failures_apart() -> None:
    failure = Record(id=9, prompt_hash="h", gold="1", error="down")
    records = [good(0, True, True), good(1, False, True, finish_reason="length"), good(2, False, False), failure]
    assert summary(records) == {
        "n": 3,
        "failed": 1,
        "exact_match": 1 / 3,
        "stderr": math.sqrt(2 / 27),
        "strict_match": {"exact_match": 1 / 3, "stderr": math.sqrt(2 / 27)},
        "flexible_extract": {"exact_match": 2 / 3, "stderr": math.sqrt(2 / 27)},
        "no_strict_answer": 2,
        "finish_reasons": {"stop": 2, "length": 1},
        "mean_tokens": 2.0,
        "mean_loops": 3.0,
        "first_error": "down",
    }


def test_a_summary_leaves_out_what_was_not_told() -> None:
    assert summary([good(0, True, True), good(1, True, True, loops=None)]).keys() & {"mean_tokens", "mean_loops"} == {
        "mean_tokens"
    }
    nothing = summary([good(0, True, True, tokens=None)])
    assert not nothing.keys() & {"mean_tokens", "mean_loops", "first_error"}


def test_no_answer_at_all_has_no_score() -> None:
    result = summary([Record(id=0, prompt_hash="h", gold="1", error="down")])
    assert (result["n"], result["exact_match"], result["flexible_extract"]) == (
        0,
        None,
        {"exact_match": None, "stderr": None},
    )
    assert share([True] * 4) == {"exact_match": 1.0, "stderr": 0.0}
