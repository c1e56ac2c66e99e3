// Prints the targets that this CPU can run, best first; CMake runs it.
#include <cstdio>

#include "runtime/cpu.h"

int main() {
    for (std::string_view name : attnscore::targets_of_cpu()) std::printf("%s;", name.data());
}
