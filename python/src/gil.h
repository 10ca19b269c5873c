#pragma once

#include <unistd.h>

#include <nanobind/nanobind.h>

namespace gradwire::python {

// Runs take(), which takes the GIL. While the interpreter exits, Python before 3.14 ends a thread
// that takes the GIL by unwinding its stack, and a destructor or a catch on the way aborts the
// process. So the unwinding stops here, and the thread waits for the end of the process, as in
// Python 3.14.
template <typename Take>
auto take_gil(const Take& take) {
  try {
    return take();
  } catch (...) {
    while (true) pause();
  }
}

// Runs work() without the GIL, and returns its result.
template <typename Work>
auto without_gil(const Work& work) {
  PyThreadState* const thread = PyEval_SaveThread();
  const auto take_back = [thread] { take_gil([thread] { PyEval_RestoreThread(thread); }); };
  try {
    auto result = work();
    take_back();
    return result;
  } catch (...) {
    take_back();
    throw;
  }
}

// Holds the GIL, for functions of C++ that call Python.
class GilHeld {
 public:
  GilHeld() : state_(take_gil([] { return PyGILState_Ensure(); })) {}
  ~GilHeld() { PyGILState_Release(state_); }
  GilHeld(const GilHeld&) = delete;
  GilHeld& operator=(const GilHeld&) = delete;

 private:
  PyGILState_STATE state_;
};

}  // namespace gradwire::python
