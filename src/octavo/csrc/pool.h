// Threads of our own. A runtime's threads spin for a core that another process holds; these never
// make a caller wait for a thread that has not started on its work.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace octavo {

class ThreadPool {
public:
    // The caller is one of the threads: num_threads - 1 are started.
    explicit ThreadPool(int num_threads);
    ~ThreadPool();
    ThreadPool(const ThreadPool&) = delete;
    ThreadPool& operator=(const ThreadPool&) = delete;

    int num_threads() const { return int(workers_.size()) + 1; }

    // Calls body(thread, item) for every item in [0, count), each once, in any order, and returns when
    // all are done. thread, in [0, num_threads), is this thread's alone meanwhile. One call runs at a
    // time, others wait for it; body must not throw and must not call the pool.
    template <class F>
    void run(int64_t count, const F& body) {
        call(count, [](const void* f, int thread, int64_t item) { (*static_cast<const F*>(f))(thread, item); },
             &body);
    }

private:
    using Body = void (*)(const void* context, int thread, int64_t item);

    void call(int64_t count, Body body, const void* context);
    void work(int thread);
    void take_items(int thread);
    bool join(uint64_t* seen);
    bool wait_for_work(uint64_t seen);

    std::mutex calls_;
    Body body_ = nullptr;
    const void* context_ = nullptr;
    int64_t count_ = 0;
    // Apart from each other, because every thread writes the first and waits on the second.
    alignas(64) std::atomic<int64_t> next_{0};
    // (number of the call << 32) | (open << 31) | threads that are in it beside the caller.
    alignas(64) std::atomic<uint64_t> state_{0};
    alignas(64) std::atomic<int> sleepers_{0};
    std::atomic<int> caller_cpu_{-1};
    std::atomic<bool> stop_{false};
    std::mutex sleep_;
    std::condition_variable wake_;
    std::vector<std::thread> workers_;
};

}  // namespace octavo
