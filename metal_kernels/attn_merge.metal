// out = sigmoid(gate) * (sum over slices of w_s sums_s) / (sum over slices of w_s total_s), where
// w_s = exp(most_s - largest most): the slices of attn_split made one, and gated if GATED.
//
// A threadgroup owns 32 values of one head of one token; its SG simdgroups share the slices, lane
// l sums value l. Each simdgroup finds the weights' sum by itself: a float or two a lane.
//
// fp32, rounded once, where MLX rounds the attention, four steps of the sigmoid and the product.
//
// Floor: splits * HK * G * L * D * 4 bytes, which attn_split has just written: 1.3 MB at 80
// slices of 16 heads of 256, 2 us at 614 GB/s.
#include <metal_stdlib>
using namespace metal;

template <typename T, int D, int HK, int G, int L, bool GATED, int SG>
[[kernel]] void attn_merge(
    const device float* sums [[buffer(0)]],
    const device float* stats [[buffer(1)]],
    const device T* gate [[buffer(2)]],
    constant int* gate_shape [[buffer(3)]],
    const constant int* slices [[buffer(4)]],
    device T* out [[buffer(5)]],
    uint3 at [[thread_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint simd [[simdgroup_index_in_threadgroup]]) {
  threadgroup float partial[SG][32];
  const int splits = slices[0], row = at.z, i = at.x;
  const size_t most = size_t(row) * 2 * splits;
  float top = -INFINITY, total = 0.0f, sum = 0.0f;
  for (int s = lane; s < splits; s += 32) top = max(top, stats[most + s]);
  top = simd_max(top);
  for (int s = lane; s < splits; s += 32) {
    total += precise::exp(stats[most + s] - top) * stats[most + splits + s];
  }
  total = simd_sum(total);
  for (int s = simd; s < splits; s += SG) {
    sum += precise::exp(stats[most + s] - top) * sums[(size_t(row) * splits + s) * D + i];
  }
  partial[simd][lane] = sum;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (simd > 0) return;
  sum = 0.0f;
  for (int s = 0; s < SG; s++) sum += partial[s][lane];
  sum /= total;
  // Rows are (batch, key head, token, head of the group).
  const int g = row % G, l = row / G % L, h = row / (G * L) % HK, b = row / (G * L * HK);
  const int head = h * G + g, token = b * L + l;
  if (GATED) {
    const size_t from = size_t(token) * gate_shape[2] + (2 * head + 1) * D;
    sum /= 1.0f + precise::exp(-float(gate[from + i]));
  }
  out[(size_t(token) * (HK * G) + head) * D + i] = T(sum);
}
