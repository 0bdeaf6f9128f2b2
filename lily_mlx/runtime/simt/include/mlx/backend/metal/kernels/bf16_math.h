// metal_stdlib here already has the math functions for bfloat.
#pragma once
