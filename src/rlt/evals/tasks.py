"""Text tasks with checkable answers, of which the deeper ones need more loops.

Five families: addition, subtraction, chains of assignments, boss hops and word problems. Every example exists in two
forms: a raw completion (`"Q: 345 + 278 = ?\\nA:"` answered by `"623"`) and a chat turn answered by a short sentence
(`"The answer is 623."`). No form shows its working, so the depth must come from the model, not from its output.

Everything is a function of the `random.Random` handed in. The `train` and `heldout` splits share the words and the
rules of a task, but no question is worded alike: each split has its own templates. The held-out ones join words that
all occur in the train ones; with unknown words they would measure vocabulary instead of depth.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from typing import Final, Literal

Split = Literal["train", "heldout"]
Message = dict[str, str]
QA = tuple[str, str]

# fmt: off
NAMES: Final = [
    "Ann", "Ben", "Carl", "Dora", "Emma", "Finn", "Gail", "Hugo", "Ida", "Jack", "Kate", "Liam",
    "Mia", "Nora", "Oscar", "Paul", "Rosa", "Sam", "Tina", "Una", "Vera", "Will", "Yara", "Zoe",
]
ITEMS: Final = ["apples", "books", "coins", "cards", "pens", "shells", "stamps", "stones", "eggs", "cups"]
# fmt: on
LETTERS: Final = "abcdefghijklmnopqrstuvwxyz"
SYSTEM_PROMPTS: Final = (
    "You are a helpful assistant.",
    "You are a careful assistant who answers short questions.",
    "Answer the question.",
    "Be brief and exact.",
)


@dataclass(frozen=True, slots=True)
class Example:
    """One question with the only right answer; `difficulty` counts digits, steps, hops or events.

    `follow_ups` are further (question, answer) pairs about the same facts, for later turns of a chat.
    """

    task: str
    question: str
    answer: str
    difficulty: int
    follow_ups: tuple[QA, ...] = ()

    @property
    def prompt(self) -> str:
        """The raw completion prompt; the model continues it with a space, the answer and the end-of-text token."""
        return f"Q: {self.question}\nA:"

    @property
    def chat_answer(self) -> str:
        """The whole assistant message that the chat form expects."""
        return f"The answer is {self.answer}."

    def chat_prompt(self, system: str | None = None) -> list[Message]:
        """The chat messages that ask this question, after `system` if there is one."""
        head = [] if system is None else [{"role": "system", "content": system}]
        return [*head, {"role": "user", "content": self.question}]


@dataclass(frozen=True, slots=True)
class Task:
    """A family of questions: `make(split, rng, level)`, level in 1..levels, returns the question with its answer first
    and then the follow-ups that the same facts allow."""

    name: str
    levels: int
    make: Callable[[Split, Random, int], list[QA]]


_ADDITION: Final[dict[Split, tuple[str, ...]]] = {
    "train": (
        "{a} + {b} = ?",
        "What is {a} + {b}?",
        "What is {a} plus {b}?",
        "Add {a} and {b}.",
        "Add {a} to {b}.",
        "Compute {a} + {b}.",
        "Calculate {a} plus {b}.",
        "How much is {a} + {b}?",
        "Find the sum of {a} and {b}.",
        "What do I get if I add {a} and {b}?",
        "Please compute {a} plus {b}.",
        "{a} plus {b} is what?",
        "Calculate {a} + {b}.",
        "How much is {a} plus {b}?",
        "Please add {a} and {b}.",
        "What is the sum of {a} and {b}?",
        "Compute the sum of {a} and {b}.",
        "{a} + {b} is what?",
    ),
    "heldout": (
        "Find {a} + {b}.",
        "Please compute {a} + {b}.",
        "What do I get if I compute {a} plus {b}?",
        "Calculate the sum of {a} and {b}.",
        "Please find the sum of {a} and {b}.",
        "Please add {a} to {b}.",
    ),
}
_SUBTRACTION: Final[dict[Split, tuple[str, ...]]] = {
    "train": (
        "{a} - {b} = ?",
        "What is {a} - {b}?",
        "What is {a} minus {b}?",
        "Subtract {b} from {a}.",
        "Take {b} from {a}.",
        "Compute {a} - {b}.",
        "Calculate {a} minus {b}.",
        "How much is {a} - {b}?",
        "Find the difference of {a} and {b}.",
        "What do I get if I subtract {b} from {a}?",
        "Please compute {a} minus {b}.",
        "{a} minus {b} is what?",
        "Calculate {a} - {b}.",
        "How much is {a} minus {b}?",
        "Please subtract {b} from {a}.",
        "What is the difference of {a} and {b}?",
        "Compute the difference of {a} and {b}.",
        "{a} - {b} is what?",
    ),
    "heldout": (
        "Find {a} - {b}.",
        "Please compute {a} - {b}.",
        "What do I get if I compute {a} minus {b}?",
        "Calculate the difference of {a} and {b}.",
        "Please find the difference of {a} and {b}.",
        "Please find {a} - {b}.",
    ),
}


def _number(rng: Random, digits: int) -> int:
    return rng.randrange(10 ** (digits - 1) if digits > 1 else 0, 10**digits)


def _operands(rng: Random, digits: int) -> tuple[int, int]:
    """Two numbers in random order, one of exactly `digits` digits and one of at most that many."""
    pair = [_number(rng, digits), _number(rng, rng.choice((digits, digits, rng.randint(1, digits))))]
    rng.shuffle(pair)
    return pair[0], pair[1]


def _addition(split: Split, rng: Random, level: int) -> list[QA]:
    a, b = _operands(rng, level)
    return [(rng.choice(_ADDITION[split]).format(a=a, b=b), str(a + b))]


def _subtraction(split: Split, rng: Random, level: int) -> list[QA]:
    a, b = sorted(_operands(rng, level), reverse=True)
    return [(rng.choice(_SUBTRACTION[split]).format(a=a, b=b), str(a - b))]


_CHAIN_HEADS: Final[dict[Split, tuple[str, ...]]] = {
    "train": ("", "", "", "Let ", "Given ", "We know that ", "Let us say that ", "Suppose that "),
    "heldout": ("", "Suppose ", "Let us say ", "Given that "),
}
_CHAIN_ASKS: Final[dict[Split, tuple[str, ...]]] = {
    "train": (
        "What is {v}?",
        "{v} = ?",
        "How much is {v}?",
        "What is the value of {v}?",
        "Find {v}.",
        "Find the value of {v}.",
        "Compute {v}.",
        "Please compute {v}.",
        "Give {v}.",
        "Please give {v}.",
    ),
    "heldout": ("Give the value of {v}.", "Please find {v}.", "Compute the value of {v}."),
}
_CHAIN_SIGNS: Final = (("=", "+", "-"), ("=", "+", "-"), ("is", "plus", "minus"), ("=", "plus", "minus"))
"""(equals, plus, minus)"""


def _chains(split: Split, rng: Random, level: int) -> list[QA]:
    """A variable `level` steps after a number; every assignment builds on the one before."""
    equals, plus, minus = rng.choice(_CHAIN_SIGNS)
    names = rng.sample(LETTERS, level + 1)
    values = [rng.randint(1, 15)]
    lines = [f"{names[0]} {equals} {values[0]}"]
    for source, name in pairwise(names):
        delta = rng.choice((0, 1, 1, 1, -1, -1, -1)) * rng.randint(1, 9)
        if values[-1] + delta < 0:
            delta = -delta
        values.append(values[-1] + delta)
        change = "" if delta == 0 else f" {plus if delta > 0 else minus} {abs(delta)}"
        lines.append(f"{name} {equals} {source}{change}")
    joint, end = rng.choice((("; ", ". "), (", ", ". "), (". ", ". "), ("\n", "\n")))
    facts = rng.choice(_CHAIN_HEADS[split]) + joint.join(lines) + end
    asked = [level, *rng.sample(range(level + 1), level + 1)]
    (ask, answer), *more = [(rng.choice(_CHAIN_ASKS[split]).format(v=names[i]), str(values[i])) for i in asked]
    return [(facts + ask, answer), *more]


_HOP_HEADS: Final[dict[Split, tuple[str, ...]]] = {
    "train": ("", "", "Here are some facts. ", "In an office: ", "We know some facts of an office. "),
    "heldout": ("", "Here are some facts of an office. ", "We know some facts. "),
}
_HOP_FACTS: Final = ("{x}'s boss is {y}.", "The boss of {x} is {y}.", "{x} works for {y}.")
_HOP_ASKS: Final[dict[Split, tuple[str, ...]]] = {
    "train": (
        "Who is {who}?",
        "What is the name of {who}?",
        "Name {who}.",
        "Find {who}.",
        "Tell me who {who} is.",
        "Tell me the name of {who}.",
        "Please find {who}.",
        "Please tell me who {who} is.",
        "Please name {who}.",
        "Find the name of {who}.",
        "Please tell me the name of {who}.",
    ),
    "heldout": ("Find who {who} is.", "Please find the name of {who}.", "Please find who {who} is."),
}


def _hops(split: Split, rng: Random, level: int) -> list[QA]:
    """Who is `level` steps up from somebody, given the boss of each person in random order."""
    length = level + rng.randint(0, 2)
    people = rng.sample(NAMES, length + 1 + rng.randint(0, 3))
    boss = {people[i]: people[i + 1] for i in range(length)}
    for name in people[length + 1 :]:
        boss[name] = rng.choice(people[: length + 1])
    form = rng.choice((*_HOP_FACTS, None))
    facts = [(form or rng.choice(_HOP_FACTS)).format(x=x, y=y) for x, y in boss.items()]
    rng.shuffle(facts)
    head = rng.choice(_HOP_HEADS[split]) + " ".join(facts) + " "

    def ask(start: int, hops: int) -> QA:
        outer = rng.choice((0, hops, rng.randint(0, hops)))
        who = "the boss of " * outer + people[start] + "'s boss" * (hops - outer)
        return rng.choice(_HOP_ASKS[split]).format(who=who), people[start + hops]

    question, answer = ask(rng.randint(0, length - level), level)
    more = [ask(rng.randint(0, length - hops), hops) for hops in rng.sample(range(1, level + 1), level)]
    return [(head + question, answer), *more]


_STORY_STARTS: Final[dict[Split, tuple[str, ...]]] = {
    "train": (
        "{x} has {n} {items}.",
        "{x} starts with {n} {items}.",
        "At first {x} has {n} {items}.",
        "At first {x} starts with {n} {items}.",
    ),
    "heldout": ("{x} at first has {n} {items}.", "{x} has {n} {items} at first."),
}
_STORY_LINKS: Final[dict[Split, tuple[str, ...]]] = {
    "train": ("", "", "Then ", "After that ", "Later "),
    "heldout": ("", "Later ", "Then "),
}
_STORY_GAINS: Final = ("{x} buys {n} more.", "{x} finds {n} more {items}.", "{y} gives {n} {items} to {x}.")
_STORY_LOSSES: Final = ("{x} loses {n}.", "{x} sells {n} {items}.", "{x} gives {n} {items} to {y}.")
_STORY_ASKS: Final[dict[Split, tuple[str, ...]]] = {
    "train": (
        "How many {items} does {x} have now?",
        "How many {items} does {x} have at the end?",
        "How many does {x} have left?",
        "How many does {x} have now?",
        "Find how many {items} {x} has.",
        "Find how many {items} {x} has at the end.",
        "How many {items} does {x} have left?",
        "How many does {x} have at the end?",
        "Find how many {items} {x} has now.",
    ),
    "heldout": (
        "Find how many {items} {x} has left.",
        "Find how many {x} has at the end.",
        "How many {items} does {x} now have?",
    ),
}


def _word_problems(split: Split, rng: Random, level: int) -> list[QA]:
    """How many things somebody has after `level` events, told in sentences."""
    x, y = rng.sample(NAMES, 2)
    items = rng.choice(ITEMS)
    total = rng.randint(3, 50)
    sentences = [rng.choice(_STORY_STARTS[split]).format(x=x, n=total, items=items)]
    for _ in range(level):
        n = rng.randint(2, 12)
        gain = n > total or rng.random() < 0.5
        total += n if gain else -n
        event = rng.choice(_STORY_GAINS if gain else _STORY_LOSSES).format(x=x, y=y, n=n, items=items)
        sentences.append(rng.choice(_STORY_LINKS[split]) + event)
    sentences.append(rng.choice(_STORY_ASKS[split]).format(x=x, items=items))
    return [(" ".join(sentences), str(total))]


TASKS: Final[dict[str, Task]] = {
    task.name: task
    for task in (
        Task("addition", 4, _addition),
        Task("subtraction", 4, _subtraction),
        Task("chains", 6, _chains),
        Task("hops", 4, _hops),
        Task("word_problems", 3, _word_problems),
    )
}


def sample(task: str, split: Split, rng: Random, hardest: int | None = None) -> Example:
    """One example of `task`, its level drawn evenly from 1 to the task's last one (or to `hardest`, if lower)."""
    family = TASKS[task]
    level = rng.randint(1, min(family.levels, hardest or family.levels))
    (question, answer), *more = family.make(split, rng, level)
    return Example(task, question, answer, level, tuple(more))


def examples(split: Split, per_task: int, seed: int) -> Iterator[Example]:
    """`per_task` examples of every task; the same arguments always give the same examples."""
    for task in TASKS:
        rng = Random(f"{split}/{task}/{seed}")
        for _ in range(per_task):
            yield sample(task, split, rng)
