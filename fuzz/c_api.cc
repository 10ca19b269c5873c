// Calls the functions of gradwire.h in any order with any arguments that the header allows: good
// ones, wrong numbers, NULL where a status can say so, damaged frames and messages. Nothing may
// crash, every failure must have a message, and an exception must never turn up.

#include <algorithm>
#include <array>
#include <cmath>
#include <memory>
#include <string>
#include <utility>

#include "fuzzing.h"
#include "gradwire/gradwire.h"

namespace {

using namespace gradwire;
using namespace gradwire::fuzzing;

constexpr const char* kCodecs[] = {
    "3lc",
    "3lc:s=1.5,coder=rice",
    "terngrad",
    "qsgd:coder=elias",
    "raw",
    "bf16",
    "int8:bucket=7",
    "onebit",
    "topk:ratio=0.2",
    "stc:density=0.1",
    "inceptionn",
    "3lc:residual=bf16,coder=",
    "nonsense",
    "",
    "stoch3:coder=rice",
};
constexpr const char* kKinds[] = {"sharded",  "ring",    "broadcast",
                                  "terngrad", "no such", "hierarchical:ranks=2,between=ring"};
constexpr const char* kPatterns[] = {"*", "a", "*b*", "[", "\\", ""};
constexpr uint64_t kMostValues = 2000;

template <typename T, void (*free_handle)(T*)>
struct Free {
  void operator()(T* handle) const { free_handle(handle); }
};
template <typename T, void (*free_handle)(T*)>
using Handle = std::unique_ptr<T, Free<T, free_handle>>;

using CodecHandle = Handle<gw_codec, gw_codec_free>;
using ExecutionHandle = Handle<gw_execution, gw_execution_free>;
using CompressorHandle = Handle<gw_compressor, gw_compressor_free>;
using LayoutHandle = Handle<gw_layout, gw_layout_free>;
using ResidualsHandle = Handle<gw_residuals, gw_residuals_free>;

// The bucket must stay where it is while a step is under way.
struct ExchangeHandle {
  Handle<gw_exchange, gw_exchange_free> handle;
  std::vector<float> bucket;
};

// NULL for some choices.
template <typename T, typename H>
T* any(ChoiceReader& choices, const std::array<H, 3>& handles) {
  const uint8_t which = choices.below(4);
  return which == 3 ? nullptr : handles[which].get();
}

class Session {
 public:
  explicit Session(ChoiceReader& choices) : choices_(choices) {}

  void run() {
    for (int i = 0; i < 200 && !choices_.at_end(); ++i) call();
  }

 private:
  void call() {
    switch (choices_.below(20)) {
      case 0:
        return parse_codec();
      case 1:
        return make_execution();
      case 2:
        return make_compressor();
      case 3:
        return make_layout();
      case 4:
        return make_exchange();
      case 5:
      case 6:
        return encode();
      case 7:
        return decode();
      case 8:
        return compress();
      case 9:
        return residual_of_compressor();
      case 10:
        return read_layout();
      case 11:
      case 12:
        return start();
      case 13:
      case 14:
      case 15:
        return take_and_receive();
      case 16:
        return after_step();
      case 17:
        return export_residuals();
      case 18:
        return import_residual();
      default:
        return drop();
    }
  }

  // What every status promises.
  static bool check(gw_status status) {
    require(status != GW_INTERNAL_ERROR, gw_last_error_message());
    require(std::string_view(gw_strerror(status)) != "unknown_status", "a status without a name");
    require(status == GW_OK || gw_last_error_message()[0] != '\0', "a failure without a message");
    return status == GW_OK;
  }

  void parse_codec() {
    const char* text = choices_.of(kCodecs);
    std::string other;
    if (choices_.below(4) == 0) {
      const auto bytes = choices_.bytes(choices_.below(40));
      other.assign(bytes.begin(), bytes.end());
      text = other.c_str();
    }
    gw_codec* made = nullptr;
    if (!check(gw_codec_parse(text, &made))) return require(made == nullptr, "a failed handle");
    slot(codecs_).reset(made);
    require(gw_codec_get_info(made)->name != nullptr, "a codec without a name");
    gw_codec* again = nullptr;
    require(check(gw_codec_parse(gw_codec_text(made), &again)), "a codec's text is refused");
    gw_codec_free(again);
  }

  void make_execution() {
    const char* target = gw_simd_target(choices_.below(8));
    gw_execution* made = nullptr;
    const int threads = static_cast<int>(choices_.below(5)) - 1;
    if (check(gw_execution_create(target, threads, &made))) slot(executions_).reset(made);
  }

  uint64_t count() {
    return choices_.below(16) == 15 ? choices_.number() : choices_.word() % kMostValues;
  }

  void make_compressor() {
    const gw_codec* codec = any<gw_codec>(choices_, codecs_);
    const uint64_t n = count();
    if (n > kMostValues && n <= GW_MAX_NUMEL) return;  // memory for so many is the caller's wish
    gw_compressor* made = nullptr;
    if (check(gw_compressor_create(codec, n, 1, 2, &made))) slot(compressors_).reset(made);
  }

  void make_layout() {
    std::array<uint64_t, 3> dims = {choices_.below(40), choices_.below(40), 1};
    if (choices_.below(32) == 31) dims[2] = choices_.number();
    const gw_tensor tensors[] = {{"a.weight", dims.data(), choices_.below(4)},
                                 {choices_.below(16) == 15 ? nullptr : "b", dims.data(), 1},
                                 {"c", nullptr, 0}};
    gw_rule rule = {choices_.of(kPatterns), choices_.of(kCodecs),
                    static_cast<gw_direction>(choices_.below(4))};
    const char* exclude[] = {choices_.of(kPatterns)};
    gw_layout_options options;
    gw_layout_options_init(&options);
    options.codec = choices_.of(kCodecs);
    if (choices_.yes()) options.pull_codec = choices_.of(kCodecs);
    options.rules = &rule;
    options.rule_count = choices_.below(2);
    options.exclude = exclude;
    options.exclude_count = choices_.below(2);
    options.min_numel = choices_.word();
    gw_layout* made = nullptr;
    if (!check(gw_layout_create(tensors, choices_.below(4), choices_.below(5), &options, &made))) {
      return require(made == nullptr, "a failed handle");
    }
    if (gw_layout_numel(made) > 100 * kMostValues) return gw_layout_free(made);
    slot(layouts_).reset(made);
  }

  void read_layout() {
    const gw_layout* layout = any<gw_layout>(choices_, layouts_);
    if (layout == nullptr) return;
    gw_segment segment;
    uint64_t values = 0;
    for (size_t i = 0; i < gw_layout_segment_count(layout); ++i) {
      require(check(gw_layout_segment(layout, i, &segment)), "a segment is missing");
      values += segment.n;
    }
    require(values == gw_layout_numel(layout), "segments do not fill the bucket");
    require(!check(gw_layout_segment(layout, gw_layout_segment_count(layout), &segment)),
            "a segment beyond the last");
    for (size_t i = 0; gw_layout_unmatched(layout, i) != nullptr; ++i) require(i < 2, "unmatched");
  }

  void make_exchange() {
    const gw_layout* layout = any<gw_layout>(choices_, layouts_);
    gw_exchange_options options;
    gw_exchange_options_init(&options);
    options.kind = choices_.of(kKinds);
    if (choices_.below(4) == 0) {
      options.update = [](float* bucket, uint64_t n, void* data) {
        for (uint64_t i = 0; i < n; ++i) bucket[i] *= 0.5f;
        return *static_cast<gw_status*>(data);
      };
      options.update_data = &update_status_;
    }
    gw_exchange* made = nullptr;
    if (!check(gw_exchange_create(layout, choices_.below(5), &options, &made))) return;
    exchanges_[choices_.below(3)] = {Handle<gw_exchange, gw_exchange_free>(made),
                                     std::vector<float>(gw_layout_numel(layout))};
  }

  // Values of any bits from the input, repeated.
  std::vector<float> values(uint64_t n) {
    const auto bytes = choices_.bytes(choices_.below(64));
    std::vector<float> made(n);
    for (uint64_t i = 0; i < n; ++i) {
      made[i] = bytes.empty() ? static_cast<float>(i) * 0.01f
                              : static_cast<int8_t>(bytes[i % bytes.size()]);
    }
    if (n > 0 && bytes.size() >= 4) std::memcpy(&made[n / 2], bytes.data(), sizeof(float));
    return made;
  }

  void encode() {
    const gw_codec* codec = any<gw_codec>(choices_, codecs_);
    const uint64_t n = choices_.word() % kMostValues;
    const std::vector<float> x = values(n);
    const auto dtype = static_cast<gw_dtype>(choices_.below(4));
    uint64_t capacity = 0;
    if (codec != nullptr) require(check(gw_max_encoded_size(codec, n, &capacity)), "no size");
    if (choices_.below(8) == 0) capacity = choices_.word() % (capacity + 1);
    const auto frame = std::make_unique<std::byte[]>(capacity);
    uint64_t size = UINT64_MAX;
    const gw_status status = gw_encode(codec, x.data(), n, dtype, nullptr, frame.get(), capacity,
                                       &size, any<gw_execution>(choices_, executions_));
    if (!check(status) && status != GW_NON_FINITE) return;
    require(size <= capacity, "a frame is larger than its room");
    frames_[choices_.below(3)].assign(frame.get(), frame.get() + size);
    numel_ = n;
  }

  void decode() {
    std::vector<std::byte> frame = frames_[choices_.below(3)];
    for (int i = choices_.below(3); i > 0 && !frame.empty(); --i) {
      frame[choices_.word() % frame.size()] ^= static_cast<std::byte>(1 + choices_.below(200));
    }
    if (choices_.yes()) repair_frame(frame);
    frame.shrink_to_fit();
    gw_frame_info info;
    gw_codec* codec = nullptr;
    const gw_status seen = gw_frame_inspect(frame.data(), frame.size(), &info, &codec);
    if (check(seen)) gw_codec_free(codec);
    const uint64_t n = choices_.yes() ? numel_ : choices_.word() % kMostValues;
    std::vector<float> out(n);
    const gw_status status = gw_decode(frame.data(), frame.size(), out.data(), n,
                                       static_cast<gw_decode_mode>(choices_.below(3)),
                                       any<gw_execution>(choices_, executions_));
    require(seen == GW_OK || !check(status), "a frame that can't be inspected is decoded");
    check(status);
  }

  void compress() {
    gw_compressor* compressor = any<gw_compressor>(choices_, compressors_);
    if (compressor == nullptr) return;
    const uint64_t n = choices_.yes() && gw_compressor_residual_numel(compressor) > 0
                           ? gw_compressor_residual_numel(compressor)
                           : choices_.word() % kMostValues;
    const std::vector<float> x = values(n);
    uint64_t capacity = gw_compressor_max_encoded_size(compressor);
    if (choices_.below(8) == 0) capacity = choices_.word() % (capacity + 1);
    const auto frame = std::make_unique<std::byte[]>(capacity);
    uint64_t size = UINT64_MAX;
    const gw_status status =
        gw_compressor_encode(compressor, x.data(), n, GW_F32, choices_.word(), frame.get(),
                             capacity, &size, any<gw_execution>(choices_, executions_));
    if (!check(status) && status != GW_NON_FINITE) return;
    require(size <= capacity, "a frame is larger than its room");
    frames_[choices_.below(3)].assign(frame.get(), frame.get() + size);
    numel_ = n;
  }

  void residual_of_compressor() {
    gw_compressor* compressor = any<gw_compressor>(choices_, compressors_);
    if (compressor == nullptr) return;
    const uint64_t kept = gw_compressor_residual_numel(compressor);
    const uint64_t n = choices_.below(4) == 0 ? choices_.word() % kMostValues : kept;
    std::vector<float> given = values(n);
    require(check(gw_compressor_set_residual(compressor, given.data(), n)) <= (n == kept),
            "a residual of another length is taken");
    if (!check(gw_compressor_get_residual(compressor, given.data(), n))) return;
    require(std::ranges::all_of(given, [](float r) { return std::isfinite(r); }),
            "a residual is not finite");
  }

  void start() {
    ExchangeHandle& exchange = exchanges_[choices_.below(3)];
    if (!exchange.handle) return;
    if (choices_.below(8) == 0) {
      std::vector<float> other(choices_.below(200));
      if (other.size() == exchange.bucket.size()) return;
      require(!check(gw_exchange_start(exchange.handle.get(), other.data(), other.size(), 0)),
              "a bucket of another length is taken");
      return;
    }
    if (gw_exchange_done(exchange.handle.get()) == 1) {
      std::ranges::copy(values(exchange.bucket.size()), exchange.bucket.begin());
    }
    check(gw_exchange_start(exchange.handle.get(), exchange.bucket.data(), exchange.bucket.size(),
                            choices_.below(4)));
  }

  void take_and_receive() {
    gw_exchange* source = exchanges_[choices_.below(3)].handle.get();
    gw_exchange* target = exchanges_[choices_.below(3)].handle.get();
    if (source == nullptr || target == nullptr) return;
    std::array<uint32_t, 8> peers;
    size_t awaited = 0;
    check(gw_exchange_awaiting(target, peers.data(), choices_.below(9), &awaited));
    std::array<gw_message, 2> messages;
    size_t taken = 0;
    require(check(gw_exchange_take_outgoing(source, messages.data(), choices_.below(3), &taken)),
            "messages can't be taken");
    for (size_t i = 0; i < taken; ++i) {
      const auto* bytes = static_cast<const std::byte*>(messages[i].bytes);
      messages_[choices_.below(3)].assign(bytes, bytes + messages[i].size);
    }
    std::vector<std::byte> message = messages_[choices_.below(3)];
    if (choices_.below(3) == 0 && !message.empty()) {
      message[choices_.word() % message.size()] ^= std::byte{4};
      if (choices_.yes()) repair_packet(message);
    }
    message.shrink_to_fit();
    check(gw_exchange_receive(target, choices_.below(6), message.data(), message.size()));
  }

  void after_step() {
    gw_exchange* exchange = exchanges_[choices_.below(3)].handle.get();
    gw_exchange* other = exchanges_[choices_.below(3)].handle.get();
    if (exchange == nullptr || other == nullptr) return;
    check(gw_exchange_check_peer(exchange, choices_.below(5), gw_exchange_description(other)));
    if (choices_.yes()) check(gw_exchange_retract(exchange));
    if (choices_.yes()) {
      check(gw_exchange_scale_residuals(exchange, choices_.yes() ? 0.5f : INFINITY));
    }
    gw_non_finite where;
    if (gw_exchange_non_finite(exchange, &where) == 1) {
      require(where.tensor != nullptr, "a non-finite value without a tensor");
    }
    gw_exchange_stats stats;
    require(check(gw_exchange_get_stats(exchange, &stats)), "no counters");
  }

  void export_residuals() {
    gw_exchange* exchange = exchanges_[choices_.below(3)].handle.get();
    gw_residuals* made = nullptr;
    if (check(gw_exchange_export_residuals(exchange, &made))) residuals_.reset(made);
  }

  void import_residual() {
    gw_exchange* exchange = exchanges_[choices_.below(3)].handle.get();
    if (residuals_ == nullptr) return;
    gw_residual_piece piece;
    if (!check(gw_residuals_at(residuals_.get(), choices_.below(8), &piece))) return;
    if (choices_.below(4) == 0) piece.offset = choices_.number();
    if (choices_.below(4) == 0) piece.direction = choices_.below(4);
    check(gw_exchange_import_residual(exchange, &piece));
  }

  void drop() {
    const uint8_t which = choices_.below(3);
    switch (choices_.below(5)) {
      case 0:
        return codecs_[which].reset();
      case 1:
        return executions_[which].reset();
      case 2:
        return compressors_[which].reset();
      case 3:
        return layouts_[which].reset();
      default:
        exchanges_[which] = {};
    }
  }

  template <typename H>
  H& slot(std::array<H, 3>& handles) {
    return handles[choices_.below(3)];
  }

  ChoiceReader& choices_;
  gw_status update_status_ = GW_OK;
  std::array<CodecHandle, 3> codecs_;
  std::array<ExecutionHandle, 3> executions_;
  std::array<CompressorHandle, 3> compressors_;
  std::array<LayoutHandle, 3> layouts_;
  std::array<ExchangeHandle, 3> exchanges_;
  ResidualsHandle residuals_;
  std::array<std::vector<std::byte>, 3> frames_;
  std::array<std::vector<std::byte>, 3> messages_;
  uint64_t numel_ = 0;  // of the frame that was made last
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  ChoiceReader choices({data, size});
  Session(choices).run();
  return 0;
}
