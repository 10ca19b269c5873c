#include "base/thread_pool.h"

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "base/standard_arithmetic.h"

namespace gradwire {
namespace {

// condition_variable::wait() would need the libstdc++ of GCC 12 where gradwire runs; waiting for
// this time, which never comes, needs none that new.
constexpr auto kNever = std::chrono::steady_clock::time_point::max();

}  // namespace

// The threads, and all that they share.
class ThreadPool::Team {
 public:
  explicit Team(int threads) {
    try {
      for (int i = 1; i < threads; ++i) workers_.emplace_back([this] { work(); });
    } catch (...) {
      stop();
      throw;
    }
  }
  ~Team() { stop(); }
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  void for_each(size_t count, const std::function<void(size_t)>& body) {
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
    if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
  }

 private:
  void stop() {
    {
      std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    start_.notify_all();
    for (std::thread& worker : workers_) worker.join();
  }

  void take_indices() {
    try {
      for (size_t i = next_.fetch_add(1); i < count_; i = next_.fetch_add(1)) (*body_)(i);
    } catch (...) {
      next_.store(count_);
      std::lock_guard lock(mutex_);
      if (!failure_) failure_ = std::current_exception();
    }
  }

  void work() {
    StandardArithmetic::keep();  // it has those of the thread that started it
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

  std::mutex mutex_;
  std::condition_variable start_;
  std::condition_variable finish_;
  const std::function<void(size_t)>* body_ = nullptr;
  std::exception_ptr failure_;
  size_t count_ = 0;
  std::atomic<size_t> next_{0};
  size_t busy_ = 0;
  size_t generation_ = 0;
  bool stopping_ = false;
  std::vector<std::thread> workers_;
};

ThreadPool::ThreadPool(int threads)
    : threads_(threads), process_(getpid()), team_(std::make_unique<Team>(threads)) {}

ThreadPool::~ThreadPool() {
  if (process_ != getpid()) abandon_team();
}

void ThreadPool::for_each(size_t count, const std::function<void(size_t)>& body) {
  if (threads_ == 1 || count <= 1) {
    for (size_t i = 0; i < count; ++i) body(i);
    return;
  }
  if (process_ != getpid()) start_team_of_child();
  team_->for_each(count, body);
}

// Leaves the parent's team as it is: its threads cannot be joined, and one of them may have held
// its mutex at the fork. The child loses a few hundred bytes.
void ThreadPool::abandon_team() noexcept { static_cast<void>(team_.release()); }

void ThreadPool::start_team_of_child() {
  std::unique_ptr<Team> team;
  try {
    team = std::make_unique<Team>(threads_);
  } catch (const std::system_error&) {
    team = std::make_unique<Team>(1);
  }
  abandon_team();
  team_ = std::move(team);
  process_ = getpid();
}

}  // namespace gradwire
