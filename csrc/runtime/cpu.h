// The targets that this CPU can run. Compiled without target flags, because it runs before the CPU is known; CMake runs
// it too, to compile what this machine needs (best_target.cc).
#pragma once

#include <string_view>
#include <vector>

#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace attnscore {

#if defined(__aarch64__)
// Whether this Arm CPU has BF16; the system says, as a program cannot ask the CPU. False on systems not listed here.
inline bool has_neon_bf16() {
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

// Names of the targets that this CPU can run, best first, whether the module has them or not.
inline std::vector<std::string_view> targets_of_cpu() {
    std::vector<std::string_view> names;
#if defined(__x86_64__)
    // Also false where the operating system does not save the registers. Older compilers have no name for F16C, which
    // every CPU with AVX2 has, and none for BF16: they cannot compile its target either.
    __builtin_cpu_init();
    const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                            __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#ifdef ATTNSCORE_KNOWS_AVX512BF16
    if (has_avx512 && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni"))
        names.push_back("avx512bf16");
#endif
    if (has_avx512) names.push_back("avx512");
    if (has_avx2) names.push_back("avx2");
#endif
#if defined(__aarch64__)
    if (has_neon_bf16()) names.push_back("neon_bf16");
    names.push_back("neon");
#else
    names.push_back("portable");
#endif
    return names;
}

}  // namespace attnscore
