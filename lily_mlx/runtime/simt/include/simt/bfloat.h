// bfloat with MSL's conversions: to float implicitly, from integers implicitly, from float and
// half only by an explicit cast. bfloat op bfloat rounds to bfloat (nearest, ties to even).
#pragma once
#include "simt/traits.h"

struct bfloat {
  ushort bits;

  bfloat() = default;
  template <class T>
    requires(__is_integral(T))
  constexpr bfloat(T x) : bits(round(float(x))) {}
  template <class T>
    requires(__is_floating_point(T))
  explicit constexpr bfloat(T x) : bits(round(float(x))) {}
  constexpr operator float() const { return __builtin_bit_cast(float, uint(bits) << 16); }

  static constexpr ushort round(float x) {
    uint u = __builtin_bit_cast(uint, x);
    if (x != x) return ushort((u >> 16) | 0x40);
    return ushort((ulong(u) + 0x7fff + ((u >> 16) & 1)) >> 16);
  }

  bfloat& operator+=(bfloat b) { return *this = bfloat(float(*this) + float(b)); }
  bfloat& operator-=(bfloat b) { return *this = bfloat(float(*this) - float(b)); }
  bfloat& operator*=(bfloat b) { return *this = bfloat(float(*this) * float(b)); }
  bfloat& operator/=(bfloat b) { return *this = bfloat(float(*this) / float(b)); }
  friend constexpr bfloat operator-(bfloat a) { return bfloat(-float(a)); }
};

#define SIMT_BFLOAT_OP(op)                                                                       \
  constexpr bfloat operator op(bfloat a, bfloat b) { return bfloat(float(a) op float(b)); }      \
  template <class T>                                                                             \
    requires(__is_integral(T))                                                                   \
  constexpr bfloat operator op(bfloat a, T b) { return bfloat(float(a) op float(bfloat(b))); }   \
  template <class T>                                                                             \
    requires(__is_integral(T))                                                                   \
  constexpr bfloat operator op(T a, bfloat b) { return bfloat(float(bfloat(a)) op float(b)); }
SIMT_BFLOAT_OP(+)
SIMT_BFLOAT_OP(-)
SIMT_BFLOAT_OP(*)
SIMT_BFLOAT_OP(/)
#undef SIMT_BFLOAT_OP

namespace metal {
template <>
struct numeric_limits<bfloat> {
  static constexpr int digits = 8;
  static constexpr bfloat min() { return __builtin_bit_cast(bfloat, ushort(0x0080)); }
  static constexpr bfloat max() { return __builtin_bit_cast(bfloat, ushort(0x7f7f)); }
  static constexpr bfloat lowest() { return __builtin_bit_cast(bfloat, ushort(0xff7f)); }
  static constexpr bfloat epsilon() { return __builtin_bit_cast(bfloat, ushort(0x3c00)); }
  static constexpr bfloat infinity() { return __builtin_bit_cast(bfloat, ushort(0x7f80)); }
  static constexpr bfloat quiet_NaN() { return __builtin_bit_cast(bfloat, ushort(0x7fc0)); }
};
}  // namespace metal
