// The C ABI. Every function takes plain pointers and numbers; nothing throws across it. library.py mirrors it.
#include <cstdio>
#include <cstring>

#include "pack.h"
#include "runtime.h"
#include "stack.h"

#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace hx {
// The build names the instruction sets that it compiled: HX_WITH_...
#ifdef HX_WITH_PORTABLE
namespace portable { extern const Kernels kernels; }
#endif
#ifdef HX_WITH_NEON
namespace neon { extern const Kernels kernels; }
#endif
#ifdef HX_WITH_AVX2
namespace avx2 { extern const Kernels kernels; }
#endif
#ifdef HX_WITH_AVX512
namespace avx512 { extern const Kernels kernels; }
#endif
#ifdef HX_WITH_AVX512BF16
namespace avx512bf16 { extern const Kernels kernels; }
#endif
#ifdef HX_WITH_AMX
namespace amx { extern const Kernels kernels; }
#endif

namespace {

#if defined(__x86_64__)
[[maybe_unused]] bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512dq");
}

[[maybe_unused]] bool has_avx512bf16() {
  return has_avx512() && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni");
}

// The processor has bfloat16 tiles, and the system lets this process use them.
[[maybe_unused]] bool has_tiles() {
  unsigned a = 7, b = 0, c = 0, d = 0;
  asm volatile("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
  if (!(d >> 22 & 1) || !(d >> 24 & 1)) return false;  // AMX-BF16, AMX-TILE
#if defined(__linux__) && defined(SYS_arch_prctl)
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}
#endif

// The candidates, best last, that this machine can run.
int available(const Kernels** found) {
  int count = 0;
#if defined(__x86_64__)
  __builtin_cpu_init();
#endif
#ifdef HX_WITH_PORTABLE
  found[count++] = &portable::kernels;
#endif
#ifdef HX_WITH_NEON
  found[count++] = &neon::kernels;  // every processor of 64-bit ARM has it
#endif
#ifdef HX_WITH_AVX2
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) found[count++] = &avx2::kernels;
#endif
#ifdef HX_WITH_AVX512
  if (has_avx512()) found[count++] = &avx512::kernels;
#endif
#ifdef HX_WITH_AVX512BF16
  if (has_avx512bf16()) found[count++] = &avx512bf16::kernels;
#endif
#ifdef HX_WITH_AMX
  if (has_avx512bf16() && has_tiles()) found[count++] = &amx::kernels;
#endif
  return count;
}

}  // namespace
}  // namespace hx

using namespace hx;

extern "C" {

#pragma GCC visibility push(default)

int32_t hx_version() { return 7; }

// Chooses the instruction set: `name`, or the best if it is empty. The name of the one taken; null: this machine has no such one.
const char* hx_choose(const char* name) {
  const Kernels* found[8];
  const int count = available(found);
  const Kernels* chosen = name[0] == 0 && count > 0 ? found[count - 1] : nullptr;
  for (int i = 0; i < count; ++i) {
    if (strcmp(found[i]->name, name) == 0) chosen = found[i];
  }
  if (chosen == nullptr) return nullptr;
  Runtime& r = runtime();
  std::lock_guard<std::mutex> lock(r.mutex);
  r.kernels = chosen;
  return chosen->name;
}

// The names that hx_choose takes here, separated by spaces.
void hx_available(char* out, int32_t size) {
  const Kernels* found[8];
  const int count = available(found);
  int used = 0;
  out[0] = 0;
  for (int i = 0; i < count && used < size; ++i) used += snprintf(out + used, static_cast<size_t>(size - used), i ? " %s" : "%s", found[i]->name);
}

void hx_set_threads(int32_t threads) {
  Runtime& r = runtime();
  std::lock_guard<std::mutex> lock(r.mutex);
  r.threads = threads < 1 ? 1 : threads;
}

// Thread i of the pool keeps to core cores[i], if there is one; the caller, thread 0, is left alone. count 0: the system moves them.
void hx_set_cores(const int32_t* cores, int32_t count) {
  Runtime& r = runtime();
  std::lock_guard<std::mutex> lock(r.mutex);
  r.cores.assign(cores, cores + count);
}

void* hx_weight_new(int32_t source, int64_t out_features, int64_t in_features) { return new_weight(source, out_features, in_features); }
void hx_weight_delete(void* weight) { delete_weight(static_cast<Weight*>(weight)); }
int64_t hx_weight_bytes(const void* weight) {
  const Weight* w = static_cast<const Weight*>(weight);
  return w->panel_bytes * w->panels;
}

// Packs `count` rows of `source` over the pool.
void hx_weight_fill(void* weight, int32_t source, int64_t first, int64_t count, const uint8_t* rows, int64_t row_bytes) {
  Runtime& r = runtime();
  std::lock_guard<std::mutex> lock(r.mutex);
  constexpr int64_t kRows = 8 * kLanes;  // whole panels a chunk, counted from row 0 of the weight
  const int64_t low = first / kRows, high = (first + count + kRows - 1) / kRows;
  r.workers().run(static_cast<int>(high - low), [&](int chunk, int) {
    const int64_t begin = (low + chunk) * kRows < first ? first : (low + chunk) * kRows;
    const int64_t limit = (low + chunk + 1) * kRows, end = limit < first + count ? limit : first + count;
    pack_rows(static_cast<Weight*>(weight), source, begin, end - begin, rows + (begin - first) * row_bytes);
  });
}

// Rows of `next` lie below those of `weight` from now on; neither is copied, and `next` must live as long. At most 8 in a chain.
void hx_weight_append(void* weight, const void* next) {
  Weight* last = static_cast<Weight*>(weight);
  while (last->next != nullptr) last = const_cast<Weight*>(last->next);
  last->next = static_cast<const Weight*>(next);
}

// Bytes of one stored row; 0: no such source.
int64_t hx_row_bytes(int32_t source, int64_t in_features) {
  return source < 0 || source >= kSources ? 0 : stored_row_bytes(source, in_features);
}

int32_t hx_weight_bias(void* weight, const float* bias) {
  Weight* w = static_cast<Weight*>(weight);
  void* memory = nullptr;
  const size_t bytes = static_cast<size_t>(w->panels) * kLanes * sizeof(float);
  if (posix_memalign(&memory, 64, bytes) != 0) return kNoMemory;
  memset(memory, 0, bytes);
  memcpy(memory, bias, static_cast<size_t>(w->out_features) * sizeof(float));
  w->bias = static_cast<float*>(memory);
  return kDone;
}

// out [rows][out_features] = epilogue(x [rows][in_features] W^T + b); gated: [rows][out_features / 2].
int32_t hx_linear(const void* weight, const void* x, int32_t dtype, int32_t rows, int32_t epilogue, int32_t activation, void* out,
                  int32_t out_dtype) {
  const Weight* w = static_cast<const Weight*>(weight);
  Runtime& r = runtime();
  std::lock_guard<std::mutex> lock(r.mutex);
  if (rows == 0) return kDone;
  const int32_t x_dtype = product_dtype(r, dtype);
  const int64_t ldx = padded_columns(w->in_features), item = item_bytes(x_dtype);
  uint8_t* packed = r.input.ensure(static_cast<size_t>(padded_rows(rows) * ldx * item));
  if (packed == nullptr || !r.reserve_scratch(4096)) return kNoMemory;
  for (int64_t row = 0; row < rows; ++row) {
    const uint8_t* source = static_cast<const uint8_t*>(x) + row * w->in_features * item_bytes(dtype);
    uint8_t* target = packed + row * ldx * item;
    r.kernels->widen(source, dtype, target, x_dtype, w->in_features);
    memset(target + w->in_features * item, 0, static_cast<size_t>((ldx - w->in_features) * item));
  }
  const int64_t ldo = epilogue == kGated ? total_features(*w) / 2 : total_features(*w);
  LinearTask task{w, packed, ldx, nullptr, nullptr, nullptr, nullptr, x_dtype, rows, epilogue, activation, out_dtype, 0, out, ldo};
  return run_linear(r, task) ? kDone : kNoMemory;
}

// out [count][in_features] = rows `ids` of the table.
int32_t hx_rows(const void* weight, const int64_t* ids, int32_t count, void* out, int32_t dtype) {
  const Weight* w = static_cast<const Weight*>(weight);
  Runtime& r = runtime();
  std::lock_guard<std::mutex> lock(r.mutex);
  float* row = reinterpret_cast<float*>(r.input.ensure(static_cast<size_t>(padded_columns(w->in_features)) * sizeof(float)));
  if (row == nullptr) return kNoMemory;
  for (int32_t i = 0; i < count; ++i) {
    if (ids[i] < 0 || ids[i] >= w->out_features) return kBadToken;
    r.kernels->dequantize_row(w, ids[i], row);
    r.kernels->widen(row, kF32, static_cast<uint8_t*>(out) + i * w->in_features * item_bytes(dtype), dtype, w->in_features);
  }
  return kDone;
}

// A random token of each row.
int32_t hx_draw(const DrawTask* task, int32_t rows) {
  Runtime& r = runtime();
  std::lock_guard<std::mutex> lock(r.mutex);
  if (!r.reserve_scratch(draw_scratch_bytes(task->vocab))) return kNoMemory;
  r.workers().run(rows, [&](int row, int thread) { r.kernels->draw(task, row, r.scratch_of(thread)); });
  return kDone;
}

// Ranks and best tokens of each row. The caller has checked that the token ids are within the vocabulary.
int32_t hx_rank(const RankTask* task, int32_t rows) {
  Runtime& r = runtime();
  std::lock_guard<std::mutex> lock(r.mutex);
  r.workers().run(rows, [&](int row, int) { r.kernels->rank(task, row); });
  return kDone;
}

int32_t hx_stack_forward(const StackDesc* desc, const LayerDesc* layers, const StackCall* call) { return stack_forward(*desc, layers, *call); }

#pragma GCC visibility pop

}  // extern "C"
