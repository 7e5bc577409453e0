from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from rlt.errors import ConfigError
from rlt.evals.gsm8k import (
    CHAT_QUESTION,
    NUMBER,
    RAW_QUESTION,
    RAW_SHOT,
    STRICT,
    Question,
    chat_prompt,
    choose,
    flexible_number,
    raw_prompt,
    read_questions,
    same_number,
    strict_number,
)

PENS = Question(0, "How many pens are in 4 boxes of 6?", "4 * 6 = <<4*6=24>>24 pens.\n#### 24", "24")
SEATS = Question(1, "Of {120} seats 45 are free. How many are taken?", "120 - 45 = 75\n#### 75", "75")
MONEY = Question(2, "What are 5 times $250?", "5 * 250 = 1250\n#### 1,250", "1250")


def written(tmp_path: Path, *lines: Any) -> Path:
    path = tmp_path / "q.jsonl"
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path


def entry(question: Question) -> dict[str, str]:
    return {"question": question.text, "answer": question.worked}


class TestReading:
    def test_reads_the_public_format(self, tmp_path: Path) -> None:
        path = written(tmp_path, entry(PENS), "", entry(SEATS), entry(MONEY))
        assert read_questions(path) == [PENS, SEATS, MONEY]

    @pytest.mark.parametrize(
        ("line", "problem"),
        [
            ("{", "line 2: Expecting property name"),
            ("[]", 'line 2: expected an object with "question" and "answer"'),
            ({"question": 1, "answer": "#### 1"}, 'line 2: "question" must be a text'),
            ({"question": "x"}, 'line 2: "answer" must be a text'),
            ("[" * 100_000, "line 2: is nested too deep"),
            ('{"x": ' + "9" * 5000 + "}", "line 2: "),
            ({"question": "\ud800", "answer": "#### 1"}, 'line 2: "question" has half of a surrogate pair'),
            ({"question": "x", "answer": "\udfff #### 1"}, 'line 2: "answer" has half of a surrogate pair'),
            ({"question": "x", "answer": "it is 3"}, 'line 2: "answer" has no #### followed by a number'),
        ],
    )
    def test_names_a_line_that_is_wrong(self, tmp_path: Path, line: Any, problem: str) -> None:
        with pytest.raises(ConfigError, match=re.escape(f"q.jsonl, {problem}")):
            read_questions(written(tmp_path, entry(PENS), line))

    def test_names_a_file_that_is_wrong(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"none: cannot be read: No such file"):
            read_questions(tmp_path / "none")
        with pytest.raises(ConfigError, match="has no questions"):
            read_questions(written(tmp_path, ""))
        (tmp_path / "q.jsonl").write_bytes(b"\xff")
        with pytest.raises(ConfigError, match="is not UTF-8 text"):
            read_questions(tmp_path / "q.jsonl")


class TestChoosing:
    def test_examples_of_the_same_file_are_not_scored(self) -> None:
        assert choose([PENS, SEATS, MONEY], None, 1, None) == ([PENS], [SEATS, MONEY])
        assert choose([PENS, SEATS, MONEY], None, 1, 1) == ([PENS], [SEATS])

    def test_examples_of_another_file_leave_all_to_score(self) -> None:
        assert choose([SEATS, MONEY], [PENS], 1, None) == ([PENS], [SEATS, MONEY])
        assert choose([SEATS], [PENS], 0, None) == ([], [SEATS])

    def test_refuses_what_cannot_be(self) -> None:
        with pytest.raises(ConfigError, match="--shots: 3 examples asked for, but --shots-data has 1 lines"):
            choose([SEATS], [PENS], 3, None)
        with pytest.raises(ConfigError, match="leave no question of --data to score"):
            choose([PENS], None, 1, None)
        with pytest.raises(ConfigError, match=r"line 2 of --data .* is also one of the worked examples"):
            choose([PENS, SEATS], [SEATS], 1, None)


class TestPrompts:
    def test_raw(self) -> None:
        assert raw_prompt(SEATS, [PENS]) == (
            "Question: How many pens are in 4 boxes of 6?\n"
            "Answer: 4 * 6 = <<4*6=24>>24 pens.\n"
            "#### 24\n"
            "\n"
            "Question: Of {120} seats 45 are free. How many are taken?\n"
            "Answer:"
        )
        assert raw_prompt(PENS, []) == "Question: How many pens are in 4 boxes of 6?\nAnswer:"

    def test_chat(self) -> None:
        ask = "\n\nWork it out step by step. Then end with one line that has only #### and the final number."
        assert chat_prompt(SEATS, [PENS]) == [
            {"role": "user", "content": PENS.text + ask},
            {"role": "assistant", "content": PENS.worked},
            {"role": "user", "content": SEATS.text + ask},
        ]

    def test_the_documents_state_prompts_and_expressions(self) -> None:
        page = (Path(__file__).parents[2] / "docs" / "evaluation.md").read_text(encoding="utf-8")
        for text in (RAW_SHOT + RAW_QUESTION, CHAT_QUESTION, STRICT, NUMBER):
            assert text in page


@pytest.mark.parametrize(
    ("reply", "strict", "flexible"),
    [
        ("So 24.\n#### 24", "24", "24"),
        ("#### 24\nBut 25?", "24", "25"),
        ("#### 1 and #### 2", "1", "2"),
        ("####  $1,250.", "1250", "1250"),
        ("####-5", "-5", "-5"),
        ("#### 0.50 dollars", "0.50", "0.50"),
        ("#### .5", ".5", ".5"),
        ("#### 12,345,678", "12345678", "12345678"),
        ("#### 1/2", None, "2"),
        ("#### 12x, #### 7", "7", "7"),
        ("#### 1.2.3", None, ".3"),
        ("#### 1,2345", None, "2345"),
        ("####\n24", None, "24"),
        ("#### **24**", None, "24"),
        ("The answer is 24.", None, "24"),
        ("He has 10-3", None, "3"),
        ("(2)-3 and -4", None, "-4"),
        ("in 3, 4", None, "4"),
        ("none", None, None),
        ("", None, None),
    ],
)
def test_extraction(reply: str, strict: str | None, flexible: str | None) -> None:
    assert (strict_number(reply), flexible_number(reply)) == (strict, flexible)


def test_numbers_are_compared_by_value() -> None:
    assert same_number("18.00", "18")
    assert same_number(".5", "0.50")
    assert not same_number("18", "-18")
    assert not same_number(None, "18")
    # As floating-point numbers these are equal.
    assert not same_number("9007199254740993", "9007199254740992")
