// Attention of L new tokens over a slice of the keys and values: for each query row of the slice
// the largest score, the sum of exp(score - largest), and the sum of exp(score - largest) *
// value. attn_merge makes the result of all slices.
//
// A threadgroup (SG simdgroups) owns a slice of at most N positions of one key head, for R query
// rows at once: G heads share a key head, times L tokens (row l * G + g), in as few blocks of
// rows as M a block, at most 8, allow: up to M rows, each key and value is read once. The
// positions that lengths[b] counts are dealt evenly over the grid's slices.
// 1. Scores: P lanes span a key, 4 values a lane a load; a simdgroup takes TOK * 32 / P positions
//    at a time while the next are on their way. Their RP * TOK sums meet over the P lanes in one
//    fold, which leaves sum a with lane a.
// 2. Softmax: a simdgroup a row, in threadgroup memory. Token l sees lengths[b] - L + 1 + l
//    positions.
// 3. Values: as keys, 4 positions at a time, R * D sums over the simdgroup's registers; then W
//    rows at a time through threadgroup memory over simdgroups.
//
// k and v are views of a cache's buffer: any strides, but the D values of a position side by
// side, aligned to 4. fp32 throughout; exp of a masked score is 0 exactly.
//
// Floor: 2 * HK * S * D * sizeof(T) bytes: 8.4 MB at S = 4096, HK = 2, D = 256, 14 us at 614
// GB/s. Scratch beside it: R * D floats a slice, written and read once.
#include <metal_stdlib>
using namespace metal;
#define UNROLL _Pragma("unroll")

// Sums of v over segments of P lanes: lane l ends with that of v[l % A]; A <= P, powers of 2.
template <int A, int P>
inline float fold(thread float* v, uint lane) {
  UNROLL for (int k = 1; k < 6; k++) {
    const int n = A >> k;
    UNROLL for (int i = 0; i < A / 2; i++) {
      if (i >= n) continue;
      const float a = v[i], b = v[i + n];
      v[i] = (lane & n ? b : a) + simd_shuffle_xor(lane & n ? a : b, n);
    }
  }
  UNROLL for (int n = A; n < P; n *= 2) v[0] += simd_shuffle_xor(v[0], n);
  return v[0];
}

template <typename T, int D, int G, int L, int M, int SG, int N>
[[kernel]] void attn_split(
    const device T* q [[buffer(0)]],
    constant int64_t* q_strides [[buffer(1)]],
    const device T* k [[buffer(2)]],
    constant int64_t* k_strides [[buffer(3)]],
    const device T* v [[buffer(4)]],
    constant int64_t* v_strides [[buffer(5)]],
    const constant int* lengths [[buffer(6)]],
    constant int* lengths_shape [[buffer(7)]],
    const constant float* scale [[buffer(8)]],
    device float* sums [[buffer(9)]],
    device float* stats [[buffer(10)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint3 groups [[threadgroups_per_grid]],
    uint t [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint simd [[simdgroup_index_in_threadgroup]]) {
  constexpr int ROWS = G * L, BLOCKS = (ROWS + M - 1) / M, R = (ROWS + BLOCKS - 1) / BLOCKS;
  constexpr int RP = R > 4 ? 8 : R > 2 ? 4 : R;
  constexpr int P = D > 64 ? 32 : 16, C = (D + 4 * P - 1) / (4 * P), SLOTS = 32 / P;
  constexpr int TOK = RP == 8 ? 2 : 4, A = RP * TOK, STEP = TOK * SLOTS;
  constexpr int PITCH = N + 4, TEAM = SG * SLOTS;  // the 4 spread rows over banks
  constexpr int W = R * PITCH > TEAM * D ? R * PITCH / (TEAM * D) : 1;  // rows that fit at the end
  threadgroup float4 shared[(R * PITCH > TEAM * D ? R * PITCH : TEAM * D) / 4];
  threadgroup float* scores = (threadgroup float*)shared;

  const int splits = groups.x, split = group.x, b = group.z;
  const int head = group.y / BLOCKS, first = group.y % BLOCKS * R;
  const int length = lengths[b % lengths_shape[0]], share = (length + splits - 1) / splits;
  const int begin = split * share, count = min(share, length - begin);
  const int slot = lane / P, chunk = lane % P;

  // Rows past the last repeat it, lanes past D the last values times 0.
  int d[C];
  float4 n[R][C];
  UNROLL for (int c = 0; c < C; c++) {
    d[c] = 4 * min(c * P + chunk, D / 4 - 1);
    UNROLL for (int r = 0; r < R; r++) {
      const int row = min(first + r, ROWS - 1);
      const device T* from = q + b * q_strides[0] + (head * G + row % G) * q_strides[1] +
          row / G * q_strides[2] + d[c];
      n[r][c] = float4(*(const device vec<T, 4>*)from) * (4 * (c * P + chunk) < D ? 1.0f : 0.0f);
    }
  }

  const device T* keys = k + b * k_strides[0] + head * k_strides[1] + begin * k_strides[2];
  const int64_t next_key = k_strides[2];
  vec<T, 4> next[TOK][C];
  for (int i = int(simd) * STEP - SG * STEP; i < count; i += SG * STEP) {
    vec<T, 4> now[TOK][C];
    UNROLL for (int u = 0; u < TOK; u++) {
      UNROLL for (int c = 0; c < C; c++) {
        now[u][c] = next[u][c];
        const int at = i + SG * STEP + u * SLOTS + slot;
        if (i + SG * STEP < count) {
          next[u][c] = *(const device vec<T, 4>*)(keys + min(at, count - 1) * next_key + d[c]);
        }
      }
    }
    if (i < 0) continue;
    float sum[A];
    UNROLL for (int u = 0; u < TOK; u++) {
      UNROLL for (int r = 0; r < RP; r++) {
        sum[u * RP + r] = 0.0f;
        if (r >= R) continue;
        UNROLL for (int c = 0; c < C; c++) sum[u * RP + r] += dot(n[r][c], float4(now[u][c]));
      }
    }
    const float score = fold<A, P>(sum, lane) * scale[0];
    const int r = chunk % RP, at = i + chunk / RP * SLOTS + slot;
    if (chunk < A && r < R && at < count) {
      const bool seen = L == 1 || begin + at <= length - L + (first + r) / G;
      scores[r * PITCH + at] = seen ? score : -INFINITY;
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  const size_t rows = size_t(b * int(groups.y) / BLOCKS + head) * ROWS + first;
  const int padded = (count + 4 * SLOTS - 1) / (4 * SLOTS) * (4 * SLOTS);
  for (int r = simd; r < R; r += SG) {
    threadgroup float* p = scores + r * PITCH;
    float most = -INFINITY, total = 0.0f;
    for (int i = lane; i < count; i += 32) most = max(most, p[i]);
    most = simd_max(most);
    for (int i = lane; i < padded; i += 32) {
      const float e = i < count && most > -INFINITY ? precise::exp(p[i] - most) : 0.0f;
      p[i] = e;
      total += e;
    }
    total = simd_sum(total);
    if (lane < 2 && first + r < ROWS) {
      stats[((rows + r) * 2 + lane) * splits + split] = lane == 0 ? most : total;
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  const device T* values = v + b * v_strides[0] + head * v_strides[1] + begin * v_strides[2];
  const int64_t next_value = v_strides[2];
  UNROLL for (int r = 0; r < R; r++) {
    UNROLL for (int c = 0; c < C; c++) n[r][c] = float4(0.0f);
  }
  for (int i = int(simd) * 4 * SLOTS; i < count; i += SG * 4 * SLOTS) {
    const int at = i + 4 * slot;
    vec<T, 4> x[4][C];
    UNROLL for (int u = 0; u < 4; u++) {
      UNROLL for (int c = 0; c < C; c++) {
        const device T* from = values + min(at + u, count - 1) * next_value + d[c];
        x[u][c] = *(const device vec<T, 4>*)from;
      }
    }
    UNROLL for (int u = 0; u < 4; u++) {  // outside, so that 8 floats of x are in registers, not 32
      UNROLL for (int r = 0; r < R; r++) {
        const float p = scores[r * PITCH + at + u];
        UNROLL for (int c = 0; c < C; c++) n[r][c] += p * float4(x[u][c]);
      }
    }
  }
  UNROLL for (int r = 0; r < R; r += W) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    UNROLL for (int w = 0; w < min(W, R - r); w++) {
      UNROLL for (int c = 0; c < C; c++) {
        const int at = ((w * SG + simd) * SLOTS + slot) * D + d[c];
        if (4 * (c * P + chunk) < D) shared[at / 4] = n[r + w][c];
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int i = t; i < min(W, min(R, ROWS - first) - r) * D / 4; i += 32 * SG) {
      const int w = i / (D / 4), j = i % (D / 4);
      float4 sum = float4(0.0f);
      for (int s = 0; s < TEAM; s++) sum += shared[(w * TEAM + s) * D / 4 + j];
      ((device float4*)sums)[((rows + r + w) * splits + split) * D / 4 + j] = sum;
    }
  }
}
