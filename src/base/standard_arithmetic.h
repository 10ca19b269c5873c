#pragma once

#if defined(__SSE__)
#include <xmmintrin.h>
#elif !defined(__aarch64__)
#include <cfenv>
#endif

namespace gradwire {

// As long as it lives, the calling thread computes as spec/format.md says ("Conventions"): each
// result rounded to nearest, denormals kept, no traps. Then the host program's settings hold again.
//
// A thread's settings may differ after torch.set_flush_denormal(True) or fesetround(), or if a
// library that was linked with -ffast-math was loaded. All public functions that compute with
// floats begin with one of these. Where nothing differs, it reads a register, and writes none.
//
// The compiler does not know that arithmetic depends on these settings. It moves no access to
// memory over the constructor or destructor, so only values in memory are safe: let a function that
// has one receive and return its floats in memory, or call another that computes.
class StandardArithmetic {
 public:
  StandardArithmetic() noexcept : saved_(read()), differs_(is_other(saved_)) {
    if (differs_) write_standard(saved_);
  }
  ~StandardArithmetic() {
    if (differs_) write(saved_);
  }
  StandardArithmetic(const StandardArithmetic&) = delete;
  StandardArithmetic& operator=(const StandardArithmetic&) = delete;

  // For a thread of our own, which never needs other settings.
  static void keep() noexcept { write_standard(read()); }

 private:
#if defined(__SSE__)
  using Register = unsigned;  // MXCSR
  static constexpr Register kTrapsOff = 0x1f80;
  static constexpr Register kModes = 0xe040;  // flush to zero, rounding, denormals are zeros
  static Register read() noexcept { return _mm_getcsr(); }
  static bool is_other(Register found) noexcept {
    return (found & (kModes | kTrapsOff)) != kTrapsOff;
  }
  static void write_standard(Register found) noexcept { write((found & ~kModes) | kTrapsOff); }
  static void write(Register value) noexcept {
    asm volatile("" ::: "memory");
    _mm_setcsr(value);
    asm volatile("" ::: "memory");
  }
#elif defined(__aarch64__)
  using Register = unsigned long;  // FPCR: 0 is the standard; lengths of vectors may stay
  static constexpr Register kVectors = 0x370000;
  static Register read() noexcept {
    Register found;
    asm volatile("mrs %0, fpcr" : "=r"(found)::"memory");
    return found;
  }
  static bool is_other(Register found) noexcept { return (found & ~kVectors) != 0; }
  static void write_standard(Register found) noexcept { write(found & kVectors); }
  static void write(Register value) noexcept {
    asm volatile("msr fpcr, %0" ::"r"(value) : "memory");
  }
#else
  using Register = std::fenv_t;
  static Register read() noexcept {
    Register found;
    std::fegetenv(&found);
    return found;
  }
  static bool is_other(const Register&) noexcept { return true; }
  static void write_standard(const Register&) noexcept { std::fesetenv(FE_DFL_ENV); }
  static void write(const Register& found) noexcept { std::fesetenv(&found); }
#endif

  Register saved_;
  bool differs_;
};

}  // namespace gradwire
