// A weight matrix packed for the kernels, and the tasks that the kernels run. Plain data only: this header is compiled for several
// instruction sets, so it defines no function.
//
// Rows (output features) are cut into panels of 16, columns into groups of 32. A panel holds the codes of its groups, then what scales
// them. Row and column padding is zero. A value is scale * (code - zero) + minimum. Scales are one of
// - float16 [groups][16] (one scale a row: [16]), then the minima, float16 [groups][16], if the format has them;
// - of k-quants, 32 bytes a group, then what multiplies them, float16, for each 8 groups. Of 32 columns: 16 scales and 16 minima (both
//   unsigned), times [2][16], of which the second is negated. Of 16 columns (`halves`): signed scales [2][16], times [16].
//
// Codes of one group, `n` the row inside the panel, `k` the column inside the group:
// - 4 bits, 256 bytes: 4 vectors of 16 words of 32 bits, one a row; vector z, word n, nibble t holds column 8 z + 2 t for t < 4 and
//   8 z + 2 (t - 4) + 1 otherwise. Seen as 32 words of 16 bits, word 2 n + p holds columns of parity p: one shift and one look-up
//   give the pairs that a bfloat16 dot product takes.
// - 6 bits, 384 bytes: the lower 4 as above, then 128 bytes: 2 vectors of 32 words of 16 bits, vector v, word 2 n + p, bits 2 j and
//   2 j + 1 the upper bits of column 16 v + 2 j + p.
// - 8 bits, 512 bytes: 16 vectors of 32 bytes; vector r, byte 2 n + p holds column 2 r + p.
// - bfloat16, 1024 bytes: 16 vectors of 32 numbers; vector r, number 2 n + p holds column 2 r + p (the layout of an AMX tile).
#pragma once
#include <cstddef>
#include <cstdint>

namespace hx {

constexpr int kLanes = 16;  // rows a panel
constexpr int kGroup = 32;  // columns a group
constexpr int kRowBlock = 32;  // activation buffers are padded to whole blocks of rows

constexpr int kSuper = 8;   // groups that share a k-quant's multipliers

// K: scales of k-quants.
enum Format : int32_t { kInt4 = 0, kInt8 = 1, kBFloat16 = 2, kInt6 = 3, kInt4K = 4, kInt6K = 5 };
enum Dtype : int32_t { kF32 = 0, kBF16 = 1, kI8 = 2 };  // kI8: of pages alone

constexpr int kScaleBytes = 4;  // int8 pages: a head's codes are followed by their float32 scale
enum Activation : int32_t { kSilu = 0, kGelu = 1, kGeluTanh = 2, kRelu = 3, kNone = 4 };

struct Weight {
  int32_t format;
  int32_t out_features;
  int32_t in_features;
  int32_t groups;
  int32_t panels;
  int32_t has_min;
  int32_t halves;  // k-quants: a scale for 16 columns
  float zero;
  int64_t scale_offset;  // inside a panel
  int64_t scale_stride;  // from a group's scales to the next group's; 0: the row has one
  int64_t min_offset;    // minima; of k-quants the multipliers
  int64_t panel_bytes;
  uint8_t* data;
  float* bias;         // [panels * 16] or null
  const Weight* next;  // the rows below these, in a format of their own; null: none
};

// What becomes of a product.
enum Epilogue : int32_t {
  kStore = 0,  // out = y, in out_dtype
  kAdd = 1,    // out (float32) += y
  kGated = 2,  // out = act(gate) * up, in out_dtype: the first half of the rows is the gate
  kAct = 3,    // out = act(y), in out_dtype
};

struct LinearTask {
  const Weight* weight;
  const void* x;  // [rows padded to kRowBlock][ldx] in x_dtype, ldx >= groups * 32, padding columns zero
  int64_t ldx;
  const float* sums;  // [rows][groups] sums of x over each group; null where the kernel or the format needs none
  const int16_t* words;       // x as whole numbers [rows][groups * 32]; null: products take x as it is
  const float* word_scales;   // [rows][groups] what a whole number of a group stands for
  const int32_t* word_sums;   // [rows][groups][2] sums of the whole numbers of a group's first and other 16 columns
  int32_t x_dtype;
  int32_t rows;
  int32_t epilogue;
  int32_t activation;
  int32_t out_dtype;
  int32_t units_per_chunk;  // panels, or pairs of a gate's and an up's panel
  void* out;
  int64_t ldo;
};

struct NormTask {
  const float* x;  // [rows][hidden]
  const float* weight;
  float eps;
  int32_t hidden;
  int32_t rows;
  int32_t rows_per_chunk;
  int32_t out_dtype;
  void* out;
  int64_t ldo;
};

struct RopeTask {
  const float* qkv;  // [tokens][(heads + 2 kv_heads) * dim]
  const int64_t* positions;
  const int64_t* slots;
  const float* cos_sin;  // [max_len][rotary]
  const float* q_norm;   // [dim] or null
  const float* k_norm;
  float eps;
  int32_t tokens, heads, kv_heads, dim, rotary, interleaved;
  int32_t tokens_per_chunk;
  int32_t q_dtype, kv_dtype;
  int32_t kv_width;  // numbers of a head in the pages: dim; of int8 dim + kScaleBytes
  void* q;  // [tokens][heads * dim]
  void* k;  // pages, [slots][kv_heads * kv_width]
  void* v;
};

struct AttentionTask {
  const void* q;  // [tokens][heads * dim] in q_dtype
  const void* k;
  const void* v;
  const int32_t* query_start;
  const int32_t* seq_lens;
  const int32_t* block_table;
  int64_t table_stride;
  int32_t rows, heads, kv_heads, dim, kv_width, block_size;
  int32_t window;  // 0: none
  float scale, softcap;  // softcap 0: none
  int32_t q_dtype, kv_dtype, out_dtype;
  int32_t queries_per_chunk;
  int32_t chunks_per_row_head;  // of the longest row
  void* out;  // [tokens][ldo]
  int64_t ldo;
};

constexpr int kDrawBuckets = 2048;

struct DrawTask {
  const float* logits;  // [rows][stride], `vocab` of them live
  int64_t stride, vocab;
  const float* best;           // [rows] the largest logit
  const float* temperature;    // [rows]
  const int64_t* min_weight;   // [rows] or null
  const int64_t* top_k;        // [rows], vocab for no limit
  const double* top_p;         // [rows], 1 for no limit
  const double* uniforms;      // [rows] in [0, 1)
  int64_t* out;                // [rows]
};

constexpr int kMostRanked = 64;

struct RankTask {
  const float* logits;  // [rows][stride], `vocab` of them live
  int64_t stride, vocab;
  const float* best;         // [rows] the largest logit
  const int64_t* token_ids;  // [rows]
  int32_t top;               // at most kMostRanked and vocab
  int64_t* ranks;            // [rows], 1 = most likely
  int64_t* totals;           // [rows] sums of weights
  int64_t* top_ids;          // [rows][top], best first
};

// One instruction set's code. `scratch` is this thread's own memory, `scratch_bytes` of it, 64-byte aligned.
struct Kernels {
  const char* name;
  int32_t bf16;        // 1: activations are bfloat16 where the caller asks for it; 0: always float32
  int32_t tile_rows;   // from this many rows on products run in tiles, which read no sums (0: never)
  int32_t word_rows;   // with fewer rows products of packed codes take bfloat16 activations as 16-bit whole numbers (0: never)
  void (*linear)(const LinearTask*, int chunk, uint8_t* scratch);
  void (*sums)(const void* x, int64_t ldx, int32_t dtype, int rows, int groups, float* out);
  void (*round_words)(const void* x, int64_t ldx, int rows, int groups, int16_t* words, float* scales, int32_t* word_sums, float* sums);
  void (*norm)(const NormTask*, int chunk);
  void (*rope)(const RopeTask*, int chunk);
  void (*attention)(const AttentionTask*, int chunk, uint8_t* scratch);
  void (*gate)(const float* both, int32_t activation, int64_t half, void* out, int32_t out_dtype);  // both [2 half]: gate, up
  void (*dequantize_row)(const Weight*, int64_t row, float* out);
  void (*widen)(const void* in, int32_t in_dtype, void* out, int32_t out_dtype, int64_t count);
  void (*draw)(const DrawTask*, int row, uint8_t* scratch);
  void (*rank)(const RankTask*, int row);
};

}  // namespace hx
