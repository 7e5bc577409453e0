"""The sampling kernels against the sampler: the same token for the same numbers."""

from __future__ import annotations

import pytest
import torch

from kernels.places import Place
from rlt.exec import sampler
from rlt.kernels.sampling import SampleState, sample, sample_workspace

SLOTS = 40


def new_state(place: Place, *, seed: int = 0, **values: list[float]) -> SampleState:
    """Settings of slots 0, 1, ...: greedy and without filters but for `values`."""
    draw = torch.Generator().manual_seed(seed)
    state = SampleState(
        temperature=torch.zeros(SLOTS),
        top_p=torch.ones(SLOTS),
        min_p=torch.zeros(SLOTS),
        top_k=torch.zeros(SLOTS, dtype=torch.int64),
        seed=torch.randint(-(2**62), 2**62, (SLOTS,), generator=draw),
        position=torch.randint(0, 2**40, (SLOTS,), generator=draw),
        generated=torch.arange(SLOTS) % 2,
        min_tokens=torch.zeros(SLOTS, dtype=torch.int64),
        end_ids=torch.full((SLOTS, 3), -1),
    )
    for name, numbers in values.items():
        tensor: torch.Tensor = getattr(state, name)
        tensor[: len(numbers)] = torch.tensor(numbers, dtype=tensor.dtype)
    return SampleState(*(tensor.to(place.device) for tensor in state))


def wanted_tokens(logits: torch.Tensor, slots: torch.Tensor, state: SampleState) -> torch.Tensor:
    return sampler.sample(
        logits,
        temperature=state.temperature[slots],
        top_k=state.top_k[slots],
        top_p=state.top_p[slots],
        min_p=state.min_p[slots],
        seed=state.seed[slots],
        position=state.position[slots] + (state.generated[slots] > 0).long(),
    )


def run(
    place: Place, logits: torch.Tensor, slots: torch.Tensor, state: SampleState, known: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    rows = len(slots)
    tokens = torch.full((rows,), -7, device=place.device)
    finite = torch.ones(rows, dtype=torch.bool, device=place.device)
    workspace = sample_workspace(rows=rows, vocab=logits.shape[1], device=place.device)
    # The interpreter likes few passes.
    ways = 256 if place.interpreted else 8
    known = logits.shape[1] if known is None else known
    sample(logits, slots, state, tokens, finite, workspace, known=known, ways=ways)
    return tokens, finite


def logits_of(place: Place, rows: int, vocab: int, seed: int, *, ties: bool = False) -> torch.Tensor:
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3
    return ((logits * 2).round() / 2 if ties else logits).to(place.device)


@pytest.mark.parametrize("vocab", [5, 1024, 2500])
def test_greedy(place: Place, vocab: int) -> None:
    logits = logits_of(place, 3, vocab, vocab, ties=True)
    slots = torch.tensor([2, 0, 1], device=place.device)
    tokens, finite = run(place, logits, slots, new_state(place))
    # Of equal ones the first.
    assert tokens.tolist() == [row.index(max(row)) for row in logits.tolist()]
    assert finite.all()


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("vocab", [7, 1500, 2500])
def test_plain_temperature(place: Place, vocab: int, ties: bool) -> None:
    logits = logits_of(place, 16, vocab, vocab, ties=ties)
    slots = torch.arange(16, device=place.device)
    state = new_state(place, temperature=[0.3, 1.0, 1.7, 100.0] * 4)
    tokens, _ = run(place, logits, slots, state)
    assert torch.equal(tokens, wanted_tokens(logits, slots, state))


FILTERS: dict[str, dict[str, list[float]]] = {
    "top_k": {"top_k": [1, 2, 5, 40, 5000, 1]},
    "top_p": {"top_p": [1e-6, 0.1, 0.5, 0.9, 0.999, 0.0]},
    "min_p": {"min_p": [1.0, 0.5, 0.1, 0.01, 1e-5, 0.3]},
    "all": {
        "top_k": [20, 3, 0, 60, 20, 7],
        "top_p": [0.95, 1, 0.7, 0.99, 0.3, 0.8],
        "min_p": [0, 0.2, 0.1, 0, 0.05, 1],
    },
}


@pytest.mark.parametrize(
    ("kind", "vocab", "ties"),
    [*((kind, 9, True) for kind in FILTERS), ("top_p", 1300, True), ("all", 1300, False)],
)
def test_filters(place: Place, kind: str, vocab: int, ties: bool) -> None:
    slots = torch.arange(6, device=place.device)
    logits = logits_of(place, 6, vocab, vocab, ties=ties)
    state = new_state(place, seed=vocab, temperature=[1.0, 0.6, 2.0, 1.0, 1e-3, 0.9], **FILTERS[kind])
    tokens, _ = run(place, logits, slots, state)
    assert tokens.tolist() == wanted_tokens(logits, slots, state).tolist()


@pytest.mark.parametrize("ways", [4, 8])
def test_every_number_of_ways_finds_the_same(place: Place, ways: int) -> None:
    logits = logits_of(place, 1, 40, 3)
    state = new_state(place, temperature=[1.5], top_p=[0.8])
    slots, tokens = (torch.zeros(1, dtype=torch.int64, device=place.device) for _ in range(2))
    finite = torch.zeros(1, dtype=torch.bool, device=place.device)
    workspace = sample_workspace(rows=1, vocab=40, device=place.device)
    sample(logits, slots, state, tokens, finite, workspace, known=40, ways=ways)
    assert torch.equal(tokens, wanted_tokens(logits, slots, state))


def test_end_ids_are_barred_below_the_least_length(place: Place) -> None:
    logits = torch.zeros(2, 1100, device=place.device)
    logits[:, 1050], logits[:, 3], logits[:, 8] = 9.0, 8.0, 7.0
    state = new_state(place, min_tokens=[5, 1], generated=[4, 1])
    state.end_ids[:2] = torch.tensor([[1050, 3, -1]], device=place.device)
    tokens, finite = run(place, logits, torch.tensor([0, 1], device=place.device), state)
    assert tokens.tolist() == [8, 1050]
    assert finite.all()
    assert logits[0, [3, 8, 1050]].tolist() == [-torch.inf, 7.0, -torch.inf]
    assert logits[1, [3, 8, 1050]].tolist() == [8.0, 7.0, 9.0]


def test_unknown_ids_are_never_taken(place: Place) -> None:
    logits = logits_of(place, 4, 1200, 0)
    logits[:, 1100:] = 50.0
    logits[0, 1150] = torch.nan
    state = new_state(place, temperature=[0.0, 1.0, 1.0, 1.0], top_p=[1.0, 1.0, 0.5])
    slots = torch.arange(4, device=place.device)
    tokens, finite = run(place, logits, slots, state, known=1100)
    assert torch.equal(tokens, wanted_tokens(logits[:, :1100], slots, state))
    assert finite.all()


def test_what_is_not_finite(place: Place) -> None:
    logits = logits_of(place, 6, 2100, 0)
    logits[0, 2099], logits[1, 5], logits[2] = torch.nan, torch.inf, -torch.inf
    logits[3, :2000] = -torch.inf
    logits[4, 1] = -torch.inf
    state = new_state(place, temperature=[0.0, 1.0, 1.0, 1.0, 0.0, 0.7], top_k=[0, 3, 0, 0, 0, 4])
    slots = torch.arange(6, device=place.device)
    tokens, finite = run(place, logits, slots, state)
    assert finite.tolist() == [False, False, False, True, True, True]
    assert tokens[:3].tolist() == [0, 0, 0]
    assert torch.equal(tokens[3:], wanted_tokens(logits, slots, state)[3:])


def test_padded_rows_are_left_alone(place: Place) -> None:
    logits = logits_of(place, 3, 20, 0)
    logits[1] = torch.nan
    tokens, finite = run(place, logits, torch.tensor([1, -1, 0], device=place.device), new_state(place))
    assert tokens[1] == -7
    assert finite.all()


def test_top_p_is_a_share_of_the_top_k_whatever_min_p_drops(place: Place) -> None:
    logits = torch.tensor([0.3] * 8 + [0.8, 1.0, 0.9] + [0.3] * 9, device=place.device).log().repeat(4, 1)
    slots = torch.arange(4, device=place.device)
    state = new_state(place, temperature=[1.0] * 4, top_k=[20] * 4, top_p=[0.2] * 4, min_p=[0.5] * 4)
    tokens, _ = run(place, logits, slots, state)
    assert torch.equal(tokens, wanted_tokens(logits, slots, state))
    assert set(tokens.tolist()) == {9, 10}


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [49152, 166144])
def test_real_sizes(place: Place, vocab: int) -> None:
    if place.interpreted or place.dtype != torch.float32:
        pytest.skip("logits are float32, and too many for the interpreter")
    logits = logits_of(place, SLOTS, vocab, 0)
    slots = torch.arange(SLOTS, device=place.device)
    state = new_state(
        place,
        temperature=[0.0, 0.6, 1.0, 1.3] * 10,
        top_k=[0, 20, 0, 0, 50] * 8,
        top_p=[1.0, 0.95, 0.7] * 13,
        min_p=[0.0, 0.0, 0.0, 0.05, 0.0, 0.0, 0.0] * 5,
    )
    tokens, finite = run(place, logits, slots, state)
    assert finite.all()
    assert torch.equal(tokens, wanted_tokens(logits, slots, state))
