"""Huginn's maths against tensors computed by the published code, on a dense cache; and proof that it can fail."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as attention

from rlt.depth.criteria import CRITERIA, Criterion
from rlt.depth.table import RULES
from rlt.models import huginn
from rlt.models.checkpoint import read_spec
from rlt.models.huginn import Huginn
from rlt.models.layers import rotate_halves
from rlt.models.spec import ModelSpec
from support import Golden

STATES, LOGITS = 3e-4, 2e-3
PROMPTS = ["p1", "p7", "p33", "p130"]
KINDS = ["zero", "table"]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """These tensors are too small to share among threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.inference_mode():
        yield
    torch.set_num_threads(threads)


class Case(NamedTuple):
    golden: Golden
    shape: ModelSpec
    weights: dict[str, Tensor]

    def model(self, **replaced: Tensor) -> Huginn:
        return Huginn(self.shape, self.weights | replaced)

    def prompt(self, name: str) -> list[int]:
        return self.golden.prompts[name]

    def want(self, name: str) -> Tensor:
        return self.golden.tensors[name]

    def initial(self, kind: str) -> Tensor:
        """Initial states by position."""
        table = self.golden.tensors["init_states"]
        return table if kind == "table" else torch.zeros_like(table)

    def sequence(self, kind: str = "zero", model: Huginn | None = None) -> Dense:
        return Dense(model or self.model(), self.initial(kind))


@pytest.fixture(scope="module", params=["huginn-tiny", "huginn-tiny-core4"])
def case(request: pytest.FixtureRequest) -> Case:
    golden = Golden(request.param)
    return Case(golden, read_spec(golden.directory), load_file(golden.directory / "model.safetensors"))


class Plane:
    """Keys and values of some layers, for one version of each token: [layers, positions, heads, head_dim]."""

    def __init__(self, layers: int, shape: ModelSpec, dtype: torch.dtype) -> None:
        size = (layers, 192, shape.heads, shape.head_dim)
        # Not numbers: reading what was never written shows.
        self.keys, self.values = (torch.full(size, math.nan, dtype=dtype) for _ in range(2))


class Dense:
    """One sequence, dense: a plane for the layers that do not loop, and one per loop for those that do."""

    def __init__(self, model: Huginn, initial: Tensor) -> None:
        shape = model.spec
        self.model, self.initial, self.length = model, initial, 0
        self.outer = Plane(shape.outer_layers, shape, model.dtype)
        self.loops = [Plane(shape.layers, shape, model.dtype) for _ in range(shape.loops)]

    def start(self, tokens: Sequence[int]) -> Tensor:
        """Rows of the next tokens before their first loop."""
        self.positions = torch.arange(self.length, self.length + len(tokens))
        self.length += len(tokens)
        state = self.initial[self.positions]
        return self.model.prelude(torch.tensor(tokens), self.positions, self.attend(self.outer), state)

    def loop(self, rows: Tensor, loop: int) -> Tensor:
        return self.model.core(rows, self.positions, self.attend(self.loops[loop]))

    def finish(self, rows: Tensor) -> Tensor:
        """Logits [rows, vocab]."""
        return self.model.head(self.model.coda(rows, self.positions, self.attend(self.outer)))

    def exited(self, executed: int) -> None:
        """Deeper loops read the last keys and values that the newest tokens have."""
        last = self.loops[executed - 1]
        for plane in self.loops[executed:]:
            plane.keys[:, self.positions] = last.keys[:, self.positions]
            plane.values[:, self.positions] = last.values[:, self.positions]

    def attend(self, plane: Plane) -> Callable[[int, Tensor, Tensor, Tensor], Tensor]:
        mask = torch.arange(self.length) <= self.positions[:, None]

        def run(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            plane.keys[layer, self.positions], plane.values[layer, self.positions] = key, value
            keys, values = plane.keys[layer, : self.length], plane.values[layer, : self.length]
            query, keys, values = (heads.transpose(0, 1) for heads in (query, keys, values))
            return attention(query, keys, values, attn_mask=mask).transpose(0, 1)

        return run

    def run(self, tokens: Sequence[int]) -> Tensor:
        """All loops of the next tokens; logits of all of them."""
        rows = self.start(tokens)
        for loop in range(len(self.loops)):
            rows = self.loop(rows, loop)
        return self.finish(rows)

    def adaptive(self, token: int, name: str, threshold: float) -> tuple[Tensor, list[float]]:
        """The next token until a criterion stops it: its logits, and the values after each loop."""
        rows, values = self.start([token]), []
        carried = CRITERIA[name].begin(self.model.state(rows), self.model.spec.vocab_size)
        for loop in range(len(self.loops)):
            rows = self.loop(rows, loop)
            logits = self.finish(rows) if RULES[name].logits else None
            value, carried = CRITERIA[name].step(self.model.state(rows) if logits is None else logits, carried)
            values.append(value.item())
            if CRITERIA[name].stops(value, threshold):
                break
        self.exited(len(values))
        return (self.finish(rows) if logits is None else logits)[0], values


def rule_of(published: str) -> str:
    """Our name of a criterion."""
    return {"entropy-diff": "entropy", "argmax-stability": "argmax"}.get(published, published.replace("-", "_"))


def criterion(published: str) -> Criterion:
    return CRITERIA[rule_of(published)]


def near(got: Tensor, want: Tensor, limit: float) -> None:
    torch.testing.assert_close(got, want, atol=limit, rtol=0)


def near_values(got: Sequence[float], want: Sequence[float | None]) -> None:
    """Criterion values, which are stored with five digits; null where the published code divides zero by zero."""
    known = [math.nan if value is None else value for value in want]
    assert list(got) == pytest.approx(known, abs=1e-3, rel=1e-4, nan_ok=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", PROMPTS)
def test_prelude_states_and_logits_of_each_loop(case: Case, name: str, kind: str) -> None:
    dense = case.sequence(kind)
    rows = dense.start(case.prompt(name))
    assert rows.shape == (len(case.prompt(name)), dense.model.row_size)
    near(rows[:, case.shape.hidden_size :], case.want(f"{name}.prelude"), STATES)
    for loop, want in enumerate(case.want(f"{name}.{kind}.states")):
        rows = dense.loop(rows, loop)
        near(dense.model.state(rows)[-len(want) :], want, STATES)
        logits = dense.finish(rows)
        near(logits[-1], case.want(f"{name}.{kind}.loop_logits_last")[loop], LOGITS)
    near(logits, case.want(f"{name}.{kind}.logits"), LOGITS)


@pytest.mark.parametrize("chunk", [1, 5])
def test_prompts_in_chunks(case: Case, chunk: int) -> None:
    prompt, dense = case.prompt("p33"), case.sequence("table")
    logits = torch.cat([dense.run(prompt[first : first + chunk]) for first in range(0, len(prompt), chunk)])
    near(logits, case.want("p33.table.logits"), LOGITS)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", PROMPTS)
def test_greedy_tokens_and_logits(case: Case, name: str, kind: str) -> None:
    dense = case.sequence(kind)
    logits = [dense.run(case.prompt(name))[-1]]
    while len(logits) < 32:
        logits.append(dense.run([int(logits[-1].argmax())])[0])
    assert [int(row.argmax()) for row in logits] == case.golden.facts["runs"][f"greedy_{kind}_state"][name]["tokens"]
    near(torch.stack(logits), case.want(f"{name}.{kind}.greedy.logits"), LOGITS)


@pytest.mark.parametrize("name", PROMPTS)
def test_criteria_of_decode_tokens_at_full_depth(case: Case, name: str) -> None:
    facts, dense = case.golden.facts, case.sequence()
    wanted, tiny = facts["criteria_decode_full_depth"][name], facts["criterion_thresholds"]["tiny"]
    dense.run(case.prompt(name))
    for index, token in enumerate(facts["runs"]["greedy_zero_state"][name]["tokens"][:31]):
        rows, vocab = dense.start([token]), case.shape.vocab_size
        carried = {key: criterion(key).begin(dense.model.state(rows), vocab) for key in tiny}
        values: dict[str, list[float]] = {key: [] for key in tiny}
        stops = dict.fromkeys(tiny, case.shape.loops)
        for loop in range(case.shape.loops):
            rows = dense.loop(rows, loop)
            logits, state = dense.finish(rows), dense.model.state(rows)
            for key, threshold in tiny.items():
                value, carried[key] = criterion(key).step(logits if RULES[rule_of(key)].logits else state, carried[key])
                values[key].append(value.item())
                if criterion(key).stops(value, threshold):
                    stops[key] = min(stops[key], loop + 1)
        for key in tiny:
            near_values(values[key], wanted["values"][key][index])
            assert stops[key] == wanted["loops_executed_tiny"][key][index], (key, index)


@pytest.mark.parametrize("name", PROMPTS)
@pytest.mark.parametrize("key", ["latent-diff", "cosine", "entropy-diff", "kl", "minp-kl", "argmax-stability"])
def test_tokens_and_depths_with_exits(case: Case, key: str, name: str) -> None:
    want, dense = case.golden.facts["runs"]["adaptive_last_exited"][key][name], case.sequence()
    logits, values = [dense.run(case.prompt(name))[-1]], [[]]
    while len(logits) < 32:
        row, seen = dense.adaptive(int(logits[-1].argmax()), rule_of(key), want["threshold"])
        logits.append(row)
        values.append(seen)
    assert [int(row.argmax()) for row in logits] == want["tokens"]
    assert [case.shape.loops, *map(len, values[1:])] == want["loops_executed"]
    for got, known in zip(values, want["values"], strict=True):
        near_values(got, known)
    if f"{name}.adaptive.{key}.logits" in case.golden.tensors:
        near(torch.stack(logits), case.want(f"{name}.adaptive.{key}.logits"), LOGITS)


def _split_half(heads: Tensor, turns: Tensor) -> Tensor:
    turns = torch.cat([turns, turns], 1)[:, None]
    return rotate_halves(heads, turns[..., 0], turns[..., 1])


class _OneFinalNorm(Huginn):
    def coda(self, rows: Tensor, positions: Tensor, attend: Any) -> Tensor:
        return self._run("coda", self.state(rows), positions, attend, first=2, closing=self._norm)


MISTAKES = ["adapter_order", "split_half_rope", "no_qk_bias", "no_embedding_scale", "ln_f_once"]


@pytest.mark.parametrize("name", PROMPTS[1:])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_negative_controls(case: Case, name: str, mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each mistake gives the wrong answer that is known for it, which is far outside of the limits."""
    weights, model = case.weights, case.model()
    if mistake == "adapter_order":
        adapter = "transformer.adapter.weight"
        model = case.model(**{adapter: torch.cat(weights[adapter].chunk(2, 1)[::-1], 1)})
    elif mistake == "no_qk_bias":
        model = case.model(**{key: w * 0 for key, w in weights.items() if key.endswith("qk_bias")})
    elif mistake == "ln_f_once":
        model = _OneFinalNorm(case.shape, weights)
    elif mistake == "split_half_rope":
        monkeypatch.setattr(huginn, "rotate_pairs", _split_half)
    else:
        model._scale = 1.0
    wrong = case.golden.facts["negative_controls"][name]["prefill_last_position"][mistake]
    last = case.sequence(model=model).run(case.prompt(name))[-1]
    difference = (last - case.want(f"{name}.zero.logits")[-1]).abs().max().item()
    assert difference == pytest.approx(wrong["max_abs_logit_diff"], abs=5 * LOGITS)
    assert int(last.argmax()) == wrong["argmax"]
    assert difference > 100 * LOGITS


@pytest.mark.parametrize("name", PROMPTS)
def test_bf16_is_close_where_the_gap_is_large(case: Case, name: str) -> None:
    model = Huginn(case.shape, {key: weight.bfloat16() for key, weight in case.weights.items()})
    dense, run = case.sequence(model=model), case.golden.facts["runs"]["greedy_zero_state"][name]
    logits = dense.run([*case.prompt(name), *run["tokens"][:-1]])[-32:]
    assert (dense.outer.keys.dtype, logits.dtype) == (torch.bfloat16, torch.float32)
    for row, token, gap in zip(logits, run["tokens"], run["gap"], strict=True):
        assert gap < 4.0 or int(row.argmax()) == token


@pytest.mark.parametrize("name", PROMPTS)
def test_negative_control_one_plane_for_all_loops(case: Case, name: str) -> None:
    dense = case.sequence()
    dense.loops = dense.loops[:1] * case.shape.loops
    tokens = [int(dense.run(case.prompt(name))[-1].argmax())]
    while len(tokens) < 32:
        tokens.append(int(dense.run(tokens[-1:])[0].argmax()))
    wrong = case.golden.facts["negative_controls"][name]["greedy"]["kv_alias_one_slot_decode_only"]
    assert tokens == wrong["tokens"]
