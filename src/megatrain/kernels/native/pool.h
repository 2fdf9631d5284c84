// Worker threads of the optimizer: independent of OpenMP, so OMP_NUM_THREADS and torch's own pool do not touch them.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

namespace megatrain {

// Cuts [0, n) into contiguous ranges, at most one a thread, and calls work(begin, end) once for each; returns when all
// are done. The cuts depend on n and threads only, so a range meets the same worker in every step (memory that was
// touched first by this pool stays near its core). The calling thread takes the first range. Calls from several
// threads queue up. Starts missing workers on first use, also after fork().
void parallel_ranges(std::int64_t n, int threads, const std::function<void(std::int64_t, std::int64_t)>& work);

// The operating system's ids of the threads that worked in the last call, one a range.
std::vector<long> last_thread_ids();

// Ends and joins the workers. A later call starts new ones.
void shutdown_pool();

}  // namespace megatrain
