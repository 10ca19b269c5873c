#include "module.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include "commit.h"
#include "cpu.h"
#include "errors.h"
#include "gradwire/execution.h"

namespace nb = nanobind;

NB_MODULE(_core, module) {
  using namespace gradwire::python;
  require_cpu();
  // Users may keep objects until the interpreter ends, which is not a leak.
  nb::set_leak_warnings(false);
  module.doc() = "The compiled core of gradwire.";
  module.attr("__version__") = GRADWIRE_VERSION;
  bind_errors(module);
  bind_codecs(module);
  bind_choice(module);
  bind_deltas(module);
  bind_layout(module);
  bind_exchange(module);
  bind_server_sides(module);
  bind_simulation(module);
  module.def(
      "simd_targets", [] { return gradwire::simd_targets(); },
      "SIMD targets of this CPU, best first; 'scalar' is the definition.");
  module.def(
      "build_info",
      []() -> nb::typed<nb::dict, nb::str, nb::str> {
        nb::dict info;
        info["commit"] = GRADWIRE_COMMIT;
        info["compiler"] = GRADWIRE_COMPILER;
        info["build_type"] = GRADWIRE_BUILD_TYPE;
        info["flags"] = "-ffp-contract=off";
        info["highway"] = GRADWIRE_HIGHWAY;
        return info;
      },
      "Commit of the sources (\"-dirty\" where they differed from it, \"unknown\" without git), "
      "compiler, build type, flags that matter for the bytes, version of Highway.");
}
