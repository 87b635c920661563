// Decode attention of one layer over tiered storage, for one new token per sequence: store the token, logits over sinks, the
// full-precision pool and the coded pool, one softmax, values, attention collected per unit. No dense copy of coded tokens is made:
// codes are decoded in registers. The layout is that of store/pool.py and store/codec.py; the meaning is that of
// engine/reference.py, which the tests hold it to. One library per head dimension: the compiler is given -DDIM.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>
#if defined(__AVX512F__) || defined(__F16C__)
#include <immintrin.h>
#endif

#define INLINE __attribute__((always_inline))
#define EACH(i, n) _Pragma("GCC unroll 16") for (int i = 0; i < (n); ++i)
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)

namespace {

constexpr int64_t D = DIM, H = D / 2;
constexpr int BLOCKS = D / 16;
constexpr int MOST = BLOCKS <= 6 ? 4 : BLOCKS <= 8 ? 3 : 1; // queries whose sums fit into the registers
constexpr int64_t AHEAD = 6;                                // windows whose memory is asked for before it is needed
constexpr int64_t COARSE = 256;                             // positions per row of the coarse rotary table
constexpr int64_t NEAR = 2048;                              // the same in bytes, where tokens follow each other
constexpr int64_t PIECE = 512;                              // coded tokens whose values are weighed at a time
constexpr float HIDDEN = -1e30f; // logit of a token that is not seen; finite, because the flags let the compiler ignore infinities

typedef float v16 __attribute__((vector_size(64)));
typedef float v16u __attribute__((vector_size(64), aligned(4), may_alias));
typedef float v8 __attribute__((vector_size(32)));
typedef float v8u __attribute__((vector_size(32), aligned(4), may_alias));
typedef int32_t i16 __attribute__((vector_size(64)));
typedef uint16_t h16u __attribute__((vector_size(32), aligned(2), may_alias));
typedef uint8_t b16 __attribute__((vector_size(16)));
typedef uint8_t b16u __attribute__((vector_size(16), aligned(1), may_alias));

typedef uint64_t w2 __attribute__((vector_size(16)));

constexpr i16 LANES = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

inline i16 widen(b16 x) {
#ifdef __AVX512F__ // not every compiler finds it
  return (i16)_mm512_cvtepu8_epi32((__m128i)x);
#else
  return __builtin_convertvector(x, i16);
#endif
}

inline v16 load(const float *p) { return *reinterpret_cast<const v16u *>(p); }
inline void save(float *p, v16 x) { *reinterpret_cast<v16u *>(p) = x; }

// -- sums over lanes ------------------------------------------------------------------------------------------------------

// four vectors as one: in each quarter, a partial sum of every one of them
inline v16 quarter(v16 a, v16 b, v16 c, v16 d) {
  auto pair = [](v16 a, v16 b) INLINE {
    return SHUFFLE(a, b, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29) +
           SHUFFLE(a, b, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
  };
  v16 x = pair(a, b), y = pair(c, d);
  return SHUFFLE(x, y, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
         SHUFFLE(x, y, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
}

// the eight sums, in order, in the first eight lanes
inline v16 finish(v16 a, v16 b) {
  v16 x = SHUFFLE(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
          SHUFFLE(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
  return SHUFFLE(x, x, 0, 1, 2, 3, 8, 9, 10, 11, 0, 1, 2, 3, 8, 9, 10, 11) +
         SHUFFLE(x, x, 4, 5, 6, 7, 12, 13, 14, 15, 4, 5, 6, 7, 12, 13, 14, 15);
}

inline float sum_of(const float *x, int64_t n) {
  if (n % 8 == 0) {
    v8 a = *reinterpret_cast<const v8u *>(x);
    for (int64_t i = 8; i < n; i += 8) a += *reinterpret_cast<const v8u *>(x + i);
    a += SHUFFLE(a, a, 4, 5, 6, 7, 0, 1, 2, 3);
    a += SHUFFLE(a, a, 2, 3, 0, 1, 6, 7, 4, 5);
    return a[0] + a[1];
  }
  float sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += x[i];
  return sum;
}

// -- storage types --------------------------------------------------------------------------------------------------------

enum { F32 = 0, F16 = 1, BF16 = 2, U8 = 3 };
constexpr int64_t SIZE[] = {4, 2, 2, 1};

// numbers `at` ... `at + 15`
template <int TYPE> inline v16 load16(const void *base, int64_t at) {
  if constexpr (TYPE == F32) return load((const float *)base + at);
  if constexpr (TYPE == U8)
    return __builtin_convertvector(widen((b16) * (const b16u *)((const uint8_t *)base + at)), v16);
  const uint16_t *p = (const uint16_t *)base + at;
#ifdef __AVX512F__
  if constexpr (TYPE == F16) return (v16)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#endif
  i16 bits = __builtin_convertvector(*(const h16u *)p, i16);
  if constexpr (TYPE == BF16) return (v16)(bits << 16);
  // exponents are moved by a product, which is right for small numbers that have none too
  return (v16)((i16)((v16)((bits & 0x7fff) << 13) * 0x1p112f) | (bits & 0x8000) << 16);
}

template <int TYPE> inline float load1(const void *base, int64_t at) {
  if constexpr (TYPE == F32) return ((const float *)base)[at];
  if constexpr (TYPE == U8) return ((const uint8_t *)base)[at];
#ifdef __F16C__
  if constexpr (TYPE == F16) return _cvtsh_ss(((const uint16_t *)base)[at]);
#endif
  uint32_t bits = ((const uint16_t *)base)[at], sign = (bits & 0x8000) << 16;
  bits = TYPE == BF16 ? bits << 16 : (bits & 0x7fff) << 13;
  float f;
  std::memcpy(&f, &bits, 4);
  if constexpr (TYPE == BF16) return f;
  f *= 0x1p112f;
  return sign ? -f : f;
}

// `f` is called with the type as a constant
template <class F> INLINE inline void with_type(int64_t type, F &&f) {
  switch (type) {
  case F32: return f(std::integral_constant<int, F32>{});
  case F16: return f(std::integral_constant<int, F16>{});
  case BF16: return f(std::integral_constant<int, BF16>{});
  default: return f(std::integral_constant<int, U8>{});
  }
}

inline uint16_t to_half(float f) {
#if defined(__F16C__)
  return _cvtss_sh(f, _MM_FROUND_TO_NEAREST_INT);
#else
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  uint16_t sign = bits >> 16 & 0x8000;
  float a = std::fabs(f);
  if (std::isnan(f)) return sign | 0x7e00;
  if (a >= 65520.0f) return sign | 0x7c00;
  if (a < 6.103515625e-05f) return sign | (uint16_t)std::lrint(std::ldexp(a, 24));
  bits &= 0x7fffffff;
  return sign | (uint16_t)((bits + 0xfff + (bits >> 13 & 1) - 0x38000000) >> 13);
#endif
}

inline uint16_t to_bf16(float f) {
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  if (std::isnan(f)) return 0x7fc0;
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

inline void narrow(const float *x, void *base, int64_t type, int64_t at) {
  if (type == F32) {
    std::memcpy((float *)base + at, x, D * 4);
  } else {
    uint16_t *p = (uint16_t *)base + at;
    for (int64_t i = 0; i < D; ++i) p[i] = type == F16 ? to_half(x[i]) : to_bf16(x[i]);
  }
}

// -- codes ----------------------------------------------------------------------------------------------------------------

constexpr int planes(int bits) { return bits == 3 ? 2 : 1; }                               // see store/codec.py
constexpr int plane_bits(int bits, int i) { return bits == 3 ? 2 - i : bits; }             // 3 bits: 2 and 1
constexpr bool whole(int64_t width) { return width % 16 == 0 || (width >= 4 && 16 % width == 0); } // vectors do not straddle runs

// what codes of a vector are multiplied by: they are masked where they are in their byte, which saves a shift and is exact
template <int BITS> constexpr float factor(int i) {
  return BITS != 3 && D * BITS / 8 % 16 == 0 ? 1 << (i * 16 / (D * BITS / 8) * BITS) : 1;
}

#ifdef __AVX512F__
// codes of 3 bits are looked up by their low two bits, their high one, and one that belongs to another code and is ignored
INLINE inline void three_bits(const uint8_t *row, v16 *x) {
  constexpr int64_t low = D / 4, high = D / 8; // bytes of the planes
  const v16 value = {0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7};
  EACH(i, BLOCKS) {
    i16 b = widen((b16) * (const b16u *)(row + i * 16 % low)) >> i * 16 / low * 2, t;
    if (high >= 16) {
      t = widen((b16) * (const b16u *)(row + low + i * 16 % high)) << 2 >> i * 16 / high;
    } else { // a vector holds two runs
      uint64_t word;
      std::memcpy(&word, row + low, 8);
      t = widen((b16)(w2{word, word})) << 2 >> (LANES >> 3) >> i * 2;
    }
    const __m512i index = _mm512_ternarylogic_epi32(_mm512_set1_epi32(3), (__m512i)b, (__m512i)t, 0xca);
    x[i] = (v16)_mm512_permutexvar_ps(index, (__m512)value);
  }
}
#endif

// codes of one row, times their factor
template <int BITS> INLINE inline void codes(const uint8_t *row, v16 *x) {
#ifdef __AVX512F__
  if constexpr (BITS == 3 && D % 64 == 0) return three_bits(row, x);
#endif
  constexpr bool fits = whole(D * plane_bits(BITS, 0) / 8) && whole(D * plane_bits(BITS, planes(BITS) - 1) / 8);
  i16 bits[BLOCKS];
  if constexpr (fits) {
    EACH(plane, planes(BITS)) {
      const int p = plane_bits(BITS, plane), mask = (1 << p) - 1;
      const int64_t width = D * p / 8;
      EACH(i, BLOCKS) {
        i16 part;
        if (width >= 16) {
          const int run = i * 16 / width;
          part = widen((b16) * (const b16u *)(row + i * 16 % width));
          part = planes(BITS) == 1 ? part & (mask << run * p) : (part >> run * p & mask) << 2 * plane;
        } else { // a vector holds several runs
          uint64_t word = 0;
          std::memcpy(&word, row, width);
          if (width == 4) word |= word << 32;
          part = (widen((b16)(w2{word, word})) >> (LANES + i * 16) / (int)width * p & mask) << 2 * plane;
        }
        bits[i] = plane ? bits[i] | part : part;
      }
      row += width;
    }
  } else {
    alignas(64) int32_t wide[D] = {};
    for (int plane = 0; plane < planes(BITS); ++plane) {
      const int p = plane_bits(BITS, plane);
      const int64_t width = D * p / 8;
      for (int64_t c = 0; c < D; ++c) wide[c] |= (row[c % width] >> c / width * p & ((1 << p) - 1)) << 2 * plane;
      row += width;
    }
    EACH(i, BLOCKS) std::memcpy(&bits[i], wide + i * 16, 64);
  }
  EACH(i, BLOCKS) x[i] = __builtin_convertvector(bits[i], v16);
}

template <class F> INLINE inline void with_bits(int64_t bits, F &&f) {
  switch (bits) {
  case 2: return f(std::integral_constant<int, 2>{});
  case 3: return f(std::integral_constant<int, 3>{});
  case 4: return f(std::integral_constant<int, 4>{});
  default: return f(std::integral_constant<int, 8>{});
  }
}

// -- products -------------------------------------------------------------------------------------------------------------

// `f` is called with a number of queries as a constant, and the first of them, until there were `group`
template <class F> INLINE inline void chunks(int64_t group, F &&f) {
  for (int64_t lo = 0; lo < group; lo += MOST) {
    int64_t n = std::min<int64_t>(MOST, group - lo);
    if (n == 1) f(std::integral_constant<int, 1>{}, lo);
    if constexpr (MOST > 1) {
      if (n == 2) f(std::integral_constant<int, 2>{}, lo);
      if (n == 3) f(std::integral_constant<int, 3>{}, lo);
    }
    if constexpr (MOST > 3)
      if (n == 4) f(std::integral_constant<int, 4>{}, lo);
  }
}

// logits of `n` tokens for G queries: out[g * span + t]; `row(t, x)` gives a token's key
template <int G, class Row> INLINE inline void dots(const float *q, int64_t n, float *out, int64_t span, Row row) {
  for (int64_t t = 0; t < n; t += 8) {
    v16 half[2][G];
    EACH(h, 2) {
      v16 sum[G][4];
      EACH(j, 4) {
        v16 x[BLOCKS];
        row(std::min(t + h * 4 + j, n - 1), x);
        EACH(g, G) {
          sum[g][j] = load(q + g * D) * x[0];
          EACH(i, BLOCKS - 1) sum[g][j] += load(q + g * D + i * 16 + 16) * x[i + 1];
        }
      }
      EACH(g, G) half[h][g] = quarter(sum[g][0], sum[g][1], sum[g][2], sum[g][3]);
    }
    EACH(g, G) {
      v16 all = finish(half[0][g], half[1][g]);
      float *to = out + g * span + t;
      if (n - t >= 8)
        *reinterpret_cast<v8u *>(to) = SHUFFLE(all, all, 0, 1, 2, 3, 4, 5, 6, 7);
      else
        for (int64_t j = 0; j < n - t; ++j) to[j] = all[j];
    }
  }
}

// adds the values of `n` tokens, weighed by p[g * span + t], to G outputs
template <int G, class Row> INLINE inline void weigh(const float *p, int64_t span, int64_t n, float *out, Row row) {
  v16 sum[G][BLOCKS];
  EACH(g, G) EACH(i, BLOCKS) sum[g][i] = load(out + g * D + i * 16);
  for (int64_t t = 0; t < n; ++t) {
    v16 x[BLOCKS];
    row(t, x);
    EACH(g, G) EACH(i, BLOCKS) sum[g][i] += p[g * span + t] * x[i];
  }
  EACH(g, G) EACH(i, BLOCKS) save(out + g * D + i * 16, sum[g][i]);
}

// exp(x) for x <= 0, relative error below 2e-7
inline v16 exponential(v16 x) {
  i16 n = __builtin_convertvector(x * 1.44269504f - 0.5f, i16);
  v16 whole = __builtin_convertvector(n, v16), r = x - whole * 0.693147182f;
  v16 p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  return x > -87.0f ? p * (v16)((n + 127) << 23) : v16{};
}

// logits in place as exp(logit - highest); `span` is a multiple of 16. Returns their sum
float softmax(float *row, int64_t span) {
  v16 top = load(row), total = {};
  for (int64_t i = 16; i < span; i += 16) top = load(row + i) > top ? load(row + i) : top;
  float highest = top[0];
  for (int i = 1; i < 16; ++i) highest = std::max(highest, top[i]);
  for (int64_t i = 0; i < span; i += 16) {
    v16 e = exponential(load(row + i) - highest);
    save(row + i, e);
    total += e;
  }
  float sum = 0;
  for (int i = 0; i < 16; ++i) sum += total[i];
  return sum;
}

// slots are read in several streams, too many and too short for the processor to guess
inline void fetch(const void *base, int64_t at, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch((const char *)base + at + i);
}

} // namespace

extern "C" {

// One pool of slots. Records and payload are flat over layers, sequences and heads; see store/pool.py.
struct Pool {
  int64_t slots;         // per head; the most that any has if `ragged`
  const int32_t *ragged; // [layers, batch, kv_heads] slots of each head, or null
  const int32_t *unit;   // ids
  float *score, *peak;   // collected attention, or null
};

// What is the same for all layers of a step.
struct Args {
  int64_t batch, kv_heads, query_heads, groups, window, sinks, origin, seen;
  const int64_t *rows;         // [4, batch]: first column behind the sinks, position - column, padding, evicted
  const int64_t *write;        // [layers, batch, kv_heads] slot that the token goes to
  const void *sink_k, *sink_v; // [layers, batch, kv_heads, sinks, dim]
  void *full_k, *full_v;       // [slots of all layers, window, dim]
  int64_t type;                // of full-precision tokens
  Pool full, coded;
  const uint8_t *k_code, *v_code; // null: there are no codes
  const void *k_scale, *k_zero, *v_scale, *v_zero, *super;
  int64_t meta, key_bits, value_bits, value_group, k_bytes, v_bytes; // bytes: of a packed row
  const float *fine, *coarse; // rotary tables: [.., dim] of single positions, [.., dim] of multiples of COARSE from -COARSE on
};
}

namespace {

int64_t first_slot(const Pool &p, int64_t at) {
  if (!p.ragged) return at * p.slots;
  int64_t sum = 0;
  for (int64_t i = 0; i < at; ++i) sum += p.ragged[i];
  return sum;
}

// `n` scales and zeros from number `at` on; what uint8 ones count is in `super`: steps of both, origin of the zeros between
void meta(int64_t type, const void *scale, const void *zero, int64_t at, int64_t n, const uint16_t *super, float *s, float *z) {
  with_type(type, [&](auto type) {
    float step = 1, origin = 0, zero_step = 1;
    if constexpr (type() == U8) step = load1<F16>(super, 0), origin = load1<F16>(super, 1), zero_step = load1<F16>(super, 2);
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) {
      save(s + i, load16<type()>(scale, at + i) * step);
      save(z + i, load16<type()>(zero, at + i) * zero_step + origin);
    }
    for (; i < n; ++i) {
      s[i] = load1<type()>(scale, at + i) * step;
      z[i] = load1<type()>(zero, at + i) * zero_step + origin;
    }
  });
}

// The queries of one KV head of one sequence, and their logits: rows of `span` numbers.
struct Queries {
  int64_t group, span;

  template <int TYPE> static INLINE void dense(const void *base, int64_t token, v16 *x) {
    fetch(base, token * D * SIZE[TYPE] + NEAR, D * SIZE[TYPE]);
    EACH(i, BLOCKS) x[i] = load16<TYPE>(base, token * D + i * 16);
  }

  template <int TYPE> void dense_logits(const float *q, const void *base, int64_t at, int64_t n, float *out) const {
    chunks(group, [&](auto size, int64_t lo) {
      dots<size()>(q + lo * D, n, out + lo * span, span, [&](int64_t t, v16 *x) INLINE { dense<TYPE>(base, at + t, x); });
    });
  }

  template <int TYPE> void dense_values(const float *p, const void *base, int64_t at, int64_t n, float *out) const {
    chunks(group, [&](auto size, int64_t lo) {
      weigh<size()>(p + lo * span, span, n, out + lo * D, [&](int64_t t, v16 *x) INLINE { dense<TYPE>(base, at + t, x); });
    });
  }

  // adds the values of `n` coded tokens, weighed by `weight`, which is spoilt; `sum` [group, D] is scratch
  template <int BITS>
  void weigh_codes(float *weight, int64_t n, const uint8_t *code, int64_t bytes, int64_t channels, const float *scale,
                   const float *zero, float *sum, float *out) const {
    const int64_t per = D / channels;
    if (per == 1) { // one scale per token: it goes into the weight, and all that zeros add is one number
      for (int64_t g = 0; g < group; ++g) {
        float *e = weight + g * span, rest = 0;
        for (int64_t t = 0; t < n; ++t) rest += e[t] * zero[t], e[t] *= scale[t];
        EACH(i, BLOCKS) save(out + g * D + i * 16, load(out + g * D + i * 16) + rest);
      }
      std::fill(sum, sum + group * D, 0.0f);
      chunks(group, [&](auto size, int64_t lo) {
        weigh<size()>(weight + lo * span, span, n, sum + lo * D, [&](int64_t t, v16 *x) INLINE {
          __builtin_prefetch(code + t * bytes + NEAR);
          codes<BITS>(code + t * bytes, x);
        });
      });
      for (int64_t g = 0; g < group; ++g)
        EACH(i, BLOCKS) {
          float *to = out + g * D + i * 16;
          save(to, load(to) + load(sum + g * D + i * 16) * (1 / factor<BITS>(i)));
        }
      return;
    }
    chunks(group, [&](auto size, int64_t lo) {
      weigh<size()>(weight + lo * span, span, n, out + lo * D, [&](int64_t t, v16 *x) INLINE {
        codes<BITS>(code + t * bytes, x);
        EACH(i, BLOCKS) x[i] *= 1 / factor<BITS>(i);
        if (channels % 16 == 0) {
          EACH(i, BLOCKS) {
            int64_t k = t * per + i * 16 / channels;
            x[i] = x[i] * scale[k] + zero[k];
          }
          return;
        }
        float row[D];
        EACH(i, BLOCKS) save(row + i * 16, x[i]);
        for (int64_t i = 0; i < D; ++i) row[i] = row[i] * scale[t * per + i / channels] + zero[t * per + i / channels];
        EACH(i, BLOCKS) x[i] = load(row + i * 16);
      });
    });
  }
};

// One head's share of the pools.
struct Head : Queries {
  const Args &a;
  int64_t layer, b, h, w;
  std::vector<float> &logits;

  bool visible(int64_t column) const { return column >= a.rows[b] && column < a.seen; }

  // -- coded tokens

  const uint16_t *super(int64_t slot, int kind) const { return (const uint16_t *)a.super + slot * 6 + kind * 3; } // 0: of keys

  // the queries turned back to a window's first position, so that its keys need only be turned by their place in it
  void turn_back(int64_t position, const float *q, float *out) const {
    const float *lo = a.fine + (position & (COARSE - 1)) * D, *hi = a.coarse + ((position >> 8) + 1) * D;
    float c[H], s[H];
    for (int64_t i = 0; i < H; ++i) {
      c[i] = hi[i] * lo[i] - hi[H + i] * lo[H + i];
      s[i] = hi[H + i] * lo[i] + hi[i] * lo[H + i];
    }
    for (int64_t g = 0; g < group; ++g) {
      const float *x = q + g * D, *y = x + H;
      float *to = out + g * D;
      for (int64_t i = 0; i < H; ++i) {
        to[i] = x[i] * c[i] + y[i] * s[i];
        to[H + i] = y[i] * c[i] - x[i] * s[i];
      }
    }
  }

  // a decoded key turned by a row of the rotary table
  static INLINE void turn(v16 *x, const float *table) {
    if constexpr (D % 32 == 0) {
      EACH(i, BLOCKS / 2) {
        v16 c = load(table + i * 16), s = load(table + H + i * 16), a = x[i], b = x[i + BLOCKS / 2];
        x[i] = a * c - b * s;
        x[i + BLOCKS / 2] = b * c + a * s;
      }
    } else { // halves do not fill vectors
      float row[D];
      EACH(i, BLOCKS) save(row + i * 16, x[i]);
      for (int64_t i = 0; i < H; ++i) {
        float a = row[i], b = row[H + i];
        row[i] = a * table[i] - b * table[H + i];
        row[H + i] = b * table[i] + a * table[H + i];
      }
      EACH(i, BLOCKS) x[i] = load(row + i * 16);
    }
  }

  template <int BITS>
  void code_logits(const float *q, const int32_t *unit, int64_t at, int64_t slots, float *turned, float *out) const {
    const int64_t shift = a.rows[a.batch + b], size = D * SIZE[a.meta];
    alignas(64) float scale[D], zero[D];
    for (int64_t s = 0; s < slots; ++s) {
      fetch(a.k_code, (at + s + AHEAD) * w * a.k_bytes, w * a.k_bytes);
      fetch(a.k_scale, (at + s + AHEAD) * size, size);
      fetch(a.k_zero, (at + s + AHEAD) * size, size);
      if (unit[s] < 0) continue;
      turn_back(a.origin + unit[s] * w + shift, q, turned);
      meta(a.meta, a.k_scale, a.k_zero, (at + s) * D, D, super(at + s, 0), scale, zero);
      EACH(i, BLOCKS) save(scale + i * 16, load(scale + i * 16) * (1 / factor<BITS>(i)));
      const uint8_t *code = a.k_code + (at + s) * w * a.k_bytes;
      chunks(group, [&](auto size, int64_t lo) {
        dots<size()>(turned + lo * D, w, out + lo * span + s * w, span, [&](int64_t t, v16 *x) INLINE {
          codes<BITS>(code + t * a.k_bytes, x);
          EACH(i, BLOCKS) x[i] = x[i] * load(scale + i * 16) + load(zero + i * 16);
          turn(x, a.fine + t * D);
        });
      });
    }
  }

  // `p` is spoilt; `sum` [group, D] is scratch
  template <int BITS> void code_values(float *p, int64_t at, int64_t slots, float *scale, float *sum, float *out) const {
    const int64_t per = D / a.value_group, step = std::max<int64_t>(1, PIECE / w);
    for (int64_t s = 0; s < slots; s += step) {
      int64_t m = std::min(step, slots - s), n = m * w;
      float *zero = scale + n * per, *weight = p + s * w;
      const int64_t at_once = a.meta == U8 ? w : n; // tokens
      for (int64_t t = 0; t < n; t += at_once) {
        int64_t slot = at + s + t / w, i = t * per;
        meta(a.meta, a.v_scale, a.v_zero, slot * w * per, at_once * per, super(slot, 1), scale + i, zero + i);
      }
      const uint8_t *code = a.v_code + (at + s) * w * a.v_bytes;
      weigh_codes<BITS>(weight, n, code, a.v_bytes, a.value_group, scale, zero, sum, out);
    }
  }

  // -- units

  void hide(const int32_t *unit, int64_t count, float *row) const {
    for (int64_t s = 0; s < count; ++s) {
      int64_t first = a.origin + (int64_t)unit[s] * w;
      if (unit[s] >= 0 && visible(first) && visible(first + w - 1)) continue;
      for (int64_t t = 0; t < w; ++t)
        if (unit[s] < 0 || !visible(first + t))
          for (int64_t g = 0; g < group; ++g) row[g * span + s * w + t] = HIDDEN;
    }
  }

  // attention that units got: mean, or highest, over the query heads of the group that chooses together
  void collect(const Pool &p, int64_t at, int64_t count, const float *row, const float *norm) const {
    const float share = 1.0f / (group * (a.kv_heads / a.groups));
    for (int64_t s = 0; s < count; ++s) {
      float sum = 0, most = 0;
      for (int64_t g = 0; g < group; ++g) {
        float got = sum_of(row + g * span + s * w, w) * norm[g];
        sum += got;
        most = std::max(most, got);
      }
      if (p.score) p.score[at + s] += sum * share;
      if (p.peak) p.peak[at + s] = std::max(p.peak[at + s], most);
    }
  }

  void run(const float *q, const float *sink_q, const float *k, const float *v, float *out, float scaling, bool wanted) {
    const int64_t at = (layer * a.batch + b) * a.kv_heads + h;
    const int64_t choice = (layer * a.batch + b) * a.groups + h * a.groups / a.kv_heads; // the group that the head is in
    const int64_t full = a.full.ragged ? a.full.ragged[at] : a.full.slots;
    const int64_t coded = !a.k_code ? 0 : a.coded.ragged ? a.coded.ragged[at] : a.coded.slots;
    const int64_t full_at = first_slot(a.full, at), full_id = first_slot(a.full, choice);
    const int64_t code_at = first_slot(a.coded, at), code_id = choice == at ? code_at : first_slot(a.coded, choice);
    const int64_t used = a.sinks + (full + coded) * w, rest = 2 * (D / (a.k_code ? a.value_group : D)) * std::max(PIECE, w);
    span = (used + 15) / 16 * 16;
    logits.resize(group * (span + 4 * D + 1) + rest + 16);
    float *scaled = logits.data() + group * span, *scaled_sink = scaled + group * D, *turned = scaled_sink + group * D;
    float *sum = turned + group * D, *norm = sum + group * D, *scales = norm + group;
    float *l_sink = logits.data(), *l_full = l_sink + a.sinks, *l_code = l_full + full * w;
    for (int64_t i = 0; i < group * D; ++i) scaled[i] = q[i] * scaling, scaled_sink[i] = sink_q[i] * scaling, sum[i] = 0;
    const int32_t *full_unit = a.full.unit + full_id, *code_unit = coded ? a.coded.unit + code_id : nullptr;

    const int64_t token = (a.write[at] * w + (a.seen - 1 - a.origin) % w) * D; // the new one
    narrow(k, a.full_k, a.type, token);
    narrow(v, a.full_v, a.type, token);

    with_type(a.type, [&](auto type) {
      dense_logits<type()>(scaled_sink, a.sink_k, at * a.sinks, a.sinks, l_sink);
      dense_logits<type()>(scaled, a.full_k, full_at * w, full * w, l_full);
    });
    if (coded)
      with_bits(a.key_bits, [&](auto bits) { code_logits<bits()>(scaled, code_unit, code_at, coded, turned, l_code); });
    hide(full_unit, full, l_full);
    hide(code_unit, coded, l_code);
    for (int64_t g = 0; g < group; ++g) {
      float *row = l_sink + g * span;
      for (int64_t s = std::max<int64_t>(0, a.seen - a.rows[2 * a.batch + b]); s < a.sinks; ++s) row[s] = HIDDEN;
      std::fill(row + used, row + span, HIDDEN);
      norm[g] = 1 / softmax(row, span);
    }
    if (wanted) {
      collect(a.full, full_id, full, l_full, norm);
      collect(a.coded, code_id, coded, l_code, norm);
    }
    with_type(a.type, [&](auto type) {
      dense_values<type()>(l_sink, a.sink_v, at * a.sinks, a.sinks, sum);
      dense_values<type()>(l_full, a.full_v, full_at * w, full * w, sum);
    });
    if (coded)
      with_bits(a.value_bits, [&](auto bits) { code_values<bits()>(l_code, code_at, coded, scales, turned, sum); });
    for (int64_t g = 0; g < group; ++g)
      for (int64_t i = 0; i < D; ++i) out[g * D + i] = sum[g * D + i] * norm[g];
  }
};

} // namespace

// q, sink_q (what sinks see instead of q), out: [batch, query_heads, dim]; k, v: [batch, kv_heads, dim].
extern "C" void qevict_decode(const Args *a, int64_t layer, const float *q, const float *sink_q, const float *k, const float *v,
                              float *out, float scaling, bool wanted) {
  thread_local std::vector<float> scratch;
  const int64_t group = a->query_heads / a->kv_heads;
  for (int64_t i = 0; i < a->batch * a->kv_heads; ++i) {
    const int64_t at = i * group * D;
    Head{{group, 0}, *a, layer, i / a->kv_heads, i % a->kv_heads, a->window, scratch}.run(
        q + at, sink_q + at, k + i * D, v + i * D, out + at, scaling, wanted);
  }
}

// -- a store that keeps every token ----------------------------------------------------------------------------------------

extern "C" {

// Rows of all heads of a layer; from one sequence, or KV head, to the next it is so many numbers.
struct Rows {
  const void *data;
  int64_t batch, head;
};

// Tokens in a row, keys or values. See store/stream.py.
struct Run {
  int64_t count, bits; // bits: of codes; 0: tokens are in full
  int64_t type;        // of tokens in full; of scales and zeros
  int64_t shared;      // neighbouring tokens (keys) or channels (values) that have one scale and zero
  Rows rows, scale, zero;
  Rows channel; // fp16 that a decoded value's channels are multiplied by, or null
};
}

namespace {

// One head's share of the runs.
struct Whole : Queries {
  int64_t b, h;
  std::vector<float> &scratch;

  const void *start(const Rows &rows, int64_t type) const {
    return (const char *)rows.data + (b * rows.batch + h * rows.head) * SIZE[type];
  }

  // a scale is the same for all tokens of a group: it goes into the queries, and all that zeros add is one number
  template <int BITS> void code_logits(const float *q, const Run &run, float *scaled, float *out) const {
    const void *scales = start(run.scale, run.type), *zeros = start(run.zero, run.type);
    const uint8_t *code = (const uint8_t *)start(run.rows, U8);
    constexpr int64_t bytes = D * BITS / 8;
    alignas(64) float scale[D], zero[D];
    for (int64_t s = 0; s < run.count; s += run.shared) {
      const int64_t n = std::min(run.shared, run.count - s);
      meta(run.type, scales, zeros, s / run.shared * D, D, nullptr, scale, zero);
      EACH(i, BLOCKS) save(scale + i * 16, load(scale + i * 16) * (1 / factor<BITS>(i)));
      for (int64_t i = 0; i < group * D; ++i) scaled[i] = q[i] * scale[i % D];
      chunks(group, [&](auto size, int64_t lo) {
        dots<size()>(scaled + lo * D, n, out + lo * span + s, span, [&](int64_t t, v16 *x) INLINE {
          __builtin_prefetch(code + (s + t) * bytes + NEAR);
          codes<BITS>(code + (s + t) * bytes, x);
        });
      });
      for (int64_t g = 0; g < group; ++g) {
        float rest = 0, *row = out + g * span + s;
        for (int64_t i = 0; i < D; ++i) rest += q[g * D + i] * zero[i];
        for (int64_t t = 0; t < n; ++t) row[t] += rest;
      }
    }
  }

  // `p` is spoilt; `part` and `sum` [group, D] are scratch
  template <int BITS> void code_values(float *p, const Run &run, float *scale, float *part, float *sum, float *out) const {
    const void *scales = start(run.scale, run.type), *zeros = start(run.zero, run.type);
    const uint8_t *code = (const uint8_t *)start(run.rows, U8);
    const int64_t per = D / run.shared, bytes = D * BITS / 8;
    std::fill(part, part + group * D, 0.0f);
    for (int64_t s = 0; s < run.count; s += PIECE) {
      const int64_t n = std::min(PIECE, run.count - s);
      meta(run.type, scales, zeros, s * per, n * per, nullptr, scale, scale + n * per);
      weigh_codes<BITS>(p + s, n, code + s * bytes, bytes, run.shared, scale, scale + n * per, sum, part);
    }
    const void *channel = run.channel.data ? start(run.channel, F16) : nullptr;
    for (int64_t i = 0; i < group * D; ++i) out[i] += part[i] * (channel ? load1<F16>(channel, i % D) : 1);
  }

  void run(const float *q, const Run *keys, const Run *values, int64_t runs, float *out, float *mass, float scaling) {
    int64_t used = 0, per = 1;
    for (int64_t i = 0; i < runs; ++i) {
      used += keys[i].count;
      if (values[i].bits) per = std::max(per, D / values[i].shared);
    }
    span = (used + 15) / 16 * 16;
    scratch.resize(group * (span + 4 * D) + 2 * per * PIECE + 16);
    float *logits = scratch.data(), *scaled = logits + group * span, *other = scaled + group * D, *part = other + group * D;
    float *sum = part + group * D, *scales = sum + group * D;
    for (int64_t i = 0; i < group * D; ++i) scaled[i] = q[i] * scaling, sum[i] = 0;

    float *to = logits;
    for (const Run *r = keys; r < keys + runs; to += r++->count)
      if (r->bits)
        with_bits(r->bits, [&](auto bits) { code_logits<bits()>(scaled, *r, other, to); });
      else
        with_type(r->type, [&](auto type) { dense_logits<type()>(scaled, start(r->rows, type()), 0, r->count, to); });
    if (mass) std::fill(mass, mass + used, 0.0f);
    for (int64_t g = 0; g < group; ++g) {
      float *row = logits + g * span;
      std::fill(row + used, row + span, HIDDEN);
      const float norm = 1 / softmax(row, span);
      for (int64_t t = 0; t < used; ++t) row[t] *= norm;
      for (int64_t t = 0; mass && t < used; ++t) mass[t] += row[t] * (1.0f / group);
    }
    to = logits;
    for (const Run *r = values; r < values + runs; to += r++->count)
      if (r->bits)
        with_bits(r->bits, [&](auto bits) { code_values<bits()>(to, *r, scales, part, other, sum); });
      else
        with_type(r->type, [&](auto type) { dense_values<type()>(to, start(r->rows, type()), 0, r->count, sum); });
    std::memcpy(out, sum, group * D * 4);
  }
};

} // namespace

// All tokens of a layer's sequences, in equally many runs of keys and of values, that may be cut elsewhere. q, out: [batch,
// query_heads, dim]; mass: [batch, kv_heads, tokens] mean attention of a KV head's queries, or null.
extern "C" void qevict_attend(int64_t batch, int64_t kv_heads, int64_t query_heads, const Run *keys, const Run *values,
                              int64_t runs, const float *q, float *out, float *mass, float scaling) {
  thread_local std::vector<float> scratch;
  const int64_t group = query_heads / kv_heads;
  int64_t tokens = 0;
  for (int64_t i = 0; i < runs; ++i) tokens += keys[i].count;
  for (int64_t i = 0; i < batch * kv_heads; ++i)
    Whole{{group, 0}, i / kv_heads, i % kv_heads, scratch}.run(
        q + i * group * D, keys, values, runs, out + i * group * D, mass ? mass + i * tokens : nullptr, scaling);
}
