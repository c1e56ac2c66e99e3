// Selects the targets that this CPU can run. Compiled without target flags, because it runs before the CPU is known.
#include "runtime/attention.h"

#if defined(ATTNSCORE_NEON_BF16) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(ATTNSCORE_NEON_BF16) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

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
#ifdef ATTNSCORE_NEON_BF16
namespace neon_bf16 {
extern const Kernels kernels;
}
#endif
#ifdef ATTNSCORE_NEON
namespace neon {
extern const Kernels kernels;
}
#else
namespace portable {
extern const Kernels kernels;
}
#endif

#ifdef ATTNSCORE_NEON_BF16
// Whether this Arm CPU has BF16; the system says, as a program cannot ask the CPU. False on systems not listed here.
static bool has_neon_bf16() {
#if defined(__linux__)
    constexpr unsigned long kBf16 = 1ul << 14;  // HWCAP2_BF16, which older headers lack
    return (getauxval(AT_HWCAP2) & kBf16) != 0;
#elif defined(__APPLE__)
    int found = 0;
    size_t size = sizeof found;
    return sysctlbyname("hw.optional.arm.FEAT_BF16", &found, &size, nullptr, 0) == 0 && found != 0;
#else
    return false;
#endif
}
#endif

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
#ifdef ATTNSCORE_NEON_BF16
    if (has_neon_bf16()) found.push_back(&neon_bf16::kernels);
#endif
#ifdef ATTNSCORE_NEON
    found.push_back(&neon::kernels);
#else
    found.push_back(&portable::kernels);
#endif
    return found;
}

}  // namespace attnscore
