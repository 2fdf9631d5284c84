#include "pool.h"

#include "block.h"

#include <algorithm>
#include <cfenv>
#include <condition_variable>
#include <mutex>
#include <thread>

#include <pthread.h>
#if defined(__linux__)
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace megatrain {
namespace {

// Below this many elements a range is not worth waking a thread for (about 10 us of work).
constexpr std::int64_t kLeastRange = 16384;

long thread_id() {
#if defined(__linux__)
    return syscall(SYS_gettid);
#else
    return static_cast<long>(std::hash<std::thread::id>{}(std::this_thread::get_id()));
#endif
}

// IEEE arithmetic whatever the caller chose: torch.set_flush_denormal would otherwise change the results, and a new
// thread inherits the setting of the one that starts it.
class DefaultFloatingPoint {
public:
    DefaultFloatingPoint() {
        std::fegetenv(&saved_);
        std::fesetenv(FE_DFL_ENV);
    }
    ~DefaultFloatingPoint() { std::fesetenv(&saved_); }
    DefaultFloatingPoint(const DefaultFloatingPoint&) = delete;
    DefaultFloatingPoint& operator=(const DefaultFloatingPoint&) = delete;

private:
    std::fenv_t saved_;
};

class Pool {
public:
    Pool() {
#if defined(__linux__)
        has_affinity_ = sched_getaffinity(0, sizeof affinity_, &affinity_) == 0;
#endif
    }

    void run(int ranges, const std::function<void(int)>& work) {
        const std::lock_guard<std::mutex> one_call(call_);
        start(ranges - 1);
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            work_ = &work;
            ranges_ = ranges;
            pending_ = ranges - 1;
            thread_ids_.assign(static_cast<std::size_t>(ranges), 0);
            ++generation_;
        }
        wake_.notify_all();
        execute(work, 0);
        std::unique_lock<std::mutex> lock(mutex_);
        done_.wait(lock, [this] { return pending_ == 0; });
        work_ = nullptr;
    }

    std::vector<long> thread_ids() {
        const std::lock_guard<std::mutex> one_call(call_);
        return thread_ids_;
    }

    void shutdown() {
        const std::lock_guard<std::mutex> one_call(call_);
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            stopping_ = true;
        }
        wake_.notify_all();
        for (std::thread& worker : workers_) worker.join();
        workers_.clear();
        stopping_ = false;
    }

private:
    void start(int wanted) {
        while (static_cast<int>(workers_.size()) < wanted) {
            const int index = static_cast<int>(workers_.size()) + 1;
            workers_.emplace_back([this, index, seen = generation_] { serve(index, seen); });
        }
    }

    void execute(const std::function<void(int)>& work, int index) {
        const DefaultFloatingPoint ieee;
        thread_ids_[static_cast<std::size_t>(index)] = thread_id();
        work(index);
    }

    void serve(int index, std::uint64_t seen) {
#if defined(__linux__)
        // The starting thread may have been bound to one core since (OpenMP does that); the workers may use all of
        // those that the process was given. A refusal leaves the inherited set, which is valid too.
        if (has_affinity_) sched_setaffinity(0, sizeof affinity_, &affinity_);
#endif
        std::unique_lock<std::mutex> lock(mutex_);
        for (;;) {
            wake_.wait(lock, [&] { return stopping_ || generation_ != seen; });
            if (stopping_) return;
            seen = generation_;
            if (index >= ranges_) continue;
            const std::function<void(int)>& work = *work_;
            lock.unlock();
            execute(work, index);
            lock.lock();
            if (--pending_ == 0) done_.notify_one();
        }
    }

    std::mutex call_;  // held for a whole call; mutex_ guards the fields below between caller and workers
    std::mutex mutex_;
    std::condition_variable wake_, done_;
    std::vector<std::thread> workers_;
    std::vector<long> thread_ids_;
    const std::function<void(int)>* work_ = nullptr;
    int ranges_ = 0;
    int pending_ = 0;
    std::uint64_t generation_ = 0;
    bool stopping_ = false;
#if defined(__linux__)
    cpu_set_t affinity_;
    bool has_affinity_ = false;
#endif
};

Pool* current_pool = nullptr;

// The child of a fork has none of the threads, and may hold the mutexes locked for ever: it starts over with a new
// pool and leaves the old one alone.
void renew_pool() { current_pool = new Pool; }

Pool& pool() {
    static const bool made = [] {
        renew_pool();
        pthread_atfork(nullptr, nullptr, renew_pool);
        return true;
    }();
    static_cast<void>(made);
    return *current_pool;
}

// Made as the module loads: the cores that the process may use are read before OpenMP can bind the main thread.
const Pool& pool_at_load = pool();

}  // namespace

void parallel_ranges(std::int64_t n, int threads, const std::function<void(std::int64_t, std::int64_t)>& work) {
    if (n <= 0) return;
    const std::int64_t wanted = std::min<std::int64_t>(threads, (n + kLeastRange - 1) / kLeastRange);
    const std::int64_t blocks = (n + kBlock - 1) / kBlock;
    const std::int64_t blocks_each = (blocks + wanted - 1) / wanted;
    const std::int64_t ranges = (blocks + blocks_each - 1) / blocks_each;
    pool().run(static_cast<int>(ranges), [&](int index) {
        const std::int64_t begin = index * blocks_each * kBlock;
        work(begin, std::min(n, begin + blocks_each * kBlock));
    });
}

std::vector<long> last_thread_ids() { return pool().thread_ids(); }

void shutdown_pool() { pool().shutdown(); }

}  // namespace megatrain
