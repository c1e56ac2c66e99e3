// The targets that this CPU can run. Compiled without target flags, because it runs before the CPU is known; CMake runs
// it too, to compile the targets of this machine (best_target.cc).
#pragma once

#include <string_view>
#include <vector>

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace attnscore {

#if defined(__x86_64__)
// Features of this x86 CPU whose registers the operating system saves. The CPU is asked itself: the function behind
// __builtin_cpu_supports is in the compiler's runtime library, and Zig's answers "none" to everything.
struct X86Features {
    bool avx2 = false, avx512 = false, avx512bf16 = false;

    X86Features() {
        unsigned a, b, c, d;
        constexpr unsigned kFma = 1u << 12, kXgetbv = 1u << 27, kF16c = 1u << 29;
        if (!has(__get_cpuid_count(1, 0, &a, &b, &c, &d) ? c : 0, kFma | kXgetbv | kF16c)) return;
        unsigned saved;
        asm volatile("xgetbv" : "=a"(saved), "=d"(d) : "c"(0));
        constexpr unsigned kYmm = 0x6, kZmm = 0xe0;
        if (!has(saved, kYmm) || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return;
        constexpr unsigned kAvx2 = 1u << 5, kFBwDqVl = 1u << 16 | 1u << 30 | 1u << 17 | 1u << 31, kVnni = 1u << 11;
        avx2 = has(b, kAvx2);
#if !defined(__APPLE__)  // macOS begins to save these when they are first used
        if (!has(saved, kZmm)) return;
#endif
        avx512 = avx2 && has(b, kFBwDqVl);
        // VNNI, because CMake compiles the target with it; `a` is the last subleaf of leaf 7.
        const bool has_vnni = has(c, kVnni), has_subleaf_1 = a >= 1;
        constexpr unsigned kBf16 = 1u << 5;
        avx512bf16 = avx512 && has_vnni && has_subleaf_1 && __get_cpuid_count(7, 1, &a, &b, &c, &d) && has(a, kBf16);
    }

   private:
    static bool has(unsigned bits, unsigned all) { return (bits & all) == all; }
};
#endif

#if defined(__aarch64__)
// Whether this Arm CPU has BF16; the system says, as a program cannot ask the CPU. False on systems not listed here.
inline bool has_neon_bf16() {
#if defined(__linux__)
    constexpr unsigned long kBf16 = 1ul << 14;  // HWCAP2_BF16, which older headers lack
    return (getauxval(AT_HWCAP2) & kBf16) != 0;
#elif defined(__APPLE__)
    int feature = 0;
    size_t size = sizeof feature;
    return sysctlbyname("hw.optional.arm.FEAT_BF16", &feature, &size, nullptr, 0) == 0 && feature != 0;
#else
    return false;
#endif
}
#endif

// Names of the targets that this CPU can run, best first, whether the module has them or not.
inline std::vector<std::string_view> targets_of_cpu() {
    std::vector<std::string_view> names;
#if defined(__x86_64__)
    const X86Features cpu;
    if (cpu.avx512bf16) names.push_back("avx512bf16");
    if (cpu.avx512) names.push_back("avx512");
    if (cpu.avx2) names.push_back("avx2");
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
