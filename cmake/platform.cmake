# Refuses processors on which gradwire would not compile, or would give other bytes. As a script, it
# checks the values that it is given: cmake -DCMAKE_SIZEOF_VOID_P=4 -P cmake/platform.cmake.
if("${CMAKE_SIZEOF_VOID_P}" STREQUAL "")
  message(FATAL_ERROR "gradwire needs a processor with 64-bit addresses; CMake could not find out "
    "how long those of ${CMAKE_SYSTEM_PROCESSOR} are: this compiler can't build a test program.")
endif()
if(NOT CMAKE_SIZEOF_VOID_P EQUAL 8)
  math(EXPR bits "8 * ${CMAKE_SIZEOF_VOID_P}")
  message(FATAL_ERROR "gradwire needs a processor with 64-bit addresses; this compiler makes code for "
    "${bits} bits. Tensors may be larger than such a program can address.")
endif()
if("${CMAKE_CXX_BYTE_ORDER}" STREQUAL "")
  # Such as a build for several processors at once. src/base/endian.h has a static_assert.
  message(WARNING "gradwire needs a little-endian processor; CMake could not find out the byte order "
    "of ${CMAKE_SYSTEM_PROCESSOR}. If it is big-endian, the compilation stops in src/base/endian.h.")
elseif(CMAKE_CXX_BYTE_ORDER STREQUAL "BIG_ENDIAN")
  message(FATAL_ERROR "gradwire needs a little-endian processor; ${CMAKE_SYSTEM_PROCESSOR} is "
    "big-endian. Floats go into frames as they lie in memory.")
endif()
