// Metal's names for CUDA, in the namespace where MLX puts a custom kernel. `cuda.py` includes this
// file by its path, so that only the kernel's own text is hashed at each call.
//
// A warp is a simdgroup: 32 lanes, numbered along x first. The launcher sends whole threadgroups
// of whole simdgroups, so every lane exists. A simd function must be reached by all 32 of them.
// Half and bfloat compute as in Metal: each operation rounds; with a float, the result is float.
#pragma once
#define INFINITY __int_as_float(0x7f800000)
#define HUGE_VALF INFINITY
#define NAN __int_as_float(0x7fffffff)
#define FLT_MAX 3.402823466e+38f
#define FLT_MIN 1.175494351e-38f
#define M_PI_F 3.14159265358979323846264338327950288f
#define M_LOG2E_F 1.44269504088896340735992468100189214f
#define M_LN2_F 0.693147180559945309417232121458176568f

namespace mlx::core::cu {

using uchar = unsigned char;
using ushort = unsigned short;
using uint = unsigned int;
using ulong = unsigned long long;
using half = __half;
using bfloat = __nv_bfloat16;
using float16_t = half;
using bfloat16_t = bfloat;

template <bool B, class T = int>
using enable_if_t = cuda::std::enable_if_t<B, T>;
using cuda::std::is_integral_v;
using cuda::std::is_same_v;
template <class T>
constexpr bool is_small_float_v = is_same_v<T, half> || is_same_v<T, bfloat>;
template <class T>
constexpr bool is_float_v = is_small_float_v<T> || is_same_v<T, float>;
template <class T>
constexpr bool is_scalar_v = is_float_v<T> || is_integral_v<T>;

// The value of one scalar type as another; half and bfloat meet in float.
template <class T, class U>
T scalar_cast(U x) {
  if constexpr (is_small_float_v<T> || is_small_float_v<U>) {
    return static_cast<T>(static_cast<float>(x));
  } else {
    return static_cast<T>(x);
  }
}

// Metal has these; CUDA finds them ambiguous.
#define MSL_OPERATOR(T, op)                                                                 \
  inline float operator op(T a, float b) { return float(a) op b; }                          \
  inline float operator op(float a, T b) { return a op float(b); }                          \
  template <class U, enable_if_t<is_integral_v<U>> = 0>                                     \
  T operator op(T a, U b) { return a op T(float(b)); }                                      \
  template <class U, enable_if_t<is_integral_v<U>> = 0>                                     \
  T operator op(U a, T b) { return T(float(a)) op b; }
#define MSL_COMPARE(T, op)                                                                  \
  inline bool operator op(T a, float b) { return float(a) op b; }                           \
  inline bool operator op(float a, T b) { return a op float(b); }                           \
  template <class U, enable_if_t<is_integral_v<U>> = 0>                                     \
  bool operator op(T a, U b) { return float(a) op float(b); }
#define MSL_SMALL(T)                                                                        \
  MSL_OPERATOR(T, +) MSL_OPERATOR(T, -) MSL_OPERATOR(T, *) MSL_OPERATOR(T, /)               \
  MSL_COMPARE(T, <) MSL_COMPARE(T, >) MSL_COMPARE(T, <=) MSL_COMPARE(T, >=)                 \
  MSL_COMPARE(T, ==) MSL_COMPARE(T, !=)
MSL_SMALL(half)
MSL_SMALL(bfloat)

// Vectors. One of three takes the room of four.
template <class T, int N>
struct vec;
template <class T>
struct alignas(2 * sizeof(T)) vec<T, 2> {
  T x, y;
  vec() = default;
  explicit vec(T s) : x(s), y(s) {}
  vec(T a, T b) : x(a), y(b) {}
  template <class U>
  explicit vec(vec<U, 2> v) : x(scalar_cast<T>(v.x)), y(scalar_cast<T>(v.y)) {}
  T& operator[](int i) { return (&x)[i]; }
  const T& operator[](int i) const { return (&x)[i]; }
  template <int... I>
  auto swizzle() const;
};
template <class T>
struct alignas(4 * sizeof(T)) vec<T, 3> {
  T x, y, z;
  vec() = default;
  explicit vec(T s) : x(s), y(s), z(s) {}
  vec(T a, T b, T c) : x(a), y(b), z(c) {}
  vec(vec<T, 2> v, T c) : x(v.x), y(v.y), z(c) {}
  vec(T a, vec<T, 2> v) : x(a), y(v.x), z(v.y) {}
  vec(::uint3 v) : x(v.x), y(v.y), z(v.z) {}
  vec(::dim3 v) : x(v.x), y(v.y), z(v.z) {}
  template <class U>
  explicit vec(vec<U, 3> v)
      : x(scalar_cast<T>(v.x)), y(scalar_cast<T>(v.y)), z(scalar_cast<T>(v.z)) {}
  T& operator[](int i) { return (&x)[i]; }
  const T& operator[](int i) const { return (&x)[i]; }
  template <int... I>
  auto swizzle() const;
};
template <class T>
struct alignas(4 * sizeof(T)) vec<T, 4> {
  T x, y, z, w;
  vec() = default;
  explicit vec(T s) : x(s), y(s), z(s), w(s) {}
  vec(T a, T b, T c, T d) : x(a), y(b), z(c), w(d) {}
  vec(vec<T, 2> a, vec<T, 2> b) : x(a.x), y(a.y), z(b.x), w(b.y) {}
  vec(vec<T, 3> v, T d) : x(v.x), y(v.y), z(v.z), w(d) {}
  vec(T a, vec<T, 3> v) : x(a), y(v.x), z(v.y), w(v.z) {}
  template <class U>
  explicit vec(vec<U, 4> v)
      : x(scalar_cast<T>(v.x)), y(scalar_cast<T>(v.y)), z(scalar_cast<T>(v.z)),
        w(scalar_cast<T>(v.w)) {}
  T& operator[](int i) { return (&x)[i]; }
  const T& operator[](int i) const { return (&x)[i]; }
  template <int... I>
  auto swizzle() const;
};
#define MSL_SWIZZLE(N)                                                                      \
  template <class T>                                                                        \
  template <int... I>                                                                       \
  auto vec<T, N>::swizzle() const { return vec<T, sizeof...(I)>((*this)[I]...); }
MSL_SWIZZLE(2) MSL_SWIZZLE(3) MSL_SWIZZLE(4)

#define MSL_NAMES(T)                                                                        \
  using T##2 = vec<T, 2>;                                                                   \
  using T##3 = vec<T, 3>;                                                                   \
  using T##4 = vec<T, 4>;
MSL_NAMES(float) MSL_NAMES(half) MSL_NAMES(bfloat) MSL_NAMES(int) MSL_NAMES(uint)
MSL_NAMES(short) MSL_NAMES(ushort) MSL_NAMES(char) MSL_NAMES(uchar) MSL_NAMES(long)
MSL_NAMES(ulong) MSL_NAMES(bool)

// f of each element.
template <class T, int N, class F, class... More>
auto each(F f, vec<T, N> a, More... more) {
  vec<decltype(f(a[0], more[0]...)), N> out;
  for (int i = 0; i < N; i++) out[i] = f(a[i], more[i]...);
  return out;
}
#define MSL_VECTOR(op)                                                                      \
  template <class T, int N>                                                                 \
  auto operator op(vec<T, N> a, vec<T, N> b) {                                              \
    return each([](T x, T y) { return x op y; }, a, b);                                     \
  }                                                                                         \
  template <class T, int N, class U, enable_if_t<is_scalar_v<U>> = 0>                       \
  auto operator op(vec<T, N> a, U b) {                                                      \
    const T s = scalar_cast<T>(b);                                                          \
    return each([s](T x) { return x op s; }, a);                                            \
  }                                                                                         \
  template <class T, int N, class U, enable_if_t<is_scalar_v<U>> = 0>                       \
  auto operator op(U a, vec<T, N> b) {                                                      \
    const T s = scalar_cast<T>(a);                                                          \
    return each([s](T x) { return s op x; }, b);                                            \
  }
#define MSL_ARITHMETIC(op)                                                                  \
  MSL_VECTOR(op)                                                                            \
  template <class T, int N, class U>                                                        \
  vec<T, N>& operator op##=(vec<T, N>& a, U b) { return a = vec<T, N>(a op b); }
MSL_ARITHMETIC(+) MSL_ARITHMETIC(-) MSL_ARITHMETIC(*) MSL_ARITHMETIC(/) MSL_ARITHMETIC(%)
MSL_ARITHMETIC(&) MSL_ARITHMETIC(|) MSL_ARITHMETIC(^) MSL_ARITHMETIC(<<) MSL_ARITHMETIC(>>)
MSL_VECTOR(<) MSL_VECTOR(>) MSL_VECTOR(<=) MSL_VECTOR(>=) MSL_VECTOR(==) MSL_VECTOR(!=)
template <class T, int N>
vec<T, N> operator-(vec<T, N> a) {
  return each([](T x) { return T(-x); }, a);
}

// Mathematics: float, then half and bfloat through float, then vectors element by element.
#define MSL_MATH1(name, f)                                                                  \
  inline float name(float x) { return f(x); }                                               \
  template <class T, enable_if_t<is_small_float_v<T>> = 0>                                  \
  T name(T x) { return T(f(float(x))); }                                                    \
  template <class T, int N>                                                                 \
  vec<T, N> name(vec<T, N> v) { return each([](T x) { return name(x); }, v); }
#define MSL_MATH2(name, f)                                                                  \
  inline float name(float x, float y) { return f(x, y); }                                   \
  template <class T, enable_if_t<is_small_float_v<T>> = 0>                                  \
  T name(T x, T y) { return T(f(float(x), float(y))); }                                     \
  template <class T, int N>                                                                 \
  vec<T, N> name(vec<T, N> v, vec<T, N> w) {                                                \
    return each([](T x, T y) { return name(x, y); }, v, w);                                 \
  }
#define MSL_COMMON                                                                          \
  MSL_MATH1(acos, acosf) MSL_MATH1(acosh, acoshf) MSL_MATH1(asin, asinf)                    \
  MSL_MATH1(atan, atanf) MSL_MATH1(ceil, ceilf) MSL_MATH1(cosh, coshf)                      \
  MSL_MATH1(exp10, exp10f) MSL_MATH1(fabs, fabsf) MSL_MATH1(floor, floorf)                  \
  MSL_MATH1(rint, rintf) MSL_MATH1(round, roundf) MSL_MATH1(rsqrt, rsqrtf)                  \
  MSL_MATH1(sinh, sinhf) MSL_MATH1(sqrt, sqrtf) MSL_MATH1(tan, tanf) MSL_MATH1(tanh, tanhf) \
  MSL_MATH1(trunc, truncf) MSL_MATH1(exp2, exp2f) MSL_MATH2(atan2, atan2f)                  \
  MSL_MATH2(fmax, fmaxf) MSL_MATH2(fmin, fminf) MSL_MATH2(fmod, fmodf)
#define MSL_PRECISE                                                                         \
  MSL_COMMON MSL_MATH1(cos, cosf) MSL_MATH1(sin, sinf) MSL_MATH1(exp, expf)                 \
  MSL_MATH1(log, logf) MSL_MATH1(log2, log2f) MSL_MATH1(log10, log10f)                      \
  MSL_MATH2(pow, powf) MSL_MATH2(powr, powf)
#define MSL_FAST                                                                            \
  MSL_COMMON MSL_MATH1(cos, __cosf) MSL_MATH1(sin, __sinf) MSL_MATH1(exp, __expf)           \
  MSL_MATH1(log, __logf) MSL_MATH1(log2, __log2f) MSL_MATH1(log10, __log10f)                \
  MSL_MATH2(pow, __powf) MSL_MATH2(powr, __powf)
MSL_PRECISE
namespace precise { MSL_PRECISE }
namespace fast { MSL_FAST }

inline float fma(float a, float b, float c) { return fmaf(a, b, c); }
template <class T, enable_if_t<is_small_float_v<T>> = 0>
T fma(T a, T b, T c) { return __hfma(a, b, c); }
template <class T, int N>
vec<T, N> fma(vec<T, N> a, vec<T, N> b, vec<T, N> c) {
  return each([](T x, T y, T z) { return fma(x, y, z); }, a, b, c);
}
template <class T, enable_if_t<is_scalar_v<T>> = 0>
T max(T a, T b) {
  if constexpr (is_float_v<T>) return fmax(a, b);
  return a < b ? b : a;
}
template <class T, enable_if_t<is_scalar_v<T>> = 0>
T min(T a, T b) {
  if constexpr (is_float_v<T>) return fmin(a, b);
  return b < a ? b : a;
}
template <class T, int N>
vec<T, N> max(vec<T, N> a, vec<T, N> b) {
  return each([](T x, T y) { return max(x, y); }, a, b);
}
template <class T, int N>
vec<T, N> min(vec<T, N> a, vec<T, N> b) {
  return each([](T x, T y) { return min(x, y); }, a, b);
}
template <class T>
T clamp(T x, T low, T high) { return min(max(x, low), high); }
template <class T, enable_if_t<is_scalar_v<T>> = 0>
T abs(T x) {
  if constexpr (is_float_v<T>) return fabs(x);
  return x < T(0) ? T(-x) : x;
}
template <class T, int N>
vec<T, N> abs(vec<T, N> v) { return each([](T x) { return abs(x); }, v); }
template <class T>
T mix(T a, T b, T t) { return a + (b - a) * t; }
template <class T>
T saturate(T x) { return clamp(x, T(0.0f), T(1.0f)); }
template <class T>
T sign(T x) { return x > T(0.0f) ? T(1.0f) : x < T(0.0f) ? T(-1.0f) : T(0.0f); }
template <class T>
T select(T no, T yes, bool condition) { return condition ? yes : no; }
template <class T, int N>
T dot(vec<T, N> a, vec<T, N> b) {
  T sum = a[0] * b[0];
  for (int i = 1; i < N; i++) sum += a[i] * b[i];
  return sum;
}
template <class T>
bool isnan(T x) { return float(x) != float(x); }
template <class T>
bool isinf(T x) { return fabsf(float(x)) == INFINITY; }
template <class T>
bool isfinite(T x) { return fabsf(float(x)) < INFINITY; }
inline uint popcount(uint x) { return __popc(x); }
inline uint clz(uint x) { return __clz(x); }
inline uint ctz(uint x) { return x ? __ffs(x) - 1 : 32; }
template <class T, class U>
T as_type(U x) {
  static_assert(sizeof(T) == sizeof(U));
  T out;
  memcpy(&out, &x, sizeof(T));
  return out;
}
template <class T>
struct numeric_limits : Limits<T> {
  static constexpr T infinity() { return Limits<T>::max(); }
  static constexpr T lowest() { return Limits<T>::finite_min(); }
};

// Simdgroups. Any type travels as words of 32 bits.
template <class T, class F>
T by_words(T x, F f) {
  uint words[(sizeof(T) + 3) / 4] = {};
  memcpy(words, &x, sizeof(T));
  for (uint& word : words) word = f(word);
  memcpy(&x, words, sizeof(T));
  return x;
}
#define MSL_MOVE(name, intrinsic)                                                           \
  template <class T>                                                                        \
  T name(T x, ushort n) {                                                                   \
    return by_words(x, [n](uint word) { return intrinsic(0xffffffffu, word, n); });         \
  }
MSL_MOVE(simd_shuffle, __shfl_sync)
MSL_MOVE(simd_shuffle_xor, __shfl_xor_sync)
MSL_MOVE(simd_shuffle_up, __shfl_up_sync)
MSL_MOVE(simd_shuffle_down, __shfl_down_sync)
MSL_MOVE(simd_broadcast, __shfl_sync)
template <class T>
T simd_broadcast_first(T x) { return simd_broadcast(x, 0); }
#define MSL_REDUCE(name, expression)                                                        \
  template <class T>                                                                        \
  T name(T a) {                                                                             \
    for (int n = 1; n < 32; n *= 2) {                                                       \
      const T b = simd_shuffle_xor(a, n);                                                   \
      a = expression;                                                                       \
    }                                                                                       \
    return a;                                                                               \
  }
MSL_REDUCE(simd_sum, a + b)
MSL_REDUCE(simd_product, a* b)
MSL_REDUCE(simd_max, max(a, b))
MSL_REDUCE(simd_min, min(a, b))
MSL_REDUCE(simd_and, a& b)
MSL_REDUCE(simd_or, a | b)
MSL_REDUCE(simd_xor, a ^ b)
inline uint linear_index() {
  return threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
}
template <class T>
T simd_prefix_inclusive_sum(T x) {
  for (uint n = 1; n < 32; n *= 2) {
    const T below = simd_shuffle_up(x, n);
    if (linear_index() % 32 >= n) x = x + below;
  }
  return x;
}
template <class T>
T simd_prefix_exclusive_sum(T x) {
  const T below = simd_shuffle_up(simd_prefix_inclusive_sum(x), 1);
  return linear_index() % 32 ? below : T(0);
}
struct simd_vote {
  uint lanes;
  explicit operator ulong() const { return lanes; }
  explicit operator uint() const { return lanes; }
  bool all() const { return lanes == 0xffffffffu; }
  bool any() const { return lanes != 0; }
};
inline simd_vote simd_ballot(bool x) { return {__ballot_sync(0xffffffffu, x)}; }
inline bool simd_all(bool x) { return __all_sync(0xffffffffu, x); }
inline bool simd_any(bool x) { return __any_sync(0xffffffffu, x); }
inline bool simd_is_first() { return linear_index() % 32 == 0; }

enum class mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2 };
inline void threadgroup_barrier(mem_flags) { __syncthreads(); }
inline void simdgroup_barrier(mem_flags) { __syncwarp(); }

template <class T>
struct atomic {
  T value;
};
using atomic_int = atomic<int>;
using atomic_uint = atomic<uint>;
enum memory_order { memory_order_relaxed };
#define MSL_ATOMIC(name, intrinsic)                                                         \
  template <class T, class U>                                                               \
  T name(atomic<T>* at, U x, memory_order) { return intrinsic(&at->value, T(x)); }
MSL_ATOMIC(atomic_fetch_add_explicit, atomicAdd)
MSL_ATOMIC(atomic_fetch_sub_explicit, atomicSub)
MSL_ATOMIC(atomic_fetch_max_explicit, atomicMax)
MSL_ATOMIC(atomic_fetch_min_explicit, atomicMin)
MSL_ATOMIC(atomic_fetch_or_explicit, atomicOr)
MSL_ATOMIC(atomic_fetch_and_explicit, atomicAnd)
MSL_ATOMIC(atomic_exchange_explicit, atomicExch)
template <class T, class U>
void atomic_store_explicit(atomic<T>* at, U x, memory_order) {
  *const_cast<volatile T*>(&at->value) = T(x);
}
template <class T>
T atomic_load_explicit(const atomic<T>* at, memory_order) {
  return *const_cast<const volatile T*>(&at->value);
}

// Thread attributes; `cuda.py` declares those that a body names.
inline uint3 get_thread_position_in_threadgroup() { return threadIdx; }
inline uint3 get_threadgroup_position_in_grid() { return blockIdx; }
inline uint3 get_threads_per_threadgroup() { return blockDim; }
inline uint3 get_dispatch_threads_per_threadgroup() { return blockDim; }
inline uint3 get_threadgroups_per_grid() { return gridDim; }
inline uint3 get_thread_position_in_grid() {
  return uint3(blockIdx) * uint3(blockDim) + uint3(threadIdx);
}
inline uint3 get_threads_per_grid() { return uint3(gridDim) * uint3(blockDim); }
inline uint3 get_grid_size() { return get_threads_per_grid(); }
inline uint3 get_grid_origin() { return uint3(0u); }
inline uint get_thread_index_in_threadgroup() { return linear_index(); }
inline uint get_thread_index_in_simdgroup() { return linear_index() % 32; }
inline uint get_simdgroup_index_in_threadgroup() { return linear_index() / 32; }
inline uint get_simdgroups_per_threadgroup() {
  return (blockDim.x * blockDim.y * blockDim.z + 31) / 32;
}
inline uint get_dispatch_simdgroups_per_threadgroup() { return get_simdgroups_per_threadgroup(); }
inline uint get_threads_per_simdgroup() { return 32; }
inline uint get_thread_execution_width() { return 32; }

}  // namespace mlx::core::cu
