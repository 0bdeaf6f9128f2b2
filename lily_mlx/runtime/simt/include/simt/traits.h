// Scalar types, address-space words and the type traits of <metal_type_traits>.
//
// The executor runs a threadgroup in one address space, so the address-space words vanish;
// `constant` keeps its const. Nothing here includes a C or C++ standard header.
#pragma once

#define __METAL__ 1
#define __METAL_VERSION__ 400
#define METAL_FUNC inline __attribute__((always_inline))
#define METAL_ASM
#define device
#define thread
#define threadgroup
#define threadgroup_imageblock
#define constant const
#define kernel
#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#define MAXFLOAT 3.402823466e+38f
#define HUGE_VALF __builtin_inff()
#define M_PI_F 3.14159265358979323846f
#define M_PI_2_F 1.57079632679489661923f
#define M_1_PI_F 0.31830988618379067154f
#define M_2_PI_F 0.63661977236758134308f
#define M_SQRT2_F 1.41421356237309504880f
#define M_SQRT1_2_F 0.70710678118654752440f
#define M_E_F 2.71828182845904523536f
#define M_LOG2E_F 1.44269504088896340736f
#define M_LN2_F 0.69314718055994530942f
#define M_LN10_F 2.30258509299404568402f
#define M_LOG10E_F 0.43429448190325182765f
#define M_PI_4_F 0.78539816339744830962f
#define FLT_MAX 3.402823466e+38f
#define FLT_MIN 1.175494351e-38f
#define FLT_EPSILON 1.192092896e-07f
#define INT_MAX 2147483647
#define INT_MIN (-2147483647 - 1)
#define UINT_MAX 4294967295u
#define assert(condition) ((void)0)

using uchar = unsigned char;
using ushort = unsigned short;
using uint = unsigned int;
using ulong = unsigned long;
using int8_t = signed char;
using uint8_t = unsigned char;
using int16_t = short;
using uint16_t = unsigned short;
using int32_t = int;
using uint32_t = unsigned int;
using int64_t = long;
using uint64_t = unsigned long;
using size_t = unsigned long;
using ptrdiff_t = long;
using uintptr_t = unsigned long;
using half = _Float16;
struct bfloat;

namespace metal {

template <class T, T v>
struct integral_constant {
  static constexpr T value = v;
  using value_type = T;
  using type = integral_constant;
  constexpr operator T() const { return v; }
};
template <bool b>
using bool_constant = integral_constant<bool, b>;
using true_type = bool_constant<true>;
using false_type = bool_constant<false>;

template <bool b, class T = void>
struct enable_if {};
template <class T>
struct enable_if<true, T> {
  using type = T;
};
template <bool b, class T = void>
using enable_if_t = typename enable_if<b, T>::type;

template <bool b, class T, class F>
struct conditional {
  using type = T;
};
template <class T, class F>
struct conditional<false, T, F> {
  using type = F;
};
template <bool b, class T, class F>
using conditional_t = typename conditional<b, T, F>::type;

template <class T>
struct remove_cv {
  using type = __remove_cv(T);
};
template <class T>
using remove_cv_t = __remove_cv(T);
template <class T>
using remove_const_t = __remove_const(T);
template <class T>
using remove_reference_t = __remove_reference_t(T);
template <class T>
struct remove_reference {
  using type = __remove_reference_t(T);
};
template <class T>
using remove_pointer_t = __remove_pointer(T);
template <class T>
using decay_t = __decay(T);
template <class T>
using remove_addrspace_t = T;
template <class T>
using make_signed_t = __make_signed(T);
template <class T>
using make_unsigned_t = __make_unsigned(T);

template <class A, class B>
constexpr bool is_same_v = __is_same(A, B);
template <class A, class B>
struct is_same : bool_constant<__is_same(A, B)> {};
template <class A, class B>
constexpr bool is_convertible_v = __is_convertible(A, B);
template <class A, class B>
struct is_convertible : bool_constant<__is_convertible(A, B)> {};
template <class T>
constexpr bool is_integral_v = __is_integral(T);
template <class T>
struct is_integral : bool_constant<__is_integral(T)> {};
template <class T>
constexpr bool is_floating_point_v = __is_floating_point(T) || __is_same(__remove_cv(T), bfloat);
template <class T>
struct is_floating_point : bool_constant<is_floating_point_v<T>> {};
template <class T>
constexpr bool is_arithmetic_v = is_integral_v<T> || is_floating_point_v<T>;
template <class T>
struct is_arithmetic : bool_constant<is_arithmetic_v<T>> {};
template <class T>
constexpr bool is_signed_v = __is_signed(T) || is_floating_point_v<T>;
template <class T>
struct is_signed : bool_constant<is_signed_v<T>> {};
template <class T>
constexpr bool is_unsigned_v = __is_unsigned(T);
template <class T>
struct is_unsigned : bool_constant<__is_unsigned(T)> {};
template <class T>
constexpr bool is_pointer_v = __is_pointer(T);
template <class T>
struct is_pointer : bool_constant<__is_pointer(T)> {};
template <class T>
constexpr bool is_const_v = __is_const(T);
template <class...>
using void_t = void;
template <class T>
struct type_identity {
  using type = T;
};
template <class T>
using type_identity_t = typename type_identity<T>::type;

template <class... B>
struct _disjunction : bool_constant<(B::value || ...)> {};
template <class... B>
struct _conjunction : bool_constant<(B::value && ...)> {};

// The compiler's promise that all lanes agree on a value.
template <class T>
using uniform = T;
template <class T>
constexpr T make_uniform(T x) {
  return x;
}

template <class T>
T&& declval() noexcept;

template <class T>
struct numeric_limits;
template <class T>
  requires(__is_integral(T))
struct numeric_limits<T> {
  static constexpr bool is_signed = T(-1) < T(0);
  static constexpr int digits = int(sizeof(T)) * 8 - is_signed;
  static constexpr T min() { return is_signed ? T(T(1) << (sizeof(T) * 8 - 1)) : T(0); }
  static constexpr T max() { return T(~min()); }
  static constexpr T lowest() { return min(); }
};
template <>
struct numeric_limits<bool> {
  static constexpr bool min() { return false; }
  static constexpr bool max() { return true; }
};
template <>
struct numeric_limits<float> {
  static constexpr int digits = 24;
  static constexpr float min() { return 1.175494351e-38f; }
  static constexpr float max() { return 3.402823466e+38f; }
  static constexpr float lowest() { return -max(); }
  static constexpr float epsilon() { return 1.192092896e-07f; }
  static constexpr float infinity() { return __builtin_inff(); }
  static constexpr float quiet_NaN() { return __builtin_nanf(""); }
};
template <>
struct numeric_limits<half> {
  static constexpr int digits = 11;
  static constexpr half min() { return half(6.103515625e-05f); }
  static constexpr half max() { return half(65504.0f); }
  static constexpr half lowest() { return -max(); }
  static constexpr half epsilon() { return half(9.765625e-04f); }
  static constexpr half infinity() { return half(__builtin_inff()); }
  static constexpr half quiet_NaN() { return half(__builtin_nanf("")); }
};

}  // namespace metal

template <class To, class From>
  requires(!requires(To t) { t[0]; } && !requires(From f) { f[0]; })
constexpr To as_type(From x) {
  static_assert(sizeof(To) == sizeof(From), "as_type needs types of one size");
  return __builtin_bit_cast(To, x);
}
