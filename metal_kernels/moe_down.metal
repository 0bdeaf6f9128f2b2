// h = residual + sum over k of weights[k] * (act[k] @ down_k.T), of the K experts chosen for each
// row and, last, of the shared expert; down quantized, (D, F) an expert.
//
// The K + 1 products are one, over (K + 1) F values: a threadgroup owns U elements of a row of h,
// its thread t values t V to t V + V - 1, which all are of one expert. It reads that part of U rows
// of that expert's down: one wide load of codes (16 bytes at 4 and 8 bits), a scale, a bias each,
// and has its values of act times their weight in registers. The U sums meet over 32 lanes in one
// fold and over simdgroups in threadgroup memory. Threads past the end read again what a neighbour
// reads. Grid: (R, D / U) threadgroups; those of several rows that share weights start together.
//
// fp32 throughout, one rounding, after the residual. MLX-LM rounds each product, each product
// times its weight, the running sum over experts, and each of the last two sums.
//
// Floor: (K + 1) * D * F * (BITS + 32 / GROUP) / 8 bytes (16-bit scale and bias), and
// R * ((K + 1) F + 2 D) * sizeof(T): 5.3 MB at D = 2048, F = 512, K = 8, 4 bits in groups of 64:
// 8.6 us at 614 GB/s, in one launch where MLX takes 9.
#include <metal_stdlib>
using namespace metal;
#include "common/dequant.h"
#include "common/gemv.h"

template <typename T, typename S, int BITS, int GROUP, bool FP, int D, int F, int K, int V, int U>
[[kernel]] void moe_down(
    const device T* act [[buffer(0)]],
    const device uint* w [[buffer(1)]],
    const device S* scales [[buffer(2)]],
    const device S* biases [[buffer(3)]],
    const device uint* shared_w [[buffer(4)]],
    const device S* shared_scales [[buffer(5)]],
    const device S* shared_biases [[buffer(6)]],
    const device uint* experts [[buffer(7)]],
    const device float* weights [[buffer(8)]],
    const device T* residual [[buffer(9)]],
    device T* h [[buffer(10)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint t [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint simd [[simdgroup_index_in_threadgroup]]) {
  constexpr int W = V * BITS / 32, CHUNKS = F / V, GROUPS = F / GROUP;
  constexpr int ALL = (K + 1) * CHUNKS, G = (ALL + 31) / 32;
  threadgroup float partial[G][U];
  const size_t row = group.x, from = group.y * U;
  const int c = min(int(t), ALL - 1), slot = c / CHUNKS, chunk = c % CHUNKS;
  const bool routed = slot < K;
  const size_t first = from + (routed ? size_t(experts[row * K + slot]) * D : 0);

  const device Words<W>* codes = (const device Words<W>*)(routed ? w : shared_w) + chunk;
  const device S* s = (routed ? scales : shared_scales) + chunk * V / GROUP;
  const device S* b = (routed ? biases : shared_biases) + chunk * V / GROUP;
  Words<W> q[U];
  S scale[U], bias[U];
  UNROLL for (int u = 0; u < U; u++) {
    q[u] = fetch(codes + (first + u) * CHUNKS);
    scale[u] = s[(first + u) * GROUPS];
    bias[u] = b[(first + u) * GROUPS];
  }

  float n[V], sums[U], total = 0.0f;
  const float weight = int(t) < ALL ? weights[row * (K + 1) + slot] : 0.0f;
  load<V>(act + row * (K + 1) * F + c * V, weight, n);
  UNROLL for (int j = 0; j < V; j++) {
    total += n[j];
    n[j] *= code_unit<BITS, FP>(j);
  }
  UNROLL for (int u = 0; u < U; u++) {
    sums[u] = part<BITS, GROUP, FP, V>(q[u], scale[u], bias[u], n, total);
  }
  const float sum = fold<U>(sums, lane);
  if (lane < U) partial[simd][lane] = sum;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (t < U) {
    const size_t at = row * D + from + t;
    float all = float(residual[at]);
    for (int g = 0; g < G; g++) all += partial[g][t];
    h[at] = T(all);
  }
}
