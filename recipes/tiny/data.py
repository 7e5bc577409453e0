"""Training batches (rows packed with documents of the train split) and padded evaluation batches."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

import numpy as np
import torch
from rlt.evals.tasks import SYSTEM_PROMPTS, TASKS, Example, sample
from tokenizers import Tokenizer
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from tokenizer import END_OF_TEXT, SPECIALS, chat_text

# Longer rows in every fourth batch: several turns, many questions and far positions are then nothing new.
ROW_TOKENS = (256, 256, 256, 1024)
# Hard to learn families come more often.
TASK_WEIGHTS = {"addition": 2, "subtraction": 2, "chains": 3, "hops": 3, "word_problems": 3}
FULL_LEVELS_AFTER = 0.15
"""Share of the training after which all levels are drawn; before, the hardest level grows from 2."""


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
    system = rng.choice(SYSTEM_PROMPTS) if rng.random() < 0.4 else None
    pieces = chat_form(examples[0], system)
    for example in examples[1:]:
        pieces += [Piece("\n" + chat_text(example.chat_prompt()), False), Piece(_chat_answer(example), True)]
    return [*pieces, Piece("\n" + SPECIALS[END_OF_TEXT], False)]


def raw_form(example: Example) -> list[Piece]:
    return [Piece(example.prompt, False), Piece(f" {example.answer}{SPECIALS[0]}", True)]


def chat_form(example: Example, system: str | None) -> list[Piece]:
    return [Piece(chat_text(example.chat_prompt(system)), False), Piece(_chat_answer(example), True)]


def _chat_answer(example: Example) -> str:
    return example.chat_answer + SPECIALS[2]


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
        need = self.batch_tokens + width
        ramp = index / (FULL_LEVELS_AFTER * self.steps)
        names, weights = zip(*TASK_WEIGHTS.items(), strict=True)
        tokens: list[int] = []
        answer: list[bool] = []
        while len(tokens) < need:
            documents: list[list[Piece]] = []
            for _ in range(64):
                turns = rng.choice((1, 1, 1, 1, 2, 3))
                drawn = [
                    sample(task, "train", rng, 2 + math.floor(ramp * (TASKS[task].levels - 1)))
                    for task in rng.choices(names, weights, k=turns)
                ]
                documents.append(document(drawn, rng))
            pieces = [piece for pieces in documents for piece in pieces]
            for piece, encoding in zip(
                pieces, self.tokenizer.encode_batch_fast([p.text for p in pieces]), strict=True
            ):
                tokens += encoding.ids
                answer += [piece.answer] * len(encoding.ids)
        # A document cut by the end of a row goes on in the next one as text without its question: harmless for
        # free text, but not for answers, which are therefore not learned after such a cut.
        ids = np.array(tokens[: self.batch_tokens], dtype=np.int64).reshape(-1, width)
        mask = np.array(answer[: self.batch_tokens], dtype=bool).reshape(-1, width)
        starts = np.cumsum(ids == END_OF_TEXT, axis=1) - (ids == END_OF_TEXT)
        mask[1:] &= starts[1:] > 0
        return Batch(torch.from_numpy(ids), torch.from_numpy(mask))


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
