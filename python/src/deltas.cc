// Deltas of arrays (gradwire/delta.h).

#include <optional>
#include <span>
#include <string>

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include "arrays.h"
#include "errors.h"
#include "executions.h"
#include "gil.h"
#include "gradwire/delta.h"
#include "module.h"

namespace gradwire::python {
namespace {

namespace nb = nanobind;

DeltaElement parse_element(uint64_t width, bool is_float) {
  for (int log = 0; log <= 2; ++log) {
    if (width == uint64_t{1} << log) return static_cast<DeltaElement>(log + (is_float ? 16 : 0));
  }
  raise(StatusCode::kUnsupportedDtype,
        "elements have 1, 2 or 4 bytes, not " + std::to_string(width));
}

std::span<std::byte> writable(const ByteOutput& output) {
  return std::as_writable_bytes(output.values());
}

Dict describe(const EncodedDelta& written) {
  nb::dict info;
  info["size"] = written.size;
  info["changed"] = written.changed;
  info["base_digest"] = written.base_digest;
  info["result_digest"] = written.result_digest;
  return info;
}

Dict encode(ArrayLike base, ArrayLike result, ArrayLike delta, uint64_t width, bool is_float,
            bool follow, std::optional<uint64_t> base_digest, int threads,
            const std::string& target) {
  const ByteOutput from(base);
  const ByteInput to(result);
  const ByteOutput out(delta);
  require_apart(writable(from), writable(out));
  require_apart(to.bytes(), writable(out));
  const DeltaElement element = parse_element(width, is_float);
  Execution& execution = execution_for(target, threads);
  return describe(value_or_raise(without_gil([&] {
    return encode_delta(element, writable(from), to.bytes(),
                        follow ? DeltaBase::kFollow : DeltaBase::kKeep, writable(out), execution,
                        base_digest);
  })));
}

Dict inspect(ArrayLike data) {
  const ByteInput input(data);
  const Delta delta = value_or_raise(without_gil([&] { return parse_delta(input.bytes()); }));
  nb::dict info =
      describe({input.bytes().size(), delta.changed, delta.base_digest, delta.result_digest});
  info["n"] = delta.n;
  info["width"] = width_of(delta.element);
  info["is_float"] = delta.element >= DeltaElement::kFloat8;
  return info;
}

void apply(ArrayLike data, ArrayLike values, int threads, const std::string& target) {
  const ByteInput input(data);
  const ByteOutput output(values);
  require_apart(input.bytes(), writable(output));
  Execution& execution = execution_for(target, threads);
  raise_if_error(without_gil([&] {
    const auto delta = parse_delta(input.bytes());
    return delta.ok() ? apply_delta(delta.value(), writable(output), execution) : delta.status();
  }));
}

// A delta that was decoded, and its bytes, from which dense chunks still are.
class DecodedDelta {
 public:
  DecodedDelta(ArrayLike data, int threads, const std::string& target) : input_(data) {
    delta_ = value_or_raise(without_gil([&] { return parse_delta(input_.bytes()); }));
    Execution& execution = execution_for(target, threads);
    raise_if_error(without_gil([&] { return decode_delta(delta_, execution); }));
  }

  void apply(ArrayLike values, int threads, const std::string& target) const {
    const ByteOutput output(values);
    require_apart(input_.bytes(), writable(output));
    Execution& execution = execution_for(target, threads);
    raise_if_error(without_gil([&] { return apply_delta(delta_, writable(output), execution); }));
  }

 private:
  ByteInput input_;
  Delta delta_;
};

Dict fold(ArrayLike first, ArrayLike second, ArrayLike folded, int threads,
          const std::string& target) {
  const ByteInput before(first);
  const ByteInput after(second);
  const ByteOutput out(folded);
  require_apart(before.bytes(), writable(out));
  require_apart(after.bytes(), writable(out));
  Execution& execution = execution_for(target, threads);
  const Delta one = value_or_raise(parse_delta(before.bytes()));
  const Delta two = value_or_raise(parse_delta(after.bytes()));
  return describe(
      value_or_raise(without_gil([&] { return fold_deltas(one, two, writable(out), execution); })));
}

}  // namespace

void bind_deltas(nb::module_& module) {
  module.def(
      "encode_delta", &encode, nb::arg("base"), nb::arg("result"), nb::arg("delta"), nb::kw_only(),
      nb::arg("width"), nb::arg("is_float"), nb::arg("follow"), nb::arg("base_digest") = nb::none(),
      nb::arg("threads") = 1, nb::arg("target") = "auto",
      "Writes to `delta` how the bytes of `base` become `result`, elements of `width` bytes; "
      "`follow` makes `base` equal to `result`. All are uint8 arrays. Returns size, changed, "
      "base_digest and result_digest.");
  module.def(
      "max_delta_size",
      [](uint64_t n, uint64_t width) { return max_delta_size(parse_element(width, false), n); },
      nb::arg("n"), nb::arg("width"), "The bytes that encode_delta and fold_deltas need.");
  module.def("inspect_delta", &inspect, nb::arg("data"), "The header of a delta.");
  module.def("apply_delta", &apply, nb::arg("delta"), nb::arg("values"), nb::kw_only(),
             nb::arg("threads") = 1, nb::arg("target") = "auto",
             "Makes the base in `values`, a uint8 array, the result, in place.");
  nb::class_<DecodedDelta>(module, "DecodedDelta",
                           "A delta that is decoded before it is applied, which is faster then. It "
                           "takes two bits for each element of a chunk that it changes, or more.")
      .def(nb::init<ArrayLike, int, const std::string&>(), nb::arg("data"), nb::kw_only(),
           nb::arg("threads") = 1, nb::arg("target") = "auto")
      .def("apply", &DecodedDelta::apply, nb::arg("values"), nb::kw_only(), nb::arg("threads") = 1,
           nb::arg("target") = "auto", "As apply_delta does.");
  module.def("fold_deltas", &fold, nb::arg("first"), nb::arg("second"), nb::arg("folded"),
             nb::kw_only(), nb::arg("threads") = 1, nb::arg("target") = "auto",
             "Writes one delta for two that follow each other.");
  module.def(
      "digest_array",
      [](ArrayLike array, int threads) {
        const ByteInput input(array);
        Execution& execution = execution_for("auto", threads);
        return without_gil([&] { return digest_array(input.bytes(), execution); });
      },
      nb::arg("array"), nb::kw_only(), nb::arg("threads") = 1,
      "The digest of an array's bytes that deltas have (spec/format.md).");
}

}  // namespace gradwire::python
