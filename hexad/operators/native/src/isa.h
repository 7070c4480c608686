// The body of one instruction set: compiled several times with other flags, each time into a namespace of its own (HX_ISA).
// HX_AVX512, HX_BF16, HX_AMX and HX_NEON say what may be used by name.
#include <cmath>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "weight.h"

// From this number of rows on, tiles beat one dot product at a time in every format (0: there are no tiles).
#define HX_TILE_ROWS (HX_AMX ? 4 : 0)

// With fewer rows, whole numbers beat them for packed codes; without tiles always.
#define HX_WORD_ROWS (!HX_BF16 ? 0 : HX_AMX ? 5 : 1 << 30)

#define HX_STRING_(x) #x
#define HX_STRING(x) HX_STRING_(x)

namespace hx {
namespace HX_ISA {
namespace {

#include "vector.h"
#if HX_AMX
template <int kFormat>
static void linear_tiles(const LinearTask& t, int64_t first, int64_t last, uint8_t* scratch);
#endif
#include "linear.h"
#if HX_AMX
#include "code_tiles.h"
#include "tiles.h"
#endif
#include "rows.h"
#include "draw.h"
#if HX_AMX
struct Keys;
static inline bool tiles_serve(const AttentionTask& t, int queries);
static void attend_tiles(const Keys& keys, int row, int low, int high, uint8_t* scratch);
#endif
#include "attention.h"
#if HX_AMX
#include "attention_tiles.h"
#endif

}  // namespace

extern const Kernels kernels;
const Kernels kernels = {
    HX_STRING(HX_ISA), HX_BF16, HX_TILE_ROWS, HX_WORD_ROWS, linear, sums, round_words, norm, rope, attention, gate, dequantize_row, widen, draw, rank,
};

}  // namespace HX_ISA
}  // namespace hx
