// The lower half of a symmetric matrix from the upper one, a square of entries at a time. Of each square, small ones of as
// many rows as a vector has numbers are turned in one go: every line of the cache is read once and written once.

#include "machine.h"

#include <cmath>

namespace {

constexpr int64_t SIDE = 256;  // of a square

struct Seen {
  double apart = 0, diagonal = 0;  // largest |H - H^T| before, largest |diagonal|
  bool finite = true;
};

template <typename T>
struct Small {
  using V = typename Lanes<T>::type;
  static constexpr int64_t W = Lanes<T>::count;

  alignas(64) T entries[W * W];

  // Reads a small square, and adds zeros to odd if all is finite.
  void read(const T* x, int64_t ld, V& odd) {
    for (int64_t i = 0; i < W; ++i) {
      const V row = *reinterpret_cast<const V*>(x + i * ld);
      odd += row - row;
      *reinterpret_cast<V*>(entries + i * W) = row;
    }
  }
  V column(int64_t j) const {
    V found;
    for (int64_t i = 0; i < W; ++i) found[i] = entries[i * W + j];
    return found;
  }
};

template <typename T>
struct Mirror {
  using V = typename Lanes<T>::type;
  static constexpr int64_t W = Lanes<T>::count;

  T* H;
  int64_t ld;
  V odd{};
  Seen seen{};

  // Copies the square of rows r and columns c, turned, to the opposite one.
  void copy(int64_t r, int64_t bottom, int64_t c, int64_t right) {
    each(r, bottom, c, right, [&](int64_t i, int64_t j, bool whole, int64_t h, int64_t w) {
      if (!whole) return corner(i, j, h, w, false);
      Small<T> small;
      small.read(H + i * ld + j, ld, odd);
      for (int64_t k = 0; k < W; ++k) *reinterpret_cast<V*>(H + (j + k) * ld + i) = small.column(k);
    });
  }

  // Puts the mean of a square and the opposite one, turned, into both; of one on the diagonal, as well.
  void average(int64_t r, int64_t bottom, int64_t c, int64_t right) {
    V apart{};
    each(r, bottom, c, right, [&](int64_t i, int64_t j, bool whole, int64_t h, int64_t w) {
      if (j + w <= i) return;  // below the diagonal
      if (!whole || i == j) return corner(i, j, h, w, true);
      Small<T> lower;
      lower.read(H + j * ld + i, ld, odd);
      Small<T> mean;
      for (int64_t k = 0; k < W; ++k) {
        V* to = reinterpret_cast<V*>(H + (i + k) * ld + j);
        const V x = *to, y = lower.column(k), z = (x + y) / 2, gap = x > y ? x - y : y - x;
        odd += z - z;
        apart = gap > apart ? gap : apart;
        *to = *reinterpret_cast<V*>(mean.entries + k * W) = z;
      }
      for (int64_t k = 0; k < W; ++k) *reinterpret_cast<V*>(H + (j + k) * ld + i) = mean.column(k);
    });
    for (int64_t k = 0; k < W; ++k) seen.apart = std::max(seen.apart, double(apart[k]));
  }

  bool finite() {
    for (int64_t k = 0; k < W; ++k) seen.finite &= odd[k] == 0;
    return seen.finite;
  }

 private:
  template <typename Visit>
  static void each(int64_t r, int64_t bottom, int64_t c, int64_t right, const Visit& visit) {
    for (int64_t i = r; i < bottom; i += W)
      for (int64_t j = c; j < right; j += W) {
        const int64_t h = std::min(W, bottom - i), w = std::min(W, right - j);
        visit(i, j, h == W && w == W, h, w);
      }
  }

  // One by one, where there are too few or the diagonal is crossed.
  void corner(int64_t r, int64_t c, int64_t h, int64_t w, bool both) {
    for (int64_t i = r; i < r + h; ++i)
      for (int64_t j = std::max(c, both ? i : c); j < c + w; ++j) {
        const T x = H[i * ld + j], y = both ? H[j * ld + i] : x, mean = (x + y) / 2;
        seen.finite &= mean - mean == 0;
        seen.apart = std::max(seen.apart, double(std::abs(x - y)));
        if (i == j) seen.diagonal = std::max(seen.diagonal, double(std::abs(mean)));
        H[i * ld + j] = H[j * ld + i] = mean;
      }
  }
};

template <typename T>
void mirror(T* H, int64_t ld, const int64_t* bounds, int64_t parameters, int64_t threads, double* result) {
  struct Square {
    int64_t r, bottom, c, right;
    bool own;  // of one parameter with itself
  };
  std::vector<Square> squares;
  for (int64_t p = 0; p < parameters; ++p) {
    const int64_t last = bounds[p + 1], n = bounds[parameters];
    for (int64_t r = bounds[p]; r < last; r += SIDE) {
      for (int64_t c = r; c < last; c += SIDE) squares.push_back({r, std::min(r + SIDE, last), c, std::min(c + SIDE, last), true});
      for (int64_t c = last; c < n; c += SIDE) squares.push_back({r, std::min(r + SIDE, last), c, std::min(c + SIDE, n), false});
    }
  }
  threads = std::min<int64_t>(threads, std::max<size_t>(1, squares.size()));
  std::vector<Seen> seen(threads);
  share(threads, [&](int64_t mine, int64_t step) {
    Mirror<T> part{H, ld};
    for (size_t k = mine; k < squares.size(); k += step) {
      const Square& s = squares[k];
      s.own ? part.average(s.r, s.bottom, s.c, s.right) : part.copy(s.r, s.bottom, s.c, s.right);
    }
    part.finite();
    seen[mine] = part.seen;
  });
  for (const Seen& one : seen) {
    result[0] = std::max(result[0], one.apart);
    result[1] = std::max(result[1], one.diagonal);
    if (!one.finite) result[2] = 1;
  }
}

}  // namespace

// bounds: where each parameter starts, and where the last one ends. result: largest |H - H^T| of the blocks on the diagonal,
// largest entry on the diagonal, 1 if something is not finite.
extern "C" void hessiankit_mirror(int single, void* H, int64_t ld, const int64_t* bounds, int64_t parameters, int64_t threads, double* result) {
  if (single)
    mirror(static_cast<float*>(H), ld, bounds, parameters, threads, result);
  else
    mirror(static_cast<double*>(H), ld, bounds, parameters, threads, result);
}
