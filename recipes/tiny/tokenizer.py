"""The tokenizer of the built-in tiny models: byte-level BPE with single digits and ChatML special tokens."""

import json
from pathlib import Path
from random import Random

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from rlt.evals.tasks import ITEMS, NAMES, TASKS, Example, Message, sample

END_OF_TEXT, IM_START, IM_END = 0, 1, 2
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
VOCAB_SIZE = 1024

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

# Ordinary English beside the task text, so that other prompts do not fall apart into single bytes.
ENGLISH = Path(__file__).with_name("english.txt")


def chat_text(messages: list[Message]) -> str:
    """The same string as the chat template renders, generation prompt included."""
    turns = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
    return turns + "<|im_start|>assistant\n"


def train_tokenizer(seed: int) -> Tokenizer:
    """Learn the merges on task text of the train split and on ordinary English; deterministic in `seed`."""
    rng = Random(f"tokenizer/{seed}")
    tasks: list[Example] = [sample(task, "train", rng) for task in TASKS for _ in range(400)]
    corpus = [text for e in tasks for text in (e.prompt, f" {e.answer}", e.chat_answer)]
    corpus += ENGLISH.read_text(encoding="utf-8").splitlines() * 8
    # Names, things and roles are whole tokens, with and without the space, however rare the sample made them.
    corpus += [f"{word} {word}" for word in (*NAMES, *ITEMS, "user", "assistant", "system")] * 400
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, max_positions: int) -> None:
    """Write tokenizer.json and the tokenizer_config.json that carries the chat template."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIALS[IM_START],
        "eos_token": SPECIALS[IM_END],
        "pad_token": SPECIALS[END_OF_TEXT],
        "unk_token": SPECIALS[END_OF_TEXT],
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_positions,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
