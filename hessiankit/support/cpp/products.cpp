// Products of many small matrices, out[b] = a[b] b[b]. A panel of two vectors of columns of the right matrix is read where it lies,
// or laid out zero-padded where its columns are not next to each other or end within a vector; ROWS rows are summed in registers.

#include "machine.h"

namespace {

// The entries of matrix b at data + b * batch + i * row + j * column
template <typename T>
struct Stack {
  T* data;
  int64_t batch, row, column;
};

template <typename T>
struct Products {
  using V = typename Lanes<T>::type;
  static constexpr int W = Lanes<T>::count, WIDE = 2 * W;

  int64_t count, m, n, k;
  Stack<const T> a, b;
  Stack<T> out;

  void run(int64_t threads) {
    if (b.batch == 0 && a.batch == m * a.row && out.batch == m * out.row) m *= count, count = 1;
    const int64_t strips = (m + ROWS - 1) / ROWS, work = count > 1 ? count : strips;
    share(std::min(threads, work), [&](int64_t mine, int64_t others) {
      Buffer<T> panel(k * WIDE);
      for (int64_t z = 0; z < n; z += WIDE) {
        const int64_t columns = std::min<int64_t>(WIDE, n - z);
        const bool direct = b.column == 1 && columns % W == 0;
        if (count == 1) {
          const T* right = direct ? b.data + z : pack(b.data + z * b.column, columns, panel);
          for (int64_t s = mine; s < strips; s += others) strip(0, s * ROWS, z, columns, right, direct ? b.row : WIDE);
          continue;
        }
        for (int64_t c = mine; c < count; c += others) {
          const T* at = b.data + c * b.batch + z * b.column;
          const T* right = direct ? at : (b.batch || c == mine) ? pack(at, columns, panel) : panel;
          for (int64_t s = 0; s < m; s += ROWS) strip(c, s, z, columns, right, direct ? b.row : WIDE);
        }
      }
    });
  }

  const T* pack(const T* from, int64_t columns, T* into) const {
    for (int64_t l = 0; l < k; ++l)
      for (int64_t c = columns; c < WIDE; ++c) into[l * WIDE + c] = 0;
    if (b.row == 1)
      for (int64_t c = 0; c < columns; ++c)
        for (int64_t l = 0; l < k; ++l) into[l * WIDE + c] = from[c * b.column + l];
    else
      for (int64_t l = 0; l < k; ++l)
        for (int64_t c = 0; c < columns; ++c) into[l * WIDE + c] = from[l * b.row + c * b.column];
    return into;
  }

  void strip(int64_t c, int64_t first, int64_t z, int64_t columns, const T* right, int64_t next) const {
    const T* rows[ROWS];
    for (int64_t h = 0; h < ROWS; ++h) rows[h] = a.data + c * a.batch + std::min(first + h, m - 1) * a.row;
    V sums[ROWS][2];
    columns > W ? tile<2>(rows, right, next, sums) : tile<1>(rows, right, next, sums);
    for (int64_t h = 0; h < std::min<int64_t>(ROWS, m - first); ++h) {
      T* to = out.data + c * out.batch + (first + h) * out.row + z;
      if (columns == WIDE || columns == W) {
        for (int64_t v = 0; v * W < columns; ++v) reinterpret_cast<V*>(to)[v] = sums[h][v];
      } else {
        std::memcpy(to, sums[h], columns * sizeof(T));
      }
    }
  }

  template <int wide>
  void tile(const T* const* rows, const T* right, int64_t next, V sums[ROWS][2]) const {
    V s[ROWS][wide];
#pragma GCC unroll 16
    for (int h = 0; h < ROWS; ++h)
      for (int v = 0; v < wide; ++v) s[h][v] = V{};
    for (int64_t l = 0; l < k; ++l, right += next) {
      const V x = reinterpret_cast<const V*>(right)[0], y = reinterpret_cast<const V*>(right)[wide - 1];
#pragma GCC unroll 16
      for (int h = 0; h < ROWS; ++h) {
        const T left = rows[h][l * a.column];
        s[h][0] += left * x;
        if (wide == 2) s[h][wide - 1] += left * y;
      }
    }
#pragma GCC unroll 16
    for (int h = 0; h < ROWS; ++h)
      for (int v = 0; v < wide; ++v) sums[h][v] = s[h][v];
  }
};

template <typename T>
void multiply(const void* a, const void* b, void* out, const int64_t* s, int64_t threads) {
  Products<T>{s[0], s[1], s[2], s[3], {static_cast<const T*>(a), s[4], s[5], s[6]}, {static_cast<const T*>(b), s[7], s[8], s[9]},
              {static_cast<T*>(out), s[10], s[11], 1}}.run(threads);
}

}  // namespace

// Numbers: count, m, n, k; strides of a and b along (matrix, row, column); of out along (matrix, row), its columns contiguous.
extern "C" int hessiankit_multiply(int single, const void* a, const void* b, void* out, const int64_t* numbers, int64_t threads) {
  try {
    if (single)
      multiply<float>(a, b, out, numbers, threads);
    else
      multiply<double>(a, b, out, numbers, threads);
    return 0;
  } catch (const std::bad_alloc&) {
    return 1;
  }
}
