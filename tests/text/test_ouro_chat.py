"""Chats in the manner of Ouro-Thinking: thinking off by default, reasoning without a start tag, two ends.

The template is our own, of the published one's behaviour: ChatML without a default system text; `enable_thinking`
opens a block, and without it the prompt is left as it is. Its tokenizer calls the tags special.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import tokenizers

from rlt import LLM, SamplingParams
from rlt.text.answer import AnswerText
from rlt.text.chat import ChatTemplate
from rlt.text.parts import AnswerParts, Parts
from rlt.text.tokenizer import Tokenizer
from rlt_protocols.engine import Route
from rlt_protocols.params import ModelInfo
from rlt_protocols.text import OpenText, Tokens
from rltd.frontend.prepare import Preparer
from support import Golden
from text import small_tokenizers

TEMPLATE = ChatTemplate("""\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking %}{{- '<think>\\n' }}{%- endif %}
{%- endif %}""")
TURNS = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello", "reasoning_content": "greet"},
    {"role": "user", "content": "Bye"},
]
PROMPT = (
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n"
    "<|im_start|>assistant\n"
)
INFO = ModelInfo(
    name="ouro",
    family="ouro",
    vocab_size=1000,
    max_model_len=1000,
    loops=4,
    min_loops=1,
    max_loops=4,
    exit_threshold=1.0,
    eos_token_ids=(0, 2),
    kv_tokens=1000,
)


@pytest.fixture
def tokenizer() -> Tokenizer:
    inner = small_tokenizers.byte_level()
    inner.add_special_tokens(["<|im_start|>", "<|im_end|>", "<think>", "</think>"])
    return Tokenizer(inner)


def test_the_prompt() -> None:
    assert TEMPLATE.render(TURNS) == PROMPT
    assert TEMPLATE.render(TURNS, kwargs={"enable_thinking": False}) == PROMPT
    assert TEMPLATE.render(TURNS, kwargs={"enable_thinking": True}) == f"{PROMPT}<think>\n"


@pytest.mark.parametrize("thinking", [True, False, None])
@pytest.mark.parametrize("opened", ["", "<think>\n"])
def test_an_answer_is_divided_whether_or_not_it_opens_the_block(
    tokenizer: Tokenizer, thinking: bool | None, opened: str
) -> None:
    """From the tokens of an answer, one by one, to its parts."""
    body = json.dumps({"messages": TURNS, "enable_thinking": thinking}).encode()
    prepared = Preparer(tokenizer, TEMPLATE, max_answers=1).chat(body, INFO)
    (choice,) = prepared.choices
    text = AnswerText(tokenizer, OpenText("r", Route(1, 1, 1)))
    parts = AnswerParts(prepared.form)
    ids = tokenizer.encode(f"{opened}why 🎉\n</think>\n\nso", add_special_tokens=False)
    end = tokenizer.token_id("</think>")
    found = []
    for position, token in enumerate([*ids, choice.params.end_token_ids[1]]):
        last = position == len(ids)
        delta = text.take(Tokens("r", (token,), (4,), finish_reason="stop" if last else None))
        found.append(parts.feed(delta.text, delta.token_ids, final=last))
    reasoning, content, _ = (list(each) for each in zip(*found, strict=True))
    assert Parts("".join(reasoning), "".join(content)) == ("why 🎉", "so", ())
    assert parts.reasoning_tokens == ids.index(end) + 1


def test_the_turns_end_stops_an_answer_although_the_configuration_names_another(
    ouro_golden: Golden, tmp_path: Path
) -> None:
    """As shipped: begin, end and padding are all `<|endoftext|>`, while turns end with `<|im_end|>`."""
    answer = ouro_golden.facts["runs"]["full_depth"]["p33"]["tokens"]
    turn_end = answer[5]
    before = answer[: answer.index(turn_end)]
    shutil.copytree(ouro_golden.directory, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    ends = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    (tmp_path / "config.json").write_text(json.dumps(config | ends))
    (tmp_path / "generation_config.json").write_text(json.dumps(ends))
    words = {f"w{index}": index for index in range(config["vocab_size"])}
    names = {0: "<|endoftext|>", turn_end: "<|im_end|>"}
    inner = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({names.get(index, word): index for word, index in words.items()}, "w1")
    )
    inner.add_special_tokens(list(names.values()))
    inner.save(str(tmp_path / "tokenizer.json"))
    with LLM(str(tmp_path), device="cpu", dtype="float32", config={"kv": {"pages": 200}}) as llm:
        assert llm.info.eos_token_ids == (0, turn_end)
        (output,) = llm.generate(ouro_golden.prompts["p33"], SamplingParams(temperature=0, max_tokens=20))
    found = output.outputs[0]
    assert found.token_ids == [*before, turn_end]
    assert found.finish_reason == "stop"
    assert found.text == " ".join(f"w{token}" for token in before)
