#pragma once

// What a host program may set for the arithmetic of its threads. Results must not depend on it.

#include <cfenv>
#include <cstdint>
#include <string>
#include <vector>

#if defined(__SSE__)
#include <xmmintrin.h>
#endif

namespace gradwire {

// Settings of the calling thread; the destructor brings back those from before.
class ArithmeticMode {
 public:
  enum class Mode : uint8_t {
    kFlushResults,  // denormal results become 0 (on Arm inputs too)
    kFlushInputs,   // denormal inputs count as 0
    kUpward,
    kDownward,
    kTowardZero,
    kTraps,  // invalid operations, overflows and divisions by zero end the process
  };
  static std::vector<Mode> all() {
    std::vector<Mode> modes = {Mode::kFlushResults, Mode::kFlushInputs, Mode::kUpward,
                               Mode::kDownward,     Mode::kTowardZero,  Mode::kTraps};
#if !defined(__SSE__)
    std::erase(modes, Mode::kFlushInputs);
#endif
    return modes;
  }
  static std::string name(Mode mode) {
    constexpr const char* kNames[] = {"flushed results", "flushed inputs", "upward",
                                      "downward",        "toward zero",    "traps"};
    return kNames[static_cast<size_t>(mode)];
  }

  explicit ArithmeticMode(Mode mode) {
    std::fegetenv(&before_);
    switch (mode) {
      case Mode::kFlushResults:
        flush(0x8000);
        break;
      case Mode::kFlushInputs:
        flush(0x0040);
        break;
      case Mode::kUpward:
        std::fesetround(FE_UPWARD);
        break;
      case Mode::kDownward:
        std::fesetround(FE_DOWNWARD);
        break;
      case Mode::kTowardZero:
        std::fesetround(FE_TOWARDZERO);
        break;
      case Mode::kTraps:
        feenableexcept(FE_INVALID | FE_OVERFLOW | FE_DIVBYZERO);
        break;
    }
  }
  ~ArithmeticMode() { std::fesetenv(&before_); }
  ArithmeticMode(const ArithmeticMode&) = delete;
  ArithmeticMode& operator=(const ArithmeticMode&) = delete;

  // The calling thread's settings, to compare them.
  static uint64_t settings() {
#if defined(__SSE__)
    return _mm_getcsr() & ~0x3fU;  // without the flags of what has happened
#else
    uint64_t found;
    asm volatile("mrs %0, fpcr" : "=r"(found));
    return found;
#endif
  }

 private:
  static void flush([[maybe_unused]] unsigned bit) {
#if defined(__SSE__)
    _mm_setcsr(_mm_getcsr() | bit);
#else
    asm volatile("msr fpcr, %0" ::"r"(settings() | uint64_t{1} << 24));
#endif
  }

  std::fenv_t before_;
};

}  // namespace gradwire
