// The exchanges that an all-reduce may take, by name.

#include <cfenv>
#include <cmath>
#include <limits>

#include "gtest/gtest.h"

#include "engines/loopback/loopback.h"
#include "tests/mpi/ranks.h"

namespace gradwire::mpi {
namespace {

constexpr uint64_t kN = 20000;

Options chosen(const std::string& exchange, const std::string& codec) {
  return {.codec = codec, .exchange = exchange};
}

std::vector<float> reduced(std::vector<float> values, Options options, Reduction reduction) {
  const FreshWorld fresh;
  options.seed = fresh.seed();
  const Status status = all_reduce(MPI_IN_PLACE, values.data(), values.size(), Dtype::kFloat32,
                                   reduction, fresh.comm(), options);
  EXPECT_TRUE(status.ok()) << status.message();
  return values;
}

std::vector<float> sum_of_whole_numbers(uint64_t n) {
  std::vector<float> sum(n);
  for (uint32_t rank = 0; rank < world_size(); ++rank) {
    const std::vector<float> values = whole_numbers(rank, n);
    for (uint64_t i = 0; i < n; ++i) sum[i] += values[i];
  }
  return sum;
}

TEST(ExchangeChoice, WithoutACodecEachExchangeTakesItsDefault) {
  std::vector<float> values(kN);
  for (const ExchangeInfo* exchange : exchanges()) {
    if (exchange->has_servers) continue;
    const Result<Operation> operation =
        all_reduce_init(MPI_IN_PLACE, values.data(), kN, Dtype::kFloat32, Reduction::kAverage,
                        MPI_COMM_WORLD, {.exchange = std::string(exchange->name)});
    ASSERT_TRUE(operation.ok()) << exchange->name << ": " << operation.status().message();
    EXPECT_EQ(operation.value().layout().segments()[0].push_codec->text(),
              Codec::parse(exchange->default_codec).value()->text());
    // What keeps no residual must not take a codec that needs one.
    Result<Operation> started =
        iall_reduce(MPI_IN_PLACE, values.data(), kN, Dtype::kFloat32, Reduction::kAverage,
                    MPI_COMM_WORLD, {.exchange = std::string(exchange->name)});
    ASSERT_TRUE(started.ok()) << exchange->name << ": " << started.status().message();
    EXPECT_EQ(started.value().layout().segments()[0].push_codec->text(), kCodecWithoutResidual);
    EXPECT_TRUE(started.value().wait().ok());
  }
}

TEST(ExchangeChoice, HierarchicalSumsAreExactWhereTheCodecIs) {
  for (const char* exchange :
       {"hierarchical", "hierarchical:between=ring,ranks=1", "hierarchical:ranks=2",
        "hierarchical:between=ring,ranks=3", "hierarchical:between=ring,within=ring,ranks=2"}) {
    for (uint64_t n : {uint64_t{0}, uint64_t{1}, kN}) {
      const std::vector<float> expected = sum_of_whole_numbers(n);
      const Options options = chosen(exchange, "raw");
      EXPECT_EQ(reduced(whole_numbers(my_rank(), n), options, Reduction::kSum), expected);
      const std::vector<float> average =
          reduced(whole_numbers(my_rank(), n), options, Reduction::kAverage);
      for (uint64_t i = 0; i < n; ++i) {
        ASSERT_NEAR(average[i], expected[i] / static_cast<float>(world_size()), 1e-4) << exchange;
      }
    }
  }
}

TEST(ExchangeChoice, HierarchicalGivesTheBitsOfTheExchangeStepByStep) {
  std::vector<uint32_t> machines;
  for (uint32_t rank = 0; rank < world_size(); ++rank) machines.push_back(rank / 2);
  const auto layout = std::make_shared<const Layout>(
      Layout::create({{"buffer", {kN, 1}}}, machines.back() + 1, {.codec = "3lc"}).value());
  std::vector<std::unique_ptr<Exchange>> exchanges;
  std::vector<Exchange*> pointers;
  for (uint32_t rank = 0; rank < world_size(); ++rank) {
    exchanges.push_back(make_exchange("hierarchical:between=sharded", layout, rank,
                                      Execution::create().value(),
                                      {.reduction = Reduction::kSum, .machine_of_rank = machines})
                            .value());
    pointers.push_back(exchanges.back().get());
  }
  std::vector<float> values(kN);
  std::vector<float> result(kN);
  Result<Operation> operation =
      all_reduce_init(values.data(), result.data(), kN, Dtype::kFloat32, Reduction::kSum,
                      MPI_COMM_WORLD, chosen("hierarchical:between=sharded,ranks=2", "3lc"));
  ASSERT_TRUE(operation.ok()) << operation.status().message();
  for (uint64_t step = 0; step < 3; ++step) {
    std::vector<std::vector<float>> inputs = inputs_of_all(kN, step);
    values = inputs[my_rank()];
    std::vector<std::span<float>> buckets(inputs.begin(), inputs.end());
    ASSERT_TRUE(run_loopback_step(pointers, buckets, step).ok());
    ASSERT_TRUE(operation.value().start().ok());
    const Status status = operation.value().wait();
    ASSERT_TRUE(status.ok()) << status.message();
    EXPECT_EQ(std::memcmp(result.data(), inputs[0].data(), kN * sizeof(float)), 0);
    EXPECT_TRUE(same_on_all_ranks(result));
  }
}

TEST(ExchangeChoice, RanksThatShareMemoryAreOneMachineAndSendUncompressed) {
  const std::vector<float> expected = sum_of_whole_numbers(kN);
  // All ranks of this test share memory, so 3lc encodes nothing.
  EXPECT_EQ(reduced(whole_numbers(my_rank(), kN), chosen("hierarchical", "3lc"), Reduction::kSum),
            expected);
}

TEST(ExchangeChoice, TernGradsSumIsItsAverageTimesTheRanks) {
  for (const char* exchange : {"terngrad", "hierarchical:between=terngrad,ranks=1"}) {
    const Options options = chosen(exchange, "terngrad");
    const std::vector<float> input = input_of(my_rank(), kN, 1);
    const std::vector<float> average = reduced(input, options, Reduction::kAverage);
    const std::vector<float> sum = reduced(input, options, Reduction::kSum);
    EXPECT_TRUE(same_on_all_ranks(average));
    EXPECT_TRUE(same_on_all_ranks(sum));
    if (my_rank() == 0) std::fesetround(FE_UPWARD);  // is the program's own matter
    const std::vector<float> upward = reduced(input, options, Reduction::kSum);
    std::fesetround(FE_TONEAREST);
    EXPECT_TRUE(same_on_all_ranks(upward));
    uint64_t drawn = 0;
    for (uint64_t i = 0; i < kN; ++i) {
      ASSERT_EQ(sum[i], average[i] * static_cast<float>(world_size()));
      drawn += average[i] != 0 ? 1 : 0;
    }
    EXPECT_GT(drawn, 0u);
    // The mean of many draws is near the mean of the inputs.
    double total = 0;
    double exact = 0;
    for (float value : average) total += value;
    for (const std::vector<float>& values : inputs_of_all(kN, 1)) {
      for (float value : values) exact += value / static_cast<double>(world_size());
    }
    EXPECT_NEAR(total / kN, exact / kN, 0.06);
  }
}

TEST(ExchangeChoice, TernGradRefusesCodecsWithResiduals) {
  std::vector<float> values(kN);
  const Status status = all_reduce_init(MPI_IN_PLACE, values.data(), kN, Dtype::kFloat32,
                                        Reduction::kSum, MPI_COMM_WORLD, chosen("terngrad", "3lc"))
                            .status();
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_TRUE(contains(status.message(), "3lc")) << status.message();
}

TEST(ExchangeChoice, MachinesThatDifferAreNamed) {
  if (world_size() < 3) return;
  std::vector<float> values(100, 1.0f);
  const bool odd = my_rank() == world_size() - 1;
  const Options options =
      chosen(odd ? "hierarchical:between=ring,ranks=2" : "hierarchical:between=ring", "raw");
  const Status status = all_reduce(MPI_IN_PLACE, values.data(), 100, Dtype::kFloat32,
                                   Reduction::kSum, MPI_COMM_WORLD, options);
  EXPECT_EQ(status.code(), StatusCode::kPeerMismatch);
  EXPECT_TRUE(contains(status.message(), "rank 2 on machine 1")) << status.message();
}

}  // namespace
}  // namespace gradwire::mpi
