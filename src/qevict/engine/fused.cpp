// Decode attention of one layer over tiered storage, for one new token per sequence: store the token, logits over sinks, the
// full-precision pool and the coded pool, one softmax, values, attention collected per unit. No dense copy of coded tokens is made:
// a window is decoded into a tile that stays in the first-level cache. The layout is that of store/pool.py and store/codec.py; the
// meaning is that of engine/reference.py, which the tests hold it to.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>
#if defined(__AVX512F__) || defined(__F16C__)
#include <immintrin.h>
#endif

namespace {

constexpr int64_t TILE = 16;    // tokens of a full-precision tile
constexpr int64_t AHEAD = 6;    // windows, or tiles, whose memory is asked for before it is needed
constexpr int64_t COARSE = 256; // positions per row of the coarse rotary table
constexpr float HIDDEN = -1e30f; // logit of a token that is not seen; finite, because the flags let the compiler ignore infinities

typedef float v16 __attribute__((vector_size(64)));
typedef float v16u __attribute__((vector_size(64), aligned(4), may_alias));

inline v16 load(const float *p) { return *reinterpret_cast<const v16u *>(p); }
inline void save(float *p, v16 x) { *reinterpret_cast<v16u *>(p) = x; }

#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)

// lane sums of eight vectors, in order, in the first eight lanes
inline v16 totals(const v16 *x) {
  v16 pair[4], four[2];
  for (int i = 0; i < 4; ++i)
    pair[i] = SHUFFLE(x[2 * i], x[2 * i + 1], 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30) +
              SHUFFLE(x[2 * i], x[2 * i + 1], 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
  for (int i = 0; i < 2; ++i)
    four[i] = SHUFFLE(pair[2 * i], pair[2 * i + 1], 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
              SHUFFLE(pair[2 * i], pair[2 * i + 1], 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
  v16 eight = SHUFFLE(four[0], four[1], 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27) +
              SHUFFLE(four[0], four[1], 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
  return eight + SHUFFLE(eight, eight, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
}

inline float from_half(uint16_t h) {
  uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = (h >> 10) & 31, mantissa = h & 1023, bits;
  if (exponent == 0) {
    float f = std::ldexp((float)mantissa, -24);
    return sign ? -f : f;
  }
  bits = sign | (exponent == 31 ? 0x7f800000 | mantissa << 13 : (exponent + 112) << 23 | mantissa << 13);
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
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

inline float from_bf16(uint16_t h) {
  uint32_t bits = (uint32_t)h << 16;
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}

inline uint16_t to_bf16(float f) {
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  if (std::isnan(f)) return 0x7fc0;
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

enum { F32 = 0, F16 = 1, BF16 = 2, U8 = 3 };
constexpr int64_t SIZE[] = {4, 2, 2, 1};

// n numbers of a storage type, from element `at`, as floats
inline void widen(const void *base, int64_t type, int64_t at, float *out, int64_t n) {
  if (type == F32) {
    std::memcpy(out, (const float *)base + at, n * 4);
  } else if (type == F16) {
    const uint16_t *p = (const uint16_t *)base + at;
    int64_t i = 0;
#ifdef __AVX512F__
    for (; i + 16 <= n; i += 16) _mm512_storeu_ps(out + i, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(p + i))));
#elif defined(__F16C__)
    for (; i + 8 <= n; i += 8) _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p + i))));
#endif
    for (; i < n; ++i) out[i] = from_half(p[i]);
  } else if (type == BF16) {
    const uint16_t *p = (const uint16_t *)base + at;
    for (int64_t i = 0; i < n; ++i) out[i] = from_bf16(p[i]);
  } else {
    const uint8_t *p = (const uint8_t *)base + at;
    for (int64_t i = 0; i < n; ++i) out[i] = p[i];
  }
}

inline void narrow(const float *x, int64_t n, void *base, int64_t type, int64_t at) {
  if (type == F32) {
    std::memcpy((float *)base + at, x, n * 4);
  } else {
    uint16_t *p = (uint16_t *)base + at;
    for (int64_t i = 0; i < n; ++i) p[i] = type == F16 ? to_half(x[i]) : to_bf16(x[i]);
  }
}

// exp(x) for x <= 0, relative error below 2e-7; plain arithmetic, so that the compiler can vectorise loops over it
inline float exponential(float x) {
  x = std::max(x, -87.0f);
  float n = std::nearbyint(x * 1.44269504f);
  float r = x - n * 0.693359375f + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  int32_t bits = ((int32_t)n + 127) << 23;
  float scale;
  std::memcpy(&scale, &bits, 4);
  return p * scale;
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

struct Args {
  int64_t layer, batch, kv_heads, query_heads, groups, dim, window, sinks, origin, seen;
  float scaling;
  int64_t collect;
  const float *q, *sink_q, *k, *v; // [batch, heads, dim]; sink_q: what sinks see instead of q, or null
  float *out;                      // [batch, query_heads, dim]
  const int64_t *rows;             // [4, batch]: first column behind the sinks, position - column, padding, evicted
  const int64_t *write;            // [layers, batch, kv_heads] slot that the token goes to
  const void *sink_k, *sink_v;     // [batch, kv_heads, sinks, dim] of this layer
  void *full_k, *full_v;           // [slots of all layers, window, dim]
  int64_t type;                    // of full-precision tokens
  Pool full, coded;
  const uint8_t *k_code, *v_code;
  const void *k_scale, *k_zero, *v_scale, *v_zero, *super;
  int64_t meta, key_bits, value_bits, value_group, k_bytes, v_bytes; // bytes: of a packed row
  const float *fine, *coarse; // rotary tables: [COARSE, dim] of single positions, [.., dim] of multiples of COARSE from -COARSE on
};
}

namespace {

typedef uint8_t b16 __attribute__((vector_size(16)));
typedef uint8_t b16u __attribute__((vector_size(16), aligned(1), may_alias));
typedef int32_t i16 __attribute__((vector_size(64)));

// one plane of `BITS` bits of a row's codes, times `factor`, as floats; added to `out` if `ADD`
template <int64_t D, int BITS, bool ADD> inline void plane(const uint8_t *row, int factor, float *out) {
  constexpr int64_t width = D * BITS / 8;
  constexpr int mask = (1 << BITS) - 1;
  if constexpr (width % 16 == 0) {
    for (int64_t j = 0; j < width; j += 16) {
      i16 byte = __builtin_convertvector((b16) * (const b16u *)(row + j), i16);
#pragma GCC unroll 8
      for (int r = 0; r < 8 / BITS; ++r) {
        v16 code = __builtin_convertvector(((byte >> (r * BITS)) & mask) * factor, v16);
        float *to = out + r * width + j;
        save(to, ADD ? load(to) + code : code);
      }
    }
  } else {
    for (int r = 0; r < 8 / BITS; ++r)
      for (int64_t j = 0; j < width; ++j) {
        float code = ((row[j] >> (r * BITS)) & mask) * factor;
        out[r * width + j] = ADD ? out[r * width + j] + code : code;
      }
  }
}

// codes of one row, in bit planes (store/codec.py), as floats
template <int64_t D> inline void unpack(const uint8_t *row, int64_t bits, float *out) {
  switch (bits) {
  case 2: plane<D, 2, false>(row, 1, out); break;
  case 3: plane<D, 2, false>(row, 1, out), plane<D, 1, true>(row + D / 4, 4, out); break;
  case 4: plane<D, 4, false>(row, 1, out); break;
  default: plane<D, 8, false>(row, 1, out);
  }
}

int64_t first_slot(const Pool &p, const Args &a, int64_t b, int64_t h, bool grouped) {
  int64_t heads = grouped ? a.groups : a.kv_heads, at = (a.layer * a.batch + b) * heads + h;
  if (!p.ragged) return at * p.slots;
  int64_t sum = 0;
  for (int64_t i = 0; i < at; ++i) sum += p.ragged[i];
  return sum;
}

// slots are read in several streams, too many and too short for the processor to guess
inline void fetch(const void *base, int64_t at, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch((const char *)base + at + i);
}

template <int BLOCKS> struct Head {
  static constexpr int64_t D = BLOCKS * 16;
  const Args &a;
  int64_t b, h, group, span; // span: tokens of a row of logits
  std::vector<float> &logits, &tile, &turned, &scales;

  bool visible(int64_t column) const { return column >= a.rows[b] && column < a.seen; }

  void dots(const float *q, const float *rows, int64_t n, float *out) const {
    for (int64_t g = 0; g < group; ++g) {
      v16 query[BLOCKS];
      for (int i = 0; i < BLOCKS; ++i) query[i] = load(q + g * D + i * 16);
      for (int64_t t = 0; t < n; t += 8) {
        int64_t m = std::min<int64_t>(8, n - t);
        v16 sum[8];
#pragma GCC unroll 8
        for (int64_t j = 0; j < 8; ++j) {
          const float *row = rows + (t + j) * D; // a tile has room for a multiple of 8 rows
          sum[j] = query[0] * load(row);
#pragma GCC unroll 16
          for (int i = 1; i < BLOCKS; ++i) sum[j] += query[i] * load(row + i * 16);
        }
        v16 all = totals(sum) * a.scaling;
        std::memcpy(out + g * span + t, &all, m * sizeof(float));
      }
    }
  }

  void weigh(const float *p, const float *rows, int64_t n, float *out) const {
    for (int64_t g = 0; g < group; ++g) {
      v16 sum[BLOCKS];
      for (int i = 0; i < BLOCKS; ++i) sum[i] = load(out + g * D + i * 16);
      for (int64_t t = 0; t < n; ++t) {
        float w = p[g * span + t];
        for (int i = 0; i < BLOCKS; ++i) sum[i] += w * load(rows + t * D + i * 16);
      }
      for (int i = 0; i < BLOCKS; ++i) save(out + g * D + i * 16, sum[i]);
    }
  }

  // tokens in a row at full precision: `each(rows, first, n)` for every tile
  template <class F> void tiles(const void *base, int64_t at, int64_t count, F each) {
    for (int64_t lo = 0; lo < count; lo += TILE) {
      int64_t n = std::min(TILE, count - lo);
      fetch(base, (at + lo + AHEAD * TILE) * D * SIZE[a.type], TILE * D * SIZE[a.type]);
      widen(base, a.type, (at + lo) * D, tile.data(), n * D);
      each(tile.data(), lo, n);
    }
  }

  void meta(const void *base, int64_t at, int64_t n, int64_t slot, int64_t kind, bool zero, float *out) const {
    widen(base, a.meta, at, out, n);
    if (a.meta != U8) return;
    float s[3];
    widen(a.super, F16, slot * 6 + kind * 3, s, 3);
    for (int64_t i = 0; i < n; ++i) out[i] = zero ? out[i] * s[2] + s[1] : out[i] * s[0];
  }

  // the queries turned back to a window's first position, so that its keys need only be turned by their place in it
  void turn_back(int64_t position, const float *q) {
    const float *lo = a.fine + (position & (COARSE - 1)) * D, *hi = a.coarse + ((position >> 8) + 1) * D;
    constexpr int64_t H = D / 2;
    float c[H], s[H];
    for (int64_t i = 0; i < H; ++i) {
      c[i] = hi[i] * lo[i] - hi[H + i] * lo[H + i];
      s[i] = hi[H + i] * lo[i] + hi[i] * lo[H + i];
    }
    for (int64_t g = 0; g < group; ++g) {
      const float *x = q + g * D, *y = x + H;
      float *out = turned.data() + g * D;
      for (int64_t i = 0; i < H; ++i) {
        out[i] = x[i] * c[i] + y[i] * s[i];
        out[H + i] = y[i] * c[i] - x[i] * s[i];
      }
    }
  }

  void keys(int64_t slot) {
    float scale[D], zero[D];
    meta(a.k_scale, slot * D, D, slot, 0, false, scale);
    meta(a.k_zero, slot * D, D, slot, 0, true, zero);
    constexpr int64_t H = D / 2;
    for (int64_t t = 0; t < a.window; ++t) {
      float row[D], *out = tile.data() + t * D;
      unpack<D>(a.k_code + (slot * a.window + t) * a.k_bytes, a.key_bits, row);
      const float *c = a.fine + t * D, *s = c + H;
      for (int64_t i = 0; i < H; ++i) {
        float x = row[i] * scale[i] + zero[i], y = row[H + i] * scale[H + i] + zero[H + i];
        out[i] = x * c[i] - y * s[i];
        out[H + i] = y * c[i] + x * s[i];
      }
    }
  }

  void values(int64_t slot) {
    int64_t per = D / a.value_group, n = a.window * per;
    scales.resize(2 * n);
    float *scale = scales.data(), *zero = scale + n;
    meta(a.v_scale, slot * n, n, slot, 1, false, scale);
    meta(a.v_zero, slot * n, n, slot, 1, true, zero);
    for (int64_t t = 0; t < a.window; ++t) {
      float *out = tile.data() + t * D;
      unpack<D>(a.v_code + (slot * a.window + t) * a.v_bytes, a.value_bits, out);
      if (per == 1) {
        for (int64_t i = 0; i < D; ++i) out[i] = out[i] * scale[t] + zero[t];
        continue;
      }
      for (int64_t j = 0; j < per; ++j)
        for (int64_t i = j * a.value_group; i < (j + 1) * a.value_group; ++i) out[i] = out[i] * scale[t * per + j] + zero[t * per + j];
    }
  }

  // attention that each of `count` units gets: mean (and highest) over the query group
  void collect(const float *p, int64_t count, float *mean, float *high) const {
    for (int64_t s = 0; s < count; ++s) {
      float sum = 0, most = 0;
      for (int64_t g = 0; g < group; ++g) {
        float unit = 0;
        for (int64_t t = 0; t < a.window; ++t) unit += p[g * span + s * a.window + t];
        sum += unit;
        most = std::max(most, unit);
      }
      mean[s] = sum / group;
      high[s] = most;
    }
  }

  void run(float *mean, float *high) {
    int64_t w = a.window, full = a.full.ragged ? a.full.ragged[(a.layer * a.batch + b) * a.kv_heads + h] : a.full.slots;
    int64_t coded = a.k_code ? a.coded.slots : 0, grouped = h * a.groups / a.kv_heads;
    int64_t full_at = first_slot(a.full, a, b, h, false), full_id = first_slot(a.full, a, b, grouped, true);
    int64_t code_at = coded ? first_slot(a.coded, a, b, h, false) : 0, code_id = coded ? first_slot(a.coded, a, b, grouped, true) : 0;
    int64_t shift = a.rows[a.batch + b], pad = a.rows[2 * a.batch + b], sink_at = (b * a.kv_heads + h) * a.sinks;
    span = a.sinks + (full + coded) * w;
    logits.resize(group * span);
    tile.resize(std::max(TILE, (w + 7) / 8 * 8) * D);
    turned.resize(group * D);
    const float *q = a.q + (b * a.query_heads + h * group) * D, *sink_q = a.sink_q ? a.sink_q + (q - a.q) : q;
    float *out = a.out + (q - a.q), *l_full = logits.data() + a.sinks, *l_code = l_full + full * w;

    // the new token
    int64_t slot = a.write[(a.layer * a.batch + b) * a.kv_heads + h], inside = (a.seen - 1 - a.origin) % w;
    int64_t token = (b * a.kv_heads + h) * D;
    narrow(a.k + token, D, a.full_k, a.type, (slot * w + inside) * D);
    narrow(a.v + token, D, a.full_v, a.type, (slot * w + inside) * D);

    // logits
    tiles(a.sink_k, sink_at, a.sinks, [&](const float *rows, int64_t lo, int64_t n) { dots(sink_q, rows, n, logits.data() + lo); });
    tiles(a.full_k, full_at * w, full * w, [&](const float *rows, int64_t lo, int64_t n) { dots(q, rows, n, l_full + lo); });
    for (int64_t s = 0; s < coded; ++s) {
      int64_t id = a.coded.unit[code_id + s], next = code_at + s + AHEAD;
      fetch(a.k_code, next * w * a.k_bytes, w * a.k_bytes);
      fetch(a.k_scale, next * D * SIZE[a.meta], D * SIZE[a.meta]);
      fetch(a.k_zero, next * D * SIZE[a.meta], D * SIZE[a.meta]);
      if (id < 0) continue;
      turn_back(a.origin + id * w + shift, q);
      keys(code_at + s);
      dots(turned.data(), tile.data(), w, l_code + s * w);
    }
    auto hide = [&](float *row, const int32_t *unit, int64_t count) {
      for (int64_t s = 0; s < count; ++s) {
        int64_t first = a.origin + (int64_t)unit[s] * w;
        if (unit[s] >= 0 && visible(first) && visible(first + w - 1)) continue;
        for (int64_t t = 0; t < w; ++t)
          if (unit[s] < 0 || !visible(first + t)) row[s * w + t] = HIDDEN;
      }
    };
    for (int64_t g = 0; g < group; ++g) {
      float *row = logits.data() + g * span;
      for (int64_t s = 0; s < a.sinks; ++s)
        if (pad + s >= a.seen) row[s] = HIDDEN;
      hide(l_full + g * span, a.full.unit + full_id, full);
      if (coded) hide(l_code + g * span, a.coded.unit + code_id, coded);
      float top = HIDDEN, sum = 0;
      for (int64_t i = 0; i < span; ++i) top = std::max(top, row[i]);
      for (int64_t i = 0; i < span; ++i) {
        float e = row[i] <= HIDDEN ? 0.0f : exponential(row[i] - top);
        row[i] = e;
        sum += e;
      }
      float norm = 1 / sum;
      for (int64_t i = 0; i < span; ++i) row[i] *= norm;
    }

    // values
    std::fill(out, out + group * D, 0.0f);
    tiles(a.sink_v, sink_at, a.sinks, [&](const float *rows, int64_t lo, int64_t n) { weigh(logits.data() + lo, rows, n, out); });
    tiles(a.full_v, full_at * w, full * w, [&](const float *rows, int64_t lo, int64_t n) { weigh(l_full + lo, rows, n, out); });
    for (int64_t s = 0; s < coded; ++s) {
      int64_t next = code_at + s + AHEAD, per = w * (D / a.value_group) * SIZE[a.meta];
      fetch(a.v_code, next * w * a.v_bytes, w * a.v_bytes);
      fetch(a.v_scale, next * per, per);
      fetch(a.v_zero, next * per, per);
      if (a.coded.unit[code_id + s] < 0) continue;
      values(code_at + s);
      weigh(l_code + s * w, tile.data(), w, out);
    }
    if (a.collect) {
      collect(l_full, full, mean, high);
      collect(l_code, coded, mean + a.full.slots, high + a.full.slots);
    }
  }
};

// what single heads collected, as what their group did
void spread(const Args &a, const Pool &p, int64_t b, int64_t offset, int64_t stride, const float *mean, const float *high) {
  int64_t per = a.kv_heads / a.groups;
  for (int64_t g = 0; g < a.groups; ++g) {
    int64_t at = first_slot(p, a, b, g, true);
    int64_t slots = p.ragged ? p.ragged[(a.layer * a.batch + b) * a.kv_heads + g] : p.slots;
    for (int64_t s = 0; s < slots; ++s) {
      float sum = 0, most = 0;
      for (int64_t h = g * per; h < (g + 1) * per; ++h) {
        sum += mean[h * stride + offset + s];
        most = std::max(most, high[h * stride + offset + s]);
      }
      if (p.score) p.score[at + s] += sum / per;
      if (p.peak) p.peak[at + s] = std::max(p.peak[at + s], most);
    }
  }
}

template <int BLOCKS> void decode(const Args &a) {
  thread_local std::vector<float> logits, tile, turned, scales, mean, high;
  int64_t stride = a.full.slots + (a.k_code ? a.coded.slots : 0);
  mean.resize(a.kv_heads * stride);
  high.resize(a.kv_heads * stride);
  for (int64_t b = 0; b < a.batch; ++b) {
    for (int64_t h = 0; h < a.kv_heads; ++h)
      Head<BLOCKS>{a, b, h, a.query_heads / a.kv_heads, 0, logits, tile, turned, scales}.run(mean.data() + h * stride, high.data() + h * stride);
    if (!a.collect) continue;
    spread(a, a.full, b, 0, stride, mean.data(), high.data());
    if (a.k_code) spread(a, a.coded, b, a.full.slots, stride, mean.data(), high.data());
  }
}

} // namespace

extern "C" int qevict_decode(const Args *a) {
  switch (a->dim) {
  case 16: decode<1>(*a); return 0;
  case 32: decode<2>(*a); return 0;
  case 64: decode<4>(*a); return 0;
  case 80: decode<5>(*a); return 0;
  case 96: decode<6>(*a); return 0;
  case 128: decode<8>(*a); return 0;
  case 256: decode<16>(*a); return 0;
  }
  return 1;
}
