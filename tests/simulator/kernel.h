// What is added to a kernel file: its dynamic shared memory, where shared memory is, and the call with packed arguments.
#pragma once

#include <link.h>

#include <utility>

extern "C" {
__thread __attribute__((aligned(1024))) unsigned char simulator_dynamic[232448];
}

namespace simulator {

template <class... Arguments>
void call(void (*kernel)(Arguments...), void** arguments) {
    [&]<size_t... kIndex>(std::index_sequence<kIndex...>) {
        kernel(*reinterpret_cast<std::remove_cv_t<Arguments>*>(arguments[kIndex])...);
    }(std::index_sequence_for<Arguments...>{});
}

}  // namespace simulator

// Shared memory is the thread-local memory of this library in the running thread.
extern "C" void simulator_bind(unsigned char** base, size_t* size) {
    struct Found {
        unsigned char *inside, *base;
        size_t size;
    } found{simulator_dynamic, nullptr, 0};
    dl_iterate_phdr(
        [](dl_phdr_info* info, size_t, void* data) {
            auto& found = *static_cast<Found*>(data);
            auto* start = static_cast<unsigned char*>(info->dlpi_tls_data);
            for (int i = 0; i < info->dlpi_phnum; i++) {
                if (info->dlpi_phdr[i].p_type != PT_TLS || start == nullptr) continue;
                const size_t bytes = info->dlpi_phdr[i].p_memsz;
                if (found.inside >= start && found.inside < start + bytes) found.base = start, found.size = bytes;
            }
            return 0;
        },
        &found);
    *base = found.base;
    *size = found.size;
}
