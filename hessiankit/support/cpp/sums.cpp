// A block of the Hessian between two weights, as a sum over rows n that is added to a part of a large matrix or written over it:
//
//     out[i, p, j, q] += sum_n a[n, i] b[n, j] K[n, p, q]        or        sum_n a[n, i] (b[n, j] K[n, p, q] + d[n, q] T[n, p, j]).
//
// Each term is a product of three factors, of which all terms have one in common that depends on one axis only. The four axes
// (inputs and outputs of both weights, in the order i, p, j, q) take roles, m that of the common factor, z that of vectors:
//
//     out[m, x, y, z] += sum_n a[n, m] (f[n, x, y] v[n, x, z] + g[n, x, y] w[n, x, z]).
//
// A tile of TALL entries m and one vector z is summed in registers and reaches the matrix once; f v + g w is never written out.
// Rows n at which scalars f, g or vectors v, w are zero, as behind a ReLU, are left out, unless something is not finite: then
// 0 x inf has to show. Of all roles that are possible, those are taken that leave the fewest products.

#include "machine.h"

#include <cmath>
#include <limits>

namespace {

constexpr int AXES = 4, FACTORS = 3, TERMS = 2;
constexpr int64_t TALL = 2 * ROWS;    // of a tile
constexpr int64_t DEEP = 512;         // rows n summed at once
constexpr int64_t SHALLOW = 64;       // at least
constexpr int64_t NEAR = 768 * 1024;  // bytes of what is laid out that stay in the cache
constexpr int64_t WORTH = 1 << 19;    // products from which it pays to look for zeros
constexpr int64_t AHEAD = 16;         // rows n asked for before they are read
constexpr int64_t SAMPLES = 4;        // along an axis, of what is looked at

struct Axis {
  int64_t size, out;  // entries, and how far apart they are in the matrix
};

// Entries at data[n * next + the sum over axes of index * along].
template <typename T>
struct Factor {
  const T* data;
  int64_t next, along[AXES];

  bool same(const Factor& other) const {
    return data == other.data && next == other.next && std::equal(along, along + AXES, other.along);
  }
  bool depends_only_on(int axis) const {
    for (int k = 0; k < AXES; ++k)
      if (k != axis && along[k]) return false;
    return true;
  }
};

template <typename T>
struct Term {
  Factor<T> of[FACTORS];
};

// Which entries are those of others: out[m, x, y, z] those of out[y, x, m, z], or of out[m, y, x, z].
enum Symmetry { NONE, OUTER, INNER };

enum Mode { ADD, WRITE, STREAM };  // added to what lies in the matrix; written over it; and past the caches

// Which axis and which factor of each term is what.
struct Roles {
  int m, x = -1, y = -1, z, common[TERMS] = {-1, -1}, scalar[TERMS], vector[TERMS];
  Symmetry symmetry = NONE;
};

template <typename T>
struct Sum {
  using V = typename Lanes<T>::type;
  typedef int64_t Bits __attribute__((vector_size(BYTES)));
  static constexpr int64_t W = Lanes<T>::count;

  int64_t depth;
  Axis axes[AXES];
  Term<T> terms[TERMS];
  int count;       // of terms
  bool symmetric;  // both weights are one and K is symmetric up to rounding: out[i, p, j, q] is out[j, q, i, p]
  Mode mode;       // how the sum is put
  T* out;

  Roles role;
  Axis m, x, y, z;
  int64_t groups, vectors;  // of TALL entries m; of W entries z
  int64_t block;            // indices x treated at once, and W indices y

  // Roles

  void choose() {
    double products = double(depth * count), least = std::numeric_limits<double>::infinity();
    for (const Axis& one : axes) products *= double(one.size);
    for (int a = 0; a < AXES; ++a)
      for (int factor = 0; factor < FACTORS; ++factor)
        for (int v = 0; v < AXES; ++v) {
          Roles found{a};
          found.z = v;
          if (v == a || !terms[0].of[factor].depends_only_on(a) || !fit(found, factor)) continue;
          const double cycles = cost(found, products >= double(WORTH));
          if (cycles < least) least = cycles, role = found;
        }
    m = axes[role.m], x = axes[role.x], y = axes[role.y], z = axes[role.z];
    groups = (m.size + TALL - 1) / TALL, vectors = (z.size + W - 1) / W;
    block = role.symmetry == INNER ? W : 1;
  }

  // Completes roles of which m and z are set. Tells whether all terms have the form above.
  bool fit(Roles& found, int factor) const {
    int moves = -1;  // the axis beside z on which vectors depend
    for (int t = 0; t < count; ++t) {
      const Factor<T>* of = terms[t].of;
      for (int k = 0; k < FACTORS; ++k)
        if (of[k].same(terms[0].of[factor]) && (t || k == factor)) found.common[t] = k;
      if (found.common[t] < 0) return false;
      const int one = (found.common[t] + 1) % FACTORS, two = (found.common[t] + 2) % FACTORS;
      if (of[one].along[found.m] || of[two].along[found.m] || (of[one].along[found.z] && of[two].along[found.z])) return false;
      found.vector[t] = of[one].along[found.z] ? one : two;
      found.scalar[t] = of[one].along[found.z] ? two : one;
      for (int k = 0; k < AXES; ++k)
        if (k != found.z && of[found.vector[t]].along[k]) {
          if (moves >= 0 && moves != k) return false;
          moves = k;
        }
    }
    for (int k = 0; k < AXES; ++k)
      if (k != found.m && k != found.z) (found.x < 0 ? found.x : found.y) = k;
    if (found.y == moves || (moves < 0 && axes[found.x].out == 1)) std::swap(found.x, found.y);
    if (symmetric) {  // m is i or j, and the other of them is z or y
      found.symmetry = (found.m ^ found.z) == 2 ? INNER : OUTER;
      if (found.symmetry == OUTER && (found.m ^ found.y) != 2) return false;
    }
    return true;
  }

  // About how many cycles the sum takes.
  double cost(const Roles& r, bool look) const {
    const double tall = double((axes[r.m].size + TALL - 1) / TALL), wide = double((axes[r.z].size + W - 1) / W);
    const double rows = double(std::min(axes[r.m].size, TALL)), pairs = double(axes[r.x].size * axes[r.y].size);
    double kept = look ? 0 : 1;
    for (int t = 0; look && t < count; ++t)
      kept = std::max(kept, nonzero(terms[t].of[r.scalar[t]], r.x, r.y, -1) * nonzero(terms[t].of[r.vector[t]], r.x, -1, r.z));
    const double put = rows * double(axes[r.z].out == 1 ? 8 : axes[r.y].out == 1 ? 40 : 10 * W) * (r.symmetry == INNER ? 2 : 1);
    const double lay = double(depth) * (r.symmetry == INNER ? 9 : 1 + 2 * count);
    const double found = pairs * (tall * wide * (kept * double(depth) * (rows + double(count)) + put) + lay);
    return r.symmetry == NONE ? found : r.symmetry == INNER ? .55 * found : found * (tall + 1) / (2 * tall);
  }

  // The share of entries along two axes at which something along a third is not zero, from a few of them.
  double nonzero(const Factor<T>& f, int one, int two, int along) const {
    const auto step = [&](int k) { return k < 0 ? 1 : std::max<int64_t>(1, axes[k].size / SAMPLES); };
    const auto size = [&](int k) { return k < 0 ? 1 : axes[k].size; };
    const auto at = [&](int k) { return k < 0 ? 0 : f.along[k]; };
    int64_t seen = 0, found = 0;
    for (int64_t n = 0; n < depth; n += std::max<int64_t>(1, depth / SAMPLES))
      for (int64_t i = 0; i < size(one); i += step(one))
        for (int64_t j = 0; j < size(two); j += step(two)) {
          bool any = false;
          for (int64_t k = 0; k < size(along); k += step(along)) any |= f.data[n * f.next + i * at(one) + j * at(two) + k * at(along)] != 0;
          ++seen, found += any;
        }
    return double(found) / double(seen);
  }

  // What one thread lays out, for some rows n.
  struct Desk {
    Buffer<T> left;                // (groups, deep, TALL), zero behind the last m
    Buffer<T> vector;              // of each term (vectors, deep, W), zero behind the last z
    Buffer<T> scalar;              // of each term (y, deep) where it is the same for all x, else (tall x, W, deep)
    Buffer<T> flags;               // of each term, 1 where a vector has an entry that is not zero, 0 elsewhere
    Buffer<int32_t> listed;        // for each (x, y) at hand, the rows n at which such a vector has a scalar that is not zero
    Buffer<T> tiles;               // (x, y, TALL, W) of those at hand
    std::vector<int64_t> counts;   // of those listed; -1: all
    int64_t vector_at[TERMS], scalar_at[TERMS];
    bool finite_left, finite_vector[TERMS], finite_scalar[TERMS];
    double skew[2] = {0, 0};

    Desk(const Sum& s, int64_t deep)
        : left(s.groups * deep * TALL), vector(s.count * s.vectors * deep * W), scalar(s.count * std::max(s.y.size, s.block * W) * deep),
          flags(s.count * deep), listed(s.block * W * (deep + W)), tiles(s.block * W * TALL * W), counts(s.block * W) {}
  };

  void lay_left(int64_t start, int64_t deep, Desk& desk) const {
    const Factor<T>& a = terms[0].of[role.common[0]];
    const int64_t step = a.along[role.m];
    V odd{};
    for (int64_t g = 0; g < groups; ++g)
      for (int64_t n = 0; n < deep; ++n) {
        const T* from = a.data + (start + n) * a.next + g * TALL * step;
        T* to = desk.left + (g * deep + n) * TALL;
        const int64_t have = std::min(TALL, m.size - g * TALL);
        for (int64_t r = 0; r < have; ++r) to[r] = from[r * step];
        for (int64_t r = have; r < TALL; ++r) to[r] = 0;
        for (int64_t r = 0; r < TALL; r += W) odd += whole(to + r) - whole(to + r);
      }
    desk.finite_left = is_zero(odd);
  }

  void lay_vectors(int t, int64_t i, int64_t start, int64_t deep, Desk& desk) const {
    const Factor<T>& v = terms[t].of[role.vector[t]];
    const int64_t step = v.along[role.z], at = v.along[role.x] ? i : 0;
    if (desk.vector_at[t] == at) return;
    desk.vector_at[t] = at;
    V odd{};
    for (int64_t n = 0; n < deep; ++n) {
      const T* from = v.data + (start + n) * v.next + at * v.along[role.x];
      V* to = reinterpret_cast<V*>(desk.vector + (t * vectors * deep + n) * W);
      Bits any{};
      __builtin_prefetch(from + AHEAD * v.next);
      for (int64_t k = 0; k < vectors; ++k, from += W * step, to += deep) {
        const int64_t have = std::min(W, z.size - k * W);
        V found{};
        if (have == W && step == 1)
          found = whole(from);
        else
          for (int64_t c = 0; c < have; ++c) found[c] = from[c * step];
        *to = found;
        odd += found - found;
        any |= reinterpret_cast<Bits>(found != T(0));
      }
      desk.flags[t * deep + n] = T(!none(any));
    }
    desk.finite_vector[t] = is_zero(odd);
  }

  // Scalars of some x and W entries y, or of all y where they are the same for all x; of an inner symmetry the mean of both.
  void lay_scalars(int t, int64_t i, int64_t many_x, int64_t j, int64_t many_y, int64_t start, int64_t deep, Desk& desk) const {
    const Factor<T>& f = terms[t].of[role.scalar[t]];
    const int64_t one = f.along[role.x], two = f.along[role.y];
    if (!one) {
      if (desk.scalar_at[t] == 0) return;
      desk.scalar_at[t] = i = j = 0, many_x = 1, many_y = y.size;
    }
    bool finite = true;
    V apart{};
    for (int64_t first = 0; first < many_y; first += W) {
      const int64_t many = std::min(W, many_y - first);
      for (int64_t n = 0; n < deep; ++n) {
        const T* from = f.data + (start + n) * f.next + i * one + (j + first) * two;
        const T* turned = f.data + (start + n) * f.next + i * two + j * one;
        for (int64_t l = 0; role.symmetry == INNER && l < many; ++l) __builtin_prefetch(turned + l * one + AHEAD * f.next);
        for (int64_t h = 0; h < many_x; ++h) {
          T* to = scalar(t, h, first, deep, desk) + n;
          __builtin_prefetch(from + h * one + AHEAD * f.next);
          if (role.symmetry != INNER) {
            for (int64_t l = 0; l < many; ++l) to[l * deep] = from[h * one + l * two];
            continue;
          }
          V p{}, q{};
          for (int64_t l = 0; l < many; ++l) p[l] = from[h * one + l * two], q[l] = turned[l * one + h * two];
          const V mean = (p + q) / 2, gap = p > q ? p - q : q - p;
          for (int64_t l = 0; l < many; ++l) to[l * deep] = mean[l];
          apart = gap > apart ? gap : apart;
          if (i == j) desk.skew[1] = std::max(desk.skew[1], double(std::abs(p[h])));
        }
      }
      for (int64_t h = 0; h < many_x; ++h) finite &= is_finite(scalar(t, h, first, deep, desk), many * deep);
    }
    desk.finite_scalar[t] = finite;
    for (int64_t l = 0; l < W; ++l) desk.skew[0] = std::max(desk.skew[0], double(apart[l]));
  }

  T* scalar(int t, int64_t h, int64_t l, int64_t deep, Desk& desk) const {
    return desk.scalar + (t * std::max(y.size, block * W) + h * W + l) * deep;
  }

  static bool is_finite(const T* x, int64_t size) {
    V odd{};
    T rest = 0;
    for (; size >= W; size -= W, x += W) odd += whole(x) - whole(x);
    for (; size > 0; --size, ++x) rest += *x - *x;
    return is_zero(odd) && rest == 0;
  }

  static const V& whole(const T* at) { return *reinterpret_cast<const V*>(at); }

  static bool is_zero(V x) { return none(reinterpret_cast<Bits>(x != T(0))); }  // as -0 is, and NaN is not

  static bool none(Bits bits) {
    int64_t found = 0;
    for (int i = 0; i < BYTES / 8; ++i) found |= bits[i];
    return found == 0;
  }

  // Sums

  template <int tall, bool both, bool some>
  static void tile(int64_t count, const int32_t* which, const T* left, const T* f, const T* v, const T* g, const T* w, V* sums) {
    V s[tall];
#pragma GCC unroll 16
    for (int r = 0; r < tall; ++r) s[r] = V{};
    for (int64_t k = 0; k < count; ++k) {
      const int64_t n = some ? which[k] : k;
      V right = f[n] * whole(v + n * W);
      if (both) right += g[n] * whole(w + n * W);
      const T* l = left + n * TALL;
#pragma GCC unroll 16
      for (int r = 0; r < tall; ++r) s[r] += l[r] * right;
    }
#pragma GCC unroll 16
    for (int r = 0; r < tall; ++r) sums[r] = s[r];
  }

  template <int tall>
  void tile(int64_t deep, int64_t some, const int32_t* which, const T* left, const T* f, const T* v, const T* g, const T* w, V* sums) const {
    if (count == 1)
      some < 0 ? tile<tall, false, false>(deep, which, left, f, v, g, w, sums) : tile<tall, false, true>(some, which, left, f, v, g, w, sums);
    else
      some < 0 ? tile<tall, true, false>(deep, which, left, f, v, g, w, sums) : tile<tall, true, true>(some, which, left, f, v, g, w, sums);
  }

  // Sums over rows n for some x, and y in blocks of W from first to last.
  void run_x(int64_t i, int64_t first, int64_t last, int64_t start, int64_t deep, Desk& desk) const {
    for (int t = 0; t < count; ++t) lay_vectors(t, i, start, deep, desk);
    const int64_t many_x = std::min(block, x.size - i);
    if (role.symmetry == INNER) first = std::max(first, i / W * W);
    for (int64_t j = first; j < last; j += W) {
      const int64_t many_y = std::min(W, last - j);
      bool finite = desk.finite_left;
      for (int t = 0; t < count; ++t) {
        lay_scalars(t, i, many_x, j, many_y, start, deep, desk);
        finite &= desk.finite_vector[t] && desk.finite_scalar[t];
      }
      for (int64_t h = 0; h < many_x; ++h)
        for (int64_t l = 0; l < many_y; ++l) {
          const T *f = at(0, h, j, l, deep, desk), *g = count > 1 ? at(1, h, j, l, deep, desk) : f;
          const T *flag = desk.flags, *other = count > 1 ? flag + deep : flag;
          const int64_t kept = finite ? list_nonzero(f, flag, g, other, deep, desk.listed + (h * W + l) * (deep + W)) : deep;
          desk.counts[h * W + l] = kept < deep ? kept : -1;
        }
      for (int64_t k = 0; k < vectors; ++k)
        for (int64_t g = role.symmetry == OUTER ? j / TALL : 0; g < groups; ++g) {
          const T *left = desk.left + g * deep * TALL, *v = desk.vector + k * deep * W, *w = v + vectors * deep * W;
          const bool tall = m.size - g * TALL > TALL / 2;
          for (int64_t h = 0; h < many_x; ++h)
            for (int64_t l = 0; l < many_y; ++l) {
              const int64_t some = desk.counts[h * W + l];
              const int32_t* which = desk.listed + (h * W + l) * (deep + W);
              const T *f = at(0, h, j, l, deep, desk), *e = count > 1 ? at(1, h, j, l, deep, desk) : f;
              V* sums = reinterpret_cast<V*>(desk.tiles + (h * W + l) * TALL * W);
              tall ? tile<TALL>(deep, some, which, left, f, v, e, w, sums) : tile<TALL / 2>(deep, some, which, left, f, v, e, w, sums);
            }
          put(i, many_x, j, many_y, k * W, g * TALL, start == 0 ? mode : ADD, desk.tiles);
        }
    }
  }

  const T* at(int t, int64_t h, int64_t j, int64_t l, int64_t deep, Desk& desk) const {
    return terms[t].of[role.scalar[t]].along[role.x] ? scalar(t, h, l, deep, desk) : scalar(t, 0, j + l, deep, desk);
  }

  // Puts the tiles of some x and y where they belong, and where else they are by symmetry.
  void put(int64_t i, int64_t many_x, int64_t j, int64_t many_y, int64_t first_z, int64_t first_m, Mode mode, const T* tiles) const {
    T* to = out + first_z * z.out;
    const int64_t rows = std::min(TALL, m.size - first_m), columns = std::min(W, z.size - first_z), next_x = W * TALL * W, next_y = TALL * W;
    for (int64_t h = 0; h < many_x; ++h)
      put_tiles(tiles + h * next_x, many_y, next_y, rows, W, columns, to + first_m * m.out + (i + h) * x.out + j * y.out, mode);
    if (role.symmetry == INNER && j > i)
      for (int64_t l = 0; l < many_y; ++l)
        put_tiles(tiles + l * next_y, many_x, next_x, rows, W, columns, to + first_m * m.out + (j + l) * x.out + i * y.out, mode);
    if (role.symmetry == OUTER && first_m / TALL > j / TALL)
      put_tiles(tiles, rows, W, many_y, next_y, columns, to + j * m.out + i * x.out + first_m * y.out, mode);
  }

  // Puts vectors that are so far apart where they belong: along y, and along m.
  void put_tiles(const T* from, int64_t many_y, int64_t next_y, int64_t many_m, int64_t next_m, int64_t columns, T* to, Mode mode) const {
    int64_t l = 0;
    for (; z.out != 1 && y.out == 1 && l + W <= many_y; l += W)
      for (int64_t r = 0; r < many_m; ++r)
        for (int64_t c = 0; c < columns; ++c) {
          V found;
          for (int64_t k = 0; k < W; ++k) found[k] = from[(l + k) * next_y + r * next_m + c];
          put_vector(found, to + r * m.out + c * z.out + l, mode);
        }
    for (; l < many_y; ++l)
      for (int64_t r = 0; r < many_m; ++r) put_row(from + l * next_y + r * next_m, columns, to + r * m.out + l * y.out, mode);
  }

  void put_row(const T* from, int64_t columns, T* to, Mode mode) const {
    if (z.out == 1 && columns == W) return put_vector(whole(from), to, mode);
    for (int64_t c = 0; c < columns; ++c) to[c * z.out] = mode == ADD ? to[c * z.out] + from[c] : from[c];
  }

  static void put_vector(V x, T* to, Mode mode) {
    if (mode == STREAM)
      stream(to, x);
    else
      *reinterpret_cast<V*>(to) = mode == ADD ? whole(to) + x : x;
  }

  void run(int64_t threads, double* skew) {
    if (depth == 0 || std::any_of(axes, axes + AXES, [](const Axis& one) { return one.size == 0; })) return;
    choose();
    const int64_t each = int64_t(sizeof(T)) * (groups * TALL + count * (vectors * W + y.size));  // bytes for a row n
    const int64_t most = std::min(DEEP, std::max(SHALLOW, NEAR / each)), chunks = (depth + most - 1) / most;
    const int64_t deep = (depth + chunks - 1) / chunks;
    const int64_t blocks = (x.size + block - 1) / block;
    const int64_t parts = std::min((threads + blocks - 1) / blocks, (y.size + W - 1) / W);  // of y
    const int64_t part = ((y.size + parts - 1) / parts + W - 1) / W * W;
    threads = std::max<int64_t>(1, std::min(threads, blocks * parts));
    std::vector<double> apart(threads), diagonal(threads);
    share(threads, [&](int64_t mine, int64_t step) {
      Desk desk(*this, deep);
      for (int64_t start = 0; start < depth; start += deep) {
        const int64_t some = std::min(deep, depth - start);
        for (int t = 0; t < TERMS; ++t) desk.vector_at[t] = desk.scalar_at[t] = -1;
        lay_left(start, some, desk);
        for (int64_t k = mine; k < blocks * parts; k += step)
          run_x(k / parts * block, k % parts * part, std::min(y.size, (k % parts + 1) * part), start, some, desk);
      }
      finish_streams();
      apart[mine] = desk.skew[0];
      diagonal[mine] = desk.skew[1];
    });
    skew[0] = *std::max_element(apart.begin(), apart.end());
    skew[1] = *std::max_element(diagonal.begin(), diagonal.end());
  }
};

template <typename T>
void sum(const void* const* data, const int64_t* numbers, void* out, int64_t threads, double* skew) {
  Sum<T> found;
  const int64_t* at = numbers;
  found.depth = *at++, found.count = int(*at++), found.symmetric = *at++ != 0, found.mode = Mode(*at++);
  found.out = static_cast<T*>(out);
  for (Axis& axis : found.axes) axis = {at[0], at[1]}, at += 2;
  for (int t = 0; t < found.count; ++t)
    for (Factor<T>& factor : found.terms[t].of) {
      factor = {static_cast<const T*>(*data++), at[0], {at[1], at[2], at[3], at[4]}};
      at += 1 + AXES;
    }
  found.run(threads, skew);
}

}  // namespace

// Numbers: rows n, terms, whether it is symmetric, its mode; of each axis the size and the stride
// in out; of each factor the strides along n and the axes, 0 where it does not depend on one. data: the factors.
extern "C" int hessiankit_sum(int single, const void* const* data, const int64_t* numbers, void* out, int64_t threads, double* skew) {
  try {
    if (single)
      sum<float>(data, numbers, out, threads, skew);
    else
      sum<double>(data, numbers, out, threads, skew);
    return 0;
  } catch (const std::bad_alloc&) {
    return 1;
  }
}
