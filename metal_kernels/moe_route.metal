// experts = the K largest of p = T(softmax(logits)) over E; weights = softmax at those experts,
// over their sum if NORMALIZE, and sigmoid(shared_gate) after them.
//
// One simdgroup, which is a threadgroup, owns a row; lane l owns experts 128 i + 4 l to
// 128 i + 4 l + 3 of each i, as threads of MLX's Metal softmax do. With its fast exp, and its sums
// in its order, p has its very bits, and so the same experts win: the larger p, of equal ones the
// larger index. (Sums in another order, as on other devices, round p otherwise once in 2^15 or so,
// which matters where two experts are as close as that.) Winner after winner is found by two maxima
// over the lanes. They are stored weakest first, which is the order of MLX's argpartition on a GPU,
// a stable ascending sort.
// Lane k then has expert k, and takes its weight from the logit itself.
//
// Rounding: p to T, to choose by. The weights are fp32 throughout: MLX rounds p, their sum and
// their quotient to T.
//
// Floor: R * (E + 1) * sizeof(T) + R * (8 K + 4) bytes, 600 at one row of 256: the launch is what
// it costs, in place of MLX's 6 (softmax, sort, gather, sum, division, sigmoid).
#include <metal_stdlib>
using namespace metal;
#define UNROLL _Pragma("unroll")

template <typename T, int E, int K, bool NORMALIZE>
[[kernel]] void moe_route(
    const device T* logits [[buffer(0)]],
    constant int64_t* logits_strides [[buffer(1)]],
    const device T* shared_gate [[buffer(2)]],
    constant int64_t* shared_gate_strides [[buffer(3)]],
    device uint* experts [[buffer(4)]],
    device float* weights [[buffer(5)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]]) {
  constexpr int BLOCKS = (E + 127) / 128, N = 4 * BLOCKS;
  const size_t row = group.x, at = row * logits_strides[0], step = logits_strides[1];
  const int first = 4 * int(lane);  // expert of value j: first + j / 4 * 128 + j % 4
  float value[N];
  float peak = -INFINITY;
  UNROLL for (int j = 0; j < N; j++) {
    const int e = first + j / 4 * 128 + j % 4;
    value[j] = e < E ? float(logits[at + e * step]) : -INFINITY;
    peak = max(peak, value[j]);
  }
  peak = simd_max(peak);

  float sums = 0.0f;
  UNROLL for (int i = 0; i < BLOCKS; i++) {
    float sum = 0.0f;
    UNROLL for (int j = 4 * i; j < 4 * i + 4; j++) {
      value[j] = fast::exp(value[j] - peak);
      sum += value[j];
    }
    sum = simd_sum(sum);
    if (int(lane) == i) sums = sum;
  }
  const float scale = 1.0f / simd_sum(sums);

  int key[N];  // p's bits, in p's order; below 0 if out of the race
  UNROLL for (int j = 0; j < N; j++) {
    const bool exists = first + j / 4 * 128 + j % 4 < E;
    key[j] = exists ? max(as_type<int>(float(T(value[j] * scale))), 0) : -1;
  }
  int expert = 0;
  for (int k = K - 1; k >= 0; k--) {
    int best = -1, where = 0;
    UNROLL for (int j = 0; j < N; j++) {
      where = key[j] >= best ? first + j / 4 * 128 + j % 4 : where;
      best = max(key[j], best);
    }
    const int winner = simd_max(best == simd_max(best) ? where : 0);
    if (int(lane) == k) expert = winner;
    UNROLL for (int j = 0; j < N; j++) {
      if (winner == first + j / 4 * 128 + j % 4) key[j] = -1;
    }
  }

  const bool routed = lane < K;
  float weight = routed ? precise::exp(float(logits[at + expert * step]) - peak) : 0.0f;
  weight *= NORMALIZE ? 1.0f / simd_sum(weight) : scale;
  if (routed) experts[row * K + lane] = uint(expert);
  if (lane == K) {
    const float gate = float(shared_gate[row * shared_gate_strides[0]]);
    weight = 1.0f / (1.0f + precise::exp(-gate));
  }
  if (lane <= K) weights[row * (K + 1) + lane] = weight;
}
