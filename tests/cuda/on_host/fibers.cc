#include <link.h>
#include <ucontext.h>

#include <algorithm>
#include <condition_variable>
#include <csetjmp>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "cuda_runtime.h"

namespace gradwire::on_host {
namespace {

constexpr size_t kStackBytes = 64 * 1024;
constexpr unsigned kLanes = 32;
#ifdef GRADWIRE_ADDRESS_SANITIZER
constexpr unsigned kBlocksAtOnce = 1;
#else
constexpr unsigned kBlocksAtOnce = 3;
#endif
// The limit, for each running block, of consecutive rounds in which all threads wait for other
// blocks.
constexpr uint64_t kMostIdleRounds = 2000;

enum class State { kReady, kWaiting, kAtBlockBarrier, kAtWarp, kDone };

// The place where interrupted code continues.
struct Continuation {
  ucontext_t context;
  jmp_buf place;
  bool begun = true;  // false: at the front of `context`
};

// Continues at `to`. Returns when other code continues at `from`.
void go(Continuation& from, Continuation& to) {
#ifdef GRADWIRE_ADDRESS_SANITIZER
  swapcontext(&from.context, &to.context);
#else
  // Does what swapcontext does, without its system calls.
  if (_setjmp(from.place) != 0) return;
  if (to.begun) _longjmp(to.place, 1);
  to.begun = true;
  setcontext(&to.context);
#endif
}

struct Fiber {
  Continuation code;
  std::unique_ptr<char[]> stack;
  State state = State::kReady;
  Place place;
};

struct Warp {
  unsigned threads = 0;
  unsigned arrived = 0;
  Site site;
  uint64_t given[kLanes] = {};
  uint64_t taken[kLanes] = {};
};

[[noreturn]] void fail(const char* what) {
  std::fprintf(stderr, "on_host: %s\n", what);
  std::abort();
}

bool same(const Site& a, const Site& b) { return a.line == b.line; }

struct Launch {
  dim3 blocks;
  dim3 size;
  const std::function<void()>* body = nullptr;
  std::vector<unsigned> order;  // the order in which the blocks begin
  size_t begun = 0;
  uint64_t idle_rounds = 0;
};

// The running blocks. Each has a system thread, but only one of these runs at a time, so that a
// seed determines the order of all events.
class Resident {
 public:
  Resident() {
    for (unsigned i = 0; i < kBlocksAtOnce; ++i) threads_.emplace_back([this, i] { live(i); });
  }
  ~Resident() {
    leaving_ = true;
    for (unsigned i = 0; i < kBlocksAtOnce; ++i) {
      give_turn(i);
      threads_[i].join();
    }
  }
  Resident(const Resident&) = delete;
  Resident& operator=(const Resident&) = delete;

  void run(Launch launch) {
    launch_ = std::move(launch);
    // With fewer blocks, it is more likely that one waits for a block that has not begun.
    const size_t count = std::min<size_t>(1 + random() % kBlocksAtOnce, launch_.order.size());
    active_.resize(count);
    std::iota(active_.begin(), active_.end(), 0u);
    give_turn(0);
    await_turn(kNobody);
  }

  // Other blocks may continue until this returns.
  void switch_from(unsigned own) {
    const unsigned next = active_[random() % active_.size()];
    if (next == own) return;
    give_turn(next);
    await_turn(own);
  }

  uint64_t random() { return random_(); }
  std::mt19937_64& generator() { return random_; }
  Launch& launch() { return launch_; }
  [[nodiscard]] size_t active() const { return active_.size(); }

 private:
  static constexpr unsigned kNobody = kBlocksAtOnce;

  void live(unsigned own);

  void give_turn(unsigned to) {
    const std::lock_guard<std::mutex> lock(mutex_);
    turn_ = to;
    changed_[to].notify_one();
  }
  void await_turn(unsigned own) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_[own].wait(lock, [&] { return turn_ == own; });
  }

  std::mutex mutex_;
  std::condition_variable changed_[kBlocksAtOnce + 1];
  unsigned turn_ = kNobody;
  bool leaving_ = false;
  Launch launch_;
  std::vector<unsigned> active_;
  std::mt19937_64 random_;
  std::vector<std::thread> threads_;
};

Resident& resident() {
  static Resident all;
  return all;
}

uint64_t all_waits = 0;

class Block {
 public:
  explicit Block(unsigned number) : number_(number) {}

  void run(unsigned block, const Launch& launch) {
    threads_ = launch.size.x;
    if (threads_ % kLanes != 0) fail("a block is whole warps here");
    fibers_.resize(std::max<size_t>(fibers_.size(), threads_));
    warps_.assign(threads_ / kLanes, Warp{});
    at_barrier_ = 0;
    done_ = 0;
    for (unsigned i = 0; i < threads_; ++i) start(i, block, launch);
    std::vector<unsigned> order(threads_);
    std::iota(order.begin(), order.end(), 0u);
    while (done_ < threads_) {
      std::shuffle(order.begin(), order.end(), resident().generator());
      run_some(order);
      if (resident().random() % 16 == 0) switch_block();
    }
  }

  void barrier(const Site& site) {
    if (at_barrier_++ == 0) site_ = site;
    if (!same(site_, site)) fail("the threads of a block are at different barriers");
    running_->state = State::kAtBlockBarrier;
    if (at_barrier_ == threads_) {
      at_barrier_ = 0;
      for (unsigned i = 0; i < threads_; ++i) fibers_[i].state = State::kReady;
    }
    yield();
  }

  const uint64_t* exchange(uint64_t own, unsigned mask, const Site& site) {
    if (mask != ~0u) fail("all lanes of a warp take part here");
    const unsigned thread = running_->place.thread.x;
    Warp& warp = warps_[thread / kLanes];
    if (warp.arrived == 0) warp.site = site;
    if (!same(warp.site, site)) fail("the lanes of a warp are at different warp operations");
    warp.given[thread % kLanes] = own;
    running_->state = State::kAtWarp;
    if (++warp.arrived == kLanes) {
      warp.arrived = 0;
      std::copy_n(warp.given, kLanes, warp.taken);
      for (unsigned lane = 0; lane < kLanes; ++lane) {
        fibers_[thread / kLanes * kLanes + lane].state = State::kReady;
      }
    }
    yield();
    return warp.taken;
  }

  void wait() {
    ++all_waits;
    running_->state = State::kWaiting;
    yield();
  }

  void switch_block() { resident().switch_from(number_); }
  [[nodiscard]] const Place& place() const { return running_->place; }

 private:
  static void enter();

  void start(unsigned i, unsigned block, const Launch& launch) {
    Fiber& fiber = fibers_[i];
    if (!fiber.stack) fiber.stack = std::make_unique<char[]>(kStackBytes);
    fiber.state = State::kReady;
    fiber.code.begun = false;
    fiber.place = {dim3(i), dim3(block), launch.size, launch.blocks};
    getcontext(&fiber.code.context);
    fiber.code.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.code.context.uc_stack.ss_size = kStackBytes;
    fiber.code.context.uc_link = nullptr;
    makecontext(&fiber.code.context, &Block::enter, 0);
  }

  // Runs all threads that can run until each waits. Some warps rest, so that others run ahead as
  // far as the barriers allow.
  void run_some(const std::vector<unsigned>& order) {
    const uint64_t resting = resident().random() & resident().random();
    bool stuck = true;
    bool rested = false;
    bool moved = false;
    for (unsigned i : order) {
      Fiber& fiber = fibers_[i];
      if (fiber.state != State::kReady && fiber.state != State::kWaiting) continue;
      stuck = false;
      if ((resting >> (i / kLanes) % 64 & 1) != 0) {
        rested = true;
        continue;
      }
      fiber.state = State::kReady;
      resume(fiber);
      moved = moved || fiber.state != State::kWaiting;
    }
    if (stuck) fail("some threads wait at a barrier, and others have left or are at another");
    if (moved) resident().launch().idle_rounds = 0;
    if (moved || rested) return;
    if (++resident().launch().idle_rounds > kMostIdleRounds * resident().active()) {
      fail("all blocks under way wait for one that has not begun");
    }
    switch_block();
  }

  void resume(Fiber& fiber) {
    running_ = &fiber;
    go(scheduler_, fiber.code);
  }
  void yield() { go(running_->code, scheduler_); }

  unsigned number_;  // the number of its system thread
  std::vector<Fiber> fibers_;
  std::vector<Warp> warps_;
  Continuation scheduler_;
  Fiber* running_ = nullptr;
  unsigned threads_ = 0;
  unsigned at_barrier_ = 0;
  Site site_;  // the site of the barrier
  unsigned done_ = 0;
};

thread_local Block* own_block = nullptr;

void Block::enter() {
  (*resident().launch().body)();
  own_block->running_->state = State::kDone;
  ++own_block->done_;
  own_block->yield();
}

#ifdef GRADWIRE_ADDRESS_SANITIZER
void spoil_shared_memory() {}
#else
// Fills the program's thread-local memory, in this thread.
void spoil_shared_memory() {
  Block* const block = own_block;
  dl_iterate_phdr(
      [](dl_phdr_info* program, size_t, void*) {
        for (unsigned i = 0; i < program->dlpi_phnum; ++i) {
          if (program->dlpi_phdr[i].p_type != PT_TLS) continue;
          std::memset(program->dlpi_tls_data, 0xa5, program->dlpi_phdr[i].p_memsz);
        }
        return 1;  // the first object is the program
      },
      nullptr);
  own_block = block;
}
#endif

void Resident::live(unsigned own) {
  Block block(own);
  own_block = &block;
  for (await_turn(own); !leaving_; await_turn(own)) {
    while (launch_.begun < launch_.order.size()) {
      spoil_shared_memory();
      block.run(launch_.order[launch_.begun++], launch_);
    }
    std::erase(active_, own);
    give_turn(active_.empty() ? kNobody : active_[random() % active_.size()]);
  }
}

}  // namespace

const Place& place() { return own_block->place(); }
void block_barrier(const Site& site) { own_block->barrier(site); }
const uint64_t* exchange(uint64_t own, unsigned mask, const Site& site) {
  return own_block->exchange(own, mask, site);
}
void may_switch() {
  if (resident().random() % 64 == 0) own_block->switch_block();
}
void wait() { own_block->wait(); }
uint64_t waits() { return all_waits; }
void set_seed(uint64_t seed) { resident().generator().seed(seed); }

void launch(dim3 blocks, dim3 block_size, const std::function<void()>& body) {
  if (blocks.x == 0) fail("a grid without blocks");
  std::vector<unsigned> order(blocks.x);
  std::iota(order.begin(), order.end(), 0u);
  std::shuffle(order.begin(), order.end(), resident().generator());
  resident().run({.blocks = blocks, .size = block_size, .body = &body, .order = std::move(order)});
}

}  // namespace gradwire::on_host
