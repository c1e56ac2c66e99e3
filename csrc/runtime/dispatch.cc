// Selects the targets that this CPU can run. Compiled without target flags, because it runs before the CPU is known.
#include "runtime/attention.h"

namespace attnscore {

#ifdef ATTNSCORE_AVX512BF16
namespace avx512bf16 {
extern const Kernels kernels;
}
#endif
#ifdef ATTNSCORE_X86
namespace avx512 {
extern const Kernels kernels;
}
namespace avx2 {
extern const Kernels kernels;
}
#endif
namespace portable {
extern const Kernels kernels;
}

std::vector<const Kernels*> runnable_kernels() {
    std::vector<const Kernels*> found;
#ifdef ATTNSCORE_X86
    // Also false where the operating system does not save the registers. Older compilers have no name for F16C, which
    // every CPU with AVX2 has.
    __builtin_cpu_init();
    const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const bool has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                            __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#ifdef ATTNSCORE_AVX512BF16
    const bool has_bf16 = __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni");
    if (has_avx2 && has_avx512 && has_bf16) found.push_back(&avx512bf16::kernels);
#endif
    if (has_avx2 && has_avx512) found.push_back(&avx512::kernels);
    if (has_avx2) found.push_back(&avx2::kernels);
#endif
    found.push_back(&portable::kernels);
    return found;
}

}  // namespace attnscore
