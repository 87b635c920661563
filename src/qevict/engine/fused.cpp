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
constexpr int64_t COARSE = 256; // positions per row of the coarse rotary table
constexpr float HIDDEN = -1e30f; // logit of a token that is not seen; finite, because the flags let the compiler ignore infinities

typedef float v16 __attribute__((vector_size(64)));
typedef float v16u __attribute__((vector_size(64), aligned(4), may_alias));

inline v16 load(const float *p) { return *reinterpret_cast<const v16u *>(p); }
inline void save(float *p, v16 x) { *reinterpret_cast<v16u *>(p) = x; }

inline float total(v16 x) {
#ifdef __AVX512F__
  return _mm512_reduce_add_ps((__m512)x);
#else
  float s = 0;
  for (int i = 0; i < 16; ++i) s += x[i];
  return s;
#endif
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

// codes of one row, in bit planes (store/codec.py), as floats
inline void unpack(const uint8_t *row, int64_t bits, int64_t dim, float *out) {
  if (bits == 3) {
    int64_t low = dim / 4, high = dim / 8;
    for (int64_t r = 0; r < 4; ++r)
      for (int64_t j = 0; j < low; ++j) out[r * low + j] = (row[j] >> (2 * r)) & 3;
    for (int64_t r = 0; r < 8; ++r)
      for (int64_t j = 0; j < high; ++j) out[r * high + j] += ((row[low + j] >> r) & 1) * 4;
    return;
  }
  int64_t runs = 8 / bits, width = dim / runs;
  uint8_t mask = (1 << bits) - 1;
  for (int64_t r = 0; r < runs; ++r)
    for (int64_t j = 0; j < width; ++j) out[r * width + j] = (row[j] >> (r * bits)) & mask;
}

int64_t first_slot(const Pool &p, const Args &a, int64_t b, int64_t h, bool grouped) {
  int64_t heads = grouped ? a.groups : a.kv_heads, at = (a.layer * a.batch + b) * heads + h;
  if (!p.ragged) return at * p.slots;
  int64_t sum = 0;
  for (int64_t i = 0; i < at; ++i) sum += p.ragged[i];
  return sum;
}

template <int BLOCKS> struct Head {
  static constexpr int64_t D = BLOCKS * 16;
  const Args &a;
  int64_t b, h, group, span; // span: tokens of a row of logits
  std::vector<float> &logits, &tile, &turned;

  bool visible(int64_t column) const { return column >= a.rows[b] && column < a.seen; }

  void dots(const float *q, const float *rows, int64_t n, float *out) const {
    for (int64_t g = 0; g < group; ++g) {
      v16 query[BLOCKS];
      for (int i = 0; i < BLOCKS; ++i) query[i] = load(q + g * D + i * 16);
      for (int64_t t = 0; t < n; ++t) {
        v16 sum = query[0] * load(rows + t * D);
        for (int i = 1; i < BLOCKS; ++i) sum += query[i] * load(rows + t * D + i * 16);
        out[g * span + t] = total(sum) * a.scaling;
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
    for (int64_t i = 0; i < H; ++i) {
      float c = hi[i] * lo[i] - hi[H + i] * lo[H + i], s = hi[H + i] * lo[i] + hi[i] * lo[H + i];
      for (int64_t g = 0; g < group; ++g) {
        float x = q[g * D + i], y = q[g * D + H + i];
        turned[g * D + i] = x * c + y * s;
        turned[g * D + H + i] = y * c - x * s;
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
      unpack(a.k_code + (slot * a.window + t) * a.k_bytes, a.key_bits, D, row);
      const float *c = a.fine + t * D, *s = c + H;
      for (int64_t i = 0; i < H; ++i) {
        float x = row[i] * scale[i] + zero[i], y = row[H + i] * scale[H + i] + zero[H + i];
        out[i] = x * c[i] - y * s[i];
        out[H + i] = y * c[i] + x * s[i];
      }
    }
  }

  void values(int64_t slot) {
    int64_t per = D / a.value_group;
    float scale[D], zero[D];
    for (int64_t t = 0; t < a.window; ++t) {
      float *out = tile.data() + t * D;
      int64_t at = (slot * a.window + t) * per;
      meta(a.v_scale, at, per, slot, 1, false, scale);
      meta(a.v_zero, at, per, slot, 1, true, zero);
      unpack(a.v_code + (slot * a.window + t) * a.v_bytes, a.value_bits, D, out);
      for (int64_t j = 0; j < per; ++j)
        for (int64_t i = j * a.value_group; i < (j + 1) * a.value_group; ++i) out[i] = out[i] * scale[j] + zero[j];
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
    tile.resize(std::max(TILE, w) * D);
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
      int64_t id = a.coded.unit[code_id + s];
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
  thread_local std::vector<float> logits, tile, turned, mean, high;
  int64_t stride = a.full.slots + (a.k_code ? a.coded.slots : 0);
  mean.resize(a.kv_heads * stride);
  high.resize(a.kv_heads * stride);
  for (int64_t b = 0; b < a.batch; ++b) {
    for (int64_t h = 0; h < a.kv_heads; ++h)
      Head<BLOCKS>{a, b, h, a.query_heads / a.kv_heads, 0, logits, tile, turned}.run(mean.data() + h * stride, high.data() + h * stride);
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
