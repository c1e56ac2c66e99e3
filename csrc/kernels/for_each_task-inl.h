// Tasks on several threads. Included in a namespace of its users: a target's, or an unnamed one around the kernels.
#pragma once

// Call f(0) .. f(count - 1) on the pool, or on OpenMP's threads. The first exception leaves on the caller's thread, not
// on a worker's.
template <class F>
void for_each_task(int64_t count, Threads threads, const F& f) {
    struct Context {
        const F& f;
        std::atomic<bool> failed;
        std::exception_ptr error;
    } context{f, {}, {}};
    const auto run_task = [](int64_t task, void* p) {
        Context& c = *static_cast<Context*>(p);
        try {
            c.f(task);
        } catch (...) {
            if (!c.failed.exchange(true)) c.error = std::current_exception();
        }
    };
    parallel(count, run_task, &context, threads);
    if (context.error) std::rethrow_exception(context.error);
}
