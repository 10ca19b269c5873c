#include "stages/kernels.h"

#include <cctype>
#include <cstring>
#include <set>
#include <string>

#include "gtest/gtest.h"
#include "hwy/targets.h"

namespace gradwire {
namespace {

std::set<std::string> names() {
  std::set<std::string> all;
  for (const Kernels* table : available_kernels()) all.insert(table->name);
  return all;
}

TEST(Kernels, ScalarIsLastAndEveryNameIsItsOwn) {
  ASSERT_FALSE(available_kernels().empty());
  EXPECT_STREQ(available_kernels().back()->name, "scalar");
  EXPECT_EQ(names().size(), available_kernels().size());
}

TEST(Kernels, TheBestIsChosenByAuto) {
  EXPECT_EQ(find_kernels("auto"), available_kernels().front());
}

TEST(Kernels, UnknownNamesAreNotFound) {
  EXPECT_EQ(find_kernels(""), nullptr);
  EXPECT_EQ(find_kernels("SCALAR"), nullptr);
  EXPECT_EQ(find_kernels("avx"), nullptr);
}

TEST(Kernels, ANameGivesTheCodeCompiledForIt) {
  for (const Kernels* table : available_kernels()) {
    ASSERT_EQ(find_kernels(table->name), table);
    EXPECT_STREQ(table->compiled_target(), table->name);
  }
}

// No table uses a kernel of another table.
TEST(Kernels, EachTableHasItsOwnCode){
#define GW_KERNEL(result, kernel, ...)                                              \
  {                                                                                 \
    std::set<decltype(Kernels::kernel)> code;                                       \
    for (const Kernels* table : available_kernels()) {                              \
      EXPECT_TRUE(code.insert(table->kernel).second) << table->name << " " #kernel; \
    }                                                                               \
  }
#include "stages/kernels.def"
#undef GW_KERNEL
}

// Every target that Highway detects on this CPU must be offered.
TEST(Kernels, EveryTargetOfThisCpuIsThere) {
  for (int64_t target : hwy::SupportedAndGeneratedTargets()) {
    if (target == HWY_SCALAR || target == HWY_EMU128) continue;
    std::string name = hwy::TargetName(target);
    for (char& c : name) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
    EXPECT_TRUE(names().contains(name)) << name;
  }
}

}  // namespace
}  // namespace gradwire
