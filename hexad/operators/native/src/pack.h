// Packed weights: memory and repacking.
#pragma once
#include <cstdint>

#include "weight.h"

namespace hx {

// Rows as they come from a file.
enum Source : int32_t {
  kQ40 = 0, kQ41 = 1, kQ80 = 2, kRowsBF16 = 3, kRowsF32 = 4, kQ50 = 5, kQ51 = 6, kQ4K = 7, kQ5K = 8, kQ6K = 9, kQ3K = 10,
  kRowsInt8 = 11,  // float16 scale, then one signed byte a column
};
constexpr int32_t kSources = 12;

// An empty weight (all zero) for rows of `source`, or null: memory is short, or there is no such source, or its rows are not whole blocks.
Weight* new_weight(int32_t source, int64_t out_features, int64_t in_features);
void delete_weight(Weight* weight);  // not the one that follows it

// Bytes of one row as `source` stores it.
int64_t stored_row_bytes(int32_t source, int64_t in_features);

// Packs `count` rows that lie one after the other at `rows`, from row `first` on. Rows of one panel must not be packed by two threads.
void pack_rows(Weight* weight, int32_t source, int64_t first, int64_t count, const uint8_t* rows);

}  // namespace hx
