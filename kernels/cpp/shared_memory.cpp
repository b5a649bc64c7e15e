// Sums `Element`s and gathers words of 4 bytes over the ranks of a node through memory that they share, for
// `shared_memory.py`.
//
// The memory begins with a counter for each rank, 64 bytes apart, and goes on with two buffers of `capacity` floats for
// each rank. In each round a rank writes its part to one of its buffers, raises its counter, and reads the parts of all
// ranks once their counters are as high. The buffers alternate: whoever has raised its counter has read all parts of
// the round before, so that the buffer of two rounds ago is free.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>

#include "element.h"

namespace {

constexpr int64_t kCounterBytes = 64;
constexpr int kSpins = 20000;  // looks at a counter before the core is given to others

inline void pause() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#endif
}

struct Memory {
    char* base;
    int64_t rank, size, capacity;
    const std::atomic<int64_t>* ended;

    std::atomic<int64_t>& counter(int64_t of) const {
        return *reinterpret_cast<std::atomic<int64_t>*>(base + of * kCounterBytes);
    }
    float* buffer(int64_t of, int64_t round) const {
        return reinterpret_cast<float*>(base + size * kCounterBytes) + (of * 2 + round % 2) * capacity;
    }
    // Publishes this rank's part of a round and waits for the others'. Returns whether they came in time, and
    // before another thread of this process set `ended`.
    bool meet(int64_t round, double timeout_s) const {
        counter(rank).store(round, std::memory_order_release);
        for (int64_t other = 0; other < size; ++other) {
            int spins = 0;
            std::chrono::steady_clock::time_point since;
            while (counter(other).load(std::memory_order_acquire) < round) {
                if (++spins < kSpins) {
                    pause();
                    continue;
                }
                const auto now = std::chrono::steady_clock::now();
                if (spins == kSpins) since = now;
                if (std::chrono::duration<double>(now - since).count() > timeout_s) return false;
                if (ended->load(std::memory_order_relaxed)) return false;
                if (now - since < std::chrono::milliseconds(2)) std::this_thread::yield();
                else std::this_thread::sleep_for(std::chrono::microseconds(50));
            }
        }
        return true;
    }
};

}  // namespace

extern "C" {

// x[n] = sum over the ranks, added in the order of ranks, so that it is the same on all. `round` counts on.
int64_t all_reduce(char* base, int64_t rank, int64_t size, int64_t capacity, const std::atomic<int64_t>* ended,
                   int64_t* round, Element* x, int64_t n, double timeout_s) {
    const Memory memory{base, rank, size, capacity, ended};
    const auto buffer = [&](int64_t of) { return reinterpret_cast<Element*>(memory.buffer(of, *round)); };
    for (int64_t done = 0; done < n; done += capacity) {
        const int64_t count = std::min(capacity, n - done);
        Element* part = x + done;
        ++*round;
        std::memcpy(buffer(rank), part, count * sizeof(Element));
        if (!memory.meet(*round, timeout_s)) return 1;
        const Element *first = buffer(0), *second = buffer(1);
        for (int64_t i = 0; i < count; ++i) part[i] = float(first[i]) + float(second[i]);
        for (int64_t other = 2; other < size; ++other) {
            const Element* more = buffer(other);
            for (int64_t i = 0; i < count; ++i) part[i] = float(part[i]) + float(more[i]);
        }
    }
    return 0;
}

// out[ends[own + 1] - ends[own], size * n] = those rows of the ranks' x[ends[shares], n] side by side. A round has as many
// rows of each share, so that all ranks copy at the same time.
int64_t gather(char* base, int64_t rank, int64_t size, int64_t capacity, const std::atomic<int64_t>* ended,
               int64_t* round, const float* x, const int64_t* ends, int64_t shares, int64_t own, int64_t n,
               double timeout_s, float* out) {
    const Memory memory{base, rank, size, capacity, ended};
    const int64_t most = std::min(n, capacity / shares), rows = capacity / shares / most;  // of a share in a round
    int64_t longest = 0;
    for (int64_t share = 0; share < shares; ++share) longest = std::max(longest, ends[share + 1] - ends[share]);
    for (int64_t column = 0; column < n; column += most) {
        const int64_t width = std::min(most, n - column);
        for (int64_t row = 0; row < longest; row += rows) {
            const auto count = [&](int64_t of) { return std::min(rows, ends[of + 1] - ends[of] - row); };
            float* part = memory.buffer(rank, ++*round);
            for (int64_t share = 0; share < shares; ++share)
                for (int64_t r = 0; r < count(share); ++r)
                    std::memcpy(part + (share * rows + r) * width, x + (ends[share] + row + r) * n + column,
                                width * sizeof(float));
            if (!memory.meet(*round, timeout_s)) return 1;
            for (int64_t other = 0; other < size; ++other)
                for (int64_t r = 0; r < count(own); ++r)
                    std::memcpy(out + ((row + r) * size + other) * n + column,
                                memory.buffer(other, *round) + (own * rows + r) * width, width * sizeof(float));
        }
    }
    return 0;
}

}  // extern "C"
