// What a thread does with V codes of a row of W, and how sums of 32 lanes meet. After dequant.h.
#pragma once

// W words from p as loads of vectors, not of words that a compiler may or may not join.
template <int W>
inline Words<W> fetch(const device Words<W>* p) {
  if (W % 4) return *p;
  Words<W> w;
  UNROLL for (int i = 0; i < W / 4; i++) {
    const uint4 v = ((const device uint4*)p)[i];
    w.at[4 * i] = v.x, w.at[4 * i + 1] = v.y, w.at[4 * i + 2] = v.z, w.at[4 * i + 3] = v.w;
  }
  return w;
}

// 16 bytes of T as one load; aligned to them.
template <typename T>
struct alignas(16) Wide {
  vec<T, 4> at[4 / sizeof(T)];
};

// n = V values at p times by; p must be aligned to 16 bytes.
template <int V, typename T>
inline void load(const device T* p, float by, thread float* n) {
  constexpr int N = 16 / sizeof(T);
  UNROLL for (int j = 0; j < V; j += N) {
    const Wide<T> wide = *(const device Wide<T>*)(p + j);
    UNROLL for (int i = 0; i < N; i += 4) {
      const float4 v = float4(wide.at[i / 4]) * by;
      n[j + i] = v.x, n[j + i + 1] = v.y, n[j + i + 2] = v.z, n[j + i + 3] = v.w;
    }
  }
}

// Sum of V codes' values times n, whose sum is total; n[j] holds code_unit(j) already.
template <int BITS, int GROUP, bool FP, int V, typename S, int W>
inline float part(Words<W> w, S scale, S bias, thread const float* n, float total) {
  float sum = 0.0f;
  UNROLL for (int j = 0; j < V; j++) sum += code<BITS, FP>(w, j) * n[j];
  sum *= group_scale<GROUP, FP>(scale);
  return FP ? sum : sum + float(bias) * total;
}

// v[0], ..., v[A - 1] of 32 lanes: lane l ends with the sum of v[l % A], A a power of 2.
template <int A>
inline float fold(thread float* v, uint lane) {
  UNROLL for (int k = 1; k < 6; k++) {
    const int n = A >> k;
    UNROLL for (int i = 0; i < A / 2; i++) {
      if (i >= n) continue;  // and not i < n above: a loop unrolls when its bounds are constants
      const float a = v[i], b = v[i + n];  // by value: a choice of index would put v in memory
      v[i] = (lane & n ? b : a) + simd_shuffle_xor(lane & n ? a : b, n);
    }
  }
  UNROLL for (int n = 1; n < 32; n *= 2) {
    if (n >= A) v[0] += simd_shuffle_xor(v[0], n);
  }
  return v[0];
}
