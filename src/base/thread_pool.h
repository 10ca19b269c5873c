#pragma once

#include <cstddef>
#include <functional>
#include <memory>

#include <sys/types.h>

namespace gradwire {

// Fork and join over a fixed set of threads. Threads take indices one by one from a shared counter,
// so uneven pieces (sparse and dense chunks) are balanced.
//
// After fork(2) the child has none of its parent's threads. The first for_each() there starts
// threads of the child's own; if the system refuses, the caller's thread does all of the work.
class ThreadPool {
 public:
  // `threads` counts the caller, so threads - 1 are started. Throws std::system_error if the system
  // refuses to start one.
  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  [[nodiscard]] int threads() const noexcept { return threads_; }

  // Calls body(i) for every i in [0, count); the caller works too. Only one thread may call it at a
  // time. What `body` throws first is thrown here when all threads have ended; further indices are
  // left out then.
  void for_each(size_t count, const std::function<void(size_t)>& body);

 private:
  class Team;

  void abandon_team() noexcept;
  void start_team_of_child();

  int threads_;
  pid_t process_;  // the process that the team's threads run in
  std::unique_ptr<Team> team_;
};

}  // namespace gradwire
