// Goals such as "auto:bits=0.5": trials of their candidates, and the choice among them.

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include "arrays.h"
#include "errors.h"
#include "gil.h"
#include "gradwire/codec_choice.h"
#include "module.h"

namespace gradwire::python {
namespace {

namespace nb = nanobind;

// TensorTrials as numbers: values, input, flowing, then bytes and error of each candidate.
using Row = std::vector<double>;
constexpr size_t kFirstTrial = 3;

struct PyAutoGoal {
  explicit PyAutoGoal(const std::string& text)
      : goal(value_or_raise(parse(text))), candidates(goal.candidates()) {}

  static Result<AutoGoal> parse(const std::string& text) {
    if (AutoGoal::is_goal(text)) return AutoGoal::parse(text);
    return Status(StatusCode::kInvalidArgument,
                  "'" + text + "' is no goal; a goal is auto:bits=... or auto:error=...");
  }

  [[nodiscard]] std::vector<std::string> candidate_texts() const {
    std::vector<std::string> texts;
    for (const auto& codec : candidates) texts.push_back(codec->text());
    return texts;
  }

  [[nodiscard]] size_t row_length() const { return kFirstTrial + 2 * candidates.size(); }

  [[nodiscard]] Row try_candidates(ArrayLike x, std::optional<ArrayLike> residual,
                                   const std::string& in_use, uint64_t sample) const {
    const FloatInput values(x);
    const FloatInput owed = residual ? FloatInput(*residual) : FloatInput();
    if (residual && owed.values().size() != values.values().size()) {
      raise(StatusCode::kLengthMismatch, "the residual is not as long as x");
    }
    const auto used = std::ranges::find_if(
        candidates, [&](const auto& candidate) { return candidate->text() == in_use; });
    const TensorTrials tried = without_gil([&] {
      Execution execution = Execution::create().value();
      return try_codecs(candidates, values.values(),
                        residual ? owed.values() : std::span<const float>(),
                        static_cast<size_t>(used - candidates.begin()), execution, sample);
    });
    Row row = {tried.values, tried.input, tried.flowing};
    for (const Trial& trial : tried.trials) {
      row.push_back(trial.bytes);
      row.push_back(trial.error);
    }
    return row;
  }

  [[nodiscard]] Dict choose(const std::vector<Row>& rows, float limit) const {
    std::vector<TensorTrials> tensors;
    for (const Row& row : rows) {
      if (row.size() != row_length()) {
        raise(StatusCode::kLengthMismatch, "a row has " + std::to_string(row.size()) +
                                               " numbers, expected " +
                                               std::to_string(row_length()));
      }
      TensorTrials& tensor = tensors.emplace_back();
      tensor.values = row[0];
      tensor.input = row[1];
      tensor.flowing = row[2];
      for (size_t at = kFirstTrial; at < row.size(); at += 2) {
        tensor.trials.push_back({.bytes = row[at], .error = row[at + 1]});
      }
    }
    AutoGoal now = goal;
    now.limit = limit;
    const CodecChoice choice = choose_codecs(now, tensors);
    nb::dict entry;
    entry["tensors"] = dicts_of(choice.tensors, [](nb::dict& tensor, const auto& chosen) {
      tensor["candidate"] = chosen.candidate;
      tensor["bits"] = chosen.predicted.bits;
      tensor["error"] = chosen.predicted.error;
    });
    entry["bits"] = choice.predicted.bits;
    entry["error"] = choice.predicted.error;
    entry["possible"] = choice.possible;
    return entry;
  }

  AutoGoal goal;
  std::vector<std::shared_ptr<const Codec>> candidates;
};

}  // namespace

void bind_choice(nb::module_& module) {
  nb::class_<PyAutoGoal>(
      module, "AutoGoal",
      "What a text such as 'auto:bits=0.5' asks for: codecs that are chosen at run time. A row "
      "holds the trials of a tensor: values, input (sum of squares of the step's input), flowing "
      "(bytes with the codec in use), then bytes and error (sum of squares of the residual) of "
      "each candidate, once its residual has settled.")
      .def(nb::init<const std::string&>(), nb::arg("text"))
      .def_prop_ro("text", [](const PyAutoGoal& self) { return self.goal.text(); })
      .def_prop_ro("limits_bits",
                   [](const PyAutoGoal& self) { return self.goal.kind == AutoGoal::Kind::kBits; })
      .def_prop_ro("limit", [](const PyAutoGoal& self) { return self.goal.limit; })
      .def_prop_ro("every", [](const PyAutoGoal& self) { return self.goal.every; })
      .def_prop_ro("largest_s", [](const PyAutoGoal& self) { return self.goal.largest_s; })
      .def_prop_ro(
          "is_coarse", [](const PyAutoGoal& self) { return self.goal.is_coarse(); },
          "Whether it mostly takes codecs that are coarse.")
      .def_prop_ro("candidates", &PyAutoGoal::candidate_texts)
      .def_prop_ro("row_length", &PyAutoGoal::row_length)
      .def(
          "is_due", [](const PyAutoGoal& self, uint64_t steps) { return self.goal.is_due(steps); },
          nb::arg("steps"), "Whether the codecs are decided anew after so many steps.")
      .def_static("is_settled", &AutoGoal::is_settled, nb::arg("steps"),
                  "Whether residuals have grown to their usual size after so many steps.")
      .def(
          "try_candidates", &PyAutoGoal::try_candidates, nb::arg("x"),
          nb::arg("residual") = nb::none(), nb::arg("in_use") = "",
          nb::arg("sample") = uint64_t{1} << 16,
          "The row of a tensor. x: float32, a step's input. residual: before the step. in_use: the "
          "codec of this step. Of more than `sample` values only a sample is tried.")
      .def(
          "choose", &PyAutoGoal::choose, nb::arg("rows"), nb::arg("limit"),
          "The choice for tensors with these rows: tensors (candidate, an index, and its predicted "
          "bits and error), bits (a value, of all tensors), error (relative to the input), "
          "possible "
          "(the nearest to the limit that can be kept). limit: in place of the goal's.");
  module.def("is_goal", &AutoGoal::is_goal, nb::arg("codec"),
             "Whether a codec's text is a goal: 'auto' or 'auto:...'.");
}

}  // namespace gradwire::python
