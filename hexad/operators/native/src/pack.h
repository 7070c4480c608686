// Packed weights: memory and repacking.
#pragma once
#include <cstdint>

#include "weight.h"

namespace hx {

// Rows as they come from a file.
enum Source : int32_t { kQ40 = 0, kQ41 = 1, kQ80 = 2, kRowsBF16 = 3, kRowsF32 = 4 };

// An empty weight (all zero) for rows of `source`, or null if memory is short.
Weight* new_weight(int32_t source, int64_t out_features, int64_t in_features);
void delete_weight(Weight* weight);

// Packs `count` rows that lie one after the other at `rows`, from row `first` on. Rows of one panel must not be packed by two threads.
void pack_rows(Weight* weight, int32_t source, int64_t first, int64_t count, const uint8_t* rows);

}  // namespace hx
