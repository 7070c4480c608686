#define HX_ISA avx2
#define HX_AVX512 0
#define HX_BF16 0
#define HX_AMX 0
#define HX_NEON 0
#include "isa.h"
