"""From a request's bytes to checked prompts and parameters. Runs on worker threads: it may take long."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec

from rlt.text.chat import ChatTemplate, ChatTemplateError
from rlt.text.parts import UNDIVIDED, AnswerForm
from rlt.text.reasoning import ReasoningSetting, begin_of, reasoning_mode
from rlt.text.tags import THINK_END
from rlt.text.tokenizer import Tokenizer, TokenizerError
from rlt.text.toolcalls import CallStyle, ToolsError, call_style
from rlt_protocols.answers import Detokenized, Tokenized
from rlt_protocols.openai import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    TokenizeRequest,
    Tool,
)
from rlt_protocols.params import SEED_LIMIT, ModelInfo, ParamError, check_room, check_token_ids, resolve
from rltd.frontend.conversation import (
    Conversation,
    check_options,
    template_messages,
    template_options,
    template_tools,
    tools_of,
)
from rltd.frontend.engine_client import NewChoice
from rltd.frontend.errors import ApiError, invalid, shorten, unsupported
from rltd.frontend.parse import (
    Prompt,
    choices_of,
    count_prompts,
    parse,
    prompts_of,
    sampling_of,
)

R_co = TypeVar("R_co", bound=GenerationRequest, covariant=True)


@dataclass(frozen=True, slots=True)
class Prepared(Generic[R_co]):
    """A request that can be submitted."""

    request: R_co
    choices: list[NewChoice]
    #: what each answer begins with: the prompt's text when the request asks for an echo
    echoes: list[str]
    #: what is known about the answers before they begin
    form: AnswerForm = UNDIVIDED


class Preparer:
    """Knows the tokenizer and the chat template; either may be missing.

    A request may ask for `max_answers` at most, counted before any of its prompts is looked at. `enable_thinking` is
    for requests that do not set it; `reasoning` is `model.reasoning`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        template: ChatTemplate | None,
        *,
        max_answers: int,
        enable_thinking: bool | None = None,
        reasoning: ReasoningSetting = "auto",
    ) -> None:
        self._max_answers = max_answers
        self._tokenizer = tokenizer
        self._template = template
        self._enable_thinking = enable_thinking
        self._reasoning = reasoning_mode(reasoning, template)
        self._think_end_id = None if tokenizer is None else tokenizer.token_id(THINK_END)

    @property
    def has_tokenizer(self) -> bool:
        return self._tokenizer is not None

    def completion(self, body: bytes, info: ModelInfo) -> Prepared[CompletionRequest]:
        request = parse(CompletionRequest, body)
        check_model(request.model, info)
        count = choices_of(request)
        prompt_count = count_prompts(request.prompt)
        self._check_answers(prompt_count * count, "n" if prompt_count == 1 else "prompt")
        prompts = prompts_of(request.prompt)
        choices: list[NewChoice] = []
        echoes: list[str] = []
        for prompt in prompts:
            ids = self._encode(prompt, info=info) if isinstance(prompt, str) else prompt
            choices += self._choices(request, ids, info, count, "prompt")
            echoes += [self._echo(prompt, request) if request.echo else ""] * count
        return Prepared(request, choices, echoes)

    def chat(self, body: bytes, info: ModelInfo) -> Prepared[ChatRequest]:
        request = parse(ChatRequest, body)
        check_model(request.model, info)
        count = choices_of(request)
        self._check_answers(count, "n")
        tools = tools_of(request)
        check_options(request, self._needed_template().options)
        style = self._call_style(request) if tools else None
        text = self._render(request, tools)
        ids = self._encode(text, add_special_tokens=False, field="messages", info=info)
        choices = self._choices(request, ids, info, count, "messages")
        form = AnswerForm(
            begin_of(text, self._reasoning),
            style,
            {tool.function.name: tool.function.parameters or {} for tool in tools},
            one_call=request.parallel_tool_calls is False,
            think_end_id=self._think_end_id,
        )
        return Prepared(request, choices, [""] * count, form)

    def tokenize(self, body: bytes, info: ModelInfo) -> Tokenized:
        request = parse(TokenizeRequest, body)
        check_model(request.model, info)
        if (request.prompt is None) == (request.messages is None):
            raise invalid("prompt", "prompt: send either prompt or messages")
        if request.prompt is not None:
            for name in ("tools", "chat_template_kwargs", "enable_thinking"):
                if getattr(request, name):
                    raise invalid(name, f"{name}: goes with messages, not with prompt")
            ids = self._encode(request.prompt, add_special_tokens=request.add_special_tokens is not False)
        else:
            if request.add_special_tokens:
                raise invalid("add_special_tokens", "add_special_tokens: goes with prompt; the template has its own")
            check_options(request, self._needed_template().options)
            if tools := tools_of(request):
                self._call_style(request)
            text = self._render(request, tools)
            ids = self._encode(text, add_special_tokens=False, field="messages")
        return Tokenized(ids, len(ids), info.max_model_len)

    def detokenize(self, body: bytes, info: ModelInfo) -> Detokenized:
        request = parse(DetokenizeRequest, body)
        check_model(request.model, info)
        return Detokenized(self._decode(request.tokens, "tokens", skip_special_tokens=False))

    def _check_answers(self, count: int, field: str) -> None:
        if count > self._max_answers:
            raise invalid(field, f"{field}: asks for {count} answers; at most {self._max_answers} can be queued")

    def _choices(
        self, request: GenerationRequest, prompt: Sequence[int], info: ModelInfo, count: int, field: str
    ) -> list[NewChoice]:
        """`count` answers to one prompt, which came in the field `field`."""
        sampling = sampling_of(request)
        if sampling.stop and self._tokenizer is None:
            raise invalid("stop", "stop: the model has no tokenizer; use stop_token_ids")
        try:
            check_token_ids("prompt", list(prompt), info.vocab_size)
            params = resolve(sampling, info, len(prompt), random_seed=secrets.randbits(63))
        except ParamError as error:
            name = {"prompt": field, "max_tokens": _max_tokens_field(request)}.get(error.field, error.field)
            raise invalid(name, f"{name}: {error.message}") from error
        # Equal seeds would give equal answers.
        seeds = [
            (params.seed + index) % SEED_LIMIT if sampling.seed is not None or index == 0 else secrets.randbits(63)
            for index in range(count)
        ]
        return [NewChoice(prompt, msgspec.structs.replace(params, seed=seed)) for seed in seeds]

    def _encode(
        self, text: str, *, add_special_tokens: bool = True, field: str = "prompt", info: ModelInfo | None = None
    ) -> list[int]:
        """Token ids of `text`. With `info`, a text that cannot fit into the context is refused before the long work."""
        if self._tokenizer is None:
            raise invalid(field, f"{field}: the model has no tokenizer; send token ids to /v1/completions")
        if info is not None:
            try:
                check_room(self._tokenizer.fewest_tokens(text), info, counted=False)
            except ParamError as error:
                raise invalid(field, f"{field}: {error.message}") from error
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def _call_style(self, request: Conversation) -> CallStyle:
        """The form in which the model writes calls of the request's tools."""
        try:
            return call_style(self._needed_template(), template_options(request, self._enable_thinking))
        except ToolsError as error:
            raise unsupported("tools", f"tools: {error}") from error

    def _render(self, request: Conversation, tools: Sequence[Tool]) -> str:
        """The prompt text of a conversation, to be encoded without adding special tokens: the template wrote them.

        The text of a message is not escaped: what spells a special token in it becomes that token.
        """
        template = self._needed_template()
        if not request.messages:
            raise invalid("messages", "messages: is empty; at least one message is needed")
        messages = template_messages(request.messages)
        calling = next((index for index, message in enumerate(messages) if "tool_calls" in message), None)
        if calling is not None and "tool_calls" not in template.source:
            field = f"messages[{calling}].tool_calls"
            raise unsupported(field, f"{field}: the model's chat template does not show calls to the model")
        add_prompt = not (isinstance(request, TokenizeRequest) and request.add_generation_prompt is False)
        try:
            return template.render(
                messages,
                add_generation_prompt=add_prompt,
                kwargs=template_options(request, self._enable_thinking),
                tools=template_tools(tools),
            )
        except ChatTemplateError as error:
            raise invalid("messages", f"messages: {error}") from error

    def _needed_template(self) -> ChatTemplate:
        if self._template is None:
            raise invalid("messages", "messages: the model has no chat template; set model.chat_template to a file")
        return self._template

    def _echo(self, prompt: Prompt, request: CompletionRequest) -> str:
        if isinstance(prompt, str):
            return prompt
        return self._decode(prompt, "prompt", skip_special_tokens=request.skip_special_tokens is not False)

    def _decode(self, ids: list[int], field: str, *, skip_special_tokens: bool) -> str:
        if self._tokenizer is None:
            raise invalid(field, f"{field}: the model has no tokenizer to turn token ids into text")
        try:
            return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        except (TokenizerError, OverflowError) as error:
            index, token_id = next((i, t) for i, t in enumerate(ids) if not self._tokenizer.has(t))
            shown = shorten(str(token_id))
            raise invalid(field, f"{field}: token id {shown} at index {index} is not in the tokenizer") from error


def check_model(name: str | None, info: ModelInfo) -> None:
    """Raise `ApiError` 404 for a model that is not served."""
    if name is not None and name != info.name:
        raise ApiError(
            404,
            f"the model {shorten(name)!r} is not served here; {info.name!r} is",
            param="model",
            code="model_not_found",
        )


def _max_tokens_field(request: GenerationRequest) -> str:
    return "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
