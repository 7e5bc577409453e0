"""Saving a trained model as the folder that the server loads, and reading it back."""

import json
from pathlib import Path
from typing import Any

import torch
from families import FAMILIES
from families.common import TinyModel
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

SHARD_BYTES = 3_900_000


def save_model(model: TinyModel, tokenizer: Tokenizer, folder: Path) -> None:
    """bf16 weights in shards of less than 4 MB, with index, config and generation config."""
    shards: list[dict[str, Tensor]] = [{}]
    room = SHARD_BYTES
    for name, tensor in model.checkpoint().items():
        data = tensor.to("cpu", torch.bfloat16).contiguous()
        if data.nbytes > room:
            shards.append({})
            room = SHARD_BYTES
        shards[-1][name] = data
        room -= data.nbytes
    weight_map: dict[str, str] = {}
    for i, shard in enumerate(shards, 1):
        file = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        (folder / file).chmod(0o644)
        weight_map |= dict.fromkeys(shard, file)
    total = sum(t.nbytes for shard in shards for t in shard.values())
    write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})
    dialect = model.dialect
    ids = {f"{role}_id": tokenizer.token_to_id(dialect.roles[role]) for role in ("bos_token", "eos_token", "pad_token")}
    write_json(folder / "config.json", dict(sorted((model.config() | ids).items())))
    ends = [tokenizer.token_to_id(token) for token in (dialect.end_of_turn, dialect.end_of_text)]
    write_json(
        folder / "generation_config.json", dict(sorted((ids | {"do_sample": False, "eos_token_id": ends}).items()))
    )


def load_model(folder: Path) -> tuple[TinyModel, Tokenizer]:
    """A saved model in fp32, and its tokenizer."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    model = next(family for family in FAMILIES.values() if family.model_type == config["model_type"]).from_config(
        config
    )
    weights = {k: v for file in sorted(folder.glob("*.safetensors")) for k, v in load_file(file).items()}
    model.load_checkpoint({name: tensor.float() for name, tensor in weights.items()})
    return model.eval(), Tokenizer.from_file(str(folder / "tokenizer.json"))


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
