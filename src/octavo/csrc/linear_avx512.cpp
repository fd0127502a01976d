// Native linear layers for AVX-512 F.
#include "linear_kernels.h"

#if defined(__AVX512F__)
#include <immintrin.h>

namespace octavo {
namespace {

#include "linear_avx512.inl"

constexpr int kMostRows = 8, kMostVectors = 24, kMostVectorsBesideScales = 16;

#include "linear_tile.inl"

}  // namespace

const LinearKernels* avx512_linear() {
    static const LinearKernels kernels = make_kernels();
    return &kernels;
}

}  // namespace octavo

#else

namespace octavo {
const LinearKernels* avx512_linear() { return nullptr; }
}  // namespace octavo

#endif
