// <metal_math>, <metal_common>, <metal_integer>, <metal_relational>: scalars and vectors.
//
// fast:: and precise:: are the same functions here, from the host's libm, in float. half and
// bfloat compute in float and round once.
#pragma once
#include "simt/vec.h"

extern "C" {
float expf(float), exp2f(float), exp10f(float), expm1f(float), logf(float), log2f(float);
float log10f(float), log1pf(float), sinf(float), cosf(float), tanf(float), asinf(float);
float acosf(float), atanf(float), atan2f(float, float), sinhf(float), coshf(float), tanhf(float);
float asinhf(float), acoshf(float), atanhf(float), powf(float, float), fmodf(float, float);
float erff(float), cbrtf(float), ldexpf(float, int);
}

namespace metal {

// One function for float, half, bfloat and vectors of them, out of an expression in floats.
#define SIMT_MATH1(name, expr)                                        \
  METAL_FUNC float name(float x) { return expr; }                     \
  METAL_FUNC half name(half h) { float x = h; return half(expr); }    \
  METAL_FUNC bfloat name(bfloat h) { float x = h; return bfloat(expr); } \
  template <class T, int N>                                           \
  METAL_FUNC vec<T, N> name(vec<T, N> v) {                            \
    for (int i = 0; i < N; i++) v[i] = name(v[i]);                    \
    return v;                                                         \
  }                                                                   \
  template <class V, class T, int N, int... I>                        \
  METAL_FUNC V name(const swizzle<V, T, N, I...>& v) { return name(V(v)); }
#define SIMT_MATH2(name, expr)                                        \
  METAL_FUNC float name(float x, float y) { return expr; }            \
  METAL_FUNC half name(half a, half b) { float x = a, y = b; return half(expr); } \
  METAL_FUNC bfloat name(bfloat a, bfloat b) { float x = a, y = b; return bfloat(expr); } \
  template <class T, int N>                                           \
  METAL_FUNC vec<T, N> name(vec<T, N> a, vec<T, N> b) {               \
    for (int i = 0; i < N; i++) a[i] = name(a[i], b[i]);              \
    return a;                                                         \
  }

#define SIMT_ALL_MATH                            \
  SIMT_MATH1(exp, ::expf(x))                     \
  SIMT_MATH1(exp2, ::exp2f(x))                   \
  SIMT_MATH1(exp10, ::powf(10.0f, x))            \
  SIMT_MATH1(log, ::logf(x))                     \
  SIMT_MATH1(log2, ::log2f(x))                   \
  SIMT_MATH1(log10, ::log10f(x))                 \
  SIMT_MATH1(sin, ::sinf(x))                     \
  SIMT_MATH1(cos, ::cosf(x))                     \
  SIMT_MATH1(tan, ::tanf(x))                     \
  SIMT_MATH1(asin, ::asinf(x))                   \
  SIMT_MATH1(acos, ::acosf(x))                   \
  SIMT_MATH1(atan, ::atanf(x))                   \
  SIMT_MATH1(sinh, ::sinhf(x))                   \
  SIMT_MATH1(cosh, ::coshf(x))                   \
  SIMT_MATH1(tanh, ::tanhf(x))                   \
  SIMT_MATH1(asinh, ::asinhf(x))                 \
  SIMT_MATH1(acosh, ::acoshf(x))                 \
  SIMT_MATH1(atanh, ::atanhf(x))                 \
  SIMT_MATH1(sinpi, ::sinf(M_PI_F * x))          \
  SIMT_MATH1(cospi, ::cosf(M_PI_F * x))          \
  SIMT_MATH1(sqrt, __builtin_sqrtf(x))           \
  SIMT_MATH1(rsqrt, 1.0f / __builtin_sqrtf(x))   \
  SIMT_MATH1(floor, __builtin_floorf(x))         \
  SIMT_MATH1(ceil, __builtin_ceilf(x))           \
  SIMT_MATH1(trunc, __builtin_truncf(x))         \
  SIMT_MATH1(rint, __builtin_rintf(x))           \
  SIMT_MATH1(round, __builtin_roundf(x))         \
  SIMT_MATH1(fract, x - __builtin_floorf(x))     \
  SIMT_MATH1(fabs, __builtin_fabsf(x))           \
  SIMT_MATH2(pow, ::powf(x, y))                  \
  SIMT_MATH2(powr, ::powf(x, y))                 \
  SIMT_MATH2(fmod, ::fmodf(x, y))                \
  SIMT_MATH2(atan2, ::atan2f(x, y))              \
  SIMT_MATH2(fmin, __builtin_fminf(x, y))        \
  SIMT_MATH2(fmax, __builtin_fmaxf(x, y))        \
  SIMT_MATH2(fdim, x > y ? x - y : 0.0f)         \
  SIMT_MATH2(copysign, __builtin_copysignf(x, y)) \
  SIMT_MATH2(divide, x / y)

SIMT_ALL_MATH

#define SIMT_MINMAX(name, op, f)                                                      \
  template <class T>                                                                  \
    requires(is_arithmetic_v<T>)                                                      \
  METAL_FUNC constexpr T name(T a, T b) {                                             \
    if constexpr (is_floating_point_v<T>) return f(a, b);                             \
    else return a op b ? a : b;                                                       \
  }                                                                                   \
  template <class T, int N>                                                           \
  METAL_FUNC constexpr vec<T, N> name(vec<T, N> a, vec<T, N> b) {                     \
    for (int i = 0; i < N; i++) a[i] = name(a[i], b[i]);                              \
    return a;                                                                         \
  }                                                                                   \
  template <class T, int N>                                                           \
  METAL_FUNC constexpr vec<T, N> name(vec<T, N> a, type_identity_t<T> b) {            \
    return name(a, vec<T, N>(b));                                                     \
  }                                                                                   \
  template <class T>                                                                  \
  METAL_FUNC constexpr T name##3(T a, T b, T c) { return name(a, name(b, c)); }
SIMT_MINMAX(min, <, fmin)
SIMT_MINMAX(max, >, fmax)

template <class T>
METAL_FUNC constexpr T abs(T x) {
  if constexpr (is_floating_point_v<T> || is_vec_v<T>) {
    if constexpr (is_vec_v<T>) {
      for (int i = 0; i < vec_traits<T>::n; i++) x[i] = metal::abs(x[i]);
      return x;
    } else {
      return fabs(x);
    }
  } else {
    return T(x) < T(0) ? T(-x) : x;
  }
}
template <class T>
METAL_FUNC T clamp(T x, T lo, T hi) {
  return metal::min(metal::max(x, lo), hi);
}
template <class T, int N>
METAL_FUNC vec<T, N> clamp(vec<T, N> x, type_identity_t<T> lo, type_identity_t<T> hi) {
  return metal::min(metal::max(x, lo), hi);
}
template <class T>
METAL_FUNC T saturate(T x) {
  return clamp(x, T(0.0f), T(1.0f));
}
template <class T>
METAL_FUNC T sign(T x) {
  return x > T(0) ? T(1) : x < T(0) ? T(-1) : x;
}
template <class T>
METAL_FUNC T mix(T a, T b, T t) {
  return a + (b - a) * t;
}
template <class T, int N>
METAL_FUNC vec<T, N> mix(vec<T, N> a, vec<T, N> b, type_identity_t<T> t) {
  return a + (b - a) * t;
}
template <class T>
METAL_FUNC T step(T edge, T x) {
  return x < edge ? T(0) : T(1);
}
METAL_FUNC float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
METAL_FUNC half fma(half a, half b, half c) { return half(__builtin_fmaf(a, b, c)); }
METAL_FUNC bfloat fma(bfloat a, bfloat b, bfloat c) { return bfloat(__builtin_fmaf(a, b, c)); }
template <class T, int N>
METAL_FUNC vec<T, N> fma(vec<T, N> a, vec<T, N> b, vec<T, N> c) {
  for (int i = 0; i < N; i++) a[i] = fma(a[i], b[i], c[i]);
  return a;
}
METAL_FUNC float ldexp(float x, int e) { return ::ldexpf(x, e); }
METAL_FUNC float modf(float x, float& whole) {
  whole = __builtin_truncf(x);
  return x - whole;
}
METAL_FUNC float sincos(float x, float& c) {
  c = ::cosf(x);
  return ::sinf(x);
}

#define SIMT_CLASSIFY(name, expr)                                              \
  METAL_FUNC bool name(float x) { return expr; }                               \
  METAL_FUNC bool name(half h) { float x = h; return expr; }                   \
  METAL_FUNC bool name(bfloat h) { float x = h; return expr; }                 \
  template <class T, int N>                                                    \
  METAL_FUNC vec<bool, N> name(vec<T, N> v) {                                  \
    vec<bool, N> r{};                                                          \
    for (int i = 0; i < N; i++) r[i] = name(v[i]);                             \
    return r;                                                                  \
  }
SIMT_CLASSIFY(isnan, x != x)
SIMT_CLASSIFY(isinf, __builtin_fabsf(x) == __builtin_inff())
SIMT_CLASSIFY(isfinite, __builtin_fabsf(x) < __builtin_inff())
SIMT_CLASSIFY(signbit, __builtin_signbitf(x))

template <class T>
METAL_FUNC T select(T a, T b, bool c) {
  return c ? b : a;
}
template <class T, int N>
METAL_FUNC vec<T, N> select(vec<T, N> a, vec<T, N> b, vec<bool, N> c) {
  for (int i = 0; i < N; i++) a[i] = c[i] ? b[i] : a[i];
  return a;
}
template <int N>
METAL_FUNC bool any(vec<bool, N> v) {
  for (int i = 0; i < N; i++)
    if (v[i]) return true;
  return false;
}
template <int N>
METAL_FUNC bool all(vec<bool, N> v) {
  for (int i = 0; i < N; i++)
    if (!v[i]) return false;
  return true;
}
template <class A, class B>
  requires(is_vec_v<A> && vec_traits<A>::n == vec_traits<B>::n)
METAL_FUNC auto dot(const A& a, const B& b) {
  typename vec_traits<A>::scalar sum = a[0] * b[0];
  for (int i = 1; i < vec_traits<A>::n; i++) sum += a[i] * b[i];
  return sum;
}
template <class A>
METAL_FUNC auto length_squared(const A& a) {
  return dot(a, a);
}
template <class A>
METAL_FUNC auto length(const A& a) {
  return sqrt(dot(a, a));
}

template <class T>
METAL_FUNC constexpr T popcount(T x) {
  return T(__builtin_popcountg(make_unsigned_t<T>(x)));
}
template <class T>
METAL_FUNC constexpr T clz(T x) {
  return T(__builtin_clzg(make_unsigned_t<T>(x), int(sizeof(T) * 8)));
}
template <class T>
METAL_FUNC constexpr T ctz(T x) {
  return T(__builtin_ctzg(make_unsigned_t<T>(x), int(sizeof(T) * 8)));
}
template <class T>
METAL_FUNC constexpr T mulhi(T a, T b) {
  using W = conditional_t<is_signed_v<T>, __int128, unsigned __int128>;
  return T((W(a) * W(b)) >> (sizeof(T) * 8));
}
template <class T>
METAL_FUNC constexpr T rotate(T x, T by) {
  constexpr int bits = sizeof(T) * 8;
  using U = make_unsigned_t<T>;
  int n = int(by) & (bits - 1);
  return T((U(x) << n) | (U(x) >> ((bits - n) & (bits - 1))));
}
template <class T>
METAL_FUNC constexpr T reverse_bits(T x) {
  T r = 0;
  for (uint i = 0; i < sizeof(T) * 8; i++) r |= T((x >> i) & 1) << (sizeof(T) * 8 - 1 - i);
  return r;
}
template <class T>
METAL_FUNC constexpr T extract_bits(T x, uint offset, uint bits) {
  constexpr uint w = sizeof(T) * 8;
  return bits == 0 ? T(0) : T(T(x << (w - bits - offset)) >> (w - bits));
}
template <class T>
METAL_FUNC constexpr T insert_bits(T base, T insert, uint offset, uint bits) {
  T mask = bits == sizeof(T) * 8 ? T(~T(0)) : T(((T(1) << bits) - 1) << offset);
  return T((base & ~mask) | ((insert << offset) & mask));
}

namespace fast {
SIMT_ALL_MATH
using metal::abs;
using metal::clamp;
using metal::fma;
using metal::max;
using metal::min;
}  // namespace fast
namespace precise {
SIMT_ALL_MATH
using metal::abs;
using metal::clamp;
using metal::fma;
using metal::max;
using metal::min;
}  // namespace precise

#undef SIMT_MATH1
#undef SIMT_MATH2
#undef SIMT_ALL_MATH
#undef SIMT_MINMAX
#undef SIMT_CLASSIFY

}  // namespace metal
