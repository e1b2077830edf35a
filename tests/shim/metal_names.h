// The Metal names that the kernel body uses, for a C++ compiler: groups of 32 lanes that run in lock step.
//
// Every lane is a coroutine with a stack of its own. It runs until it gives a value to a shuffle; once all 32 have
// given theirs, each goes on with its partner's. Lanes that part ways (one ends or shuffles elsewhere while another
// still shuffles) are an error, as they would be undefined on a GPU.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

namespace shim {

constexpr int n_lanes = 32;
constexpr size_t stack_bytes = 256 * 1024;

struct Position {
  unsigned x, y, z;
};

struct Lane {
  ucontext_t context;  // to start with; from then on jumps, which leave the signal mask alone and are far cheaper
  jmp_buf resume;
  bool started;
  std::vector<char> stack = std::vector<char>(stack_bytes);
  Position position;
  unsigned index;
  float given[2];  // two, because a lane may give again before its partner has taken
  int step;
  unsigned n_shuffles;
  bool done;
};

inline Lane lanes[n_lanes];
inline Lane* current = nullptr;
inline jmp_buf scheduler;
inline void (*kernel)() = nullptr;

inline void enter() {
  kernel();
  current->done = true;
  _longjmp(scheduler, 1);
}

// Let a lane run until it gives way.
inline void run_lane(Lane& lane) {
  current = &lane;
  if (_setjmp(scheduler)) return;
  if (lane.started) _longjmp(lane.resume, 1);
  lane.started = true;
  setcontext(&lane.context);
}

inline void give_way() {
  if (!_setjmp(current->resume)) _longjmp(scheduler, 1);
}

// Run one group of lanes to its end; false if they part ways.
inline bool run_group(unsigned y, unsigned z) {
  for (int i = 0; i < n_lanes; ++i) {
    Lane& lane = lanes[i];
    lane.position = {unsigned(i), y, z};
    lane.index = i;
    lane.n_shuffles = 0;
    lane.started = lane.done = false;
    getcontext(&lane.context);
    lane.context.uc_stack.ss_sp = lane.stack.data();
    lane.context.uc_stack.ss_size = lane.stack.size();
    lane.context.uc_link = nullptr;  // `enter` never returns
    makecontext(&lane.context, enter, 0);
  }
  while (!lanes[0].done) {
    for (Lane& lane : lanes) run_lane(lane);
    for (const Lane& lane : lanes) {
      const bool together = lane.n_shuffles == lanes[0].n_shuffles && lane.step == lanes[0].step;
      if (lane.done != lanes[0].done || !together) return false;
    }
  }
  return true;
}

struct bfloat16 {
  uint16_t bits;
  bfloat16() = default;
  explicit bfloat16(float value) {
    uint32_t word;
    std::memcpy(&word, &value, 4);
    bits = (word & 0x7fffffffu) > 0x7f800000u ? 0x7fc0 : uint16_t((word + 0x7fff + (word >> 16 & 1)) >> 16);
  }
  operator float() const {
    const uint32_t word = uint32_t(bits) << 16;
    float value;
    std::memcpy(&value, &word, 4);
    return value;
  }
};

}  // namespace shim

inline float simd_shuffle_xor(float value, int step) {
  shim::Lane& lane = *shim::current;
  const unsigned slot = lane.n_shuffles++ % 2;
  lane.given[slot] = value;
  lane.step = step;
  shim::give_way();
  return shim::lanes[lane.index ^ step].given[slot];
}

// A hint on a GPU; here it reads, so that an address past the inputs shows under a memory checker.
inline void bring_near(const char* from) { *(const volatile char*)from; }

using std::fma;
using bfloat16_t = shim::bfloat16;
using float16_t = _Float16;

#define thread_position_in_grid (shim::current->position)
#define thread_index_in_simdgroup (shim::current->index)
#define device
// Small inputs come in Metal's constant address space; here one overload of `load` must stay out of the other's way.
#define constant volatile
