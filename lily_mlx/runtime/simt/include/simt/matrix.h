// <metal_simdgroup_matrix>: 8x8 matrices, two neighbouring elements of a row in each lane. A
// product accumulates over k in order, in float, from the addend.
#pragma once
#include "simt/simd.h"

namespace metal {

METAL_FUNC uint simt_row(uint lane) { return ((lane >> 2) & 4) | ((lane >> 1) & 3); }
METAL_FUNC uint simt_col(uint lane) { return (((lane >> 2) & 2) | (lane & 1)) * 2; }

template <class T, int Cols = 8, int Rows = Cols>
struct simdgroup_matrix {
  static_assert(Cols == 8 && Rows == 8, "only 8x8 matrices exist");
  using storage_type = vec<T, 2>;
  vec<T, 2> e;
  simdgroup_matrix() = default;
  explicit simdgroup_matrix(T diagonal) {
    uint r = simt_row(simt_state.lane), c = simt_col(simt_state.lane);
    e = vec<T, 2>(r == c ? diagonal : T(0), r == c + 1 ? diagonal : T(0));
  }
  vec<T, 2>& thread_elements() { return e; }
  const vec<T, 2>& thread_elements() const { return e; }
};
using simdgroup_float8x8 = simdgroup_matrix<float>;
using simdgroup_half8x8 = simdgroup_matrix<half>;
using simdgroup_bfloat8x8 = simdgroup_matrix<bfloat>;

template <class T, int C, int R = C>
METAL_FUNC simdgroup_matrix<T, C, R> make_filled_simdgroup_matrix(T value) {
  simdgroup_matrix<T, C, R> m;
  m.e = vec<T, 2>(value);
  return m;
}

template <class T, class U>
METAL_FUNC void simdgroup_load(simdgroup_matrix<T>& m, const U* from, ulong stride = 8,
                               ulong2 origin = ulong2(0), bool transpose = false) {
  ulong r = simt_row(simt_state.lane), c = simt_col(simt_state.lane);
  const U* base = from + origin.y * stride + origin.x;
  for (int i = 0; i < 2; i++) {
    m.e[i] = T(transpose ? base[(c + i) * stride + r] : base[r * stride + c + i]);
  }
}
template <class T, class U>
METAL_FUNC void simdgroup_store(const simdgroup_matrix<T>& m, U* to, ulong stride = 8,
                                ulong2 origin = ulong2(0), bool transpose = false) {
  ulong r = simt_row(simt_state.lane), c = simt_col(simt_state.lane);
  U* base = to + origin.y * stride + origin.x;
  for (int i = 0; i < 2; i++) {
    base[transpose ? (c + i) * stride + r : r * stride + c + i] = U(m.e[i]);
  }
}

template <class D, class A, class B, class C>
METAL_FUNC void simdgroup_multiply_accumulate(simdgroup_matrix<D>& d, const simdgroup_matrix<A>& a,
                                              const simdgroup_matrix<B>& b,
                                              const simdgroup_matrix<C>& c, SIMT_SITE) {
  struct Parts {
    float a[2], b[2], c[2];
  };
  struct Pair {
    float v[2];
  };
  Parts mine{{float(a.e[0]), float(a.e[1])}, {float(b.e[0]), float(b.e[1])},
             {float(c.e[0]), float(c.e[1])}};
  Pair sum = simt_exchange<Pair>(
      simt::kSimd, mine,
      [](const Parts* in, Pair* out, uint) {
        float x[8][8], y[8][8], z[8][8];
        for (uint l = 0; l < 32; l++) {
          for (uint i = 0; i < 2; i++) {
            x[simt_row(l)][simt_col(l) + i] = in[l].a[i];
            y[simt_row(l)][simt_col(l) + i] = in[l].b[i];
            z[simt_row(l)][simt_col(l) + i] = in[l].c[i];
          }
        }
        for (int r = 0; r < 8; r++)
          for (int k = 0; k < 8; k++)
            for (int n = 0; n < 8; n++) z[r][n] = __builtin_fmaf(x[r][k], y[k][n], z[r][n]);
        for (uint l = 0; l < 32; l++)
          for (uint i = 0; i < 2; i++) out[l].v[i] = z[simt_row(l)][simt_col(l) + i];
      },
      "simdgroup_multiply_accumulate", file, line);
  d.e = vec<D, 2>(D(sum.v[0]), D(sum.v[1]));
}
template <class D, class A, class B>
METAL_FUNC void simdgroup_multiply(simdgroup_matrix<D>& d, const simdgroup_matrix<A>& a,
                                   const simdgroup_matrix<B>& b, SIMT_SITE) {
  simdgroup_multiply_accumulate(d, a, b, make_filled_simdgroup_matrix<float, 8, 8>(0.0f), file,
                                line);
}
template <class A, class B>
METAL_FUNC simdgroup_matrix<A> operator*(const simdgroup_matrix<A>& a,
                                         const simdgroup_matrix<B>& b) {
  simdgroup_matrix<A> d;
  simdgroup_multiply(d, a, b);
  return d;
}

}  // namespace metal
