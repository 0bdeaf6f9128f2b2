// Metal's types and functions for a clang that reads OpenCL C++: declarations alone, with the
// conversions that Metal has and no others. Text that passes is as strict about address spaces,
// overloads and conversions as Apple's compiler is; `strict.py` adds the rest.
#pragma OPENCL EXTENSION cl_khr_fp16 : enable
#define device __global
#define constant __constant
#define thread __private
#define threadgroup __local

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef signed char int8_t;
typedef short int16_t;
typedef int int32_t;
typedef long int64_t;
typedef uchar uint8_t;
typedef ushort uint16_t;
typedef uint uint32_t;
typedef ulong uint64_t;
typedef ulong size_t;
typedef long ptrdiff_t;
typedef half float16_t;
#define INFINITY __builtin_huge_valf()
#define HUGE_VALF __builtin_huge_valf()
#define NAN __builtin_nanf("")
#define FLT_MAX 3.402823466e+38f
#define FLT_MIN 1.175494351e-38f
#define M_PI_F 3.14159265358979323846264338327950288f
#define M_LOG2E_F 1.44269504088896340735992468100189214f
#define M_LN2_F 0.693147180559945309417232121458176568f

namespace metal {
template <bool B, class T = int> struct enable_if {};
template <class T> struct enable_if<true, T> { using type = T; };
template <bool B, class T = int> using enable_if_t = typename enable_if<B, T>::type;
template <class T, class U> constexpr constant bool is_same_v = false;
template <class T> constexpr constant bool is_same_v<T, T> = true;
template <class T> constexpr constant bool is_integral_v =
    is_same_v<T, bool> || is_same_v<T, char> || is_same_v<T, int8_t> || is_same_v<T, uchar> ||
    is_same_v<T, short> || is_same_v<T, ushort> || is_same_v<T, int> || is_same_v<T, uint> ||
    is_same_v<T, long> || is_same_v<T, ulong>;
}  // namespace metal
using namespace metal;

// To float alone implicitly; from float and half only by a cast; from integers implicitly.
struct bfloat {
  ushort bits;
  bfloat() = default;
  template <class T, enable_if_t<is_integral_v<T>> = 0> bfloat(T);
  explicit bfloat(float);
  explicit bfloat(half);
  bfloat(const bfloat&) = default;
  bfloat(const constant bfloat&);
  bfloat& operator=(const bfloat&) = default;
#define CONVERT(space)                                                                      \
  template <class T, enable_if_t<is_same_v<T, float>> = 0> operator T() const space;        \
  template <class T, enable_if_t<is_integral_v<T> || is_same_v<T, half>> = 0>               \
  explicit operator T() const space;
  CONVERT(__generic) CONVERT(constant)
#undef CONVERT
};
typedef bfloat bfloat16_t;
#define OPERATOR(op)                                                                        \
  bfloat operator op(bfloat, bfloat);                                                       \
  float operator op(bfloat, float);                                                         \
  float operator op(float, bfloat);                                                         \
  template <class T, enable_if_t<is_integral_v<T>> = 0> bfloat operator op(bfloat, T);      \
  template <class T, enable_if_t<is_integral_v<T>> = 0> bfloat operator op(T, bfloat);      \
  void operator op(bfloat, half) = delete;                                                  \
  void operator op(half, bfloat) = delete;
OPERATOR(+) OPERATOR(-) OPERATOR(*) OPERATOR(/)
#undef OPERATOR
#define OPERATOR(op)                                                                        \
  bool operator op(bfloat, bfloat);                                                         \
  bool operator op(bfloat, float);                                                          \
  bool operator op(float, bfloat);
OPERATOR(<) OPERATOR(>) OPERATOR(<=) OPERATOR(>=) OPERATOR(==) OPERATOR(!=)
#undef OPERATOR
bfloat operator-(bfloat);
#define OPERATOR(space, op) space bfloat& operator op(space bfloat&, bfloat);
#define OPERATORS(op) OPERATOR(thread, op) OPERATOR(threadgroup, op) OPERATOR(device, op)
OPERATORS(+=) OPERATORS(-=) OPERATORS(*=) OPERATORS(/=)
#undef OPERATOR
#undef OPERATORS

// Vectors: clang's own, with Metal's constructors as functions behind a macro of the type's name.
namespace metal {
template <class T, int N> struct vec_of { typedef T type __attribute__((ext_vector_type(N))); };
struct bfloat2 { bfloat x, y; };
struct bfloat3 { bfloat x, y, z; };
struct bfloat4 { bfloat x, y, z, w; };
template <> struct vec_of<bfloat, 2> { typedef bfloat2 type; };
template <> struct vec_of<bfloat, 3> { typedef bfloat3 type; };
template <> struct vec_of<bfloat, 4> { typedef bfloat4 type; };
template <class T, int N> using vec = typename vec_of<T, N>::type;
#define VECTORS(T)                                                                          \
  typedef vec<T, 2> T##2;                                                                   \
  typedef vec<T, 3> T##3;                                                                   \
  typedef vec<T, 4> T##4;                                                                   \
  T##2 make_##T##2(T);                                                                      \
  T##2 make_##T##2(T, T);                                                                   \
  T##3 make_##T##3(T);                                                                      \
  T##3 make_##T##3(T, T, T);                                                                \
  T##3 make_##T##3(T##2, T);                                                                \
  T##3 make_##T##3(T, T##2);                                                                \
  T##4 make_##T##4(T);                                                                      \
  T##4 make_##T##4(T, T, T, T);                                                             \
  T##4 make_##T##4(T##2, T##2);                                                             \
  T##4 make_##T##4(T##3, T);                                                                \
  T##4 make_##T##4(T, T##3);
#define SCALARS(F) F(float) F(half) F(int) F(uint) F(short) F(ushort) F(char) F(uchar) F(long) F(ulong)
SCALARS(VECTORS)
#define CONVERT(T, U)                                                                       \
  T##2 make_##T##2(U##2);                                                                   \
  T##3 make_##T##3(U##3);                                                                   \
  T##4 make_##T##4(U##4);
#define CONVERTS(T)                                                                         \
  CONVERT(T, float) CONVERT(T, half) CONVERT(T, int) CONVERT(T, uint) CONVERT(T, short)     \
  CONVERT(T, ushort) CONVERT(T, char) CONVERT(T, uchar)
SCALARS(CONVERTS)
CONVERT(float, bfloat) CONVERT(half, bfloat)
bfloat2 make_bfloat2(bfloat, bfloat);
bfloat3 make_bfloat3(bfloat, bfloat, bfloat);
bfloat4 make_bfloat4(bfloat, bfloat, bfloat, bfloat);
CONVERT(bfloat, float) CONVERT(bfloat, half)

#define EACH(F, T) F(T) F(T##2) F(T##3) F(T##4)
#define FLOATS(F) EACH(F, float) EACH(F, half)
#define INTEGERS(F) EACH(F, int) EACH(F, uint) EACH(F, short) EACH(F, ushort) EACH(F, long) EACH(F, ulong)

// MLX's preamble gives bfloat the same mathematics.
#define MATH(T)                                                                             \
  T acos(T); T acosh(T); T asin(T); T atan(T); T atan2(T, T); T ceil(T); T cos(T); T cosh(T);   \
  T exp(T); T exp2(T); T exp10(T); T fabs(T); T floor(T); T fma(T, T, T); T fmax(T, T);         \
  T fmin(T, T); T fmod(T, T); T fract(T); T log(T); T log2(T); T log10(T); T pow(T, T);         \
  T powr(T, T); T rint(T); T round(T); T rsqrt(T); T sin(T); T sinh(T); T sqrt(T); T tan(T);    \
  T tanh(T); T trunc(T);
FLOATS(MATH) MATH(bfloat)
namespace fast { FLOATS(MATH) }
namespace precise { FLOATS(MATH) }
#define COMMON(T) T abs(T); T max(T, T); T min(T, T); T clamp(T, T, T);
FLOATS(COMMON) INTEGERS(COMMON) COMMON(bfloat)
#define BLEND(T) T mix(T, T, T); T saturate(T); T sign(T); T step(T, T);
FLOATS(BLEND)
#define PREDICATES(T) bool isnan(T); bool isinf(T); bool isfinite(T); bool signbit(T);
PREDICATES(float) PREDICATES(half) PREDICATES(bfloat)
#define DOT(T) T dot(T##2, T##2); T dot(T##3, T##3); T dot(T##4, T##4);
DOT(float) DOT(half)
#define BITS(T) T popcount(T); T clz(T); T ctz(T); T reverse_bits(T); T mulhi(T, T);
INTEGERS(BITS)
#define SELECT(T) T select(T, T, bool);
FLOATS(SELECT) INTEGERS(SELECT) SELECT(bfloat)
template <class T, class U> T as_type(U);

// Simdgroups: every type that a register holds.
#define REDUCE(T)                                                                           \
  T simd_sum(T); T simd_product(T); T simd_max(T); T simd_min(T);                           \
  T simd_prefix_inclusive_sum(T); T simd_prefix_exclusive_sum(T);
FLOATS(REDUCE) INTEGERS(REDUCE)
#define MOVE(T)                                                                             \
  T simd_shuffle(T, ushort); T simd_shuffle_xor(T, ushort); T simd_shuffle_up(T, ushort);   \
  T simd_shuffle_down(T, ushort); T simd_broadcast(T, ushort); T simd_broadcast_first(T);   \
  T simd_shuffle_rotate_down(T, ushort); T simd_shuffle_rotate_up(T, ushort);               \
  T quad_shuffle(T, ushort); T quad_shuffle_xor(T, ushort); T quad_broadcast(T, ushort);
FLOATS(MOVE) INTEGERS(MOVE) MOVE(bfloat)
#define LOGIC(T) T simd_and(T); T simd_or(T); T simd_xor(T);
INTEGERS(LOGIC)
struct simd_vote { explicit operator ulong() const; bool all() const; bool any() const; };
simd_vote simd_ballot(bool);
bool simd_all(bool);
bool simd_any(bool);
bool simd_is_first();
enum class mem_flags : uint { mem_none, mem_device, mem_threadgroup, mem_texture = 4 };
void threadgroup_barrier(mem_flags);
void simdgroup_barrier(mem_flags);

#define atomic_int msl_atomic_int  // OpenCL has its own
#define atomic_uint msl_atomic_uint
#define memory_order_relaxed msl_memory_order_relaxed
enum memory_order { memory_order_relaxed };
template <class T> struct atomic { T value; };
typedef atomic<int> atomic_int;
typedef atomic<uint> atomic_uint;
#define ATOMIC(space, op)                                                                   \
  template <class T> T op(volatile space atomic<T>*, T, memory_order);                      \
  template <class T> T op(space atomic<T>*, T, memory_order);
#define ATOMICS(op) ATOMIC(device, op) ATOMIC(threadgroup, op)
ATOMICS(atomic_fetch_add_explicit) ATOMICS(atomic_fetch_sub_explicit)
ATOMICS(atomic_fetch_max_explicit) ATOMICS(atomic_fetch_min_explicit)
ATOMICS(atomic_fetch_or_explicit) ATOMICS(atomic_fetch_and_explicit)
ATOMICS(atomic_exchange_explicit)
template <class T> void atomic_store_explicit(device atomic<T>*, T, memory_order);
template <class T> void atomic_store_explicit(threadgroup atomic<T>*, T, memory_order);
template <class T> T atomic_load_explicit(device atomic<T>*, memory_order);
template <class T> T atomic_load_explicit(threadgroup atomic<T>*, memory_order);

template <class T, int R, int C> struct simdgroup_matrix {
  simdgroup_matrix() = default;
  explicit simdgroup_matrix(T);
  thread vec<T, 2>& thread_elements();
};
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;
#define MATRIX(space)                                                                       \
  template <class T>                                                                        \
  void simdgroup_load(thread simdgroup_matrix<T, 8, 8>&, const space T*, ulong = 8,         \
                      vec<ulong, 2> = 0, bool = false);                                     \
  template <class T>                                                                        \
  void simdgroup_store(simdgroup_matrix<T, 8, 8>, space T*, ulong = 8, vec<ulong, 2> = 0);
MATRIX(device) MATRIX(threadgroup)
template <class D, class A, class B, class C>
void simdgroup_multiply_accumulate(thread simdgroup_matrix<D, 8, 8>&, simdgroup_matrix<A, 8, 8>,
                                   simdgroup_matrix<B, 8, 8>, simdgroup_matrix<C, 8, 8>);
template <class D, class A, class B>
void simdgroup_multiply(thread simdgroup_matrix<D, 8, 8>&, simdgroup_matrix<A, 8, 8>,
                        simdgroup_matrix<B, 8, 8>);

template <class T> struct numeric_limits {
  static constexpr T max();
  static constexpr T min();
  static constexpr T lowest();
  static constexpr T infinity();
  static constexpr T epsilon();
};
}  // namespace metal
using namespace metal;

// float4(a, b, c, d) is a call; float4 alone stays the type.
#define float2(...) make_float2(__VA_ARGS__)
#define float3(...) make_float3(__VA_ARGS__)
#define float4(...) make_float4(__VA_ARGS__)
#define half2(...) make_half2(__VA_ARGS__)
#define half3(...) make_half3(__VA_ARGS__)
#define half4(...) make_half4(__VA_ARGS__)
#define bfloat2(...) make_bfloat2(__VA_ARGS__)
#define bfloat3(...) make_bfloat3(__VA_ARGS__)
#define bfloat4(...) make_bfloat4(__VA_ARGS__)
#define int2(...) make_int2(__VA_ARGS__)
#define int3(...) make_int3(__VA_ARGS__)
#define int4(...) make_int4(__VA_ARGS__)
#define uint2(...) make_uint2(__VA_ARGS__)
#define uint3(...) make_uint3(__VA_ARGS__)
#define uint4(...) make_uint4(__VA_ARGS__)
#define short2(...) make_short2(__VA_ARGS__)
#define short3(...) make_short3(__VA_ARGS__)
#define short4(...) make_short4(__VA_ARGS__)
#define ushort2(...) make_ushort2(__VA_ARGS__)
#define ushort3(...) make_ushort3(__VA_ARGS__)
#define ushort4(...) make_ushort4(__VA_ARGS__)
#define char2(...) make_char2(__VA_ARGS__)
#define char3(...) make_char3(__VA_ARGS__)
#define char4(...) make_char4(__VA_ARGS__)
#define uchar2(...) make_uchar2(__VA_ARGS__)
#define uchar3(...) make_uchar3(__VA_ARGS__)
#define uchar4(...) make_uchar4(__VA_ARGS__)
#define long2(...) make_long2(__VA_ARGS__)
#define long3(...) make_long3(__VA_ARGS__)
#define long4(...) make_long4(__VA_ARGS__)
#define ulong2(...) make_ulong2(__VA_ARGS__)
#define ulong3(...) make_ulong3(__VA_ARGS__)
#define ulong4(...) make_ulong4(__VA_ARGS__)
