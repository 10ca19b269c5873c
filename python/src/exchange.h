#pragma once

#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include <nanobind/nanobind.h>

#include "arrays.h"
#include "errors.h"
#include "gil.h"
#include "gradwire/direction.h"
#include "gradwire/exchange.h"
#include "gradwire/layout.h"

namespace gradwire::python {

namespace nb = nanobind;

// Parses "push", "pull" or "both"; nullopt stands for both.
[[nodiscard]] std::optional<Direction> parse_direction(const std::string& text);
// The same for what has one direction: raises for "both". what: "a residual".
[[nodiscard]] Direction parse_one_direction(const std::string& text, const std::string& what);

struct PyLayout {
  std::shared_ptr<const Layout> layout;
};

// A Python function that an exchange calls. No exception may pass through the exchange, so an
// exception is kept until the exchange has returned.
class Callback {
 public:
  explicit Callback(nb::callable call) : call_(std::move(call)) {}

  template <typename... Arguments>
  Status operator()(Arguments... arguments) {
    const GilHeld held;
    if (!call_.is_valid()) return {StatusCode::kInvalidArgument, "the exchange was dropped"};
    try {
      call_(arguments...);
      return {};
    } catch (...) {
      raised_ = std::current_exception();
      return {StatusCode::kInvalidArgument, "the exchange's callback raised an exception"};
    }
  }

  void rethrow() {
    if (raised_) std::rethrow_exception(std::exchange(raised_, nullptr));
  }

  // For Python's garbage collector: the function may be a method of the exchange's owner.
  int traverse(visitproc visit, void* arg) {
    Py_VISIT(call_.ptr());
    return 0;
  }
  void clear() { call_.reset(); }

 private:
  nb::callable call_;
  std::exception_ptr raised_;
};

class PyExchange {
 public:
  enum class Place : uint8_t { kHost, kDevice };  // the memory of the buckets

  PyExchange(std::unique_ptr<Exchange> exchange, std::shared_ptr<Callback> callback,
             Place place = Place::kHost)
      : callback_(std::move(callback)), exchange_(std::move(exchange)), place_(place) {}

  Exchange& exchange() { return *exchange_; }
  [[nodiscard]] Callback* callback() const { return callback_.get(); }

  // events: an object with the methods of StepEvents, which raise nothing, or None.
  void start(ArrayLike bucket, uint64_t step, nb::object events) {
    require_place(Place::kHost);
    const std::span<float> values = lend(bucket);
    set_events(std::move(events));
    run([&] { return exchange_->start(values, step); });
    give_back();
  }
  [[nodiscard]] nb::handle events() const { return events_; }
  void drop_events() { events_.reset(); }

  // Keeps the memory alive.
  void keep_residuals_in(ArrayLike memory) {
    ByteOutput array(memory);
    const std::span<std::byte> bytes = std::as_writable_bytes(array.values());
    if (bytes.size() != exchange_->residual_bytes()) {
      raise(StatusCode::kLengthMismatch, "the memory has " + std::to_string(bytes.size()) +
                                             " bytes, the residuals have " +
                                             std::to_string(exchange_->residual_bytes()));
    }
    if (reinterpret_cast<uintptr_t>(bytes.data()) % alignof(float) != 0) {
      raise(StatusCode::kInvalidArgument,
            "the memory's address is no multiple of 4, as residuals need; pass another array");
    }
    exchange_->keep_residuals_in(bytes);
    residuals_ = std::move(array);
  }

  // Keeps the bucket alive.
  std::span<float> lend(ArrayLike bucket) {
    bucket_ = FloatOutput(bucket);
    return bucket_.values();
  }

  void start_on_device(uintptr_t address, uint64_t numel, uint64_t step) {
    require_place(Place::kDevice);
    if (address == 0 && numel > 0) {
      raise(StatusCode::kInvalidArgument,
            "start_on_device: the address is 0; the bucket was freed");
    }
    auto* values = reinterpret_cast<float*>(address);  // NOLINT(performance-no-int-to-ptr)
    run([&] { return exchange_->start({values, numel}, step); });
  }

  void receive(uint32_t peer, ArrayLike message) {
    const ByteInput input(message);
    run([&] { return exchange_->receive(peer, input.bytes()); });
    give_back();
  }

 private:
  // Lets go of the bucket of a step that is done, whose memory may be the caller's largest. Ranks
  // that go on at their own pace still work in it.
  void give_back() {
    if (!exchange_->done() || !exchange_->listening().empty()) return;
    bucket_ = {};
    events_ = {};
  }

  void set_events(nb::object events);

  // Raises unless the exchange takes buckets in memory of this kind and no step is under way.
  void require_place(Place place) const {
    if (place != place_) {
      raise(StatusCode::kInvalidArgument,
            place_ == Place::kDevice
                ? "start: the exchange's buckets are on a device (start_on_device)"
                : "start_on_device: the exchange has no shard_codecs of a device");
    }
    if (!exchange_->done()) {
      raise(StatusCode::kUnexpectedMessage, "start: the step before has not ended");
    }
  }

  // Runs call() without the GIL. An exception of the callback is raised again.
  template <typename Call>
  void run(const Call& call) {
    const Status status = without_gil([&] {
      const std::lock_guard lock(mutex_);
      return call();
    });
    if (callback_) callback_->rethrow();
    raise_if_error(status);
  }

  std::shared_ptr<Callback> callback_;  // null if the exchange calls nothing
  std::unique_ptr<Exchange> exchange_;
  Place place_;
  FloatOutput bucket_;    // kept alive while the exchange works in it
  nb::object events_;     // of the step under way
  ByteOutput residuals_;  // kept alive while the residuals lie in it
  std::mutex mutex_;      // two threads could call it while the GIL is released
};

// Slots of PyExchange and its subclasses, by which the garbage collector sees the callback.
extern PyType_Slot exchange_slots[];

}  // namespace gradwire::python
