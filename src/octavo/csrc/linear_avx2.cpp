// Native linear layers for AVX2, FMA and F16C.
#include "linear_kernels.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include <immintrin.h>

namespace octavo {
namespace {

#include "linear_avx2.inl"

constexpr int kMostRows = 6, kMostVectors = 12, kMostVectorsBesideScales = 8;

#include "linear_tile.inl"

}  // namespace

const LinearKernels* avx2_linear() {
    static const LinearKernels kernels = make_kernels();
    return &kernels;
}

}  // namespace octavo

#else

namespace octavo {
const LinearKernels* avx2_linear() { return nullptr; }
}  // namespace octavo

#endif
