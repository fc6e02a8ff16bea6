// Sums of products that are added to a part of a large matrix, or written over what lies there,
//
//     out[m, x, z] += sum_n left[n, m] right[n, x, z],        m = (m1, m2), x = (x1, x2), z contiguous in the matrix,
//
// where both sides are products themselves and are never written out whole:
//
//     left[n, m] = a[n, m] b[n, m]        right[n, x, z] = s[n, x] v[n, x, z] + t[n, x] w[n, x, z].
//
// A block of the right side is laid out in panels that stay in the cache, a strip of the left one beside it; a tile of
// ROWS x (two vectors) is summed in registers and reaches the matrix once. Rows n at which a strip or a panel is zero,
// as behind a ReLU, are left out, unless something is not finite: then 0 x inf has to show.

#include "machine.h"

#include <cmath>

namespace {

constexpr int64_t NEAR = 300 * 1024;  // bytes of panels, and of strips, that stay in the nearer cache together
constexpr int64_t FAR = 800 * 1024;   // bytes of panels where strips are too many to be kept, or panels read the same factor
constexpr int64_t DEEP = 2048;        // rows n summed at once
constexpr int64_t SHALLOW = 64;       // at least
constexpr int64_t FEW = 8;            // rows n laid out at once

// data[n, i, j, z] at these strides; without data, ones
template <typename T>
struct Factor {
  const T* data;
  int64_t n, one, two, z;

  const T* at(int64_t i, int64_t j) const { return data ? data + i * one + j * two : nullptr; }
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
struct Sum {
  using V = typename Lanes<T>::type;
  static constexpr int W = Lanes<T>::count, WIDE = 2 * W;

  int64_t depth, m1, m2;
  bool triangular;  // m1 = m2 indices of which only m2 >= m1 are summed; the others are the same
  bool mean;        // and the left side is symmetric up to rounding, of which the mean is taken
  int64_t x1, x2, width;
  int64_t out_m1, out_m2, out_x1, out_x2;
  bool over;  // what lies in the matrix is not read
  Factor<T> a, b, s, v, t, w;
  T* out;

  struct Row {
    int64_t to, too;  // where it is added; -1: nowhere else
    const T *a, *b, *mirrored;
  };
  struct Panel {
    int64_t x, z, columns;
  };
  // Rows n of a strip or a panel at which something is not zero: whether each is, and their numbers
  struct Support {
    char* has;
    int32_t* rows;
    int64_t count;
    bool full;

    void list(int64_t depth) {
      count = 0;
      for (int64_t n = 0; n < depth; ++n) rows[count] = int32_t(n), count += has[n];
      full = count == depth;
    }
  };

  std::vector<Row> rows;
  std::vector<Panel> panels;
  bool sparse;  // zero times any entry of the right side is zero

  // Where one of two factors has more zeros, strips have one entry of it: zero at many rows n, which are left out.
  void order() {
    if (!triangular && a.data && b.data && zeros(b, m2, b.two) > zeros(a, m1, a.one)) {
      std::swap(a, b);
      std::swap(a.one, a.two);
      std::swap(b.one, b.two);
      std::swap(m1, m2);
      std::swap(out_m1, out_m2);
    }
  }

  double zeros(const Factor<T>& f, int64_t count, int64_t step) const {
    int64_t found = 0;
    for (int64_t n = 0; n < depth; ++n)
      for (int64_t i = 0; i < count; ++i) found += f.data[n * f.n + i * step] == 0;
    return double(found) / double(count);
  }

  // Tells whether all vectors of the right side are finite.
  bool finite(const Factor<T>& f) const {
    V odd{};
    const int64_t whole = f.z == 1 ? width / W * W : 0;
    for (int64_t n = 0; f.data && n < depth; ++n)
      for (int64_t i = 0; i < (f.one ? x1 : 1); ++i)
        for (int64_t j = 0; j < (f.two ? x2 : 1); ++j) {
          const T* from = f.at(i, j) + n * f.n;
          for (int64_t z = 0; z < whole; z += W) odd += *reinterpret_cast<const V*>(from + z) * T(0);
          for (int64_t z = whole; z < width; ++z) odd[0] += from[z * f.z] * T(0);
        }
    return none(odd);
  }

  void list() {
    for (int64_t i = 0; i < m1; ++i)
      for (int64_t j = triangular ? i : 0; j < m2; ++j)
        rows.push_back({i * out_m1 + j * out_m2, triangular && i != j ? j * out_m1 + i * out_m2 : -1, a.at(i, j), b.at(i, j),
                        mean ? a.at(j, i) : nullptr});
    for (int64_t x = 0; x < x1 * x2; ++x)
      for (int64_t z = 0; z < width; z += WIDE) panels.push_back({x, z, std::min<int64_t>(WIDE, width - z)});
  }

  // Panels, each (deep, WIDE) and zero where there are no columns. Returns whether all is finite.
  bool pack_right(const Panel* panel, int64_t count, int64_t start, int64_t deep, T* into, Support* support) const {
    V odd{};
    for (int64_t top = 0; top < deep; top += FEW)  // a few rows of all panels: along a row they lie next to each other
      for (int64_t k = 0; k < count; ++k) {
        const Panel& p = panel[k];
        const int64_t first = start + top, whole = v.z == 1 && (!w.data || w.z == 1) ? p.columns / W : 0;
        const Term one(s, v, p, x2, first), two(t, w, p, x2, first);
        const auto pack = w.data ? whole == 2 ? &pack_rows<2, true> : whole == 1 ? &pack_rows<1, true> : &pack_rows<0, true>
                                 : whole == 2 ? &pack_rows<2, false> : whole == 1 ? &pack_rows<1, false> : &pack_rows<0, false>;
        odd += pack(one, two, std::min(FEW, deep - top), p.columns, sparse, into + (k * deep + top) * WIDE, support[k].has + top);
      }
    for (int64_t k = 0; k < count; ++k) support[k].list(deep);
    return none(odd);
  }

  // One of the two terms of a panel, from a row on.
  struct Term {
    const T *scalar, *vector;
    int64_t step, next, z;

    Term(const Factor<T>& s, const Factor<T>& v, const Panel& p, int64_t x2, int64_t first)
        : scalar(s.at(p.x / x2, p.x % x2)), vector(v.at(p.x / x2, p.x % x2)), step(s.n), next(v.n), z(v.z) {
      if (scalar) scalar += first * s.n;
      if (vector) vector += p.z * v.z + first * v.n;
    }
    T factor(int64_t n) const { return scalar ? scalar[n * step] : T(1); }
    V whole(int64_t n, int64_t half) const { return reinterpret_cast<const V*>(vector + n * next)[half]; }
    V some(int64_t n, int64_t first, int64_t last) const {
      V x{};
      for (int64_t c = first; c < last; ++c) x[c - first] = vector[n * next + c * z];
      return x;
    }
  };

  // Whole vectors first. Rows whose factors are zero are not read if sparse. Returns zeros if all is finite.
  template <int whole, bool both>
  static V pack_rows(const Term& one, const Term& two, int64_t count, int64_t columns, bool sparse, T* to, char* has) {
    V odd{};
    for (int64_t n = 0; n < count; ++n, to += WIDE) {
      const T f = one.factor(n), g = both ? two.factor(n) : T(0);
      V x{}, y{};
      if (!sparse || f != 0 || g != 0) {
        x = f * (whole > 0 ? one.whole(n, 0) : one.some(n, 0, std::min<int64_t>(W, columns)));
        if (both) x += g * (whole > 0 ? two.whole(n, 0) : two.some(n, 0, std::min<int64_t>(W, columns)));
        if (whole == 2 || columns > W) {
          y = f * (whole > 1 ? one.whole(n, 1) : one.some(n, W, columns));
          if (both) y += g * (whole > 1 ? two.whole(n, 1) : two.some(n, W, columns));
        }
      }
      reinterpret_cast<V*>(to)[0] = x;
      if (whole == 2 || columns > W) reinterpret_cast<V*>(to)[1] = y;
      odd += (x - x) + (y - y);
      has[n] = x[0] != 0 || any(x, y);
    }
    return odd;
  }

  // Tells whether a number of two vectors is not zero.
  static bool any(V x, V y) {
    typedef int64_t Bits __attribute__((vector_size(BYTES)));
    const Bits bits = reinterpret_cast<Bits>((x != T(0)) | (y != T(0)));  // which -0 is not
    int64_t found = 0;
    for (int i = 0; i < BYTES / 8; ++i) found |= bits[i];
    return found != 0;
  }

  // A strip of rows, (deep, ROWS), zero where there are none. Returns whether all is finite; skew: the largest |left - its
  // transpose| and the largest on the diagonal, if the mean is taken.
  bool pack_left(const Row* row, int64_t count, int64_t start, int64_t deep, T* into, Support& support, double* skew) const {
    T odd = 0, apart = 0, diagonal = 0;
    const T *s[ROWS], *t[ROWS];
    for (int64_t m = 0; m < ROWS; ++m) {
      const Row& r = row[std::min(m, count - 1)];
      s[m] = r.a ? r.a + start * a.n : r.b + start * b.n;
      t[m] = mean ? r.mirrored + start * a.n : r.b ? r.b + start * b.n : nullptr;
    }
    const int64_t one = a.data ? a.n : b.n, two = mean ? a.n : b.n;
    for (int64_t n = 0; n < deep; ++n, into += ROWS) {
      if (mean) {
        for (int m = 0; m < ROWS; ++m) {
          const T x = s[m][n * one], y = t[m][n * two];
          into[m] = (x + y) / 2;
          apart = std::max(apart, std::abs(x - y));
          if (row[std::min<int64_t>(m, count - 1)].too < 0) diagonal = std::max(diagonal, std::abs(x));
        }
      } else if (a.data && b.data) {
        for (int m = 0; m < ROWS; ++m) into[m] = s[m][n * one] * t[m][n * two];
      } else {
        for (int m = 0; m < ROWS; ++m) into[m] = s[m][n * one];
      }
      for (int m = 0; m < ROWS; ++m) odd += into[m] - into[m];
      for (int64_t m = count; m < ROWS; ++m) into[m] = 0;
      support.has[n] = into[0] != 0 || std::any_of(into + 1, into + ROWS, [](T x) { return x != 0; });
    }
    support.list(deep);
    skew[0] = std::max(skew[0], double(apart));
    skew[1] = std::max(skew[1], double(diagonal));
    return odd == 0;
  }

  static bool none(V odd) {
    for (int i = 0; i < W; ++i)
      if (!(odd[i] == 0)) return false;
    return true;
  }

  // One tile, of one or two vectors: over all rows n, or those listed.
  template <int wide, bool listed>
  static void tile(int64_t count, const int32_t* which, const T* left, const T* right, V sums[ROWS][2]) {
    V s[ROWS][wide];
#pragma GCC unroll 16
    for (int m = 0; m < ROWS; ++m)
      for (int h = 0; h < wide; ++h) s[m][h] = V{};
    for (int64_t k = 0; k < count; ++k) {
      const int64_t n = listed ? which[k] : k;
      const T* l = left + n * ROWS;
      const V* r = reinterpret_cast<const V*>(right + n * WIDE);
      const V x = r[0], y = r[wide - 1];
#pragma GCC unroll 16
      for (int m = 0; m < ROWS; ++m) {
        s[m][0] += l[m] * x;
        if (wide == 2) s[m][wide - 1] += l[m] * y;
      }
    }
#pragma GCC unroll 16
    for (int m = 0; m < ROWS; ++m)
      for (int h = 0; h < wide; ++h) sums[m][h] = s[m][h];
  }

  static void tile(int64_t columns, int64_t count, const int32_t* which, const T* left, const T* right, V sums[ROWS][2]) {
    if (columns > W)
      which ? tile<2, true>(count, which, left, right, sums) : tile<2, false>(count, which, left, right, sums);
    else
      which ? tile<1, true>(count, which, left, right, sums) : tile<1, false>(count, which, left, right, sums);
  }

  static void put(const V sum[2], int64_t columns, T* to, bool over) {
    put_columns(sum[0], std::min<int64_t>(W, columns), to, over);
    if (columns > W) put_columns(sum[1], columns - W, to + W, over);
  }

  // Asks for lines of the matrix while the tile is summed that they take.
  static void fetch(const T* to, int64_t columns) {
    for (int64_t c = 0; c < columns; c += 64 / int64_t(sizeof(T))) __builtin_prefetch(to + c, 1);
    __builtin_prefetch(to + columns - 1, 1);
  }

  // What one thread works with.
  struct Desk {
    Buffer<T> right, left;
    Buffer<int32_t> numbers, both;
    Buffer<char> flags;
    std::vector<Support> panels, strips;
    std::vector<char> good;  // strips of which all is finite
    int64_t at = -1;         // of which rows n on the strips are kept; -1: none
    double skew[2] = {0, 0};

    Desk(int64_t deep, int64_t each, int64_t held)
        : right(deep * WIDE * each), left(deep * ROWS * held), numbers(deep * (each + held)), both(deep), flags(deep * (each + held)),
          good(held) {
      for (int64_t k = 0; k < each + held; ++k)
        (k < each ? panels : strips).push_back({flags + k * deep, numbers + k * deep, 0, false});
    }
  };

  void block(int64_t first, int64_t last, int64_t start, int64_t deep, Desk& desk) const {
    const int64_t count = last - first, strips = (rows.size() + ROWS - 1) / ROWS;
    const bool finite = pack_right(&panels[first], count, start, deep, desk.right, desk.panels.data());
    const bool all = int64_t(desk.strips.size()) == strips;
    V sums[ROWS][2];
    for (int64_t m = 0; m < strips; ++m) {
      const int64_t at = all ? m : 0, high = std::min<int64_t>(ROWS, rows.size() - m * ROWS);
      const Row* row = &rows[m * ROWS];
      T* left = desk.left + at * deep * ROWS;
      Support& strip = desk.strips[at];
      if (!all || desk.at != start) {
        desk.good[at] = pack_left(row, high, start, deep, left, strip, desk.skew);
      }
      const bool every = !finite || !desk.good[at];
      for (int64_t k = 0; k < count; ++k) {
        const Support& panel = desk.panels[k];
        const Panel& p = panels[first + k];
        const T* right = desk.right + k * deep * WIDE;
        T* to = out + p.x / x2 * out_x1 + p.x % x2 * out_x2 + p.z;
        for (int64_t h = 0; h < high; ++h) fetch(to + row[h].to, p.columns);
        if (every || (panel.full && strip.full)) {
          tile(p.columns, deep, nullptr, left, right, sums);
        } else if (panel.full || strip.full) {
          const Support& some = panel.full ? strip : panel;
          tile(p.columns, some.count, some.rows, left, right, sums);
        } else {
          int64_t met = 0;
          for (int64_t i = 0; i < panel.count; ++i) desk.both[met] = panel.rows[i], met += strip.has[panel.rows[i]];
          tile(p.columns, met, desk.both, left, right, sums);
        }
        for (int64_t h = 0; h < high; ++h) {
          put(sums[h], p.columns, to + row[h].to, over && start == 0);
          if (row[h].too >= 0) put(sums[h], p.columns, to + row[h].too, over && start == 0);
        }
      }
    }
    desk.at = start;
  }

  void run(int64_t threads, double* skew) {
    order();
    list();
    sparse = (s.data || t.data) && finite(v) && finite(w);
    const int64_t alike = w.data ? x2 * ((width + WIDE - 1) / WIDE) : 1;  // panels that read the same rows of a factor
    const int64_t fitting = std::max<int64_t>(SHALLOW, FAR / int64_t(sizeof(T) * WIDE) / alike);
    const int64_t deep = std::min({depth, DEEP, fitting}), total = panels.size(), strips = (rows.size() + ROWS - 1) / ROWS;
    const bool all = strips * deep * ROWS * int64_t(sizeof(T)) <= NEAR;
    const int64_t few = std::max<int64_t>(1, (all && !w.data ? NEAR : FAR) / int64_t(sizeof(T) * deep * WIDE));
    const int64_t each = std::max<int64_t>(1, std::min((total + threads - 1) / threads, few)), blocks = (total + each - 1) / each;
    threads = std::max<int64_t>(1, std::min(threads, blocks));
    std::vector<double> apart(threads), diagonal(threads);
    share(threads, [&](int64_t mine, int64_t step) {
      const int64_t held = all ? strips : 1;
      Desk desk(deep, each, held);
      for (int64_t k = mine; k < blocks; k += step)
        for (int64_t start = 0; start < depth; start += deep)
          block(k * each, std::min(total, (k + 1) * each), start, std::min(deep, depth - start), desk);
      apart[mine] = desk.skew[0];
      diagonal[mine] = desk.skew[1];
    });
    skew[0] = *std::max_element(apart.begin(), apart.end());
    skew[1] = *std::max_element(diagonal.begin(), diagonal.end());
  }
};

template <typename T>
Factor<T> factor(const void* data, const int64_t* strides, bool z) {
  return {static_cast<const T*>(data), strides[0], strides[1], strides[2], z ? strides[3] : 0};
}

template <typename T>
void lift(const void* const* data, const int64_t* s, void* out, int64_t threads, double* skew) {
  Sum<T>{s[0], s[1], s[2], s[3] != 0, s[3] == 2, s[4], s[5], s[6], s[7], s[8], s[9], s[10], s[11] != 0,
         factor<T>(data[0], s + 12, false), factor<T>(data[1], s + 15, false), factor<T>(data[2], s + 18, false),
         factor<T>(data[3], s + 21, true), factor<T>(data[4], s + 25, false), factor<T>(data[5], s + 28, true),
         static_cast<T*>(out), {}, {}, false}
      .run(threads, skew);
}

}  // namespace

// Numbers: depth, m1, m2, kind (0 plain, 1 triangular, 2 triangular and the mean), x1, x2, width; strides of out along m1, m2,
// x1, x2; whether what lies in out is written over; strides of a, b and s along (n, m1, m2) or (n, x1, x2), of v along
// (n, x1, x2, z), of t as of s, of w as of v.
extern "C" int hessiankit_lift(int single, const void* const* data, const int64_t* numbers, void* out, int64_t threads, double* skew) {
  try {
    if (single)
      lift<float>(data, numbers, out, threads, skew);
    else
      lift<double>(data, numbers, out, threads, skew);
    return 0;
  } catch (const std::bad_alloc&) {
    return 1;
  }
}
