"""What a user asks for and what comes back: plain data, no tensors.

Only the scheduler changes a :class:`Request`; everybody else reads it.
"""

from __future__ import annotations

import enum
import math
from array import array
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any, Protocol

from octavo.attn_rule import ADAPTIVE, DENSE, MODES, AttnRule

MAX_N = 256
MAX_STOP_STRINGS = 64
#: Of these each costs time in every step.
MAX_STOP_TOKEN_IDS = MAX_BIASED_IDS = 1024
MAX_LOGPROBS = 100
MAX_TEMPERATURE = 100.0
MAX_ATTN_TOPK = 2**20
#: Below this a temperature is treated as 0 (greedy): dividing by it would overflow float32.
MIN_TEMPERATURE = 1e-3
#: Logits are float32: within these bounds nothing that is done to one can overflow.
MAX_LOGIT_BIAS = 1e9
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 1e-3, 1e3


class Status(enum.Enum):
    """The life of a request. A preempted request goes back to RUNNING; FINISHED is final."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class Guide(Protocol):
    """Says which tokens may come next in an output, for every choice of one prompt.

    A function of the output so far alone; what either method raises fails that one request. A ValueError
    says that the grammar itself is impossible.
    """

    def allowed(self, choice: int, output_token_ids: Sequence[int]) -> bytes:
        """One bit a token id, the least significant bit of each byte first; 0 forbids the token."""
        ...

    def advance(self, choice: int, output_token_ids: Sequence[int]) -> None:
        """A token was added: :meth:`allowed` will be asked for this output, a step later. May begin to
        compute the answer elsewhere."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose tokens. Names and defaults are those of vLLM's ``SamplingParams``.

    A bad value raises ``ValueError`` with one sentence that names the field and its range.

    Attributes:
        n: choices to generate for the prompt, 1 to ``MAX_N``; they share the prompt's blocks.
        temperature: 0 is greedy; anything below ``MIN_TEMPERATURE`` is treated as 0.
        top_p: keep the smallest set of tokens whose probability reaches this, in (0, 1].
        top_k: keep the k most probable tokens; 0 or -1 keeps all; clamped to the vocabulary.
        min_p: drop tokens less probable than ``min_p`` times the most probable one, in [0, 1].
        repetition_penalty: in [0.001, 1000]; counts tokens of the prompt and of the output.
        presence_penalty: in [-2, 2]; counts tokens of the output only.
        frequency_penalty: in [-2, 2]; counts tokens of the output only.
        logit_bias: token id -> number added to its logit, in [-1e9, 1e9]; -inf forbids the token.
        seed: makes the draw reproducible, alone or in any batch; drawn at admission when None.
        stop: strings that end the text; the text ends before them.
        stop_token_ids: token ids that end the text, beside the model's own end tokens.
        min_tokens: before this many output tokens end tokens are forbidden, and stop strings end nothing.
        max_tokens: output tokens at most; 0 scores the prompt only; None is the rest of the context.
        ignore_eos: go on past the model's end tokens.
        logprobs: report the log-probabilities of this many best tokens (and of the chosen one).
        prompt_logprobs: the same for every prompt token; computes the whole prompt, cached or not.
        skip_special_tokens: leave special tokens out of the text.
        include_stop_str_in_output: keep the stop string at the end of the text.
        guide: allows only some tokens at each position, a grammar's say.
        attn_topk: keys that attention keeps a query and head, half of them the most recent, prompt and answer
            alike; 0 is dense, "auto" as many as matter, "lean" fewer of these, None is what the engine was
            started with. Not sampling's ``top_k``.
        attn_topk_mode: "exact", or "fast": only keys of the spans that rank highest compete. None is the
            engine's.
        attn_topk_tail: whether keys that are not kept enter by the means of their spans; None is the
            engine's, and where that does not say, True with "auto" and "lean" only.
        attn_explain: count which positions top-k attention reads for the first choice; changes no answer.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    min_tokens: int = 0
    max_tokens: int | None = 16
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    guide: Guide | None = None
    attn_topk: int | str | None = None
    attn_topk_mode: str | None = None
    attn_topk_tail: bool | None = None
    attn_explain: bool = False

    def __post_init__(self) -> None:
        check_int("n", self.n, 1, MAX_N)
        _check_range("temperature", self.temperature, 0.0, MAX_TEMPERATURE)
        if not _is_real(self.top_p) or not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p!r:.100}")
        check_int("top_k", self.top_k, -1)
        _check_range("min_p", self.min_p, 0.0, 1.0)
        low, high = MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY
        _check_range("repetition_penalty", self.repetition_penalty, low, high)
        _check_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_logit_bias(self.logit_bias)
        if self.seed is not None:
            check_int("seed", self.seed, -(2**63), 2**63 - 1)
        _check_stop(self.stop)
        _check_stop_token_ids(self.stop_token_ids)
        check_attn_topk(self.attn_topk, self.attn_topk_mode, self.attn_topk_tail)
        check_int("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None:
            check_int("max_tokens", self.max_tokens, 0)
            if self.min_tokens > self.max_tokens:
                raise ValueError(
                    f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})"
                )
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), 0, MAX_LOGPROBS)
        for name in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output", "attn_explain"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r:.100}")

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """``stop`` as a tuple, whatever form the user gave."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def greedy(self) -> bool:
        """True when the most probable token is taken without a draw."""
        return self.temperature < MIN_TEMPERATURE


def is_int(value: Any) -> bool:
    """True for an integer of any kind but a bool, which Python counts among them."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_real(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _check_range(name: str, value: Any, low: float, high: float) -> None:
    if not _is_real(value) or not low <= value <= high:
        raise ValueError(f"{name} must be between {low} and {high}, got {value!r:.100}")


def check_attn_topk(topk: Any, mode: Any, tail: Any) -> None:
    """Refuse with a ValueError what is no budget of keys, no mode and no yes or no; None is none of them."""
    named = isinstance(topk, str) and topk in ADAPTIVE
    if topk is not None and not named and not (is_int(topk) and 0 <= topk <= MAX_ATTN_TOPK):
        names = " or ".join(f'"{name}"' for name in ADAPTIVE)
        raise ValueError(
            f"attn_topk must be a whole number, between 0 and {MAX_ATTN_TOPK}, or {names}, got {topk!r:.100}"
        )
    if mode is not None and mode not in MODES:
        raise ValueError(f"attn_topk_mode must be one of {', '.join(MODES)}, got {mode!r:.100}")
    if tail is not None and not isinstance(tail, bool):
        raise ValueError(f"attn_topk_tail must be True or False, got {tail!r:.100}")


def check_int(name: str, value: Any, low: int, high: int | None = None) -> None:
    """Refuse with a ValueError what is no integer from ``low`` to ``high`` (None: without end)."""
    if not is_int(value) or value < low or (high is not None and value > high):
        span = f"{low} or more" if high is None else f"between {low} and {high}"
        raise ValueError(f"{name} must be a whole number, {span}, got {value!r:.100}")


def _check_logit_bias(logit_bias: Any) -> None:
    if logit_bias is None:
        return
    if not isinstance(logit_bias, Mapping):
        raise ValueError(f"logit_bias must map token ids to numbers, got {logit_bias!r:.100}")
    if len(logit_bias) > MAX_BIASED_IDS:
        raise ValueError(f"logit_bias takes at most {MAX_BIASED_IDS} token ids, got {len(logit_bias)}")
    for token_id, bias in logit_bias.items():
        if not is_int(token_id):
            raise ValueError(f"logit_bias must map token ids to numbers, got the id {token_id!r:.100}")
        if bias != -math.inf:
            _check_range(f"logit_bias[{token_id}]", bias, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)


def _check_stop(stop: Any) -> None:
    if stop is None:
        return
    strings = [stop] if isinstance(stop, str) else stop
    if not isinstance(strings, Sequence | Set) or not all(isinstance(text, str) for text in strings):
        raise ValueError(f"stop must be a string or a list of strings, got {stop!r:.100}")
    if len(strings) > MAX_STOP_STRINGS:
        raise ValueError(f"stop takes at most {MAX_STOP_STRINGS} strings, got {len(strings)}")
    if not all(strings):
        raise ValueError("stop must not contain an empty string: it would end every text at once")


def _check_stop_token_ids(ids: Any) -> None:
    if ids is not None and (not isinstance(ids, Sequence | Set) or not all(map(is_int, ids))):
        raise ValueError(f"stop_token_ids must be a list of token ids, got {ids!r:.100}")
    if ids is not None and len(ids) > MAX_STOP_TOKEN_IDS:
        raise ValueError(f"stop_token_ids takes at most {MAX_STOP_TOKEN_IDS} ids, got {len(ids)}")


def empty_table() -> array[int]:
    """A table of blocks: 32-bit numbers, which a step's tensors take as they lie in memory."""
    return array("i")


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """One sequence that the engine extends: one choice of one prompt.

    There are no phases: a request only ever catches up with its tokens, from
    ``num_computed_tokens`` (K and V are in the cache) to ``num_tokens`` (prompt + output).

    Attributes:
        id: unique in the engine, never reused.
        label: the caller's own name for it; two requests may carry the same.
        prompt_token_ids: the prompt, at least one token.
        params: how to sample; shared by the choices of a prompt.
        eos_token_ids: the model's end tokens (empty when the request ignores them).
        max_tokens: output tokens at most, resolved against max_model_len at admission.
        seed: the seed of its draws, resolved at admission.
        choice: 0 .. n-1.
        arrival: rises by one a request; the lower is the older.
        priority: the lower goes first; ties by arrival.
        cache_salt: requests share cached blocks only under the same salt.
        attn_rule: which keys its attention keeps, resolved at admission.
        attn_policy: all that decides which keys its attention keeps, in words ("" is dense); requests share
            cached blocks only under the same policy.
    """

    id: int
    label: str
    prompt_token_ids: list[int]
    params: SamplingParams
    eos_token_ids: tuple[int, ...] = ()
    max_tokens: int = 16
    seed: int = 0
    choice: int = 0
    arrival: int = 0
    priority: int = 0
    cache_salt: str = ""
    attn_rule: AttnRule = DENSE
    attn_policy: str = ""

    status: Status = Status.WAITING
    output_token_ids: list[int] = field(default_factory=list)
    #: By number of block; -1 for one that is read in compact form alone.
    block_table: array[int] = field(default_factory=empty_table)
    #: The compact forms of the first blocks; -1 for one that is read in a summary alone.
    compact_table: array[int] = field(default_factory=empty_table)
    #: The summaries that stand for the oldest, (level, unit) -> compact block
    #: (``octavo.kernels.history_layout``).
    summaries: dict[tuple[int, int], int] = field(default_factory=dict)
    num_computed_tokens: int = 0
    #: Tokens taken from the prefix cache at the first admission; fixed from then on.
    num_cached_tokens: int | None = None
    #: Those of them that came from disk.
    num_disk_tokens: int = 0
    #: Those of them that are read in compact form, or in summaries.
    num_compact_tokens: int = 0
    num_summarised_tokens: int = 0
    #: Why the prefix stopped matching, in words, and the first token that had to be computed.
    cache_miss_reason: str | None = None
    num_preemptions: int = 0
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def attn_topk(self) -> int:
        """Keys that its attention keeps at most; 0 is dense."""
        return self.attn_rule.topk

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens together."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def token_ids(self) -> list[int]:
        """Prompt and output tokens; not to be changed, since it may be the prompt's own list."""
        prompt, output = self.prompt_token_ids, self.output_token_ids
        return prompt + output if output else prompt

    @property
    def finished(self) -> bool:
        return self.status is Status.FINISHED


@dataclass(frozen=True, slots=True)
class Logprob:
    """The log-probability of one token at one position, and its rank there (1 = the best)."""

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """One choice of a request, so far or whole.

    ``finish_reason`` is "stop", "length", "abort", "error", or None while it runs; ``stop_reason``
    is the stop string or stop token id that ended it, None for the model's own end token.
    ``logprobs`` has one dict per output token, from token id to :class:`Logprob`.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AttnTopkReport:
    """What top-k attention left out of a request's computed tokens.

    A row is a query, a head and a layer that is not dense. ``visible_keys`` and ``kept_keys`` are sums over
    ``rows``. The dropped mass of a row is the share of its softmax that fell on the keys it did not keep, 0
    to 1; these are upper bounds that are proven, not estimates. ``bytes_read`` of K, V and what stands for
    them were read in steps of at most 4 tokens of the request, as decode takes, and ``dense_bytes`` is what
    dense attention would have read of K and V in these.
    """

    attn_topk: int | str
    rows: int = 0
    visible_keys: int = 0
    kept_keys: int = 0
    mean_dropped_mass: float = 0.0
    worst_dropped_mass: float = 0.0
    bytes_read: int = 0
    dense_bytes: int = 0

    def __add__(self, other: AttnTopkReport) -> AttnTopkReport:
        """Both together, under this one's ``attn_topk``."""
        rows = self.rows + other.rows
        dropped = self.mean_dropped_mass * self.rows + other.mean_dropped_mass * other.rows
        return AttnTopkReport(
            attn_topk=self.attn_topk,
            rows=rows,
            visible_keys=self.visible_keys + other.visible_keys,
            kept_keys=self.kept_keys + other.kept_keys,
            mean_dropped_mass=dropped / rows if rows else 0.0,
            worst_dropped_mass=max(self.worst_dropped_mass, other.worst_dropped_mass),
            bytes_read=self.bytes_read + other.bytes_read,
            dense_bytes=self.dense_bytes + other.dense_bytes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryReport:
    """How much of a request's attention fell on summaries of its oldest history.

    A row is a computed token that read summaries; its mass is the share of the softmax that fell on them, the
    mean over its heads and the layers that see so far. ``recalled`` summaries were read as the blocks they
    stand for, counted once for each row, head and layer, and ``not_there`` should have been, but were not to
    be had.
    """

    rows: int = 0
    mean_mass: float = 0.0
    worst_mass: float = 0.0
    recalled: int = 0
    not_there: int = 0

    def __add__(self, other: HistoryReport) -> HistoryReport:
        rows = self.rows + other.rows
        mass = self.mean_mass * self.rows + other.mean_mass * other.rows
        return HistoryReport(
            rows=rows,
            mean_mass=mass / rows if rows else 0.0,
            worst_mass=max(self.worst_mass, other.worst_mass),
            recalled=self.recalled + other.recalled,
            not_there=self.not_there + other.not_there,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AttnReadReport:
    """Where in its context an answer's attention read, over the tokens from which it was sampled.

    ``share[layer][i]`` is the share that was read of what its tokens and query heads saw of the positions
    ``i * span`` to ``i * span + span - 1``: 0 for a span that nobody read, 1 in a layer that is dense.
    """

    span: int
    share: tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestMetrics:
    """Times in seconds from ``time.monotonic()``; None where it has not happened yet."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """The answer to one prompt: its choices, and what the prefix cache did for it.

    ``prompt_logprobs``, when asked for, has one entry per prompt token; the first is None, since nothing
    comes before it. Of ``num_cached_tokens``, ``num_disk_tokens`` came from disk, and ``num_compact_tokens``
    were found in the compact form that they are read in, ``num_summarised_tokens`` of these in summaries.
    ``cache_miss_reason`` says where and why the prefix stopped matching. ``error`` is one sentence when the
    request was refused (then there are no outputs) or failed (then ``outputs`` hold what there was before,
    and those that failed end with "error"). ``request_id`` is unique in the engine; ``label`` is the caller's
    own name, which several requests may carry. ``attn_topk`` is there when the request's attention was not
    dense, and ``attn_reads``, of the first choice, when it also asked for it by ``attn_explain``. ``history``
    is there when its history outgrew the engine's budget.
    """

    request_id: str
    label: str | None = None
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0
    num_disk_tokens: int = 0
    num_compact_tokens: int = 0
    num_summarised_tokens: int = 0
    cache_miss_reason: str | None = None
    error: str | None = None
    metrics: RequestMetrics | None = None
    attn_topk: AttnTopkReport | None = None
    attn_reads: AttnReadReport | None = None
    history: HistoryReport | None = None
