#define HX_ISA avx512bf16
#define HX_AVX512 1
#define HX_BF16 1
#define HX_AMX 0
#define HX_NEON 0
#include "isa.h"
