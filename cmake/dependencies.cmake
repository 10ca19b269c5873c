# Each dependency comes from the system's packages if they are installed; else it is fetched.
include(FetchContent)
set(FETCHCONTENT_TRY_FIND_PACKAGE_MODE OPT_IN)

find_package(Threads REQUIRED)

set(HWY_ENABLE_TESTS OFF)
set(HWY_ENABLE_EXAMPLES OFF)
set(HWY_ENABLE_CONTRIB OFF)
# A fetched Highway becomes part of a shared gradwire; with a static gradwire it is installed too.
set(HWY_FORCE_STATIC_LIBS ON)
if(BUILD_SHARED_LIBS)
  set(HWY_ENABLE_INSTALL OFF)
endif()
FetchContent_Declare(hwy
  GIT_REPOSITORY https://github.com/google/highway.git
  GIT_TAG 1.2.0
  GIT_SHALLOW ON
  FIND_PACKAGE_ARGS CONFIG)
FetchContent_MakeAvailable(hwy)
if(NOT TARGET hwy::hwy)
  add_library(hwy::hwy ALIAS hwy)
endif()

# Only the header of xxHash is used (XXH_INLINE_ALL).
find_path(GRADWIRE_XXHASH_INCLUDE xxhash.h)
if(NOT GRADWIRE_XXHASH_INCLUDE)
  FetchContent_Declare(xxhash
    GIT_REPOSITORY https://github.com/Cyan4973/xxHash.git
    GIT_TAG v0.8.2
    GIT_SHALLOW ON)
  FetchContent_Populate(xxhash)
  set(GRADWIRE_XXHASH_INCLUDE ${xxhash_SOURCE_DIR})
endif()
add_library(gradwire_xxhash INTERFACE)
target_include_directories(gradwire_xxhash SYSTEM INTERFACE ${GRADWIRE_XXHASH_INCLUDE})

if(GRADWIRE_TESTS)
  set(INSTALL_GTEST OFF)
  FetchContent_Declare(googletest
    GIT_REPOSITORY https://github.com/google/googletest.git
    GIT_TAG v1.14.0
    GIT_SHALLOW ON
    FIND_PACKAGE_ARGS NAMES GTest)
  FetchContent_MakeAvailable(googletest)
endif()

if(GRADWIRE_BENCH)
  set(BENCHMARK_ENABLE_TESTING OFF)
  set(BENCHMARK_ENABLE_INSTALL OFF)
  FetchContent_Declare(benchmark
    GIT_REPOSITORY https://github.com/google/benchmark.git
    GIT_TAG v1.8.3
    GIT_SHALLOW ON
    FIND_PACKAGE_ARGS)
  FetchContent_MakeAvailable(benchmark)
endif()
