#include "pool.h"

#include "block.h"

#include <algorithm>
#include <atomic>
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

// Blocks that a worker claims at a time, some 0.4 ms of work: what a call may wait for at its end.
constexpr std::int64_t kPiece = 32;

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

// One call: a home range for each worker, in pieces that whoever comes first claims.
class Job {
public:
    Job(std::int64_t n, std::int64_t blocks_each, const std::function<void(std::int64_t, std::int64_t)>& work)
        : n_(n), work_(work), homes_(static_cast<std::size_t>((blocks_of(n) + blocks_each - 1) / blocks_each)) {
        for (std::size_t i = 0; i < homes_.size(); ++i) {
            homes_[i].next = static_cast<std::int64_t>(i) * blocks_each;
            homes_[i].end = std::min(homes_[i].next + blocks_each, blocks_of(n));
        }
    }

    static std::int64_t blocks_of(std::int64_t n) { return (n + kBlock - 1) / kBlock; }

    int ranges() const { return static_cast<int>(homes_.size()); }

    // Works until no piece is left, first in the worker's own range; returns whether it got any.
    bool work_as(int worker) {
        bool worked = false;
        for (int i = 0; i < ranges(); ++i) {
            Home& home = homes_[static_cast<std::size_t>((worker + i) % ranges())];
            for (;;) {
                const std::int64_t begin = home.next.fetch_add(kPiece, std::memory_order_relaxed);
                if (begin >= home.end) break;
                work_(begin * kBlock, std::min(n_, std::min(begin + kPiece, home.end) * kBlock));
                worked = true;
            }
        }
        return worked;
    }

    bool all_claimed() const {
        return std::all_of(homes_.begin(), homes_.end(), [](const Home& home) { return home.next >= home.end; });
    }

private:
    // In blocks. On a cache line of its own, since its worker writes it all the time.
    struct alignas(64) Home {
        std::atomic<std::int64_t> next{0};
        std::int64_t end = 0;
    };

    const std::int64_t n_;
    const std::function<void(std::int64_t, std::int64_t)>& work_;
    std::vector<Home> homes_;
};

class Pool {
public:
    Pool() {
#if defined(__linux__)
        has_affinity_ = sched_getaffinity(0, sizeof affinity_, &affinity_) == 0;
#endif
    }

    void run(Job& job) {
        const std::lock_guard<std::mutex> one_call(call_);
        if (job.ranges() == 1) {
            const DefaultFloatingPoint ieee;
            job.work_as(0);
            thread_ids_ = {thread_id()};
            return;
        }
        start(job.ranges());
        std::unique_lock<std::mutex> lock(mutex_);
        job_ = &job;
        thread_ids_.clear();
        ++generation_;
        wake_.notify_all();
        // Not for all workers: one that gets no core meanwhile finds nothing left to do.
        done_.wait(lock, [&] { return working_ == 0 && job.all_claimed(); });
        job_ = nullptr;
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
            const int index = static_cast<int>(workers_.size());
            workers_.emplace_back([this, index, seen = generation_] { serve(index, seen); });
        }
    }

    void serve(int index, std::uint64_t seen) {
#if defined(__linux__)
        // The starting thread may have been bound to one core since (OpenMP does that); the workers may use all of
        // those that the process was given. A refusal leaves the inherited set, which is valid too.
        if (has_affinity_) sched_setaffinity(0, sizeof affinity_, &affinity_);
#endif
        const DefaultFloatingPoint ieee;
        std::unique_lock<std::mutex> lock(mutex_);
        for (;;) {
            wake_.wait(lock, [&] { return stopping_ || generation_ != seen; });
            if (stopping_) return;
            seen = generation_;
            if (job_ == nullptr || index >= job_->ranges()) continue;
            Job& job = *job_;
            ++working_;
            lock.unlock();
            const bool worked = job.work_as(index);
            lock.lock();
            if (worked) thread_ids_.push_back(thread_id());
            if (--working_ == 0) done_.notify_one();
        }
    }

    std::mutex call_;  // held for a whole call; mutex_ guards the fields below between caller and workers
    std::mutex mutex_;
    std::condition_variable wake_, done_;
    std::vector<std::thread> workers_;
    std::vector<long> thread_ids_;
    Job* job_ = nullptr;
    int working_ = 0;  // workers that are in the job
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
    Job job(n, (Job::blocks_of(n) + wanted - 1) / wanted, work);
    pool().run(job);
}

std::vector<long> last_thread_ids() { return pool().thread_ids(); }

void shutdown_pool() { pool().shutdown(); }

}  // namespace megatrain
