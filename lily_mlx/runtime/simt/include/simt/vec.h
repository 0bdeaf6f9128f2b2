// metal::vec<T, N> with swizzles, the packed vectors and metal::array.
#pragma once
#include "simt/bfloat.h"

namespace metal {

template <class T, int N>
struct vec;

// A view of some components of a vector. V is the vector of as many components as it names.
template <class V, class T, int N, int... I>
struct swizzle {
  T d[N];
  static constexpr int order[] = {I...};
  constexpr operator V() const { return V(d[I]...); }
  swizzle& operator=(V v) {
    for (int i = 0; i < int(sizeof...(I)); i++) d[order[i]] = v[i];
    return *this;
  }
  swizzle& operator=(const swizzle& s) { return *this = V(s); }
  swizzle& operator+=(V v) { return *this = V(*this) + v; }
  swizzle& operator-=(V v) { return *this = V(*this) - v; }
  swizzle& operator*=(V v) { return *this = V(*this) * v; }
  swizzle& operator/=(V v) { return *this = V(*this) / v; }
  constexpr T operator[](int i) const { return d[order[i]]; }
};

template <class T>
struct vec_traits {
  using scalar = T;
  static constexpr int n = 1;
};
template <class T, int N>
struct vec_traits<vec<T, N>> {
  using scalar = T;
  static constexpr int n = N;
};
template <class V, class T, int N, int... I>
struct vec_traits<swizzle<V, T, N, I...>> : vec_traits<V> {};
template <class T>
constexpr bool is_vec_v = vec_traits<T>::n > 1;

// A vector's components, for constructors that mix scalars and vectors.
template <class T, class A>
  requires(!requires(A a) { a[0]; })
constexpr void simt_put(T* to, int& at, A a) {
  to[at++] = T(a);
}
template <class T, class U, int N>
constexpr void simt_put(T* to, int& at, const vec<U, N>& a) {
  for (int i = 0; i < N; i++) to[at++] = T(a[i]);
}
template <class T, class V, class U, int N, int... I>
constexpr void simt_put(T* to, int& at, const swizzle<V, U, N, I...>& a) {
  simt_put(to, at, V(a));
}

// A vector is read and written in one access, as a GPU does; components of three stay apart.
template <class T>
struct simt_lane {
  using type = T;
};
template <>
struct simt_lane<bool> {
  using type = uchar;
};
template <>
struct simt_lane<bfloat> {
  using type = ushort;
};
template <class T, int N>
struct simt_whole {
  using lane = typename simt_lane<T>::type;
  typedef lane type __attribute__((ext_vector_type(N), aligned(sizeof(T)), may_alias));
};

#define SIMT_BINARY(op)                                                        \
  friend constexpr vec operator op(const vec& a, const vec& b) {               \
    vec r{};                                                                   \
    for (int i = 0; i < SIMT_N; i++) r.d[i] = T(a.d[i] op b.d[i]);             \
    return r;                                                                  \
  }                                                                            \
  constexpr vec& operator op##=(const vec& b) { return *this = *this op b; }
#define SIMT_COMPARE(op)                                                       \
  friend constexpr vec<bool, SIMT_N> operator op(const vec& a, const vec& b) { \
    vec<bool, SIMT_N> r{};                                                     \
    for (int i = 0; i < SIMT_N; i++) r.d[i] = a.d[i] op b.d[i];                \
    return r;                                                                  \
  }
#define SIMT_UNARY(op)                                                         \
  constexpr vec operator op() const {                                          \
    vec r{};                                                                   \
    for (int i = 0; i < SIMT_N; i++) r.d[i] = T(op d[i]);                      \
    return r;                                                                  \
  }
#define SIMT_VEC_BODY                                                          \
  vec() = default;                                                             \
  constexpr vec(const vec& v) : d{} { *this = v; }                             \
  constexpr vec& operator=(const vec& v) {                                     \
    if !consteval {                                                            \
      if constexpr (SIMT_N != 3) {                                             \
        using Whole = typename simt_whole<T, SIMT_N>::type;                    \
        *reinterpret_cast<Whole*>(d) = *reinterpret_cast<const Whole*>(v.d);   \
        return *this;                                                          \
      }                                                                        \
    }                                                                          \
    for (int i = 0; i < SIMT_N; i++) d[i] = v.d[i];                            \
    return *this;                                                              \
  }                                                                            \
  constexpr vec(T s) : d{} {                                                   \
    for (int i = 0; i < SIMT_N; i++) d[i] = s;                                 \
  }                                                                            \
  template <class U>                                                           \
  explicit constexpr vec(const vec<U, SIMT_N>& v) : d{} {                      \
    for (int i = 0; i < SIMT_N; i++) d[i] = T(v.d[i]);                         \
  }                                                                            \
  template <class V, class U, int M, int... I>                                 \
    requires(sizeof...(I) == SIMT_N && !__is_same(V, vec))                     \
  explicit constexpr vec(const swizzle<V, U, M, I...>& s) : vec(V(s)) {}       \
  template <class... A>                                                        \
    requires(sizeof...(A) > 1)                                                 \
  constexpr vec(const A&... a) : d{} {                                         \
    int at = 0;                                                                \
    (simt_put(d, at, a), ...);                                                 \
  }                                                                            \
  constexpr T& operator[](int i) { return d[i]; }                              \
  constexpr const T& operator[](int i) const { return d[i]; }                  \
  SIMT_BINARY(+) SIMT_BINARY(-) SIMT_BINARY(*) SIMT_BINARY(/) SIMT_BINARY(%)   \
  SIMT_BINARY(&) SIMT_BINARY(|) SIMT_BINARY(^) SIMT_BINARY(<<) SIMT_BINARY(>>) \
  SIMT_COMPARE(<) SIMT_COMPARE(>) SIMT_COMPARE(<=) SIMT_COMPARE(>=)            \
  SIMT_COMPARE(==) SIMT_COMPARE(!=) SIMT_COMPARE(&&) SIMT_COMPARE(||)          \
  SIMT_UNARY(-) SIMT_UNARY(~) SIMT_UNARY(!)

// Longer vectors are arrays (register fragments), which have no component names.
template <class T, int N>
struct vec {
#define SIMT_N N
  T d[N];
  SIMT_VEC_BODY
#undef SIMT_N
};

// Components keep the scalar's alignment: a host buffer may start at any multiple of it.

template <class T>
struct vec<T, 2> {
#define SIMT_N 2
  union {
    T d[2];
    struct { T x, y; };
    struct { T r, g; };
#include "simt/swizzle2.h"
  };
  SIMT_VEC_BODY
#undef SIMT_N
};
template <class T>
struct vec<T, 3> {
#define SIMT_N 3
  union {
    T d[3];
    T storage[4];
    struct { T x, y, z; };
    struct { T r, g, b; };
#include "simt/swizzle3.h"
  };
  SIMT_VEC_BODY
#undef SIMT_N
};
template <class T>
struct vec<T, 4> {
#define SIMT_N 4
  union {
    T d[4];
    struct { T x, y, z, w; };
    struct { T r, g, b, a; };
#include "simt/swizzle4.h"
  };
  SIMT_VEC_BODY
#undef SIMT_N
};
#undef SIMT_BINARY
#undef SIMT_COMPARE
#undef SIMT_UNARY
#undef SIMT_VEC_BODY

// Without the padding and the alignment of vec.
template <class T, int N>
struct packed_vec {
  T d[N];
  packed_vec() = default;
  constexpr packed_vec(const vec<T, N>& v) : d{} {
    for (int i = 0; i < N; i++) d[i] = v[i];
  }
  template <class... A>
    requires(sizeof...(A) > 1)
  constexpr packed_vec(const A&... a) : packed_vec(vec<T, N>(a...)) {}
  constexpr operator vec<T, N>() const {
    vec<T, N> v{};
    for (int i = 0; i < N; i++) v[i] = d[i];
    return v;
  }
  constexpr T& operator[](int i) { return d[i]; }
  constexpr const T& operator[](int i) const { return d[i]; }
};

template <class T, size_t N>
struct array {
  T d[N];
  constexpr T& operator[](size_t i) { return d[i]; }
  constexpr const T& operator[](size_t i) const { return d[i]; }
  constexpr size_t size() const { return N; }
};

}  // namespace metal

#define SIMT_VECTORS(T)                   \
  using T##2 = metal::vec<T, 2>;          \
  using T##3 = metal::vec<T, 3>;          \
  using T##4 = metal::vec<T, 4>;          \
  using packed_##T##2 = metal::packed_vec<T, 2>; \
  using packed_##T##3 = metal::packed_vec<T, 3>; \
  using packed_##T##4 = metal::packed_vec<T, 4>;
SIMT_VECTORS(bool)
SIMT_VECTORS(char)
SIMT_VECTORS(uchar)
SIMT_VECTORS(short)
SIMT_VECTORS(ushort)
SIMT_VECTORS(int)
SIMT_VECTORS(uint)
SIMT_VECTORS(long)
SIMT_VECTORS(ulong)
SIMT_VECTORS(half)
SIMT_VECTORS(float)
SIMT_VECTORS(bfloat)
#undef SIMT_VECTORS

template <class To, class From>
  requires(metal::is_vec_v<To> || metal::is_vec_v<From>)
constexpr To as_type(From x) {
  static_assert(sizeof(To) == sizeof(From), "as_type needs types of one size");
  To to;
  __builtin_memcpy(&to, &x, sizeof(To));
  return to;
}
