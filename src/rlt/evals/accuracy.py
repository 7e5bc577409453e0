"""Exact match on the built-in tasks, and how it depends on the loops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from rlt.depth.table import RULES
from rlt.errors import ConfigError
from rlt.evals.answers import Answerer, Asked, collect, loops_per_token
from rlt.evals.tasks import Example
from rlt_protocols.params import SamplingParams

Form = Literal["raw", "chat"]

#: Longer than any right answer with its end-of-text token.
MAX_TOKENS: Final[dict[Form, int]] = {"raw": 24, "chat": 48}
#: exit thresholds to compare: accumulated exit probabilities of the rules with a gate
GATE_THRESHOLDS: Final = (0.3, 0.5, 0.7, 0.9)
#: The rules that compare loops have scales of their own: these times the rule's default threshold,
CRITERION_FACTORS: Final = (0.1, 0.3, 1.0, 3.0, 10.0)
#: or for a count of unchanged loops, these.
STABLE_LOOPS: Final = (1.0, 2.0, 3.0, 5.0, 8.0)
#: Up to so many loops, each number of loops is tried; of more, the powers of two and the last.
ALL_LOOPS: Final = 8


@dataclass(frozen=True, slots=True)
class Score:
    """How one setting did: which examples were right (None: the question failed), and loops per output token."""

    right: tuple[bool | None, ...]
    mean_loops: float | None
    errors: tuple[str, ...] = ()
    #: every question was refused: the answerer does not take this setting
    refused: bool = False

    @property
    def exact_match(self) -> float | None:
        return share(self.right)


@dataclass(frozen=True, slots=True)
class Plan:
    """The settings to compare, and for what cannot be, the reason by result key."""

    loops: list[int]
    thresholds: list[float]
    absent: dict[str, str] = field(default_factory=dict)

    @property
    def runs(self) -> int:
        """Times that all examples are asked."""
        return 1 + len(self.loops) + len(self.thresholds)


def make_plan(answerer: Answerer, loops: Sequence[int] | None, thresholds: Sequence[float] | None) -> Plan:
    """What to compare with this answerer; None leaves a list to it. Raises `ConfigError` for what it cannot do."""
    full = answerer.loops
    if full is None:
        why = "the server does not say how many loops its model has"
        _refuse("--loops", loops, why)
        _refuse("--thresholds", thresholds, why)
        return Plan([], [], {"by_loops": why, "by_threshold": why})
    if loops is not None and max(loops) > full:
        raise ConfigError([f"--loops: {max(loops)} is more than the model's {full}"])
    if answerer.full_depth is not None:
        _refuse("--loops", None if loops is None else [m for m in loops if m < full], answerer.full_depth)
        _refuse("--thresholds", thresholds, answerer.full_depth)
        return Plan(
            [full],
            [],
            {"by_loops": f"fewer than {full}: {answerer.full_depth}"} | {"by_threshold": answerer.full_depth},
        )
    absent: dict[str, str] = {}
    if thresholds is None:
        if answerer.exit_rule is None:
            absent["by_threshold"] = "the server does not say what its exit rule is; give --thresholds"
        elif answerer.exit_rule in ("trace", "full_depth"):
            absent["by_threshold"] = f"the exit rule {answerer.exit_rule} has no threshold; --set exit.rule has others"
        else:
            thresholds = default_thresholds(answerer.exit_rule)
    return Plan(list(default_loops(full) if loops is None else loops), list(thresholds or ()), absent)


def default_loops(full: int) -> list[int]:
    """The numbers of loops to compare for a model of `full` loops."""
    if full <= ALL_LOOPS:
        return list(range(1, full + 1))
    return [*(1 << power for power in range(full.bit_length()) if 1 << power < full), full]


def default_thresholds(rule: str) -> list[float]:
    """The exit thresholds to compare under an exit rule, on its own scale."""
    kind = RULES[rule]
    if kind.threshold is None or kind.thresholds is None:
        return list(GATE_THRESHOLDS)
    if kind.thresholds[0] >= 1:
        return list(STABLE_LOOPS)
    return [kind.threshold * factor for factor in CRITERION_FACTORS]


def evaluate(
    answerer: Answerer, examples: Sequence[Example], form: Form, plan: Plan, step: Callable[[], None]
) -> dict[str, Any]:
    """The evaluation's JSON structure, without the environment; `step` is called after each answer.

    `by_loops` runs every token exactly m loops deep; `by_threshold` lets tokens exit early, up to full depth.
    """
    default = score(answerer, examples, form, SamplingParams(), step)
    absent, scores = dict(plan.absent), [default]
    by_loops: dict[str, float | None] = {}
    for m in plan.loops:
        result = score(answerer, examples, form, SamplingParams(min_loops=m, max_loops=m), step)
        if result.refused:
            _add(absent, "by_loops", f"{m}: {result.errors[0]}")
        else:
            by_loops[str(m)] = result.exact_match
            scores.append(result)
    by_threshold: dict[str, dict[str, float | None]] = {}
    for q in plan.thresholds:
        params = SamplingParams(min_loops=1, max_loops=answerer.loops, exit_threshold=q)
        result = score(answerer, examples, form, params, step)
        if result.refused:
            _add(absent, "by_threshold", f"{q:g}: {result.errors[0]}")
        else:
            by_threshold[f"{q:g}"] = {"exact_match": result.exact_match, **_loops(result)}
            scores.append(result)
    names = dict.fromkeys(example.task for example in examples)
    by_task = {name: [ok for ok, e in zip(default.right, examples, strict=True) if e.task == name] for name in names}
    errors = [error for one in scores for error in one.errors]
    return {
        "model": answerer.model,
        "tasks": {name: {"n": _answered(right), "exact_match": share(right)} for name, right in by_task.items()},
        "exact_match": default.exact_match,
        **_loops(default),
        "by_loops": by_loops,
        "by_threshold": by_threshold,
        "form": form,
        **({} if answerer.exit_rule is None else {"exit_rule": answerer.exit_rule}),
        **({"absent": absent} if absent else {}),
        **({"failed": len(errors), "first_error": errors[0]} if errors else {}),
    }


def score(
    answerer: Answerer, examples: Sequence[Example], form: Form, depth: SamplingParams, step: Callable[[], None]
) -> Score:
    """Answer all examples greedily; of `depth`, the fields about loops count."""
    params = SamplingParams(
        temperature=0.0,
        max_tokens=MAX_TOKENS[form],
        stop=("\n",) if form == "raw" else (),
        min_loops=depth.min_loops,
        max_loops=depth.max_loops,
        exit_threshold=depth.exit_threshold,
    )
    asked = [Asked(example.prompt if form == "raw" else example.chat_prompt(), params) for example in examples]
    answers = collect(answerer, asked, step)
    right = tuple(
        None if answer.error is not None else answer.reply.strip() == (e.answer if form == "raw" else e.chat_answer)
        for answer, e in zip(answers, examples, strict=True)
    )
    errors = tuple(answer.error for answer in answers if answer.error is not None)
    mean = loops_per_token([(answer.tokens, answer.loops) for answer in answers if answer.error is None])
    return Score(right, mean, errors, refused=all(answer.refused for answer in answers))


def share(right: Sequence[bool | None]) -> float | None:
    """The share of right answers among those that came; None if none came."""
    came = [ok for ok in right if ok is not None]
    return sum(came) / len(came) if came else None


def _answered(right: Sequence[bool | None]) -> int:
    return sum(ok is not None for ok in right)


def _loops(result: Score) -> dict[str, float | None]:
    return {} if result.mean_loops is None else {"mean_loops": result.mean_loops}


def _add(absent: dict[str, str], key: str, reason: str) -> None:
    absent[key] = f"{absent[key]}; {reason}" if key in absent else reason


def _refuse(option: str, values: Sequence[float] | None, why: str) -> None:
    if values:
        raise ConfigError([f"{option}: not with this model: {why}"])
