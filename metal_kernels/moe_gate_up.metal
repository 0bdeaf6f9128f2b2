// act = T(T(silu(g)) * u), g = T(n @ gate.T), u = T(n @ up.T), of the K experts chosen for each row
// of x and, last, of the shared expert; n = T(gain * T(x * rsqrt(mean(x^2) + eps))) or x. Gate and
// up are quantized, (F, D) an expert: w holds E gates, then E ups; shared_w a gate, then an up.
//
// A threadgroup owns U elements of act of one row and expert. Its thread t owns values t V to
// t V + V - 1 of D and reads that part of U rows of gate and U of up, all of them on their way
// before x is touched: one wide load of codes (16 bytes at 4 and 8 bits), a scale, a bias each. The
// 2 U sums meet over 32 lanes in one fold and over simdgroups in threadgroup memory, where thread
// u < U makes element u of them. Threads past D read again what a neighbour reads.
// Grid: (R, F / U, K + 1) threadgroups; those of several rows that share an expert's weights, the
// shared one's always, start together and find them in the cache.
//
// fp32 sums and silu; rounds to T where MLX-LM does, except within silu, where it may round more.
//
// Floor: (K + 1) * 2 F * D * (BITS + 32 / GROUP) / 8 bytes (16-bit scale and bias), and
// R * (D + (K + 1) F) * sizeof(T): 10.6 MB at D = 2048, F = 512, K = 8, 4 bits in groups of 64:
// 17 us at 614 GB/s, in one launch where MLX takes 8 (or 9 with the norm).
#include <metal_stdlib>
using namespace metal;
#include "common/dequant.h"
#include "common/gemv.h"

template <typename T, typename S, int BITS, int GROUP, bool FP, int D, int F, int K, int V, int U,
          bool NORM>
[[kernel]] void moe_gate_up(
    const device T* x [[buffer(0)]],
    const device uint* w [[buffer(1)]],
    const device S* scales [[buffer(2)]],
    const device S* biases [[buffer(3)]],
    const device uint* shared_w [[buffer(4)]],
    const device S* shared_scales [[buffer(5)]],
    const device S* shared_biases [[buffer(6)]],
    const device uint* experts [[buffer(7)]],
    const device T* gain [[buffer(8)]],
    const constant float* eps [[buffer(9)]],
    const constant int* E [[buffer(10)]],
    device T* act [[buffer(11)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint t [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint simd [[simdgroup_index_in_threadgroup]]) {
  constexpr int W = V * BITS / 32, CHUNKS = D / V, G = (CHUNKS + 31) / 32;
  threadgroup float squares[G], partial[G][2 * U];
  const size_t row = group.x, slot = group.z, from = group.y * U;
  const bool routed = slot < K;
  const size_t gate = from + (routed ? size_t(experts[row * K + slot]) * F : 0);
  const size_t up = gate + size_t(routed ? E[0] : 1) * F;

  const int c = min(int(t), CHUNKS - 1);
  const device Words<W>* codes = (const device Words<W>*)(routed ? w : shared_w) + c;
  const device S* s = (routed ? scales : shared_scales) + c * V / GROUP;
  const device S* b = (routed ? biases : shared_biases) + c * V / GROUP;
  Words<W> q[2 * U];
  S scale[2 * U], bias[2 * U];
  UNROLL for (int u = 0; u < 2 * U; u++) {
    const size_t at = u < U ? gate + u : up + u - U;
    q[u] = fetch(codes + at * CHUNKS);
    scale[u] = s[at * (D / GROUP)];
    bias[u] = b[at * (D / GROUP)];
  }

  float n[V], sums[2 * U], square = 0.0f, total = 0.0f;
  const bool mine = D % (32 * V) == 0 || int(t) < CHUNKS;
  load<V>(x + row * D + c * V, mine ? 1.0f : 0.0f, n);
  UNROLL for (int j = 0; j < V; j++) square += n[j] * n[j];
  if (NORM) {
    square = simd_sum(square);
    if (lane == 0) squares[simd] = square;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    square = 0.0f;
    for (int g = 0; g < G; g++) square += squares[g];
    square = precise::rsqrt(square / float(D) + eps[0]);
  }
  UNROLL for (int j = 0; j < V; j++) {
    if (NORM) {
      const float4 v = load4(gain + c * V + j / 4 * 4);
      n[j] = float(T(v[j % 4] * float(T(n[j] * square))));
    }
    total += n[j];
    n[j] *= code_unit<BITS, FP>(j);
  }
  UNROLL for (int u = 0; u < 2 * U; u++) {
    sums[u] = part<BITS, GROUP, FP, V>(q[u], scale[u], bias[u], n, total);
  }
  const float sum = fold<2 * U>(sums, lane);
  if (lane < 2 * U) partial[simd][lane] = sum;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (t < U) {
    float g = 0.0f, u = 0.0f;
    for (int i = 0; i < G; i++) g += partial[i][t], u += partial[i][t + U];
    g = float(T(g));
    const float below = 1.0f / (1.0f + precise::exp(abs(g)));  // sigmoid(-|g|)
    const T silu = T(g * (g < 0.0f ? below : 1.0f - below));
    act[(row * (K + 1) + slot) * F + from + t] = T(float(silu) * float(T(u)));
  }
}
