#include "errors.h"

#include <nanobind/stl/string.h>

namespace gradwire::python {
namespace {

namespace nb = nanobind;

// These are never released, because errors may be raised as long as the interpreter runs.
PyObject* error_type = nullptr;
PyObject* warning_type = nullptr;

}  // namespace

void bind_errors(nb::module_& module) {
  error_type = PyErr_NewExceptionWithDoc(
      "gradwire.GradwireError",
      "Says what gradwire refused, and why. `code` names the status, as in spec/format.md: "
      "'bad_parameter', 'checksum_mismatch', ...",
      PyExc_ValueError, nullptr);
  warning_type = PyErr_NewExceptionWithDoc(
      "gradwire.NonFiniteWarning",
      "The input held NaN or Inf: the frame is a marker that decodes to NaN, the residual is kept.",
      PyExc_RuntimeWarning, nullptr);
  if (error_type == nullptr || warning_type == nullptr) throw nb::python_error();
  module.attr("GradwireError") = nb::handle(error_type);
  module.attr("NonFiniteWarning") = nb::handle(warning_type);
}

void import_errors() {
  const nb::module_ core = nb::module_::import_("gradwire._core");
  error_type = nb::object(core.attr("GradwireError")).release().ptr();
  warning_type = nb::object(core.attr("NonFiniteWarning")).release().ptr();
}

void raise(const Status& status) {
  nb::object error = nb::handle(error_type)(status.message());
  error.attr("code") = std::string(status_name(status.code()));
  PyErr_SetObject(error_type, error.ptr());
  throw nb::python_error();
}

void warn_non_finite(const Status& status) {
  if (PyErr_WarnEx(warning_type, status.message().c_str(), 1) != 0) throw nb::python_error();
}

}  // namespace gradwire::python
