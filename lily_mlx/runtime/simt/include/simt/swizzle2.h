// Swizzle members of a vector of 2, inside its union.
swizzle<vec<T, 2>, T, 2, 0, 0> xx;
swizzle<vec<T, 2>, T, 2, 0, 1> xy;
swizzle<vec<T, 2>, T, 2, 1, 0> yx;
swizzle<vec<T, 2>, T, 2, 1, 1> yy;
swizzle<vec<T, 3>, T, 2, 0, 0, 0> xxx;
swizzle<vec<T, 3>, T, 2, 1, 1, 1> yyy;
swizzle<vec<T, 4>, T, 2, 0, 0, 0, 0> xxxx;
swizzle<vec<T, 4>, T, 2, 1, 1, 1, 1> yyyy;
