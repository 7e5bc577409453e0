"""The tokenizers of the built-in tiny models, of the kinds that their families have, with single digits."""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from random import Random

from dialects import CHATML, Dialect
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from rlt.evals.tasks import ITEMS, NAMES, TASKS, Example, sample

VOCAB_SIZE = 1024
"""Rows of the embedding. Where added tokens come last, some ids after them are unused, as in the released models."""
BASE_PIECES = {"nanbeige": 1000, "huginn": 992}
"""Ids before the added tokens."""

# Ordinary English beside the task text, so that other prompts do not fall apart into single bytes.
ENGLISH = Path(__file__).with_name("english.txt")

# Words with what stands before them, single digits, signs, line ends, spaces.
_HUGINN_SPLIT = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s*[\r\n]|\s+(?!\S)|\s+"


def train_tokenizer(seed: int, dialect: Dialect = CHATML) -> Tokenizer:
    """Learn the merges on task text of the train split and on ordinary English; deterministic in `seed`."""
    rng = Random(f"tokenizer/{seed}")
    tasks: list[Example] = [sample(task, "train", rng) for task in TASKS for _ in range(400)]
    corpus = [text for e in tasks for text in (e.prompt, f" {e.answer}", e.chat_answer)]
    corpus += ENGLISH.read_text(encoding="utf-8").splitlines() * 8
    # Names, things and roles are whole tokens, with and without the space, however rare the sample made them.
    corpus += [f"{word} {word}" for word in (*NAMES, *ITEMS, "user", "assistant", "system")] * 400
    if dialect.tokenizer == "sentencepiece":
        return _sentencepiece(corpus, dialect)
    return _byte_level(corpus, dialect)


def _byte_level(corpus: Iterable[str], dialect: Dialect) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    added_last = dialect.name in BASE_PIECES
    if added_last:
        splits: list[pre_tokenizers.PreTokenizer] = [pre_tokenizers.Split(Regex(_HUGINN_SPLIT), "isolated")]
    else:
        splits = [pre_tokenizers.Digits(individual_digits=True)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not added_last)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=BASE_PIECES.get(dialect.name, VOCAB_SIZE),
        special_tokens=[] if added_last else list(dialect.specials),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    if added_last:
        tokenizer.add_special_tokens(list(dialect.specials))
        tokenizer.post_processor = _leading(dialect.bos, tokenizer)
    return tokenizer


def _sentencepiece(corpus: Iterable[str], dialect: Dialect) -> Tokenizer:
    """BPE over characters with `▁` for spaces, one before each text too; unknown characters become byte tokens."""
    learner = Tokenizer(models.BPE())
    # No piece has a space inside, a digit beside it, or a sign after letters; line ends are bytes.
    learner.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Metaspace(prepend_scheme="never"),
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.Split(Regex("[.,;:?!']"), "isolated"),
        ]
    )
    fixed = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    size = BASE_PIECES[dialect.name] - len(fixed)
    learner.train_from_iterator(
        [line for text in corpus for line in text.split("\n")],
        trainers.BpeTrainer(vocab_size=size, show_progress=False),
    )
    learned = json.loads(learner.to_str())["model"]
    pieces = [*fixed, *sorted(learned["vocab"], key=learned["vocab"].__getitem__)]
    merges = [tuple(merge) for merge in learned["merges"]]
    tokenizer = Tokenizer(
        models.BPE(
            {piece: i for i, piece in enumerate(pieces)}, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True
        )
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(fixed[:3])
    for token in dialect.specials:
        # Tags of thinking and tool calls are part of the text.
        special = token.startswith("<|")
        tokenizer.add_tokens([AddedToken(token, special=special, normalized=False)])
    tokenizer.post_processor = _leading(dialect.bos, tokenizer)
    return tokenizer


def _leading(bos: str, tokenizer: Tokenizer) -> processors.PostProcessor:
    """Puts `bos` before a text, if asked to add special tokens."""
    return processors.TemplateProcessing(
        single=[bos, "$A"], pair=[bos, "$A", bos, "$B"], special_tokens=[(bos, tokenizer.token_to_id(bos))]
    )


def save_tokenizer(tokenizer: Tokenizer, folder: Path, max_positions: int, dialect: Dialect = CHATML) -> None:
    """Write tokenizer.json and the tokenizer_config.json that carries the chat template."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **dialect.roles,
        "add_bos_token": bool(dialect.bos),
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_positions,
        "chat_template": dialect.template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


class Encoder:
    """A tokenizer for task text that remembers words, several times as fast as the library.

    Exact for the tokenizers above, since none of their pieces goes on behind a space.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        added = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
        self._added = re.compile("(" + "|".join(map(re.escape, added)) + ")")
        settings = json.loads(tokenizer.to_str())
        steps = (settings["normalizer"] or {}).get("normalizers", [])
        settings["normalizer"] = {"type": "Sequence", "normalizers": [s for s in steps if s["type"] != "Prepend"]}
        #: without the space before each text
        self._inner = Tokenizer.from_str(json.dumps(settings))
        self._lead = " " if any(step["type"] == "Prepend" for step in steps) else ""
        self._memory: dict[str, list[int]] = {}

    def __call__(self, text: str, *, continues: bool = False) -> list[int]:
        """Ids of a text without any that the tokenizer adds, or of one that `continues` another's last token."""
        ids: list[int] = []
        for i, part in enumerate(self._added.split(text)):
            if not part:
                continue
            # Every second part is an added token.
            if i % 2:
                ids += self._word(part)
                continue
            text = part if continues else self._lead + part
            if "  " in text:
                ids += self._inner.encode(text, add_special_tokens=False).ids
                continue
            first, *others = text.split(" ")
            if first:
                ids += self._word(first)
            for word in others:
                ids += self._word(" " + word)
        return ids

    def _word(self, word: str) -> list[int]:
        ids = self._memory.get(word)
        if ids is None:
            if len(self._memory) > 200_000:
                self._memory.clear()
            ids = self._memory[word] = self._inner.encode(word, add_special_tokens=False).ids
        return ids
