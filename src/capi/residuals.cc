// An exchange's residuals in C.

#include <memory>

#include "base/return_if_error.h"
#include "capi/errors.h"
#include "capi/handles.h"

using namespace gradwire;
using namespace gradwire::capi;

extern "C" {

gw_status gw_exchange_export_residuals(const gw_exchange* exchange, gw_residuals** residuals) {
  return guarded([&]() -> Status {
    GW_RETURN_IF_ERROR(check_given("exchange", exchange));
    GW_RETURN_IF_ERROR(check_given("residuals", residuals));
    auto handle = std::make_unique<gw_residuals>();
    handle->pieces = exchange->exchange->export_residuals();
    *residuals = handle.release();
    return {};
  });
}

void gw_residuals_free(gw_residuals* residuals) { delete residuals; }

size_t gw_residuals_count(const gw_residuals* residuals) { return residuals->pieces.size(); }

gw_status gw_residuals_at(const gw_residuals* residuals, size_t index, gw_residual_piece* piece) {
  return guarded([&]() -> Status {
    GW_RETURN_IF_ERROR(check_given("residuals", residuals));
    GW_RETURN_IF_ERROR(check_given("piece", piece));
    GW_RETURN_IF_ERROR(check_index(index, residuals->pieces.size()));
    const ResidualPiece& found = residuals->pieces[index];
    *piece = {.role = found.direction == Direction::kPush ? GW_PUSH : GW_PULL,
              .tensor = found.tensor.c_str(),
              .offset = found.offset,
              .n = found.values.size(),
              .values = found.values.data()};
    return {};
  });
}

gw_status gw_exchange_import_residual(gw_exchange* exchange, const gw_residual_piece* piece) {
  return guarded([&]() -> Status {
    GW_RETURN_IF_ERROR(check_given("exchange", exchange));
    GW_RETURN_IF_ERROR(check_given("piece", piece));
    GW_RETURN_IF_ERROR(check_given("the piece's tensor", piece->tensor));
    GW_RETURN_IF_ERROR(check_values("the piece's values", piece->values, piece->n));
    if (piece->role != GW_PUSH && piece->role != GW_PULL) {
      return {StatusCode::kInvalidArgument,
              "a residual is of a push (1) or of a pull (2), not " + std::to_string(piece->role)};
    }
    if (piece->n > kMaxNumel) {
      return {StatusCode::kInvalidArgument,
              "a residual of " + std::to_string(piece->n) + " values: no layout has that place"};
    }
    return exchange->exchange->import_residual(
        {.direction = piece->role == GW_PUSH ? Direction::kPush : Direction::kPull,
         .tensor = piece->tensor,
         .offset = piece->offset,
         .values = {piece->values, piece->values + piece->n}});
  });
}

}  // extern "C"
