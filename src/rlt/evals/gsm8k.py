"""GSM8K: questions from a file in the public format, the prompts made of them, and the numbers in answers.

A pure part of `rlt eval gsm8k`; docs/evaluation.md states prompts and expressions for people.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Final

from rlt.errors import ConfigError
from rlt.evals.answers import Prompt

#: what one worked example, and then the question, become in the raw form
RAW_QUESTION: Final = "Question: {question}\nAnswer:"
RAW_SHOT: Final = RAW_QUESTION + " {answer}\n\n"
#: ends a raw answer: the model has begun to make up the next question
RAW_STOP: Final = ("\nQuestion:",)
#: what a question becomes in the chat form, where worked examples are earlier turns
CHAT_QUESTION: Final = (
    "{question}\n\nWork it out step by step. Then end with one line that has only #### and the final number."
)

#: digits, perhaps in groups of three, perhaps with decimals
_DIGITS: Final = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+"
#: A minus right after a word, a number or a bracket takes away and is no sign.
NUMBER: Final = rf"(?:(?<![\w)])-)?\$?(?:{_DIGITS})"
#: The number must end there: 1/2, 3.4.5 and 12x are none.
STRICT: Final = rf"####[ \t]*({NUMBER})(?![\w/]|[.,][0-9])"

_STRICT = re.compile(STRICT)
_NUMBER = re.compile(NUMBER)


@dataclass(frozen=True, slots=True)
class Question:
    """A line of the file: its number from 0, the question, the worked answer, and the number that is right."""

    id: int
    text: str
    worked: str
    gold: str


def read_questions(path: Path) -> list[Question]:
    """The questions of a JSON-lines file with `question` and `answer` (worked, and at its end `#### N`) in each line.

    Empty lines are passed over. Raises `ConfigError` naming file and line.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise ConfigError([f"{path}: cannot be read: {error.strerror}"]) from error
    except UnicodeDecodeError as error:
        raise ConfigError([f"{path}: is not UTF-8 text"]) from error
    questions: list[Question] = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                questions.append(_question(len(questions), json.loads(line)))
            except ValueError as error:
                raise ConfigError([f"{path}, line {number}: {error}"]) from error
            except RecursionError as error:
                raise ConfigError([f"{path}, line {number}: is nested too deep"]) from error
    if not questions:
        raise ConfigError([f"{path}: has no questions"])
    return questions


def _question(index: int, entry: object) -> Question:
    if not isinstance(entry, dict):
        raise ValueError('expected an object with "question" and "answer"')
    for key in ("question", "answer"):
        if not isinstance(entry.get(key), str):
            raise ValueError(f'"{key}" must be a text')
        if any("\ud800" <= character <= "\udfff" for character in entry[key]):
            raise ValueError(f'"{key}" has half of a surrogate pair, which is no character')
    answer = str(entry["answer"])
    gold = strict_number(answer)
    if gold is None:
        raise ValueError('"answer" has no #### followed by a number')
    return Question(index, str(entry["question"]), answer, gold)


def choose(
    data: Sequence[Question], shots_data: Sequence[Question] | None, shots: int, limit: int | None
) -> tuple[list[Question], list[Question]]:
    """The worked examples, and the questions to score.

    The examples are the first `shots` of `shots_data`, or of `data` itself, which then does not score them. `limit`
    is the number of questions to score. Raises `ConfigError` when there are too few, or when one would be both.
    """
    source = data if shots_data is None else shots_data
    name = "--data" if shots_data is None else "--shots-data"
    if len(source) < shots:
        raise ConfigError([f"--shots: {shots} examples asked for, but {name} has {len(source)} lines"])
    examples = list(source[:shots])
    questions = list(data[shots:] if shots_data is None else data)
    if not questions:
        raise ConfigError([f"--shots: {shots} examples leave no question of --data to score; give --shots-data"])
    shown = {example.text for example in examples}
    for question in questions:
        if question.text in shown:
            where = f"line {question.id + 1} of --data (empty ones not counted)"
            raise ConfigError([f"{where} is also one of the worked examples, which give its answer away"])
    return examples, questions[:limit]


def raw_prompt(question: Question, shots: Sequence[Question]) -> str:
    """The text whose continuation is the answer."""
    examples = "".join(RAW_SHOT.format(question=shot.text, answer=shot.worked) for shot in shots)
    return examples + RAW_QUESTION.format(question=question.text)


def chat_prompt(question: Question, shots: Sequence[Question]) -> Prompt:
    """The conversation whose next message is the answer."""
    messages: list[dict[str, str]] = []
    for shot in shots:
        messages.append({"role": "user", "content": CHAT_QUESTION.format(question=shot.text)})
        messages.append({"role": "assistant", "content": shot.worked})
    return [*messages, {"role": "user", "content": CHAT_QUESTION.format(question=question.text)}]


def strict_number(reply: str) -> str | None:
    """The number after the first `####` that one follows, in plain digits; None where there is none."""
    return _plain(match.group(1)) if (match := _STRICT.search(reply)) else None


def flexible_number(reply: str) -> str | None:
    """The last number of a reply, in plain digits; None where there is none."""
    numbers = _NUMBER.findall(reply)
    return _plain(numbers[-1]) if numbers else None


def same_number(extracted: str | None, gold: str) -> bool:
    """Whether two plain numbers have the same value: 18 and 18.00 do."""
    return extracted is not None and Decimal(extracted) == Decimal(gold)


def _plain(number: str) -> str:
    return number.replace(",", "").replace("$", "")
