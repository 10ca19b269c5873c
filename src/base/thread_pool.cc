#include "base/thread_pool.h"

#include <chrono>

namespace gradwire {
namespace {

// condition_variable::wait() would need the libstdc++ of GCC 12 where gradwire runs; waiting for
// this time, which never comes, needs none that new.
constexpr auto kNever = std::chrono::steady_clock::time_point::max();

}  // namespace

ThreadPool::ThreadPool(int threads) {
  try {
    for (int i = 1; i < threads; ++i) workers_.emplace_back([this] { work(); });
  } catch (...) {
    stop();
    throw;
  }
}

ThreadPool::~ThreadPool() { stop(); }

void ThreadPool::stop() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  start_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::for_each(size_t count, const std::function<void(size_t)>& body) {
  if (workers_.empty() || count <= 1) {
    for (size_t i = 0; i < count; ++i) body(i);
    return;
  }
  {
    std::lock_guard lock(mutex_);
    body_ = &body;
    count_ = count;
    next_.store(0, std::memory_order_relaxed);
    busy_ = workers_.size();
    ++generation_;
  }
  start_.notify_all();
  take_indices();
  std::unique_lock lock(mutex_);
  finish_.wait_until(lock, kNever, [this] { return busy_ == 0; });
  body_ = nullptr;
}

void ThreadPool::take_indices() {
  for (size_t i = next_.fetch_add(1); i < count_; i = next_.fetch_add(1)) (*body_)(i);
}

void ThreadPool::work() {
  size_t seen = 0;
  std::unique_lock lock(mutex_);
  while (true) {
    start_.wait_until(lock, kNever, [&] { return stopping_ || generation_ != seen; });
    if (stopping_) return;
    seen = generation_;
    lock.unlock();
    take_indices();
    lock.lock();
    if (--busy_ == 0) finish_.notify_one();
  }
}

}  // namespace gradwire
