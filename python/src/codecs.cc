// encode, decode, inspect, Compressor.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>

#include "arrays.h"
#include "base/checksum.h"
#include "base/return_if_error.h"
#include "codecs/inceptionn/inceptionn.h"
#include "errors.h"
#include "executions.h"
#include "frame/packet.h"
#include "gil.h"
#include "gradwire/compressor.h"
#include "gradwire/frame.h"
#include "module.h"

namespace gradwire::python {
namespace {

namespace nb = nanobind;

double bits_per_value(uint64_t bytes, uint64_t n) {
  return n == 0 ? 0.0 : 8.0 * static_cast<double>(bytes) / static_cast<double>(n);
}

// Makes a bytes object of at most `room` bytes; fill(span) fills it and returns the size that it
// used. The stable ABI cannot shrink a bytes object, so that fewer bytes are copied; a codec whose
// frames have one size fills all of the room.
template <typename Fill>
nb::bytes make_bytes(uint64_t room, const Fill& fill) {
  PyObject* bytes = PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(room));
  if (bytes == nullptr) throw nb::python_error();
  nb::bytes all = nb::steal<nb::bytes>(bytes);
  char* data = PyBytes_AsString(bytes);
  const uint64_t size =
      fill(std::span(reinterpret_cast<std::byte*>(data), static_cast<size_t>(room)));
  return size == room ? all : nb::bytes(data, static_cast<size_t>(size));
}

constexpr const char* kDtypeNames[] = {"float32", "bfloat16", "float16"};

const char* dtype_text(Dtype dtype) { return kDtypeNames[static_cast<size_t>(dtype)]; }

Dtype parse_dtype(const std::string& text) {
  const auto name = std::ranges::find(kDtypeNames, text);
  if (name != std::end(kDtypeNames)) return static_cast<Dtype>(name - kDtypeNames);
  raise(StatusCode::kUnsupportedDtype,
        "dtype '" + text + "'; valid ones are: float32, bfloat16, float16");
}

// The dtype whose bits a uint16 array holds, if the caller gives a dtype.
std::optional<Dtype> parse_bits(const std::optional<std::string>& text) {
  if (!text) return std::nullopt;
  const Dtype dtype = parse_dtype(*text);
  return dtype == Dtype::kFloat32 ? std::nullopt : std::optional(dtype);
}

uint64_t max_encoded_size(const Codec& codec, uint64_t numel) {
  if (numel > kMaxNumel) {
    raise(StatusCode::kLimitExceeded, "more values than the limit of 2^40");
  }
  return max_frame_size(codec, numel);
}

// Runs encode() without the GIL and returns the size of the frame. Warns if the frame is a marker.
template <typename Encode>
uint64_t run_encoder(const Encode& encode) {
  const EncodedFrame encoded = value_or_raise(without_gil(encode));
  if (!encoded.non_finite.ok()) warn_non_finite(encoded.non_finite);
  return encoded.size;
}

nb::bytes encode(ArrayLike x, const std::string& text, uint64_t seed, uint64_t step,
                 uint64_t stream, int threads, const std::string& target,
                 const std::optional<std::string>& dtype) {
  const ValueInput input(x, parse_bits(dtype));
  const auto codec = value_or_raise(Codec::parse(text));
  Execution& execution = execution_for(target, threads);
  const DrawContext draw = {.seed = seed, .stream = stream, .step = step};
  const uint64_t most = max_encoded_size(*codec, input.values().size());
  return make_bytes(most, [&](std::span<std::byte> room) {
    return run_encoder(
        [&] { return encode_frame(*codec, input.values(), {}, draw, room, execution); });
  });
}

nb::object decode(ArrayLike data, int threads, const std::string& target, uint64_t max_numel,
                  const std::string& dtype_name) {
  const ByteInput input(data);
  const Dtype dtype = parse_dtype(dtype_name);
  Execution& execution = execution_for(target, threads);
  const Frame frame = value_or_raise(parse_frame(input.bytes()));
  if (frame.n > max_numel) {
    raise(StatusCode::kLimitExceeded, "the frame holds " + std::to_string(frame.n) +
                                          " values, max_numel is " + std::to_string(max_numel));
  }
  if (dtype == Dtype::kFloat32) {
    const auto out = new_array<float>(frame.n);
    raise_if_error(without_gil([&] {
      return decode_frame(frame, {out.data(), frame.n}, DecodeMode::kStore, execution);
    }));
    return nb::cast(out);
  }
  const auto out = new_array<uint16_t>(frame.n);
  raise_if_error(without_gil([&] {
    return decode_frame(frame, dtype, {out.data(), frame.n}, execution);
  }));
  // NumPy has float16 but not bfloat16.
  const nb::object halves = nb::cast(out);
  return dtype == Dtype::kFloat16 ? halves.attr("view")("float16") : halves;
}

void decode_into(ArrayLike data, ArrayLike out, bool accumulate, int threads,
                 const std::string& target) {
  const ByteInput input(data);
  const FloatOutput output(out);
  require_apart(input.bytes(), std::as_bytes(output.values()));
  Execution& execution = execution_for(target, threads);
  const DecodeMode mode = accumulate ? DecodeMode::kAdd : DecodeMode::kStore;
  raise_if_error(without_gil([&]() -> Status {
    GW_ASSIGN_OR_RETURN(const Frame frame, parse_frame(input.bytes()));
    return decode_frame(frame, output.values(), mode, execution);
  }));
  note_write(out);
}

// Where a codec has classes of values: the share that takes 0, 8, 16 and 32 bits.
void add_class_shares(nb::dict& entry, const Codec& codec, uint64_t n,
                      std::span<const std::byte> payload) {
  const auto counts = value_or_raise(count_classes(codec, n, payload));
  if (!counts) return;
  nb::dict shares;
  const char* const classes[] = {"0", "8", "16", "32"};
  for (size_t i = 0; i < counts->size(); ++i) {
    shares[classes[i]] = static_cast<double>((*counts)[i]) / static_cast<double>(n);
  }
  entry["class_shares"] = shares;
}

nb::dict describe_frame(const Frame& frame, size_t frame_bytes) {
  nb::dict result;
  result["kind"] = "frame";
  result["version"] = 1;
  result["codec"] = frame.codec->wire_text();
  result["dtype"] = dtype_text(frame.dtype);
  result["numel"] = frame.n;
  result["payload_bytes"] = frame.payload.size();
  result["frame_bytes"] = frame_bytes;
  result["bits_per_value"] = bits_per_value(frame_bytes, frame.n);
  result["non_finite"] = frame.content == FrameContent::kNonFinite;
  result["checksum"] = frame.checksum;
  return result;
}

// Checks 1 to 11 of spec/format.md, whatever the codec: inspect also reads tags.
Dict frame_header(ArrayLike data) {
  const ByteInput input(data);
  return describe_frame(value_or_raise(parse_frame(input.bytes())), input.bytes().size());
}

nb::dict inspect_frame(std::span<const std::byte> bytes) {
  const Frame frame = value_or_raise(parse_frame(bytes));
  nb::dict result = describe_frame(frame, bytes.size());
  add_class_shares(result, *frame.codec, frame.n, frame.payload);
  return result;
}

nb::dict inspect_packet(std::span<const std::byte> bytes) {
  const Packet packet = value_or_raise(parse_packet(bytes));
  const auto describe = [](nb::dict& entry, const PacketFrame& frame) {
    const auto codec = value_or_raise(Codec::from_wire(frame.codec));
    entry["codec"] = codec->wire_text();
    entry["dtype"] = dtype_text(Dtype::kFloat32);
    entry["numel"] = frame.n;
    entry["payload_bytes"] = frame.payload.size();
    entry["bits_per_value"] = bits_per_value(frame.payload.size(), frame.n);
    add_class_shares(entry, *codec, frame.n, frame.payload);
  };
  nb::dict result;
  result["kind"] = "packet";
  result["version"] = 1;
  result["direction"] = direction_name(packet.header.direction);
  result["source"] = packet.header.source;
  result["step"] = packet.header.step;
  result["layout_digest"] = packet.header.layout_digest;
  result["non_finite"] = packet.non_finite.has_value();
  result["packet_bytes"] = bytes.size();
  result["checksum"] = packet.checksum;
  result["frames"] = dicts_of(packet.frames, describe);
  return result;
}

Dict inspect(ArrayLike data) {
  const ByteInput input(data);
  const std::span<const std::byte> bytes = input.bytes();
  const bool packet = bytes.size() >= 2 && bytes[0] == std::byte{'G'} && bytes[1] == std::byte{'P'};
  return packet ? inspect_packet(bytes) : inspect_frame(bytes);
}

DictList list_codecs() {
  return dicts_of(codecs(), [](nb::dict& entry, const CodecInfo* info) {
    entry["name"] = info->name;
    entry["summary"] = info->summary;
    entry["source"] = info->source;
    entry["error_feedback"] = info->error_feedback;
    entry["lossless"] = info->lossless;
    entry["draws"] = info->draws;
    entry["shares_scales"] = info->shares_scales;
    entry["carries_non_finite"] = info->carries_non_finite;
    entry["parameters"] = parameter_dicts({info->parameters, common_parameters(*info)});
  });
}

DictList list_codec_names() {
  return dicts_of(codec_names(), [](nb::dict& entry, const CodecName& known) {
    entry["name"] = known.name;
    entry["codec"] = known.codec;
    entry["summary"] = known.summary;
  });
}

// A Compressor with its threads and target.
class PyCompressor {
 public:
  PyCompressor(const std::string& codec, uint64_t numel, uint64_t seed, uint64_t stream,
               int threads, const std::string& target)
      : compressor_(value_or_raise(
            Compressor::create(value_or_raise(Codec::parse(codec)), numel, seed, stream))),
        execution_(value_or_raise(Execution::create(target, threads))),
        seed_(seed),
        stream_(stream),
        target_(target) {}

  nb::bytes encode(ArrayLike x, std::optional<uint64_t> step) {
    const ValueInput input(x);
    return make_bytes(compressor_.max_encoded_size(), [&](std::span<std::byte> room) {
      return encode_to(input.values(), step, room);
    });
  }

  uint64_t encode_into(ArrayLike x, ArrayLike out, std::optional<uint64_t> step) {
    const ValueInput input(x);
    const ByteOutput output(out);
    require_apart(input.bytes(), std::as_bytes(output.values()));
    return encode_to(input.values(), step, std::as_writable_bytes(output.values()));
  }

  [[nodiscard]] std::string codec() const { return compressor_.codec().text(); }
  [[nodiscard]] uint64_t numel() const { return compressor_.n(); }
  [[nodiscard]] uint64_t max_encoded_size() const { return compressor_.max_encoded_size(); }

  [[nodiscard]] std::optional<NumpyArray<float>> residual() const {
    if (!keeps_residual()) return std::nullopt;
    return to_numpy(take_memory().residual);
  }

  [[nodiscard]] Dict state_dict() const {
    const Memory memory = take_memory();
    nb::dict state;
    state["codec"] = codec();
    state["numel"] = numel();
    // As bytes, which every way to save a dictionary takes (torch.load(weights_only=True) refuses
    // NumPy's arrays).
    state["residual"] = keeps_residual() ? std::optional(bytes_of(memory.residual)) : std::nullopt;
    state["next_step"] = memory.next_step;
    return state;
  }

  // For pickle and copy: state_dict() and the other arguments of the constructor.
  [[nodiscard]] Dict all_state() const {
    Dict state = state_dict();
    state["seed"] = seed_;
    state["stream"] = stream_;
    state["threads"] = execution_.threads();
    state["target"] = target_;
    return state;
  }

  // Constructs `self` from what all_state() returned.
  static void construct(PyCompressor& self, const Dict& state) {
    new (&self) PyCompressor(entry_of<std::string>(state, "codec", "a text"),
                             entry_of<uint64_t>(state, "numel", "a number of values"),
                             entry_of<uint64_t>(state, "seed", "a number"),
                             entry_of<uint64_t>(state, "stream", "a number"),
                             entry_of<int>(state, "threads", "a number of threads"),
                             entry_of<std::string>(state, "target", "a text"));
    try {
      self.load_state_dict(state);
    } catch (...) {
      self.~PyCompressor();
      throw;
    }
  }

  void load_state_dict(const Dict& state) {
    const auto theirs = entry_of<std::string>(state, "codec", "a text");
    const auto n = entry_of<uint64_t>(state, "numel", "a number of values");
    if (theirs != codec() || n != numel()) {
      raise(StatusCode::kInvalidArgument, "the state is of '" + theirs + "' with " +
                                              std::to_string(n) + " values, this compressor is '" +
                                              codec() + "' with " + std::to_string(numel()));
    }
    const auto residual = entry_of<nb::object>(state, "residual", "bytes, an array or None");
    const bool keeps = keeps_residual();
    if (keeps == residual.is_none()) {
      raise(StatusCode::kInvalidArgument,
            keeps ? "the state's residual is None, but '" + codec() + "' keeps a residual of " +
                        std::to_string(numel()) + " values"
                  : "the state has a residual, but '" + codec() + "' keeps none");
    }
    // It may be missing: states had none at first.
    const uint64_t next_step =
        state.contains("next_step") ? entry_of<uint64_t>(state, "next_step", "a number") : 0;
    const std::vector<float> values = keeps ? read_residual(residual) : std::vector<float>();
    const std::lock_guard lock(mutex_);
    compressor_.residual().assign(values);
    next_step_ = next_step;
  }

 private:
  // What the next call starts from.
  struct Memory {
    std::vector<float> residual;
    uint64_t next_step;
  };

  [[nodiscard]] bool keeps_residual() const {
    return compressor_.residual().type() != ResidualType::kNone;
  }

  // Of one moment: another thread may encode meanwhile.
  [[nodiscard]] Memory take_memory() const {
    return without_gil([&] {
      const std::lock_guard lock(mutex_);
      return Memory{compressor_.residual().values(), next_step_};
    });
  }

  [[nodiscard]] std::vector<float> read_residual(const nb::object& residual) const {
    std::vector<float> values = values_of(residual);
    if (values.size() != compressor_.residual().size()) {
      raise(StatusCode::kLengthMismatch, "the state's residual has " +
                                             std::to_string(values.size()) + " values, expected " +
                                             std::to_string(compressor_.residual().size()));
    }
    if (!std::ranges::all_of(values, [](float value) { return std::isfinite(value); })) {
      raise(StatusCode::kNonFinite, "the state's residual holds NaN or Inf");
    }
    return values;
  }

  static nb::bytes bytes_of(const std::vector<float>& values) {
    return nb::bytes(values.data(), values.size() * sizeof(float));
  }

  template <typename T>
  static T entry_of(const Dict& state, const char* key, const char* expected) {
    const std::string what = "not a state of a Compressor: ";
    if (!state.contains(key)) {
      raise(StatusCode::kInvalidArgument, what + "it lacks '" + key + "'");
    }
    T value;
    if (!nb::try_cast(state[key], value)) {
      const auto found = nb::cast<std::string>(nb::repr(state[key]));
      raise(StatusCode::kInvalidArgument,
            what + "its '" + key + "' is " + found + ", expected " + expected);
    }
    return value;
  }

  // Of a state: bytes, or an array of float32.
  static std::vector<float> values_of(const nb::object& residual) {
    if (!nb::isinstance<nb::bytes>(residual)) {
      const FloatInput array(residual);
      return {array.values().begin(), array.values().end()};
    }
    const ByteInput input(residual);
    if (input.bytes().size() % sizeof(float) != 0) {
      raise(StatusCode::kLengthMismatch, "the state's residual has " +
                                             std::to_string(input.bytes().size()) +
                                             " bytes, which are no whole number of float32");
    }
    std::vector<float> values(input.bytes().size() / sizeof(float));
    std::memcpy(values.data(), input.bytes().data(), values.size() * sizeof(float));
    return values;
  }

  uint64_t encode_to(const InputView& x, std::optional<uint64_t> step, std::span<std::byte> room) {
    return run_encoder([&] {
      const std::lock_guard lock(mutex_);
      const uint64_t this_step = step.value_or(next_step_);
      auto encoded = compressor_.encode(x, this_step, room, execution_);
      if (encoded.ok()) next_step_ = this_step + 1;
      return encoded;
    });
  }

  Compressor compressor_;
  Execution execution_;
  uint64_t next_step_ = 0;
  uint64_t seed_;
  uint64_t stream_;
  std::string target_;
  mutable std::mutex mutex_;  // two threads could call it while the GIL is released
};

}  // namespace

nb::list parameter_dicts(std::initializer_list<std::span<const CodecParameter>> lists) {
  nb::list dicts;
  for (std::span<const CodecParameter> parameters : lists) {
    for (const CodecParameter& parameter : parameters) {
      nb::dict entry;
      entry["name"] = parameter.name;
      entry["default"] = parameter.default_value;
      entry["values"] = parameter.values;
      entry["help"] = parameter.help;
      dicts.append(entry);
    }
  }
  return dicts;
}

void bind_codecs(nb::module_& module) {
  module.def(
      "encode", &encode, nb::arg("x"), nb::arg("codec"), nb::kw_only(), nb::arg("seed") = 0,
      nb::arg("step") = 0, nb::arg("stream") = 0, nb::arg("threads") = 1,
      nb::arg("target") = "auto", nb::arg("dtype") = nb::none(),
      "Encodes an array of any shape into one frame (bytes), without a residual.\n\n"
      "x: C-contiguous float32, bfloat16 or float16 array on the CPU (buffer protocol or "
      "DLPack). codec: its text, "
      "e.g. '3lc:s=1.75'. dtype: 'bfloat16' or 'float16' if x is a uint16 array of such "
      "bits. seed, step, stream: stochastic codecs draw from these numbers; another step for each "
      "call lets their errors average out. Raises "
      "GradwireError; warns NonFiniteWarning naming the element if x holds NaN or Inf "
      "and the codec can't carry it: the frame is then a marker that decodes to NaN. No other "
      "thread may write to x meanwhile; if one does, no other memory is harmed, but "
      "decoders may refuse the frame.");
  module.def(
      "decode", &decode, nb::arg("frame"), nb::kw_only(), nb::arg("threads") = 1,
      nb::arg("target") = "auto", nb::arg("max_numel") = uint64_t{1} << 31,
      nb::arg("dtype") = "float32",
      "Decodes a frame into a new one-dimensional array: float32, float16, or for "
      "'bfloat16', which NumPy doesn't have, uint16 of its bits. Values are "
      "rounded half to even to 16 bits; a raw frame of that dtype comes back bit for bit. Raises "
      "GradwireError; frames of more than max_numel values are refused before memory is taken.");
  module.def(
      "decode_into", &decode_into, nb::arg("frame"), nb::arg("out"), nb::arg("accumulate") = false,
      nb::kw_only(), nb::arg("threads") = 1, nb::arg("target") = "auto",
      "Decodes a frame into `out`, or adds it to `out` if accumulate is true. out: "
      "writable C-contiguous float32 array with as many values as the frame, apart from it in "
      "memory. Raises GradwireError; after corrupt_payload the values of `out` are unspecified.");
  module.def("inspect", &inspect, nb::arg("data"),
             "Header of a frame or a packet as a dict, after its checksum has been checked.");
  module.def("frame_header", &frame_header, nb::arg("data"),
             "As inspect, for a frame alone, and without what only its payload shows.");
  module.def(
      "checksum32", [](ArrayLike data) { return checksum32(ByteInput(data).bytes(), {}); },
      nb::arg("data"),
      "The checksum of these bytes that frames and packets have (spec/format.md).");
  module.def("codecs", &list_codecs,
             "All codecs with parameters, defaults, properties and sources.");
  module.def("codec_names", &list_codec_names,
             "Codecs by what they are good for: `name` stands for `codec` in every codec string.");
  module.def("spell_out_codec", &spell_out_codec, nb::arg("codec"),
             "The codec string with the codec for which its name stands; else as it is.");
  module.def(
      "is_coarse",
      [](const std::string& codec) { return value_or_raise(Codec::parse(codec))->is_coarse(); },
      nb::arg("codec"),
      "Whether a step sends a value rarely, or with an error as large as the value.");
  module.def(
      "scale_growth",
      [](const std::string& codec) { return value_or_raise(Codec::parse(codec))->scale_growth(); },
      nb::arg("codec"),
      "The largest possible ratio of a decoded value to the largest value that was encoded.");
  module.def(
      "max_encoded_size",
      [](const std::string& codec, uint64_t numel) {
        return max_encoded_size(*value_or_raise(Codec::parse(codec)), numel);
      },
      nb::arg("codec"), nb::arg("numel"), "Bytes that a frame of numel values takes at most.");

  nb::class_<PyCompressor>(module, "Compressor",
                           "A codec and its residual for one stream of tensors of numel values: "
                           "error feedback over the steps of a training.")
      .def(nb::init<const std::string&, uint64_t, uint64_t, uint64_t, int, const std::string&>(),
           nb::arg("codec"), nb::arg("numel"), nb::kw_only(), nb::arg("seed") = 0,
           nb::arg("stream") = 0, nb::arg("threads") = 1, nb::arg("target") = "auto")
      .def("encode", &PyCompressor::encode, nb::arg("x"), nb::arg("step") = nb::none(),
           "Encodes x plus the residual into a frame; the codec's error is the new residual. If x "
           "holds NaN or Inf, warns NonFiniteWarning, returns a marker and keeps the residual. "
           "step: codecs that draw take the same random numbers in each call with the same step; "
           "by default it is one more than in the last call, first 0.")
      .def("encode_into", &PyCompressor::encode_into, nb::arg("x"), nb::arg("out"),
           nb::arg("step") = nb::none(),
           "As encode, into a uint8 array of at least max_encoded_size bytes, apart from x in "
           "memory; returns the size.")
      .def_prop_ro("codec", &PyCompressor::codec, "Canonical text of the codec.")
      .def_prop_ro("numel", &PyCompressor::numel)
      .def_prop_ro("max_encoded_size", &PyCompressor::max_encoded_size)
      .def_prop_ro("residual", &PyCompressor::residual, nb::rv_policy::automatic,
                   "A copy of the residual as float32 [numel]; None without error feedback.")
      .def("__getstate__", &PyCompressor::all_state)
      .def("__setstate__", &PyCompressor::construct)
      .def("state_dict", &PyCompressor::state_dict,
           "codec, numel, residual (float32 as bytes, little-endian; None without error feedback) "
           "and next_step: torch.load(weights_only=True) reads it again.")
      .def("load_state_dict", &PyCompressor::load_state_dict, nb::arg("state"),
           "Goes on from a state, bit for bit with the steps that follow. Raises GradwireError for "
           "another codec or numel, for a residual that is not finite, and for a dict that is no "
           "such state. residual: as bytes, or an array.");
}

}  // namespace gradwire::python
