"""Sampling: which tokens may be drawn, with what frequency, and that rows do not see their neighbours."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlt.exec.sampler import sample


def draw(logits, rows, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=0):
    """`rows` draws at positions 0, 1, ... from one distribution."""
    return sample(
        torch.tensor(logits, dtype=torch.float32).expand(rows, -1),
        temperature=torch.full((rows,), float(temperature)),
        top_k=torch.full((rows,), top_k),
        top_p=torch.full((rows,), float(top_p)),
        min_p=torch.full((rows,), float(min_p)),
        seed=torch.full((rows,), seed),
        position=torch.arange(rows),
    )


def frequencies(tokens, vocab):
    return torch.bincount(tokens, minlength=vocab) / len(tokens)


PROBS = [0.02, 0.4, 0.05, 0.3, 0.03, 0.2]
LOGITS = torch.tensor(PROBS).log().tolist()
ROWS = 20_000
# four standard errors of a share near one half at ROWS draws
TOLERANCE = 4 * 0.5 / ROWS**0.5


def expect(shares, **filters):
    got = frequencies(draw(LOGITS, ROWS, **filters), len(PROBS))
    assert (got - torch.tensor(shares)).abs().max() < TOLERANCE
    assert set(got.nonzero()[:, 0].tolist()) <= {i for i, share in enumerate(shares) if share}


def test_plain_sampling_follows_the_distribution():
    expect(PROBS)


def test_top_k_keeps_the_k_largest():
    expect([0, 0.4 / 0.7, 0, 0.3 / 0.7, 0, 0], top_k=2)


def test_top_p_keeps_the_token_that_crosses():
    expect([0, 0.4 / 0.9, 0, 0.3 / 0.9, 0, 0.2 / 0.9], top_p=0.75)


def test_top_p_works_on_what_top_k_left():
    # Of 0.4 and 0.3, the first alone has 0.57 of the mass.
    expect([0, 1.0, 0, 0, 0, 0], top_k=2, top_p=0.5)


def test_min_p_is_relative_to_the_largest():
    expect([0, 0.4 / 0.9, 0, 0.3 / 0.9, 0, 0.2 / 0.9], min_p=0.4)


def test_temperature_sharpens():
    squares = torch.tensor(PROBS) ** 2
    expect((squares / squares.sum()).tolist(), temperature=0.5)


def test_temperature_zero_and_tiny_take_the_largest():
    assert set(draw(LOGITS, 50, temperature=0).tolist()) == {1}
    assert set(draw(LOGITS, 50, temperature=1e-6).tolist()) == {1}


def test_impossible_tokens_are_never_drawn():
    logits = [0.0, -torch.inf, 0.0, -torch.inf]
    assert set(draw(logits, 2000).tolist()) == {0, 2}
    assert set(draw(logits, 2000, top_p=0.999).tolist()) == {0, 2}


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_a_row_does_not_depend_on_its_batch(data):
    rows = data.draw(st.integers(2, 6))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    logits = torch.randn(rows, 17, generator=generator) * 3
    column = {
        "temperature": st.sampled_from([0.0, 0.3, 1.0, 2.0]),
        "top_k": st.sampled_from([0, 1, 3]),
        "top_p": st.sampled_from([0.2, 0.9, 1.0]),
        "min_p": st.sampled_from([0.0, 0.1]),
        "seed": st.integers(0, 2**63 - 1),
        "position": st.integers(0, 10_000),
    }
    values = {name: torch.tensor([data.draw(choice) for _ in range(rows)]) for name, choice in column.items()}
    together = sample(logits, **values)
    alone = [sample(logits[i : i + 1], **{k: v[i : i + 1] for k, v in values.items()}).item() for i in range(rows)]
    assert together.tolist() == alone
