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
#include <immintrin.h>
#endif

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

// Lists the k at which f and of, or g and other, are both not zero; returns how many. Room for a vector more is needed.
template <typename T>
int64_t list_nonzero(const T* f, const T* of, const T* g, const T* other, int64_t size, int32_t* to) {
  int64_t found = 0, k = 0;
#if defined(__AVX512F__) && defined(__AVX512VL__)
  const auto both = [&](const T* x, const T* y) {
    if constexpr (sizeof(T) == 8) {
      const __m512d zero = _mm512_setzero_pd();
      return unsigned(_mm512_mask_cmp_pd_mask(_mm512_cmp_pd_mask(_mm512_loadu_pd(x + k), zero, _CMP_NEQ_UQ), _mm512_loadu_pd(y + k), zero, _CMP_NEQ_UQ));
    } else {
      const __m512 zero = _mm512_setzero_ps();
      return unsigned(_mm512_mask_cmp_ps_mask(_mm512_cmp_ps_mask(_mm512_loadu_ps(x + k), zero, _CMP_NEQ_UQ), _mm512_loadu_ps(y + k), zero, _CMP_NEQ_UQ));
    }
  };
  constexpr int64_t W = Lanes<T>::count;
  const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  for (; k + W <= size; k += W) {
    const unsigned mask = both(f, of) | both(g, other);
    const __m512i here = _mm512_maskz_compress_epi32(__mmask16(mask), _mm512_add_epi32(first, _mm512_set1_epi32(int(k))));
    if constexpr (sizeof(T) == 8)
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + found), _mm512_castsi512_si256(here));
    else
      _mm512_storeu_si512(to + found, here);
    found += __builtin_popcount(mask);
  }
#endif
  for (; k < size; ++k) {
    to[found] = int32_t(k);
    found += (int(f[k] != 0) & int(of[k] != 0)) | (int(g[k] != 0) & int(other[k] != 0));  // no branch: none could be foreseen
  }
  return found;
}

// Writes a vector, past the caches where it is a line of them.
template <typename T>
void stream(T* to, typename Lanes<T>::type x) {
#if defined(__AVX512F__)
  if (reinterpret_cast<uintptr_t>(to) % BYTES == 0) return _mm512_stream_si512(reinterpret_cast<__m512i*>(to), reinterpret_cast<__m512i>(x));
#endif
  *reinterpret_cast<typename Lanes<T>::type*>(to) = x;
}

inline void finish_streams() {
#if defined(__AVX512F__)
  _mm_sfence();
#endif
}

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
