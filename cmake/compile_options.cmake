# gradwire_options: what every target of this project is compiled with.
add_library(gradwire_options INTERFACE)
target_compile_options(gradwire_options INTERFACE
  # The same bytes everywhere: a compiler that fuses a multiplication with an addition changes them.
  -ffp-contract=off
  -Wall -Wextra -Wpedantic -Wshadow -Wconversion -Wno-sign-conversion)
if(GRADWIRE_WERROR)
  target_compile_options(gradwire_options INTERFACE -Werror)
endif()

if(GRADWIRE_SANITIZE STREQUAL "address")
  set(gradwire_sanitizers address,undefined)
elseif(GRADWIRE_SANITIZE STREQUAL "thread")
  set(gradwire_sanitizers thread)
elseif(GRADWIRE_SANITIZE)
  message(FATAL_ERROR "GRADWIRE_SANITIZE is '${GRADWIRE_SANITIZE}'; valid: address, thread or empty")
endif()
if(gradwire_sanitizers)
  add_compile_options(-fsanitize=${gradwire_sanitizers} -fno-sanitize-recover=all -fno-omit-frame-pointer)
  add_link_options(-fsanitize=${gradwire_sanitizers})
endif()
