// Unrolling, and what lies in the words of packed weights (linear_kernels.h), over the vectors of linear_<isa>.inl.

#if defined(__GNUC__) || defined(__clang__)
#define OCTAVO_INLINE __attribute__((always_inline))
#else
#define OCTAVO_INLINE
#endif

// Arrays of vectors are registers only if their loops are gone before registers are given out.
#define UNROLL _Pragma("GCC unroll 8")

template <auto N>
struct Const {
    static constexpr auto value = N;
};

template <int I, int N, class F>
OCTAVO_INLINE inline void unroll(const F& f) {
    if constexpr (I < N) {
        f(Const<I>{});
        unroll<I + 1, N>(f);
    }
}

inline const uint16_t* halves(const uint8_t* p) { return reinterpret_cast<const uint16_t*>(p); }

// Value 30 + Which of 5-bit or 6-bit fields, from the two bits left over in each word.
template <int Bits, int Which>
OCTAVO_INLINE inline Int leftover(const uint8_t* words) {
    constexpr int kFirst = Which * Bits / 2;
    constexpr bool kOdd = Which * Bits % 2 != 0;  // begins with the upper of a word's two bits
    Int value = right<kOdd ? 31 : 30>(load_bits(words + kFirst * 64));
    unroll<1, Bits / 2 + 1>([&](auto i) OCTAVO_INLINE {
        constexpr int kPlace = 2 * decltype(i)::value - (kOdd ? 1 : 0);  // of the word's lower bit
        if constexpr (kPlace < Bits) {
            const Int word = load_bits(words + (kFirst + decltype(i)::value) * 64);
            value = either(value, mask(right<30 - kPlace>(word), (3u << kPlace) & ((1u << Bits) - 1)));
        }
    });
    return value;
}

// Field k of a block of fields of Bits bits, as byte `Place` of its lane.
template <int Bits, int K, int Place>
OCTAVO_INLINE inline Int field_at(const uint8_t* words) {
    constexpr int kTo = 8 * Place;
    if constexpr (K >= 32 / Bits * Bits) {
        return left<kTo>(leftover<Bits, K - 32 / Bits * Bits>(words));
    } else {
        constexpr int kFrom = K / Bits * Bits;
        constexpr uint32_t kMask = ((1u << Bits) - 1) << kTo;
        const Int word = load_bits(words + K % Bits * 64);
        if constexpr (kFrom >= kTo) {
            return mask(right<kFrom - kTo>(word), kMask);
        } else {
            return mask(left<kTo - kFrom>(word), kMask);
        }
    }
}

enum class Part { kAll, kFirst, kSecond };  // of a block: its 32 k, those below 16, the others

// Fields k = W, 8 + W, 16 + W and 24 + W as the bytes of each lane; 0 where k is not of the part.
template <int Bits, int W, Part Of>
OCTAVO_INLINE inline Int four_fields(const uint8_t* words) {
    if constexpr (Bits == 8 && Of == Part::kAll) {
        return load_bits(words + W * 64);
    } else if constexpr (Bits == 4 && Of == Part::kAll) {
        const Int word = load_bits(words + W % 4 * 64);
        if constexpr (W < 4) return mask(word, 0x0f0f0f0fu);
        return mask(right<4>(word), 0x0f0f0f0fu);
    } else if constexpr (Of == Part::kAll) {
        return either(four_fields<Bits, W, Part::kFirst>(words), four_fields<Bits, W, Part::kSecond>(words));
    } else {
        constexpr int kPlace = Of == Part::kFirst ? 0 : 2;
        return either(field_at<Bits, 8 * kPlace + W, kPlace>(words),
                      field_at<Bits, 8 * kPlace + 8 + W, kPlace + 1>(words));
    }
}
