#include "stages/kernels.h"

#include "stages/kernel_tables.h"

namespace gradwire {

std::span<const Kernels* const> available_kernels() {
  static const std::vector<const Kernels*> tables = [] {
    std::vector<const Kernels*> found;
    append_simd_kernels(found);
    found.push_back(&scalar_kernels());
    return found;
  }();
  return tables;
}

const Kernels* find_kernels(std::string_view name) {
  const std::span<const Kernels* const> tables = available_kernels();
  if (name == "auto") return tables.front();
  for (const Kernels* table : tables) {
    if (name == table->name) return table;
  }
  return nullptr;
}

}  // namespace gradwire
