# gradwire_options: what every target of this project is compiled with.
add_library(gradwire_options INTERFACE)
# A compiler that fuses a multiplication with an addition would change the bytes.
set(gradwire_flags -ffp-contract=off -Wall -Wextra -Wshadow -Wconversion -Wno-sign-conversion)
set(gradwire_cuda_flags --fmad=false)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  list(APPEND gradwire_flags -Wno-restrict) # false alarms about std::string with -O3
endif()
if(GRADWIRE_WERROR)
  list(APPEND gradwire_flags -Werror)
  list(APPEND gradwire_cuda_flags -Werror=all-warnings)
endif()
# nvcc generates code for the host's compiler that -Wpedantic refuses.
list(JOIN gradwire_flags "," host_flags)
target_compile_options(gradwire_options INTERFACE
  "$<$<COMPILE_LANGUAGE:CXX>:${gradwire_flags};-Wpedantic>"
  "$<$<COMPILE_LANGUAGE:CUDA>:${gradwire_cuda_flags};-Xcompiler=${host_flags}>")

# Damage of memory ends the process at once instead of going on with it.
if(GRADWIRE_HARDENED AND NOT GRADWIRE_SANITIZE)
  target_compile_options(gradwire_options INTERFACE
    $<$<COMPILE_LANGUAGE:CXX,C>:-fstack-protector-strong;-D_GLIBCXX_ASSERTIONS>
    $<$<AND:$<COMPILE_LANGUAGE:CXX,C>,$<CONFIG:Release,RelWithDebInfo,MinSizeRel>>:-U_FORTIFY_SOURCE;-D_FORTIFY_SOURCE=3>)
  if(NOT APPLE) # whose linker has no such options
    set(gradwire_link_options LINKER:-z,relro,-z,now,-z,noexecstack)
    target_link_options(gradwire_options INTERFACE ${gradwire_link_options})
  endif()
endif()

if(GRADWIRE_SANITIZE STREQUAL "address")
  set(gradwire_sanitizers address,undefined)
elseif(GRADWIRE_SANITIZE STREQUAL "thread")
  set(gradwire_sanitizers thread)
elseif(GRADWIRE_SANITIZE)
  message(FATAL_ERROR "GRADWIRE_SANITIZE is '${GRADWIRE_SANITIZE}'; valid: address, thread or empty")
endif()
if(GRADWIRE_SANITIZE STREQUAL "address")
  add_compile_definitions(GRADWIRE_ADDRESS_SANITIZER) # for tests that must know
endif()
if(gradwire_sanitizers)
  add_compile_options(-fsanitize=${gradwire_sanitizers} -fno-sanitize-recover=all -fno-omit-frame-pointer)
  add_link_options(-fsanitize=${gradwire_sanitizers})
endif()
