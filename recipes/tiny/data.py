"""Training batches (rows packed with documents of the train split) and padded evaluation batches."""

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

import numpy as np
import torch
from dialects import Dialect, Opener
from tokenizer import Encoder
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


def document(examples: list[Example], rng: Random, dialect: Dialect) -> list[Piece]:
    """One raw question, or one chat of a few turns, with its answers."""
    if len(examples) == 1 and rng.random() < 0.5:
        return raw_form(examples[0], dialect)
    turns: list[tuple[str, str]] = []
    for e in examples:
        turns.append((e.question, e.chat_answer))
        # Questions about facts told earlier: they teach the steps that the deep questions are made of.
        turns += [(q, Example("", q, a, 0).chat_answer) for q, a in e.follow_ups[: rng.randint(0, 4)]]
    system = rng.choice(SYSTEM_PROMPTS) if rng.random() < 0.4 else None
    return chat(turns, system, rng, dialect)


def small_talk(rng: Random, dialect: Dialect) -> list[Piece]:
    """A greeting or a question about the model itself."""
    return chat([rng.choice(SMALL_TALK)], None, rng, dialect)


def chat(turns: list[tuple[str, str]], system: str | None, rng: Random, dialect: Dialect) -> list[Piece]:
    """A whole chat of (question, answer) turns."""
    pieces = [Piece(dialect.opening(system), False)]
    for question, answer in turns:
        pieces += [*turn(question, answer, dialect, draw_opener(rng, dialect)), Piece(dialect.after_turn, False)]
    return [*pieces, Piece(dialect.end_of_text, False)]


def draw_opener(rng: Random, dialect: Dialect) -> Opener:
    """One of the ways to begin an answer; draws nothing where there is only one."""
    return rng.choice(dialect.openers) if len(dialect.openers) > 1 else dialect.openers[0]


def turn(question: str, answer: str, dialect: Dialect, opener: Opener) -> list[Piece]:
    return [Piece(dialect.question(question, opener), False), Piece(opener.answer + answer + dialect.end_of_turn, True)]


def raw_form(example: Example, dialect: Dialect) -> list[Piece]:
    return [Piece(dialect.bos + example.prompt, False), Piece(f" {example.answer}{dialect.end_of_text}", True)]


def chat_form(example: Example, system: str | None, dialect: Dialect, opener: Opener) -> list[Piece]:
    return [Piece(dialect.opening(system), False), *turn(example.question, example.chat_answer, dialect, opener)]


def piece_ids(piece: Piece, encoder: Encoder) -> list[int]:
    """The ids of a piece: an answer goes on where the prompt ended, everything else is text of its own."""
    return encoder(piece.text, continues=piece.answer)


@dataclass(frozen=True, slots=True)
class Stream(Dataset[Batch]):
    """Batch `i` of a training run; a function of the seed and of `i` alone, so workers can make any of them."""

    encoder: Encoder
    dialect: Dialect
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
            for piece in self._document(rng, growth):
                ids = piece_ids(piece, self.encoder)
                row_tokens += ids
                row_answer += [piece.answer] * len(ids)
            # Every row begins with a new document, as a request does; the end of its last one is cut off.
            if len(row_tokens) > width:
                tokens[row], answer[row] = row_tokens[: width + 1], row_answer[: width + 1]
                row, row_tokens, row_answer = row + 1, [], []
        return Batch(torch.from_numpy(tokens), torch.from_numpy(answer))

    def _document(self, rng: Random, growth: float) -> list[Piece]:
        if rng.random() < SMALL_TALK_SHARE:
            return small_talk(rng, self.dialect)
        tasks = rng.choices(list(TASK_WEIGHTS), list(TASK_WEIGHTS.values()), k=rng.choice((1, 1, 1, 1, 2, 3)))
        drawn = [sample(task, "train", rng, 2 + math.floor(growth * (TASKS[task].levels - 1))) for task in tasks]
        return document(drawn, rng, self.dialect)


def stream(dataset: Stream, workers: int) -> Iterator[Batch]:
    """The batches in order, made ahead by `workers` processes."""
    return iter(DataLoader(dataset, batch_size=None, num_workers=workers, prefetch_factor=8 if workers else None))


def pad(documents: list[list[Piece]], encoder: Encoder) -> Batch:
    """One evaluation batch, padded on the right (attention is causal, so padding changes nothing)."""
    rows = [[(piece_ids(p, encoder), p.answer) for p in pieces] for pieces in documents]
    width = max(sum(len(ids) for ids, _ in row) for row in rows)
    tokens = torch.zeros((len(rows), width), dtype=torch.long)
    answer = torch.zeros((len(rows), width), dtype=torch.bool)
    for i, row in enumerate(rows):
        at = 0
        for ids, is_answer in row:
            tokens[i, at : at + len(ids)] = torch.tensor(ids)
            answer[i, at : at + len(ids)] = is_answer
            at += len(ids)
    return Batch(tokens, answer)
