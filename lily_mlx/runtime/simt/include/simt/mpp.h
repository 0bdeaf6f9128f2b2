// Metal 4's mpp::tensor_ops::matmul2d on cooperative tensors of one simdgroup.
//
// A tensor's tile, as stored, is cut in 16x16 fragments, row by row; a lane holds two runs of four
// neighbours of each. Apple does not document this layout; it is the one that MLX's NAX kernels
// assume. Sums run over k in order, in float; tensors in device memory are not supported.
#pragma once
#include "simt/msl.h"

namespace metal {
struct execution_simdgroup {};
}  // namespace metal

namespace mpp::tensor_ops {

struct matmul2d_descriptor {
  enum class mode { multiply, multiply_accumulate };
  int m, n, k;
  bool transpose_left, transpose_right, relaxed_precision;
  mode how;
  constexpr matmul2d_descriptor(int m_, int n_, int k_, bool left = false, bool right = false,
                                bool relaxed = false, mode how_ = mode::multiply)
      : m(m_), n(n_), k(k_), transpose_left(left), transpose_right(right),
        relaxed_precision(relaxed), how(how_) {}
};

template <class T, int Rows, int Cols>
struct cooperative_tensor {
  static_assert(Rows % 16 == 0 && Cols % 16 == 0, "fragments are 16x16");
  static constexpr int kCapacity = Rows * Cols / 32;
  using value_type = T;
  T elements[kCapacity];
  T& operator[](int i) { return elements[i]; }
  const T& operator[](int i) const { return elements[i]; }
  static constexpr int get_capacity() { return kCapacity; }
  static constexpr int row(int lane, int i) {
    return i / 8 / (Cols / 16) * 16 + (((lane >> 2) & 4) | ((lane >> 1) & 3)) + (i % 8 / 4) * 8;
  }
  static constexpr int col(int lane, int i) {
    return i / 8 % (Cols / 16) * 16 + (((lane >> 2) & 2) | (lane & 1)) * 4 + i % 4;
  }
};

template <matmul2d_descriptor d, class Scope>
struct matmul2d {
  static_assert(__is_same(Scope, metal::execution_simdgroup), "one simdgroup only");

  template <class A, class B, class C>
  auto get_left_input_cooperative_tensor() const {
    return cooperative_tensor<A, d.transpose_left ? d.k : d.m, d.transpose_left ? d.m : d.k>();
  }
  template <class A, class B, class C>
  auto get_right_input_cooperative_tensor() const {
    return cooperative_tensor<B, d.transpose_right ? d.n : d.k, d.transpose_right ? d.k : d.n>();
  }
  template <class A, class B, class C>
  auto get_destination_cooperative_tensor() const {
    return cooperative_tensor<C, d.m, d.n>();
  }

  // Lanes exchange addresses: all are blocked here, so their tensors stay where they are.
  template <class A, class B, class C>
  void run(A& a, B& b, C& c, SIMT_SITE) const {
    struct Tensors {
      A* a;
      B* b;
      C* c;
    };
    metal::simt_exchange<char>(
        simt::kSimd, Tensors{&a, &b, &c},
        [](const Tensors* in, char* out, uint mask) {
          float x[d.m][d.k], y[d.k][d.n], z[d.m][d.n];
          for (int l = 0; l < 32; l++) {
            out[l] = 0;
            if (!(mask >> l & 1)) continue;
            for (int i = 0; i < A::kCapacity; i++) {
              int r = A::row(l, i), k = A::col(l, i);
              (d.transpose_left ? x[k][r] : x[r][k]) = float((*in[l].a)[i]);
            }
            for (int i = 0; i < B::kCapacity; i++) {
              int k = B::row(l, i), n = B::col(l, i);
              (d.transpose_right ? y[n][k] : y[k][n]) = float((*in[l].b)[i]);
            }
            for (int i = 0; i < C::kCapacity; i++) {
              bool add = d.how == matmul2d_descriptor::mode::multiply_accumulate;
              z[C::row(l, i)][C::col(l, i)] = add ? float((*in[l].c)[i]) : 0.0f;
            }
          }
          for (int r = 0; r < d.m; r++)
            for (int k = 0; k < d.k; k++)
              for (int n = 0; n < d.n; n++) z[r][n] = __builtin_fmaf(x[r][k], y[k][n], z[r][n]);
          for (int l = 0; l < 32; l++) {
            if (!(mask >> l & 1)) continue;
            for (int i = 0; i < C::kCapacity; i++) {
              (*in[l].c)[i] = typename C::value_type(z[C::row(l, i)][C::col(l, i)]);
            }
          }
        },
        "matmul2d", file, line);
  }
};

}  // namespace mpp::tensor_ops
