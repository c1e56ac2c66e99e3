// The thread pool. Requirements:
// - every task runs on exactly one thread, and `parallel` returns when all are done;
// - tasks flush subnormal results to zero and round to nearest, whatever mode the caller's thread is in;
// - low overhead: no lock to join or leave a job, and a system call only to wake sleeping workers;
// - no waiting for a worker that has not joined: on a busy machine the caller does the work alone;
// - workers run where their caller may, whoever started them, and not on its processor, where one would run after the
//   work is done;
// - safe after fork: the child has none of its parent's workers and starts its own;
// - no delay at exit: workers are detached, and the pool that they sleep on is never destroyed.
// Calls from a framework that runs on OpenMP take its threads instead, except after a fork.
#include <algorithm>
#include <atomic>
#include <new>
#include <system_error>
#include <thread>

#include "runtime/attention.h"

#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#include <signal.h>
#define ATTNSCORE_POSIX 1
#endif
#if defined(__linux__)
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif

namespace attnscore {
namespace {

constexpr int kMostThreads = 1024;  // of a call: Pool::threads_ has room for so many
// A pool bars its workers from the caller's processor while it has at most so many: each is a system call (1 to 2 us).
constexpr int kMostBarred = 16;
// Iterations of a spin loop before a thread sleeps, about 20 us: successive calls find the workers awake, and an idle
// program soon uses no CPU.
constexpr int kSpins = 1000;

// The gate of a job: the upper half counts the workers that may still join (0: the gate is closed), the lower half the
// workers that have joined and not left.
constexpr uint32_t kJoinedMask = 0xffff, kSeat = 0x10000;

void pause() {
#if defined(__x86_64__) || defined(__i386__)
    _mm_pause();
#elif defined(__aarch64__) && defined(__GNUC__)
    asm volatile("yield");
#endif
}

// The floating-point mode of tasks in this thread, until the end of the scope: subnormal results are zero, as on GPUs.
// Weights and their gradients fall through the subnormal numbers wherever scores fall with the distance (ALiBi), and
// each product with one takes 100 cycles: a forward took 2.7 times as long, a backward 4 times (Xeon with AVX-512).
// Callers' modes differ (XLA's and TensorFlow's threads flush too), and a new thread inherits its creator's.
class TaskMode {
   public:
    TaskMode() : before_(get()) {
        if (before_ != kFlush) set(kFlush);
    }
    ~TaskMode() {
        if (before_ != kFlush) set(before_);
    }
    TaskMode(const TaskMode&) = delete;
    TaskMode& operator=(const TaskMode&) = delete;

   private:
#if defined(__x86_64__) || defined(__i386__)
    // Flush to zero (0x8000), all exceptions masked (0x1f80); the low six bits only record which have occurred.
    static constexpr uint64_t kFlush = 0x9f80;
    static uint64_t get() { return _mm_getcsr() & ~0x3fu; }
    static void set(uint64_t mode) { _mm_setcsr(static_cast<uint32_t>(mode)); }
#elif defined(__aarch64__) && defined(__GNUC__)
    static constexpr uint64_t kFlush = 1 << 24;  // FZ
    static uint64_t get() {
        uint64_t mode;
        asm volatile("mrs %0, fpcr" : "=r"(mode));
        return mode;
    }
    static void set(uint64_t mode) { asm volatile("msr fpcr, %0" : : "r"(mode)); }
#else
    static constexpr uint64_t kFlush = 0;
    static uint64_t get() { return kFlush; }
    static void set(uint64_t) {}
#endif
    const uint64_t before_;
};

// The processors on which workers may run: the processors of this job's caller, as the caller that started the workers,
// or the last caller, may have had others. A few workers are also barred from the processor that the caller is on.
// Linux wakes a thread on the processor of its waker unless it finds an idle one, and in a virtual machine a processor
// that the host has put to sleep does not count as idle. The worker waits there for the caller's time slice to end, in
// call after call: with pauses of 5 ms or more two threads took as long as one (TUNING.md, Threads).
#if defined(__linux__)
class Processors {
   public:
    // Called by a worker when it starts.
    static int thread() { return static_cast<int>(syscall(SYS_gettid)); }

    // Place these workers, of which some may not have started. A system call, and one for each worker when the caller
    // has moved or has other processors than the last one.
    void place(const std::atomic<int>* workers, int count) {
        cpu_set_t allowed;
        if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return;
        const int processor = sched_getcpu();
        if (processor >= 0 && count <= kMostBarred && CPU_COUNT(&allowed) > 1) CPU_CLR(processor, &allowed);
        if (!CPU_EQUAL(&allowed, &current_)) {
            current_ = allowed;
            placed_ = 0;
        }
        for (; placed_ < count; ++placed_) {
            const int worker = workers[placed_].load(std::memory_order_relaxed);
            if (worker == 0) return;  // not started yet: a later job places it
            // Where this is not allowed nothing changes.
            (void)sched_setaffinity(worker, sizeof current_, &current_);
        }
    }

   private:
    cpu_set_t current_{};
    int placed_ = 0;  // how many workers have these processors
};
#else
struct Processors {
    static int thread() { return 1; }
    void place(const std::atomic<int>*, int) {}
};
#endif

struct Job {
    int64_t count;
    void (*f)(int64_t task, void* context);
    void* context;

    // Run the tasks that no other thread has taken; `next`: the first one, counted up by all threads.
    void take_tasks(std::atomic<int64_t>& next) const {
        for (;;) {
            const int64_t task = next.fetch_add(1, std::memory_order_relaxed);
            if (task >= count) return;
            f(task, context);
        }
    }
};

class Pool {
   public:
    // Run a job on the caller's thread and so many workers; one caller at a time.
    void run(const Job& job, int helpers);

   private:
    // Start workers until there are so many.
    void start_workers(int target);
    // What a worker runs until the process ends; `thread`: where it notes its number.
    void work(std::atomic<int>& thread);
    // Join the open job, if it takes more workers. The job cannot change until the worker leaves.
    bool try_join();
    void leave();

    Job job_{};        // written by the caller while the gate is closed
    int workers_ = 0;  // started so far; used by the caller alone
    Processors processors_;
    std::atomic<int> threads_[kMostThreads]{};  // of the workers, as the system numbers them
    alignas(64) std::atomic<int64_t> next_{0};
    alignas(64) std::atomic<uint32_t> gate_{0};
    alignas(64) std::atomic<uint32_t> generation_{0};  // grows with each job; workers sleep on it
};

void Pool::run(const Job& job, int helpers) {
    start_workers(helpers);
    helpers = std::min(helpers, workers_);
    job_ = job;
    next_.store(0, std::memory_order_relaxed);
    processors_.place(threads_, workers_);
    gate_.store(static_cast<uint32_t>(helpers) * kSeat, std::memory_order_release);
    generation_.fetch_add(1, std::memory_order_release);
    if (helpers < workers_) {
        for (int i = 0; i < helpers; ++i) generation_.notify_one();
    } else {
        generation_.notify_all();
    }

    job_.take_tasks(next_);

    // Close the gate, and wait for the workers that have joined.
    uint32_t gate = gate_.fetch_and(kJoinedMask, std::memory_order_acquire) & kJoinedMask;
    for (int spins = 0; gate != 0; gate = gate_.load(std::memory_order_acquire)) {
        if (++spins < kSpins) {
            pause();
        } else {
            gate_.wait(gate, std::memory_order_acquire);
        }
    }
}

void Pool::start_workers(int target) {
    if (workers_ >= target) return;
#ifdef ATTNSCORE_POSIX
    // Workers inherit that all signals are blocked, so that signals reach the program's own threads.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
#endif
    try {
        for (; workers_ < target; ++workers_) {
            std::atomic<int>& thread = threads_[workers_];
            std::thread([this, &thread] { work(thread); }).detach();
        }
    } catch (const std::system_error&) {
        // The system has no more threads: the job runs on the threads that started.
    } catch (const std::bad_alloc&) {
    }
#ifdef ATTNSCORE_POSIX
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
#endif
}

void Pool::work(std::atomic<int>& thread) {
    const TaskMode mode;
    thread.store(Processors::thread(), std::memory_order_relaxed);
    // A new worker tries to join before it first sleeps: its job may be open already.
    for (;;) {
        const uint32_t generation = generation_.load(std::memory_order_acquire);
        if (try_join()) {
            job_.take_tasks(next_);
            leave();
            continue;
        }
        int spins = 0;
        while (generation_.load(std::memory_order_relaxed) == generation && ++spins < kSpins) pause();
        generation_.wait(generation, std::memory_order_acquire);
    }
}

bool Pool::try_join() {
    uint32_t gate = gate_.load(std::memory_order_relaxed);
    while (gate >= kSeat) {
        if (gate_.compare_exchange_weak(gate, gate - kSeat + 1, std::memory_order_acquire)) return true;
    }
    return false;
}

void Pool::leave() {
    if (gate_.fetch_sub(1, std::memory_order_release) == 1) gate_.notify_one();
}

std::atomic<bool> busy{false};         // its setter owns the pool
std::atomic<Pool*> the_pool{nullptr};  // never deleted: detached workers sleep on it until the process ends

// `GOMP_parallel(f, context, threads, flags)` calls f(context) on each thread of a team. It is called with 0 threads,
// which means as many as the framework has set: another number than in the last call would end or start threads.
using GompParallel = void (*)(void (*f)(void*), void* context, unsigned threads, unsigned flags);
std::atomic<GompParallel> gomp_parallel{nullptr};
std::atomic<bool> forked{false};

// In the child of a fork, abandon the parent's pool, whose workers do not exist here. OpenMP's workers do not exist
// either, and its runtime would wait for them.
void forget_pool() {
    the_pool.store(nullptr, std::memory_order_relaxed);
    busy.store(false, std::memory_order_relaxed);
    forked.store(true, std::memory_order_relaxed);
}

#ifdef ATTNSCORE_POSIX
// Registered at load, because a fork may come at any later time.
[[maybe_unused]] const int registered = pthread_atfork(nullptr, nullptr, forget_pool);
#endif

// The pool, made at the first use; null where there is no memory for it. For the thread that has set `busy`.
Pool* owned_pool() {
    Pool* pool = the_pool.load(std::memory_order_relaxed);
    if (pool != nullptr) return pool;
    pool = new (std::nothrow) Pool;
    the_pool.store(pool, std::memory_order_relaxed);
    return pool;
}

// A job of a team of OpenMP, which may have more threads than the job takes.
struct TeamJob {
    const Job job;
    std::atomic<int> seats;  // threads of the team that may still take tasks
    alignas(64) std::atomic<int64_t> next{0};

    static void run(void* context) {
        auto& self = *static_cast<TeamJob*>(context);
        if (self.seats.fetch_sub(1, std::memory_order_relaxed) <= 0) return;
        const TaskMode mode;
        self.job.take_tasks(self.next);
    }
};

}  // namespace

void use_openmp(void* address) { gomp_parallel.store(reinterpret_cast<GompParallel>(address)); }

void parallel(int64_t count, void (*f)(int64_t task, void* context), void* context, Threads max_threads) {
    const TaskMode mode;
    const int threads = static_cast<int>(std::min<int64_t>({count, max_threads.count, kMostThreads}));
    const GompParallel team = gomp_parallel.load(std::memory_order_relaxed);
    if (threads > 1 && max_threads.openmp && team != nullptr && !forked.load(std::memory_order_relaxed)) {
        TeamJob job{{count, f, context}, threads};
        team(TeamJob::run, &job, 0, 0);
        return;
    }
    if (threads > 1 && !busy.exchange(true, std::memory_order_acquire)) {
        Pool* pool = owned_pool();
        if (pool != nullptr) pool->run({count, f, context}, threads - 1);
        busy.store(false, std::memory_order_release);
        if (pool != nullptr) return;
    }
    for (int64_t task = 0; task < count; ++task) f(task, context);
}

}  // namespace attnscore
