// Native linear layers on any C++17 machine: the same operations in the same order, lane by lane.
#include <cmath>
#include <cstring>

#include "linear_kernels.h"
#include "half.h"

namespace octavo {
namespace {

#include "linear_portable.inl"

constexpr int kMostRows = 6, kMostVectors = 0, kMostVectorsBesideScales = 0;

#include "linear_tile.inl"

}  // namespace

const LinearKernels& portable_linear() {
    static const LinearKernels kernels = make_kernels();
    return kernels;
}

bool cpu_has_avx512() {
#if (defined(__x86_64__) || defined(__i386__)) && (defined(__GNUC__) || defined(__clang__))
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
#else
    return false;
#endif
}

}  // namespace octavo
