// Worker threads of the optimizer: independent of OpenMP, so OMP_NUM_THREADS and torch's own pool do not touch them.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

namespace megatrain {

// Cuts [0, n) into contiguous home ranges, at most one a thread, and these into pieces; calls work(begin, end) once for
// each piece and returns when all are done. A worker takes the pieces of its own range in order, then what is left of the
// others', so that one which another program keeps from its core holds up no more than the piece it is in. The cuts
// depend on n and threads only: a range meets the same worker in every step, but for what others took over. A single
// range is worked on by the calling thread, more by workers while it waits. Calls from several threads queue up. Starts
// missing workers on first use, also after fork().
void parallel_ranges(std::int64_t n, int threads, const std::function<void(std::int64_t, std::int64_t)>& work);

// The operating system's ids of the threads that worked in the last call.
std::vector<long> last_thread_ids();

// Ends and joins the workers. A later call starts new ones.
void shutdown_pool();

}  // namespace megatrain
