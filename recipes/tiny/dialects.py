"""How each family spells text: special tokens and chat form, as its released checkpoints do.

A chat form exists twice: as the pieces that training rows are made of, and as the template in `templates/` that the
server renders. A test holds them against each other.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from rlt.evals.tasks import Message

TEMPLATES = Path(__file__).with_name("templates")


class Opener(NamedTuple):
    """A way to begin an answer: the end of the prompt, and what the model writes before the answer proper."""

    prompt: str
    answer: str


@dataclass(frozen=True, slots=True)
class Dialect:
    """The tokenizer's kind, the special tokens and the chat form of a family."""

    name: str
    tokenizer: Literal["byte_level", "sentencepiece"]
    #: added tokens in the order of their ids
    specials: tuple[str, ...]
    #: what tokenizer_config.json calls some of them
    roles: Mapping[str, str]
    #: leads a raw prompt, put there by the tokenizer
    bos: str
    end_of_text: str
    end_of_turn: str
    #: before and after the role's name
    header: tuple[str, str]
    #: between an end of turn and the next header
    after_turn: str = ""
    assistant: str = "assistant"
    #: what a chat begins with
    chat_bos: str = ""
    #: the system message of chats that have none
    default_system: str | None = None
    openers: tuple[Opener, ...] = (Opener("", ""),)

    @property
    def template(self) -> str:
        """The chat template."""
        return (TEMPLATES / f"{self.name}.jinja").read_text(encoding="utf-8")

    def opening(self, system: str | None) -> str:
        """What a chat begins with, before the first question."""
        system = system or self.default_system
        return self.chat_bos + ("" if system is None else self._turn("system", system))

    def question(self, content: str, opener: Opener) -> str:
        """A question and the beginning of the assistant's turn."""
        return self._turn("user", content) + self._header(self.assistant) + opener.prompt

    def chat_text(self, messages: list[Message]) -> str:
        """The string that the chat template renders for a question with or without a system message before it."""
        system = messages[0]["content"] if len(messages) > 1 else None
        return self.opening(system) + self.question(messages[-1]["content"], self.openers[0])

    def _turn(self, role: str, content: str) -> str:
        return f"{self._header(role)}{content}{self.end_of_turn}{self.after_turn}"

    def _header(self, role: str) -> str:
        return f"{self.header[0]}{role}{self.header[1]}"


CHATML = Dialect(
    name="chatml",
    tokenizer="byte_level",
    specials=("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    roles={
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": "<|endoftext|>",
    },
    bos="",
    end_of_text="<|endoftext|>",
    end_of_turn="<|im_end|>",
    header=("<|im_start|>", "\n"),
    after_turn="\n",
)

NANBEIGE = Dialect(
    name="nanbeige",
    tokenizer="sentencepiece",
    specials=("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<think>", "</think>", "<tool_call>", "</tool_call>"),
    roles={"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<unk>", "unk_token": "<unk>"},
    bos="<|im_start|>",
    end_of_text="<|endoftext|>",
    end_of_turn="<|im_end|>",
    header=("<|im_start|>", "\n"),
    after_turn="\n",
    default_system="You are a tiny looped model.",
    # Thinking is on unless a request switches it off; there is little to say.
    openers=(Opener("<think>\n", "I know this.\n</think>\n\n"), Opener("<think>\n\n</think>\n\n", "")),
)

HUGINN = Dialect(
    name="huginn",
    tokenizer="byte_level",
    specials=(
        "<|begin_text|>",
        "<|end_text|>",
        "<|begin_header|>",
        "<|end_header|>",
        "<|end_turn|>",
        "<|pad|>",
    ),
    roles={"bos_token": "<|begin_text|>", "eos_token": "<|end_text|>", "pad_token": "<|pad|>"},
    bos="<|begin_text|>",
    end_of_text="<|end_text|>",
    end_of_turn="<|end_turn|>",
    header=("<|begin_header|>", "<|end_header|>\n\n"),
    assistant="Huginn",
    chat_bos="<|begin_text|>",
)
