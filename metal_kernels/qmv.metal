// y = residual + W n, n = T(norm_weight * T(x * rsqrt(mean(x^2) + eps))) or x, W (N, K) quantized:
// R rows of x, 1 to 8, through one read of W. Norm and residual are optional.
//
// Thread t of a threadgroup owns values t V to t V + V - 1 of K, so its G simdgroups span K. It
// keeps its R * V values of n in registers, each already multiplied by what masking a code in place
// costs, and runs down the threadgroup's rows of W, U at a time: one wide load of V codes (16 bytes
// at 4 and 8 bits), a scale and a bias a row. The next U rows are on their way meanwhile, the first
// U while the norm is computed. The U * R sums meet over 32 lanes in one fold, whose lane a ends
// with sum a, and over simdgroups in threadgroup memory, once at the end. Threads past K and rows
// past the last read again what a neighbour reads, and nothing comes of it.
//
// fp32 sums. n rounds as mx.fast.rms_norm does; the result rounds once, after the residual, where
// MLX rounds before it too.
//
// Floor: N * K * (BITS + 32 / GROUP) / 8 bytes (16-bit scale and bias), R * (K + 2 N) * sizeof(T)
// beside them: 14.2 MB at K = 2048, N = 12352, 4 bits in groups of 64: 23 us at 614 GB/s, in one
// launch where MLX takes two, or three with a residual.
#include <metal_stdlib>
using namespace metal;
#include "common/dequant.h"

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

// A thread's part of U rows of W, from row on.
template <typename S, int U, int W, int CHUNKS, int GROUPS>
struct Rows {
  Words<W> codes[U];
  S scale[U], bias[U];
  void load(const device Words<W>* w, const device S* s, const device S* b, int row, int last) {
    UNROLL for (int u = 0; u < U; u++) {
      const size_t at = min(row + u, last);
      codes[u] = w[at * CHUNKS];
      scale[u] = s[at * GROUPS];
      bias[u] = b[at * GROUPS];
    }
  }
};

template <typename T, typename S, int BITS, int GROUP, bool FP, int K, int R, int V, bool NORM,
          bool ADD>
[[kernel]] void qmv(
    const device T* x [[buffer(0)]],
    const device uint* w [[buffer(1)]],
    const device S* scales [[buffer(2)]],
    const device S* biases [[buffer(3)]],
    const device T* gain [[buffer(4)]],
    const constant float* eps [[buffer(5)]],
    const device T* residual [[buffer(6)]],
    const constant int* outputs [[buffer(7)]],
    device T* y [[buffer(8)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint3 groups [[threadgroups_per_grid]],
    uint t [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint simd [[simdgroup_index_in_threadgroup]]) {
  constexpr int W = V * BITS / 32, CHUNKS = K / V, G = (CHUNKS + 31) / 32;
  constexpr int U = R > 4 ? 2 : 4, A = R == 1 ? 4 : R == 2 ? 8 : 16;
  threadgroup float squares[R][G], partial[G][(G * R > 128 ? 16 : 32) * R];
  const int N = outputs[0], share = int(groups.x) * U, each = (N + share - 1) / share * U;
  const int begin = int(group.x) * each, end = min(N, begin + each);

  const int c = min(int(t), CHUNKS - 1);
  const device Words<W>* codes = (const device Words<W>*)w + c;
  const device S* s = scales + c * V / GROUP;
  const device S* b = biases + c * V / GROUP;
  Rows<S, U, W, CHUNKS, K / GROUP> next;
  next.load(codes, s, b, begin, end - 1);

  float n[R][V], total[R], sums[A];
  const bool mine = K % (32 * V) == 0 || int(t) < CHUNKS;
  UNROLL for (int r = 0; r < R; r++) {
    total[r] = 0.0f;
    UNROLL for (int j = 0; j < V; j += 4) {
      const float4 v = load4(x + r * K + c * V + j) * (mine ? 1.0f : 0.0f);
      n[r][j] = v.x, n[r][j + 1] = v.y, n[r][j + 2] = v.z, n[r][j + 3] = v.w;
      total[r] += dot(v, v);
    }
    if (NORM) {
      total[r] = simd_sum(total[r]);
      if (lane == 0) squares[r][simd] = total[r];
    }
  }
  if (NORM) threadgroup_barrier(mem_flags::mem_threadgroup);
  UNROLL for (int r = 0; r < R; r++) {
    float square = 0.0f;
    if (NORM) {
      for (int g = 0; g < G; g++) square += squares[r][g];
      square = precise::rsqrt(square / float(K) + eps[0]);
    }
    total[r] = 0.0f;
    UNROLL for (int j = 0; j < V; j++) {
      if (NORM) {
        const float4 v = load4(gain + c * V + j / 4 * 4);
        n[r][j] = float(T(v[j % 4] * float(T(n[r][j] * square))));
      }
      total[r] += n[r][j];
      n[r][j] *= code_unit<BITS, FP>(j);
    }
  }

  for (int i = begin; i < end; i += U) {
    const Rows<S, U, W, CHUNKS, K / GROUP> now = next;
    if (i + U < end) next.load(codes, s, b, i + U, end - 1);
    UNROLL for (int u = 0; u < U; u++) {
      float sum[R] = {0.0f};
      UNROLL for (int j = 0; j < V; j++) {
        const float q = code<BITS, FP>(now.codes[u], j);
        UNROLL for (int r = 0; r < R; r++) sum[r] += q * n[r][j];
      }
      UNROLL for (int r = 0; r < R; r++) {
        sums[u * R + r] = group_scale<GROUP, FP>(now.scale[u]) * sum[r];
        if (!FP) sums[u * R + r] += float(now.bias[u]) * total[r];
      }
    }
    UNROLL for (int a = U * R; a < A; a++) sums[a] = 0.0f;
    const float sum = fold<A>(sums, lane);
    if (lane < U * R) partial[simd][(i - begin) * R + lane] = sum;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int a = t; a < (end - begin) * R; a += 32 * G) {
    float sum = 0.0f;
    for (int g = 0; g < G; g++) sum += partial[g][a];
    const size_t at = size_t(a % R) * N + begin + a / R;
    if (ADD) sum += float(residual[at]);
    y[at] = T(sum);
  }
}
