// One step of a gated delta net for each of TOKENS tokens, between its projections. A row of proj
// is q | k | v | z | b | a. With x = q | k | v, after CONV - 1 rows of window:
//   q, k, v = silu(depthwise conv(x));  q /= sqrt(DK) |q|;  k /= |k|;  beta = sigmoid(b)
//   decay = exp(-exp(A_log) * softplus(a + dt_bias));  S *= decay
//   S += (beta * (v - S k)) outer k;  u = S q
//   y = norm_weight * u / sqrt(mean(u^2) + eps) * silu(z);  new_window = the last rows of x
// |x| is sqrt(sum(x^2) + 1e-6), S (DV, DK) a value head's state, mean over DV.
//
// A threadgroup owns a value head of a sequence, so the norm of y stays within it; q and k are
// made again for each of the HV / HK value heads that share them, and the first of these stores
// their window. L lanes own R rows of S, STEP apart, in registers over all tokens: lane l holds
// float4s l, l + L, ... of each, 128 bytes or more together. They are read before all else, and
// meanwhile a thread a channel makes q, k, v and silu(z) of all tokens in threadgroup memory. Rows
// of S that do not fit in registers come after, as many at a time.
// As S k and S q are sums over the old S, decay * S q + (k q) * beta * (v - decay * S k) is u: all
// sums of a token meet in one round of shuffles, |q|, |k| and k q with them, and S is updated
// after. Barriers: two, whatever TOKENS is.
//
// Everything is fp32 from the loads to the store of y, where MLX-LM rounds to T after each
// operation but those on S and in silu(z).
//
// Floor: 8 * HV * DV * DK bytes of state a sequence; with conv_weight, window and proj 4.4 MB at
// HK = 16, HV = 32, DV = DK = 128: 7.2 us at 614 GB/s, in one launch where MLX takes 13.
#include <metal_stdlib>
using namespace metal;
#define UNROLL _Pragma("unroll")

// The CONV taps of a channel, one load where their number is a power of 2.
template <typename T, int N>
struct alignas(N & (N - 1) ? sizeof(T) : N * sizeof(T)) Taps {
  T at[N];
};

template <typename T, typename S, int TOKENS, int HK, int HV, int DK, int DV, int CONV, int L,
          int R, int THREADS>
[[kernel]] void gdn_step(
    const device T* proj [[buffer(0)]],
    const device T* window [[buffer(1)]],
    const device T* conv_weight [[buffer(2)]],
    const device S* A_log [[buffer(3)]],
    const device T* dt_bias [[buffer(4)]],
    const device T* norm_weight [[buffer(5)]],
    const device float* state [[buffer(6)]],
    const constant float* eps [[buffer(7)]],
    device T* y [[buffer(8)]],
    device T* new_window [[buffer(9)]],
    device float* new_state [[buffer(10)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint simd [[simdgroup_index_in_threadgroup]]) {
  constexpr int KEEP = CONV - 1, N = 2 * (DK + DV), W = DK / (4 * L), STEP = THREADS / L;
  constexpr int C = 2 * HK * DK + HV * DV, ROW = C + HV * (DV + 2);
  threadgroup float4 made4[TOKENS * N / 4];  // q, k, v, norm_weight * silu(z) of each token
  threadgroup float gates[TOKENS][2], u[TOKENS][DV];
  threadgroup float* made = (threadgroup float*)made4;
  const size_t batch = group.z;
  const int head = int(group.y), key_head = head / (HV / HK), t = int(thread_index);
  const int part = t % L;
  const size_t from = (batch * HV + head) * DV * (DK / 4) + part;
  const float epsilon = eps[0];
  proj += batch * (TOKENS * ROW);
  float a = 0.0f, b = 0.0f, A = 0.0f;
  if (t < TOKENS) {
    const device T* gate = proj + t * ROW + C + HV * DV + head;
    b = float(gate[0]), a = float(gate[HV]) + float(dt_bias[head]), A = float(A_log[head]);
  }

  for (int turn = 0; turn < DV; turn += STEP * R) {
    const int first = turn + t / L;
    float4 s[R][W];
    UNROLL for (int r = 0; r < R; r++) {
      const device float4* old = (const device float4*)state + from + (first + r * STEP) * (DK / 4);
      UNROLL for (int i = 0; i < W; i++) s[r][i] = old[i * L];
    }
    if (turn == 0) {
      for (int i = t; i < N; i += THREADS) {
        const bool gate = i >= 2 * DK + DV;
        const int c = i < DK       ? i + key_head * DK
                      : i < 2 * DK ? i + (HK + key_head - 1) * DK
                                   : i + 2 * (HK - 1) * DK + (head + (gate ? HV - 1 : 0)) * DV;
        const size_t kept = batch * (KEEP * C) + c;
        float x[KEEP + TOKENS], gain = 1.0f;
        UNROLL for (int j = 0; j < TOKENS; j++) x[KEEP + j] = float(proj[j * ROW + c]);
        Taps<T, CONV> taps;
        if (gate) {
          gain = float(norm_weight[i - 2 * DK - DV]);
        } else {
          taps = ((const device Taps<T, CONV>*)conv_weight)[c];
          UNROLL for (int j = 0; j < KEEP; j++) x[j] = float(window[kept + j * C]);
          if (i >= 2 * DK || head % (HV / HK) == 0) {
            UNROLL for (int j = 0; j < KEEP; j++) new_window[kept + j * C] = T(x[TOKENS + j]);
          }
        }
        UNROLL for (int n = 0; n < TOKENS; n++) {
          float v = x[KEEP + n];
          if (!gate) {
            v = 0.0f;
            UNROLL for (int j = 0; j < CONV; j++) v += x[n + j] * float(taps.at[j]);
          }
          made[n * N + i] = gain * v / (1.0f + precise::exp(-v));
        }
      }
      if (t < TOKENS) {
        // log(1 + e), where 1 + e rounds: log(w) of the rounded w, and what that is of it.
        const float e = precise::exp(-abs(a)), w = 1.0f + e;
        const float softplus = max(a, 0.0f) + (w == 1.0f ? e : precise::log(w) * (e / (w - 1.0f)));
        gates[t][0] = precise::exp(-precise::exp(A) * softplus);
        gates[t][1] = 1.0f / (1.0f + precise::exp(-b));
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }

    for (int n = 0; n < TOKENS; n++) {
      const threadgroup float4* qk = made4 + n * (N / 4) + part;
      float4 k[W];
      float sums[3 + 2 * R] = {};  // q q, k k, k q, S k of each row, S q of each row
      UNROLL for (int i = 0; i < W; i++) {
        const float4 q = qk[i * L];
        k[i] = qk[i * L + DK / 4];
        sums[0] += dot(q, q);
        sums[1] += dot(k[i], k[i]);
        sums[2] += dot(k[i], q);
        UNROLL for (int r = 0; r < R; r++) {
          sums[3 + r] += dot(s[r][i], k[i]);
          sums[3 + R + r] += dot(s[r][i], q);
        }
      }
      UNROLL for (int m = 1; m < L; m *= 2) {
        UNROLL for (int j = 0; j < 3 + 2 * R; j++) sums[j] += simd_shuffle_xor(sums[j], m);
      }
      const float q_norm = precise::rsqrt((sums[0] + 1e-6f) * float(DK));
      const float k_norm = precise::rsqrt(sums[1] + 1e-6f), decay = gates[n][0];
      UNROLL for (int r = 0; r < R; r++) {
        const int to = first + r * STEP;
        const float v = made[n * N + 2 * DK + to] - decay * k_norm * sums[3 + r];
        const float delta = gates[n][1] * k_norm * v;
        UNROLL for (int i = 0; i < W; i++) s[r][i] = s[r][i] * decay + k[i] * delta;
        if (part == 0) u[n][to] = q_norm * (decay * sums[3 + R + r] + sums[2] * delta);
      }
    }
    UNROLL for (int r = 0; r < R; r++) {
      device float4* to = (device float4*)new_state + from + (first + r * STEP) * (DK / 4);
      UNROLL for (int i = 0; i < W; i++) to[i * L] = s[r][i];
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  for (int n = int(simd); n < TOKENS; n += THREADS / 32) {
    float square = 0.0f;
    for (int i = int(lane); i < DV; i += 32) square += u[n][i] * u[n][i];
    const float scale = precise::rsqrt(simd_sum(square) / float(DV) + epsilon);
    device T* to = y + ((batch * TOKENS + n) * HV + head) * DV;
    for (int i = int(lane); i < DV; i += 32) {
      to[i] = T(u[n][i] * scale * made[n * N + 2 * DK + DV + i]);
    }
  }
}
