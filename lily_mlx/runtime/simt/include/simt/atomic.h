// <metal_atomic>. Fibers never switch between two instructions, so an atomic load and an atomic
// store make a read-modify-write.
#pragma once
#include "simt/simd.h"

namespace metal {

enum memory_order { memory_order_relaxed = 0, memory_order_seq_cst = 5 };

template <class T>
struct atomic {
  T value;
};
using atomic_int = atomic<int>;
using atomic_uint = atomic<uint>;
using atomic_ulong = atomic<ulong>;
using atomic_bool = atomic<bool>;
using atomic_float = atomic<float>;

template <class T>
METAL_FUNC T atomic_load_explicit(const volatile atomic<T>* at, memory_order) {
  T x;
  __atomic_load(&at->value, &x, 0);
  return x;
}
template <class T, class U>
METAL_FUNC void atomic_store_explicit(volatile atomic<T>* at, U desired, memory_order) {
  T x = T(desired);
  __atomic_store(&at->value, &x, 0);
}
#define SIMT_FETCH(name, expr)                                                         \
  template <class T, class U>                                                          \
  METAL_FUNC T atomic_##name##_explicit(volatile atomic<T>* at, U operand, memory_order) { \
    T b = T(operand), a;                                                               \
    __atomic_load(&at->value, &a, 0);                                                  \
    T next = T(expr);                                                                  \
    __atomic_store(&at->value, &next, 0);                                              \
    return a;                                                                          \
  }
SIMT_FETCH(exchange, b)
SIMT_FETCH(fetch_add, a + b)
SIMT_FETCH(fetch_sub, a - b)
SIMT_FETCH(fetch_min, metal::min(a, b))
SIMT_FETCH(fetch_max, metal::max(a, b))
SIMT_FETCH(fetch_and, a& b)
SIMT_FETCH(fetch_or, a | b)
SIMT_FETCH(fetch_xor, a ^ b)
#undef SIMT_FETCH
template <class T, class U>
METAL_FUNC bool atomic_compare_exchange_weak_explicit(volatile atomic<T>* at, T* expected,
                                                      U desired, memory_order, memory_order) {
  T a, next = T(desired);
  __atomic_load(&at->value, &a, 0);
  if (as_type<conditional_t<sizeof(T) == 8, ulong, uint>>(a) !=
      as_type<conditional_t<sizeof(T) == 8, ulong, uint>>(*expected)) {
    *expected = a;
    return false;
  }
  __atomic_store(&at->value, &next, 0);
  return true;
}
METAL_FUNC void atomic_thread_fence(mem_flags, memory_order,
                                    thread_scope = thread_scope::thread_scope_device) {}

}  // namespace metal
