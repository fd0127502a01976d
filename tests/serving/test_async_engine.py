"""The engine's thread: what it does when things go wrong, and that nothing is left behind."""

from __future__ import annotations

import asyncio

import pytest
from tiny_engine import greedy

from octavo.serving.async_engine import AsyncEngine, EngineStoppedError, QueueFullError
from octavo.serving.openai import merge


def run(parts, scenario, **options):
    """Run a scenario on an engine in a thread, and stop that."""

    async def main():
        engine = AsyncEngine(parts.engine, **options)
        engine.start()
        try:
            return await asyncio.wait_for(scenario(engine), 20)
        finally:
            engine.stop()

    return asyncio.run(main())


async def last_of(stream):
    return [output async for output in stream][-1]


def test_answers_equal_those_of_the_engine_alone(tiny):
    prompts = [[10 + i, 20, 30] for i in range(20)]
    alone = [tiny().run((prompt, greedy(12)))[0].outputs[0].token_ids for prompt in prompts]

    async def scenario(engine):
        streams = [await engine.submit(prompt, greedy(12)) for prompt in prompts]
        return [(await last_of(stream)).outputs[0].token_ids for stream in streams]

    assert run(tiny(), scenario) == alone


def test_a_bad_prompt_is_refused_and_counts_for_nothing(tiny):
    async def scenario(engine):
        with pytest.raises(ValueError, match="empty"):
            await engine.submit([], greedy())
        assert engine.num_open == 0
        return await last_of(await engine.submit([1], greedy(2)))

    assert run(tiny(), scenario).finished


def test_the_queue_is_bounded(tiny):
    async def scenario(engine):
        streams = [await engine.submit([1, i], greedy(40)) for i in range(3)]
        with pytest.raises(QueueFullError, match="3 sequences are open"):
            await engine.submit([1], greedy())
        for stream in streams:
            await last_of(stream)
        await last_of(await engine.submit([1], greedy(1)))

    run(tiny(max_num_seqs=2), scenario, max_queue=1)


def test_a_submit_that_is_cancelled_leaves_nothing(tiny):
    parts = tiny()

    async def scenario(engine):
        for _ in range(20):
            task = asyncio.ensure_future(engine.submit([1, 2, 3], greedy(200)))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        while engine.num_open or await engine.call(lambda it: it.has_unfinished()):
            await asyncio.sleep(0.01)

    run(parts, scenario)
    parts.scheduler.check_invariants()
    assert parts.scheduler.stats.used_blocks == 0


def test_an_engine_that_fails_again_and_again_is_given_up_and_nobody_waits(tiny):
    parts = tiny()

    async def scenario(engine):
        stream = await engine.submit([1, 2], greedy(500 - 300))

        def fail():
            raise RuntimeError("broken")

        parts.engine.step = fail
        with pytest.raises(EngineStoppedError, match="failed"):
            await last_of(stream)
        with pytest.raises(EngineStoppedError):
            await engine.submit([1], greedy())
        with pytest.raises(EngineStoppedError):
            await engine.call(lambda it: it.metrics)
        assert engine.failed
        assert not engine.alive
        assert engine.num_open == 0

    run(parts, scenario)


def test_a_step_that_fails_once_costs_only_its_own_requests(tiny):
    parts = tiny()

    async def scenario(engine):
        stream = await engine.submit([1, 2], greedy(200))
        original = parts.runner.copy_blocks

        def fail(copies):
            parts.runner.copy_blocks = original
            raise RuntimeError("once")

        parts.runner.copy_blocks = fail
        assert (await last_of(stream)).error is not None
        return await last_of(await engine.submit([5, 6], greedy(4)))

    assert run(parts, scenario).error is None


def test_a_call_that_raises_is_its_caller_s(tiny):
    async def scenario(engine):
        with pytest.raises(ZeroDivisionError):
            await engine.call(lambda it: 1 / 0)
        assert engine.alive

    run(tiny(), scenario)


def test_a_slow_reader_gets_the_latest_and_the_last(tiny):
    async def scenario(engine):
        stream = await engine.submit([1, 2], greedy(60))
        seen = []
        async for output in stream:
            seen.append(len(output.outputs[0].token_ids))
            await asyncio.sleep(0.02)
        assert seen == sorted(set(seen))
        assert seen[-1] == 60
        assert len(seen) < 60

    run(tiny(), scenario)


def test_merged_streams_all_come_to_their_ends(tiny):
    async def scenario(engine):
        streams = [await engine.submit([1, i], greedy(5 + i)) for i in range(5)]
        last = {}
        async for place, output in merge(streams):
            last[place] = output
        assert [len(last[i].outputs[0].token_ids) for i in range(5)] == [5, 6, 7, 8, 9]

    run(tiny(), scenario)


def test_draining_refuses_new_requests_and_waits(tiny):
    async def scenario(engine):
        stream = await engine.submit([1], greedy(30))
        drained = asyncio.ensure_future(engine.drain(10))
        await asyncio.sleep(0)
        with pytest.raises(EngineStoppedError, match="shutting down"):
            await engine.submit([1], greedy())
        output = await last_of(stream)
        await drained
        return output.outputs[0].finish_reason

    assert run(tiny(), scenario) == "length"
