// q = rope(rms_norm(query) q_norm), k = rope(rms_norm(key) k_norm), v = value, heads first, from
// one row of packed projections a token: HQ heads of query (each followed by its gate if GATED),
// HK of key, HK of value. Rope turns the first ROT of D values, value i with i + ROT / 2, by the
// angle (offset + token) * base^(-2 i / ROT), as mx.fast.rope with traditional=False and scale=1.
//
// One simdgroup owns one head of one token; lane l its values l, l + 32, ... The partner of a
// turned value is read again, from the cache, so each pair's angle is computed twice, by two
// lanes.
//
// The angle, its cosine and sine are those of MLX's kernel on the same device, so that keys of a
// prompt (MLX's) and of a token (these) agree: fast:: in Metal, precise in CUDA. fp32 throughout
// and one rounding, where MLX rounds after the scaling, after the weight and after the turn.
//
// Floor: (HQ + 2 HK) * D * sizeof(T) bytes read and as many written: 20 KB for a token of HQ = 16,
// HK = 2, D = 256, 0.03 us at 614 GB/s: the launch is what it costs, one where MLX takes five.
#include <metal_stdlib>
using namespace metal;
#ifdef __CUDACC__
#define ROPE precise
#else
#define ROPE fast
#endif

template <typename T, int D, int HQ, int HK, int ROT, bool GATED>
[[kernel]] void attn_prep(
    const device T* proj [[buffer(0)]],
    const device T* q_norm [[buffer(1)]],
    const device T* k_norm [[buffer(2)]],
    const constant int* offsets [[buffer(3)]],
    constant int* offsets_shape [[buffer(4)]],
    const constant float* log2_base [[buffer(5)]],
    const constant float* eps [[buffer(6)]],
    const constant int* tokens [[buffer(7)]],
    device T* q [[buffer(8)]],
    device T* k [[buffer(9)]],
    device T* v [[buffer(10)]],
    uint3 at [[thread_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]]) {
  constexpr int EACH = GATED ? 2 * D : D, V = (D + 31) / 32;
  const int head = at.y, L = tokens[0], b = int(at.z) / L, l = int(at.z) % L;
  const bool query = head < HQ, value = head >= HQ + HK;
  const device T* x = proj + size_t(at.z) * (HQ * EACH + 2 * HK * D);
  x += query ? head * EACH : HQ * EACH + (head - HQ) * D;
  const device T* weight = query ? q_norm : k_norm;
  device T* out = query ? q : value ? v : k;
  const int heads = query ? HQ : HK, own = query ? head : (head - HQ) % HK;
  out += (size_t(b * heads + own) * L + l) * D;

  float mine[V], squares = 0.0f;
  for (int j = 0; j < V; j++) {
    const int i = 32 * j + lane;
    mine[j] = i < D ? float(x[i]) : 0.0f;
    squares += mine[j] * mine[j];
  }
  const float scale = precise::rsqrt(simd_sum(squares) / float(D) + eps[0]);
  const float place = float(offsets[b % offsets_shape[0]] + l);
  for (int j = 0; j < V; j++) {
    const int i = 32 * j + lane;
    if (i >= D) break;
    float y = mine[j];
    if (!value) y *= scale * float(weight[i]);
    if (!value && i < ROT) {
      const bool low = i < ROT / 2;
      const int turn = low ? i : i - ROT / 2, other = low ? i + ROT / 2 : turn;
      const float z = float(x[other]) * (scale * float(weight[other]));
      const float d = float(turn) / float(ROT / 2);
      const float angle = place * exp2(-d * log2_base[0]);
      const float c = ROPE::cos(angle), s = ROPE::sin(angle);
      y = low ? y * c - z * s : z * s + y * c;
    }
    out[i] = T(y);
  }
}
