// The kernels of native linear layers, over vectors of kLanes floats. Included by linear_<isa>.cpp, inside
// its unnamed namespace, after the operations it is written in:
//   Vec: zero, set, load, store, add, mul, fma(a, b, c) = a b + c, load_half (kLanes float16)
//   Int (32-bit lanes): load_bits, load_bytes (u8), load_signed_bytes, mask, either, left<n>, right<n>
//   to_float (signed integers), as_float (the bits), prefetch_first and prefetch_second (into which cache), kLanes; kMostRows of a tile; kMostVectors,
//   how many sums registers hold, and kMostVectorsBesideScales, how many beside scales, offsets and a mask.
// Everything is unrolled at compile time; see linear.h for the law and linear_kernels.h for layouts.

#include "linear_fields.inl"

constexpr int kPanelVectors = kLinearPanel / kLanes;

constexpr float inverse_power_of_two(int n) { return n == 0 ? 1.0f : 0.5f * inverse_power_of_two(n - 1); }

// Vector v of P panels is the part (v % kPanelVectors) of panel v / kPanelVectors.
template <class F>
OCTAVO_INLINE inline const uint8_t* part(const uint8_t* base, int64_t panel_bytes, int v, F bytes_per_value) {
    return base + (v / kPanelVectors) * panel_bytes + (v % kPanelVectors) * kLanes * bytes_per_value;
}

// Each type: kUnit k's, kBytes bytes, and each<V>(base, panel_bytes, f), which calls
// f(k, weights of the V vectors at k) for every k of the unit in ascending order.
struct F32 {
    static constexpr int kUnit = 1, kBytes = 64;
    template <int V, class F>
    OCTAVO_INLINE static inline void each(const uint8_t* base, int64_t panel_bytes, const F& f) {
        Vec w[V];
        UNROLL for (int v = 0; v < V; ++v) w[v] = load(reinterpret_cast<const float*>(part(base, panel_bytes, v, 4)));
        f(0, w);
    }
};

struct F16 {
    static constexpr int kUnit = 1, kBytes = 32;
    template <int V, class F>
    OCTAVO_INLINE static inline void each(const uint8_t* base, int64_t panel_bytes, const F& f) {
        Vec w[V];
        UNROLL for (int v = 0; v < V; ++v) w[v] = load_half(halves(part(base, panel_bytes, v, 2)));
        f(0, w);
    }
};

struct BF16 {
    static constexpr int kUnit = 2, kBytes = 64;
    template <int V, class F>
    OCTAVO_INLINE static inline void each(const uint8_t* base, int64_t panel_bytes, const F& f) {
        Vec w[V];
        UNROLL for (int v = 0; v < V; ++v) w[v] = as_float(left<16>(load_bits(part(base, panel_bytes, v, 4))));
        f(0, w);
        UNROLL for (int v = 0; v < V; ++v) w[v] = as_float(mask(load_bits(part(base, panel_bytes, v, 4)), 0xffff0000u));
        f(1, w);
    }
};

// 32 fields of one block: weight = scale * field + offset, one rounding. Halves of the block (16 k)
// may have scales of their own. ask() is called once for every field of a word, so that what is asked for does not
// come in bursts.
template <int Bits, int V, class Scales, class Ask, class F>
OCTAVO_INLINE inline void each_field(const uint8_t* words, int64_t panel_bytes, const Scales& scales, const Ask& ask,
                                     const F& f) {
    constexpr int kFields = 32 / Bits;
    Vec scale[V], offset[V], w[V];
    UNROLL for (int v = 0; v < V; ++v) scales.template get<0>(v, &scale[v], &offset[v]);
    unroll<0, kFields>([&](auto field) OCTAVO_INLINE {
        constexpr int j = decltype(field)::value;
        ask();
        // A field that reaches the sign bit is shifted instead.
        constexpr bool kTop = Bits * (j + 1) == 32;
        [[maybe_unused]] constexpr uint32_t kMask = ((1u << Bits) - 1) << (Bits * j);
        constexpr float kFactor = kTop ? 1.0f : inverse_power_of_two(Bits * j);
        Vec scaled[V];
        const auto words_from_to = [&](int begin, int end) OCTAVO_INLINE {
            UNROLL for (int v = 0; v < V; ++v) scaled[v] = mul(scale[v], set(kFactor));
            for (int i = begin; i < end; ++i) {
                UNROLL for (int v = 0; v < V; ++v) {
                    const Int bits = load_bits(part(words + i * 64, panel_bytes, v, 4));
                    Int value;
                    if constexpr (kTop) {
                        value = right<Bits * j>(bits);
                    } else {
                        value = mask(bits, kMask);
                    }
                    w[v] = fma(scaled[v], to_float(value), offset[v]);
                }
                f(Bits * j + i, w);
            }
        };
        constexpr int kBorder = 16 - Bits * j;  // the word at which the second half begins
        if constexpr (Scales::kHalves == 2 && kBorder >= 0 && kBorder < Bits) {
            if constexpr (kBorder > 0) words_from_to(0, kBorder);
            UNROLL for (int v = 0; v < V; ++v) scales.template get<1>(v, &scale[v], &offset[v]);
            words_from_to(kBorder, Bits);
        } else {
            words_from_to(0, Bits);
        }
    });
    unroll<0, 32 - Bits * kFields>([&](auto which) OCTAVO_INLINE {
        constexpr int i = decltype(which)::value;
        UNROLL for (int v = 0; v < V; ++v)
            w[v] = fma(scale[v], to_float(leftover<Bits, i>(part(words, panel_bytes, v, 4))), offset[v]);
        f(30 + i, w);
    });
}

// One float16 scale; the offset that signed values were stored with.
template <int Zero>
struct Symmetric {
    static constexpr int kHalves = 1, kScaleBytes = 32;
    const uint8_t* base;
    int64_t panel_bytes;
    template <int Half>
    OCTAVO_INLINE inline void get(int v, Vec* scale, Vec* offset) const {
        *scale = load_half(halves(part(base, panel_bytes, v, 2)));
        *offset = mul(*scale, set(float(-Zero)));
    }
};

struct Affine {
    static constexpr int kHalves = 1, kScaleBytes = 64;
    const uint8_t* base;
    int64_t panel_bytes;
    template <int Half>
    OCTAVO_INLINE inline void get(int v, Vec* scale, Vec* offset) const {
        *scale = load_half(halves(part(base, panel_bytes, v, 2)));
        *offset = load_half(halves(part(base + 32, panel_bytes, v, 2)));
    }
};

template <int Bits, class Scales>
struct Blocks {
    static constexpr int kUnit = 32, kBytes = Scales::kScaleBytes + Bits * 64;
    template <int V, class Ask, class F>
    OCTAVO_INLINE static inline void each(const uint8_t* base, int64_t panel_bytes, const Ask& ask, const F& f) {
        each_field<Bits, V>(base + Scales::kScaleBytes, panel_bytes, Scales{base, panel_bytes}, ask, f);
    }
};

using Q8_0 = Blocks<8, Symmetric<128>>;
using Q4_0 = Blocks<4, Symmetric<8>>;
using Q4_1 = Blocks<4, Affine>;
using Q5_0 = Blocks<5, Symmetric<16>>;

// d times a 6-bit scale, and -dmin times a 6-bit minimum: both exact.
struct Q4KScales {
    static constexpr int kHalves = 1;
    const uint8_t *unit, *block;
    int64_t panel_bytes;
    template <int Half>
    OCTAVO_INLINE inline void get(int v, Vec* scale, Vec* offset) const {
        const Vec minimum = to_float(load_bytes(part(block + 16, panel_bytes, v, 1)));
        *scale = mul(load_half(halves(part(unit, panel_bytes, v, 2))), to_float(load_bytes(part(block, panel_bytes, v, 1))));
        *offset = mul(load_half(halves(part(unit + 32, panel_bytes, v, 2))), mul(minimum, set(-1.0f)));
    }
};

struct Q6KScales {
    static constexpr int kHalves = 2;
    const uint8_t *unit, *block;
    int64_t panel_bytes;
    template <int Half>
    OCTAVO_INLINE inline void get(int v, Vec* scale, Vec* offset) const {
        const Int own = load_signed_bytes(part(block + Half * 16, panel_bytes, v, 1));
        *scale = mul(load_half(halves(part(unit, panel_bytes, v, 2))), to_float(own));
        *offset = mul(*scale, set(-32.0f));
    }
};

// A K type is walked a block of 32 at a time; which one, and where its unit begins, is known at run time.
template <int Bits, class Scales, int HeaderBytes>
struct SuperBlocks {
    static constexpr int kUnit = 256, kBlockBytes = 32 + Bits * 64, kBytes = HeaderBytes + 8 * kBlockBytes;
    template <int V, class Ask, class F>
    OCTAVO_INLINE static inline void each_block(const uint8_t* unit, int block, int64_t panel_bytes, const Ask& ask,
                                                const F& f) {
        const uint8_t* base = unit + HeaderBytes + block * kBlockBytes;
        each_field<Bits, V>(base + 32, panel_bytes, Scales{unit, base, panel_bytes}, ask, f);
    }
};

using Q4_K = SuperBlocks<4, Q4KScales, 64>;
using Q6_K = SuperBlocks<6, Q6KScales, 32>;

// The 32 k from `start` on.
template <class Type, int V, class Ask, class F>
OCTAVO_INLINE inline void each_of_block(const uint8_t* base, int64_t start, int64_t panel_bytes, const Ask& ask,
                                        const F& f) {
    if constexpr (Type::kUnit == 32) {
        Type::template each<V>(base + start / 32 * Type::kBytes, panel_bytes, ask, f);
    } else {
        Type::template each_block<V>(base + start / 256 * Type::kBytes, int(start % 256 / 32), panel_bytes, ask, f);
    }
}

// Calls f(k, weights) for k = 0 .. length-1 in order, and ask() about once every kAskEvery of them.
template <class Type, int V, class Ask, class F>
OCTAVO_INLINE inline void walk(const uint8_t* base, int64_t panel_bytes, int64_t length, const Ask& ask, const F& f) {
    if constexpr (Type::kUnit > 2) {
        for (int64_t k = 0; k < length; k += 32) {
            each_of_block<Type, V>(base, k, panel_bytes, ask, [&](int i, const Vec(&w)[V]) OCTAVO_INLINE { f(k + i, w); });
        }
    } else {
        constexpr int kTogether = 8;
        int64_t k = 0;
        for (; k + kTogether <= length; k += kTogether) {
            ask();
            unroll<0, kTogether / Type::kUnit>([&](auto unit) OCTAVO_INLINE {
                constexpr int u = decltype(unit)::value;
                Type::template each<V>(base + u * Type::kBytes, panel_bytes,
                                       [&](int i, const Vec(&w)[V]) OCTAVO_INLINE {
                                           f(k + u * Type::kUnit + i, w);
                                       });
            });
            base += kTogether / Type::kUnit * Type::kBytes;
        }
        for (; k < length; k += Type::kUnit) {
            Type::template each<V>(base, panel_bytes, [&](int i, const Vec(&w)[V]) OCTAVO_INLINE {
                if (k + i < length) f(k + i, w);
            });
            base += Type::kBytes;
        }
    }
}

// R rows times P panels. Packed: x is [k][R]. Expands: the weights are left as float32, for one panel.
template <class Type, int R, int P, bool Packed, bool Expands = false>
void tile(const TileTask& task) {
    constexpr int V = P * kPanelVectors;
    // Where they start from 0 they are loaded all the same: a branch here would spill every one of them.
    static constexpr float kZeros[kLinearPanel] = {};
    const float* from = task.first ? kZeros : task.sums;
    const int64_t from_panel = task.first ? 0 : task.sums_panel, from_row = task.first ? 0 : kLinearPanel;
    Vec sum[R][V];
    UNROLL for (int r = 0; r < R; ++r)
        UNROLL for (int v = 0; v < V; ++v)
            sum[r][v] = load(from + v / kPanelVectors * from_panel + r * from_row + v % kPanelVectors * kLanes);
    // Locals: the stores of the loop below could alias the task's members otherwise.
    const float *x = task.x, *upper = task.x + 3 * task.x_stride;
    const int64_t stride = task.x_stride;
    const uint8_t *next = task.prefetch, *end = task.prefetch_end, *then = task.prefetch_then;
    const int lines = task.prefetch_lines;
    const int64_t panel_bytes = task.panel_bytes;
    int64_t next_panel = task.prefetch_panel;
    const auto ask = [&]() OCTAVO_INLINE {
        if (next >= end) {
            if (then == nullptr) return;
            next = then, end = then + task.panel_bytes, next_panel = task.prefetch_then_panel, then = nullptr;
        }
        for (int i = 0; i < lines; ++i)
            for (int p = 0; p < P; ++p) {
                if constexpr (Packed) {
                    prefetch_first(next + i * 64 + p * next_panel);
                } else {
                    prefetch_second(next + i * 64 + p * next_panel);
                }
            }
        next += lines * 64;
    };
    float* const expanded = task.expanded;
    const auto multiply_add = [&](int64_t k, const Vec(&w)[V]) OCTAVO_INLINE {
        if constexpr (Expands) {
            UNROLL for (int v = 0; v < V; ++v) store(expanded + k * kLinearPanel + v * kLanes, w[v]);
        }
        UNROLL for (int r = 0; r < R; ++r) {
            Vec value;
            if constexpr (Packed) {
                value = set(x[k * R + r]);
            } else if (r < 3) {
                value = set(x[k + r * stride]);
            } else {
                value = set(upper[k + (r - 3) * stride]);
            }
            UNROLL for (int v = 0; v < V; ++v) sum[r][v] = fma(value, w[v], sum[r][v]);
        }
    };
    if constexpr (Type::kUnit > 2 && R * V > kMostVectorsBesideScales) {
        // The registers hold no more than the sums: a sum that is spilled has a store and a load in its chain.
        alignas(64) float piece[32 * V * kLanes];
        const uint8_t* base = task.weights;
        for (int64_t start = 0; start < task.k; start += 32) {
            each_of_block<Type, V>(base, start, panel_bytes, ask, [&](int i, const Vec(&w)[V]) OCTAVO_INLINE {
                UNROLL for (int v = 0; v < V; ++v) store(piece + (i * V + v) * kLanes, w[v]);
            });
            for (int i = 0; i < 32; ++i) {
                Vec w[V];
                UNROLL for (int v = 0; v < V; ++v) w[v] = load(piece + (i * V + v) * kLanes);
                multiply_add(start + i, w);
            }
        }
    } else {
        walk<Type, V>(task.weights, panel_bytes, task.k, ask, multiply_add);
    }
    UNROLL for (int r = 0; r < R; ++r)
        UNROLL for (int v = 0; v < V; ++v)
            store(task.sums + v / kPanelVectors * task.sums_panel + r * kLinearPanel + v % kPanelVectors * kLanes,
                  sum[r][v]);
}

template <class Type>
void expand(const uint8_t* weights, int64_t length, float* out) {
    walk<Type, kPanelVectors>(
        weights, 0, length, []() OCTAVO_INLINE {},
        [&](int64_t k, const Vec(&w)[kPanelVectors]) OCTAVO_INLINE {
            UNROLL for (int v = 0; v < kPanelVectors; ++v)
                store(out + k * kLinearPanel + v * kLanes, w[v]);
        });
}

void finish(const FinishTask& task) {
    for (int r = 0; r < task.rows; ++r) {
        const float* sums = task.sums + r * kLinearPanel;
        const float* residual = task.residual == nullptr ? nullptr : task.residual + r * task.stride;
        float* out = task.out + r * task.stride;
        if (task.outputs == kLinearPanel) {
            for (int n = 0; n < kLinearPanel; n += kLanes) {
                Vec y = load(sums + n);
                if (task.bias != nullptr) y = add(y, load(task.bias + n));
                if (residual != nullptr) y = add(y, load(residual + n));
                store(out + n, y);
            }
            continue;
        }
        for (int n = 0; n < task.outputs; ++n) {
            float y = sums[n];
            if (task.bias != nullptr) y += task.bias[n];
            if (residual != nullptr) y += residual[n];
            out[n] = y;
        }
    }
}

template <int R>
void pack_rows_of_x(const float* x, int64_t stride, int64_t k, float* out) {
    for (int64_t i = 0; i < k; ++i)
        UNROLL for (int r = 0; r < R; ++r) out[i * R + r] = x[r * stride + i];
}

void pack_x(const float* x, int64_t stride, int rows, int64_t k, float* out) {
    using Pack = void (*)(const float*, int64_t, int64_t, float*);
    static const Pack packs[8] = {pack_rows_of_x<1>, pack_rows_of_x<2>, pack_rows_of_x<3>, pack_rows_of_x<4>,
                                  pack_rows_of_x<5>, pack_rows_of_x<6>, pack_rows_of_x<7>, pack_rows_of_x<8>};
    packs[rows - 1](x, stride, k, out);
}

template <class Type, int R, int P>
constexpr LinearKernels::Tile tile_if_it_fits() {
    constexpr int kVectors = P * kPanelVectors;
    constexpr bool kQuantized = Type::kUnit > 2;
    // One panel always; more while the sums, the weights and one row's value stay in registers.
    if constexpr (P == 1 || (kVectors <= (kQuantized ? 4 : 8) &&
                             R * kVectors <= (kQuantized ? kMostVectorsBesideScales : kMostVectors))) {
        return tile<Type, R, P, false>;
    } else {
        return nullptr;
    }
}

template <class Type, int R>
void fill_row(LinearKernels::Tile (*row)[3], LinearKernels::Tile* expand_first) {
    row[R - 1][0] = tile_if_it_fits<Type, R, 1>();
    row[R - 1][1] = tile_if_it_fits<Type, R, 2>();
    row[R - 1][2] = tile_if_it_fits<Type, R, 4>();
    // Tiles of a block of rows are nearly full.
    if constexpr (Type::kUnit > 2 && R > kMostRows / 2 && R * kPanelVectors <= kMostVectorsBesideScales)
        expand_first[R - 1] = tile<Type, R, 1, true, true>;
    if constexpr (R < kMostRows) fill_row<Type, R + 1>(row, expand_first);
}

template <class Type>
void fill(LinearKernels* kernels, WeightType type) {
    static_assert(Type::kBytes % 32 == 0, "vectors of a unit lie at multiples of their size");
    fill_row<Type, 1>(kernels->direct[int(type)], kernels->expand_first[int(type)]);
    kernels->expand[int(type)] = expand<Type>;
}

LinearKernels make_kernels() {
    LinearKernels kernels = {};
    kernels.rows = kMostRows;
    fill<F32>(&kernels, WeightType::kF32);
    fill<F16>(&kernels, WeightType::kF16);
    fill<BF16>(&kernels, WeightType::kBF16);
    fill<Q8_0>(&kernels, WeightType::kQ8_0);
    fill<Q4_0>(&kernels, WeightType::kQ4_0);
    fill<Q4_1>(&kernels, WeightType::kQ4_1);
    fill<Q5_0>(&kernels, WeightType::kQ5_0);
    fill<Q4_K>(&kernels, WeightType::kQ4_K);
    fill<Q6_K>(&kernels, WeightType::kQ6_K);
    unroll<0, kMostRows>([&](auto i) { kernels.packed[i.value] = tile<F32, i.value + 1, 1, true>; });
    kernels.pack_x = pack_x;
    kernels.finish = finish;
    return kernels;
}
