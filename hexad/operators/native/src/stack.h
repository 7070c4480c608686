// All layers of a decoder in one call. The structs are the C ABI (ctypes mirrors them in library.py).
#pragma once
#include <cstdint>

#include "runtime.h"

namespace hx {

struct LayerDesc {
  const Weight* qkv;
  const Weight* attention_out;
  const Weight* gate_up;
  const Weight* down;
  const float* input_norm;
  const float* post_norm;
  const float* q_norm;  // null without q/k norm
  const float* k_norm;
  const float* attention_out_norm;  // of what attention adds to the hidden state; null: none
  const float* down_norm;           // of what the MLP adds
  const float* cos_sin;
  int32_t kv_group;
  int32_t window;  // 0: none
};

struct StackDesc {
  int32_t hidden, heads, kv_heads, dim, rotary, interleaved, intermediate, activation, gated, layers;
  int32_t dtype, kv_dtype;
  float eps, scale, softcap, embedding_scale;
  const Weight* embedding;
  const float* final_norm;
  int64_t max_len;
};

struct GroupCall {
  const int32_t* block_table;
  const int64_t* slots;
  int64_t table_stride;
};

struct StackCall {
  const int64_t* token_ids;
  const int64_t* positions;
  const int32_t* query_start;
  const int32_t* seq_lens;
  const GroupCall* groups;
  void* const* keys;  // one pointer a layer
  void* const* values;
  void* out;  // [tokens][hidden] in the stack's dtype, or [num_last][hidden]
  const int64_t* last;  // [num_last] the tokens, ascending, whose hidden states are wanted; num_last -1: all are
  int64_t num_blocks;
  int32_t tokens, rows, num_groups, block_size, num_last;
};

// 0, or the reason why nothing was computed.
enum Status : int32_t { kDone = 0, kNoMemory = 1, kBadToken = 2, kBadPosition = 3, kBadSlot = 4, kBadBlock = 5, kBadRows = 6 };

int32_t stack_forward(const StackDesc& desc, const LayerDesc* layers, const StackCall& call);

}  // namespace hx
