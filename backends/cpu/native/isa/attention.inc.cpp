// Attention kernels, compiled once per instruction set. Online softmax over key tiles (Milakov and Gimelshein 2018; Dao et al.,
// FlashAttention, 2022) in base 2: with x = logit * log2(e), a row keeps its maximum, the sum of 2^(x - maximum) and the values
// weighted by the same.
#include "../attention_kernels.hpp"
#include "../e4m3.hpp"
#include "../simd.hpp"
#if defined(__AMX_BF16__)
#include "../amx.hpp"
#endif

namespace hp {
namespace HP_ISA {
namespace {

constexpr float kLog2e = 1.44269504088896341f;
constexpr float kMinusInf = -__builtin_inff();

// Keys of one tile. Prefill tiles are packed and start at multiples of kPrefillKeys. Decode tiles are read in place, one head
// while the next one is fetched: fewer bytes (8 KiB of keys at head dimension 64) would be needed before they have come, more
// would not stay in the first-level cache.
constexpr int kPrefillKeys = 64;
template <class E>
constexpr int kDecodeTile = 128 / static_cast<int>(sizeof(typename E::type));
static_assert(kPrefillKeys % kLanes == 0 && kDecodeTile<F32> % kLanes == 0, "tiles divide into vectors");

// Register blocking: 32 vector registers with AVX-512, 16 elsewhere.
#if HP_VW == 16
constexpr int kMicroRows = 6, kMicroVectors = 4, kDecodeRows = 4, kDecodeKeys = 4, kDecodeVectors = 4;
#else
constexpr int kMicroRows = 6, kMicroVectors = 2, kDecodeRows = 4, kDecodeKeys = 2, kDecodeVectors = 2;
#endif

HP_INLINE int min_int(int a, int b) { return a < b ? a : b; }
HP_INLINE int max_int(int a, int b) { return a > b ? a : b; }
HP_INLINE int round_up(int x, int to) { return (x + to - 1) / to * to; }
HP_INLINE int64_t align64(int64_t bytes) { return (bytes + 63) & ~int64_t{63}; }

HP_INLINE vf select(vi mask, vf a, vf b) { return mask ? a : b; }

// Hands out aligned pieces of a thread's scratch memory; with no memory it only counts.
struct Arena {
  char* base;
  int64_t used = 0;
  template <class T>
  HP_INLINE_MEMBER T* take(int64_t n) {
    T* p = reinterpret_cast<T*>(base + used);
    used += align64(n * static_cast<int64_t>(sizeof(T)));
    return p;
  }
};

// Where one sequence's keys and values lie, as S stores them: in blocks, or without them row after row.
template <class S>
struct Cache {
  using T = typename S::type;
  const T* k;
  const T* v;
  const int32_t* blocks;  // null where there are none
  int block_size;
  int64_t block_stride, head_offset;
  int head_dim;
  int64_t k_stride, v_stride;  // of rows without blocks

  HP_INLINE_MEMBER int64_t offset(int key) const {
    const int block = key / block_size;
    return blocks[block] * block_stride + head_offset + static_cast<int64_t>(key - block * block_size) * head_dim;
  }
  HP_INLINE_MEMBER const T* key_row(int key) const { return k + (blocks ? offset(key) : key * k_stride); }
  HP_INLINE_MEMBER const T* value_row(int key) const { return v + (blocks ? offset(key) : key * v_stride); }
};

template <class S>
HP_INLINE Cache<S> cache_of(const AttentionCall& call, int seq, int kv_head) {
  const AttentionBatch& b = *call.batch;
  const AttentionLayer& layer = *call.layer;
  const auto* k = static_cast<const typename S::type*>(call.kv->k);
  const auto* v = static_cast<const typename S::type*>(call.kv->v);
  if (b.bidirectional) {
    const int64_t first = b.query_start[seq], head = static_cast<int64_t>(kv_head) * layer.head_dim;
    const int64_t k_stride = call.kv->k_stride, v_stride = call.kv->v_stride;
    return {k + first * k_stride + head, v + first * v_stride + head, nullptr, 0, 0, 0, layer.head_dim, k_stride, v_stride};
  }
  const int64_t head_stride = static_cast<int64_t>(b.block_size) * layer.head_dim;
  return {k, v, b.block_table + b.rows[seq] * b.table_stride, b.block_size, head_stride * layer.num_kv_heads, head_stride * kv_head,
          layer.head_dim, 0, 0};
}

// Logits of kLanes keys from raw dot products; times `factor` they are base-2. The factor is left to the caller where nothing else
// is done to a product, since it then costs no operation of its own. `distance` is key position minus query position.
struct Logits {
  float factor, scale, cap_in, cap_out, slope;
  bool plain, capped, sloped;

  HP_INLINE_MEMBER vf operator()(vf dots, vf distance) const {
    if (plain) return dots;
    vf x = capped ? cap_out * tanh(dots * cap_in) : dots * scale;
    return sloped ? x + slope * distance : x;
  }
};

HP_INLINE Logits logits_of(const AttentionLayer& layer, int head) {
  Logits l;
  l.capped = layer.soft_cap > 0;
  l.sloped = layer.alibi != nullptr;
  l.scale = layer.scale * layer.k_scale * kLog2e;
  // A factor that turns the order of logits round, or makes NaN of minus infinity, cannot wait until after the maximum.
  l.plain = !l.capped && !l.sloped && l.scale > 0;
  l.factor = l.plain ? l.scale : 1.0f;
  l.cap_in = l.capped ? layer.scale * layer.k_scale / layer.soft_cap : 0;
  l.cap_out = layer.soft_cap * kLog2e;
  l.slope = l.sloped ? layer.alibi[head] * kLog2e : 0;
  return l;
}

HP_INLINE float exp2_scalar(float x) { return exp2(splat(x))[0]; }

// Calls f with the element type of a dtype.
template <class F>
HP_INLINE void with_type(DType dtype, F&& f) {
  switch (dtype) {
    case DType::F32: return f(F32{});
    case DType::BF16: return f(Bf16{});
    case DType::F16: return f(F16{});
  }
}

// Turns a row's weighted values into its output: divides by the sum, to which a sink adds its own weight without a value, and
// multiplies by the scale of the values that the cache holds.
void write_output(const AttentionCall& call, int token, int head, const float* values, float maximum, float sum) {
  const AttentionLayer& layer = *call.layer;
  const int n = layer.head_dim;
  if (layer.sinks) sum += exp2_scalar(layer.sinks[head] * kLog2e - maximum);
  const float factor = layer.v_scale / sum;
  with_type(call.kv->dtype, [&](auto type) {
    auto* out = static_cast<typename decltype(type)::type*>(call.out) + token * call.out_stride + static_cast<int64_t>(head) * n;
    int d = 0;
    for (; d + kLanes <= n; d += kLanes) store(type, out + d, load(values + d) * factor);
    if (d < n) store_first(type, out + d, load(values + d) * factor, n - d);
  });
}

HP_INLINE float* partial_row(const AttentionCall& call, int partial, int head) {
  return call.partials + (static_cast<int64_t>(partial) * call.layer->num_heads + head) * (call.layer->head_dim + 2);
}

HP_INLINE void write_partial(const AttentionCall& call, int partial, int head, const float* values, float maximum, float sum) {
  float* row = partial_row(call, partial, head);
  row[0] = maximum;
  row[1] = sum;
  std::memcpy(row + 2, values, static_cast<size_t>(call.layer->head_dim) * 4);
}

// How a query row is kept for dot products along the head dimension: as bf16 pairs where the processor multiplies them, else
// as fp32. kStep elements go into one vector.
template <class E>
struct Dot {
  using Q = float;
  static constexpr int kStep = kLanes;
  using V = vf;
  HP_INLINE V load_key(const typename E::type* p) { return load(E{}, p); }
  HP_INLINE V load_key_first(const typename E::type* p, int n) { return load_first(E{}, p, n); }
  HP_INLINE V load_query(const Q* p) { return load(p); }
  HP_INLINE vf add(vf acc, V q, V k) { return acc + q * k; }
};
#if defined(HP_SIMD_AVX512BF16)
template <>
struct Dot<Bf16> {
  using Q = uint16_t;
  static constexpr int kStep = 2 * kLanes;
  using V = vu;
  HP_INLINE V load_key(const uint16_t* p) { return load_pairs(p); }
  HP_INLINE V load_key_first(const uint16_t* p, int n) { return load_first_pairs(p, n); }
  HP_INLINE V load_query(const Q* p) { return load_pairs(p); }
  HP_INLINE vf add(vf acc, V q, V k) { return dot_bf16(acc, q, k); }
};
#endif

// Copies a query row into the form of its dot products, zero-padded to `padded` elements.
#if defined(HP_SIMD_AVX512BF16)
void copy_query(const AttentionCall& call, int token, int head, int padded, uint16_t* to) {
  const int n = call.layer->head_dim;
  std::memcpy(to, static_cast<const uint16_t*>(call.q) + token * call.q_stride + static_cast<int64_t>(head) * n, static_cast<size_t>(n) * 2);
  std::memset(to + n, 0, static_cast<size_t>(padded - n) * 2);
}
#else
void copy_query(const AttentionCall& call, int token, int head, int padded, float* to) {
  const int n = call.layer->head_dim;
  with_type(call.kv->dtype, [&](auto type) {
    const auto* from = static_cast<const typename decltype(type)::type*>(call.q) + token * call.q_stride + static_cast<int64_t>(head) * n;
    int d = 0;
    for (; d + kLanes <= n; d += kLanes) store(to + d, load(type, from + d));
    if (d < n) {
      store(to + d, load_first(type, from + d, n - d));
      d += kLanes;
    }
    for (; d < padded; ++d) to[d] = 0;
  });
}
#endif

// Rows of one head in a tile of E's size: an address for each key, then for each value, and the head's place after it.
template <class E, class S = E>
struct Rows {
  using T = typename S::type;
  const T* const* rows;  // [2, kDecodeTile]
  int64_t offset;
  HP_INLINE_MEMBER const T* row(int i) const { return rows[i] + offset; }
  HP_INLINE_MEMBER const T* key(int t) const { return row(t); }
  HP_INLINE_MEMBER const T* value(int t) const { return row(kDecodeTile<E> + t); }
};

HP_INLINE void prefetch(const void* p, int bytes) {
  for (int x = 0; x < bytes; x += 64) __builtin_prefetch(static_cast<const char*>(p) + x);
}

// Fetches the next head's rows while one head is worked off. A processor drops requests when its queues are full, and each line
// that is missing then costs the whole latency of memory. So all rows are asked for twice: once in even steps over the head
// before, and once more in the pass over keys or values before the one that reads them. Of the first requests for the 2 * kTile
// rows, the passes over keys and values make 3/8 each and the softmax 2/8, about their shares of the time.
template <class E, class S>
struct Prefetcher {
  static constexpr int kTile = kDecodeTile<E>, kSize = static_cast<int>(sizeof(typename S::type));
  Rows<E, S> head, next;

  // Beside the work on elements [d, d + n) of keys or values [t, t + count); n may be less than a cache line. Constant n and
  // count leave no loops here, which matters: fetching is a good part of the instructions.
  HP_INLINE_MEMBER void during_scores(int t, int count, int d, int n) const {
    if (d * kSize % 64 != 0) return;
#pragma GCC unroll 4
    for (int u = 0; u < count; ++u) prefetch(head.value(t + u) + d, n * kSize);
    ask(0, t, count, d, n);
  }
  HP_INLINE_MEMBER void during_softmax(int g, int group, int dim) const {
    for (int i = kTile / 2 * g / group; i < kTile / 2 * (g + 1) / group; ++i) prefetch(next.row(kTile * 3 / 4 + i), dim * kSize);
  }
  HP_INLINE_MEMBER void during_values(int t, int count, int d, int n) const {
#pragma GCC unroll 4
    for (int u = 0; u < count; ++u) prefetch(next.key(t + u) + d, n * kSize);
    ask(kTile * 5 / 4, t, count, d, n);
  }

 private:
  HP_INLINE_MEMBER void ask(int first, int t, int count, int d, int n) const {
    if (count < 4 && t % 4 != 0) return;
#pragma GCC unroll 3
    for (int i = 0; i < 3; ++i) prefetch(next.row(first + t / 4 * 3 + i) + d, n * kSize);
  }
};

// scores[r][0, kLanes) = raw dot products of R queries with the kLanes keys from `first` on.
template <class E, int R, class P>
HP_INLINE void decode_scores(const typename Dot<E>::Q* q, int q_stride, const Rows<E>& head, int first, int dim, float* scores,
                             const P* prefetcher) {
  using D = Dot<E>;
  vf part[R][kLanes];
  for (int t = 0; t < kLanes; t += kDecodeKeys) {
    vf acc[R][kDecodeKeys];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int u = 0; u < kDecodeKeys; ++u) acc[r][u] = vf{};
    int d = 0;
    for (; d + D::kStep <= dim; d += D::kStep) {
      if (prefetcher) prefetcher->during_scores(first + t, kDecodeKeys, d, D::kStep);
      typename D::V k[kDecodeKeys];
#pragma GCC unroll 4
      for (int u = 0; u < kDecodeKeys; ++u) k[u] = D::load_key(head.key(first + t + u) + d);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        const typename D::V x = D::load_query(q + r * q_stride + d);
#pragma GCC unroll 4
        for (int u = 0; u < kDecodeKeys; ++u) acc[r][u] = D::add(acc[r][u], x, k[u]);
      }
    }
    if (d < dim) {
      if (prefetcher) prefetcher->during_scores(first + t, kDecodeKeys, d, D::kStep);
      typename D::V k[kDecodeKeys];
#pragma GCC unroll 4
      for (int u = 0; u < kDecodeKeys; ++u) k[u] = D::load_key_first(head.key(first + t + u) + d, dim - d);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        const typename D::V x = D::load_query(q + r * q_stride + d);
#pragma GCC unroll 4
        for (int u = 0; u < kDecodeKeys; ++u) acc[r][u] = D::add(acc[r][u], x, k[u]);
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int u = 0; u < kDecodeKeys; ++u) part[r][t + u] = acc[r][u];
  }
  for (int r = 0; r < R; ++r) store(scores + r * kDecodeTile<E>, hsum_rows(part[r]));
}

// How decode weights values: out[r] += sum over n keys of weights[r][key] * value[key], for R rows of [padded_dim]. Weights
// replace the scores they come from, row by row kDecodeTile floats apart.
template <class E>
struct Weigh {
  using T = typename E::type;

  HP_INLINE void store_weights(float* scores, int t, vf p) { store(scores + t, p); }

  template <int R, class P>
  HP_INLINE void add(const float* weights, const Rows<E>& head, int n, int dim, float* out, int out_stride, const P* prefetcher) {
    int d = 0;
    for (; d + kDecodeVectors * kLanes <= dim; d += kDecodeVectors * kLanes)
      add_columns<R, kDecodeVectors>(weights, head, n, d, kLanes, out, out_stride, prefetcher);
    for (; d < dim; d += kLanes) add_columns<R, 1>(weights, head, n, d, min_int(kLanes, dim - d), out, out_stride, prefetcher);
  }

  // The last of NV vectors has `last` columns.
  template <int R, int NV, class P>
  HP_INLINE void add_columns(const float* weights, const Rows<E>& head, int n, int d, int last, float* out, int out_stride,
                             const P* prefetcher) {
    vf acc[R][NV];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int j = 0; j < NV; ++j) acc[r][j] = load(out + r * out_stride + d + j * kLanes);
    for (int t = 0; t < n; ++t) {
      const T* row = head.value(t) + d;
      if (prefetcher) prefetcher->during_values(t, 1, d, NV * kLanes);
      vf v[NV];
#pragma GCC unroll 4
      for (int j = 0; j < NV; ++j)
        v[j] = NV == 1 && last < kLanes ? load_first(E{}, row, last) : load(E{}, row + j * kLanes);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        const vf w = splat(weights[r * kDecodeTile<E> + t]);
#pragma GCC unroll 4
        for (int j = 0; j < NV; ++j) acc[r][j] += w * v[j];
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int j = 0; j < NV; ++j) store(out + r * out_stride + d + j * kLanes, acc[r][j]);
  }

  HP_INLINE void finish(float*, int) {}
};
#if defined(HP_SIMD_AVX512BF16)
// Two keys at a time: their rows are interleaved into bf16 pairs, which leaves the sums of each 32 columns in an order of
// their own until `finish` restores it.
template <>
struct Weigh<Bf16> {
  static constexpr int kColumns = 2 * kLanes;

  HP_INLINE void store_weights(float* scores, int t, vf p) {
    const __m256bh x = _mm512_cvtneps_pbh(reinterpret_cast<__m512>(p));
    std::memcpy(reinterpret_cast<char*>(scores) + 2 * t, &x, sizeof(x));
  }

  template <int R, class P>
  HP_INLINE void add(const float* weights, const Rows<Bf16>& head, int n, int dim, float* out, int out_stride, const P* prefetcher) {
    int d = 0;
    for (; d + 2 * kColumns <= dim; d += 2 * kColumns)
      add_columns<R, 2>(weights, head, n, d, kColumns, out, out_stride, prefetcher);
    for (; d < dim; d += kColumns)
      add_columns<R, 1>(weights, head, n, d, min_int(kColumns, dim - d), out, out_stride, prefetcher);
  }

  template <int R, int NC, class P>
  HP_INLINE void add_columns(const float* weights, const Rows<Bf16>& head, int n, int d, int last, float* out,
                             int out_stride, const P* prefetcher) {
    vf acc[R][2 * NC];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int j = 0; j < 2 * NC; ++j) acc[r][j] = load(out + r * out_stride + d + j * kLanes);
    for (int t = 0; t < n; t += 2) {
      if (prefetcher) prefetcher->during_values(t, 2, d, NC * kColumns);
      vu v[2 * NC];
#pragma GCC unroll 2
      for (int j = 0; j < NC; ++j) {
        const uint16_t *even = head.value(t) + d + j * kColumns, *odd = head.value(t + 1) + d + j * kColumns;
        const bool partial = NC == 1 && last < kColumns;
        const __m512i a = reinterpret_cast<__m512i>(partial ? load_first_pairs(even, last) : load_pairs(even));
        const __m512i b = reinterpret_cast<__m512i>(partial ? load_first_pairs(odd, last) : load_pairs(odd));
        v[2 * j] = reinterpret_cast<vu>(_mm512_unpacklo_epi16(a, b));
        v[2 * j + 1] = reinterpret_cast<vu>(_mm512_unpackhi_epi16(a, b));
      }
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        uint32_t pair;
        std::memcpy(&pair, reinterpret_cast<const char*>(weights + r * kDecodeTile<Bf16>) + 2 * t, sizeof(pair));
        const vu w = vu{} + pair;
#pragma GCC unroll 4
        for (int j = 0; j < 2 * NC; ++j) acc[r][j] = dot_bf16(acc[r][j], w, v[j]);
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int j = 0; j < 2 * NC; ++j) store(out + r * out_stride + d + j * kLanes, acc[r][j]);
  }

  HP_INLINE void finish(float* row, int dim) {
    for (int d = 0; d < dim; d += kColumns) {
      const vf low = load(row + d), high = load(row + d + kLanes);
      store(row + d, __builtin_shufflevector(low, high, 0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23));
      store(row + d + kLanes, __builtin_shufflevector(low, high, 8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31));
    }
  }
};
#endif

template <class E, class S>
constexpr bool kIsWidened = true;
template <class E>
constexpr bool kIsWidened<E, E> = false;

// The rows of a tile and head as E has them. What is stored otherwise is widened into memory that stays in the first-level cache.
template <class E, class S>
struct Widened {
  using T = typename E::type;
  T* numbers;      // [2, kDecodeTile, padded_dim]
  const T** rows;  // [2, kDecodeTile]
  int stride;

  HP_INLINE_MEMBER void lay_out(Arena& arena, int padded_dim) {
    stride = padded_dim;
    numbers = arena.take<T>(static_cast<int64_t>(2) * kDecodeTile<E> * padded_dim);
    rows = arena.take<const T*>(2 * kDecodeTile<E>);
    if (!arena.base) return;
    for (int i = 0; i < 2 * kDecodeTile<E>; ++i) rows[i] = numbers + static_cast<int64_t>(i) * stride;
  }
  HP_INLINE_MEMBER Rows<E> keys(const Rows<E, S>& stored, int n, int dim) const {
    for (int t = 0; t < n; ++t) widen_e4m3<E>(stored.key(t), dim, numbers + static_cast<int64_t>(t) * stride);
    return {rows, 0};
  }
  HP_INLINE_MEMBER void values(const Rows<E, S>& stored, int n, int dim) const {
    T* to = numbers + static_cast<int64_t>(kDecodeTile<E>) * stride;
    for (int t = 0; t < n; ++t) widen_e4m3<E>(stored.value(t), dim, to + static_cast<int64_t>(t) * stride);
  }
};
template <class E>
struct Widened<E, E> {
  HP_INLINE_MEMBER void lay_out(Arena&, int) {}
  HP_INLINE_MEMBER Rows<E> keys(const Rows<E>& stored, int, int) const { return stored; }
  HP_INLINE_MEMBER void values(const Rows<E>&, int, int) const {}
};

template <class E, class S>
struct DecodeScratch {
  using T = typename S::type;
  typename Dot<E>::Q* q;  // [heads, padded_dim]
  float* scores;          // [group, kDecodeTile]
  float* values;          // [heads, padded_dim]
  float* maximum;         // [heads]
  float* sum;             // [heads, kLanes], one running sum per lane
  const T** rows;         // [2, 2, kDecodeTile]: this tile's and the next one's key and value rows
  Widened<E, S> widened;  // of a tile and head
  int padded_dim;

  HP_INLINE int64_t lay_out(DecodeScratch& s, void* memory, int heads, int group, int dim) {
    Arena arena{static_cast<char*>(memory)};
    s.padded_dim = round_up(dim, 32);
    s.q = arena.take<typename Dot<E>::Q>(static_cast<int64_t>(heads) * s.padded_dim);
    s.scores = arena.take<float>(static_cast<int64_t>(group) * kDecodeTile<E>);
    s.values = arena.take<float>(static_cast<int64_t>(heads) * s.padded_dim);
    s.maximum = arena.take<float>(heads);
    s.sum = arena.take<float>(static_cast<int64_t>(heads) * kLanes);
    s.rows = arena.take<const T*>(4 * kDecodeTile<E>);
    s.widened.lay_out(arena, s.padded_dim);
    return arena.used;
  }
};

// Addresses of the first head's rows in a tile, as Rows takes them. Rows past the end repeat the last key, so that whole vectors
// of keys can be read: their scores are dropped afterwards, and their values never used.
template <class E, class S>
HP_INLINE void tile_rows(const Cache<S>& cache, int begin, int end, const typename S::type** rows) {
  const auto** keys = rows;
  const auto** values = rows + kDecodeTile<E>;
  int key = begin;
  int t = 0;
  const int count = min_int(kDecodeTile<E>, end - begin);
  while (t < count) {
    const int in_block = key % cache.block_size;
    const int n = min_int(count - t, cache.block_size - in_block);
    int64_t offset = cache.offset(key);
    for (int i = 0; i < n; ++i, offset += cache.head_dim) {
      keys[t + i] = cache.k + offset;
      values[t + i] = cache.v + offset;
    }
    t += n;
    key += n;
  }
  for (; t < kDecodeTile<E>; ++t) {
    keys[t] = keys[count - 1];
    values[t] = values[count - 1];
  }
}

// The heads of a block lie side by side, so a tile is worked off head after head.
template <class E, class S, int kHeadDim>
void decode(const AttentionCall& call, const DecodePortion& portion, const DecodePortion* next_portion, void* memory) {
  using Stored = typename S::type;
  using W = Weigh<E>;
  const AttentionPlan::Item& item = *portion.item;
  const int kv_begin = portion.kv_begin, kv_end = portion.kv_end;
  const AttentionBatch& batch = *call.batch;
  const AttentionLayer& layer = *call.layer;
  const int group = layer.num_heads / layer.num_kv_heads;
  const int dim = kHeadDim > 0 ? kHeadDim : layer.head_dim;
  const int first_head = kv_begin * group, heads = (kv_end - kv_begin) * group;
  const int token = batch.query_start[item.seq] + item.q_begin;
  const int position = batch.context_lens[item.seq] - (batch.query_start[item.seq + 1] - token);
  const int64_t head_stride = static_cast<int64_t>(batch.block_size) * dim;
  const Cache<S> cache = cache_of<S>(call, item.seq, kv_begin);
  DecodeScratch<E, S> s;
  DecodeScratch<E, S>::lay_out(s, memory, heads, group, dim);

  for (int h = 0; h < heads; ++h) {
    copy_query(call, token, first_head + h, s.padded_dim, s.q + h * s.padded_dim);
    s.maximum[h] = kMinusInf;
    store(s.sum + h * kLanes, vf{});
  }
  std::memset(s.values, 0, static_cast<size_t>(heads) * s.padded_dim * 4);

  constexpr int kTile = kDecodeTile<E>;
  const Stored** rows = s.rows;
  const Stored** next_rows = s.rows + 2 * kTile;
  const vi lane = iota();
  tile_rows<E>(cache, item.key_begin, item.key_end, rows);
  for (int begin = item.key_begin; begin < item.key_end; begin += kTile) {
    const int count = min_int(kTile, item.key_end - begin);
    if (begin + kTile < item.key_end) {
      tile_rows<E>(cache, begin + kTile, item.key_end, next_rows);
    } else if (next_portion) {
      const AttentionPlan::Item& next_item = *next_portion->item;
      tile_rows<E>(cache_of<S>(call, next_item.seq, next_portion->kv_begin), next_item.key_begin, next_item.key_end, next_rows);
    } else {
      // With nothing left to fetch any address does.
      std::memcpy(next_rows, rows, 2 * kTile * sizeof(*rows));
    }

    for (int kv_head = kv_begin; kv_head < kv_end; ++kv_head) {
      const Rows<E, S> stored{rows, (kv_head - kv_begin) * head_stride};
      const Rows<E, S> next = kv_head + 1 < kv_end ? Rows<E, S>{rows, stored.offset + head_stride} : Rows<E, S>{next_rows, 0};
      const Prefetcher<E, S> prefetcher{stored, next};
      const Rows<E> head = s.widened.keys(stored, round_up(count, kLanes), dim);
      const int first_row = (kv_head - kv_begin) * group;
      for (int t = 0; t < count; t += kLanes) {
        for (int g = 0; g < group; g += kDecodeRows) {
          const auto* queries = s.q + (first_row + g) * s.padded_dim;
          float* scores = s.scores + g * kTile + t;
          const Prefetcher<E, S>* fetch = g == 0 ? &prefetcher : nullptr;
          switch (min_int(kDecodeRows, group - g)) {
            case 1: decode_scores<E, 1>(queries, s.padded_dim, head, t, dim, scores, fetch); break;
            case 2: decode_scores<E, 2>(queries, s.padded_dim, head, t, dim, scores, fetch); break;
            case 3: decode_scores<E, 3>(queries, s.padded_dim, head, t, dim, scores, fetch); break;
            default: decode_scores<E, 4>(queries, s.padded_dim, head, t, dim, scores, fetch);
          }
        }
      }
      for (int g = 0; g < group; ++g) {
        const int row = first_row + g;
        const Logits logits = logits_of(layer, first_head + row);
        float* scores = s.scores + g * kTile;
        prefetcher.during_softmax(g, group, dim);
        float* row_sum = s.sum + row * kLanes;
        vf top = splat(kMinusInf);
        for (int t = 0; t < count; t += kLanes) {
          const vi key = lane + (begin + t);
          vf x = logits(load(scores + t), __builtin_convertvector(key - position, vf)) * logits.factor;
          x = select(key < item.key_end, x, splat(kMinusInf));
          store(scores + t, x);
          top = max(top, x);
        }
        const float tile_maximum = hmax(top);
        if (tile_maximum > s.maximum[row]) {
          const vf rescale = exp2(splat(s.maximum[row] - tile_maximum));
          s.maximum[row] = tile_maximum;
          store(row_sum, load(row_sum) * rescale);
          float* weighted = s.values + row * s.padded_dim;
          for (int d = 0; d < s.padded_dim; d += kLanes) store(weighted + d, load(weighted + d) * rescale);
        }
        vf sum = load(row_sum);
        for (int t = 0; t < count; t += kLanes) {
          const vf p = exp2(load(scores + t) - s.maximum[row]);
          W::store_weights(scores, t, p);
          sum += p;
        }
        store(row_sum, sum);
      }
      s.widened.values(stored, round_up(count, kLanes), dim);
      for (int g = 0; g < group; g += kDecodeRows) {
        const float* weights = s.scores + g * kTile;
        float* out = s.values + (first_row + g) * s.padded_dim;
        const Prefetcher<E, S>* fetch = g == 0 ? &prefetcher : nullptr;
        switch (min_int(kDecodeRows, group - g)) {
          case 1: W::template add<1>(weights, head, count, dim, out, s.padded_dim, fetch); break;
          case 2: W::template add<2>(weights, head, count, dim, out, s.padded_dim, fetch); break;
          case 3: W::template add<3>(weights, head, count, dim, out, s.padded_dim, fetch); break;
          default: W::template add<4>(weights, head, count, dim, out, s.padded_dim, fetch);
        }
      }
    }
    const Stored** swap = rows;
    rows = next_rows;
    next_rows = swap;
  }
  for (int h = 0; h < heads; ++h) {
    float* row = s.values + h * s.padded_dim;
    W::finish(row, dim);
    const float sum = hsum(load(s.sum + h * kLanes));
    if (item.partial < 0) write_output(call, token, first_head + h, row, s.maximum[h], sum);
    else write_partial(call, item.partial, first_head + h, row, s.maximum[h], sum);
  }
}

// Decode with the usual head dimensions known to the compiler, which then unrolls the loops over columns and keeps queries in
// registers; vectors of four are too small for that.
template <class E, class S>
void decode_head_dim(const AttentionCall& call, const DecodePortion& portion, const DecodePortion* next, void* memory) {
  if constexpr (kLanes > 4) {
    switch (call.layer->head_dim) {
      case 64: return decode<E, S, 64>(call, portion, next, memory);
      case 128: return decode<E, S, 128>(call, portion, next, memory);
    }
  }
  decode<E, S, 0>(call, portion, next, memory);
}


// How the matrix kernels hold their operands. A depth step is one element of fp32, or a pair of bf16 values: the left operand
// is a row of steps, the right one a row of columns per step. kRows rows are multiplied at once, kColumns and kStride are what the
// sizes of operands are rounded up to: the columns of scores, and the steps of a row.
struct FloatOperand {
  using Left = float;   // per depth step
  using Right = float;  // per depth step and column
  static constexpr int kDepth = 1, kRows = kMicroRows, kColumns = kLanes, kStride = kLanes;
  HP_INLINE vf broadcast(const Left* p) { return splat(*p); }
  HP_INLINE vf load_right(const Right* p) { return load(p); }
  HP_INLINE vf add(vf acc, vf a, vf b) { return acc + a * b; }
  HP_INLINE vf exp2(vf x) { return HP_ISA::exp2(x); }
};
#if defined(HP_SIMD_AVX512BF16)
struct PairOperand {
  using Left = uint32_t;
  using Right = uint32_t;
  static constexpr int kDepth = 2, kRows = kMicroRows, kColumns = kLanes, kStride = kLanes;
  HP_INLINE vu broadcast(const Left* p) { return vu{} + *p; }
  HP_INLINE vu load_right(const Right* p) {
    vu x;
    std::memcpy(&x, p, sizeof(x));
    return x;
  }
  HP_INLINE vf add(vf acc, vu a, vu b) { return dot_bf16(acc, a, b); }
  HP_INLINE vf exp2(vf x) { return exp2_for_bf16(x); }
};
#endif
#if defined(__AMX_BF16__)
// Pairs for the tile registers, which multiply 16 steps at a time: two tiles of rows by two of columns.
struct TileOperand : PairOperand {
  static constexpr int kRows = 2 * kTileRegisterRows, kColumns = 2 * kLanes, kStride = kTileRegisterBytes / 4;
};
#endif
template <class E> struct OperandOf { using type = FloatOperand; };
#if defined(__AMX_BF16__)
template <> struct OperandOf<Bf16> { using type = TileOperand; };
#elif defined(HP_SIMD_AVX512BF16)
template <> struct OperandOf<Bf16> { using type = PairOperand; };
#endif

// c[R rows][NV vectors] (+)= a[R rows][depth] * b[depth][NV vectors].
template <class O, int R, int NV>
HP_INLINE void multiply_block(const typename O::Left* a, int a_stride, const typename O::Right* b, int b_stride, int depth,
                              float* c, int c_stride, bool accumulate) {
  vf acc[R][NV];
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int j = 0; j < NV; ++j) acc[r][j] = accumulate ? load(c + r * c_stride + j * kLanes) : vf{};
  for (int k = 0; k < depth; ++k) {
    const typename O::Right* row = b + static_cast<int64_t>(k) * b_stride;
    decltype(O::load_right(row)) right[NV];
#pragma GCC unroll 4
    for (int j = 0; j < NV; ++j) right[j] = O::load_right(row + j * kLanes);
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
      const auto left = O::broadcast(a + r * a_stride + k);
#pragma GCC unroll 4
      for (int j = 0; j < NV; ++j) acc[r][j] = O::add(acc[r][j], left, right[j]);
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int j = 0; j < NV; ++j) store(c + r * c_stride + j * kLanes, acc[r][j]);
}

template <class O, int R>
HP_HOT void multiply_rows(const typename O::Left* a, int a_stride, const typename O::Right* b, int b_stride, int depth, float* c,
                          int c_stride, int vectors, bool accumulate) {
  int j = 0;
  for (; j + kMicroVectors <= vectors; j += kMicroVectors)
    multiply_block<O, R, kMicroVectors>(a, a_stride, b + j * kLanes, b_stride, depth, c + j * kLanes, c_stride, accumulate);
#if HP_VW == 16
  if (vectors - j == 3) {
    multiply_block<O, R, 3>(a, a_stride, b + j * kLanes, b_stride, depth, c + j * kLanes, c_stride, accumulate);
    return;
  }
  if (vectors - j == 2) {
    multiply_block<O, R, 2>(a, a_stride, b + j * kLanes, b_stride, depth, c + j * kLanes, c_stride, accumulate);
    return;
  }
#endif
  if (vectors - j == 1)
    multiply_block<O, R, 1>(a, a_stride, b + j * kLanes, b_stride, depth, c + j * kLanes, c_stride, accumulate);
}

// c[rows][vectors] (+)= a[rows][depth] * b[depth][vectors]. Each result is summed over the depth in order, whatever the number of
// rows and columns: a row's output does not depend on the rows beside it.
template <class O>
void multiply(int rows, const typename O::Left* a, int a_stride, const typename O::Right* b, int b_stride,
                        int depth, float* c, int c_stride, int vectors, bool accumulate) {
  switch (rows) {
    case 1: return multiply_rows<O, 1>(a, a_stride, b, b_stride, depth, c, c_stride, vectors, accumulate);
    case 2: return multiply_rows<O, 2>(a, a_stride, b, b_stride, depth, c, c_stride, vectors, accumulate);
    case 3: return multiply_rows<O, 3>(a, a_stride, b, b_stride, depth, c, c_stride, vectors, accumulate);
    case 4: return multiply_rows<O, 4>(a, a_stride, b, b_stride, depth, c, c_stride, vectors, accumulate);
    case 5: return multiply_rows<O, 5>(a, a_stride, b, b_stride, depth, c, c_stride, vectors, accumulate);
    default: return multiply_rows<O, 6>(a, a_stride, b, b_stride, depth, c, c_stride, vectors, accumulate);
  }
}

#if defined(__AMX_BF16__)
// The same for RT tiles of rows and NT of columns, from whole tiles: operands have zeros up to the next multiple of 16 steps.
template <int RT, int NT>
HP_INLINE void multiply_tiles(const uint32_t* a, int a_stride, const uint32_t* b, int b_stride, int depth, float* c, int c_stride,
                              bool accumulate) {
  const int64_t a_bytes = int64_t{4} * a_stride, b_bytes = int64_t{4} * b_stride, c_bytes = int64_t{4} * c_stride;
  float* const lower = c + static_cast<int64_t>(kTileRegisterRows) * c_stride;
  if (accumulate) {
    _tile_loadd(0, c, c_bytes);
    if constexpr (NT > 1) _tile_loadd(1, c + kLanes, c_bytes);
    if constexpr (RT > 1) _tile_loadd(2, lower, c_bytes);
    if constexpr (RT > 1 && NT > 1) _tile_loadd(3, lower + kLanes, c_bytes);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int k = 0; k < depth; k += TileOperand::kStride) {
    const uint32_t* right = b + static_cast<int64_t>(k) * b_stride;
    _tile_loadd(6, right, b_bytes);
    if constexpr (NT > 1) _tile_loadd(7, right + kLanes, b_bytes);
    _tile_loadd(4, a + k, a_bytes);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (NT > 1) _tile_dpbf16ps(1, 4, 7);
    if constexpr (RT > 1) {
      _tile_loadd(5, a + static_cast<int64_t>(kTileRegisterRows) * a_stride + k, a_bytes);
      _tile_dpbf16ps(2, 5, 6);
      if constexpr (NT > 1) _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, c, c_bytes);
  if constexpr (NT > 1) _tile_stored(1, c + kLanes, c_bytes);
  if constexpr (RT > 1) _tile_stored(2, lower, c_bytes);
  if constexpr (RT > 1 && NT > 1) _tile_stored(3, lower + kLanes, c_bytes);
}

template <int RT>
void multiply_tile_rows(const uint32_t* a, int a_stride, const uint32_t* b, int b_stride, int depth, float* c, int c_stride, int vectors,
                        bool accumulate) {
  int j = 0;
  for (; j + 2 <= vectors; j += 2) multiply_tiles<RT, 2>(a, a_stride, b + j * kLanes, b_stride, depth, c + j * kLanes, c_stride, accumulate);
  if (j < vectors) multiply_tiles<RT, 1>(a, a_stride, b + j * kLanes, b_stride, depth, c + j * kLanes, c_stride, accumulate);
}

// Rows up to the next multiple of 16 are read and written as well.
template <>
void multiply<TileOperand>(int rows, const uint32_t* a, int a_stride, const uint32_t* b, int b_stride, int depth, float* c, int c_stride,
                           int vectors, bool accumulate) {
  TileRegisters::settle_memory();
  if (rows > kTileRegisterRows) multiply_tile_rows<2>(a, a_stride, b, b_stride, depth, c, c_stride, vectors, accumulate);
  else multiply_tile_rows<1>(a, a_stride, b, b_stride, depth, c, c_stride, vectors, accumulate);
}
#endif

// What the matrix kernels of an operand need around them, for as long as they are used.
template <class O>
struct MatrixUnit {};
#if defined(__AMX_BF16__)
template <>
struct MatrixUnit<TileOperand> {
  TileRegisters registers;
  HP_INLINE_MEMBER MatrixUnit() {
    registers.shape(0, 8, kTileRegisterRows);
    registers.load();
  }
};
#endif

// The next kLanes depth steps of one key, as 32-bit lanes.
template <class E>
HP_INLINE vf load_steps(FloatOperand, const typename E::type* p, int n) {
  return n >= kLanes ? load(E{}, p) : load_first(E{}, p, n);
}
#if defined(HP_SIMD_AVX512BF16)
template <class E>
HP_INLINE vf load_steps(PairOperand, const uint16_t* p, int n) {
  return bits_to_float(n >= kLanes ? load_pairs(p) : load_first_pairs(p, 2 * n));
}
#endif

// Keys [first, last) of the tile that starts at key `tile`, transposed: packed[step][key]. The other columns become zero, and so do
// steps beyond the head dimension, up to a whole vector of them.
template <class E, class O>
void pack_keys(const Cache<E>& cache, int tile, int first, int last, typename O::Right* packed) {
  const int steps = cache.head_dim / O::kDepth;
  for (int t = 0; t < kPrefillKeys; t += kLanes) {
    const typename E::type* rows[kLanes];
    for (int i = 0; i < kLanes; ++i) {
      const int key = tile + t + i;
      rows[i] = key >= first && key < last ? cache.key_row(key) : nullptr;
    }
    for (int s = 0; s < steps; s += kLanes) {
      vf m[kLanes];
      for (int i = 0; i < kLanes; ++i) m[i] = rows[i] ? load_steps<E>(O{}, rows[i] + s * O::kDepth, steps - s) : vf{};
      transpose(m);
      for (int i = 0; i < kLanes; ++i) std::memcpy(packed + static_cast<int64_t>(s + i) * kPrefillKeys + t, &m[i], sizeof(vf));
    }
  }
}

// Values of the same keys: packed[key / depth][padded_dim], zero for the other keys and columns. Returns whether all are finite.
template <class E>
bool pack_values(const Cache<E>& cache, int tile, int first, int last, int padded_dim, FloatOperand, float* packed) {
  vu largest{};
  for (int t = 0; t < kPrefillKeys; ++t) {
    const int key = tile + t;
    float* to = packed + static_cast<int64_t>(t) * padded_dim;
    if (key < first || key >= last) {
      std::memset(to, 0, static_cast<size_t>(padded_dim) * 4);
      continue;
    }
    const typename E::type* from = cache.value_row(key);
    for (int d = 0; d < padded_dim; d += kLanes) {
      const int n = cache.head_dim - d;
      const vf x = n >= kLanes ? load(E{}, from + d) : n > 0 ? load_first(E{}, from + d, n) : vf{};
      const vu magnitude = float_to_bits(x) & 0x7fffffffu;
      largest = magnitude > largest ? magnitude : largest;
      store(to + d, x);
    }
  }
  bool finite = true;
  for (int i = 0; i < kLanes; ++i) finite = finite && largest[i] < 0x7f800000u;
  return finite;
}
#if defined(HP_SIMD_AVX512BF16)
template <class E>
bool pack_values(const Cache<E>& cache, int tile, int first, int last, int padded_dim, PairOperand, uint32_t* packed) {
  vu largest{};
  for (int t = 0; t < kPrefillKeys; t += 2) {
    const uint16_t* rows[2];
    for (int i = 0; i < 2; ++i) {
      const int key = tile + t + i;
      rows[i] = key >= first && key < last ? cache.value_row(key) : nullptr;
    }
    uint32_t* to = packed + static_cast<int64_t>(t / 2) * padded_dim;
    if (!rows[0] && !rows[1]) {
      std::memset(to, 0, static_cast<size_t>(padded_dim) * 4);
      continue;
    }
    for (int d = 0; d < padded_dim; d += kLanes) {
      const int n = cache.head_dim - d;
      vu half[2];
#pragma GCC unroll 2
      for (int i = 0; i < 2; ++i) {
        const vh x = !rows[i] || n <= 0 ? vh{} : n >= kLanes ? load_halves(rows[i] + d) : load_first_halves(rows[i] + d, n);
        half[i] = __builtin_convertvector(x, vu);
        const vu magnitude = half[i] & 0x7fffu;
        largest = magnitude > largest ? magnitude : largest;
      }
      const vu pair = half[0] | half[1] << 16;
      std::memcpy(to + d, &pair, sizeof(pair));
    }
  }
  bool finite = true;
  for (int i = 0; i < kLanes; ++i) finite = finite && largest[i] < 0x7f80u;
  return finite;
}
#endif

HP_INLINE float packed_value(FloatOperand, const float* packed, int padded_dim, int key, int d) {
  return packed[static_cast<int64_t>(key) * padded_dim + d];
}
HP_INLINE void store_weights(FloatOperand, float* to, vf p) { store(to, p); }
HP_INLINE float weight_at(FloatOperand, const float* p, int key) { return p[key]; }
#if defined(HP_SIMD_AVX512BF16)
HP_INLINE float packed_value(PairOperand, const uint32_t* packed, int padded_dim, int key, int d) {
  return bf16_to_float(static_cast<uint16_t>(packed[static_cast<int64_t>(key / 2) * padded_dim + d] >> (key % 2 * 16)));
}
HP_INLINE void store_weights(PairOperand, uint32_t* to, vf p) {
  const __m256bh x = _mm512_cvtneps_pbh(reinterpret_cast<__m512>(p));
  std::memcpy(to, &x, sizeof(x));
}
HP_INLINE float weight_at(PairOperand, const uint32_t* p, int key) {
  return bf16_to_float(static_cast<uint16_t>(p[key / 2] >> (key % 2 * 16)));
}
#endif

template <class E, class S>
struct PrefillScratch {
  using O = typename OperandOf<E>::type;
  using Q = typename Dot<E>::Q;
  Q* q;                    // [rows, q_stride]
  float* values;           // [rows, padded_dim]
  float* maximum;          // [rows]
  float* sum;              // [rows, kLanes]
  typename O::Right* k;    // [steps, kPrefillKeys]
  typename O::Right* v;    // [kPrefillKeys / depth, padded_dim]
  float* scores;           // [O::kRows, kPrefillKeys]
  typename O::Left* p;     // [O::kRows, kPrefillKeys / depth]
  typename E::type* widened;  // [2, kPrefillKeys, padded_dim], of a tile's keys and values that are stored otherwise
  int padded_dim, q_stride, steps;

  HP_INLINE int64_t lay_out(PrefillScratch& s, void* memory, int rows, int dim) {
    Arena arena{static_cast<char*>(memory)};
    s.padded_dim = round_up(dim, kLanes);
    s.steps = round_up(dim / O::kDepth, O::kStride);
    s.q_stride = s.steps * O::kDepth;
    rows = round_up(rows, O::kRows);
    s.q = arena.take<Q>(static_cast<int64_t>(rows) * s.q_stride);
    s.values = arena.take<float>(static_cast<int64_t>(rows) * s.padded_dim);
    s.maximum = arena.take<float>(rows);
    s.sum = arena.take<float>(static_cast<int64_t>(rows) * kLanes);
    s.k = arena.take<typename O::Right>(static_cast<int64_t>(s.steps) * kPrefillKeys);
    s.v = arena.take<typename O::Right>(static_cast<int64_t>(kPrefillKeys / O::kDepth) * s.padded_dim);
    s.scores = arena.take<float>(O::kRows * kPrefillKeys);
    s.p = arena.take<typename O::Left>(O::kRows * kPrefillKeys / O::kDepth);
    s.widened = arena.take<typename E::type>(kIsWidened<E, S> ? static_cast<int64_t>(2) * kPrefillKeys * s.padded_dim : 0);
    return arena.used;
  }
};

// Rows [first, last) of a tile in E's type, one after the other from the tile's start: counted from there they are a cache without blocks.
template <class E, class S>
HP_INLINE Cache<E> widened_tile(const Cache<S>& cache, int tile, int first, int last, int stride, typename E::type* memory) {
  typename E::type* const values = memory + static_cast<int64_t>(kPrefillKeys) * stride;
  for (int key = first; key < last; ++key) {
    const int64_t at = static_cast<int64_t>(key - tile) * stride;
    widen_e4m3<E>(cache.key_row(key), cache.head_dim, memory + at);
    widen_e4m3<E>(cache.value_row(key), cache.head_dim, values + at);
  }
  return {memory, values, nullptr, 0, 0, 0, cache.head_dim, stride, stride};
}

template <class E, class S>
void prefill(const AttentionCall& call, const AttentionPlan::Item& item, int kv_head, void* memory) {
  using O = typename OperandOf<E>::type;
  const AttentionBatch& batch = *call.batch;
  const AttentionLayer& layer = *call.layer;
  const int group = layer.num_heads / layer.num_kv_heads, dim = layer.head_dim, first_head = kv_head * group;
  const int first_token = batch.query_start[item.seq] + item.q_begin;
  const int query_len = batch.query_start[item.seq + 1] - batch.query_start[item.seq];
  const int first_position = batch.context_lens[item.seq] - query_len + item.q_begin;
  const int rows = (item.q_end - item.q_begin) * group;
  const int window = layer.window > 0 ? layer.window : INT32_MAX / 2;
  // The first key that is not seen, counted from the query.
  const int ahead = batch.bidirectional ? window : 1;
  const Cache<S> cache = cache_of<S>(call, item.seq, kv_head);
  PrefillScratch<E, S> s;
  PrefillScratch<E, S>::lay_out(s, memory, rows, dim);
  const int q_stride = s.q_stride;

  for (int r = 0; r < rows; ++r) {
    copy_query(call, first_token + r / group, first_head + r % group, q_stride, s.q + static_cast<int64_t>(r) * q_stride);
    s.maximum[r] = kMinusInf;
    store(s.sum + static_cast<int64_t>(r) * kLanes, vf{});
  }
  std::memset(s.values, 0, static_cast<size_t>(rows) * s.padded_dim * 4);

  const vi lane = iota();
  [[maybe_unused]] const MatrixUnit<O> unit;  // sets up registers that not all levels have
  for (int tile = item.key_begin / kPrefillKeys * kPrefillKeys; tile < item.key_end; tile += kPrefillKeys) {
    const int first_key = max_int(tile, item.key_begin), last_key = min_int(tile + kPrefillKeys, item.key_end);
    bool finite;
    if constexpr (kIsWidened<E, S>) {
      const Cache<E> widened = widened_tile<E>(cache, tile, first_key, last_key, s.padded_dim, s.widened);
      pack_keys<E, O>(widened, 0, first_key - tile, last_key - tile, s.k);
      finite = pack_values<E>(widened, 0, first_key - tile, last_key - tile, s.padded_dim, O{}, s.v);
    } else {
      pack_keys<E, O>(cache, tile, first_key, last_key, s.k);
      finite = pack_values<E>(cache, tile, first_key, last_key, s.padded_dim, O{}, s.v);
    }

    for (int strip = 0; strip < rows; strip += O::kRows) {
      const int strip_rows = min_int(O::kRows, rows - strip);
      const int low_position = first_position + strip / group;
      const int high_position = first_position + (strip + strip_rows - 1) / group;
      // Columns that some row of the strip sees, and whether every row sees all of them.
      const int low = max_int(first_key, low_position - window + 1), high = min_int(last_key, high_position + ahead);
      if (low >= high) continue;
      const int low_column = (low - tile) / O::kColumns * O::kColumns;
      const int vectors = round_up(high - tile - low_column, O::kColumns) / kLanes;
      const bool masked = low - tile != low_column || (high - tile) % O::kColumns != 0 || high_position - window + 1 > low ||
                          low_position + ahead < high;

      multiply<O>(strip_rows, reinterpret_cast<const typename O::Left*>(s.q + static_cast<int64_t>(strip) * q_stride),
                  q_stride / O::kDepth, s.k + low_column, kPrefillKeys, dim / O::kDepth, s.scores, kPrefillKeys, vectors, false);

      for (int r = 0; r < strip_rows; ++r) {
        const int row = strip + r, position = first_position + row / group;
        const Logits logits = logits_of(layer, first_head + row % group);
        float* scores = s.scores + r * kPrefillKeys;
        auto* weights = s.p + r * (kPrefillKeys / O::kDepth);
        vf top = splat(kMinusInf);
        if (logits.plain && !masked) {
          for (int j = 0; j < vectors; ++j) top = max(top, load(scores + j * kLanes));
        } else {
          const int from = max_int(first_key, position - window + 1), to = min_int(last_key, position + ahead);
          for (int j = 0; j < vectors; ++j) {
            const vi key = lane + (tile + low_column + j * kLanes);
            vf x = logits(load(scores + j * kLanes), __builtin_convertvector(key - position, vf));
            if (masked) x = select((key >= from) & (key < to), x, splat(kMinusInf));
            store(scores + j * kLanes, x);
            top = max(top, x);
          }
        }
        const float old_maximum = s.maximum[row], tile_maximum = hmax(top) * logits.factor;
        float* row_sum = s.sum + static_cast<int64_t>(row) * kLanes;
        if (tile_maximum > old_maximum) {
          s.maximum[row] = tile_maximum;
          if (old_maximum != kMinusInf) {
            const vf rescale = exp2(splat(old_maximum - tile_maximum));
            float* values = s.values + static_cast<int64_t>(row) * s.padded_dim;
            for (int d = 0; d < s.padded_dim; d += kLanes) store(values + d, load(values + d) * rescale);
            store(row_sum, load(row_sum) * rescale);
          }
        }
        // A row that has seen no key yet has only -inf here: any finite reference makes all its weights zero.
        const float reference = s.maximum[row] == kMinusInf ? 0.0f : s.maximum[row];
        vf sum = load(row_sum);
        for (int j = 0; j < vectors; ++j) {
          const vf p = O::exp2(load(scores + j * kLanes) * logits.factor - reference);
          store_weights(O{}, weights + j * (kLanes / O::kDepth), p);
          sum += p;
        }
        store(row_sum, sum);
      }

      float* values = s.values + static_cast<int64_t>(strip) * s.padded_dim;
      if (finite || !masked) {
        multiply<O>(strip_rows, s.p, kPrefillKeys / O::kDepth, s.v + static_cast<int64_t>(low_column / O::kDepth) * s.padded_dim,
                    s.padded_dim, vectors * kLanes / O::kDepth, values, s.padded_dim, s.padded_dim / kLanes, true);
      } else {
        // Weight zero does not hide a value that is not finite: take the visible keys only.
        for (int r = 0; r < strip_rows; ++r) {
          const int position = first_position + (strip + r) / group;
          const int from = max_int(first_key, position - window + 1), to = min_int(last_key, position + ahead);
          for (int key = from; key < to; ++key) {
            const float weight = weight_at(O{}, s.p + r * (kPrefillKeys / O::kDepth), key - tile - low_column);
            for (int d = 0; d < dim; ++d)
              values[static_cast<int64_t>(r) * s.padded_dim + d] += weight * packed_value(O{}, s.v, s.padded_dim, key - tile, d);
          }
        }
      }
    }
  }

  for (int r = 0; r < rows; ++r) {
    const float* values = s.values + static_cast<int64_t>(r) * s.padded_dim;
    const float sum = hsum(load(s.sum + static_cast<int64_t>(r) * kLanes));
    const int token = r / group, head = first_head + r % group;
    if (item.partial < 0) write_output(call, first_token + token, head, values, s.maximum[r], sum);
    else write_partial(call, item.partial + token, head, values, s.maximum[r], sum);
  }
}

// For keys and values in E's type that are stored as S.
template <class E, class S>
HP_INLINE int64_t scratch_bytes_of(int decode_kv_heads, int group, int head_dim) {
  DecodeScratch<E, S> d;
  PrefillScratch<E, S> p;
  const int64_t decode_bytes = DecodeScratch<E, S>::lay_out(d, nullptr, decode_kv_heads * group, group, head_dim);
  const int64_t prefill_bytes = PrefillScratch<E, S>::lay_out(p, nullptr, group > kTileRows ? group : kTileRows, head_dim);
  return decode_bytes > prefill_bytes ? decode_bytes : prefill_bytes;
}

#if defined(HP_SIMD_AVX512BF16)
// Instructions for bf16 change nothing for the other types, and tile registers nothing but the matrix products: the rest is what the level below
// has, and is not compiled once more.
#if defined(__AMX_BF16__)
HP_INLINE const AttentionKernels& below() { return avx512bf16::attention_kernels(); }
#else
HP_INLINE const AttentionKernels& below() { return avx512::attention_kernels(); }
#endif

int64_t scratch_bytes(int decode_kv_heads, int group, int head_dim) {
  const int64_t others = below().scratch_bytes(decode_kv_heads, group, head_dim);
  const int64_t own = scratch_bytes_of<Bf16, E4m3>(decode_kv_heads, group, head_dim);
  return others > own ? others : own;
}

void decode_any(const AttentionCall& call, const DecodePortion& portion, const DecodePortion* next, void* scratch) {
#if !defined(__AMX_BF16__)
  if (call.kv->dtype == DType::BF16) {
    if (call.kv->format == KvFormat::E4m3) return decode_head_dim<Bf16, E4m3>(call, portion, next, scratch);
    return decode_head_dim<Bf16, Bf16>(call, portion, next, scratch);
  }
#endif
  below().decode(call, portion, next, scratch);
}

void prefill_any(const AttentionCall& call, const AttentionPlan::Item& item, int kv_head, void* scratch) {
  if (call.kv->dtype == DType::BF16) {
    if (call.kv->format == KvFormat::E4m3) return prefill<Bf16, E4m3>(call, item, kv_head, scratch);
    return prefill<Bf16, Bf16>(call, item, kv_head, scratch);
  }
  below().prefill(call, item, kv_head, scratch);
}

void merge_any(const AttentionCall& call, const AttentionPlan::Merge& item, int kv_head, void* scratch) {
  below().merge(call, item, kv_head, scratch);
}

void narrow_any(const void* from, DType dtype, float scale, int64_t n, uint8_t* to) { below().narrow(from, dtype, scale, n, to); }

uint64_t read_words(const void* p, int64_t bytes) { return below().read_words(p, bytes); }
#else
// Numbers in e4m3 are widened to fp32 whatever the type of queries, since all is summed in it.
int64_t scratch_bytes(int decode_kv_heads, int group, int head_dim) {
  const int64_t widened = scratch_bytes_of<F32, E4m3>(decode_kv_heads, group, head_dim);
  const int64_t halves = scratch_bytes_of<Bf16, Bf16>(decode_kv_heads, group, head_dim);
  return widened > halves ? widened : halves;
}

void decode_any(const AttentionCall& call, const DecodePortion& portion, const DecodePortion* next, void* scratch) {
  if (call.kv->format == KvFormat::E4m3) return decode_head_dim<F32, E4m3>(call, portion, next, scratch);
  with_type(call.kv->dtype, [&](auto type) { decode_head_dim<decltype(type), decltype(type)>(call, portion, next, scratch); });
}

void prefill_any(const AttentionCall& call, const AttentionPlan::Item& item, int kv_head, void* scratch) {
  if (call.kv->format == KvFormat::E4m3) return prefill<F32, E4m3>(call, item, kv_head, scratch);
  with_type(call.kv->dtype, [&](auto type) { prefill<decltype(type), decltype(type)>(call, item, kv_head, scratch); });
}

void merge_any(const AttentionCall& call, const AttentionPlan::Merge& item, int kv_head, void* memory) {
  const AttentionLayer& layer = *call.layer;
  const int group = layer.num_heads / layer.num_kv_heads, tokens = item.q_end - item.q_begin;
  float* values = static_cast<float*>(memory);
  for (int row = 0; row < tokens * group; ++row) {
    const int token = row / group, head = kv_head * group + row % group;
    float maximum = kMinusInf, sum = 0;
    for (int i = 0; i < item.count; ++i) {
      const float x = partial_row(call, item.partial + i * tokens + token, head)[0];
      maximum = x > maximum ? x : maximum;
    }
    for (int d = 0; d < layer.head_dim + kLanes; ++d) values[d] = 0;
    for (int i = 0; i < item.count; ++i) {
      const float* part = partial_row(call, item.partial + i * tokens + token, head);
      // A partition without a visible key has no weight; a NaN goes on into the result.
      if (part[0] == kMinusInf && part[1] == 0) continue;
      const float weight = exp2_scalar(part[0] - maximum);
      sum += weight * part[1];
      for (int d = 0; d < layer.head_dim; ++d) values[d] += weight * part[2 + d];
    }
    write_output(call, call.batch->query_start[item.seq] + item.q_begin + token, head, values, maximum, sum);
  }
}

void narrow_any(const void* from, DType dtype, float scale, int64_t n, uint8_t* to) {
  with_type(dtype, [&](auto type) {
    const auto* numbers = static_cast<const typename decltype(type)::type*>(from);
    int64_t d = 0;
    for (; d + kLanes <= n; d += kLanes) store(E4m3{}, to + d, load(type, numbers + d) / scale);
    if (d < n) store_first(E4m3{}, to + d, load_first(type, numbers + d, static_cast<int>(n - d)) / scale, static_cast<int>(n - d));
  });
}

uint64_t read_words(const void* p, int64_t bytes) {
  const char* from = static_cast<const char*>(p);
  constexpr int kStreams = 8;
  vu sums[kStreams] = {};
  int64_t i = 0;
  for (; i + kStreams * static_cast<int64_t>(sizeof(vu)) <= bytes; i += kStreams * sizeof(vu)) {
#pragma GCC unroll 8
    for (int j = 0; j < kStreams; ++j) {
      vu x;
      std::memcpy(&x, from + i + j * sizeof(vu), sizeof(x));
      sums[j] += x;
    }
  }
  uint64_t total = 0;
  for (int j = 0; j < kStreams; ++j)
    for (int l = 0; l < kLanes; ++l) total += sums[j][l];
  for (; i < bytes; ++i) total += static_cast<unsigned char>(from[i]);
  return total;
}
#endif

constexpr AttentionKernels kKernels = {scratch_bytes, decode_any, prefill_any, merge_any, narrow_any, read_words};

}  // namespace

const AttentionKernels& attention_kernels() { return kKernels; }

}  // namespace HP_ISA
}  // namespace hp
