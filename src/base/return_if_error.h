#pragma once

#include <utility>

// Returns the Status of `expression` from the enclosing function if it is not ok.
#define GW_RETURN_IF_ERROR(expression)                                      \
  do {                                                                      \
    if (::gradwire::Status gw_returned = (expression); !gw_returned.ok()) { \
      return gw_returned;                                                   \
    }                                                                       \
  } while (false)

// `declaration` = the value of the Result that follows it. Returns the Status from the enclosing
// function if there is no value.
#define GW_ASSIGN_OR_RETURN(declaration, ...) \
  GW_ASSIGN_FROM_(GW_NAME_OF_LINE_(gw_result_, __LINE__), declaration, __VA_ARGS__)
#define GW_ASSIGN_FROM_(result, declaration, ...) \
  auto result = (__VA_ARGS__);                    \
  if (!result.ok()) return result.status();       \
  declaration = std::move(result).value()
#define GW_NAME_OF_LINE_(name, line) GW_JOIN_(name, line)
#define GW_JOIN_(name, line) name##line
