"""Decides what each step computes. Holds ints only; free of torch."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from octavo.cache.block_pool import BlockPool
from octavo.cache.prefix_cache import Match, PrefixCache, sha256
from octavo.config import SchedulerConfig
from octavo.engine.step import (
    BlockCopy,
    BlockLoad,
    CacheView,
    ScheduledRequest,
    SchedulerOutput,
    SchedulerStats,
    StepDraft,
)
from octavo.engine.waiting import Entry, WaitingQueue
from octavo.request import Request, Status

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
        *,
        block_size: int,
        num_blocks: int,
        prefix_cache: bool = True,
        fingerprint: str = "",
        hash_function: Callable[[bytes], bytes] = sha256,
        disk: DiskCache | None = None,
    ) -> None:
        if config.max_model_len is None:
            raise ValueError("max_model_len must be resolved before a scheduler is made")
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len"):
            if getattr(config, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(config, name)}")
        self._config = config
        self._max_model_len = config.max_model_len
        self._block_size = block_size
        self._new_cache = partial(
            PrefixCache,
            block_size=block_size,
            num_blocks=num_blocks,
            fingerprint=fingerprint,
            enabled=prefix_cache,
            hash_function=hash_function,
        )
        self._pool, self._cache = BlockPool(num_blocks), self._new_cache()
        self._disk = disk
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
        capacity = self._pool.num_blocks * self._block_size
        if prompt == 0:
            raise ValueError("the prompt is empty: it needs at least one token")
        if prompt > self._max_model_len:
            raise ValueError(f"the prompt has {prompt} tokens, more than max_model_len {self._max_model_len}")
        if prompt > capacity:
            raise ValueError(
                f"the prompt has {prompt} tokens, more than the whole KV pool holds: "
                f"{capacity} ({self._pool.num_blocks} blocks of {self._block_size})"
            )
        if request.id in self._entries or request.status is not Status.WAITING:
            raise ValueError(f"request id {request.id} is in use: ids are never reused")
        self._push(request)

    def _push(self, request: Request) -> None:
        prompt, capacity = len(request.prompt_token_ids), self._pool.num_blocks * self._block_size
        most = min(prompt + request.max_tokens, self._max_model_len, capacity + 1)
        entry = Entry(
            request=request,
            chain=self._cache.chain(request.token_ids, request.cache_salt, request.attn_policy),
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
        cache = self._new_cache()
        cache.num_evictions = self._cache.num_evictions
        self._pool, self._cache = BlockPool(self._pool.num_blocks), cache
        self._entries, self._running, self._waiting = {}, [], WaitingQueue()
        self._under_way = None
        if self._disk is not None:
            self._disk.start_over()
        for request, num_output_tokens in requests:
            del request.output_token_ids[num_output_tokens:]
            request.block_table, request.num_computed_tokens = [], 0
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
        output = SchedulerOutput(
            tuple(step.scheduled.values()), tuple(step.copies), tuple(step.preempted.values())
        )
        self._scheduled_tokens += sum(share.num_tokens for share in output.scheduled)
        if output.scheduled:
            self._under_way = output
        return output

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
        table, size = request.block_table, self._block_size
        while len(table) * size < start + wanted:
            block = self._take_block()
            if block is not None:
                table.append(block)
                continue
            if len(table) * size > start:
                break
            last = self._running[-1]
            if last is entry:
                return
            self._preempt(last, step)
        share = min(wanted, len(table) * size - start)
        step.budget -= share
        step.scheduled[request.id] = ScheduledRequest(request, start, share)

    def _take_block(self) -> int | None:
        if self._pool.num_free == 0:
            evicted = self._cache.evict()
            if evicted is None:
                return None
            self._pool.reclaim(evicted)
        return self._pool.allocate()

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
        table, full = entry.request.block_table, len(entry.chain.path)
        rows = entry.num_written - full * self._block_size
        if self._disk is not None:
            self._disk.leave(entry.chain)
        self._cache.release(entry.chain, table[full] if rows > 0 else None, rows)
        for block in table:
            self._pool.release(block, keep=self._cache.holds(block))
        entry.request.block_table = []
        entry.num_written = 0
        self._waiting.drop_claims(entry)

    def _register(self, entry: Entry) -> None:
        """Make the blocks that the step filled matchable, and wake those who waited for them.

        A block that another request wrote too is given up for that one's.
        """
        chain, size = entry.chain, self._block_size
        while not chain.broken and (len(chain.path) + 1) * size <= entry.num_written:
            index, table = len(chain.path), entry.request.block_table
            standing = self._cache.extend(chain, table[index])
            if standing != table[index]:
                self._pool.share(standing)
                self._pool.release(table[index], keep=False)
                table[index] = standing
            self._waiting.settle(entry, chain.digests[index])
        if chain.broken:
            self._waiting.drop_claims(entry)
        if self._disk is not None and chain.num_saved < len(chain.path):
            self._disk.note(chain, self._cache.root_digest(chain))

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
        capacity = self._pool.num_blocks * self._block_size
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
            if not self._fits(entry, match, committed):
                self._preempt_worse(entry, match, step)
                committed = self._committed()
            if self._fits(entry, match, committed):
                self._start(entry, match, step)
                committed += self._still_takes(entry)
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

    def _may_admit(self, step: StepDraft, committed: int) -> bool:
        """Cheap reasons not to look at the queue."""
        if not self._has_place(step) or step.loads:
            return False
        head = self._waiting.head(1)
        if not head:
            return False
        if not self._running or head[0].request.priority < self._running[-1].request.priority:
            return True
        # Whatever is cached, a request needs one block of its own.
        return self._pool.num_free + self._cache.num_evictable > committed

    def _match(self, entry: Entry) -> Match:
        if entry.request.params.prompt_logprobs is not None:
            return Match()
        return self._cache.match(entry.chain)

    def _in_flight(self, entry: Entry, match: Match) -> bytes | None:
        """The last of the next full blocks that a running request is about to write, if any.

        A request never waits for one of worse priority.
        """
        if not self._cache.enabled or entry.request.params.prompt_logprobs is not None:
            return None
        last = None
        for digest in self._cache.digests(entry.chain)[len(match.nodes) :]:
            owner = self._waiting.claimed_by(digest)
            if owner is None or owner.request.priority > entry.request.priority:
                break
            last = digest
        return last

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

    def _still_takes(self, entry: Entry) -> int:
        """Blocks that a running request takes for its tokens, and one if it goes on beyond them."""
        needed = self._num_blocks(entry.request.num_tokens)
        grows = entry.last_position > needed * self._block_size
        return max(0, needed - len(entry.request.block_table)) + grows

    def _committed(self) -> int:
        return sum(self._still_takes(entry) for entry in self._running)

    def _fits(self, entry: Entry, match: Match, committed: int) -> bool:
        return self._lacking(entry, match, committed) <= 0

    def _lacking(self, entry: Entry, match: Match, committed: int) -> int:
        """Blocks missing before the request can be admitted; 0 or less when it can."""
        needed = self._num_blocks(entry.request.num_tokens) - len(match.nodes)
        unused = sum(node.users == 0 for node in match.nodes)
        return needed + committed - (self._pool.num_free + self._cache.num_evictable - unused)

    def _preempt_worse(self, entry: Entry, match: Match, step: StepDraft) -> None:
        """Preempt running requests of worse priority, last first, if that makes room for ``entry``."""
        worse = [e for e in self._running if e.request.priority > entry.request.priority]
        most = sum(len(e.request.block_table) for e in worse)
        if self._lacking(entry, match, self._committed()) > most:
            return
        while worse and not self._fits(entry, match, self._committed()):
            self._preempt(worse.pop(), step)

    def _start(self, entry: Entry, match: Match, step: StepDraft) -> None:
        """Commit the match and run the request: the only way in, for the first time and after."""
        request = entry.request
        self._waiting.remove(entry)
        first = request.num_cached_tokens is None
        loads = self._on_disk(entry, match)
        if loads:
            match = Match(match.nodes)  # a block is more than the rows of a tail
        if first:
            self._note_hit(entry, match, len(loads))
        table = [node.block for node in match.nodes]
        for block in table:
            self._pool.share(block)
        self._cache.commit(entry.chain, match, hit=first)
        entry.num_written = len(table) * self._block_size
        request.block_table = table
        for rows in loads:
            own = self._take_block()
            assert own is not None, "admission made sure of room"
            step.copies.append(BlockLoad(own, rows))
            step.loads = True
            table.append(own)
        computed = len(table) * self._block_size
        if match.tail is not None:
            source = match.tail.block
            own = self._take_block()
            assert own is not None, "admission made sure of room"
            # The source itself may have been evicted for this; then its rows are in place already.
            if own != source:
                step.copies.append(BlockCopy(source, own, match.tail_rows))
            table.append(own)
            computed += match.tail_rows
        request.num_computed_tokens = computed
        request.status = Status.RUNNING
        entry.passed = 0
        insort(self._running, entry, key=lambda e: e.key)
        if not entry.chain.broken:
            self._waiting.claim(entry, self._cache.digests(entry.chain)[len(match.nodes) :])
        self._schedule_share(entry, step)

    def _on_disk(self, entry: Entry, match: Match) -> list[memoryview]:
        """Rows of the blocks that follow the match on disk, less than the whole of the request's tokens."""
        chain, request = entry.chain, entry.request
        if self._disk is None or chain.broken or request.params.prompt_logprobs is not None:
            return []
        reusable = self._cache.digests(chain)[: (request.num_tokens - 1) // self._block_size]
        return self._disk.fetch(self._cache.root_digest(chain), reusable, chain.packed, len(match.nodes))

    def _note_hit(self, entry: Entry, match: Match, num_loads: int) -> None:
        request = entry.request
        request.num_disk_tokens = num_loads * self._block_size
        in_memory = len(match.nodes) * self._block_size + match.tail_rows
        request.num_cached_tokens = in_memory + request.num_disk_tokens
        if self._cache.enabled and request.params.prompt_logprobs is not None:
            request.cache_miss_reason = "prompt_logprobs computes the whole prompt"
            return
        request.cache_miss_reason = self._cache.explain(entry.chain, match, request.num_disk_tokens)
        if self._cache.enabled:
            self._prefix_queries += len(request.prompt_token_ids)
            self._prefix_hits += request.num_cached_tokens
            self._disk_hits += request.num_disk_tokens

    # ---- looking in from outside

    @property
    def stats(self) -> SchedulerStats:
        """A snapshot of gauges and counters."""
        return SchedulerStats(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            num_put_off=self._waiting.num_put_off,
            free_blocks=self._pool.num_free,
            cached_blocks=self._pool.num_kept,
            used_blocks=self._pool.num_used,
            prefix_queries=self._prefix_queries,
            prefix_hits=self._prefix_hits,
            disk_hits=self._disk_hits,
            preemptions=self._preemptions,
            evictions=self._cache.num_evictions,
            scheduled_tokens=self._scheduled_tokens,
            finished=self._finished,
        )

    def view(self) -> CacheView:
        """Every block of the pool, and who holds it; a copy."""
        requests = [entry.request for entry in self._running]
        return CacheView.of(self._block_size, self._pool.refs, self._cache.parents(), requests)

    def reset_prefix_cache(self) -> None:
        """Forget every cached block, in memory and on disk. What runs goes on with its own, uncached."""
        if self._disk is not None:
            self._disk.clear()
        for block in self._cache.clear():
            if self._pool.refs[block] == 0:
                self._pool.reclaim(block)
        for entry in self._running:
            entry.chain.path = []
            entry.chain.num_saved = 0
            entry.chain.broken = True
            self._waiting.drop_claims(entry)

    def check_invariants(self) -> None:
        """Raise AssertionError unless pool, cache and queue agree (for tests)."""
        tables = [entry.request.block_table for entry in self._entries.values()]
        self._pool.check_invariants(tables, self._cache.blocks())
        assert self._pool.num_kept == self._cache.num_evictable, "a kept block can never be evicted"
        self._cache.check_invariants([entry.chain for entry in self._entries.values()])
        self._waiting.check_invariants(self._running)
        assert [e.key for e in self._running] == sorted(e.key for e in self._running)
        assert len(self._running) + len(self._waiting) == len(self._entries)
        for entry in self._entries.values():
            assert (entry.request.status is Status.RUNNING) == (entry in self._running)
            assert entry.num_written <= entry.request.num_computed_tokens, "unwritten rows are booked"
            assert len(entry.chain.path) * self._block_size <= entry.num_written, "matched before written"
            assert entry.chain.num_tokens == entry.request.num_tokens
