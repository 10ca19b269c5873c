#include "exchange/steps/received.h"

namespace gradwire {

void ReceivedPacket::keep() {
  if (kept || message.empty()) return;
  kept = std::make_shared<const std::vector<std::byte>>(message.begin(), message.end());
  for (PacketFrame& frame : packet.frames) {
    frame.payload = {kept->data() + (frame.payload.data() - message.data()), frame.payload.size()};
  }
  message = *kept;
}

}  // namespace gradwire
