"""The dense reference against the golden models, so that it may judge the engine; and layouts against each other."""

from __future__ import annotations

import pytest
import torch

from reference.dense import version_read
from reference.families import DenseHuginn, DenseNanbeige, DenseOuro
from reference.rules import stops
from support import Golden

LIMIT = 5e-4
PROMPTS = ["p1", "p7", "p33", "p130"]
EXITING = ["p1", "p7", "p33"]


@pytest.fixture(scope="module")
def dense(ouro_golden: Golden) -> DenseOuro:
    return DenseOuro(ouro_golden.directory)


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", ["p1", "p7"])
def test_keys_and_values_of_every_loop(ouro_golden: Golden, dense: DenseOuro, name):
    prompt = ouro_golden.prompts[name]
    memory, _ = dense.prefill(prompt, 4, "last_exited")
    for ours, kind in ((memory.keys, "k"), (memory.values, "v")):
        want = ouro_golden.tensors[f"{name}.{kind}_planes"].permute(2, 0, 1, 3, 4)
        torch.testing.assert_close(ours[: len(prompt)], want, atol=LIMIT, rtol=0)


@pytest.mark.parametrize("name", PROMPTS)
def test_full_depth(ouro_golden: Golden, dense: DenseOuro, name):
    answer = dense.generate(ouro_golden.prompts[name], 32)
    assert answer.tokens == ouro_golden.facts["runs"]["full_depth"][name]["tokens"]
    assert answer.depths == [4] * 32
    torch.testing.assert_close(answer.logits, ouro_golden.tensors[f"{name}.full_depth.logits"], atol=LIMIT, rtol=0)
    torch.testing.assert_close(
        torch.tensor(answer.gaps),
        torch.tensor(ouro_golden.facts["runs"]["full_depth"][name]["gap"]),
        atol=2 * LIMIT,
        rtol=0,
    )
    assert answer.sure() == 32


@pytest.mark.parametrize("q", ["0.3", "0.5", "0.7", "0.9"])
@pytest.mark.parametrize("name", PROMPTS)
def test_exits(ouro_golden: Golden, dense: DenseOuro, name, q):
    want = ouro_golden.facts["runs"]["last_exited"][q][name]
    answer = dense.generate(ouro_golden.prompts[name], 32, threshold=float(q))
    assert answer.tokens == want["tokens"]
    assert answer.depths == want["exit_depth"]
    logits = ouro_golden.tensors[f"{name}.last_exited.q{q}.logits"]
    torch.testing.assert_close(answer.logits, logits, atol=LIMIT, rtol=0)
    for ours, theirs in zip(answer.exit_margins[1:], want["cdf_margin"][1:], strict=True):
        assert ours == pytest.approx(theirs, abs=1e-4)


@pytest.mark.parametrize("name", PROMPTS)
@pytest.mark.parametrize(
    ("layout", "control"),
    [
        ("last_step", "kv_alias_one_slot_decode_only"),
        ("cyclic:1", "kv_alias_one_slot_decode_only"),
        ("shared", "kv_alias_one_slot_token_by_token"),
    ],
)
def test_one_plane_layouts_are_the_known_aliasings_at_full_depth(
    ouro_golden: Golden, dense: DenseOuro, name, layout, control
):
    answer = dense.generate(ouro_golden.prompts[name], 32, layout=layout)
    assert answer.tokens == ouro_golden.facts["negative_controls"][name]["greedy"][control]["tokens"]


def test_exit_rule_table(ouro_golden: Golden):
    for case in ouro_golden.facts["exit_rule_cases"]:
        assert depth("ouro", cdfs(case["gate_logits"]), case["q"]) == case["depth"], case


def cdfs(gates: list[float]) -> list[float]:
    return (1 - torch.cumprod(1 - torch.sigmoid(torch.tensor(gates)), dim=0)).tolist()


def depth(rule, values, threshold, min_loops=1, max_loops=4, wanted=0) -> int:
    limits = {"threshold": threshold, "min_loops": min_loops, "max_loops": max_loops, "wanted": wanted}
    return next(n for n in range(1, max_loops + 1) if stops(rule, values[:n], **limits))


def test_rules_by_hand():
    rising = [0.2, 0.5, 0.7, 0.8]
    assert [depth("ouro", rising, q) for q in (0.0, 0.2, 0.3, 0.7, 0.9, 1.0)] == [1, 1, 2, 3, 4, 4]
    assert [depth("ouro_delayed", rising, q) for q in (0.0, 0.2, 0.3, 0.7, 0.9, 1.0)] == [2, 2, 3, 4, 4, 4]
    assert [depth("random_lookahead", rising, q) for q in (0.0, 0.3, 0.7)] == [2, 3, 4]
    assert depth("ouro", rising, 0.1, min_loops=3) == 3
    assert depth("ouro_delayed", rising, 0.1, min_loops=3) == 4
    assert depth("ouro_delayed", rising, 0.1, max_loops=1) == 1
    assert depth("ouro", rising, 0.9, max_loops=2) == 2
    assert [depth("trace", rising, 0.0, min_loops=2, max_loops=3, wanted=n) for n in (1, 2, 3, 4)] == [2, 2, 3, 3]


@pytest.mark.parametrize("name", EXITING)
def test_a_delayed_exit_is_one_loop_later_until_the_texts_part(ouro_golden: Golden, dense: DenseOuro, name):
    # The second token is the first decode token: both rules see the same states there.
    prompt = ouro_golden.prompts[name]
    early = dense.generate(prompt, 2, threshold=0.3).depths[1]
    assert dense.generate(prompt, 2, threshold=0.3, rule="ouro_delayed").depths[1] == min(early + 1, 4)


def test_a_trace_of_the_depths_of_a_gated_run_is_that_run(ouro_golden: Golden, dense: DenseOuro):
    prompt = ouro_golden.prompts["p7"]
    gated = dense.generate(prompt, 32, threshold=0.5)
    traced = dense.generate(prompt, 32, rule="trace", trace=gated.depths)
    assert (traced.tokens, traced.depths) == (gated.tokens, gated.depths)
    cycled = dense.generate(prompt, 8, rule="trace", trace=[3, 1, 9])
    assert cycled.depths == [4, 1, 4, 3, 1, 4, 3, 1]


def test_another_gate_decides_in_random_lookahead(ouro_golden: Golden, dense: DenseOuro):
    prompt = ouro_golden.prompts["p7"]
    settings = {"threshold": 0.5, "rule": "random_lookahead"}
    own = dense.generate(prompt, 16, **settings)
    assert own.depths == dense.generate(prompt, 16, threshold=0.5, rule="ouro_delayed").depths
    weight, bias = dense.gate
    assert dense.generate(prompt, 4, gate=(weight * 0, bias * 0 + 20), **settings).depths == [4, 2, 2, 2]
    assert dense.generate(prompt, 4, gate=(weight * 0, bias * 0 - 20), **settings).depths == [4, 4, 4, 4]


def test_ends(ouro_golden: Golden, dense: DenseOuro):
    prompt = ouro_golden.prompts["p7"]
    free = dense.generate(prompt, 6).tokens
    assert free[2] not in free[:1]
    assert dense.generate(prompt, 6, end_ids=[free[4]]).tokens == free[:5]
    barred = dense.generate(prompt, 6, end_ids=[free[0]], min_tokens=1)
    assert barred.tokens[0] != free[0]


# -- the other families ----------------------------------------------------------------------------------------------

LOGITS = 2e-3
PUBLISHED = {
    "entropy-diff": "entropy",
    "latent-diff": "latent_diff",
    "cosine": "cosine",
    "kl": "kl",
    "minp-kl": "minp_kl",
    "argmax-stability": "argmax",
}


@pytest.fixture(scope="module", params=["huginn-tiny", "huginn-tiny-core4"])
def huginn(request: pytest.FixtureRequest) -> tuple[Golden, DenseHuginn]:
    golden = Golden(request.param)
    dense = DenseHuginn(golden.directory)
    dense.draw = lambda seed, position: golden.tensors["init_states"][position]
    return golden, dense


@pytest.mark.parametrize("name", ["p1", "p7"])
@pytest.mark.parametrize(("kind", "seed"), [("zero", None), ("table", 0)])
def test_huginn_at_full_depth(huginn: tuple[Golden, DenseHuginn], name, kind, seed):
    golden, dense = huginn
    answer = dense.generate(golden.prompts[name], 32, rule="full_depth", seed=seed)
    assert answer.tokens == golden.facts["runs"][f"greedy_{kind}_state"][name]["tokens"]
    torch.testing.assert_close(answer.logits, golden.tensors[f"{name}.{kind}.greedy.logits"], atol=LOGITS, rtol=0)


@pytest.mark.parametrize("criterion", PUBLISHED)
def test_huginn_with_exits(huginn: tuple[Golden, DenseHuginn], criterion):
    golden, dense = huginn
    want = golden.facts["runs"]["adaptive_last_exited"][criterion]["p7"]
    answer = dense.generate(golden.prompts["p7"], 32, rule=PUBLISHED[criterion], threshold=want["threshold"])
    assert (answer.tokens, answer.depths) == (want["tokens"], want["loops_executed"])


def test_huginn_with_one_plane(huginn: tuple[Golden, DenseHuginn]):
    golden, dense = huginn
    answer = dense.generate(golden.prompts["p7"], 32, rule="full_depth", layout="cyclic:1")
    assert answer.tokens == golden.facts["negative_controls"]["p7"]["greedy"]["kv_alias_one_slot_decode_only"]["tokens"]


def test_nanbeige(nanbeige_golden: Golden):
    answer = DenseNanbeige(nanbeige_golden.directory).generate(nanbeige_golden.prompts["p7"], 32, rule="full_depth")
    assert answer.tokens == nanbeige_golden.facts["runs"]["full_depth"]["p7"]["tokens"]


# -- layouts against each other --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EXITING)
@pytest.mark.parametrize("layout", ["last_exited_copy", "cyclic:4", "cyclic:7"])
def test_as_many_planes_as_loops_is_last_exited_exits_or_not(ouro_golden: Golden, dense: DenseOuro, name, layout):
    """With k >= loops the only loop congruent to d below k is d itself: of a token that ran it, d is read; of a token
    that did not, its last. That is min(d, e - 1), so `cyclic:k` and `last_exited` agree whatever exits."""
    prompt = ouro_golden.prompts[name]
    for threshold in (0.5, 1.0):
        want = dense.generate(prompt, 16, threshold=threshold)
        answer = dense.generate(prompt, 16, threshold=threshold, layout=layout)
        assert (answer.tokens, answer.depths) == (want.tokens, want.depths)
        assert torch.equal(answer.logits, want.logits)


@pytest.mark.parametrize("layout", ["last_exited", "shared", "last_step", "cyclic:2"])
def test_with_one_loop_all_layouts_agree(ouro_golden: Golden, dense: DenseOuro, layout):
    prompt = ouro_golden.prompts["p33"]
    answer = dense.generate(prompt, 8, max_loops=1, layout=layout)
    assert torch.equal(answer.logits, dense.generate(prompt, 8, max_loops=1).logits)
    assert answer.depths == [1] * 8


def test_shared_and_last_step_agree_after_a_prompt_of_one_token(ouro_golden: Golden, dense: DenseOuro):
    """They differ only in what prompt rows read of each other; a decode row reads last versions in both."""
    prompt = ouro_golden.prompts["p1"]
    shared = dense.generate(prompt, 16, threshold=0.5, layout="shared")
    assert torch.equal(shared.logits, dense.generate(prompt, 16, threshold=0.5, layout="last_step").logits)
    assert len(set(shared.depths)) > 1


@pytest.mark.parametrize("layout", ["shared", "last_step", "cyclic:2", "cyclic:3"])
def test_fewer_planes_than_loops_is_another_computation(ouro_golden: Golden, dense: DenseOuro, layout):
    prompt = ouro_golden.prompts["p33"]
    assert dense.generate(prompt, 16, layout=layout).tokens != dense.generate(prompt, 16).tokens
    if layout != "shared":
        # The prompt is the same computation, so the first token is too.
        assert torch.equal(dense.generate(prompt, 1, layout=layout).logits, dense.generate(prompt, 1).logits)


@pytest.mark.parametrize("period", [1, 2, 3, 4, 5])
def test_cyclic_versions_are_what_overwritten_slots_hold(period):
    """The same rule as storage: loop n writes slot n mod k; at the exit the last version fills the unwritten slots."""
    for executed in range(1, 7):
        slots = {loop % period: loop for loop in range(executed)}
        for loop in range(6):
            want = slots.get(loop % period, executed - 1)
            assert version_read(f"cyclic:{period}", loop, False, executed) == want
            if period == 1:
                assert version_read("last_step", loop, False, executed) == executed - 1
