// Selects the targets that this CPU can run among those that were compiled.
#include "compiled_targets.h"
#include "runtime/attention.h"
#include "runtime/cpu.h"

namespace attnscore {

// ATTNSCORE_TARGETS(f) is f(name) of each compiled target; CMake writes it.
#define ATTNSCORE_DECLARE(name)   \
    namespace name {              \
    extern const Kernels kernels; \
    }
ATTNSCORE_TARGETS(ATTNSCORE_DECLARE)

std::vector<const Kernels*> runnable_kernels() {
#define ATTNSCORE_ADDRESS(name) &name::kernels,
    const Kernels* const compiled[] = {ATTNSCORE_TARGETS(ATTNSCORE_ADDRESS)};
    std::vector<const Kernels*> runnable;
    for (std::string_view name : targets_of_cpu())
        for (const Kernels* kernels : compiled)
            if (name == kernels->name) runnable.push_back(kernels);
    return runnable;
}

}  // namespace attnscore
