"""Asking the questions of GSM8K, those that have no answer yet, and summing up."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from rlt.errors import ConfigError
from rlt.evals import gsm8k
from rlt.evals.answers import Answer, Answerer, Asked, Prompt, loops_per_token
from rlt.evals.gsm8k import Question
from rlt.evals.records import Record, RecordFile, digest
from rlt_protocols.params import SamplingParams

Form = Literal["raw", "chat"]


@dataclass(frozen=True, slots=True)
class Exam:
    """What is asked and how. `params` are those of each question; with a temperature, question `i` has seed
    `params.seed + i`."""

    form: Form
    shots: Sequence[Question]
    questions: Sequence[Question]
    params: SamplingParams
    thinking: bool | None = None

    def prompt(self, question: Question) -> Prompt:
        make = gsm8k.chat_prompt if self.form == "chat" else gsm8k.raw_prompt
        return make(question, self.shots)

    def asked(self, question: Question) -> Asked:
        params, seed = self.params, self.params.seed
        if seed is not None:
            params = msgspec.structs.replace(params, seed=seed + question.id)
        return Asked(self.prompt(question), params)

    def settings(self, answerer: Answerer) -> dict[str, Any]:
        """Everything that a question's result depends on, beside the question, as JSON values."""
        defaults = msgspec.to_builtins(SamplingParams())
        params = msgspec.to_builtins(self.params)
        chat = self.form == "chat"
        return {
            "model": answerer.model,
            "form": self.form,
            "prompt": gsm8k.CHAT_QUESTION if chat else gsm8k.RAW_SHOT + gsm8k.RAW_QUESTION,
            "thinking": self.thinking,
            "shots": len(self.shots),
            "shots_hash": digest([[shot.text, shot.worked] for shot in self.shots]),
            "strict": gsm8k.STRICT,
            "flexible": gsm8k.NUMBER,
            **{name: value for name, value in params.items() if value != defaults[name]},
            **answerer.settings,
        }


def run(answerer: Answerer, exam: Exam, file: RecordFile, step: Callable[[], None]) -> list[Record]:
    """The records of all questions, those that the file lacks or that failed asked now; `step` after each of them.

    Raises `ConfigError` if the file has a record of another question under the same number.
    """
    check(exam, file)
    left = unanswered(exam, file)
    for index, answer in answerer.answers([exam.asked(question) for question in left]):
        question = left[index]
        file.add(score(question, digest(exam.prompt(question)), answer))
        step()
    return [file.records[question.id] for question in exam.questions]


def unanswered(exam: Exam, file: RecordFile) -> list[Question]:
    """The questions that have no record, or one of a failure."""
    done = {record.id for record in file.records.values() if record.error is None}
    return [question for question in exam.questions if question.id not in done]


def check(exam: Exam, file: RecordFile) -> None:
    """Raise `ConfigError` if a record is about another question than the exam's of that number."""
    for question in exam.questions:
        record = file.records.get(question.id)
        if record is not None and record.prompt_hash != digest(exam.prompt(question)):
            raise ConfigError(
                [
                    f"--record: has another question as number {question.id}; --data is not the file that it was "
                    "made with. Give that one, or another record"
                ]
            )


def score(question: Question, prompt_hash: str, answer: Answer) -> Record:
    """The record of an answer."""
    if answer.error is not None:
        return Record(id=question.id, prompt_hash=prompt_hash, gold=question.gold, error=answer.error)
    strict, flexible = gsm8k.strict_number(answer.reply), gsm8k.flexible_number(answer.reply)
    mean = loops_per_token([(answer.tokens, answer.loops)])
    return Record(
        id=question.id,
        prompt_hash=prompt_hash,
        gold=question.gold,
        text=answer.text,
        reasoning=answer.reasoning,
        strict=strict,
        strict_correct=gsm8k.same_number(strict, question.gold),
        flexible=flexible,
        flexible_correct=gsm8k.same_number(flexible, question.gold),
        tokens=answer.tokens,
        loops=answer.loops,
        mean_loops=None if mean is None else round(mean, 4),
        finish_reason=answer.finish_reason,
    )


def summary(records: Sequence[Record]) -> dict[str, Any]:
    """Scores over the questions that were answered; null scores if none was. What no answer tells is left out."""
    good = [record for record in records if record.error is None]
    errors = [record.error for record in records if record.error is not None]
    strict = share([record.strict_correct for record in good])
    result: dict[str, Any] = {
        "n": len(good),
        "failed": len(errors),
        **strict,
        "strict_match": strict,
        "flexible_extract": share([record.flexible_correct for record in good]),
        "no_strict_answer": len([record for record in good if record.strict is None]),
        "finish_reasons": dict(Counter(str(record.finish_reason) for record in good)),
    }
    tokens = [record.tokens for record in good if record.tokens is not None]
    if tokens and len(tokens) == len(good):
        result["mean_tokens"] = sum(tokens) / len(tokens)
    mean = loops_per_token([(record.tokens, record.loops) for record in good])
    if mean is not None:
        result["mean_loops"] = mean
    if errors:
        result["first_error"] = errors[0]
    return result


def share(right: Sequence[bool]) -> dict[str, float | None]:
    """The share of right answers with its binomial standard error, sqrt(p (1 - p) / n)."""
    if not right:
        return {"exact_match": None, "stderr": None}
    p = sum(right) / len(right)
    return {"exact_match": p, "stderr": math.sqrt(p * (1 - p) / len(right))}
