// Sums of few rows m, out[m, x, z] += sum_n left[n, m] sum_t s_t[n, x] v_t[n, x1, z].
//
// With about as many m as a processor has registers, to lay the right side out costs as much as to sum it. Here it is made in
// registers, a vector of z at a time, and multiplied by all m there. Rows n at which every s_t is zero are left out, unless
// something is not finite.
#pragma once

#include "machine.h"

// data[n, i, j, z] at these strides; without data, ones
template <typename T>
struct Factor {
  const T* data;
  int64_t n, one, two, z;

  const T* at(int64_t i, int64_t j) const { return data ? data + i * one + j * two : nullptr; }
};

template <typename T>
struct Term {
  Factor<T> scalar, vector;
};

// So many entries of a vector, added to what lies at an address or written over it.
template <typename T>
void put_columns(const typename Lanes<T>::type& sum, int64_t columns, T* to, bool over) {
  using V = typename Lanes<T>::type;
  V* d = reinterpret_cast<V*>(to);
  if (columns == Lanes<T>::count)
    *d = over ? sum : *d + sum;
  else
    for (int64_t c = 0; c < columns; ++c) to[c] = over ? sum[c] : to[c] + sum[c];
}

template <typename T>
struct FewRows {
  using V = typename Lanes<T>::type;
  static constexpr int W = Lanes<T>::count, TALL = 2 * ROWS;
  static constexpr int64_t DEEP = 192;  // rows n summed at once

  int64_t depth, x1, x2, width, out_x1, out_x2;
  bool over;  // what lies in the matrix is not read
  const std::vector<Term<T>>& terms;
  const std::vector<const T*>& from;  // the left side of each m, along n at a stride
  int64_t step;
  const std::vector<int64_t>& to;  // where each m is put
  T* out;

  struct Strip {
    int64_t first, count, height;
    const T* left;  // (depth, height)
  };

  // Whether sums of so many m from these terms are faster this way.
  static bool pays(int64_t m, int64_t x2, const std::vector<Term<T>>& terms) {
    bool scaled = false;
    for (const Term<T>& term : terms) {
      if (x2 > 1 && term.vector.two) return false;
      scaled |= term.scalar.data != nullptr;
    }
    return scaled && m <= 3 * TALL;
  }

  void run(int64_t threads) const {
    const int64_t m = to.size();
    Buffer<T> packed(depth * (m + TALL));
    std::vector<Strip> strips;
    T* next = packed;
    T odd = 0;
    for (int64_t first = 0; first < m; first += TALL) {
      const int64_t count = std::min<int64_t>(TALL, m - first), height = count > TALL / 2 ? TALL : TALL / 2;
      strips.push_back({first, count, height, next});
      for (int64_t n = 0; n < depth; ++n, next += height)
        for (int64_t h = 0; h < height; ++h) {
          next[h] = h < count ? from[first + h][n * step] : 0;
          odd += next[h] - next[h];
        }
    }
    share(std::min(threads, x1), [&](int64_t mine, int64_t others) {
      const int64_t deep = std::min(depth, DEEP), several = terms.size();
      Buffer<T> scalars(several * x2 * deep), vectors(several * deep * W);
      std::vector<int32_t> rows(x2 * deep), counts(x2);
      for (int64_t x = mine; x < x1; x += others)
        for (int64_t start = 0; start < depth; start += deep) {
          const int64_t some = std::min(deep, depth - start);
          const bool good = pack_scalars(x, start, some, scalars, rows.data(), counts.data()) && odd == 0;
          for (int64_t z = 0; z < width; z += W) {
            const bool finite = pack_vectors(x, z, start, some, vectors) && good;
            for (int64_t y = 0; y < x2; ++y)
              for (const Strip& strip : strips) {
                const bool all = !finite || counts[y] == some;
                const int32_t* which = all ? nullptr : rows.data() + y * some;
                const T* left = strip.left + start * strip.height;
                put(strip, all ? some : counts[y], which, left, scalars + y * some, x2 * some, vectors, some,
                    out + x * out_x1 + y * out_x2 + z, std::min<int64_t>(W, width - z), over && start == 0);
              }
          }
        }
    });
  }

  // s_t of all y at one x, (terms, y, n), and the rows n of each y at which one of them is not zero.
  bool pack_scalars(int64_t x, int64_t start, int64_t some, T* into, int32_t* rows, int32_t* counts) const {
    constexpr int64_t NEXT = 64 / sizeof(T);  // entries of a line of the cache
    T odd = 0;
    for (size_t t = 0; t < terms.size(); ++t) {
      const Factor<T>& f = terms[t].scalar;
      T* at = into + t * x2 * some;
      if (!f.data) std::fill(at, at + x2 * some, T(1));
      for (int64_t y = 0; f.data && y < x2; y += NEXT) {
        const T* s = f.at(x, y) + start * f.n;
        for (int64_t n = 0; n < some; ++n, s += f.n)
          for (int64_t k = 0; k < std::min(NEXT, x2 - y); ++k) {
            const T value = s[k * f.two];
            at[(y + k) * some + n] = value;
            odd += value - value;
          }
      }
    }
    for (int64_t y = 0; y < x2; ++y) {
      const T* s = into + y * some;
      counts[y] = terms.size() == 1 ? list<1>(s, some, rows + y * some)
                  : terms.size() == 2 ? list<2>(s, some, rows + y * some) : list<0>(s, some, rows + y * some);
    }
    return odd == 0;
  }

  template <int given>
  int32_t list(const T* s, int64_t some, int32_t* rows) const {
    const int64_t several = given ? given : terms.size();
    int32_t found = 0;
    for (int64_t n = 0; n < some; ++n) {
      bool any = s[n] != 0;
      for (int64_t t = 1; t < several; ++t) any |= s[t * x2 * some + n] != 0;
      rows[found] = int32_t(n);
      found += any;
    }
    return found;
  }

  // One vector of z of every v_t at one x, (terms, n, W), zero where there are no columns.
  bool pack_vectors(int64_t x, int64_t z, int64_t start, int64_t some, T* into) const {
    const int64_t columns = std::min<int64_t>(W, width - z);
    V odd{};
    for (size_t t = 0; t < terms.size(); ++t) {
      const Factor<T>& f = terms[t].vector;
      const T* v = f.at(x, 0) + start * f.n + z * f.z;
      V* at = reinterpret_cast<V*>(into + t * some * W);
      for (int64_t n = 0; n < some; ++n, v += f.n) {
        V value{};
        if (columns == W && f.z == 1)
          value = *reinterpret_cast<const V*>(v);
        else
          for (int64_t c = 0; c < columns; ++c) value[c] = v[c * f.z];
        at[n] = value;
        odd += value - value;
      }
    }
    for (int c = 0; c < W; ++c)
      if (!(odd[c] == 0)) return false;
    return true;
  }

  // Sums and puts one tile; s and v: the packed scalars and vectors, those of one term so far apart.
  void put(const Strip& strip, int64_t count, const int32_t* which, const T* left, const T* s, int64_t s_next, const T* v,
           int64_t v_next, T* at, int64_t columns, bool first) const {
    V sums[TALL];
    for (int64_t h = 0; h < strip.count; ++h) __builtin_prefetch(at + to[strip.first + h], 1);
    if (terms.size() == 1)
      tile<1>(strip.height, count, which, left, s, s_next, v, v_next, sums);
    else if (terms.size() == 2)
      tile<2>(strip.height, count, which, left, s, s_next, v, v_next, sums);
    else
      tile<0>(strip.height, count, which, left, s, s_next, v, v_next, sums);
    for (int64_t h = 0; h < strip.count; ++h) put_columns(sums[h], columns, at + to[strip.first + h], first);
  }

  template <int given>
  void tile(int64_t height, int64_t count, const int32_t* which, const T* left, const T* s, int64_t s_next, const T* v,
            int64_t v_next, V* sums) const {
    if (height == TALL)
      which ? tile<TALL, given, true>(count, which, left, s, s_next, v, v_next, sums)
            : tile<TALL, given, false>(count, which, left, s, s_next, v, v_next, sums);
    else
      which ? tile<TALL / 2, given, true>(count, which, left, s, s_next, v, v_next, sums)
            : tile<TALL / 2, given, false>(count, which, left, s, s_next, v, v_next, sums);
  }

  template <int height, int given, bool listed>
  void tile(int64_t count, const int32_t* which, const T* left, const T* s, int64_t s_next, const T* v, int64_t v_next,
            V* sums) const {
    const int64_t several = given ? given : terms.size();
    V total[height];
#pragma GCC unroll 32
    for (int h = 0; h < height; ++h) total[h] = V{};
    for (int64_t k = 0; k < count; ++k) {
      const int64_t n = listed ? which[k] : k;
      V right = s[n] * reinterpret_cast<const V*>(v)[n];
      for (int64_t t = 1; t < several; ++t) right += s[t * s_next + n] * reinterpret_cast<const V*>(v)[t * v_next + n];
      const T* l = left + n * height;
#pragma GCC unroll 32
      for (int h = 0; h < height; ++h) total[h] += l[h] * right;
    }
#pragma GCC unroll 32
    for (int h = 0; h < height; ++h) sums[h] = total[h];
  }
};
