"""What benchmarks send: random token ids of a fixed length, or the task questions as text."""

from __future__ import annotations

from random import Random

from rlt.evals.tasks import examples

#: Token ids of random prompts: in every vocabulary, past the special ids at its start.
RANDOM_IDS = range(3, 250)


def random_prompts(count: int, tokens: int, seed: int) -> list[list[int]]:
    """`count` prompts of `tokens` random token ids."""
    rng = Random(seed)
    return [rng.choices(RANDOM_IDS, k=tokens) for _ in range(count)]


def task_prompts(count: int, seed: int) -> list[str]:
    """`count` held-out questions in random order, in their raw completion form."""
    # Enough of every task that any `count` of the shuffled ones is a fair mix.
    prompts = [example.prompt for example in examples("heldout", count, seed)]
    Random(seed).shuffle(prompts)
    return prompts[:count]
