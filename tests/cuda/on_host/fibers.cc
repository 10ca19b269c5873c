#include <ucontext.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <vector>

#include "cuda_runtime.h"

namespace gradwire::on_host {
namespace {

constexpr size_t kStackBytes = 64 * 1024;
constexpr unsigned kLanes = 32;

enum class State { kReady, kAtBlockBarrier, kAtWarp, kDone };

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  State state = State::kReady;
  Place place;
};

struct Warp {
  unsigned threads = 0;
  unsigned arrived = 0;
  uint64_t given[kLanes] = {};
  uint64_t taken[kLanes] = {};
};

[[noreturn]] void fail(const char* what) {
  std::fprintf(stderr, "on_host: %s\n", what);
  std::abort();
}

// One block at a time.
class Block {
 public:
  void run(dim3 block, dim3 blocks, dim3 size, const std::function<void()>& body) {
    body_ = &body;
    if (size.x % kLanes != 0) fail("a block is whole warps here");
    fibers_.resize(std::max<size_t>(fibers_.size(), size.x));
    warps_.assign(size.x / kLanes, Warp{});
    threads_ = size.x;
    waiting_ = 0;
    done_ = 0;
    for (unsigned i = 0; i < threads_; ++i) start(i, block, blocks, size);
    std::vector<unsigned> order(threads_);
    for (unsigned i = 0; i < threads_; ++i) order[i] = i;
    while (done_ < threads_) {
      std::shuffle(order.begin(), order.end(), random_);
      bool moved = false;
      // Some warps rest, so that others run ahead as far as barriers let them.
      const uint64_t resting = random_() & random_();
      for (unsigned i : order) {
        if (fibers_[i].state != State::kReady) continue;
        moved = true;
        if ((resting >> (i / kLanes) % 64 & 1) != 0) continue;
        running_ = &fibers_[i];
        swapcontext(&scheduler_, &running_->context);
      }
      if (!moved) fail("the threads of a block wait at different barriers, or some have left");
    }
  }

  void barrier() {
    ++waiting_;
    running_->state = State::kAtBlockBarrier;
    if (waiting_ == threads_) {
      waiting_ = 0;
      for (unsigned i = 0; i < threads_; ++i) fibers_[i].state = State::kReady;
    }
    yield();
  }

  const uint64_t* exchange(uint64_t own) {
    const unsigned thread = running_->place.thread.x;
    Warp& warp = warps_[thread / kLanes];
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

  [[nodiscard]] const Place& place() const { return running_->place; }
  void seed(uint64_t value) { random_.seed(value); }

 private:
  static void enter();

  void start(unsigned i, dim3 block, dim3 blocks, dim3 size) {
    Fiber& fiber = fibers_[i];
    if (!fiber.stack) fiber.stack = std::make_unique<char[]>(kStackBytes);
    fiber.state = State::kReady;
    fiber.place = {dim3(i), block, size, blocks};
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = kStackBytes;
    fiber.context.uc_link = &scheduler_;
    makecontext(&fiber.context, &Block::enter, 0);
  }

  void yield() { swapcontext(&running_->context, &scheduler_); }

  std::vector<Fiber> fibers_;
  std::vector<Warp> warps_;
  ucontext_t scheduler_;
  Fiber* running_ = nullptr;
  const std::function<void()>* body_ = nullptr;
  unsigned threads_ = 0;
  unsigned waiting_ = 0;
  unsigned done_ = 0;
  std::mt19937_64 random_;
};

Block& the_block() {
  static Block block;
  return block;
}

void Block::enter() {
  Block& block = the_block();
  (*block.body_)();
  block.running_->state = State::kDone;
  ++block.done_;
}

}  // namespace

const Place& place() { return the_block().place(); }
void block_barrier() { the_block().barrier(); }
const uint64_t* exchange(uint64_t own) { return the_block().exchange(own); }
void set_seed(uint64_t seed) { the_block().seed(seed); }

void launch(dim3 blocks, dim3 block_size, const std::function<void()>& body) {
  for (unsigned i = 0; i < blocks.x; ++i) the_block().run(dim3(i), blocks, block_size, body);
}

}  // namespace gradwire::on_host
