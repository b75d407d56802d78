// What the C++ kernels of this package share: work split over XLA's threads, sums in vector registers, bfloat16.
//
// Plain C++17 in loops that compilers vectorise: sums go to fixed arrays of lanes, since without fast-math the order of
// additions is as written.

#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <utility>

#include "xla/ffi/api/ffi.h"

namespace portable {

namespace ffi = xla::ffi;

// Elements below which a second thread costs more than it saves: waking one takes some 10 µs.
constexpr int64_t kGrain = 32768;

// Calls work(begin, end) for parts of [0, count) on the calling thread and on XLA's; `each` elements are one unit's.
// A thread claims the next part when it is free. The caller waits for claimed parts alone, never for a thread that has
// not begun: it may itself be one of the pool, and all others may be waiting as it does.
template <typename Work>
void parallel(ffi::ThreadPool& pool, int64_t count, int64_t each, const Work& work) {
  const int64_t threads = std::min<int64_t>(pool.num_threads(), count * each / kGrain);
  if (threads < 2 || count < 2) {
    if (count > 0) work(0, count);
    return;
  }
  struct Shared {
    std::atomic<int64_t> next{0};
    std::mutex mutex;
    std::condition_variable finished;
    int64_t done = 0;
  };
  auto shared = std::make_shared<Shared>();
  const int64_t parts = std::min(count, 4 * threads);
  const Work* body = &work;  // alive as long as a part can be claimed: the caller waits for all of them
  auto run = [shared, parts, count, body] {
    for (int64_t part; (part = shared->next.fetch_add(1)) < parts;) {
      (*body)(count * part / parts, count * (part + 1) / parts);
      std::lock_guard<std::mutex> lock(shared->mutex);
      if (++shared->done == parts) shared->finished.notify_one();
    }
  };
  for (int64_t i = 1; i < threads; ++i) {
    auto task = run;
    pool.Schedule(std::move(task));
  }
  run();
  std::unique_lock<std::mutex> lock(shared->mutex);
  shared->finished.wait(lock, [&] { return shared->done == parts; });
}

// Sum of f(i) for i in [0, n): float32 in 32 lanes within blocks, float64 over blocks; the error does not grow with n.
template <typename F>
inline double sum(int64_t n, const F& f) {
  constexpr int64_t kLanes = 32, kBlock = 2048;
  double total = 0;
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    const int64_t end = std::min(n, begin + kBlock);
    float lanes[kLanes] = {};
    int64_t i = begin;
    for (; i + kLanes <= end; i += kLanes)
      for (int64_t j = 0; j < kLanes; ++j) lanes[j] += f(i + j);
    for (int64_t j = 0; i < end; ++i, ++j) lanes[j] += f(i);
    for (int64_t width = kLanes / 2; width; width /= 2)
      for (int64_t j = 0; j < width; ++j) lanes[j] += lanes[j + width];
    total += lanes[0];
  }
  return total;
}

struct BFloat16 {
  uint16_t bits;
};

inline float widened(float value) { return value; }

inline float widened(BFloat16 value) {
  const uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
  float wide;
  std::memcpy(&wide, &bits, sizeof wide);
  return wide;
}

// Rounded to the nearest, ties to even; NaN stays NaN.
inline void store(float value, float& out) { out = value; }

inline void store(float value, BFloat16& out) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const uint32_t quiet = (bits >> 16) | 0x40u;
  out.bits = static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? quiet : rounded);
}

}  // namespace portable
