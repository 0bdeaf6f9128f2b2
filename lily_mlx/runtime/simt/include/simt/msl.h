// Everything that <metal_stdlib> brings in.
#pragma once
#pragma clang diagnostic ignored "-Weverything"
#include "simt/atomic.h"
#include "simt/matrix.h"
using namespace metal;
