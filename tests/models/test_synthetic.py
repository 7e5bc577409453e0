"""Synthetic checkpoints: exact sizes of the published shapes, files that load, and what calibration fits."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from rlt.config import load_config
from rlt.errors import RltError
from rlt.models.checkpoint import read_spec
from rlt.models.registry import MATHS, load_model
from rlt.models.spec import ModelSpec
from rlt.synthetic.calibrate import TOLERANCE, Measured, Wanted, find_scale
from rlt.synthetic.fit import criterion_depths, fit_gate, fit_threshold, gate_depths, spread
from rlt.synthetic.forward import Files, pass_flops, run
from rlt.synthetic.make import Job, Made, entries, make_checkpoint, read_config
from rlt.synthetic.shapes import SHAPES, TEST_SHAPE, find_shape
from rlt.synthetic.shards import Entry, split, write_file
from rlt.synthetic.weights import Weights
from rlt.text.chat import load_chat_template
from rlt.text.tokenizer import load_tokenizer
from rltd.check import kv_bytes_per_token, model_size

FAMILIES = ("ouro", "nanbeige", "huginn")
CPU = torch.device("cpu")


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Small products run faster in one thread, above all beside other programs."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def published(family: str, name: str) -> ModelSpec:
    shape = find_shape(family, name)
    return read_config(dict(shape.config) | {"torch_dtype": shape.dtype})


def make(directory: Path, family: str, seed: int = 0, wanted: Wanted | None = None) -> Made:
    shape = find_shape(family, TEST_SHAPE)
    job = Job(shape, directory, shape.dtype, seed, wanted or Wanted())
    return make_checkpoint(job, CPU, lambda what, share: None, lambda line: None)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint per family without calibration."""
    root = tmp_path_factory.mktemp("plain")
    for family in FAMILIES:
        make(root / family, family)
    return {family: root / family for family in FAMILIES}


@pytest.mark.parametrize(
    ("family", "name", "parameters", "tensors", "disk_bytes"),
    [
        ("ouro", "1.4b", 1_434_652_673, 269, 2 * 1_434_652_673),
        ("ouro", "2.6b", 2_667_974_657, 533, 2 * 2_667_974_657),
        ("nanbeige", "3b", 4_169_800_704, 201, 2 * 4_169_800_704),
        ("nanbeige", "3b-base", 4_169_800_704, 201, 2 * 4_169_800_704),
        # With the second copy of the embedding and the rotary table, float32.
        ("huginn", "0125", 3_564_976_800, 77, 4 * 3_911_400_096),
    ],
)
def test_the_published_sizes(family: str, name: str, parameters: int, tensors: int, disk_bytes: int) -> None:
    spec = published(family, name)
    size = model_size(spec)
    assert (size.parameters, size.tensors) == (parameters, tensors)
    dtype = torch.float32 if family == "huginn" else torch.bfloat16
    assert sum(entry.nbytes for entry in entries(Weights(spec, 0), dtype)) == disk_bytes


@pytest.mark.parametrize(
    ("family", "name", "one_loop", "outside", "all_loops", "one_plane"),
    [
        ("ouro", "1.4b", 196_608, 0, 786_432, 196_608),
        ("ouro", "2.6b", 393_216, 0, 1_572_864, 393_216),
        ("nanbeige", "3b", 90_112, 0, 180_224, None),
        ("huginn", "0125", 84_480, 84_480, 2_787_840, 168_960),
    ],
)
def test_keys_and_values_of_the_published_shapes(
    family: str, name: str, one_loop: int, outside: int, all_loops: int, one_plane: int | None
) -> None:
    sizes = kv_bytes_per_token(load_config(), published(family, name), "bfloat16")
    assert (sizes["one_loop"], sizes["outside_loops"], sizes["last_exited"]) == (one_loop, outside, all_loops)
    assert sizes.get("last_step") == one_plane


def test_arithmetic_of_a_calibration_pass() -> None:
    # Four loops of the layers, and the head after the first and the last.
    assert pass_flops(Weights(published("ouro", "1.4b"), 0)) == pytest.approx(1e9 * (4 * 2.4663 + 2 * 0.2013), rel=1e-3)
    outside = 1.5815 + 2 * (1.5815 + 0.6921)
    assert pass_flops(Weights(published("huginn", "0125"), 0)) == pytest.approx(1e9 * (32 * 3.2744 + outside), rel=1e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_loader_takes_what_is_written(plain: dict[str, Path], family: str) -> None:
    directory, shape = plain[family], find_shape(family, TEST_SHAPE)
    spec = read_spec(directory)
    assert (spec.family, spec.loops, spec.known_tokens) == (family, shape.loops, shape.tokens.known)
    assert set(spec.eos_token_ids) == {shape.tokens.special[name] for name in shape.tokens.special if name in ENDS}
    model = load_model(directory, spec, dtype=torch.float32, device=CPU)
    assert model.spec == spec
    stored = {name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}
    expected = torch.float32 if family == "huginn" else torch.bfloat16
    assert {tensor.dtype for tensor in stored.values()} == {expected}
    assert all(tensor.isfinite().all() for tensor in stored.values())


ENDS = ("<|im_end|>", "<|endoftext|>", "<|end_text|>", "<|end_turn|>")


@pytest.mark.parametrize("family", FAMILIES)
def test_streamed_layers_compute_what_the_model_computes(plain: dict[str, Path], family: str) -> None:
    directory = plain[family]
    spec = read_spec(directory)
    sequences, length = 3, 12
    tokens = torch.randint(spec.known_tokens, (sequences * length,), generator=torch.Generator().manual_seed(5))
    index = {name: file.name for file in directory.glob("*.safetensors") for name in load_file(file)}
    weights = Weights(spec, 0)
    weights.scale = {"ouro": 1.0, "nanbeige": 1.0, "huginn": 0.25}[family]
    disk_dtype = getattr(torch, spec.dtype)
    files = Files(directory, index, weights, disk_dtype=disk_dtype, dtype=torch.float32, device=CPU)
    seen: list[tuple[Tensor, Tensor]] = []

    def note(loop: int, rows: Tensor, head_rows: Callable[[], Tensor]) -> None:
        if loop:
            seen.append((rows, head_rows()))

    model = load_model(directory, spec, dtype=torch.float32, device=CPU)
    positions = torch.arange(length).repeat(sequences)
    seeds = torch.arange(sequences).repeat_interleave(length)

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        parts = []
        for first in range(0, len(query), length):
            q, k, v = (rows[first : first + length].transpose(0, 1) for rows in (query, key, value))
            parts.append(scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(0, 1))
        return torch.cat(parts)

    with torch.inference_mode():
        run(spec, files, tokens, sequences, note)
        rows = model.prelude(tokens, positions, attend, model.initial_state("seeded", seeds, positions))
        for state, final in seen:
            rows = model.core(rows, positions, attend)
            torch.testing.assert_close(state, rows[:, : spec.hidden_size], atol=2e-5, rtol=1e-4)
            torch.testing.assert_close(final, model.coda(rows, positions, attend), atol=2e-5, rtol=1e-4)
    assert len(seen) == spec.loops


def test_the_seed_decides(tmp_path: Path) -> None:
    for directory, seed in (("a", 1), ("b", 1), ("c", 2)):
        make(tmp_path / directory, "ouro", seed)
    names = sorted(file.name for file in (tmp_path / "a").iterdir())
    a, b, c = ([(tmp_path / d / name).read_bytes() for name in names] for d in "abc")
    assert a == b
    assert all(x != y for name, x, y in zip(names, a, c, strict=True) if name.startswith("model-00001"))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_id_but_the_padding_is_a_token(plain: dict[str, Path], family: str) -> None:
    tokens = find_shape(family, TEST_SHAPE).tokens
    tokenizer = load_tokenizer(plain[family])
    assert tokenizer is not None
    pieces = [tokenizer.token_bytes(token_id) for token_id in range(tokens.known)]
    assert len(set(pieces)) == tokens.known
    assert not any(tokenizer.has(token_id) for token_id in range(tokens.known, tokens.rows))
    assert {name: tokenizer.token_id(name) for name in tokens.special} == tokens.special
    text = "Ça va? 日本\n<b>"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    template = load_chat_template(plain[family])
    assert template is not None
    chat = tokenizer.encode(template.render([{"role": "user", "content": "hi"}]), add_special_tokens=False)
    assert chat.count(tokens.special[tokens.bos]) in (1, 2)


def test_files_are_split_at_the_limit() -> None:
    sizes = {"a": 3, "b": 4, "c": 9, "late": 1, "d": 2}
    parts = split([Entry(name, (size,), torch.float32) for name, size in sizes.items()], lambda n: n == "late", 4 * 7)
    assert [[entry.name for entry in part] for part in parts] == [["a", "b"], ["c"], ["d"], ["late"]]


def test_a_file_is_written_in_pieces(tmp_path: Path) -> None:
    values = {"x": torch.arange(12.0).view(3, 4), "y": torch.tensor([0.5])}
    kinds = {"x": torch.bfloat16, "y": torch.float32}
    counted: list[int] = []
    write_file(
        tmp_path / "f.safetensors",
        [Entry(name, tuple(tensor.shape), kinds[name]) for name, tensor in values.items()],
        lambda name: values[name].split(2),
        counted.append,
    )
    stored = load_file(tmp_path / "f.safetensors")
    assert {name: tensor.dtype for name, tensor in stored.items()} == kinds
    assert all(torch.equal(stored[name].float(), tensor) for name, tensor in values.items())
    assert counted == [16, 8, 4]


def test_a_large_tensor_is_never_whole_in_memory(tmp_path: Path) -> None:
    code = f"""
import resource
from pathlib import Path
import torch
torch.set_num_threads(1)
from rlt.synthetic.make import read_config
from rlt.synthetic.shapes import find_shape
from rlt.synthetic.shards import Entry, write_file
from rlt.synthetic.weights import Weights
weights = Weights(read_config(dict(find_shape("nanbeige", "3b").config) | {{"torch_dtype": "bfloat16"}}), 0)
name = "model.layers.0.mlp.down_proj.weight"
weights.shapes[name] = (3072 * 4, 10752)
entry = Entry(name, weights.shapes[name], torch.bfloat16)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
write_file(Path({str(tmp_path / "f")!r}), [entry], weights.blocks, lambda count: None)
print(entry.nbytes, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    tensor_bytes, grown = map(int, done.stdout.split())
    assert tensor_bytes > 250e6
    assert grown < 100e6


def test_the_search_finds_a_falling_curve() -> None:
    tried: list[float] = []

    def measure(scale: float) -> Measured:
        tried.append(scale)
        return Measured(1 / (1 + (scale / 0.03) ** 3), torch.empty(0))

    for asked in (0.95, 0.5, 0.1):
        tried.clear()
        scale, found = find_scale(measure, asked, 0.5)
        assert found.agreement == pytest.approx(asked, abs=TOLERANCE)
        assert scale in tried
        assert len(tried) <= 12


def test_an_agreement_that_is_not_reached_is_an_error() -> None:
    with pytest.raises(RltError, match=r"--agreement 0\.3 is not reached: the nearest of \d+ measurements is 0\.600"):
        find_scale(lambda scale: Measured(0.6 if scale > 0.01 else 0.9, torch.empty(0)), 0.3, 0.5)


@pytest.mark.parametrize("mean", [1.2, 2.5, 3.8])
def test_the_gate_gives_the_mean_depth(mean: float) -> None:
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(1, 2000, 64, generator=generator)
    rows = start + 0.3 * torch.randn(4, 2000, 64, generator=generator).cumsum(0) + 0.5
    weight = torch.randn(1, 64, generator=generator)
    scaled, bias = fit_gate(rows, weight, mean, 0.5, torch.bfloat16)
    depths = spread(gate_depths(rows, scaled, bias, 0.5), 4)
    assert depths.mean == pytest.approx(mean, abs=0.03)
    assert sum(depths.shares) == pytest.approx(1)
    if mean == 2.5:
        assert min(depths.shares) > 0.1


def test_depths_of_the_gate_by_hand() -> None:
    # Hazards of 1/2 after each loop: the accumulated probability is 1/2, 3/4, 7/8.
    rows, weight, bias = torch.zeros(4, 1, 2), torch.ones(1, 2), torch.zeros(1)
    assert [int(gate_depths(rows, weight, bias, q)) for q in (0.5, 0.6, 0.75, 0.8, 0.9)] == [1, 2, 2, 3, 4]


def test_the_criterion_threshold_gives_the_mean_depth() -> None:
    rate = torch.linspace(0.3, 3, 1000)
    values = 2 * torch.exp(-torch.arange(1.0, 33)[:, None] * rate)
    threshold = fit_threshold(values, 6.0)
    assert float(criterion_depths(values, threshold).double().mean()) == pytest.approx(6.0, abs=0.05)
    assert criterion_depths(torch.tensor([[0.5], [0.1], [0.4], [0.3]]), 0.2).tolist() == [2]
    assert criterion_depths(torch.tensor([[0.5], [0.4]]), 0.2).tolist() == [2]


def test_every_shape_is_one_that_the_engine_knows() -> None:
    for family, name in SHAPES:
        spec, shape = published(family, name), find_shape(family, name)
        assert (spec.family, spec.loops) == (family, shape.loops)
        assert all(math.prod(size) for size in MATHS[family].shapes(spec).values())
        assert max(shape.tokens.special.values()) < shape.tokens.known <= spec.vocab_size
