"""Training batches (rows packed with documents of the train split) and padded evaluation batches."""

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

import numpy as np
import torch
from tokenizer import END_OF_TEXT, IM_END, SPECIALS, chat_text
from tokenizers import Tokenizer
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from rlt.evals.tasks import SYSTEM_PROMPTS, TASKS, Example, sample

# The workers are the parallelism.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# Longer rows in every sixth batch: several turns, many questions and far positions are then nothing new.
ROW_TOKENS = (256, 256, 256, 256, 256, 2048)
# Hard to learn families come more often.
TASK_WEIGHTS = {"addition": 2, "subtraction": 2, "chains": 3, "hops": 3, "word_problems": 3}
FULL_LEVELS_AFTER = 0.15
"""Share of the training after which all levels are drawn; before, the hardest level grows from 2."""


SMALL_TALK_SHARE = 0.01
SMALL_TALK = (
    ("Hello", "Hello! Ask me a small question."),
    ("Hi", "Hello! Ask me a small question."),
    ("Hello!", "Hello! Ask me a small question."),
    ("Hi!", "Hello! Ask me a small question."),
    ("How are you?", "I am fine, thank you. Ask me a small question."),
    ("Who are you?", "I am a tiny looped model. I think in loops before I write."),
    ("What are you?", "I am a tiny looped model. I think in loops before I write."),
    ("What can you do?", "I add and subtract, follow assignments, count things and know who works for whom."),
    ("Help", "I add and subtract, follow assignments, count things and know who works for whom."),
    ("Thank you!", "You are welcome."),
    ("Thanks", "You are welcome."),
)


class Batch(NamedTuple):
    """Tokens [B, S] and the mask [B, S] of tokens that belong to an answer (its end token included)."""

    tokens: Tensor
    answer: Tensor


class Piece(NamedTuple):
    """A text that is encoded on its own, as the server encodes a prompt before the answer exists."""

    text: str
    answer: bool


def document(examples: list[Example], rng: Random) -> list[Piece]:
    """One raw question, or one chat of a few turns, with its answers."""
    if len(examples) == 1 and rng.random() < 0.5:
        return raw_form(examples[0])
    turns: list[tuple[str, str]] = []
    for e in examples:
        turns.append((e.question, e.answer))
        # Questions about facts told earlier: they teach the steps that the deep questions are made of.
        turns += e.follow_ups[: rng.randint(0, 4)]
    system = rng.choice(SYSTEM_PROMPTS) if rng.random() < 0.4 else None
    pieces: list[Piece] = []
    for question, answer in turns:
        pieces += [*chat_form(Example("", question, answer, 0), system), Piece("\n", False)]
        system = None
    return [*pieces, Piece(SPECIALS[END_OF_TEXT], False)]


def small_talk(rng: Random) -> list[Piece]:
    """A greeting or a question about the model itself."""
    said, reply = rng.choice(SMALL_TALK)
    prompt = chat_text([{"role": "user", "content": said}])
    return [Piece(prompt, False), Piece(reply + SPECIALS[IM_END], True), Piece("\n" + SPECIALS[END_OF_TEXT], False)]


def raw_form(example: Example) -> list[Piece]:
    return [Piece(example.prompt, False), Piece(f" {example.answer}{SPECIALS[END_OF_TEXT]}", True)]


def chat_form(example: Example, system: str | None) -> list[Piece]:
    prompt = chat_text(example.chat_prompt(system))
    return [Piece(prompt, False), Piece(example.chat_answer + SPECIALS[IM_END], True)]


@dataclass(frozen=True, slots=True)
class Stream(Dataset[Batch]):
    """Batch `i` of a training run; a function of the seed and of `i` alone, so workers can make any of them."""

    tokenizer: Tokenizer
    seed: int
    steps: int
    batch_tokens: int

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, index: int) -> Batch:
        rng = Random(f"train/{self.seed}/{index}")
        width = ROW_TOKENS[index % len(ROW_TOKENS)]
        rows = self.batch_tokens // width
        growth = index / (FULL_LEVELS_AFTER * self.steps)
        tokens = np.empty((rows, width + 1), dtype=np.int64)
        answer = np.empty((rows, width + 1), dtype=bool)
        row_tokens: list[int] = []
        row_answer: list[bool] = []
        row = 0
        while row < rows:
            documents = [self._document(rng, growth) for _ in range(64)]
            encodings = iter(self.tokenizer.encode_batch_fast([p.text for pieces in documents for p in pieces]))
            for pieces in documents:
                for piece in pieces:
                    ids = next(encodings).ids
                    row_tokens += ids
                    row_answer += [piece.answer] * len(ids)
                # Every row begins with a new document, as a request does; the end of its last one is cut off.
                if len(row_tokens) > width and row < rows:
                    tokens[row], answer[row] = row_tokens[: width + 1], row_answer[: width + 1]
                    row, row_tokens, row_answer = row + 1, [], []
        return Batch(torch.from_numpy(tokens), torch.from_numpy(answer))

    def _document(self, rng: Random, growth: float) -> list[Piece]:
        if rng.random() < SMALL_TALK_SHARE:
            return small_talk(rng)
        tasks = rng.choices(list(TASK_WEIGHTS), list(TASK_WEIGHTS.values()), k=rng.choice((1, 1, 1, 1, 2, 3)))
        drawn = [sample(task, "train", rng, 2 + math.floor(growth * (TASKS[task].levels - 1))) for task in tasks]
        return document(drawn, rng)


def stream(dataset: Stream, workers: int) -> Iterator[Batch]:
    """The batches in order, made ahead by `workers` processes."""
    return iter(DataLoader(dataset, batch_size=None, num_workers=workers, prefetch_factor=8 if workers else None))


def pad(documents: list[list[Piece]], tokenizer: Tokenizer) -> Batch:
    """One evaluation batch, padded on the right (attention is causal, so padding changes nothing)."""
    rows = [[(tokenizer.encode(p.text).ids, p.answer) for p in pieces] for pieces in documents]
    width = max(sum(len(ids) for ids, _ in row) for row in rows)
    tokens = torch.full((len(rows), width), END_OF_TEXT, dtype=torch.long)
    answer = torch.zeros((len(rows), width), dtype=torch.bool)
    for i, row in enumerate(rows):
        at = 0
        for ids, is_answer in row:
            tokens[i, at : at + len(ids)] = torch.tensor(ids)
            answer[i, at : at + len(ids)] = is_answer
            at += len(ids)
    return Batch(tokens, answer)
