// What the kernels know of the processor: vectors, memory for a block, threads.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <thread>
#include <vector>

#if defined(__AVX512F__)
constexpr int BYTES = 64, ROWS = 8;  // of a vector register; of a tile
#elif defined(__AVX__)
constexpr int BYTES = 32, ROWS = 4;
#elif defined(__aarch64__)
constexpr int BYTES = 16, ROWS = 8;
#else
constexpr int BYTES = 16, ROWS = 4;
#endif

// A register of numbers, read from and written to any address.
template <typename T>
struct Lanes {
  typedef T type __attribute__((vector_size(BYTES), aligned(sizeof(T)), may_alias));
  static constexpr int count = BYTES / sizeof(T);
};

// Memory that starts at a line of the cache.
template <typename T>
class Buffer {
 public:
  explicit Buffer(int64_t count) : data_(static_cast<T*>(std::aligned_alloc(64, (count * sizeof(T) + 127) / 64 * 64))) {
    if (!data_) throw std::bad_alloc();
  }
  ~Buffer() { std::free(data_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  operator T*() { return data_; }

 private:
  T* data_;
};

// Calls work(first, step) on so many threads, each with a first of its own; what one of them does no other touches.
template <typename Work>
void share(int64_t threads, const Work& work) {
  std::vector<std::thread> others;
  for (int64_t t = 1; t < threads; ++t) others.emplace_back(work, t, threads);
  work(0, threads);
  for (auto& other : others) other.join();
}
