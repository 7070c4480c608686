// Products of packed weights on the machine this is compiled for, without Python: reads cases from a file that a test wrote, prints the
// instruction set and the largest relative error of each. Usage: native_cases ISA FILE
//
// A case: int64 source, rows, columns, count, dtype (0: float32, 1: bfloat16), bytes of the stored rows; the stored rows, x
// [count][columns] in that dtype, and the expected product [count][rows] in float64.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <vector>

extern "C" {
const char* hx_choose(const char* name);
void hx_set_threads(int32_t threads);
void* hx_weight_new(int32_t source, int64_t out_features, int64_t in_features);
void hx_weight_delete(void* weight);
void hx_weight_fill(void* weight, int32_t source, int64_t first, int64_t count, const uint8_t* rows, int64_t row_bytes);
int32_t hx_linear(const void* weight, const void* x, int32_t dtype, int32_t rows, int32_t epilogue, int32_t activation, void* out,
                  int32_t out_dtype);
}

template <class T>
static bool read(FILE* file, std::vector<T>& into, int64_t count) {
  into.resize(static_cast<size_t>(count));
  return fread(into.data(), sizeof(T), into.size(), file) == into.size();
}

int main(int argc, char** argv) {
  FILE* file = argc == 3 ? fopen(argv[2], "rb") : nullptr;
  const char* isa = argc == 3 ? hx_choose(argv[1]) : nullptr;
  if (file == nullptr || isa == nullptr) return 2;
  hx_set_threads(2);
  printf("%s\n", isa);
  std::vector<int64_t> head;
  std::vector<uint8_t> stored, x;
  std::vector<double> expected;
  while (read(file, head, 6)) {
    const int64_t source = head[0], rows = head[1], columns = head[2], count = head[3], dtype = head[4], bytes = head[5];
    if (!read(file, stored, bytes) || !read(file, x, count * columns * (dtype ? 2 : 4)) || !read(file, expected, count * rows)) return 3;
    void* weight = hx_weight_new(static_cast<int32_t>(source), rows, columns);
    if (weight == nullptr) return 4;
    hx_weight_fill(weight, static_cast<int32_t>(source), 0, rows, stored.data(), bytes / rows);
    std::vector<float> out(static_cast<size_t>(count * rows));
    if (hx_linear(weight, x.data(), static_cast<int32_t>(dtype), static_cast<int32_t>(count), 0, 0, out.data(), 0)) return 5;
    hx_weight_delete(weight);
    double difference = 0, size = 0;
    for (size_t i = 0; i < out.size(); ++i) {
      difference += (out[i] - expected[i]) * (out[i] - expected[i]);
      size += expected[i] * expected[i];
    }
    printf("%lld %lld %lld %lld %lld %g\n", static_cast<long long>(source), static_cast<long long>(rows), static_cast<long long>(columns),
           static_cast<long long>(count), static_cast<long long>(dtype), std::sqrt(difference / size));
  }
  fclose(file);
  return 0;
}
