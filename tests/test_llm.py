"""The offline API on the golden Ouro: what comes back, and what is raised."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlt import LLM, SamplingParams
from rlt.errors import ConfigError, GenerationError, ModelError, RltError
from rlt_protocols.params import ParamError
from support import DATA

GOLDEN_OURO = DATA / "golden" / "ouro-tiny"
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(str(GOLDEN_OURO), device="cpu", dtype="float32", config={"kv": {"pages": 400}}) as opened:
        yield opened


def test_one_prompt_and_many(llm: LLM) -> None:
    (alone,) = llm.generate([5, 9, 12], GREEDY)
    assert alone.prompt is None
    assert alone.prompt_token_ids == [5, 9, 12]
    answer = alone.outputs[0]
    assert (len(answer.token_ids), answer.finish_reason, answer.text) == (6, "length", "")
    assert set(answer.depths) == {4}
    both = llm.generate([[7], [5, 9, 12]], [GREEDY, GREEDY])
    assert both[1].outputs[0].token_ids == answer.token_ids


def test_a_stream_adds_up(llm: LLM) -> None:
    (whole,) = llm.generate([5, 9, 12], GREEDY)
    deltas = list(llm.stream([5, 9, 12], GREEDY))
    assert [token for delta in deltas for token in delta.token_ids] == whole.outputs[0].token_ids
    assert [delta.finish_reason for delta in deltas] == [None] * 5 + ["length"]


def test_a_stream_that_is_left_early_leaves_nothing_behind(llm: LLM) -> None:
    stream = llm.stream([[5], [6]], SamplingParams(max_tokens=100, ignore_eos=True))
    next(stream)
    stream.close()
    assert len(llm.generate([5], GREEDY)) == 1
    assert llm.stats()["pages"]["used"] == 0


def test_stats(llm: LLM) -> None:
    llm.generate([5], GREEDY)
    stats = llm.stats()
    assert stats["ticks"] > 0
    assert stats["mean_loops"] == 4
    assert stats["rows"]["decode"] > 0
    assert sum(stats["pages"].values()) == 400


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ("hi", GREEDY, "prompt: this model directory has no tokenizer; give token ids"),
        ([], GREEDY, None),
        ([[]], GREEDY, "prompt: is empty; at least one token is needed"),
        ([256], GREEDY, "prompt: token id 256 at index 0 is outside the vocabulary of 256"),
        ([5], SamplingParams(max_loops=5), "max_loops: must be between 1 and 4, got 5"),
    ],
)
def test_bad_input_is_named_before_anything_runs(
    llm: LLM, prompt: str | list[int], params: SamplingParams, message: str | None
) -> None:
    if message is None:
        assert llm.generate(prompt, params) == []
        return
    with pytest.raises(ParamError) as caught:
        llm.generate(prompt, params)
    assert str(caught.value) == message


def test_numbers_that_are_not_finite_are_an_error_of_their_own(tmp_path: Path) -> None:
    shutil.copy(GOLDEN_OURO / "config.json", tmp_path)
    tensors = load_file(GOLDEN_OURO / "model.safetensors")
    # Numbers themselves, but their products overflow; NaN in a checkpoint would be refused.
    tensors["lm_head.weight"] = torch.full_like(tensors["lm_head.weight"], 3e38)
    save_file(tensors, tmp_path / "model.safetensors")
    with LLM(str(tmp_path), device="cpu", config={"kv": {"pages": 64}}) as llm:
        with pytest.raises(GenerationError, match="the model computed numbers that are not finite"):
            llm.generate([5], GREEDY)
        assert issubclass(GenerationError, RltError)
        assert llm.stats()["pages"]["used"] == 0


def test_a_model_that_cannot_be_opened() -> None:
    with pytest.raises(ModelError, match="no such directory"):
        LLM("./nowhere")
    with pytest.raises(ConfigError, match=r"kv\.page: |unknown key kv\.page; did you mean pages\?"):
        LLM(str(GOLDEN_OURO), config={"kv": {"page": 3}})


def test_open_streams_share_the_engine(llm: LLM) -> None:
    """Whoever runs a tick files the others' tokens for them."""
    alone = [output.outputs[0].token_ids for output in llm.generate([[1, 2, 3], [4, 5]], GREEDY)]
    first = llm.stream([[1, 2, 3]], GREEDY)
    tokens = list(next(first).token_ids)
    assert llm.generate([[4, 5]], GREEDY)[0].outputs[0].token_ids == alone[1]
    for delta in first:
        tokens += delta.token_ids
    assert tokens == alone[0]


@pytest.mark.parametrize("prompt", [[1, "a"], [1, 2.5], [True], [None, 1]])
def test_token_ids_are_integers(llm: LLM, prompt: list[object]) -> None:
    with pytest.raises(ParamError, match="token ids must be integers"):
        llm.generate([[1], prompt], GREEDY)  # type: ignore[list-item]
    assert not llm.engine.has_work


def test_the_largest_numbers_that_are_accepted_reach_the_device(llm: LLM) -> None:
    largest = SamplingParams(
        temperature=100, top_p=1e-300, min_p=1, exit_threshold=1e6, seed=-1, top_k=2**31, max_tokens=3, ignore_eos=True
    )
    (output,) = llm.generate([5, 9], largest)
    assert len(output.outputs[0].token_ids) == 3


def test_a_tiny_temperature_takes_the_likeliest(llm: LLM) -> None:
    greedy = llm.generate([5, 9, 12], GREEDY)[0].outputs[0].token_ids
    for temperature in (1e-5, 1e-38, 1e-40, 1e-300):
        cold = SamplingParams(temperature=temperature, max_tokens=6, ignore_eos=True)
        assert llm.generate([5, 9, 12], cold)[0].outputs[0].token_ids == greedy


def test_stats_and_cached_tokens(llm: LLM) -> None:
    prompt = [(7 * i) % 250 + 3 for i in range(40)]
    before = llm.stats()["prefix_hit_tokens"]
    assert llm.generate([prompt], GREEDY)[0].cached_tokens == 0
    assert llm.generate([prompt], GREEDY)[0].cached_tokens == 32
    stats = llm.stats()
    assert stats["prefix_hit_tokens"] - before == 32
    assert stats["preemptions"] == 0
    assert set(stats["pages"]) == {"free", "used", "cached"}
