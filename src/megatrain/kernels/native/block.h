#pragma once

#include <cstdint>

namespace megatrain {

// Elements that are speculated on together. Threads start at multiples of it, so that no two write one cache line or
// one block.
constexpr std::int64_t kBlock = 4096;

}  // namespace megatrain
