#define HX_ISA amx
#define HX_AVX512 1
#define HX_BF16 1
#define HX_AMX 1
#define HX_NEON 0
#include "isa.h"
