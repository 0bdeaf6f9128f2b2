// Weights as mx.quantize packs them: a little-endian stream of BITS-bit codes in 32-bit words, so
// V codes fill W = V * BITS / 32 words when that is whole (V = 32 always is). Affine: the value is
// scale * code + bias. mxfp4, nvfp4, mxfp8 (FP below): the value is scale * code, code a small
// float. Every loop over codes must be unrolled, so that words stay in registers: UNROLL.
#pragma once
#define UNROLL _Pragma("unroll")

// W words as one load, as wide as divides them; aligned to that.
template <int W>
struct alignas(W % 4 ? W % 2 ? 4 : 8 : 16) Words {
  uint at[W];
};

// Four values at p, which must be aligned to all four.
template <typename T>
inline float4 load4(const device T* p) {
  return float4(*(const device vec<T, 4>*)p);
}

// What to multiply the other factor by, once: code i is masked out of its word where it lies, 2^s
// too large, unless it straddles two words; FP's exponents lack a bias.
template <int BITS, bool FP>
inline float code_unit(int i) {
  const int s = i * BITS % 32;
  return FP ? BITS == 4 ? 16384.0f : 256.0f : s + BITS > 32 ? 1.0f : 1.0f / float(1u << s);
}

// Code i of w, divided by its code_unit: exact.
template <int BITS, bool FP, int W>
inline float code(Words<W> w, int i) {
  const int s = i * BITS % 32;
  const uint mask = (1u << BITS) - 1, c = w.at[i * BITS / 32];
  if (s + BITS > 32) return float((c >> s | w.at[i * BITS / 32 + 1] << (32 - s)) & mask);
  if (!FP) return float(c & mask << s);
  // Sign, exponent and mantissa of a half; all ones are e4m3's NaN.
  const uint m = c >> s & mask / 2, sign = (c >> s & mask - mask / 2) << (16 - BITS);
  return float(as_type<half>(ushort(BITS == 4 ? sign | m << 9 : sign | m << 7 | (m + 1) >> 7 << 14)));
}

// The scale of a group: T itself, or FP's byte, e4m3 for groups of 16 and a power of 2 for others.
template <int GROUP, bool FP, typename S>
inline float group_scale(S s) {
  if (!FP) return float(s);
  const Words<1> w = {uint(s)};
  if (GROUP == 16) return code<8, true>(w, 0) * 256.0f;
  return as_type<float>(w.at[0] ? w.at[0] << 23 : 0x400000u);
}
