"""Exit criteria against values of the published code, against their formulas in plain Python, and at their edges."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from rlt.depth.criteria import CRITERIA
from rlt.depth.table import RULES
from support import Golden

#: The published names.
PUBLISHED = {name: name.replace("_", "-") for name in CRITERIA}
PUBLISHED |= {"entropy": "entropy-diff", "argmax": "argmax-stability"}

#: All runs of the files, except that of p130 from the table they have the states of the last position only.
RUNS = [
    (name, prompt, kind)
    for name in CRITERIA
    for prompt in ("p1", "p7", "p33", "p130")
    for kind in ("zero", "table")
    if RULES[name].logits or (prompt, kind) != ("p130", "table")
]


@pytest.fixture(scope="module", params=["huginn-tiny", "huginn-tiny-core4"])
def golden(request: pytest.FixtureRequest) -> Golden:
    return Golden(request.param)


def values_of(name: str, initial: Tensor, inputs: Tensor) -> Tensor:
    """Values [loops, rows] for what the loops made, [loops, rows, hidden or vocab]."""
    criterion = CRITERIA[name]
    carried, values = criterion.begin(initial, inputs.shape[-1]), []
    for made in inputs:
        value, carried = criterion.step(made, carried)
        values.append(value)
    return torch.stack(values)


def loops_executed(name: str, values: Tensor, threshold: float) -> int:
    stopped = CRITERIA[name].stops(values, threshold).nonzero()
    return int(stopped[0]) + 1 if len(stopped) else len(values)


@pytest.mark.parametrize(("name", "prompt", "kind"), RUNS)
def test_values_and_depths_of_the_published_code(golden: Golden, name: str, prompt: str, kind: str) -> None:
    facts, tensors = golden.facts, golden.tensors
    if RULES[name].logits:
        inputs = tensors[f"{prompt}.{kind}.loop_logits_last"][:, None]
    else:
        inputs = tensors[f"{prompt}.{kind}.states"]
    initial = tensors["init_states"][: inputs.shape[1]] * (kind == "table")
    # Over several positions the published code takes the mean, of the cosine too.
    values = values_of(name, initial, inputs).mean(-1)
    want, published = facts["criteria_prefill"][kind][prompt], PUBLISHED[name]
    known = [math.nan if value is None else value for value in want["values"][published]]
    assert values.tolist() == pytest.approx(known, abs=2e-4, rel=1e-5, nan_ok=True)
    for choice, depths in want["loops_executed"].items():
        assert loops_executed(name, values, facts["criterion_thresholds"][choice][published]) == depths[published]


def test_default_thresholds_are_the_published_ones(golden: Golden) -> None:
    published = golden.facts["criterion_thresholds"]["auto"]
    assert {PUBLISHED[name]: RULES[name].threshold for name in CRITERIA} == published


def test_the_table_of_rules_and_the_criteria_agree() -> None:
    assert {name for name, kind in RULES.items() if kind.criterion} == CRITERIA.keys()
    assert all(kind.criterion for kind in RULES.values() if kind.logits)


@pytest.mark.parametrize("name", ["latent_diff", "cosine", "entropy", "kl", "minp_kl"])
def test_nothing_falls_below_a_threshold_of_zero(name: str) -> None:
    # Rounding can make a divergence of equal distributions slightly negative.
    assert not CRITERIA[name].stops(torch.tensor([-1e-7]), torch.tensor([0.0])).any()
    assert CRITERIA[name].stops(torch.tensor([-1e-7]), 1e-3).all()


@pytest.mark.parametrize("name", CRITERIA)
def test_rows_do_not_depend_on_their_neighbours_nor_on_their_dtype(name: str) -> None:
    generator = torch.Generator().manual_seed(5)
    inputs = (torch.randn(6, 9, 32, generator=generator) * 3).bfloat16()
    initial = torch.randn(9, 32, generator=generator).bfloat16()
    values = values_of(name, initial, inputs)
    assert values.dtype == torch.float32
    assert values.shape == (6, 9)
    for row in range(9):
        alone = values_of(name, initial[row : row + 1], inputs[:, row : row + 1])
        torch.testing.assert_close(values[:, row], alone[:, 0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(values, values_of(name, initial.float(), inputs.float()), rtol=0, atol=0)


def probabilities(logits: list[float]) -> list[float]:
    total = sum(math.exp(logit) for logit in logits)
    return [math.exp(logit) / total for logit in logits]


def divergence(before: list[float], now: list[float]) -> float:
    return sum(p * math.log(p / q) for p, q in zip(before, now, strict=True))


def raised(all_of_row: list[float]) -> list[float]:
    top, count = max(all_of_row), len(all_of_row)
    flat = [1 / count if p < 0.1 * top else p for p in all_of_row]
    return [p / sum(flat) for p in flat]


FIRST, SECOND = [2.0, 1.0, -3.0, 0.5], [2.5, -1.0, -2.0, 2.0]
UNIFORM = [0.25] * 4


def test_formulas_on_logits() -> None:
    inputs = torch.tensor([[FIRST], [SECOND]])
    first, second = probabilities(FIRST), probabilities(SECOND)
    entropies = [-sum(p * math.log(p + 1e-10) for p in row) for row in (first, second)]
    wanted = {
        "entropy": [100 - entropies[0], abs(entropies[1] - entropies[0])],
        "kl": [divergence(UNIFORM, first), divergence(first, second)],
        "minp_kl": [divergence(UNIFORM, raised(first)), divergence(raised(first), raised(second))],
    }
    for name, values in wanted.items():
        assert values_of(name, torch.zeros(1, 3), inputs)[:, 0].tolist() == pytest.approx(values, rel=1e-5), name


def test_formulas_on_states() -> None:
    states = torch.tensor([[[3.0, 4.0]], [[6.0, 8.0]], [[8.0, -6.0]]])
    initial = torch.tensor([[3.0, 0.0]])
    assert values_of("latent_diff", initial, states)[:, 0].tolist() == pytest.approx([0.8, 0.5, math.sqrt(2)])
    assert values_of("cosine", initial, states)[:, 0].tolist() == pytest.approx([0.4, 0.0, 1.0], abs=1e-6)


def test_a_zero_state_never_stops_a_row() -> None:
    zero = torch.zeros(2, 4)
    for name in ("latent_diff", "cosine"):
        value, _ = CRITERIA[name].step(zero, zero)
        assert value.isnan().all()
        assert not CRITERIA[name].stops(value, 1e9).any()


def test_argmax_counts_and_starts_again() -> None:
    best = [2, 2, 2, 0, 0, 1]
    inputs = torch.nn.functional.one_hot(torch.tensor(best), 4).float()[:, None]
    values = values_of("argmax", torch.zeros(1, 3), inputs)[:, 0]
    assert values.tolist() == [0, 1, 2, 0, 1, 0]
    assert loops_executed("argmax", values, 2) == 3
    # Token 0 in the first loop was not there before either.
    assert values_of("argmax", torch.zeros(1, 3), inputs[3:4]).item() == 0


def test_thresholds_per_row_and_equality() -> None:
    values, thresholds = torch.tensor([0.5, 0.5, 0.5]), torch.tensor([0.4, 0.5, 0.6])
    assert CRITERIA["kl"].stops(values, thresholds).tolist() == [False, False, True]
    assert CRITERIA["argmax"].stops(values, thresholds).tolist() == [True, True, False]


@pytest.mark.parametrize("name", ["entropy", "kl", "minp_kl"])
def test_certain_distributions_give_numbers(name: str) -> None:
    certain = torch.tensor([[[300.0, -300.0, 0.0, 0.0]], [[300.0, -300.0, 0.0, 0.0]], [[-300.0, 300.0, 0.0, 0.0]]])
    values = values_of(name, torch.zeros(1, 3), certain)[:, 0]
    assert values.isfinite().all()
    assert values[1] == pytest.approx(0.0, abs=1e-6)
