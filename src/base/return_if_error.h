#pragma once

// Leaves the enclosing function with the Status of `expression` where that is not ok.
#define GW_RETURN_IF_ERROR(expression)                                      \
  do {                                                                      \
    if (::gradwire::Status gw_returned = (expression); !gw_returned.ok()) { \
      return gw_returned;                                                   \
    }                                                                       \
  } while (false)
