"""What a request may ask for: sampling, ends and depth. Field names are those of the HTTP API."""

from __future__ import annotations

import msgspec

MAX_STOP_STRINGS = 16
MAX_STOP_TOKEN_IDS = 16
#: far above every exit rule's scale, and a float32 number like all that reaches the device
MAX_THRESHOLD = 1_000_000
MAX_LOGIT_BIAS = 1024
MAX_LOGPROBS = 20
#: beyond it, products of logits would leave float32
MAX_REPETITION_PENALTY = 1000
#: Seeds are 63-bit so that they are exact in every language and in a signed tensor.
SEED_LIMIT = 1 << 63


class ParamError(ValueError):
    """A request field has a value that cannot be served. `field` is the HTTP name of the field."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sampling, end and depth settings of one request.

    `None` means "the server's default", filled in by `resolve`. `top_k` 0 (or -1) and `top_p` 1 switch the filter off;
    `temperature` 0 is greedy.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    #: off at 0; taken off the logits of ids that the answer has, once and for each time it has them
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    #: off at 1; above, ids that prompt or answer have become less likely
    repetition_penalty: float | None = None
    #: added to the logits, by token id
    logit_bias: dict[int, float] | None = None
    #: tell the log-probability of each token, and those of so many of the likeliest ones
    logprobs: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    min_loops: int | None = None
    max_loops: int | None = None
    exit_threshold: float | None = None
    #: lower numbers are served first under engine.scheduling = "priority"
    priority: int = 0
    #: requests share cached prompt pages only with requests of the same salt
    cache_salt: str | None = None


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a client of an engine must know to check and complete a request."""

    name: str
    family: str
    vocab_size: int
    max_model_len: int
    #: loops at full depth, and the limits used when a request sets none
    loops: int
    min_loops: int
    max_loops: int
    exit_threshold: float
    #: the engine's exit rule, and the lowest and highest threshold that mean something to it; None: none does
    exit_rule: str = "ouro"
    exit_thresholds: tuple[float, float] | None = (0.0, MAX_THRESHOLD)
    #: why every token runs all loops; None: tokens may leave early
    full_depth: str | None = None
    eos_token_ids: tuple[int, ...]
    #: defaults of the checkpoint's generation config
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    #: whether the engine's scheduling looks at `SamplingParams.priority`
    priorities: bool = False
    #: tokens (prompt + output) that the KV cache can hold for one request that has it alone
    kv_tokens: int


class ResolvedParams(msgspec.Struct, frozen=True, kw_only=True):
    """`SamplingParams` after defaults and checks: what the engine and the detokenizer work with."""

    max_tokens: int
    min_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    #: ids that end the text: the model's end ids (unless ignored) and the request's own
    end_token_ids: tuple[int, ...]
    #: those of them that only the request named: they are reported as the reason of the end
    stop_token_ids: tuple[int, ...]
    min_loops: int
    max_loops: int
    exit_threshold: float
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    #: (token id, what is added to its logit)
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    priority: int = 0
    cache_salt: str | None = None


def resolve(params: SamplingParams, info: ModelInfo, prompt_tokens: int, *, random_seed: int) -> ResolvedParams:
    """Check `params` for a prompt of `prompt_tokens` and fill in the defaults of `info`.

    `random_seed` (0 <= seed < 2**63) is used when the request has no seed. Raises `ParamError` naming the field.
    """
    if prompt_tokens < 1:
        raise ParamError("prompt", "is empty; at least one token is needed")
    check_room(prompt_tokens, info)
    room = min(info.max_model_len, info.kv_tokens) - prompt_tokens
    max_tokens = room if params.max_tokens is None else params.max_tokens
    _within("max_tokens", max_tokens, 1, None)
    if max_tokens > room:
        limit = min(info.max_model_len, info.kv_tokens)
        raise ParamError(
            "max_tokens",
            f"{max_tokens} with a prompt of {prompt_tokens} tokens is more than the limit of {limit} tokens",
        )
    _within("min_tokens", params.min_tokens, 0, max_tokens)
    temperature = info.temperature if params.temperature is None else params.temperature
    _within("temperature", temperature, 0, 100)
    top_p = info.top_p if params.top_p is None else params.top_p
    if not 0 < top_p <= 1:
        raise ParamError("top_p", f"must be greater than 0 and at most 1, got {top_p}")
    top_k = info.top_k if params.top_k is None else params.top_k
    _within("top_k", top_k, -1, None)
    min_p = info.min_p if params.min_p is None else params.min_p
    _within("min_p", min_p, 0, 1)
    _within("presence_penalty", params.presence_penalty, -2, 2)
    _within("frequency_penalty", params.frequency_penalty, -2, 2)
    repetition = info.repetition_penalty if params.repetition_penalty is None else params.repetition_penalty
    if not 0 < repetition <= MAX_REPETITION_PENALTY:
        raise ParamError(
            "repetition_penalty", f"must be greater than 0 and at most {MAX_REPETITION_PENALTY}, got {repetition}"
        )
    if params.logprobs is not None:
        _within("logprobs", params.logprobs, 0, MAX_LOGPROBS)
    seed = random_seed if params.seed is None else params.seed
    if not -SEED_LIMIT <= seed < SEED_LIMIT:
        raise ParamError("seed", f"must fit in 64 bits, got {seed}")
    if len(params.stop) > MAX_STOP_STRINGS:
        raise ParamError("stop", f"has {len(params.stop)} entries; at most {MAX_STOP_STRINGS} are allowed")
    if any(not text for text in params.stop):
        raise ParamError("stop", "has an empty string")
    if len(params.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise ParamError(
            "stop_token_ids", f"has {len(params.stop_token_ids)} entries; at most {MAX_STOP_TOKEN_IDS} are allowed"
        )
    check_token_ids("stop_token_ids", params.stop_token_ids, info.vocab_size)
    max_loops = info.max_loops if params.max_loops is None else params.max_loops
    _within("max_loops", max_loops, 1, info.loops)
    min_loops = min(info.min_loops, max_loops) if params.min_loops is None else params.min_loops
    _within("min_loops", min_loops, 1, max_loops)
    if info.full_depth is not None:
        _all_loops(info.full_depth, info.loops, min_loops, max_loops, params.exit_threshold)
    threshold = (
        info.exit_threshold if params.exit_threshold is None else _checked_threshold(params.exit_threshold, info)
    )
    _within("priority", params.priority, -(2**31), 2**31 - 1)
    if params.priority and not info.priorities:
        raise ParamError("priority", 'needs a server with engine.scheduling = "priority"')
    eos = () if params.ignore_eos else info.eos_token_ids
    own_ends = tuple(dict.fromkeys(token for token in params.stop_token_ids if token not in eos))
    return ResolvedParams(
        max_tokens=max_tokens,
        min_tokens=params.min_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=min(max(top_k, 0), info.vocab_size),
        min_p=min_p,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=repetition,
        logit_bias=_checked_bias(params.logit_bias or {}, info),
        logprobs=params.logprobs,
        seed=seed % SEED_LIMIT,
        end_token_ids=eos + own_ends,
        stop_token_ids=own_ends,
        min_loops=min_loops,
        max_loops=max_loops,
        exit_threshold=threshold,
        stop=params.stop,
        include_stop_str_in_output=params.include_stop_str_in_output,
        skip_special_tokens=params.skip_special_tokens,
        priority=params.priority,
        cache_salt=params.cache_salt,
    )


def check_room(prompt_tokens: int, info: ModelInfo, *, counted: bool = True) -> None:
    """Raise `ParamError` if no output fits beside the prompt; not `counted`: it may have more tokens than that."""
    has = f"has {'' if counted else 'at least '}{prompt_tokens} tokens"
    if prompt_tokens >= info.max_model_len:
        raise ParamError("prompt", f"{has}; the model's context is {info.max_model_len} tokens with the output")
    if prompt_tokens >= info.kv_tokens:
        raise ParamError("prompt", f"{has}; the KV cache holds {info.kv_tokens} with the output")


def check_token_ids(field: str, ids: tuple[int, ...] | list[int], vocab_size: int) -> None:
    """Raise `ParamError` naming the first id outside the vocabulary."""
    if ids and (min(ids) < 0 or max(ids) >= vocab_size):
        index, token = next((i, t) for i, t in enumerate(ids) if not 0 <= t < vocab_size)
        raise ParamError(field, f"token id {token} at index {index} is outside the vocabulary of {vocab_size}")


def _checked_bias(bias: dict[int, float], info: ModelInfo) -> tuple[tuple[int, float], ...]:
    if len(bias) > MAX_LOGIT_BIAS:
        raise ParamError("logit_bias", f"has {len(bias)} entries; at most {MAX_LOGIT_BIAS} are allowed")
    for token, value in bias.items():
        if not 0 <= token < info.vocab_size:
            raise ParamError("logit_bias", f"token id {token} is outside the vocabulary of {info.vocab_size}")
        if not -100 <= value <= 100:
            raise ParamError("logit_bias", f"of token id {token} must be between -100 and 100, got {value}")
    return tuple(bias.items())


def _checked_threshold(threshold: float, info: ModelInfo) -> float:
    """A request's own threshold, whose meaning and limits are those of the engine's exit rule."""
    if info.exit_thresholds is None:
        raise ParamError("exit_threshold", f"has no meaning with exit rule {info.exit_rule}")
    low, high = info.exit_thresholds
    if not low <= threshold <= high:
        raise ParamError(
            "exit_threshold",
            f"must be between {low:.7g} and {high:.7g} with exit rule {info.exit_rule}, got {threshold}",
        )
    return threshold


def _all_loops(why: str, loops: int, min_loops: int, max_loops: int, threshold: float | None) -> None:
    """Refuse what would let a token of a model of fixed depth leave before its last loop."""
    for field, value in (("max_loops", max_loops), ("min_loops", min_loops)):
        if value < loops:
            raise ParamError(field, f"must be {loops} with this model, got {value}: {why}")
    if threshold is not None and threshold < 1:
        raise ParamError("exit_threshold", f"must be at least 1 with this model, got {threshold:g}: {why}")


def _within(field: str, value: float, low: float, high: float | None) -> None:
    # Written so that NaN fails. Not with `isnan`, which cannot take the integers of any size that JSON has.
    if not value >= low or (high is not None and value > high):
        bounds = f"at least {low}" if high is None else f"between {low} and {high}"
        raise ParamError(field, f"must be {bounds}, got {value}")
