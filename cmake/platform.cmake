# Refuses processors on which gradwire would not compile, or would give other bytes. As a script, it
# checks the values that it is given: cmake -DCMAKE_SIZEOF_VOID_P=4 -P cmake/platform.cmake.
if(NOT CMAKE_SIZEOF_VOID_P EQUAL 8)
  math(EXPR bits "8 * ${CMAKE_SIZEOF_VOID_P}")
  message(FATAL_ERROR "gradwire needs a processor with 64-bit addresses; this compiler makes code for "
    "${bits} bits. Tensors may be larger than such a program can address.")
endif()
if(CMAKE_CXX_BYTE_ORDER STREQUAL "BIG_ENDIAN")
  message(FATAL_ERROR "gradwire needs a little-endian processor; ${CMAKE_SYSTEM_PROCESSOR} is "
    "big-endian. Floats go into frames as they lie in memory.")
endif()
