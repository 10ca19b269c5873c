// Feeds beats to an engine under Verilator and keeps the beats that leave it; a shared library for
// tests/engine.py. -DMODEL=... names Verilator's class of the engine.

#include <cstdint>
#include <cstring>
#include <memory>
#include <random>

#define TEXT_OF(name) #name
#define HEADER_OF(name) TEXT_OF(name.h)
#include HEADER_OF(MODEL)

namespace {

struct Beat {
  uint8_t data[32];
  uint32_t keep;
  uint16_t user;
  uint8_t last;
  uint8_t spare;
  uint64_t cycle;  // in which the beat was taken
};

enum Failure : int64_t { kStuck = -1, kUnstable = -2, kTooMany = -3 };

constexpr uint64_t kPatience = 2000;  // cycles without a beat after which nothing more can come

template <typename Model>
void put(Model& model, const Beat& beat) {
  std::memcpy(&model.s_axis_tdata[0], beat.data, sizeof beat.data);
  model.s_axis_tkeep = beat.keep;
  model.s_axis_tlast = beat.last;
  if constexpr (requires { model.s_axis_tuser; }) model.s_axis_tuser = beat.user;
}

template <typename Model>
Beat get(Model& model, uint64_t cycle) {
  Beat beat = {.data = {},
               .keep = model.m_axis_tkeep,
               .user = model.m_axis_tuser,
               .last = model.m_axis_tlast,
               .spare = 0,
               .cycle = cycle};
  std::memcpy(beat.data, &model.m_axis_tdata[0], sizeof beat.data);
  return beat;
}

bool same(const Beat& a, const Beat& b) {
  return std::memcmp(a.data, b.data, sizeof a.data) == 0 && a.keep == b.keep && a.user == b.user &&
         a.last == b.last;
}

template <typename Model>
void tick(Model& model, bool high) {
  model.clk = high;
  model.eval();
}

template <typename Model>
int64_t run(Beat* in, uint64_t in_count, Beat* out, uint64_t capacity, uint32_t settings,
            uint32_t seed, uint32_t in_stall, uint32_t out_stall) {
  VerilatedContext context;
  context.randReset(2);  // registers without reset begin with random bits
  context.randSeed(static_cast<int>(seed % 1000000 + 1));
  const auto model = std::make_unique<Model>(&context);
  std::minstd_rand draw(seed + 1);
  const auto stalls = [&draw](uint32_t percent) { return draw() / 7 % 100 < percent; };

  if constexpr (requires { model->settings; }) model->settings = settings;
  model->rst = 1;
  model->s_axis_tvalid = 0;
  model->m_axis_tready = 0;
  for (int i = 0; i < 4; ++i) tick(*model, i % 2 != 0);
  model->rst = 0;

  uint64_t sent = 0, received = 0, quiet = 0;
  bool waiting = false;
  Beat offered = {};
  for (uint64_t cycle = 0; sent < in_count || quiet < kPatience / 8; ++cycle, ++quiet) {
    if (quiet > kPatience) return kStuck;
    // A beat that was offered stays until it is taken.
    if (!model->s_axis_tvalid && sent < in_count && !stalls(in_stall)) {
      put(*model, in[sent]);
      model->s_axis_tvalid = 1;
    }
    model->m_axis_tready = !stalls(out_stall);
    tick(*model, false);

    const bool taken = model->s_axis_tvalid && model->s_axis_tready;
    if (waiting && (!model->m_axis_tvalid || !same(offered, get(*model, 0)))) return kUnstable;
    waiting = model->m_axis_tvalid && !model->m_axis_tready;
    if (waiting) offered = get(*model, 0);
    if (model->m_axis_tvalid && model->m_axis_tready) {
      if (received == capacity) return kTooMany;
      out[received++] = get(*model, cycle);
      quiet = 0;
    }
    tick(*model, true);
    if (taken) {
      in[sent++].cycle = cycle;
      model->s_axis_tvalid = 0;
      quiet = 0;
    }
  }
  model->final();
  return static_cast<int64_t>(received);
}

}  // namespace

// Returns the number of beats that came out, or a Failure. Stalls are percent of the cycles.
extern "C" int64_t run_engine(Beat* in, uint64_t in_count, Beat* out, uint64_t capacity,
                              uint32_t settings, uint32_t seed, uint32_t in_stall,
                              uint32_t out_stall) {
  return run<MODEL>(in, in_count, out, capacity, settings, seed, in_stall, out_stall);
}
