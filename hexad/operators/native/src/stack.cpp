#include "stack.h"

#include <algorithm>
#include <cstring>

namespace hx {
namespace {

struct Workspace {
  Buffer residual, branch, normed, qkv, q, attended, gated;
};

Workspace& workspace() {
  static Workspace* instance = new Workspace();
  return *instance;
}

// One step: what it computes with.
struct Step {
  Runtime& r;
  const StackDesc& d;
  const StackCall& c;
  int32_t x_dtype;  // of what products take
  float* residual;  // [T][hidden]
  float* branch;    // [T][hidden], of networks that norm what they add
  uint8_t* normed;  // [T][ldh]
  float* qkv;       // [T][(heads + 2 kv_heads) * dim]
  uint8_t* q;       // [T][heads * dim]
  uint8_t* attended;  // [T][ldq]
  uint8_t* gated;     // [T][ldi]
  int64_t ldh, ldq, ldi;
  int longest;  // keys of the longest row
  int widest;   // queries of the widest row
  int tokens;   // in residual and what follows it: the step's, in the end those of `last`
};

// Nothing of a call is trusted: an index outside its array is refused before anything is read or written through it.
int32_t check(const StackDesc& d, const StackCall& c) {
  if (c.query_start[0] != 0 || c.query_start[c.rows] != c.tokens) return kBadRows;
  for (int t = 0; t < c.tokens; ++t) {
    if (c.token_ids[t] < 0 || c.token_ids[t] >= d.embedding->out_features) return kBadToken;
    if (c.positions[t] < 0 || c.positions[t] >= d.max_len) return kBadPosition;
  }
  const int64_t slots = c.num_blocks * c.block_size;
  for (int g = 0; g < c.num_groups; ++g) {
    for (int t = 0; t < c.tokens; ++t) {
      if (c.groups[g].slots[t] < -1 || c.groups[g].slots[t] >= slots) return kBadSlot;
    }
  }
  for (int i = 0; i < c.num_last; ++i) {
    if (c.last[i] <= (i ? c.last[i - 1] : -1) || c.last[i] >= c.tokens) return kBadRows;
  }
  for (int row = 0; row < c.rows; ++row) {
    const int64_t queries = c.query_start[row + 1] - c.query_start[row], length = c.seq_lens[row];
    if (queries < 0 || length < 0) return kBadRows;
    if (length != 0 && length < queries) return kBadRows;
  }
  return kDone;
}

// Every block that a layer's rows will read.
bool blocks_exist(const StackCall& c, const GroupCall& group, int32_t window) {
  for (int row = 0; row < c.rows; ++row) {
    const int64_t queries = c.query_start[row + 1] - c.query_start[row], length = c.seq_lens[row];
    if (length == 0 || queries == 0) continue;
    const int64_t first = window > 0 ? std::max<int64_t>(0, length - queries + 1 - window) : 0;
    const int64_t last = (length - 1) / c.block_size;
    if (last >= group.table_stride) return false;
    for (int64_t block = first / c.block_size; block <= last; ++block) {
      const int32_t id = group.block_table[row * group.table_stride + block];
      if (id < 0 || id >= c.num_blocks) return false;
    }
  }
  return true;
}

// Padding columns meet zero weights, but zero times a stale NaN is NaN: the buffers are shared by networks of other widths.
void clear_padding(uint8_t* buffer, int64_t rows, int64_t columns, int64_t ld, int64_t item) {
  if (columns == ld) return;
  for (int64_t row = 0; row < rows; ++row) memset(buffer + (row * ld + columns) * item, 0, static_cast<size_t>((ld - columns) * item));
}

bool allocate(Step& s) {
  Workspace& w = workspace();
  const StackDesc& d = s.d;
  const int64_t rows = padded_rows(s.c.tokens), item = item_bytes(s.x_dtype);
  s.ldh = padded_columns(d.hidden);
  s.ldq = padded_columns(static_cast<int64_t>(d.heads) * d.dim);
  s.ldi = padded_columns(d.intermediate);
  const int64_t qkv = static_cast<int64_t>(d.heads + 2 * d.kv_heads) * d.dim;
  s.residual = reinterpret_cast<float*>(w.residual.ensure(rows * d.hidden * 4));
  s.branch = reinterpret_cast<float*>(w.branch.ensure(rows * d.hidden * 4));
  s.normed = w.normed.ensure(rows * s.ldh * item);
  s.qkv = reinterpret_cast<float*>(w.qkv.ensure(rows * qkv * 4));
  s.q = w.q.ensure(rows * d.heads * d.dim * item + 4096);
  s.attended = w.attended.ensure(rows * s.ldq * item);
  s.gated = w.gated.ensure(rows * s.ldi * item);
  const int64_t padded_keys = (s.longest + 63) / 64 * 64;
  // of attention_tiles.h: values, probabilities and scores of each key, widened keys of int8 pages; queries
  const int64_t tiles = (padded_keys + 64) * ((d.kv_dtype == kI8 ? 4 : 2) * d.dim + 96) + 32 * d.dim;
  const bool scratch = s.r.reserve_scratch(std::max<int64_t>(24 * padded_keys, s.widest > 1 ? tiles : 0) + 4096);
  if (!(s.residual && s.branch && s.normed && s.qkv && s.q && s.attended && s.gated && scratch)) return false;
  clear_padding(s.normed, rows, d.hidden, s.ldh, item);
  clear_padding(s.attended, rows, static_cast<int64_t>(d.heads) * d.dim, s.ldq, item);
  clear_padding(s.gated, rows, d.intermediate, s.ldi, item);
  return true;
}

void run_norm(Step& s, const float* x, const float* weight, void* out, int32_t dtype, int64_t ldo) {
  const int per_chunk = std::max(8, (s.tokens + 4 * s.r.threads - 1) / (4 * s.r.threads));
  NormTask task{x, weight, s.d.eps, s.d.hidden, s.tokens, per_chunk, dtype, out, ldo};
  s.r.workers().run((s.tokens + per_chunk - 1) / per_chunk, [&](int chunk, int) { s.r.kernels->norm(&task, chunk); });
}

bool product(Step& s, const Weight* weight, const void* x, int64_t ldx, int32_t epilogue, void* out, int32_t out_dtype, int64_t ldo) {
  LinearTask task{weight, x, ldx, nullptr, nullptr, nullptr, nullptr, s.x_dtype, s.tokens, epilogue, s.d.activation, out_dtype, 0, out, ldo};
  return run_linear(s.r, task);
}

// residual += norm(product), or the product itself where `norm` is null.
bool product_added(Step& s, const Weight* weight, const void* x, int64_t ldx, const float* norm) {
  const int64_t hidden = s.d.hidden;
  if (norm == nullptr) return product(s, weight, x, ldx, kAdd, s.residual, kF32, hidden);
  if (!product(s, weight, x, ldx, kStore, s.branch, kF32, hidden)) return false;
  run_norm(s, s.branch, norm, s.branch, kF32, hidden);
  for (int64_t i = 0; i < s.tokens * hidden; ++i) s.residual[i] += s.branch[i];
  return true;
}

// Numbers of a head in the pages.
int32_t page_width(const StackDesc& d) { return d.kv_dtype == kI8 ? d.dim + kScaleBytes : d.dim; }

void run_rope(Step& s, const LayerDesc& layer, int index) {
  const StackDesc& d = s.d;
  const int per_chunk = std::max(4, (s.c.tokens + 4 * s.r.threads - 1) / (4 * s.r.threads));
  RopeTask task{s.qkv, s.c.positions, s.c.groups[layer.kv_group].slots, layer.cos_sin, layer.q_norm, layer.k_norm, d.eps,
                s.c.tokens, d.heads, d.kv_heads, d.dim, d.rotary, d.interleaved, per_chunk, s.x_dtype, d.kv_dtype, page_width(d),
                s.q, s.c.keys[index], s.c.values[index]};
  s.r.workers().run((s.c.tokens + per_chunk - 1) / per_chunk, [&](int chunk, int) { s.r.kernels->rope(&task, chunk); });
}

void run_attention(Step& s, const LayerDesc& layer, int index) {
  const StackDesc& d = s.d;
  const GroupCall& group = s.c.groups[layer.kv_group];
  const int per_chunk = std::min(s.widest, 128);
  const int parts = (s.widest + per_chunk - 1) / per_chunk;
  AttentionTask task{s.q, s.c.keys[index], s.c.values[index], s.c.query_start, s.c.seq_lens, group.block_table, group.table_stride,
                     s.c.rows, d.heads, d.kv_heads, d.dim, page_width(d), s.c.block_size, layer.window, d.scale, d.softcap,
                     s.x_dtype, d.kv_dtype, s.x_dtype, per_chunk, parts, s.attended, s.ldq};
  s.r.workers().run(s.c.rows * d.kv_heads * parts,
                    [&](int chunk, int thread) { s.r.kernels->attention(&task, chunk, s.r.scratch_of(thread)); });
}

void embed(Step& s) {
  for (int t = 0; t < s.c.tokens; ++t) {
    float* row = s.residual + static_cast<int64_t>(t) * s.d.hidden;
    s.r.kernels->dequantize_row(s.d.embedding, s.c.token_ids[t], row);
    if (s.d.embedding_scale != 1.0f) {
      for (int i = 0; i < s.d.hidden; ++i) row[i] *= s.d.embedding_scale;
    }
  }
}

// From here on the wanted tokens alone.
void keep_last(Step& s) {
  const int64_t attended = s.ldq * item_bytes(s.x_dtype), hidden = s.d.hidden;
  for (int64_t i = 0; i < s.c.num_last; ++i) {  // ascending: what is overwritten was moved before, or is not wanted
    if (s.c.last[i] == i) continue;
    memcpy(s.attended + i * attended, s.attended + s.c.last[i] * attended, static_cast<size_t>(attended));
    memcpy(s.residual + i * hidden, s.residual + s.c.last[i] * hidden, static_cast<size_t>(hidden) * sizeof(float));
  }
  s.tokens = s.c.num_last;
}

bool run_layer(Step& s, const LayerDesc& layer, int index) {
  const StackDesc& d = s.d;
  const int64_t qkv_width = static_cast<int64_t>(d.heads + 2 * d.kv_heads) * d.dim;
  run_norm(s, s.residual, layer.input_norm, s.normed, s.x_dtype, s.ldh);
  if (!product(s, layer.qkv, s.normed, s.ldh, kStore, s.qkv, kF32, qkv_width)) return false;
  run_rope(s, layer, index);
  run_attention(s, layer, index);
  if (index == d.layers - 1 && s.c.num_last >= 0) keep_last(s);
  if (s.tokens == 0) return true;
  if (!product_added(s, layer.attention_out, s.attended, s.ldq, layer.attention_out_norm)) return false;
  run_norm(s, s.residual, layer.post_norm, s.normed, s.x_dtype, s.ldh);
  if (!product(s, layer.gate_up, s.normed, s.ldh, d.gated ? kGated : kAct, s.gated, s.x_dtype, s.ldi)) return false;
  return product_added(s, layer.down, s.gated, s.ldi, layer.down_norm);
}

}  // namespace

int32_t stack_forward(const StackDesc& d, const LayerDesc* layers, const StackCall& c) {
  Runtime& r = runtime();
  std::lock_guard<std::mutex> lock(r.mutex);
  if (c.tokens == 0) return kDone;
  int32_t status = check(d, c);
  for (int i = 0; i < d.layers && status == kDone; ++i) {
    if (i == 0 || layers[i].kv_group != layers[i - 1].kv_group || layers[i].window != layers[i - 1].window) {
      if (!blocks_exist(c, c.groups[layers[i].kv_group], layers[i].window)) status = kBadBlock;
    }
  }
  if (status != kDone) return status;
  Step s{r, d, c, product_dtype(r, d.dtype), nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, 0, 0, 0, 0, 0, c.tokens};
  for (int row = 0; row < c.rows; ++row) {
    s.longest = std::max(s.longest, static_cast<int>(c.seq_lens[row]));
    s.widest = std::max(s.widest, static_cast<int>(c.query_start[row + 1] - c.query_start[row]));
  }
  if (!allocate(s)) return kNoMemory;
  embed(s);
  for (int i = 0; i < d.layers; ++i) {
    if (!run_layer(s, layers[i], i)) return kNoMemory;
  }
  if (s.tokens) run_norm(s, s.residual, d.final_norm, c.out, d.dtype, d.hidden);
  return kDone;
}

}  // namespace hx
