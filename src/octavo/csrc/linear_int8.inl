// The kernels of linear_int8.h. Included by linear_int8_<isa>.cpp, inside its unnamed namespace, after the vectors
// of linear_<isa>.inl, linear_fields.inl and
//   set_bits(p): the 32 bits at p in every lane
//   dot_block<Bits, Zero, Of, R>(words, x, minus_sums, sum): sum[r] = sum of (field - Zero) q over a part of a block,
//   for the kLanes outputs whose words of fields begin at `words`
//   kMostInt8Rows of a tile.

inline float float_at(const uint8_t* p) {
    float x;
    std::memcpy(&x, p, 4);
    return x;
}

// Where a block's words of fields, scales and offsets are; lane is the first of kLanes outputs.
template <WeightType Type, int BitsOf, int ZeroOf, bool HasOffset>
struct Blocks32 {
    static constexpr WeightType kType = Type;
    static constexpr int kBits = BitsOf, kZero = ZeroOf, kScales = 1;
    static constexpr bool kOffset = HasOffset;
    const uint8_t* unit;
    Blocks32(const uint8_t* panel, int64_t block) : unit(panel + block * kUnits[int(Type)].bytes) {}
    const uint8_t* words() const { return unit + (HasOffset ? 64 : 32); }
    Vec scale(int lane, int) const { return load_half(halves(unit) + lane); }
    Vec offset(int lane) const { return load_half(halves(unit + 32) + lane); }
};

using Int8Q8_0 = Blocks32<WeightType::kQ8_0, 8, 128, false>;
using Int8Q4_0 = Blocks32<WeightType::kQ4_0, 4, 8, false>;
using Int8Q5_0 = Blocks32<WeightType::kQ5_0, 5, 16, false>;
using Int8Q4_1 = Blocks32<WeightType::kQ4_1, 4, 0, true>;

struct Int8Q4_K {
    static constexpr WeightType kType = WeightType::kQ4_K;
    static constexpr int kBits = 4, kZero = 0, kScales = 1;
    static constexpr bool kOffset = true;
    const uint8_t *unit, *block;
    Int8Q4_K(const uint8_t* panel, int64_t i)
        : unit(panel + i / 8 * kUnits[int(kType)].bytes), block(unit + 64 + i % 8 * (32 + 4 * 64)) {}
    const uint8_t* words() const { return block + 32; }
    Vec scale(int lane, int) const { return mul(load_half(halves(unit) + lane), to_float(load_bytes(block + lane))); }
    Vec offset(int lane) const {
        const Vec minimum = to_float(load_bytes(block + 16 + lane));
        return mul(load_half(halves(unit + 32) + lane), mul(minimum, set(-1.0f)));
    }
};

struct Int8Q6_K {
    static constexpr WeightType kType = WeightType::kQ6_K;
    static constexpr int kBits = 6, kZero = 32, kScales = 2;
    static constexpr bool kOffset = false;
    const uint8_t *unit, *block;
    Int8Q6_K(const uint8_t* panel, int64_t i)
        : unit(panel + i / 8 * kUnits[int(kType)].bytes), block(unit + 32 + i % 8 * (32 + 6 * 64)) {}
    const uint8_t* words() const { return block + 32; }
    Vec scale(int lane, int half) const {
        return mul(load_half(halves(unit) + lane), to_float(load_signed_bytes(block + half * 16 + lane)));
    }
};

template <class Block, int R>
void int8_tile(const Int8Task& task) {
    // Locals: the stores of the loop below could alias the task's members otherwise.
    const uint8_t *const weights = task.weights, *next = task.prefetch, *const end = task.prefetch_end;
    const int64_t blocks = task.k / kInt8Block;
    const int lines = task.prefetch_lines;
    for (int lane = 0; lane < kLinearPanel; lane += kLanes) {
        const uint8_t* x = task.x;
        Vec total[R];
        UNROLL for (int r = 0; r < R; ++r) total[r] = zero();
        for (int64_t i = 0; i < blocks; ++i, x += R * kInt8BlockBytes) {
            if (next < end) {
                for (int line = 0; line < lines; ++line) prefetch_first(next + line * 64);
                next += lines * 64;
            }
            const Block block(weights, i);
            const uint8_t *const scales = x + R * 32, *const minus_sums = scales + R * 4;
            const auto add_part = [&](auto of, const Vec& scale) OCTAVO_INLINE {
                Int sum[R];
                dot_block<Block::kBits, Block::kZero, of.value, R>(block.words() + lane * 4, x, minus_sums, sum);
                UNROLL for (int r = 0; r < R; ++r)
                    total[r] = fma(mul(to_float(sum[r]), scale), set(float_at(scales + r * 4)), total[r]);
            };
            if constexpr (Block::kScales == 1) {
                add_part(Const<Part::kAll>{}, block.scale(lane, 0));
            } else {
                add_part(Const<Part::kFirst>{}, block.scale(lane, 0));
                // Each half reads x for itself: registers do not hold it, and the compiler would spill it.
                asm volatile("" : : : "memory");
                add_part(Const<Part::kSecond>{}, block.scale(lane, 1));
            }
            if constexpr (Block::kOffset) {
                const Vec offset = block.offset(lane);
                UNROLL for (int r = 0; r < R; ++r)
                    total[r] = fma(offset, set(float_at(minus_sums + (R + r) * 4)), total[r]);
            }
        }
        UNROLL for (int r = 0; r < R; ++r) store(task.sums + r * kLinearPanel + lane, total[r]);
    }
}

template <class Block, int R = 1>
void fill_int8(Int8Kernels* kernels) {
    kernels->tile[int(Block::kType)][R - 1] = int8_tile<Block, R>;
    if constexpr (R < kMostInt8Rows) fill_int8<Block, R + 1>(kernels);
}

Int8Kernels make_int8_kernels(decltype(Int8Kernels::quantize) quantize) {
    Int8Kernels kernels = {};
    kernels.rows = kMostInt8Rows;
    fill_int8<Int8Q8_0>(&kernels);
    fill_int8<Int8Q4_0>(&kernels);
    fill_int8<Int8Q4_1>(&kernels);
    fill_int8<Int8Q5_0>(&kernels);
    fill_int8<Int8Q4_K>(&kernels);
    fill_int8<Int8Q6_K>(&kernels);
    kernels.quantize = quantize;
    return kernels;
}
