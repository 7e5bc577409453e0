"""The Triton back end against the torch one, on batches that mix everything."""

from __future__ import annotations

import pytest
import torch

from kernels.places import Place
from rlt.attention.interface import AttentionBackend, KvPool, PromptSpan, TickBatch
from rlt.attention.torch_reference import TorchAttention
from rlt.attention.triton_paged import TritonAttention

LAYERS, PAGES, SIZE = 2, 24, 4


def new_pool(place: Place, kv_heads: int, head_dim: int) -> KvPool:
    pool = KvPool(
        layers=LAYERS,
        pages=PAGES,
        page_size=SIZE,
        kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=place.dtype,
        device=place.device,
    )
    pool.keys[:, 1:] = place.normal(LAYERS, PAGES, SIZE, kv_heads, head_dim, seed=1)
    pool.values[:, 1:] = place.normal(LAYERS, PAGES, SIZE, kv_heads, head_dim, seed=2)
    return pool


def batches(place: Place) -> dict[str, TickBatch]:
    def ints(*values: int) -> torch.Tensor:
        return torch.tensor(values, device=place.device)

    tables = torch.tensor([[[1, 2], [3, 0]], [[0, 0], [4, 0]], [[5, 0], [6, 7]]], device=place.device)
    counts = torch.tensor([[5, 3], [0, 1], [2, 8]], device=place.device)
    decode_write = ints(3 * SIZE + 2, 4 * SIZE, 7 * SIZE + 3)
    prompt_pages = ints(11, 9, 14, 10, 17, 20)
    prompts = (PromptSpan(3, 19, 22, prompt_pages), PromptSpan(22, 2, 2, ints(12)))
    flat = (prompt_pages[:, None] * SIZE + torch.arange(SIZE, device=place.device)).flatten()
    prompt_write = torch.cat([flat[3:22], ints(12 * SIZE, 12 * SIZE + 1)])
    none = decode_write[:0]
    return {
        "decode": TickBatch(decode_write, tables, counts, ()),
        "mixed": TickBatch(torch.cat([decode_write, prompt_write]), tables, counts, prompts),
        "prompt": TickBatch(
            prompt_write,
            tables[:0],
            counts[:0],
            tuple(PromptSpan(span.row - 3, span.count, span.length, span.pages) for span in prompts),
        ),
        "one list": TickBatch(ints(5 * SIZE + 1), ints(5)[:, None, None], ints(2)[:, None], ()),
        "nothing": TickBatch(none, tables[:0], counts[:0], ()),
    }


@pytest.mark.parametrize("kind", ["decode", "mixed", "prompt", "one list", "nothing"])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(2, 2, 16), (6, 1, 24)])
def test_same_as_torch(place: Place, kind: str, heads: int, kv_heads: int, head_dim: int) -> None:
    pools = [new_pool(place, kv_heads, head_dim) for _ in range(2)]
    backends: list[AttentionBackend] = [TorchAttention(pools[0]), TritonAttention(pools[1], heads)]
    # The smallest batch first: workspaces grow.
    for each in ("one list", kind):
        batch = batches(place)[each]
        rows = len(batch.write)
        for backend in backends:
            backend.begin(batch)
        for layer in range(LAYERS):
            qkv = place.normal(rows, heads + 2 * kv_heads, head_dim, seed=layer + 3)
            query, key, value = qkv.split([heads, kv_heads, kv_heads], dim=1)
            wanted, got = (backend.attend(layer, query, key, value) for backend in backends)
            place.close(got, wanted)
        assert torch.equal(pools[0].keys, pools[1].keys)
        assert torch.equal(pools[0].values, pools[1].values)
