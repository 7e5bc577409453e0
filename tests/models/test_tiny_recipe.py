"""The training recipe's own maths, files and text forms against those of the server, for each family at small size."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from rlt.llm import LLM
from rlt.models.checkpoint import read_spec
from rlt.models.registry import load_model
from rlt.text.chat import load_chat_template
from rlt.text.tokenizer import load_tokenizer
from rlt_protocols.params import SamplingParams

RECIPE = Path(__file__).parents[2] / "recipes" / "tiny"
MODULES = ("checkpoint", "data", "evaluate", "families", "families.common", "tokenizer")
FAMILIES = ["ouro", "nanbeige", "huginn"]
LIMIT = 1e-4

#: sizes that differ where a mistake would hide if they were equal
SIZES: dict[str, dict[str, Any]] = {
    "ouro": {"hidden_size": 32, "intermediate_size": 48, "layers": 2, "heads": 2, "loops": 3},
    "nanbeige": {"hidden_size": 32, "intermediate_size": 48, "layers": 2, "heads": 6, "kv_heads": 2, "head_dim": 8},
    "huginn": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "heads": 2,
        "prelude_layers": 2,
        "core_layers": 2,
        "coda_layers": 2,
        "loops": 5,
    },
}

#: settings of [exit], by family: rule and threshold
EXITS = {
    "ouro": [("ouro", 1.0), ("ouro", 0.6)],
    "nanbeige": [(None, None)],
    "huginn": [(None, None), ("latent_diff", 0.3), ("kl", 0.02), ("entropy", 0.01)],
}
CASES = [(family, *exit) for family, exits in EXITS.items() for exit in exits]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """These tensors are too small to share among threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def recipe() -> Iterator[SimpleNamespace]:
    """The recipe's modules, which import each other as scripts in one folder do."""
    names = {path.stem for path in RECIPE.glob("*.py")} | {"families"}
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(RECIPE))
        yield SimpleNamespace(**{name.replace(".", "_"): importlib.import_module(name) for name in MODULES})
    for name in [name for name in sys.modules if name.partition(".")[0] in names]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def tokenizers(recipe: SimpleNamespace) -> dict[str, Any]:
    return {name: recipe.tokenizer.train_tokenizer(0, recipe.families.FAMILIES[name].dialect) for name in FAMILIES}


@pytest.fixture(scope="module")
def saved(
    recipe: SimpleNamespace, tokenizers: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """A folder with a random small model of each family, written by the recipe."""
    folders = {}
    for name in FAMILIES:
        folders[name] = folder = tmp_path_factory.mktemp(name)
        family = recipe.families.FAMILIES[name]
        shapes = importlib.import_module("families.huginn_layers" if name == "huginn" else f"families.{name}")
        shape = getattr(shapes, f"{family.__name__}Shape")(recipe.tokenizer.VOCAB_SIZE, **SIZES[name])
        torch.manual_seed(1)
        model = family(shape)
        with torch.no_grad():
            for parameter in model.parameters():
                # Norms, biases and the gate begin as constants, which would hide where they are not used.
                if parameter.ndim != 2 or len(parameter) == 1:
                    parameter.add_(0.3 * torch.randn_like(parameter))
        recipe.checkpoint.save_model(model, tokenizers[name], folder)
        recipe.tokenizer.save_tokenizer(tokenizers[name], folder, model.max_positions, family.dialect)
    return folders


class Plane:
    """Keys and values of one prompt for some layers, and attention over them."""

    def __init__(self) -> None:
        self.layers: list[int] = []

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self.layers.append(layer)
        sharing = query.shape[1] // key.shape[1]
        key, value = (heads.repeat_interleave(sharing, 1).transpose(0, 1) for heads in (key, value))
        return scaled_dot_product_attention(query.transpose(0, 1), key, value, is_causal=True).transpose(0, 1)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_logits_after_each_loop_are_those_of_the_servers_maths(
    recipe: SimpleNamespace, saved: dict[str, Path], family: str
) -> None:
    trained, _ = recipe.checkpoint.load_model(saved[family])
    model = load_model(saved[family], read_spec(saved[family]), dtype=torch.float32, device=torch.device("cpu"))
    assert model.spec.loops == trained.loops
    tokens, positions = torch.randint(model.spec.vocab_size, (40,)), torch.arange(40)
    outer = Plane()
    state = model.initial_state("zero", torch.zeros(40, dtype=torch.long), positions)
    rows = model.prelude(tokens, positions, outer.attend, state)
    for loops in range(1, trained.loops + 1):
        rows = model.core(rows, positions, Plane().attend)
        want = model.head(model.coda(rows, positions, outer.attend))
        got = trained.predict(tokens[None], loops, torch.zeros(1, 40, dtype=torch.bool)).logits[0]
        torch.testing.assert_close(got, want, atol=LIMIT, rtol=LIMIT)
        assert want.std() > 1000 * LIMIT


@pytest.mark.parametrize(("family", "rule", "threshold"), CASES)
@torch.no_grad()
def test_tokens_and_depths_are_the_engines(
    recipe: SimpleNamespace, saved: dict[str, Path], family: str, rule: str | None, threshold: float | None
) -> None:
    """The parallel evaluation with exits means what serving token by token gives."""
    trained, tokenizer = recipe.checkpoint.load_model(saved[family])
    exit = None if rule is None else recipe.families_common.Exit(rule, threshold)
    prompts = [tokenizer.encode(text).ids for text in ("Q: What is 345 + 278?\nA:", "Ann works for Ben.", "Hi")]
    want = [recipe.evaluate.generate(trained, tokenizer, prompt, exit, limit=12) for prompt in prompts]
    settings = {} if rule is None else {"exit": {"rule": rule, "threshold": threshold}}
    params = SamplingParams(temperature=0.0, max_tokens=12)
    with LLM(str(saved[family]), device="cpu", dtype="float32", config={"kv": {"pages": 200}, **settings}) as llm:
        got = [output.outputs[0] for output in llm.generate(prompts, params)]
    assert [(output.token_ids, output.depths) for output in got] == want
    early = {depth for _, depths in want for depth in depths} - {trained.loops}
    assert bool(early) == (threshold not in (None, 1.0))


@pytest.mark.parametrize("family", FAMILIES)
def test_one_parallel_pass_predicts_what_generation_gives(
    recipe: SimpleNamespace, saved: dict[str, Path], family: str
) -> None:
    """Exits of a whole answer, found at once, are those of its tokens one after the other."""
    rule, threshold = EXITS[family][-1]
    exit = None if rule is None else recipe.families_common.Exit(rule, threshold)
    trained, tokenizer = recipe.checkpoint.load_model(saved[family])
    prompt = tokenizer.encode("Q: What is 345 + 278?\nA:").ids
    answer, spent = recipe.evaluate.generate(trained, tokenizer, prompt, exit, limit=12)
    whole = torch.tensor([prompt + answer])
    may_exit = torch.arange(len(whole[0]) - 1)[None] >= len(prompt)
    with torch.no_grad():
        logits, loops = trained.predict(whole[:, :-1], trained.loops, may_exit, exit)
    assert logits[0, len(prompt) - 1 :, : tokenizer.get_vocab_size()].argmax(-1).tolist() == answer
    assert loops[0, len(prompt) - 1 :].tolist() == spent


@pytest.mark.parametrize("family", FAMILIES)
def test_training_steps_lower_the_loss(recipe: SimpleNamespace, tokenizers: dict[str, Any], family: str) -> None:
    torch.manual_seed(2)
    kind = recipe.families.FAMILIES[family]
    model = kind.build(recipe.tokenizer.VOCAB_SIZE)
    encoder = recipe.tokenizer.Encoder(tokenizers[family])
    tokens, answer = recipe.data.Stream(encoder, kind.dialect, 0, 10, 512)[0]
    batch = recipe.data.Batch(tokens[:, :64], answer[:, :64])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(4):
        draws = recipe.families_common.Draws(torch.Generator().manual_seed(0), Random(0))
        loss = model.loss(batch, step / 4, draws)
        torch.autograd.backward(loss)
        untouched = [name for name, p in model.named_parameters() if p.grad is None]
        assert untouched == []
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert all(math.isfinite(loss) for loss in losses)
    assert losses[-1] < losses[0] - 0.3


@pytest.mark.parametrize("family", FAMILIES)
def test_size_of_the_built_in(recipe: SimpleNamespace, family: str) -> None:
    model = recipe.families.FAMILIES[family].build(recipe.tokenizer.VOCAB_SIZE)
    assert 6e6 < 2 * sum(tensor.numel() for tensor in model.checkpoint().values()) < 7.9e6


@pytest.mark.parametrize("family", FAMILIES)
def test_text_forms_are_those_of_tokenizer_and_template(
    recipe: SimpleNamespace, saved: dict[str, Path], family: str
) -> None:
    """A prompt has the same ids in a training row and in a request."""
    dialect = recipe.families.FAMILIES[family].dialect
    served, template = load_tokenizer(saved[family]), load_chat_template(saved[family])
    assert served is not None
    assert template is not None
    encoder = recipe.tokenizer.Encoder(recipe.checkpoint.load_model(saved[family])[1])
    for system in (None, "Be brief and exact."):
        messages = [{"role": "user", "content": "What is 3 + 4?"}]
        if system:
            messages.insert(0, {"role": "system", "content": system})
        for opener, thinks in zip(dialect.openers, (True, False), strict=False):
            text = dialect.opening(system) + dialect.question("What is 3 + 4?", opener)
            options = {"enable_thinking": thinks} if len(dialect.openers) > 1 else {}
            assert template.render(messages, kwargs=options) == text
            assert encoder(text) == served.encode(text, add_special_tokens=False)
    assert template.render(messages) == dialect.chat_text(messages)
    assert encoder(f"{dialect.bos}Q: What is 3 + 4?\nA:") == served.encode("Q: What is 3 + 4?\nA:")


@pytest.mark.parametrize("family", FAMILIES)
def test_pieces_are_encoded_as_the_library_does(
    recipe: SimpleNamespace, tokenizers: dict[str, Any], saved: dict[str, Path], family: str
) -> None:
    dialect, tokenizer = recipe.families.FAMILIES[family].dialect, tokenizers[family]
    encoder, served = recipe.tokenizer.Encoder(tokenizer), load_tokenizer(saved[family])
    assert served is not None
    stream = recipe.data.Stream(encoder, dialect, 0, 100, 4096)
    rng = Random(0)
    pieces = [piece for _ in range(150) for piece in stream._document(rng, 9.0)]
    pieces += [recipe.data.Piece(f"x{gap}y <|im_end|>z\n\n{gap}a", False) for gap in ("  ", "   ")]
    for piece in pieces:
        ids = recipe.data.piece_ids(piece, encoder)
        if not piece.answer:
            assert ids == tokenizer.encode(piece.text, add_special_tokens=False).ids
        # What goes on behind a prompt is spelled by the bytes of its tokens.
        spelled = b"".join(served.token_bytes(token) for token in ids).decode()
        assert spelled.replace(" ", "") == piece.text.replace(" ", "")
        assert not piece.answer or spelled == piece.text


def test_ids_of_the_added_tokens(tokenizers: dict[str, Any]) -> None:
    def ids(family: str, *tokens: str) -> list[int]:
        return [tokenizers[family].token_to_id(token) for token in tokens]

    assert ids("ouro", "<|endoftext|>", "<|im_start|>", "<|im_end|>") == [0, 1, 2]
    assert ids("nanbeige", "<unk>", "<|im_start|>", "<|im_end|>", "<|endoftext|>") == [0, 1000, 1001, 1002]
    assert ids("nanbeige", "<think>", "</think>", "<tool_call>", "</tool_call>") == [1003, 1004, 1005, 1006]
    assert ids("huginn", "<|begin_text|>", "<|end_text|>", "<|begin_header|>", "<|end_header|>") == list(
        range(992, 996)
    )
    assert ids("huginn", "<|end_turn|>", "<|pad|>") == [996, 997]


def test_nanbeige_template_with_tools_and_thoughts(saved: dict[str, Path]) -> None:
    render: Callable[..., str] = load_chat_template(saved["nanbeige"]).render  # type: ignore[union-attr]
    call = {"function": {"name": "add", "arguments": {"a": 3, "to": "x"}}}
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello", "reasoning_content": "A greeting."},
        {"role": "user", "content": "Add"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "7"},
        {"role": "tool", "content": "8"},
    ]
    start = "<|im_start|>system\nYou are a tiny looped model.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    call_xml = "<function=add>\n<parameter=a>\n3\n</parameter>\n<parameter=to>\nx\n</parameter>\n</function>"
    answered = (
        "<|im_start|>user\nAdd<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
        f"<tool_call>\n{call_xml}\n</tool_call><|im_end|>\n<|im_start|>user\n"
        "<tool_response>\n7\n</tool_response>\n<tool_response>\n8\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n<think>\n"
    )
    told = "<|im_start|>assistant\n<think>\nA greeting.\n</think>\n\nHello<|im_end|>\n"
    assert render(messages) == start + told + answered
    silent = told.replace("A greeting.", "")
    assert render(messages, kwargs={"preserve_thinking": False}) == start + silent + answered
    as_json = render(messages, kwargs={"tool_call_format": "json"})
    assert '<tool_call>\n{"name": "add", "arguments": {"a": 3, "to": "x"}}\n</tool_call>' in as_json


def test_huginn_template(saved: dict[str, Path]) -> None:
    render: Callable[..., str] = load_chat_template(saved["huginn"]).render  # type: ignore[union-attr]
    messages = [{"role": "user", "content": " Hi "}, {"role": "assistant", "content": "Hello\n"}]
    turns = (
        "<|begin_text|><|begin_header|>user<|end_header|>\n\nHi<|end_turn|>"
        "<|begin_header|>Huginn<|end_header|>\n\nHello<|end_turn|>"
    )
    assert render(messages) == turns + "<|begin_header|>Huginn<|end_header|>\n\n"
    assert render(messages, add_generation_prompt=False) == turns + "<|end_text|>"
