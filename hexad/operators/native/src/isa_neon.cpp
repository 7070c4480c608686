#define HX_ISA neon
#define HX_AVX512 0
#define HX_BF16 0
#define HX_AMX 0
#define HX_NEON 1
#include "isa.h"
