"""Decides what each step computes. Holds ints only; free of torch."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial, reduce
from typing import TYPE_CHECKING

from octavo.cache.chain import NO_BLOCK, Match, sha256
from octavo.cache.explain import explain
from octavo.cache.prefix_cache import PrefixCache
from octavo.config import SchedulerConfig
from octavo.engine import disk_prefix
from octavo.engine.blocks import Blocks, PoolShape, Room
from octavo.engine.disk_prefix import DiskPrefix, LoadedRows
from octavo.engine.step import CacheView, ScheduledRequest, SchedulerOutput, SchedulerStats, StepDraft
from octavo.engine.waiting import Entry, WaitingQueue
from octavo.request import Request, Status, empty_table

if TYPE_CHECKING:
    from octavo.cache.disk_cache import DiskCache

#: Waiting requests looked at in one step, so that its cost does not grow with the queue.
MAX_LOOKED_AT = 64
#: Of those, how many that do not fit may be stepped over in one step.
MAX_STEPPED_OVER = 8
#: How many later requests may be admitted before one that does not fit; then all wait for it.
MAX_PASSED = 16


class Scheduler:
    """Who runs, what of them is computed in a step, and in which blocks.

    There are no phases: a running request catches up from ``num_computed_tokens`` to ``num_tokens``.
    A step first serves those that need exactly one token, then gives chunks of the others what is
    left of ``max_num_batched_tokens``, then admits waiting requests; always in order of priority
    (the lower number first) and arrival. A waiting request goes before chunks of worse priority.

    *Blocks* are taken for what a step computes. A request that gets none takes them from the last in
    order, which is preempted: it gives up its blocks, waits, and computes its tokens again. The last
    in order itself only pauses. So the first in order always makes progress.

    *Admission* asks for room for all tokens that a request has, beside what the running ones still
    need and one block of growth for each; so a request that was preempted for lack of room does not
    come back before room was made. One that does not fit may be passed by ``MAX_PASSED`` others.
    A waiting request of better priority preempts running ones of worse priority when it lacks
    blocks, never when it only lacks a place among ``max_num_seqs``.

    Where the cache in memory ends, a prefix goes on in ``disk``, if there is one: its blocks are loaded into
    fresh ones and are from then on like computed ones. One request a step may load.

    Use: ``schedule()``, compute, ``update()``; ``add()`` and ``finish()`` at any time.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        shape: PoolShape,
        *,
        prefix_cache: bool = True,
        fingerprint: str = "",
        hash_function: Callable[[bytes], bytes] = sha256,
        disk: DiskCache | None = None,
        recalls: bool = False,
    ) -> None:
        if config.max_model_len is None:
            raise ValueError("max_model_len must be resolved before a scheduler is made")
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len"):
            if getattr(config, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(config, name)}")
        self._config = config
        self._max_model_len = config.max_model_len
        self._block_size = shape.block_size
        shape = shape._replace(step_tokens=config.max_num_batched_tokens)
        new_cache = partial(
            PrefixCache,
            block_size=shape.block_size,
            num_blocks=shape.num_blocks + shape.num_compact,
            fingerprint=fingerprint,
            enabled=prefix_cache,
            window_blocks=shape.window_blocks,
            budget_blocks=shape.budget_blocks,
            hash_function=hash_function,
        )
        self._blocks = Blocks(shape, new_cache)
        self._disk = disk
        self._recalls = recalls
        self._entries: dict[int, Entry] = {}
        self._running: list[Entry] = []  # in order of service
        self._waiting = WaitingQueue()
        self._under_way: SchedulerOutput | None = None
        self._prefix_queries = self._prefix_hits = self._disk_hits = 0
        self._preemptions = self._scheduled_tokens = self._finished = 0

    # ---- requests come and go

    def add(self, request: Request) -> None:
        """Queue a request. Raises ValueError, in one sentence, for one that can never be served."""
        prompt = len(request.prompt_token_ids)
        capacity = self._blocks.capacity
        if prompt == 0:
            raise ValueError("the prompt is empty: it needs at least one token")
        if prompt > self._max_model_len:
            raise ValueError(f"the prompt has {prompt} tokens, more than max_model_len {self._max_model_len}")
        if prompt > capacity:
            raise ValueError(
                f"the prompt has {prompt} tokens, more than the whole KV pool holds: "
                f"{capacity} ({self._blocks.shape.num_blocks} blocks of {self._block_size})"
            )
        if request.id in self._entries or request.status is not Status.WAITING:
            raise ValueError(f"request id {request.id} is in use: ids are never reused")
        self._push(request)

    def _push(self, request: Request) -> None:
        prompt, capacity = len(request.prompt_token_ids), self._blocks.capacity
        most = min(prompt + request.max_tokens, self._max_model_len, capacity + 1)
        entry = Entry(
            request=request,
            chain=self._blocks.cache.chain(request.token_ids, request.cache_salt, request.attn_policy),
            stop_ids=frozenset(request.params.stop_token_ids or ()),
            # The last token sampled is never computed.
            last_position=max(prompt, most - 1),
        )
        self._entries[request.id] = entry
        self._waiting.push(entry)

    def start_over(self, requests: Iterable[tuple[Request, int]]) -> None:
        """Forget all blocks and what is cached; ``requests``, and no others, wait to be computed again, each
        from its prompt and so many of its output tokens.

        After anything here was cut short half way: it trusts nothing but the requests, and may itself be cut
        short and called again.
        """
        self._blocks.start_over()
        self._entries, self._running, self._waiting = {}, [], WaitingQueue()
        self._under_way = None
        if self._disk is not None:
            self._disk.start_over()
        for request, num_output_tokens in requests:
            del request.output_token_ids[num_output_tokens:]
            request.block_table, request.compact_table, request.summaries = empty_table(), empty_table(), {}
            request.num_computed_tokens = 0
            request.finish_reason = request.stop_reason = None
            request.status = Status.WAITING if request.num_cached_tokens is None else Status.PREEMPTED
            self._push(request)

    def finish(self, request: Request, reason: str, stop_reason: int | str | None = None) -> None:
        """End a request in any state and free its blocks at once; a no-op when it has finished.

        Safe between :meth:`schedule` and :meth:`update`: the blocks are not given out before the
        step that may still write them is over.
        """
        if request.finished:
            return
        entry = self._entries.get(request.id)
        if entry is None or entry.request is not request:
            raise ValueError(f"request {request.id} was never added")
        if request.status is Status.RUNNING:
            self._running.remove(entry)
            self._give_up_blocks(entry)
        else:
            self._waiting.remove(entry)
        del self._entries[request.id]
        request.status = Status.FINISHED
        request.finish_reason = reason
        request.stop_reason = stop_reason
        self._finished += 1

    def has_unfinished(self) -> bool:
        """True while a request waits or runs."""
        return bool(self._entries)

    # ---- one step

    def schedule(self, prefill_limit: int | None = None) -> SchedulerOutput:
        """Choose what the next step computes; never empty while a request is unfinished.

        ``prefill_limit``: tokens that the step may compute beside those of running answers, if it has any.
        """
        if self._under_way is not None:
            raise RuntimeError("schedule() was called twice without update()")
        step = StepDraft(self._config.max_num_batched_tokens)
        chunks = []
        for entry in tuple(self._running):
            request = entry.request
            if request.num_tokens - request.num_computed_tokens > 1:
                chunks.append(entry)
            elif step.budget and request.status is Status.RUNNING:
                self._schedule_share(entry, step)
        if prefill_limit is not None and step.scheduled:
            step.budget = min(step.budget, prefill_limit)
        for entry in chunks:
            self._admit(step, entry.request.priority)
            if step.budget and entry.request.status is Status.RUNNING:
                self._schedule_share(entry, step)
        self._admit(step)
        scheduled = list(step.scheduled.values())
        if self._recalls:  # once nothing is given up any more
            scheduled = [replace(share, recallable=self._recallable(share)) for share in scheduled]
        output = SchedulerOutput(tuple(scheduled), tuple(step.copies), tuple(step.preempted.values()))
        self._scheduled_tokens += sum(share.num_tokens for share in output.scheduled)
        if output.scheduled:
            self._under_way = output
        return output

    def _recallable(self, share: ScheduledRequest) -> tuple[int | memoryview | None, ...]:
        count = self._blocks.shape.summarised(share.start + share.num_tokens - 1)
        if not count:
            return ()
        chain, table = self._entries[share.request.id].chain, share.request.compact_table
        root = self._blocks.cache.root_digest(chain)
        found: list[int | memoryview | None] = []
        for index in range(1, 1 + count):
            compact = table[index]  # which the step may be about to fill
            if compact == NO_BLOCK and index < len(chain.path):
                compact = chain.path[index].compact
            there: int | memoryview | None = compact if compact != NO_BLOCK else None
            if there is None and self._disk is not None and index < len(chain.digests):
                there = self._disk.fetch(root, chain.digests, chain.packed, index, compact=True)
            found.append(there)
        return tuple(found)

    def update(self, output: SchedulerOutput, sampled: Mapping[int, int]) -> list[Request]:
        """Take in what a step computed; returns the requests that it finished.

        ``sampled`` maps request.id to the new token id for each share that ``samples``; requests that
        finished since :meth:`schedule` are left alone.
        """
        if output is not self._under_way and output.scheduled:
            raise RuntimeError("update() takes the output of the last schedule(), once")
        self._under_way = None
        done: list[Request] = []
        for share in output.scheduled:
            request = share.request
            if request.finished:
                continue
            entry = self._entries[request.id]
            samples = share.samples
            request.num_computed_tokens = entry.num_written = share.start + share.num_tokens
            self._register(entry)
            if samples:
                token = sampled[request.id]
                request.output_token_ids.append(token)
                entry.chain.append(token)
                self._end_if_over(entry, token)
            elif request.num_computed_tokens == request.num_tokens:
                self.finish(request, "length")
            if request.finished:
                done.append(request)
        return done

    def _schedule_share(self, entry: Entry, step: StepDraft) -> None:
        """Give a running request what the budget and the blocks allow; it pauses when that is none."""
        request = entry.request
        start = request.num_computed_tokens
        wanted = min(step.budget, request.num_tokens - start)
        while (end := self._blocks.cover(entry, start + wanted)) <= start:
            last = self._running[-1]
            if last is entry:
                return
            self._preempt(last, step)
        step.budget -= end - start
        step.scheduled[request.id] = ScheduledRequest(
            request,
            start,
            end - start,
            self._blocks.compactions(entry, end),
            self._blocks.summaries_made(entry, end),
        )

    def _preempt(self, entry: Entry, step: StepDraft) -> None:
        request = entry.request
        share = step.scheduled.pop(request.id, None)
        if share is not None:
            step.budget += share.num_tokens
        self._running.remove(entry)
        self._give_up_blocks(entry)
        request.status = Status.PREEMPTED
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self._preemptions += 1
        step.preempted[request.id] = request
        self._waiting.push(entry)

    def _give_up_blocks(self, entry: Entry) -> None:
        if self._disk is not None:
            self._disk.leave(entry.chain)
        self._blocks.give_up(entry)
        self._waiting.drop_claims(entry)

    def _register(self, entry: Entry) -> None:
        """Make the blocks that the step filled matchable, and wake those who waited for them."""
        for digest in self._blocks.register(entry):
            self._waiting.settle(entry, digest)
        self._blocks.give_up_stored(entry)
        chain = entry.chain
        if chain.broken:
            self._waiting.drop_claims(entry)
        if self._disk is None:
            return
        if (chain.num_saved, chain.num_saved_compact) != (len(chain.path), chain.num_compact):
            self._disk.note(chain, self._blocks.cache.root_digest(chain))
        if chain.num_saved_summarised != chain.num_summarised:
            self._disk.note_summaries(chain, entry.request.summaries)

    def _end_if_over(self, entry: Entry, token: int) -> None:
        request = entry.request
        count = len(request.output_token_ids)
        if count > request.params.min_tokens:
            if token in request.eos_token_ids and not request.params.ignore_eos:
                self.finish(request, "stop")
                return
            if token in entry.stop_ids:
                self.finish(request, "stop", token)
                return
        # A request that outgrows the whole pool ends here too: it could never be computed.
        capacity = self._blocks.capacity
        if count >= request.max_tokens or request.num_tokens >= min(self._max_model_len, capacity + 1):
            self.finish(request, "length")

    # ---- admission

    def _admit(self, step: StepDraft, worse_than: int | None = None) -> None:
        """Admit waiting requests in order; with ``worse_than``, only those of a better priority."""
        head = self._waiting.head(1) if self._has_place(step) else []
        if not head or (worse_than is not None and head[0].request.priority >= worse_than):
            return
        committed = self._committed()
        if not self._may_admit(step, committed):
            return
        stepped_over: list[Entry] = []
        for entry in self._waiting.head(MAX_LOOKED_AT):
            if worse_than is not None and entry.request.priority >= worse_than:
                return
            if entry.request.id in step.preempted:
                continue
            match = self._match(entry)
            in_flight = self._in_flight(entry, match)
            if in_flight is not None:
                self._waiting.put_off(entry, in_flight)
                continue
            fits = self._fits(entry, match, committed)
            if not fits:
                self._preempt_worse(entry, match, step)
                committed = self._committed()
                fits = self._fits(entry, match, committed)
            if fits:
                self._start(entry, match, step)
                committed = committed.plus(self._blocks.still_takes(entry))
                for other in stepped_over:
                    other.passed += 1
                if not self._may_admit(step, committed):
                    return
            else:
                stepped_over.append(entry)
            if len(stepped_over) > MAX_STEPPED_OVER or any(e.passed >= MAX_PASSED for e in stepped_over):
                return

    def _has_place(self, step: StepDraft) -> bool:
        return step.budget > 0 and len(self._running) < self._config.max_num_seqs

    def _may_admit(self, step: StepDraft, committed: Room) -> bool:
        """Cheap reasons not to look at the queue."""
        if not self._has_place(step) or step.loads:
            return False
        head = self._waiting.head(1)
        if not head:
            return False
        if not self._running or head[0].request.priority < self._running[-1].request.priority:
            return True
        # Whatever is cached, a request needs one block of its own.
        return self._blocks.available(Match()).stored > committed.stored

    def _match(self, entry: Entry) -> Match:
        if entry.request.params.prompt_logprobs is not None:
            return Match()
        return self._blocks.cache.match(entry.chain)

    def _in_flight(self, entry: Entry, match: Match) -> bytes | None:
        """The last of the next full blocks that a running request is about to write, if any.

        A request never waits for one of worse priority.
        """
        if not self._blocks.cache.enabled or entry.request.params.prompt_logprobs is not None:
            return None
        last = None
        for digest in self._blocks.cache.digests(entry.chain)[len(match.nodes) :]:
            owner = self._waiting.claimed_by(digest)
            if owner is None or owner.request.priority > entry.request.priority:
                break
            last = digest
        return last

    def _committed(self) -> Room:
        return reduce(Room.plus, map(self._blocks.still_takes, self._running), Room(0, 0))

    def _fits(self, entry: Entry, match: Match, committed: Room) -> bool:
        needed = self._blocks.takes_to_start(entry, match).plus(committed)
        return needed.within(self._blocks.available(match))

    def _preempt_worse(self, entry: Entry, match: Match, step: StepDraft) -> None:
        """Preempt running requests of worse priority, last first, if that makes room for ``entry``."""
        worse = [e for e in self._running if e.request.priority > entry.request.priority]
        theirs = reduce(Room.plus, map(self._blocks.held, worse), self._blocks.available(match))
        needed = self._blocks.takes_to_start(entry, match).plus(self._committed())
        if not needed.within(theirs):
            return
        while worse and not self._fits(entry, match, self._committed()):
            self._preempt(worse.pop(), step)

    def _start(self, entry: Entry, match: Match, step: StepDraft) -> None:
        """Commit the match and run the request: the only way in, for the first time and after."""
        request = entry.request
        self._waiting.remove(entry)
        first = request.num_cached_tokens is None
        prefix = self._on_disk(entry, match)
        match = prefix.match
        if first:
            self._note_hit(entry, match, prefix.loads)
        self._blocks.start(entry, match, hit=first)
        if prefix.loads:
            step.copies += self._blocks.load(entry, prefix)
            step.loads = True
        computed = len(request.block_table) * self._block_size
        if match.tail is not None:
            copy = self._blocks.copy_tail(request, match)
            if copy is not None:
                step.copies.append(copy)
            computed += match.tail_rows
        request.num_computed_tokens = computed
        request.status = Status.RUNNING
        entry.passed = 0
        insort(self._running, entry, key=lambda e: e.key)
        if not entry.chain.broken:
            self._waiting.claim(entry, self._blocks.cache.digests(entry.chain)[len(match.nodes) :])
        self._schedule_share(entry, step)

    def _on_disk(self, entry: Entry, match: Match) -> DiskPrefix:
        """What of the prefix is taken from memory, and the rows that follow it on disk."""
        chain, request = entry.chain, entry.request
        if self._disk is None or chain.broken or request.params.prompt_logprobs is not None:
            return DiskPrefix(match, [], [])
        found = disk_prefix.longest(chain, self._blocks.cache, self._disk, match)
        # With less of it from memory it may take more blocks than it was admitted for.
        if found.loads and self._fits(entry, found.match, self._committed()):
            return found
        return DiskPrefix(match, [], [])

    def _note_hit(self, entry: Entry, match: Match, loads: Sequence[LoadedRows]) -> None:
        request = entry.request
        request.num_disk_tokens = len(loads) * self._block_size
        in_memory = len(match.nodes) * self._block_size + match.tail_rows
        request.num_cached_tokens = in_memory + request.num_disk_tokens
        num_compact = match.num_compact + sum(load.compact for load in loads)
        request.num_compact_tokens = num_compact * self._block_size
        request.num_summarised_tokens = match.num_summarised * self._block_size
        if self._blocks.cache.enabled and request.params.prompt_logprobs is not None:
            request.cache_miss_reason = "prompt_logprobs computes the whole prompt"
            return
        request.cache_miss_reason = explain(self._blocks.cache, entry.chain, match, request.num_disk_tokens)
        if self._blocks.cache.enabled:
            self._prefix_queries += len(request.prompt_token_ids)
            self._prefix_hits += request.num_cached_tokens
            self._disk_hits += request.num_disk_tokens

    # ---- looking in from outside

    @property
    def stats(self) -> SchedulerStats:
        """A snapshot of gauges and counters."""
        stored, compact = self._blocks.stored, self._blocks.compact
        has_compact = self._blocks.shape.window is not None
        return SchedulerStats(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            num_put_off=self._waiting.num_put_off,
            free_blocks=stored.num_free,
            cached_blocks=stored.num_kept,
            used_blocks=stored.num_used,
            free_compact_blocks=compact.num_free if has_compact else 0,
            cached_compact_blocks=compact.num_kept,
            used_compact_blocks=compact.num_used if has_compact else 0,
            prefix_queries=self._prefix_queries,
            prefix_hits=self._prefix_hits,
            disk_hits=self._disk_hits,
            preemptions=self._preemptions,
            evictions=self._blocks.cache.num_evictions,
            scheduled_tokens=self._scheduled_tokens,
            finished=self._finished,
        )

    def view(self) -> CacheView:
        """Every block of the pool, and who holds it; a copy."""
        requests = [entry.request for entry in self._running]
        return CacheView.of(
            self._block_size, self._blocks.stored.refs, self._blocks.cache.parents(), requests
        )

    def reset_prefix_cache(self) -> None:
        """Forget every cached block, in memory and on disk. What runs goes on with its own, uncached."""
        if self._disk is not None:
            self._disk.clear()
        self._blocks.reset(self._running)
        for entry in self._running:
            self._waiting.drop_claims(entry)

    def check_invariants(self) -> None:
        """Raise AssertionError unless pool, cache and queue agree (for tests)."""
        self._blocks.check_invariants(list(self._entries.values()))
        self._waiting.check_invariants(self._running)
        assert [e.key for e in self._running] == sorted(e.key for e in self._running)
        assert len(self._running) + len(self._waiting) == len(self._entries)
        for entry in self._entries.values():
            assert (entry.request.status is Status.RUNNING) == (entry in self._running)
            assert entry.num_written <= entry.request.num_computed_tokens, "unwritten rows are booked"
            assert entry.chain.num_tokens == entry.request.num_tokens
