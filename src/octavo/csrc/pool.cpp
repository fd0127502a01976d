#include "pool.h"

#include <chrono>

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif
#if defined(__linux__)
#include <sched.h>
#include <unistd.h>
#endif

namespace octavo {
namespace {

constexpr uint64_t kOpen = uint64_t(1) << 31;
constexpr uint64_t kCall = uint64_t(1) << 32;

// How long a thread without work looks for more before it sleeps: longer than what lies between two
// calls within a step, shorter than a scheduler's time slice.
constexpr std::chrono::microseconds kSpin{200};

inline void pause() {
#if defined(__x86_64__) || defined(__i386__)
    _mm_pause();
#else
    std::this_thread::yield();
#endif
}

int this_cpu() {
#if defined(__linux__)
    return sched_getcpu();
#else
    return -1;
#endif
}

// The system likes to wake a thread where it was called from. On the caller's CPU it would look for work while the
// caller, which has it, waits for that CPU; and where others keep every CPU busy nothing moves it for a long time.
void leave(int cpu) {
#if defined(__linux__)
    cpu_set_t allowed, others;
    if (sched_getaffinity(getpid(), sizeof allowed, &allowed) == 0 && CPU_COUNT(&allowed) > 1) {
        others = allowed;
        CPU_CLR(cpu, &others);
        sched_setaffinity(0, sizeof others, &others);  // moves at once
        sched_setaffinity(0, sizeof allowed, &allowed);
        return;
    }
#endif
    (void)cpu;
    std::this_thread::yield();
}

uint64_t call_number(uint64_t state) { return state / kCall; }

}  // namespace

ThreadPool::ThreadPool(int num_threads) {
    for (int thread = 1; thread < num_threads; ++thread) workers_.emplace_back([this, thread] { work(thread); });
}

ThreadPool::~ThreadPool() {
    {
        const std::lock_guard<std::mutex> guard(sleep_);
        stop_ = true;
    }
    wake_.notify_all();
    for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::call(int64_t count, Body body, const void* context) {
    const std::lock_guard<std::mutex> guard(calls_);
    if (workers_.empty() || count <= 1) {
        for (int64_t item = 0; item < count; ++item) body(context, 0, item);
        return;
    }
    body_ = body;
    context_ = context;
    count_ = count;
    caller_cpu_.store(this_cpu(), std::memory_order_relaxed);
    next_.store(0, std::memory_order_relaxed);
    // Everything above is published by the open bit, and nobody is in the call before it is set.
    state_.store((call_number(state_.load()) + 1) * kCall | kOpen);
    if (sleepers_.load() > 0) {
        { const std::lock_guard<std::mutex> sleep(sleep_); }
        wake_.notify_all();
    }
    take_items(0);
    // No item is left. Who has not joined by now never will; who has is waited for.
    uint64_t state = state_.fetch_and(~kOpen) & ~kOpen;
    for (int tries = 0; (state & (kOpen - 1)) != 0; ++tries) {
        if (tries < 2000) {
            pause();
        } else {
            std::this_thread::yield();
        }
        state = state_.load();
    }
}

void ThreadPool::take_items(int thread) {
    for (int64_t item = next_.fetch_add(1); item < count_; item = next_.fetch_add(1)) body_(context_, thread, item);
}

// True when this thread is now in a call that it has not seen; only then may it read what the call is.
bool ThreadPool::join(uint64_t* seen) {
    uint64_t state = state_.load();
    while ((state & kOpen) != 0 && call_number(state) != *seen) {
        if (!state_.compare_exchange_weak(state, state + 1)) continue;
        *seen = call_number(state);
        return true;
    }
    return false;
}

void ThreadPool::work(int thread) {
    uint64_t seen = 0;
    while (wait_for_work(seen)) {
        if (!join(&seen)) continue;
        take_items(thread);
        state_.fetch_sub(1);
    }
}

// Returns when there may be a call that this thread has not seen; false to stop.
bool ThreadPool::wait_for_work(uint64_t seen) {
    const auto news = [this, seen] {
        const uint64_t state = state_.load();
        return stop_.load() || ((state & kOpen) != 0 && call_number(state) != seen);
    };
    const auto start = std::chrono::steady_clock::now();
    do {
        for (int i = 0; i < 64; ++i) {
            if (news()) return !stop_.load();
            pause();
        }
        const int cpu = this_cpu();
        if (cpu >= 0 && cpu == caller_cpu_.load(std::memory_order_relaxed)) leave(cpu);
    } while (std::chrono::steady_clock::now() - start < kSpin);
    std::unique_lock<std::mutex> lock(sleep_);
    ++sleepers_;
    wake_.wait(lock, news);
    --sleepers_;
    return !stop_.load();
}

}  // namespace octavo
