// Parses any text as a codec, as a goal for codecs and as an exchange. What is accepted must be
// equal after its canonical text is parsed again; what is refused must be explained.

#include <string>
#include <string_view>

#include "fuzzing.h"
#include "gradwire/codec_choice.h"
#include "gradwire/exchange.h"
#include "gradwire/exchange_choice.h"

namespace {

using namespace gradwire;
using namespace gradwire::fuzzing;

void explained(const Status& status) {
  require(!status.message().empty(), "a refusal without a message");
}

void check_codec(std::string_view text) {
  const auto codec = Codec::parse(text);
  if (!codec.ok()) return explained(codec.status());
  const Codec& parsed = *codec.value();
  const auto again = Codec::parse(parsed.text());
  require(again.ok() && again.value()->text() == parsed.text(), "the text of a codec changes");
  require(again.value()->wire() == parsed.wire(), "the text of a codec gives another codec");
  require(again.value()->residual_type() == parsed.residual_type(),
          "the text of a codec gives another residual");
  const auto received = Codec::from_wire(parsed.wire());
  require(received.ok(), "a codec has no wire");
  const auto of_text = Codec::parse(received.value()->wire_text());
  require(of_text.ok() && of_text.value()->wire_text() == received.value()->wire_text(),
          "the text of a received codec changes");
  for (const uint64_t n : {uint64_t{0}, uint64_t{1}, uint64_t{40961}, kMaxNumel}) {
    require(parsed.max_payload_size(n) >= parsed.max_payload_size(n / 2),
            "fewer values need more room");
  }
}

void check_goal(std::string_view text) {
  if (!AutoGoal::is_goal(text)) return;
  const auto goal = AutoGoal::parse(text);
  if (!goal.ok()) return explained(goal.status());
  const auto again = AutoGoal::parse(goal.value().text());
  require(again.ok() && again.value().text() == goal.value().text(), "the text of a goal changes");
  require(!goal.value().candidates().empty(), "a goal without candidates");
}

void check_exchange(std::string_view text) {
  const auto choice = ExchangeChoice::parse(text);
  if (!choice.ok()) {
    explained(choice.status());
  } else {
    const auto again = ExchangeChoice::parse(choice.value().text());
    require(again.ok() && again.value().text() == choice.value().text(),
            "the text of an exchange changes");
  }
  static const auto layout =
      std::make_shared<const Layout>(Layout::create({{"a", {3, 5}}}, 2, {.codec = "raw"}).value());
  auto made = make_exchange(text, layout, 0, Execution::create("scalar").value());
  if (!made.ok()) return explained(made.status());
  require(choice.ok(), "an exchange is made from a text that is refused");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string text(reinterpret_cast<const char*>(data), size);
  check_codec(text);
  check_goal(text);
  check_exchange(text);
  return 0;
}
