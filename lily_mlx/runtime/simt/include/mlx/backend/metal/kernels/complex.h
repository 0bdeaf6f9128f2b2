// MLX's complex type for one address space: its own header overloads by address space.
#pragma once
#include <metal_stdlib>

template <class T>
struct complex_t;
template <class T>
constexpr bool is_complex_v = false;
template <class T>
constexpr bool is_complex_v<complex_t<T>> = true;

template <class T>
struct complex_t {
  using value_type = T;
  T real, imag;
  complex_t() = default;
  constexpr complex_t(T re, T im) : real(re), imag(im) {}
  constexpr complex_t(metal::vec<T, 2> v) : real(v.x), imag(v.y) {}
  template <class U>
    requires(metal::is_arithmetic_v<U>)
  constexpr complex_t(U x) : real(T(x)), imag(T(0)) {}
  template <class U>
    requires(metal::is_arithmetic_v<U>)
  explicit constexpr operator U() const { return U(real); }
  constexpr operator metal::vec<T, 2>() const { return {real, imag}; }

  friend constexpr complex_t operator-(complex_t a) { return {-a.real, -a.imag}; }
  friend constexpr complex_t operator+(complex_t a, complex_t b) {
    return {a.real + b.real, a.imag + b.imag};
  }
  friend constexpr complex_t operator-(complex_t a, complex_t b) {
    return {a.real - b.real, a.imag - b.imag};
  }
  friend constexpr complex_t operator*(complex_t a, complex_t b) {
    return {a.real * b.real - a.imag * b.imag, a.real * b.imag + a.imag * b.real};
  }
  friend constexpr complex_t operator/(complex_t a, complex_t b) {
    T square = b.real * b.real + b.imag * b.imag;
    complex_t top = a * complex_t(b.real, -b.imag);
    return {top.real / square, top.imag / square};
  }
  friend constexpr complex_t operator%(complex_t a, complex_t b) {
    complex_t q = a / b;
    return a - complex_t(metal::trunc(q.real), metal::trunc(q.imag)) * b;
  }
  complex_t& operator+=(complex_t b) { return *this = *this + b; }
  friend constexpr bool operator==(complex_t a, complex_t b) {
    return a.real == b.real && a.imag == b.imag;
  }
  friend constexpr bool operator<(complex_t a, complex_t b) {
    return a.real < b.real || (a.real == b.real && a.imag < b.imag);
  }
  friend constexpr bool operator>(complex_t a, complex_t b) { return b < a; }
  friend constexpr bool operator<=(complex_t a, complex_t b) { return a < b || a == b; }
  friend constexpr bool operator>=(complex_t a, complex_t b) { return b <= a; }
};
typedef complex_t<float> complex64_t;
