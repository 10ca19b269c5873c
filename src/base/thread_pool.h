#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace gradwire {

// Fork and join over a fixed set of threads. Threads take indices one by one from a shared counter,
// so uneven pieces (sparse and dense chunks) are balanced.
class ThreadPool {
 public:
  // `threads` counts the caller, so threads - 1 are started. Throws std::system_error if the system
  // refuses to start one.
  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  [[nodiscard]] int threads() const noexcept { return static_cast<int>(workers_.size()) + 1; }

  // Calls body(i) for every i in [0, count); the caller works too. Only one thread may call it at a
  // time. `body` must not throw.
  void for_each(size_t count, const std::function<void(size_t)>& body);

 private:
  void work();
  void stop();
  void take_indices();

  std::mutex mutex_;
  std::condition_variable start_;
  std::condition_variable finish_;
  const std::function<void(size_t)>* body_ = nullptr;
  size_t count_ = 0;
  std::atomic<size_t> next_{0};
  size_t busy_ = 0;
  size_t generation_ = 0;
  bool stopping_ = false;
  std::vector<std::thread> workers_;
};

}  // namespace gradwire
