"""The synchronous engine: requests in, one step at a time, outputs out. One thread."""

from __future__ import annotations

import contextlib
import itertools
import random
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from octavo.cache.disk_cache import DiskCache, DiskStats
from octavo.config import EngineConfig
from octavo.engine import admission
from octavo.engine.metrics import EngineMetrics
from octavo.engine.pace import StepPace
from octavo.engine.reads import SpanCounts
from octavo.engine.runner import Runner, StepResult
from octavo.engine.scheduler import Scheduler
from octavo.engine.step import CacheView, SchedulerOutput, SchedulerStats
from octavo.request import (
    AttnTopkReport,
    CompletionOutput,
    HistoryReport,
    Logprob,
    Request,
    RequestMetrics,
    RequestOutput,
    SamplingParams,
)
from octavo.tokenizer import IncrementalDetokenizer, Tokenizer

INTERRUPTED = "the step that computed this was interrupted"


@dataclass(slots=True)
class _Choice:
    """What the engine keeps beside a :class:`Request`: its text and times.

    ``num_taken`` of the request's output tokens are in the text; ``taking`` while one is added to it.
    """

    request: Request
    detokenizer: IncrementalDetokenizer
    text: str = ""
    num_taken: int = 0
    taking: bool = False
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float = 0.0
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    last_token_time: float | None = None


@dataclass(slots=True)
class _Entry:
    """One prompt and its choices."""

    id: int
    label: str | None
    prompt: str | None
    choices: list[_Choice]
    arrival_time: float
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    error: str | None = None
    attn_report: AttnTopkReport | None = None
    attn_reads: SpanCounts | None = None
    history_report: HistoryReport | None = None

    @property
    def finished(self) -> bool:
        return all(choice.finish_reason is not None for choice in self.choices)


class Engine:
    """Extends many requests at once, each exactly as if it were alone.

    ``config`` is resolved: ``config.scheduler.max_model_len`` and ``config.cache.num_blocks`` are
    numbers. ``eos_token_ids`` end a text unless its request ignores them. ``disk`` is the scheduler's.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        runner: Runner,
        scheduler: Scheduler,
        tokenizer: Tokenizer,
        eos_token_ids: Iterable[int] = (),
        disk: DiskCache | None = None,
    ) -> None:
        if config.scheduler.max_model_len is None:
            raise ValueError("the engine needs a resolved max_model_len")
        self.config = config
        self.max_model_len: int = config.scheduler.max_model_len
        self.vocab_size = runner.vocab_size
        self.tokenizer = tokenizer
        # Some checkpoints name ids that the model does not have; those can end nothing.
        self.eos_token_ids = tuple(sorted({i for i in eos_token_ids if i < runner.vocab_size}))
        self.metrics = EngineMetrics()
        self._runner = runner
        self._scheduler = scheduler
        self._disk = disk
        seconds, most = config.scheduler.step_ms / 1000, config.scheduler.max_num_batched_tokens
        self._pace = StepPace(seconds, most) if seconds else None
        self._entries: dict[int, _Entry] = {}
        self._owner: dict[int, tuple[_Entry, _Choice]] = {}
        #: Entries with something new for the caller.
        self._touched: dict[int, _Entry] = {}
        #: Last outputs that the last step returned, and those that the next one returns again: their step was
        #: cut short, so nobody may have them.
        self._handed_over: list[RequestOutput] = []
        self._to_repeat: list[RequestOutput] = []
        self._cut_short = False
        #: Ids of requests whose step raised.
        self._blamed: set[int] = set()
        self._ids = itertools.count()
        self._seeds = random.Random(config.seed)

    def add_request(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        label: str | None = None,
        prompt: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
    ) -> int:
        """Queue a prompt; returns its id, unique in this engine and never reused.

        ``label`` is the caller's own name for it and may be anything; ``prompt`` is its text, only
        handed back. Lower ``priority`` goes first. Requests share cached blocks only under the same
        ``cache_salt``. Raises ValueError, and changes nothing, when the request can never be served.
        """
        ids = admission.check_prompt(prompt_token_ids, self.vocab_size, self.max_model_len)
        admission.check_params(params, self.vocab_size)
        admission.check_queueing(priority, cache_salt)
        max_tokens = admission.resolve_max_tokens(params, len(ids), self.max_model_len)
        attn_rule, attn_policy = admission.resolve_attn_topk(params, self.config)
        seed = params.seed if params.seed is not None else self._seeds.getrandbits(63)
        entry_id = next(self._ids)
        entry = _Entry(entry_id, label, prompt, [], time.monotonic())
        if attn_rule.topk:
            entry.attn_report = AttnTopkReport(attn_topk=attn_rule.budget)
        if params.prompt_logprobs is not None:
            entry.prompt_logprobs = [None] * len(ids)
        for index in range(params.n):
            # The prompt's log-probabilities are the same for every choice: the first computes them.
            own = params if index == 0 else replace(params, prompt_logprobs=None)
            request = Request(
                id=next(self._ids),
                label=label or "",
                prompt_token_ids=ids,
                params=own,
                eos_token_ids=() if params.ignore_eos else self.eos_token_ids,
                max_tokens=max_tokens,
                seed=seed,
                choice=index,
                arrival=entry_id,
                priority=priority,
                cache_salt=cache_salt,
                attn_rule=attn_rule,
                attn_policy=attn_policy,
            )
            choice = _Choice(request, self._detokenizer(ids, params))
            if params.logprobs is not None:
                choice.logprobs = []
            entry.choices.append(choice)
        try:
            with self._whole():
                for choice in entry.choices:
                    self._scheduler.add(choice.request)
                    self._owner[choice.request.id] = (entry, choice)
                self._entries[entry_id] = entry
                self.metrics.prompt_tokens += len(ids)
        except ValueError:
            self._cut_short = False  # the first choice was refused, so nothing has changed
            raise
        return entry_id

    def step(self) -> list[RequestOutput]:
        """Compute one step; returns the outputs so far (cumulative) of the prompts that it touched.

        An interrupt (Ctrl-C) is raised, wherever it comes. Then all that is cached is forgotten, and the next
        step goes on with every request from its own tokens; one whose text was just being extended ends with
        an error. An exception that no single request causes ends the requests of the step so.
        """
        with self._whole():
            self._step()
            outputs = [*self._to_repeat, *(self._output(entry) for entry in self._touched.values())]
            self._handed_over = [output for output in outputs if output.finished]
            self._to_repeat = []
            touched, self._touched = self._touched, {}
            for entry in touched.values():
                if entry.finished:
                    del self._entries[entry.id]
            return outputs

    def _step(self) -> None:
        start = time.monotonic()
        output = self._scheduler.schedule(None if self._pace is None else self._pace.limit)
        if not output.scheduled:
            if self._scheduler.has_unfinished():
                raise RuntimeError("the scheduler found nothing to compute while requests wait")
            return
        self._note_first_scheduled(output, start)
        try:
            self._runner.copy_blocks(output.copies)
            self._take(output, self._runner.run(output.scheduled))
        except Exception:
            self._blamed.update(share.request.id for share in output.scheduled)
            raise
        finally:
            if self._disk is not None:
                self._disk.end_reading()
        self._note_step(output, time.monotonic() - start)

    @contextlib.contextmanager
    def _whole(self) -> Iterator[None]:
        """What is done within is done to its end; else the next thing that is done here starts over."""
        if self._cut_short:
            self._start_over()
        self._cut_short = True
        yield
        self._cut_short = False

    def _start_over(self) -> None:
        """Trusts nothing but the requests, and the tokens that are in their texts."""
        live = [(e, c) for e in self._entries.values() for c in e.choices if c.finish_reason is None]
        self._owner = {choice.request.id: (entry, choice) for entry, choice in live}
        self._scheduler.start_over([(choice.request, choice.num_taken) for _, choice in live])
        for entry, choice in live:
            if choice.taking or choice.request.id in self._blamed:
                self._fail(entry, choice, INTERRUPTED)
        for entry in self._entries.values():
            if entry.finished:  # and not handed over, or it would be gone
                self._touched[entry.id] = entry
        self._blamed.clear()
        self._to_repeat, self._handed_over = [*self._to_repeat, *self._handed_over], []
        self._cut_short = False

    def abort(self, entry_id: int) -> RequestOutput | None:
        """End a request now; its blocks are free at the next step. Returns what it had, or None when
        there is no such request or it has ended already."""
        with self._whole():
            entry = self._entries.get(entry_id)
            if entry is None:
                return None
            for choice in entry.choices:
                if choice.finish_reason is None:
                    self._scheduler.finish(choice.request, "abort")
                    self._close(entry, choice)
            self._touched.pop(entry_id, None)
            del self._entries[entry_id]
        return self._output(entry)

    def has_unfinished(self) -> bool:
        """Whether a step has something to compute, or to hand over."""
        return bool(self._entries or self._to_repeat or self._cut_short)

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix, in memory and on disk; what runs goes on with its own blocks."""
        with self._whole():
            self._scheduler.reset_prefix_cache()

    def close(self) -> None:
        """Save what waits to be saved and give the cache folder free; a no-op without one. The engine is not
        to be used afterwards."""
        if self._disk is not None:
            self._disk.close()

    @property
    def disk_stats(self) -> DiskStats | None:
        """The store on disk at this moment; None without one."""
        return None if self._disk is None else self._disk.stats

    def cache_view(self) -> CacheView:
        """Every block of the KV pool, and who holds it; a copy."""
        return self._scheduler.view()

    @property
    def scheduler_stats(self) -> SchedulerStats:
        """Queue and pool at this moment."""
        return self._scheduler.stats

    def _detokenizer(self, prompt_ids: list[int], params: SamplingParams) -> IncrementalDetokenizer:
        return IncrementalDetokenizer(
            self.tokenizer,
            skip_special_tokens=params.skip_special_tokens,
            stop=params.stop_strings,
            include_stop_str_in_output=params.include_stop_str_in_output,
            prompt_ids=prompt_ids,
        )

    def _note_first_scheduled(self, output: SchedulerOutput, now: float) -> None:
        for share in output.scheduled:
            entry, _ = self._owner[share.request.id]
            if entry.first_scheduled_time is None:
                entry.first_scheduled_time = now

    def _note_step(self, output: SchedulerOutput, seconds: float) -> None:
        if self._pace is not None:
            tokens = [share.num_tokens for share in output.scheduled]
            num_decodes = tokens.count(1)
            self._pace.observe(num_decodes, sum(tokens) - num_decodes, seconds)
        stats, metrics = self._scheduler.stats, self.metrics
        metrics.num_steps += 1
        metrics.step_time.observe(seconds)
        metrics.computed_tokens = stats.scheduled_tokens
        metrics.prefix_queries, metrics.prefix_hits = stats.prefix_queries, stats.prefix_hits
        metrics.disk_hits = stats.disk_hits
        metrics.num_preemptions, metrics.num_evictions = stats.preemptions, stats.evictions

    def _take(self, output: SchedulerOutput, result: StepResult) -> None:
        owners = [self._owner[share.request.id] for share in output.scheduled]
        # Failed requests leave first: what they wrote must not reach the prefix cache.
        for request_id, sentence in result.errors.items():
            self._fail(*self._owner[request_id], sentence)
        self._scheduler.update(output, result.tokens)
        if self._disk is not None:
            for sealed in self._disk.take_sealed():
                self._disk.put(sealed, self._runner.read_block(sealed.block, compact=sealed.compact))
            self._disk.strike_out()
        now = time.monotonic()
        for entry, choice in owners:
            request = choice.request
            report = result.attn_reports.get(request.id)
            if report is not None and entry.attn_report is not None:
                entry.attn_report += report
                self.metrics.attn_topk += report
                self.metrics.attn_topk_dropped_mass += report.mean_dropped_mass * report.rows
            summarised = result.history_reports.get(request.id)
            if summarised is not None:
                entry.history_report = (entry.history_report or HistoryReport()) + summarised
                self.metrics.history += summarised
                self.metrics.history_mass += summarised.mean_mass * summarised.rows
            reads = result.attn_reads.get(request.id)
            if reads is not None:
                entry.attn_reads = reads if entry.attn_reads is None else entry.attn_reads + reads
            if entry.prompt_logprobs is not None:
                try:
                    for position, logprobs in result.prompt_logprobs.get(request.id, {}).items():
                        entry.prompt_logprobs[position] = self._with_text(logprobs)
                except Exception as error:  # noqa: BLE001 - as in _accept
                    self._fail(entry, choice, _no_text(error))
                    continue
            if request.id in result.tokens:
                self._touched[entry.id] = entry
                self._accept(entry, choice, result, now)
            elif request.finished and choice.finish_reason is None:
                self._close(entry, choice)

    def _accept(self, entry: _Entry, choice: _Choice, result: StepResult, now: float) -> None:
        """Book one sampled token, and end the choice when it completes a stop string."""
        request = choice.request
        choice.taking = True
        self._note_token_time(entry, choice, now)
        ended_by_token = request.finished and request.finish_reason == "stop"
        try:
            if choice.logprobs is not None:
                found = result.logprobs[request.id]
                choice.logprobs.append(self._with_text(found))
                choice.cumulative_logprob += found[result.tokens[request.id]].logprob
            if not ended_by_token or request.params.include_stop_str_in_output:
                choice.text += choice.detokenizer.push(
                    request.output_token_ids[-1], check_stop=_past_min_tokens(request)
                )
        except Exception as error:  # noqa: BLE001 - text that cannot be made costs its own request only
            self._fail(entry, choice, _no_text(error))
            return
        hit = choice.detokenizer.stop_hit
        if hit is not None:
            choice.finish_reason, choice.stop_reason = "stop", hit
            self._scheduler.finish(request, "stop", stop_reason=hit)
        choice.num_taken, choice.taking = len(request.output_token_ids), False
        if request.finished:
            self._close(entry, choice)
        elif request.params.guide is not None:
            # Its mask for the next token is made while the next step runs.
            request.params.guide.advance(request.choice, request.output_token_ids)

    def _note_token_time(self, entry: _Entry, choice: _Choice, now: float) -> None:
        self.metrics.generation_tokens += 1
        if choice.last_token_time is None:
            self.metrics.time_to_first_token.observe(now - entry.arrival_time)
        else:
            self.metrics.inter_token.observe(now - choice.last_token_time)
        choice.last_token_time = now
        if entry.first_token_time is None:
            entry.first_token_time = now

    def _fail(self, entry: _Entry, choice: _Choice, sentence: str) -> None:
        entry.error = entry.error or sentence
        choice.finish_reason = "error"
        self._scheduler.finish(choice.request, "error")
        self._close(entry, choice)

    def _close(self, entry: _Entry, choice: _Choice) -> None:
        """The request has ended: release the text that was held back, and count it."""
        if choice.finish_reason is None:
            choice.finish_reason = choice.request.finish_reason
            choice.stop_reason = choice.request.stop_reason
        if choice.finish_reason != "error":
            try:
                choice.text += choice.detokenizer.flush(check_stop=_past_min_tokens(choice.request))
            except Exception as error:  # noqa: BLE001 - as in _accept
                entry.error = entry.error or _no_text(error)
                choice.finish_reason = "error"
            # U+FFFD for a character that was never finished may itself complete a stop string.
            if choice.detokenizer.stop_hit is not None and choice.finish_reason in ("stop", "length"):
                choice.finish_reason, choice.stop_reason = "stop", choice.detokenizer.stop_hit
        now = time.monotonic()
        reason = choice.finish_reason or "error"
        self.metrics.finished[reason] = self.metrics.finished.get(reason, 0) + 1
        self.metrics.end_to_end.observe(now - entry.arrival_time)
        del self._owner[choice.request.id]
        self._touched[entry.id] = entry
        if entry.finished:
            entry.finished_time = now

    def _with_text(self, logprobs: dict[int, Logprob]) -> dict[int, Logprob]:
        return {
            token: Logprob(entry.logprob, entry.rank, self.tokenizer.id_to_text(token))
            for token, entry in logprobs.items()
        }

    def _output(self, entry: _Entry) -> RequestOutput:
        first = entry.choices[0].request
        return RequestOutput(
            request_id=str(entry.id),
            label=entry.label,
            prompt=entry.prompt,
            prompt_token_ids=first.prompt_token_ids,
            outputs=[_completion(choice) for choice in entry.choices],
            finished=entry.finished,
            prompt_logprobs=entry.prompt_logprobs,
            num_cached_tokens=first.num_cached_tokens or 0,
            num_disk_tokens=first.num_disk_tokens,
            num_compact_tokens=first.num_compact_tokens,
            num_summarised_tokens=first.num_summarised_tokens,
            cache_miss_reason=first.cache_miss_reason,
            error=entry.error,
            attn_topk=entry.attn_report,
            history=entry.history_report,
            attn_reads=entry.attn_reads.report() if entry.finished and entry.attn_reads is not None else None,
            metrics=RequestMetrics(
                arrival_time=entry.arrival_time,
                first_scheduled_time=entry.first_scheduled_time,
                first_token_time=entry.first_token_time,
                finished_time=entry.finished_time,
                num_preemptions=sum(choice.request.num_preemptions for choice in entry.choices),
            ),
        )


def _no_text(error: Exception) -> str:
    return f"the text could not be decoded: {type(error).__name__}: {error}"


def _past_min_tokens(request: Request) -> bool:
    """Whether a stop string that the last token completes may end the text."""
    return len(request.output_token_ids) > request.params.min_tokens


def _completion(choice: _Choice) -> CompletionOutput:
    scored = choice.logprobs is not None
    return CompletionOutput(
        index=choice.request.choice,
        text=choice.text,
        token_ids=list(choice.request.output_token_ids),
        cumulative_logprob=choice.cumulative_logprob if scored else None,
        logprobs=list(choice.logprobs) if choice.logprobs is not None else None,
        finish_reason=choice.finish_reason,
        stop_reason=choice.stop_reason,
    )
